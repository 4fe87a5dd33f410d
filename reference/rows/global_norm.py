"""Euclidean norm over all elements of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["global_norm"]


def global_norm(arrays: Array | Sequence[Array], *, precision: Precision = "rounded") -> tuple[Array, Array]:
    """Return the root of the sum of all squares, and 1 if an element is not finite, else 0.

    The largest magnitude is taken out first, so that no square leaves float64's range.
    """
    tensors = [arrays] if isinstance(arrays, np.ndarray) else list(arrays)
    dtype = np.float64 if any(x.dtype == np.float64 for x in tensors) else np.float32
    p = steps(precision, dtype)
    values = np.abs(np.concatenate([p.load(x).ravel() for x in tensors] or [np.zeros(0)]))
    top = np.max(values, initial=0.0)
    overflow = not np.isfinite(values).all()
    norm = (
        top if overflow or top == 0 else top * math.sqrt(float(p.step(np.sum(p.step((values / top) ** 2)))))
    )
    with np.errstate(over="ignore"):
        return p.store(norm), np.asarray(overflow, np.float32)
