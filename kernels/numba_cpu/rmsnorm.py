"""RMSNorm on the CPU, forward and backward: one task is a run of rows.

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n

Each row is read from memory once: the second pass over it finds it in the cache. Sums of squares are float64, of
short sums in the computing type where these are in its range, so that no finite input overflows. dweight is a
float64 partial per task, added up in order: the same result every time, whatever thread ran which task.

Forward, where results are too large to stay in a cache (``ir/memory.py``)::

    x        | row r                    | row r + 1 ...        fetched while blocks of y are stored
    residual | row r                    | row r + 1 ...        and blocks of s
    sums     | row r of s |    scratch: a whole row            stored by blocks past the caches to s
    line     | block |         scratch: a part of row r of y   stored past the caches to y
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, rounded, store, write_row
from gpu_ops.kernels.numba_cpu.ir.memory import (
    block,
    by_blocks,
    fence,
    past_line,
    put,
    same,
    scratch,
    stays_in_cache,
)
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, elementwise, inner, kernel, read, types, write
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
        bits(x),
        bits(weight),
        bits(x if residual is None else residual),
        bits(y),
        bits(y if s is None else s),
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


@elementwise
def add(operands, start, total):
    x, y = operands
    x, y = x[start : start + len(total)], y[start : start + len(total)]
    for i in range(len(total)):
        store(total, i, load(x, i) + load(y, i))


@inner
def sum_of_squares(x):
    """float64, from short sums in the computing type; from longer ones where squares leave its range."""
    total = 0.0
    for start in range(0, len(x), SHORT_SUM):
        part = x[start : start + SHORT_SUM]
        short = like(load(part, 0), 0.0)
        for i in range(len(part)):
            v = load(part, i)
            short += v * v
        exact = np.float64(short)
        if not (TINY < exact < np.inf):
            exact = 0.0
            for i in range(len(part)):
                v = np.float64(load(part, i))
                exact += v * v
        total += exact
    return total


@elementwise
def gains(weight, offset, llama, gain):
    for i in range(len(gain)):
        value = offset + load(weight, i)
        gain[i] = rounded(weight, value) if llama else value


@elementwise
def normalise(operands, start, y):
    x, gain, scale, llama = operands
    x, gain = x[start : start + len(y)], gain[start : start + len(y)]
    if llama:
        for i in range(len(y)):
            store(y, i, rounded(y, load(x, i) * scale) * gain[i])
    else:
        for i in range(len(y)):
            store(y, i, load(x, i) * scale * gain[i])


@inner
def sum_of_products(dy, x, weight, offset, scale):
    """Of dy * (offset + weight) * (x * scale), as sum_of_squares adds up."""
    total = 0.0
    for start in range(0, len(x), SHORT_SUM):
        d, v, w = (
            dy[start : start + SHORT_SUM],
            x[start : start + SHORT_SUM],
            weight[start : start + SHORT_SUM],
        )
        short = like(offset, 0.0)
        for i in range(len(v)):
            short += load(d, i) * (offset + load(w, i)) * (load(v, i) * scale)
        exact = np.float64(short)
        if not abs(exact) < np.inf:
            exact = 0.0
            for i in range(len(v)):
                exact += np.float64(load(d, i) * (offset + load(w, i)) * (load(v, i) * scale))
        total += exact
    return total


@elementwise
def gradient(operands, start, dx):
    dy, x, weight, more, has_more, offset, scale, mean = operands
    stop = start + len(dx)
    dy, x, weight, more = dy[start:stop], x[start:stop], weight[start:stop], more[start:stop]
    for i in range(len(dx)):
        d = scale * (load(dy, i) * (offset + load(weight, i)) - load(x, i) * scale * mean)
        if has_more:
            d += load(more, i)
        store(dx, i, d)


@njit(error_model="numpy")
def add_rows(x, y, sums, copied, copy, streaming, following):
    """``sums = x + y``, which where ``copied`` also goes to ``copy``, which may be y."""
    start, stop = np.int64(0), block(copy) - past_line(copy)
    while start < len(sums):
        stop = min(stop, len(sums))
        add((x, y), start, sums[start:stop])
        if copied:
            put(sums[start:stop], copy[start:stop], streaming, (following,), start)
        start, stop = stop, stop + block(copy)


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
    ),
    fastmath=REASSOC,
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama, streaming
):
    rows, cols = x.shape
    gain = scratch(1, cols, weight_offset)
    gains(read_row(weight, ()), weight_offset, llama, gain[0])
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
            scale = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(row) / cols + eps))
            rstd[r] = scale
            operands = (row, read_row(gain, (0,)), scale, llama)
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
    line = scratch(1, block(x), weight[0])
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
            operands = (rdy, rx, w, read_row(dresidual, (r,)), has_dresidual, weight_offset, scale, mean)
            following = (read_row(dy, (after,)), read_row(x, (after,)))
            by_blocks(gradient, operands, rdx, write_row(line, (0,)), same(rdy, rdx), streaming, following)
        if streaming:
            fence()
        task = claim(state)
