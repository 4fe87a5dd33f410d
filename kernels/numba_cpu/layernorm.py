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

from gpu_ops.kernels.numba_cpu.dtype import all_bits, bits, like, load, read_row, write_row
from gpu_ops.kernels.numba_cpu.ir import norm
from gpu_ops.kernels.numba_cpu.ir.memory import fence, scratch, stays_in_cache
from gpu_ops.kernels.numba_cpu.jit import REASSOC, kernel, read, types, write
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
        *all_bits(
            x,
            weight,
            weight if bias is None else bias,
            x if residual is None else residual,
            y,
            y if s is None else s,
        ),
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
    )
)
def layernorm_forward(
    state, n_tasks, chunk, x, weight, bias, residual, y, s, mean, rstd, eps, has_bias, has_residual, streaming
):
    rows, cols = x.shape
    w, b = read_row(weight, ()), read_row(bias, ())
    sums = scratch(1, cols if has_residual else 0, weight[0])
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            after = min(r + 1, rows - 1)
            row, out = read_row(x, (r,)), write_row(y, (r,))
            following = (read_row(x, (after,)),)
            if has_residual:
                add_rows(sums, s, row, residual, r, after, out, streaming)
                row = read_row(sums, (0,))
            exact = norm.total((row,), (), 0, cols) / cols
            squares = norm.center_squares((row,), (exact,), 0, cols)
            mean[r] = center = like(load(w, 0), exact)
            rstd[r] = scale = like(load(w, 0), 1.0 / np.sqrt(squares / cols + eps))
            if has_bias:
                norm.layer_scale((out,), (row, w, b), (center, scale), following, streaming)
            else:
                norm.layer_scale((out,), (row, w), (center, scale), following, streaming)
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
    task = claim(state)
    while task < n_tasks:
        dw = write_row(partial, (2 * task,))
        db = write_row(partial, (2 * task + 1,))
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rdy = read_row(dy, (r,))
            rx = read_row(x, (r,))
            rdx = write_row(dx, (r,))
            center, scale = mean[r], rstd[r]
            products = norm.layer_products((rdy, rx, w), (center, scale), 0, cols)
            mean_product = like(load(w, 0), products / cols)
            mean_gradient = like(load(w, 0), norm.layer_gradients((rdy, w), (), 0, cols) / cols)
            for i in range(cols):
                dw[i] += load(rdy, i) * ((load(rx, i) - center) * scale)
                db[i] += load(rdy, i)
            after = min(r + 1, rows - 1)
            operands, scalars = (rdy, rx, w), (center, scale, mean_product, mean_gradient)
            following = (read_row(dy, (after,)), read_row(x, (after,)))
            if has_dresidual:
                more = (rdy, rx, w, read_row(dresidual, (r,)))
                norm.layer_gradient((rdx,), more, scalars, following, streaming)
            else:
                norm.layer_gradient((rdx,), operands, scalars, following, streaming)
        if streaming:
            fence()
        task = claim(state)
