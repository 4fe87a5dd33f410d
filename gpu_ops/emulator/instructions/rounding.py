"""Rounding once: from a value wider than the result to the result, in every rounding mode.

A wide value is exact or *rounded to odd*: an inexact one gets an odd last bit, and then the second rounding
decides as it would have on the exact value (see ``fma``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gpu_ops.emulator.instructions.elements import canonical
from gpu_ops.emulator.types import DTYPE, Array

__all__ = [
    "MODES",
    "halves",
    "nearest_bits",
    "round_to",
    "step",
    "to_odd",
    "two_sum",
]

#: To nearest even, toward zero, down, up.
MODES = frozenset(("rn", "rz", "rm", "rp"))

_TOWARD = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}


def round_to(element: str, mode: str) -> Callable[[Array], Array]:
    """Rounding of values, exact or rounded to odd, to f16, bf16 (as bits), f32 or f64."""
    if element == "bf16":
        return partial(_round_bfloat16, mode=mode)
    dtype = DTYPE[element]

    def nearest(values: Array) -> Array:
        return values.astype(dtype, copy=False)

    def directed(values: Array) -> Array:
        rounded = nearest(values)
        return step(rounded, values - rounded, mode)

    rounding = nearest if mode == "rn" else directed
    return (lambda values: canonical(rounding(values))) if element == "f16" else rounding


def step(nearest: Array, error: Array, mode: str) -> Array:
    """From the nearest value to the one that ``mode`` asks for; ``error`` has the sign of exact - nearest."""
    if mode == "rn":
        return nearest
    if mode == "rz":
        wrong = np.where(nearest > 0, error < 0, error > 0)
    else:
        wrong = error < 0 if mode == "rm" else error > 0
    return np.where(wrong, np.nextafter(nearest, nearest.dtype.type(_TOWARD[mode])), nearest)


def _round_bfloat16(values: Array, mode: str) -> Array:
    """Keeps the upper half of a float32, plus one as the lower half and the mode ask for."""
    if values.dtype == np.float64:
        bits = _float32_to_odd(values)
    else:
        bits = values.astype(np.float32, copy=False).view(np.uint32)
    if mode == "rn":
        rounded = nearest_bits(bits, 16)
    elif mode == "rz":
        rounded = bits
    else:
        sign = bits >> np.uint32(31)
        rounded = bits + (sign if mode == "rm" else sign ^ np.uint32(1)) * np.uint32(0xFFFF)
    result = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = values != values
    if np.count_nonzero(nan):
        result[nan] = 0x7FFF
    return result


def nearest_bits(bits: Array, dropped: int) -> Array:
    """float32 bits with what the rounding to nearest even adds above ``dropped`` bits; those are to be cut off."""
    rounded: Array = bits >> np.uint32(dropped)
    rounded &= np.uint32(1)
    rounded += np.uint32((1 << dropped - 1) - 1)
    rounded += bits
    return rounded


def _float32_to_odd(values: Array) -> Array:
    """The bits of float64 values as float32, rounded to odd."""
    nearest = values.astype(np.float32)
    bits: Array = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(values))  # truncated
    bits |= nearest != values
    return bits


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The float64 nearest to ``a + b``, and the rest, which is NaN where the former is not finite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(nearest: Array, error: Array) -> Array:
    """``nearest + error`` rounded to odd, given the float64 nearest to that sum and the rest."""
    bits = nearest.view(np.int64)
    outward = (error > 0) == (nearest > 0)
    inexact = (error != 0) & (error == error)
    odd: Array = bits + (inexact & (bits & 1 == 0)) * np.where(outward, 1, -1)
    return odd.view(np.float64)


def halves(integers: Array) -> tuple[Array, Array]:
    """64-bit integers as pairs of float64 with those as exact sums."""
    kind = integers.dtype.type
    low = (integers & kind(0xFFFFFFFF)).astype(np.float64)
    return (integers >> kind(32)).astype(np.float64) * 2.0**32, low
