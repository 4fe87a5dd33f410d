"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import OptionError

__all__ = ["Request", "Sampling", "Token"]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn: the options of :func:`gpu_ops.sample`. The default is greedy."""

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
        name = "Sampling"
        checks.integer(name, "top_k", self.top_k, low=0, high=2**31 - 1)
        checks.integer(name, "seed", self.seed, low=0, high=2**63 - 1)
        checks.number(name, "temperature", self.temperature, low=0.0)
        checks.number(name, "repetition_penalty", self.repetition_penalty, above=0.0)
        for penalty in ("frequency_penalty", "presence_penalty"):
            checks.number(name, penalty, getattr(self, penalty))
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in ("top_k", "seed") and abs(value) > _LARGEST:
                raise OptionError(f"{name}: {option.name} must be finite in float32, got {value!r}")
        if not np.float32(self.repetition_penalty):
            raise OptionError(f"{name}: repetition_penalty is 0 in float32: {self.repetition_penalty!r}")
        for share in ("top_p", "min_p"):
            if checks.number(name, share, getattr(self, share), low=0.0) > 1:
                raise OptionError(f"{name}: {share} must lie in [0, 1], got {getattr(self, share)}")

    @property
    def counts_tokens(self) -> bool:
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
