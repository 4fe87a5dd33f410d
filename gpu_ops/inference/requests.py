"""Requests to an engine, and the tokens it returns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from gpu_ops.core import checks
from gpu_ops.ops.sampling.sample import sampling_number

__all__ = ["Request", "Sampling", "Token"]


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a request, those of :func:`gpu_ops.sample`. The default is greedy.

    The repetition penalty applies to tokens of the prompt and to drawn tokens, other penalties only to drawn ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    """Seed; the same one gives the same tokens, independent of the rest of the batch."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name != "seed":
                sampling_number("Sampling", option.name, True, getattr(self, option.name))
        checks.integer("Sampling", "seed", self.seed, low=0, high=2**63 - 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs the number of times that each token has occurred."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Token:
    """Token that a request has received."""

    request: int
    token: int
    logprob: float
    """Log-probability under the model's unmodified distribution."""
    finished: str = ""
    """Reason for the request's end: ``"stop"``; ``"length"``; ``"error"``: the logits have NaN, token is -1."""


@dataclass
class Request:
    """Text: the prompt and the drawn tokens. ``handle``: its sequence in the cache; -1 while it waits."""

    number: int
    tokens: list[int]
    prompt: int
    """Number of tokens of the prompt."""
    most: int
    stop: frozenset[int]
    sampling: Sampling
    handle: int = -1
    counts: Any = field(default=None, repr=False)
    prefix: int = 0
    """Hash of the first tokens, as many as are worth a cascade."""
