"""LayerNorm on the CPU, forward and backward (loops over rows in norm.py).

forward    s = x + residual,  rstd = 1 / sqrt(mean((s - mean)^2) + eps),  y = (s - mean) * rstd * weight + bias
backward   n = (x - mean) * rstd,  m = dy * weight,  dx = rstd * (m - n * mean(m * n) - mean(m)) + dresidual
           dweight = sum over rows of dy * n,  dbias = sum over rows of dy

Squares are summed of what numbers differ from the mean, first from that of some of them, so that a mean far from 0
costs no digits.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from .codegen import norm
from .codegen.arena import by_reference
from .codegen.stream import stays_in_cache
from .dtype import all_bits, bits, like, load, read_row, write_row
from .jit import compute, device_function, kernel, read, types, write
from .norm import (
    SHORT_SUM,
    TINY,
    backward_rows,
    backward_scratch,
    config,
    forward_rows,
    forward_scratch,
    short_sums,
)
from .parallel import items_per_task, launch

__all__ = ["backward", "config", "forward"]

Array = np.ndarray[Any, Any]

SOME = 64  # numbers whose mean is near enough to that of a row: a single one may be far off


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    y: Array,
    s: Array | None,
    mean: Array,
    rstd: Array,
    *,
    eps: float,
) -> None:
    """All (rows, cols) but ``weight``, ``bias`` (cols,) and ``mean``, ``rstd`` (rows,); ``s`` with ``residual``."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    some_residual, some_s = x if residual is None else residual, y if s is None else s
    arrays = all_bits(x, weight, weight[:0] if bias is None else bias, some_residual, y, some_s)
    streaming = not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes))
    flags = residual is not None, streaming
    launch(layernorm_forward[x.dtype], -(-rows // chunk), chunk, *arrays, mean, rstd, eps, *flags)


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    dresidual: Array | None,
    dx: Array,
    dweight: Array,
    dbias: Array,
) -> None:
    """Fills ``dx`` (rows, cols) and ``dweight``, ``dbias`` (cols,), in rstd's dtype."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    n_tasks = -(-rows // chunk)
    partial = np.zeros((2 * n_tasks, cols))  # float64: a float32 sum over rows would lose digits
    results = bits(dy if dresidual is None else dresidual), bits(dx), partial
    flags = dresidual is not None, not stays_in_cache(dx.nbytes)
    arrays = bits(dy), bits(x), bits(weight), mean, rstd, *results
    launch(layernorm_backward[x.dtype], n_tasks, chunk, *arrays, *flags)
    dweight[...] = partial[0::2].sum(axis=0)
    dbias[...] = partial[1::2].sum(axis=0)


_squares = short_sums(norm.squared_deviations, norm.exact_squares, TINY)


@device_function
def moments(x):
    """The mean, and the sum of the squares of what numbers differ from it, float64.

    One pass around the mean of some of the numbers; where that is so far from the mean that digits of the squares
    would cancel, another one around the mean.
    """
    n, some = len(x), min(SOME, len(x))
    near = like(load(x, 0), norm.exact_deviations((x,), (0.0,), 0, some) / some)
    near = near if abs(near) < np.inf else like(near, 0.0)
    total = squares = 0.0
    for start in range(0, n, SHORT_SUM):
        count = min(SHORT_SUM, n - start)
        deviations, square = norm.moments((x,), (near,), start, count)
        if not TINY < square < np.inf:
            deviations, square = norm.exact_moments((x,), (np.float64(near),), start, count)
        total, squares = total + deviations, squares + square
    mean = near + total / n
    around = squares - total * total / n
    return mean, sum_of_squares(x, mean) if around < 0.25 * squares else around


@device_function
def sum_of_squares(x, mean):
    """Around ``mean`` as it is rounded to the computing type, corrected for the rounding."""
    near = like(load(x, 0), mean)
    total = _squares((x,), (near,), (np.float64(near),)) - len(x) * (mean - near) ** 2
    return 0.0 if total < 0.0 else total


Forward = namedtuple("Forward", "w b mean rstd eps")
Backward = namedtuple("Backward", "mean rstd")


@device_function
def _normalise(r, row, out, given, following, shared, streaming):
    w, b = given.w, given.b
    exact, squares = moments(row)
    given.mean[r] = center = like(load(w, 0), exact)
    given.rstd[r] = scale = like(load(w, 0), 1.0 / np.sqrt(squares / len(row) + given.eps))
    if len(b) > 0:
        norm.layer_scale((out,), (row, w, b), (center, scale), following, shared, streaming)
    else:
        norm.layer_scale((out,), (row, w), (center, scale), following, shared, streaming)


_forward = forward_rows(_normalise)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 1), read(t, 1), read(t, 2), write(t, 2), write(t, 2)),
        *(write(compute(t).name, 1),) * 2,
        *(types.float64, types.boolean, types.boolean),
    )
)
def layernorm_forward(
    state, n_tasks, chunk, x, weight, bias, residual, y, s, mean, rstd, eps, has_residual, streaming
):
    w = read_row(weight, ())
    given = by_reference(Forward(w, read_row(bias, ()), mean, rstd, eps))
    sums, lines = forward_scratch(x, w, has_residual)
    _forward(state, n_tasks, chunk, x, residual, y, s, sums, lines, given, streaming)


@device_function
def _add_sums(sums, partial, task, starts, strides, w, given, first, n):
    mean, rstd = given.mean, given.rstd
    totals, cols = (write_row(partial, (2 * task,)), write_row(partial, (2 * task + 1,))), partial.shape[1]
    norm.layer_sums(sums, totals, starts, strides, (w,), (mean[first:], rstd[first:]), (), n, cols)


@device_function
def _scalars(operands, sums, i, r, given):
    mean, rstd, cols = given.mean, given.rstd, len(operands[0])
    product, gradient = sums[0][i], sums[1][i]
    if not abs(product) + abs(gradient) < np.inf:
        product, gradient = norm.exact_layer_sums(operands, (mean[r], rstd[r]), 0, cols)
    return mean[r], rstd[r], like(mean[r], product / cols), like(mean[r], gradient / cols)


_backward = backward_rows(_add_sums, _scalars, norm.layer_gradient)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 2), read(t, 1)),
        *(read(compute(t).name, 1),) * 2,
        *(read(t, 2), write(t, 2), write("float64", 2), types.boolean, types.boolean),
    )
)
def layernorm_backward(
    state, n_tasks, chunk, dy, x, weight, mean, rstd, dresidual, dx, partial, has_dresidual, streaming
):
    given, flags, w = by_reference(Backward(mean, rstd)), (has_dresidual, streaming), read_row(weight, ())
    work = backward_scratch(chunk, w)
    _backward(state, n_tasks, chunk, dy, x, w, dresidual, dx, partial, work, given, flags)
