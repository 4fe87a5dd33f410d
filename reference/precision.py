"""How precisely a reference function computes.

Every reference function takes ``precision``:

==============  ====================================================================================
``"rounded"``   computed in float64, results rounded once to the dtypes of the public contract (default)
``"float64"``   computed in float64, results left in float64: what kernels are compared with
``"naive"``     every intermediate rounded to the input's dtype, as textbook code in that dtype does:
                the yardstick for how much error a dtype deserves. Matrix products are summed exactly
                and rounded once, but in float32 for float32: there the sum is what costs accuracy
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

SMALL_PRODUCT = 1 << 20  # multiplications, above which no BLAS has other kernels


@dataclass(frozen=True)
class Steps:
    """The places where a dtype shows: reading an input, an intermediate, a result, a matrix product."""

    load: Callable[[Any], Array]
    step: Callable[[Any], Array]
    store: Callable[..., Array]
    matmul: Callable[[Array, Array], Array]


def steps(precision: Precision, dtype: npt.DTypeLike) -> Steps:
    """Rounding rules for inputs of ``dtype``.

    ``store(x)`` rounds a result to the input dtype, ``store(x, np.float32)`` to the dtype the
    contract gives it (lse, rstd, dweight: float32, or float64 for float64 inputs).
    """
    native = np.dtype(dtype)

    def load(x: Any) -> Array:
        return np.asarray(x, dtype=np.float64)

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
    """``a @ b`` of float32 numbers, one term added to the sum of those before, as BLAS does for large matrices.

    Not so for a lone row or column (which goes in 16 times here: the yardstick of one query is to be that of many),
    nor on some CPUs for small matrices: those add in several rows, and more exactly.
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
    for k in range(depth):  # a term is exact in float64, so that each sum is rounded once
        total = (total + x[..., k, None] * y[..., k, None, :]).astype(np.float32).astype(np.float64)
    return total
