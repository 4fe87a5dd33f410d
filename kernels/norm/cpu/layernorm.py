"""LayerNorm on the CPU, forward and backward (code shared by both norms: norm.py).

forward    s = x + residual,  rstd = 1 / sqrt(mean((s - mean)^2) + eps),  y = (s - mean) * rstd * weight + bias
backward   n = (x - mean) * rstd,  m = dy * weight,  dx = rstd * (m - n * mean(m * n) - mean(m)) + dresidual
           dweight = sum over rows of dy * n,  dbias = sum over rows of dy

Squares of deviations from the mean are summed, first from the mean of some numbers, so that a mean far from 0
loses no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.decode_rows import chunk_elements
from gpu_ops.kernels.common.cpu.codegen.memory import scratch
from gpu_ops.kernels.common.cpu.codegen.stream import fence, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import all_bits, bits, like, load, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.norm.cpu import norm
from gpu_ops.kernels.norm.cpu.norm import (
    SHORT_SUM,
    TINY,
    add_residual,
    config,
    shared_chunks,
    short_sums,
    store_sum,
    together,
)

__all__ = ["backward", "config", "forward"]

Array = np.ndarray[Any, Any]

SOME = 64  # numbers whose mean is close enough to that of a row: a single number may be far off


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
    """Run forward. ``weight``, ``bias`` (cols,), ``mean``, ``rstd`` (rows,), others (rows, cols)."""
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
    *,
    added: Sequence[str],
) -> None:
    """Fill ``dx`` (rows, cols) and ``dweight``, ``dbias`` (cols,), in rstd's dtype. ``added``: sums added to."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    n_tasks = -(-rows // chunk)
    partial = np.zeros((2 * n_tasks, cols))  # float64: a float32 sum over rows would lose digits
    results = bits(dy if dresidual is None else dresidual), bits(dx), partial
    flags = dresidual is not None, not stays_in_cache(dx.nbytes)
    arrays = bits(dy), bits(x), bits(weight), mean, rstd, *results
    launch(layernorm_backward[x.dtype], n_tasks, chunk, *arrays, *flags)
    store_sum(dweight, partial[0::2], "dweight" in added)
    store_sum(dbias, partial[1::2], "dbias" in added)


_squares = short_sums(norm.squared_deviations, norm.exact_squares, TINY)


@device_function
def moments(x):
    """Return the mean and the sum of squared deviations from it, in float64.

    One pass around the mean of some of the numbers; where that is so far from the mean that digits of the squares
    would cancel, another pass around the mean.
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
    """Sum of squares around ``mean`` rounded to the computing type, corrected for the rounding."""
    near = like(load(x, 0), mean)
    total = _squares((x,), (near,), (np.float64(near),)) - len(x) * (mean - near) ** 2
    return 0.0 if total < 0.0 else total


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
    rows, cols = x.shape
    w, b = read_row(weight, ()), read_row(bias, ())
    sums, lines = (
        scratch(1, cols if has_residual else 0, weight[0]),
        scratch(2, 2 * chunk_elements(w), weight[0]),
    )
    task = claim(state)
    while task < n_tasks:
        first, stop = task * chunk, min(rows, (task + 1) * chunk)
        for r in range(first, stop):
            after = min(r + 1, rows - 1)
            row, out = read_row(x, (r,)), write_row(y, (r,))
            following = (read_row(x, (after,)),)
            if has_residual:
                shared = shared_chunks(lines, 1, s, r, first, stop)
                add_residual(sums, s, row, residual, r, after, out, shared, streaming)
                row = read_row(sums, (0,))
            (exact, squares), shared = moments(row), shared_chunks(lines, 0, y, r, first, stop)
            mean[r] = center = like(load(w, 0), exact)
            rstd[r] = scale = like(load(w, 0), 1.0 / np.sqrt(squares / cols + eps))
            if len(b) > 0:
                norm.layer_scale((out,), (row, w, b), (center, scale), following, shared, streaming)
            else:
                norm.layer_scale((out,), (row, w), (center, scale), following, shared, streaming)
        if streaming:
            fence()
        task = claim(state)


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
    rows, cols = x.shape
    w = read_row(weight, ())
    step = together(chunk, cols)
    products, gradients = np.empty(step), np.empty(step)
    strides, lines = (dy.strides[0], x.strides[0]), scratch(1, 2 * chunk_elements(w), weight[0])
    task = claim(state)
    while task < n_tasks:
        totals = write_row(partial, (2 * task,)), write_row(partial, (2 * task + 1,))
        begin, stop = task * chunk, min(rows, (task + 1) * chunk)
        for first in range(begin, stop, step):
            n = min(step, stop - first)
            starts = read_row(dy, (first,)), read_row(x, (first,))
            statistics = mean[first:], rstd[first:]
            norm.layer_sums((products, gradients), totals, starts, strides, (w,), statistics, (), n, cols)
            for i in range(n):
                r = first + i
                operands, result = (read_row(dy, (r,)), read_row(x, (r,)), w), (write_row(dx, (r,)),)
                product, gradient = products[i], gradients[i]
                if not abs(product) + abs(gradient) < np.inf:
                    product, gradient = norm.exact_layer_sums(operands, (mean[r], rstd[r]), 0, cols)
                shared = shared_chunks(lines, 0, dx, r, begin, stop)
                means = like(mean[r], product / cols), like(mean[r], gradient / cols)
                scalars = mean[r], rstd[r], means[0], means[1]
                if has_dresidual:
                    more = (operands[0], operands[1], w, read_row(dresidual, (r,)))
                    norm.layer_gradient(result, more, scalars, (), shared, streaming)
                else:
                    norm.layer_gradient(result, operands, scalars, (), shared, streaming)
        if streaming:
            fence()
        task = claim(state)
