"""``x @ weight.T``, with a bias and a residual, and its gradients."""

from __future__ import annotations

import math

import numpy as np

from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["linear", "linear_backward"]


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    precision: Precision = "rounded",
) -> Array:
    """``x @ weight.T + bias + residual``.

    Parameters
    ----------
    x : (..., in_features)
    weight : (out_features, in_features)
    bias : (out_features,)
    residual : (..., out_features)

    Returns
    -------
    (..., out_features) in x's dtype
    """
    p = steps(precision, x.dtype)
    tokens = math.prod(x.shape[:-1])
    y = p.step(p.matmul(p.load(x).reshape(tokens, x.shape[-1]), p.load(weight).T))
    y = y.reshape(*x.shape[:-1], len(weight))
    if bias is not None:
        y = p.step(y + p.load(bias))
    if residual is not None:
        y = p.step(y + p.load(residual))
    return p.store(y)


def linear_backward(
    dy: Array,
    x: Array,
    weight: Array,
    *,
    has_bias: bool = False,
    only: str | None = None,
    dweight: Array | None = None,
    dbias: Array | None = None,
    precision: Precision = "rounded",
) -> Array | tuple[Array, ...]:
    """``dx = dy @ weight``, ``dweight += dy.T @ x`` and, with ``has_bias``, ``dbias += dy.sum(0)``.

    Returns
    -------
    dx like x, then dweight and dbias in float32 (float64 for float64), which start from those given; with ``only``
    "dx" the first, with "weights" the others. One gradient is an array.
    """
    p = steps(precision, x.dtype)
    tokens = math.prod(x.shape[:-1])
    x2, dy2 = p.load(x).reshape(tokens, x.shape[-1]), p.load(dy).reshape(tokens, dy.shape[-1])
    dx = p.store(p.matmul(dy2, p.load(weight)).reshape(x.shape))
    totals = [(p.matmul(dy2.T, x2), dweight)]
    if has_bias:
        totals.append((p.matmul(np.ones((1, tokens)), dy2)[0], dbias))
    sums = [p.store(total if start is None else p.load(start) + total, np.float32) for total, start in totals]
    results = [dx] * (only != "weights") + sums * (only != "dx")
    return results[0] if len(results) == 1 else tuple(results)
