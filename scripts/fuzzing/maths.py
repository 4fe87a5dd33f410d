"""Arithmetic for the formulas: wide, or rounded to a dtype after every step. Their difference sets the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
FLOAT32, FLOAT64 = DTYPES[2:]


def nearest(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round ``x`` once to ``dtype``. A cast of float64 to bfloat16 may go through float32 and round twice."""
    if dtype != BFLOAT16 or x.dtype.itemsize < 8:
        return x.astype(dtype)
    with np.errstate(over="ignore"):
        single = np.asarray(x.astype(np.float32))
    bits = single.view(np.uint32).copy()
    inexact = np.isfinite(single) & (single.astype(x.dtype) != x)
    bits[inexact & (np.abs(single.astype(x.dtype)) > np.abs(x))] -= 1
    bits[inexact] |= 1  # round to odd: the next rounding sees the side of a tie
    return bits.view(np.float32).astype(dtype)


class Maths:
    """Arithmetic of one dtype. ``textbook``: every step is rounded to ``dtype``. Otherwise float64 (float64: wider).

    ``variant`` changes the inputs a little. A result of few elements can be right by luck in textbook code; the
    largest error over several variants cannot.
    """

    def __init__(self, dtype: np.dtype[Any], textbook: bool, variant: int = 0) -> None:
        self.dtype, self.textbook, self.variant = dtype, textbook, variant
        self.wide: Any = np.longdouble if dtype == np.float64 and not textbook else np.float64
        self.sequential = textbook and dtype in (FLOAT32, FLOAT64)

    def load(self, x: Any) -> Array:
        array = np.asarray(x)
        loaded = array.astype(np.float64).astype(self.wide)
        if self.variant and loaded.size:
            wave = np.sin(np.arange(loaded.size) * 7.0 + self.variant).reshape(loaded.shape)
            with np.errstate(all="ignore"):
                moved = nearest((loaded * (1 + 0.03 * wave)).astype(np.float64), array.dtype)
            loaded = moved.astype(np.float64).astype(self.wide)
        return loaded

    def r(self, x: Any) -> Array:
        """Result of a step, rounded in textbook code."""
        if not self.textbook or self.dtype == np.float64:
            return np.asarray(x)
        return nearest(np.asarray(x), self.dtype).astype(np.float64)

    def matmul(self, a: Array, b: Array) -> Array:
        """Product. Sums of 16-bit products are rounded once, as in libraries; wider ones after every term."""
        if not self.sequential:
            return self.r(a @ b)
        total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
        for k in range(a.shape[-1]):
            total = self.r(total + self.r(a[..., :, k, None] * b[..., k, None, :]))
        return total

    def sum(self, x: Array, axis: int = -1) -> Array:
        """Sum over one axis, which stays with length 1.

        Even variants add from the end: in the order of ``matmul`` errors would cancel. Odd ones add from the start,
        since a kernel may: for 0.7 + 0.7 - 1.3, one order rounds and the other does not.
        """
        if not self.sequential or x.shape[axis] == 0:
            return self.r(x.sum(axis=axis, keepdims=True))
        ordered = x if self.variant % 2 else np.flip(x, axis)
        running = np.cumsum(ordered.astype(self.dtype), axis=axis, dtype=self.dtype)
        return np.take(running, [-1], axis=axis).astype(np.float64)

    def mean(self, x: Array) -> Array:
        return self.r(self.sum(x) / x.shape[-1])

    def erf(self, x: Array) -> Array:
        """Error function by the series without cancellation; math.erf is not wide enough to judge float64."""
        z = np.clip(x.astype(np.longdouble), -9, 9)
        term = total = z
        ratio = 2 * z * z
        for n in range(1, 260):
            term = term * (ratio / (2 * n + 1))
            total = total + term
            if (np.abs(term) <= np.abs(total) * 2.0**-80).all():
                break
        return self.r(
            np.asarray(total * np.exp(-z * z) * 2 / np.sqrt(np.longdouble(np.pi))).astype(self.wide)
        )


Formula = Callable[[Maths], tuple[Array, ...]]


FEW_VARIANTS, MANY_VARIANTS = 4, 64


def expected(formula: Formula, dtype: np.dtype[Any], variants: int) -> tuple[tuple[Array, ...], list[float]]:
    """Wide results of ``formula``, and the largest error of textbook code in each over ``variants`` variants."""
    exact: tuple[Array, ...] = ()
    errors: list[float] = []
    for variant in range(variants):
        with np.errstate(all="ignore"):
            exact_results = formula(Maths(dtype, False, variant))
            textbook = formula(Maths(dtype, True, variant))
        if variant == 0:
            exact, errors = exact_results, [0.0] * len(exact_results)
        for i, (exact_result, rounded) in enumerate(zip(exact_results, textbook, strict=True)):
            with np.errstate(invalid="ignore"):
                error = np.abs(rounded - exact_result)
            errors[i] = max(errors[i], float(np.max(error, initial=0.0, where=np.isfinite(error))))
    return exact, errors


def allowed(exact: Array, error: float, dtype: np.dtype[Any], factor: float) -> float:
    """Tolerance: ``factor * error`` plus about a unit in the last place.

    The unit is that of a shift by 0.3 and back; where that is exact by luck, that of the largest result.
    """
    finite = exact[np.isfinite(exact)]
    t: Any = dtype.type
    with np.errstate(all="ignore"):
        shifted = np.abs(((finite.astype(t) + t(0.3)) - t(0.3)).astype(finite.dtype) - finite)
    floor = float(np.max(shifted, initial=0.0, where=np.isfinite(shifted)))
    largest = float(np.max(np.abs(finite), initial=0.0))
    return factor * error + max(2 * floor, float(ml_dtypes.finfo(dtype).eps) * largest)


def fault(got: Array, exact: Array, bound: float) -> str | None:
    """Description of the worst element with both values; None if all are within bounds."""
    if got.shape != exact.shape:
        return f"shape {got.shape}, expected {exact.shape}"
    value = got.astype(np.float64).astype(exact.dtype)
    with np.errstate(invalid="ignore"):
        limit = (
            float(np.finfo(np.float32).max)
            if got.dtype.itemsize != 2
            else float(ml_dtypes.finfo(got.dtype).max)
        )
        near_limit = np.abs(exact) > 0.99 * limit if got.dtype != np.float64 else np.zeros(exact.shape, bool)
        alike = np.where(
            np.isnan(exact), np.isnan(value), (value == exact) | np.isfinite(value) & np.isfinite(exact)
        )
        wrong = ~alike & ~near_limit
        off = np.where(np.isfinite(exact) & np.isfinite(value) & ~near_limit, np.abs(value - exact), 0.0)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{int(wrong.sum())} elements differ in being finite, first {at}: {value[at]}, expected {exact[at]}"
    if off.size == 0 or off.max() <= bound:
        return None
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(off)), off.shape))
    return f"at {at}: {value[at]}, expected {exact[at]}, off by {float(off[at]):.3g} > {bound:.3g}"
