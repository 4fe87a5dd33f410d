"""Rows of a table by index, and the gradient of the table."""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["embedding", "embedding_backward"]


def embedding(ids: Array, weight: Array, *, scale: float = 1.0, precision: Precision = "rounded") -> Array:
    """``scale * weight[ids]`` in weight's dtype."""
    p = steps(precision, weight.dtype)
    return p.store(scale * p.load(weight)[ids])


def embedding_backward(
    dx: Array,
    ids: Array,
    num_embeddings: int,
    *,
    scale: float = 1.0,
    dweight: Array | None = None,
    precision: Precision = "rounded",
) -> Array:
    """Gradient with respect to weight, float32 (float64 for float64): row v is the sum of the rows of
    ``scale * dx`` whose index is v, added to ``dweight`` if that is given."""
    p = steps(precision, dx.dtype)
    rows = p.load(dx).reshape(ids.size, dx.shape[-1])
    total = np.zeros((num_embeddings, dx.shape[-1])) if dweight is None else p.load(dweight).copy()
    for i, row in zip(ids.ravel(), rows, strict=True):
        total[i] = p.step(total[i] + p.step(scale * row))
    return p.store(total, np.float32)
