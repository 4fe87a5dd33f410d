"""LayerNorm: ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(mean((x - mean)**2) + eps)``.

Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, equations 3 and 4. The variance divides by N,
not N - 1. Everything is computed in wide precision, and the result is rounded once.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.norm.norm import (
    add_residual,
    input_gradient,
    norm_results,
    reciprocal_rms,
    sum_rows,
)
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["layernorm", "layernorm_backward"]


def layernorm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    residual: Array | None = None,
    return_sum: bool = True,
    return_stats: bool = False,
    precision: Precision = "rounded",
) -> Array | tuple[Array, ...]:
    """LayerNorm over the last axis, after an optional residual add.

    Parameters
    ----------
    x : (..., columns)
    weight : (columns,)
    bias : (columns,), optional
    eps : added to the variance
    residual : (..., columns), optional
        The norm is then of ``s = x + residual``, rounded to x's dtype.
    return_sum : with a residual, also return s
    return_stats : also return the mean and rstd of s, which the backward needs

    Returns
    -------
    y [, s] [, mean, rstd]
        y and s in x's shape and dtype; mean and rstd ``(...,)`` float32 (float64 for float64 inputs).
    """
    p = steps(precision, x.dtype)
    s, rounded = add_residual(x, residual, p)
    mean = p.step(np.mean(rounded, axis=-1, keepdims=True))
    centered = p.step(rounded - mean)
    rstd = reciprocal_rms(centered, eps, p)
    y = p.step(p.step(centered * rstd) * p.load(weight))
    if bias is not None:
        y = p.step(y + p.load(bias))
    has_sum = residual is not None and return_sum
    return norm_results(y, s if has_sum else None, (mean, rstd) if return_stats else (), p)


def layernorm_backward(
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    *,
    dresidual: Array | None = None,
    dweight: Array | None = None,
    dbias: Array | None = None,
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """Gradients of :func:`layernorm`.

    With ``n = (x - mean) * rstd``, ``m = dy * weight`` and means over the N columns of a row::

        dx = rstd * (m - mean(m) - n * mean(m * n))  [+ dresidual]
        dweight = sum over rows of dy * n
        dbias = sum over rows of dy

    Parameters
    ----------
    dy : (..., columns), gradient of y
    x : (..., columns), the tensor that was normalised: s if the forward added a residual
    weight : (columns,)
    mean, rstd : (...,), from the forward
    dresidual : (..., columns), optional: gradient that reaches s from its other uses

    Returns
    -------
    dx, dweight, dbias
        dx in x's dtype: the gradient of s, and so of both x and the residual.
        dweight, dbias ``(columns,)`` float32 (float64 for float64 inputs), added to those given.
    """
    p = steps(precision, x.dtype)
    dy64, r = p.load(dy), p.load(rstd)[..., None]
    n = p.step(p.step(p.load(x) - p.load(mean)[..., None]) * r)
    m = p.step(dy64 * p.load(weight))
    mean_m = p.step(np.mean(m, axis=-1, keepdims=True))
    mean_mn = p.step(np.mean(m * n, axis=-1, keepdims=True))
    dx = p.step(r * p.step(p.step(m - mean_m) - p.step(n * mean_mn)))
    return (
        input_gradient(dx, dresidual, p),
        sum_rows(p.step(dy64 * n), dweight, p),
        sum_rows(dy64, dbias, p),
    )
