"""Precision of reference functions.

Every reference function takes ``precision``:

==============  ====================================================================================
``"rounded"``   computed in float64; results rounded once to their public dtypes (default)
``"float64"``   computed in float64; results stay in float64, to compare kernels with
``"naive"``     every intermediate rounded to the input's dtype, like textbook code in that dtype: the
                yardstick for the error of a dtype. Matrix products are summed exactly and
                rounded once, except in float32, where the sum is the main source of error
==============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Precision", "Steps", "steps", "textbook_product"]

Precision = Literal["rounded", "float64", "naive"]
Array = npt.NDArray[Any]

SMALL_PRODUCT = 1 << 20  # multiplications; above this, no BLAS switches to special kernels


@dataclass(frozen=True)
class Steps:
    """The points where a dtype matters: loading an input, an intermediate, storing a result, a matrix product."""

    load: Callable[[Any], Array]
    step: Callable[[Any], Array]
    store: Callable[..., Array]
    matmul: Callable[[Array, Array], Array]


def steps(precision: Precision, dtype: npt.DTypeLike) -> Steps:
    """Rounding rules for inputs of ``dtype``.

    ``store(x)`` rounds a result to the input dtype; ``store(x, np.float32)`` rounds it to the dtype of its contract
    (lse, rstd, dweight: float32, or float64 for float64 inputs).
    """
    native = np.dtype(dtype)

    def load(x: Any) -> Array:
        """Load rows in C order, whatever their source: BLAS sums rows with other strides in another order."""
        return np.require(x, np.float64, ("C_CONTIGUOUS", "ALIGNED", "ENSUREARRAY"))

    def rounded(x: Any) -> Array:
        return np.asarray(x).astype(native).astype(np.float64)

    def store(x: Any, to: npt.DTypeLike | None = None) -> Array:
        if precision == "float64":
            return load(x)
        target = native if to is None or native == np.float64 else np.dtype(to)
        return np.asarray(x).astype(target)

    def matmul(a: Array, b: Array) -> Array:
        return textbook_product(a, b) if precision == "naive" and native == np.float32 else np.asarray(a @ b)

    if precision not in ("rounded", "float64", "naive"):
        raise ValueError(f"precision must be 'rounded', 'float64' or 'naive', got {precision!r}")
    return Steps(load, rounded if precision == "naive" else load, store, matmul)


def textbook_product(a: Array, b: Array) -> Array:
    """``a @ b`` in float32, adding one term after the other, as BLAS does for large matrices.

    BLAS treats a single row or column differently, so it is repeated 16 times here: one query gets the same
    yardstick as many. On some CPUs BLAS also adds small matrices in several partial sums, and more exactly; they are
    looped here.
    """
    if a.ndim == 1:
        return np.asarray(textbook_product(a[None], b)[..., 0, :])
    a, b = a.astype(np.float32), b.astype(np.float32)
    rows, depth, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if rows * depth * columns > SMALL_PRODUCT:
        a = np.repeat(a, 16 if rows == 1 else 1, axis=-2)
        b = np.repeat(b, 16 if columns == 1 else 1, axis=-1)
        return np.asarray((a @ b)[..., :rows, :columns], dtype=np.float64)
    x, y = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros((*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), rows, columns))
    for k in range(depth):  # terms are exact in float64, so each sum is rounded once
        total = (total + x[..., k, None] * y[..., k, None, :]).astype(np.float32).astype(np.float64)
    return total
