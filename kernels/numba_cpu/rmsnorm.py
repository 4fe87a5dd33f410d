"""RMSNorm on the CPU, forward and backward: one task is a run of rows.

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n

Each row is read from memory once: the second pass over it finds it in the cache. Sums of squares are
float64, so that no finite input overflows. dweight is a float64 partial per task, added up in order:
the same result every time, whatever thread ran which task.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, rounded, store, write_row
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]


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
    )
    dweight[...] = partial.sum(axis=0)


def statistics(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


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
    ),
    fastmath=REASSOC,
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama
):
    rows, cols = x.shape
    w = read_row(weight, ())
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rx = read_row(x, (r,))
            ry = write_row(y, (r,))
            if has_residual:  # from here on the row is s
                rr = read_row(residual, (r,))
                rs = write_row(s, (r,))
                for i in range(cols):
                    store(rs, i, load(rx, i) + load(rr, i))
                rx = read_row(s, (r,))
            total = 0.0
            for i in range(cols):
                v = np.float64(load(rx, i))
                total += v * v
            scale = like(weight_offset, 1.0 / np.sqrt(total / cols + eps))
            rstd[r] = scale
            if llama:
                for i in range(cols):
                    n = rounded(rx, load(rx, i) * scale)
                    store(ry, i, n * rounded(w, weight_offset + load(w, i)))
            else:
                for i in range(cols):
                    store(ry, i, load(rx, i) * scale * (weight_offset + load(w, i)))
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
    ),
    fastmath=REASSOC,
)
def rmsnorm_backward(
    state, n_tasks, chunk, dy, x, weight, rstd, dresidual, dx, partial, weight_offset, has_dresidual, llama
):
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
            total = 0.0
            for i in range(cols):
                g = load(rdy, i)
                n = load(rx, i) * scale
                total += np.float64(g * (weight_offset + load(w, i)) * n)
            mean = like(weight_offset, total / cols)
            if llama:  # forward multiplied the rounded n by weight
                for i in range(cols):
                    dw[i] += load(rdy, i) * rounded(rx, load(rx, i) * scale)
            else:
                for i in range(cols):
                    dw[i] += load(rdy, i) * (load(rx, i) * scale)
            rd = read_row(dresidual, (r,))
            for i in range(cols):
                m = load(rdy, i) * (weight_offset + load(w, i))
                d = scale * (m - load(rx, i) * scale * mean)
                if has_dresidual:
                    d += load(rd, i)
                store(rdx, i, d)
        task = claim(state)
