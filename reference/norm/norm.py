"""Steps shared by the references of RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_ops.reference.precision import Array, Steps

__all__ = ["add_residual", "input_gradient", "norm_results", "reciprocal_rms", "sum_rows"]


def add_residual(x: Array, residual: Array | None, p: Steps) -> tuple[Array, Array]:
    """``s`` as returned, rounded to x's dtype, and as the norm reads it."""
    s = p.store(p.load(x) if residual is None else p.load(x) + p.load(residual))
    return s, p.load(s)  # normalise the rounded s, which the next layers see


def reciprocal_rms(x: Array, eps: float, p: Steps) -> Array:
    """``1 / sqrt(mean(x**2) + eps)`` over the last axis, kept with length 1; 0 for ``1 / 0``."""
    mean_square = p.step(np.mean(np.square(x), axis=-1, keepdims=True))
    root = p.step(np.sqrt(p.step(mean_square + eps)))
    return p.step(np.divide(1.0, root, out=np.zeros_like(root), where=root != 0))


def norm_results(
    y: Array, s: Array | None, statistics: Sequence[Array], p: Steps
) -> Array | tuple[Array, ...]:
    """``y [, s] [, statistics]``; the statistics with their last axis kept. One result is no tuple."""
    results = [p.store(y)]
    if s is not None:
        results.append(s)
    results += [p.store(statistic[..., 0], np.float32) for statistic in statistics]
    return results[0] if len(results) == 1 else tuple(results)


def input_gradient(dx: Array, dresidual: Array | None, p: Steps) -> Array:
    """Gradient of s, with the one that reaches s from its other uses."""
    return p.store(dx if dresidual is None else p.step(dx + p.load(dresidual)))


def sum_rows(products: Array, start: Array | None, p: Steps) -> Array:
    """Sum over rows, added to ``start`` if that is passed."""
    total = p.step(products.reshape(-1, products.shape[-1]).sum(axis=0))
    return p.store(total if start is None else p.load(start) + total, np.float32)
