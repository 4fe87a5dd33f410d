"""The frequencies of rotary embeddings: plain, and scaled for longer contexts.

Everything is float64. For a rotary dimension ``R`` and a base ``theta`` the plain frequencies are

    inv_freq[i] = theta ** (-2 i / R),      i = 0 .. R/2 - 1

Each scaling below replaces them; yarn and longrope also multiply cos and sin by an attention factor. The formulas
follow the papers and agree with ``modeling_rope_utils`` of Hugging Face transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Scaling",
    "default_inv_freq",
    "dynamic_inv_freq",
    "linear_inv_freq",
    "llama3_inv_freq",
    "longrope_attention_factor",
    "longrope_inv_freq",
    "ntk_inv_freq",
    "yarn_attention_factor",
    "yarn_inv_freq",
]

Float64Array = npt.NDArray[np.float64]


class Scaling(Protocol):
    """Interface of a scaling for ``rope``. Users create ``gpu_ops.RopeScaling``."""

    @property
    def theta(self) -> float | None: ...

    @property
    def partial_rotary_factor(self) -> float | None: ...

    def inv_freq(self, rotary_dim: int, theta: float, seqlen: int) -> npt.NDArray[Any]: ...

    def attention_factor_at(self, seqlen: int) -> float: ...


def default_inv_freq(rotary_dim: int, theta: float) -> Float64Array:
    """``theta ** (-2 i / rotary_dim)`` (Su et al., arXiv 2104.09864, section 3.2.2)."""
    return np.float64(theta) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def linear_inv_freq(rotary_dim: int, theta: float, *, factor: float) -> Float64Array:
    """Position interpolation: positions, and so all frequencies, shrink by ``factor`` (arXiv 2306.15595)."""
    return default_inv_freq(rotary_dim, theta) / factor


def ntk_inv_freq(rotary_dim: int, theta: float, *, factor: float) -> Float64Array:
    """Frequencies of a larger base, which divides the lowest frequency by ``factor`` and keeps the highest.

    ``theta' = theta * factor ** (R / (R - 2))``. With R = 2 the only frequency is 1 for every base.
    """
    if rotary_dim == 2:
        return np.ones(1)
    return default_inv_freq(rotary_dim, theta * factor ** (rotary_dim / (rotary_dim - 2)))


def dynamic_inv_freq(
    rotary_dim: int, theta: float, *, factor: float, original_max_position: int, seqlen: int
) -> Float64Array:
    """Frequencies of a base that grows with the sequence once it is longer than the training context.

    ``ntk`` with ``factor * L / original - (factor - 1)`` for ``L = max(seqlen, original_max_position)``.
    """
    longest = max(seqlen, original_max_position)
    stretch = factor * longest / original_max_position - (factor - 1)
    return ntk_inv_freq(rotary_dim, theta, factor=stretch)


def yarn_inv_freq(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Float64Array:
    """YaRN, "NTK by parts" (arXiv 2309.00071, section 3.2).

    A frequency that turns more than ``beta_fast`` times over the original context is kept. One that turns fewer than
    ``beta_slow`` times is interpolated by ``factor``. A linear ramp over the index joins the two; ``truncate=False``
    keeps its ends fractional.
    """

    def index_of(rotations: float) -> float:
        # solves original_max_position * inv_freq[i] / (2 pi) = rotations for i
        return (
            rotary_dim * math.log(original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    plain = default_inv_freq(rotary_dim, theta)
    return plain / factor * ramp + plain * (1.0 - ramp)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """``0.1 ln(factor) + 1``; with both DeepSeek values ``g(factor, mscale) / g(factor, mscale_all_dim)``.

    ``g(s, m) = 0.1 m ln(s) + 1`` for s > 1, else 1. Zero counts as not given.
    """

    def g(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return g(mscale) / g(mscale_all_dim)
    return g(1.0)


def longrope_inv_freq(
    rotary_dim: int,
    theta: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position: int,
    seqlen: int,
) -> Float64Array:
    """LongRoPE (arXiv 2402.13753): a searched divisor per frequency, with a second set beyond the original length."""
    divisors = long_factor if seqlen > original_max_position else short_factor
    return default_inv_freq(rotary_dim, theta) / np.asarray(divisors, dtype=np.float64)


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """``sqrt(1 + ln(factor) / ln(original_max_position))``, or 1 if nothing is stretched."""
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(original_max_position))


def llama3_inv_freq(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_max_position: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Float64Array:
    """Llama 3.1: long wavelengths are interpolated, short ones are kept, and those between are blended.

    With ``turns = original_max_position * inv_freq / (2 pi)``:
    ``turns < low_freq_factor``: ``inv_freq / factor``; ``turns > high_freq_factor``: ``inv_freq``;
    else ``s = (turns - low) / (high - low)`` and ``inv_freq * ((1 - s) / factor + s)``.
    """
    plain = default_inv_freq(rotary_dim, theta)
    turns = original_max_position * plain / (2 * np.pi)
    s = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return plain * ((1.0 - s) / factor + s)
