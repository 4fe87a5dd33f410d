"""Fused multiply-add without one: a product and a sum with a single rounding, from NumPy's arithmetic.

float32: the product of two is exact in float64, so only the sum and the conversion round. float64: the
product and the sums carry their errors along (Boldo and Melquiond, see ``rounding``), and operands so
large or small that an error would leave the range go through rational numbers.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from gpu_ops.emulator.instructions.rounding import sum_to_odd, to_odd, two_sum
from gpu_ops.emulator.types import Array

__all__ = ["fma32", "fma64", "fma_to_odd"]

_TAIL = np.uint64((1 << 29) - 1)  # the bits of a float64 that a float32 has no room for
_HALF = np.uint64(1 << 28)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_MIN_NORMAL = np.uint32(0x00800000)
_ONE = np.uint32(1)


def fma_to_odd(a: Array, b: Array, c: Array, mode: str) -> Array:
    """``a * b + c`` of values of at most 26 bits, rounded to odd, in float64."""
    return sum_to_odd(np.multiply(a, b, dtype=np.float64), c.astype(np.float64), mode)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """``fma.rn.f32``.

    The conversion of the float64 sum to float32 goes wrong only where that sum lies halfway between two
    float32, having been rounded to there. A sum has that form in few operands or none: its last 29 bits
    say so, or its float32 is subnormal (or the smallest normal), where fewer bits remain. One that
    becomes 0 is exact: then c is 0, or it cancels against a product whose last bit is not below 2^-197.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c.astype(np.float64)
    result = total.astype(np.float32)
    halfway = (total.view(np.uint64) & _TAIL) == _HALF
    tiny = (result.view(np.uint32) & _MAGNITUDE) - _ONE < _MIN_NORMAL
    halfway |= tiny
    if np.count_nonzero(halfway):
        product, c = (np.broadcast_to(x, total.shape)[halfway] for x in (product, c))
        result[halfway] = sum_to_odd(product, c.astype(np.float64), "rn").astype(np.float32)
    return result


def fma64(a: Array, b: Array, c: Array) -> Array:
    """``fma.rn.f64``."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    high, low = _two_product(a, b, product)
    tail, tail_error = two_sum(c, low)
    head, head_error = two_sum(high, tail)
    result = head + to_odd(*two_sum(head_error, tail_error))
    size = np.abs(product)
    ordinary = (size > 2.0**-900) & (size < 2.0**990) & (np.abs(c) < 2.0**990)
    ordinary &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
    if np.count_nonzero(ordinary) < ordinary.size:
        rest = ~ordinary
        result[rest] = _fma64_rational(a[rest], b[rest], c[rest])
    return result


def _two_product(a: Array, b: Array, product: Array) -> tuple[Array, Array]:
    """``a * b`` as its nearest float64 and the error, by Dekker's product of halves."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _split(x: Array) -> tuple[Array, Array]:
    scaled = x * (2.0**27 + 1)
    high = scaled - (scaled - x)
    return high, x - high


def _fma64_rational(a: Array, b: Array, c: Array) -> Array:
    """The operands that the fast way leaves: zeros, infinities, NaN, and finite ones near the ends of the range."""
    result = a * b + c
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for i in np.flatnonzero(finite & (a != 0) & (b != 0)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                result[i] = float(exact)
            except OverflowError:
                result[i] = np.inf if exact > 0 else -np.inf
        else:
            result[i] = 0.0
    return result
