"""Tolerance of kernels against the reference: twice the error of textbook code in the same dtype.

``max|k - ref| <= factor * max|naive - ref| + floor`` with factor 2 (3 for gradients). ``ref`` is the reference in
float64, ``naive`` the reference with every intermediate rounded to the dtype. ``floor = 2 * max|((ref + 0.3) - 0.3) -
ref|`` in that dtype is about one unit in the last place, for cases where the textbook code happens to be exact. The
rule is FlashAttention's, for arrays of many elements. With few the floor is random (0 for -0.25), so it is at least
one unit in the last place of ``max|ref| + 0.3``. The rule calibrates itself to any dtype and shape.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .precision import Array

__all__ = ["FORWARD", "GRADIENT", "error_report", "tolerance"]


FORWARD = 2.0
GRADIENT = 3.0


def tolerance(reference: Array, naive: Array, dtype: npt.DTypeLike, factor: float = FORWARD) -> float:
    """Largest absolute error allowed. Infinite and NaN entries are compared by position instead."""
    ref = np.asarray(reference, np.float64)
    finite = np.isfinite(ref)
    if not finite.any():
        return 0.0
    ref = ref[finite]
    textbook = np.abs(np.asarray(naive, np.float64)[finite] - ref)
    t: Any = np.dtype(dtype).type
    shifted = (ref.astype(t) + t(0.3)) - t(0.3)
    _, exponent = np.frexp(np.max(np.abs(ref)) + 0.3)
    unit = np.ldexp(float(ml_dtypes.finfo(dtype).eps), int(exponent) - 1)  # type: ignore[no-untyped-call]
    floor = max(2.0 * float(np.max(np.abs(shifted.astype(np.float64) - ref))), float(unit))
    textbook = textbook[np.isfinite(textbook)]  # textbook code may overflow where a kernel must not
    return factor * float(np.max(textbook, initial=0.0)) + floor


def error_report(actual: Array, reference: Array, bound: float) -> str | None:
    """None if ``actual`` is close enough, else one line with the worst index and both values."""
    got, want = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return None
    same_special = np.where(
        np.isfinite(want), np.isfinite(got), (got == want) | (np.isnan(got) & np.isnan(want))
    )
    if not same_special.all():
        index = tuple(int(i) for i in np.argwhere(~same_special)[0])
        count = int((~same_special).sum())
        return f"{count} entries differ in being finite; first at {index}: got {got[index]}, expected {want[index]}"
    error = np.where(np.isfinite(want), np.abs(got - np.where(np.isfinite(want), want, 0.0)), 0.0)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    if error[index] <= bound:
        return None
    return f"worst at {index}: got {got[index]!r}, expected {want[index]!r}, error {error[index]:.3g} > {bound:.3g}"
