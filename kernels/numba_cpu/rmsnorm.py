"""RMSNorm on the CPU, forward and backward: one task is a run of rows.

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n

Each row is read from memory once: the second pass over it finds it in the cache. Sums of squares are float64, of
short sums in the computing type where these are in its range, so that no finite input overflows. dweight is a
float64 partial per task, added up in order: the same result every time, whatever thread ran which task.

Forward (passes in ``ir/norm.py``; results too large for a cache go past it)::

    x        | row r | row r + 1 ...         row r + 1 is fetched while y is stored
    residual | row r | row r + 1 ...
    sums     | row r of s |                  scratch, for the passes that follow
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.dtype import all_bits, bits, like, load, read_row, rounded, write_row
from gpu_ops.kernels.numba_cpu.ir import norm
from gpu_ops.kernels.numba_cpu.ir.memory import fence, same, scratch, stays_in_cache
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

SHORT_SUM = 1 << 10  # numbers added up in the computing type
TINY = 2.0**-80  # a sum of float32 squares below this may have lost some to underflow


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    y: Array,
    s: Array | None,
    rstd: Array,
    *,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    """All (rows, cols) except ``weight`` (cols,) and ``rstd`` (rows,); ``s`` only with ``residual``."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    launch(
        rmsnorm_forward[x.dtype],
        -(-rows // chunk),
        chunk,
        *all_bits(x, weight, x if residual is None else residual, y, y if s is None else s),
        rstd,
        eps,
        weight_offset,
        residual is not None,
        casting == "llama",
        not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes)),
    )


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dresidual: Array | None,
    dx: Array,
    dweight: Array,
    *,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``dx`` (rows, cols) and ``dweight`` (cols,), in rstd's dtype."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    n_tasks = -(-rows // chunk)
    partial = np.zeros((n_tasks, cols))  # float64: a float32 sum over rows would lose digits
    launch(
        rmsnorm_backward[x.dtype],
        n_tasks,
        chunk,
        bits(dy),
        bits(x),
        bits(weight),
        rstd,
        bits(dy if dresidual is None else dresidual),
        bits(dx),
        partial,
        weight_offset,
        dresidual is not None,
        casting == "llama",
        not stays_in_cache(dx.nbytes),
    )
    dweight[...] = partial.sum(axis=0)


def statistics(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


@inner
def sum_of_squares(x):
    """float64, from short sums in the computing type; from longer ones where squares leave its range."""
    total = 0.0
    for start in range(0, len(x), SHORT_SUM):
        count = min(SHORT_SUM, len(x) - start)
        exact = np.float64(norm.squares((x,), (), start, count))
        if not (TINY < exact < np.inf):
            exact = norm.center_squares((x,), (0.0,), start, count)
        total += exact
    return total


@inner
def sum_of_products(dy, x, weight, offset, scale):
    """Of dy * (offset + weight) * (x * scale), as sum_of_squares adds up."""
    total = 0.0
    for start in range(0, len(x), SHORT_SUM):
        stop = min(start + SHORT_SUM, len(x))
        exact = np.float64(norm.rms_products((dy, x, weight), (scale, offset), start, stop - start))
        if not abs(exact) < np.inf:
            exact = 0.0
            for i in range(start, stop):
                exact += np.float64(load(dy, i) * (offset + load(weight, i)) * (load(x, i) * scale))
        total += exact
    return total


@njit
def add_rows(sums, s, row, residual, r, after, out, streaming):
    """``sums[0] = row + residual[r]``, which also goes to ``s[r]``, unless y stands in where s is not."""
    total, copy = write_row(sums, (0,)), write_row(s, (r,))
    copy = total if same(copy, out) else copy
    other, coming = read_row(residual, (r,)), (read_row(residual, (after,)),)
    norm.add((copy, total), (row, other), (), coming, streaming)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 1),
        read(t, 2),
        write(t, 2),
        write(t, 2),
        write(statistics(t), 1),
        types.float64,
        compute(t),
        types.boolean,
        types.boolean,
        types.boolean,
    )
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama, streaming
):
    rows, cols = x.shape
    w = read_row(weight, ())
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
            scale = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(row) / cols + eps))
            rstd[r] = scale
            if llama:
                norm.rms_scale_llama((out,), (row, w), (scale, weight_offset), following, streaming)
            else:
                norm.rms_scale((out,), (row, w), (scale, weight_offset), following, streaming)
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
        read(t, 2),
        write(t, 2),
        write("float64", 2),
        compute(t),
        types.boolean,
        types.boolean,
        types.boolean,
    ),
    fastmath=REASSOC,
)
def rmsnorm_backward(
    state, n_tasks, chunk, dy, x, weight, rstd, dresidual, dx, partial, weight_offset, has_dresidual, llama,
    streaming,
):  # fmt: skip
    rows, cols = x.shape
    w = read_row(weight, ())
    task = claim(state)
    while task < n_tasks:
        dw = write_row(partial, (task,))
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rdy = read_row(dy, (r,))
            rx = read_row(x, (r,))
            rdx = write_row(dx, (r,))
            scale = rstd[r]
            mean = like(weight_offset, sum_of_products(rdy, rx, w, weight_offset, scale) / cols)
            if llama:  # forward multiplied the rounded n by weight
                for i in range(cols):
                    dw[i] += load(rdy, i) * rounded(rx, load(rx, i) * scale)
            else:
                for i in range(cols):
                    dw[i] += load(rdy, i) * (load(rx, i) * scale)
            after = min(r + 1, rows - 1)
            operands, scalars = (rdy, rx, w), (scale, weight_offset, mean)
            following = (read_row(dy, (after,)), read_row(x, (after,)))
            if has_dresidual:
                more = (rdy, rx, w, read_row(dresidual, (r,)))
                norm.rms_gradient((rdx,), more, scalars, following, streaming)
            else:
                norm.rms_gradient((rdx,), operands, scalars, following, streaming)
        if streaming:
            fence()
        task = claim(state)
