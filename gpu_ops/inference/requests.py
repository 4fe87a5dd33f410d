"""Requests to an engine, the tokens it returns, and the sampler that draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.state_arrays import StateArray, to_device
from gpu_ops.ops.sampling.sample import sample, sampling_number

__all__ = ["Request", "Sampler", "SamplerRow", "Sampling", "Token"]


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


_DTYPES = {"top_k": np.int32, "seed": np.int64}  # dtypes of options in arrays; the others are float32


@dataclass(frozen=True)
class SamplerRow:
    """Options and state of the draw of a token after a row of logits."""

    sampling: Sampling
    step: int
    """Number of tokens of its request drawn before."""
    counts: Any = None
    """int32 (vocab,), with penalties: number of times each token was drawn, -1 for tokens only in the prompt."""

    def after(self, token: int) -> SamplerRow:
        """Return the row that follows once this token is drawn."""
        counts = self.counts
        if counts is not None:
            counts = counts.copy()
            counts[token] = max(counts[token], 0) + 1
        return SamplerRow(self.sampling, self.step + 1, counts)


class Sampler:
    """Draws of tokens, pass by pass; the arrays of options are kept for the next pass of the same requests."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._of: list[Sampling] = []
        self._options: dict[str, Any] = {}

    def __call__(self, logits: Any, rows: Sequence[SamplerRow]) -> tuple[Any, Any]:
        """Draw a token for each row of logits; return tokens and log-probabilities as arrays in host memory."""
        penalised = any(row.counts is not None for row in rows)
        if self._of != (of := [row.sampling for row in rows]):
            self._of, self._options = of, {f.name: self._option(of, f.name) for f in fields(Sampling)}
        options = {n: x for n, x in self._options.items() if penalised or not n.endswith("_penalty")}
        options["step"] = self._array([row.step for row in rows], np.int64)
        if penalised:
            none = np.zeros(logits.shape[-1], np.int32)
            counts = [none if row.counts is None else row.counts for row in rows]
            options["counts"] = self._array(np.stack(counts), np.int32)
        tokens, logprobs = sample(logits, **options, return_logprob=True)
        on_host = [StateArray("sample", "a result", x).copied() for x in (tokens, logprobs)]
        return on_host[0], on_host[1]

    def _option(self, of: Sequence[Sampling], name: str) -> Any:
        return self._array([getattr(sampling, name) for sampling in of], _DTYPES.get(name, np.float32))

    def _array(self, values: Any, dtype: Any) -> Any:
        return to_device(np.asarray(values, dtype), self._device)
