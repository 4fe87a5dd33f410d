"""LayerNorm on the CPU, forward and backward: one task is a run of rows.

forward    s = x + residual,  rstd = 1 / sqrt(mean((s - mean)^2) + eps),  y = (s - mean) * rstd * weight + bias
backward   n = (x - mean) * rstd,  m = dy * weight,  dx = rstd * (m - n * mean(m * n) - mean(m)) + dresidual
           dweight = sum over rows of dy * n,  dbias = sum over rows of dy

As in ``rmsnorm.py`` each row is read from memory once, later passes find it in the cache; sums over a row are
float64, so that no finite input overflows and squares are taken around the exact mean; dweight and dbias are float64
partials per task, added up in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.ir.memory import block, by_blocks, fence, same, scratch, stays_in_cache
from gpu_ops.kernels.numba_cpu.jit import REASSOC, elementwise, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.numba_cpu.rmsnorm import add_rows, config, statistics

__all__ = ["backward", "config", "forward"]

Array = np.ndarray[Any, Any]


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
    launch(
        layernorm_forward[x.dtype],
        -(-rows // chunk),
        chunk,
        bits(x),
        bits(weight),
        bits(weight if bias is None else bias),
        bits(x if residual is None else residual),
        bits(y),
        bits(y if s is None else s),
        mean,
        rstd,
        eps,
        bias is not None,
        residual is not None,
        not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes)),
    )


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
    launch(
        layernorm_backward[x.dtype],
        n_tasks,
        chunk,
        bits(dy),
        bits(x),
        bits(weight),
        mean,
        rstd,
        bits(dy if dresidual is None else dresidual),
        bits(dx),
        partial,
        dresidual is not None,
        not stays_in_cache(dx.nbytes),
    )
    dweight[...] = partial[0::2].sum(axis=0)
    dbias[...] = partial[1::2].sum(axis=0)


@inner
def center_and_squares(x):
    """The mean, and the sum of the squares of the distances from it."""
    total = 0.0
    for i in range(len(x)):
        total += np.float64(load(x, i))
    mean = total / len(x)
    squares = 0.0
    for i in range(len(x)):
        d = np.float64(load(x, i)) - mean
        squares += d * d
    return mean, squares


@elementwise
def normalise(operands, start, y):
    x, weight, bias, has_bias, center, scale = operands
    x, weight = x[start : start + len(y)], weight[start : start + len(y)]
    if has_bias:
        bias = bias[start : start + len(y)]
        for i in range(len(y)):
            store(y, i, (load(x, i) - center) * scale * load(weight, i) + load(bias, i))
    else:
        for i in range(len(y)):
            store(y, i, (load(x, i) - center) * scale * load(weight, i))


@elementwise
def gradient(operands, start, dx):
    dy, x, weight, more, has_more, center, scale, (mean_product, mean_gradient) = operands
    stop = start + len(dx)
    dy, x, weight, more = dy[start:stop], x[start:stop], weight[start:stop], more[start:stop]
    for i in range(len(dx)):
        n = (load(x, i) - center) * scale
        d = scale * (load(dy, i) * load(weight, i) - n * mean_product - mean_gradient)
        if has_more:
            d += load(more, i)
        store(dx, i, d)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 1),
        read(t, 1),
        read(t, 2),
        write(t, 2),
        write(t, 2),
        write(statistics(t), 1),
        write(statistics(t), 1),
        types.float64,
        types.boolean,
        types.boolean,
        types.boolean,
    ),
    fastmath=REASSOC,
)
def layernorm_forward(
    state, n_tasks, chunk, x, weight, bias, residual, y, s, mean, rstd, eps, has_bias, has_residual, streaming
):
    rows, cols = x.shape
    w, b = read_row(weight, ()), read_row(bias, ())
    sums = scratch(1, cols if has_residual else 0, weight[0])
    line = scratch(1, block(x), weight[0])
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            after = min(r + 1, rows - 1)
            row, out = read_row(x, (r,)), write_row(y, (r,))
            if has_residual:
                other, other_after = read_row(residual, (r,)), read_row(residual, (after,))
                total, copy = write_row(sums, (0,)), write_row(s, (r,))
                wanted = not same(copy, out)  # y stands in where s is not
                add_rows(row, other, total, wanted, copy, streaming, other_after)
                row = read_row(sums, (0,))
            exact, squares = center_and_squares(row)
            mean[r] = center = like(load(w, 0), exact)
            rstd[r] = scale = like(load(w, 0), 1.0 / np.sqrt(squares / cols + eps))
            operands = (row, w, b, has_bias, center, scale)
            buffer, following = write_row(line, (0,)), (read_row(x, (after,)),)
            by_blocks(normalise, operands, out, buffer, same(row, out), streaming, following)
        if streaming:
            fence()
        task = claim(state)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 2),
        read(t, 1),
        read(statistics(t), 1),
        read(statistics(t), 1),
        read(t, 2),
        write(t, 2),
        write("float64", 2),
        types.boolean,
        types.boolean,
    ),
    fastmath=REASSOC,
)
def layernorm_backward(
    state, n_tasks, chunk, dy, x, weight, mean, rstd, dresidual, dx, partial, has_dresidual, streaming
):
    rows, cols = x.shape
    w = read_row(weight, ())
    line = scratch(1, block(x), weight[0])
    task = claim(state)
    while task < n_tasks:
        dw = write_row(partial, (2 * task,))
        db = write_row(partial, (2 * task + 1,))
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rdy = read_row(dy, (r,))
            rx = read_row(x, (r,))
            rdx = write_row(dx, (r,))
            center, scale = mean[r], rstd[r]
            products, gradients = 0.0, 0.0
            for i in range(cols):
                m = load(rdy, i) * load(w, i)
                products += np.float64(m * ((load(rx, i) - center) * scale))
                gradients += np.float64(m)
            mean_product = like(load(w, 0), products / cols)
            mean_gradient = like(load(w, 0), gradients / cols)
            for i in range(cols):
                dw[i] += load(rdy, i) * ((load(rx, i) - center) * scale)
                db[i] += load(rdy, i)
            after = min(r + 1, rows - 1)
            means = (mean_product, mean_gradient)
            operands = (rdy, rx, w, read_row(dresidual, (r,)), has_dresidual, center, scale, means)
            following = (read_row(dy, (after,)), read_row(x, (after,)))
            by_blocks(gradient, operands, rdx, write_row(line, (0,)), same(rdy, rdx), streaming, following)
        if streaming:
            fence()
        task = claim(state)
