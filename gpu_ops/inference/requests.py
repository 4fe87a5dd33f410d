"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from gpu_ops.core import checks
from gpu_ops.ops.sampling.sample import sampling_number

__all__ = ["Request", "Sampling", "Token"]


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn: the options of :func:`gpu_ops.sample`. The default is greedy.

    The repetition penalty is for tokens of the prompt and for those that were drawn, the other ones for the latter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    """The same seed gives the same tokens whatever else is in the batch."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name != "seed":
                sampling_number("Sampling", option.name, True, getattr(self, option.name))
        checks.integer("Sampling", "seed", self.seed, low=0, high=2**63 - 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know how often each token has occurred."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Token:
    """A token that a request has received."""

    request: int
    token: int
    logprob: float
    """Under the model's own distribution."""
    finished: str = ""
    """Why it is the last of the request: ``"stop"``; ``"length"``; ``"error"``: the logits have NaN, token is -1."""


@dataclass
class Request:
    """A text: the prompt, and what has been drawn. ``handle``: its sequence in the cache; -1 while it waits."""

    number: int
    tokens: list[int]
    prompt: int
    """How many of the tokens the prompt is."""
    most: int
    stop: frozenset[int]
    sampling: Sampling
    handle: int = -1
    counts: Any = field(default=None, repr=False)
    prefix: int = 0
    """Equal numbers: equal first tokens, as many as are worth a cascade."""
