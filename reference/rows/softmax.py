"""Softmax over the last axis, with a scale and a mask.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["softmax", "softmax_backward"]


def softmax(
    x: Array, *, scale: float = 1.0, mask: Array | None = None, precision: Precision = "rounded"
) -> Array:
    """``exp(t) / sum(exp(t))`` over the last axis with ``t = scale * x + mask``, in x's dtype; 0 in hidden rows.

    ``mask`` broadcasts to x's shape. Numbers are added, and -inf hides; a boolean False hides, even a NaN.
    """
    p = steps(precision, x.dtype)
    t = p.step(scale * p.load(x))
    if mask is not None:
        t = np.where(mask, t, -np.inf) if mask.dtype == np.bool_ else p.step(t + p.load(mask))
    row_max = np.max(t, axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # inf - inf
        weights = p.step(np.exp(p.step(t - np.where(row_max == -np.inf, 0.0, row_max))))
    row_sum = p.step(np.sum(weights, axis=-1, keepdims=True))
    return p.store(np.divide(weights, row_sum, out=np.zeros_like(weights), where=row_sum != 0))


def softmax_backward(dy: Array, y: Array, *, scale: float = 1.0, precision: Precision = "rounded") -> Array:
    """Gradient of :func:`softmax` with respect to x, ``scale * y * (dy - sum(dy * y))``."""
    p = steps(precision, y.dtype)
    dy64, y64 = p.load(dy), p.load(y)
    dot = p.step(np.sum(p.step(dy64 * y64), axis=-1, keepdims=True))
    return p.store(scale * p.step(y64 * p.step(dy64 - dot)))
