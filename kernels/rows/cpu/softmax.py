"""Softmax on the CPU, forward and backward: one task is a run of rows.

forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))
backward   dx = scale * y * (dy - sum(dy * y))

Forward reads one array and writes one, backward reads two and writes one. A row is read from memory once: between the
passes it stays in the cache. Results too large for a cache are streamed past it while the next row is prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.fastmath import exp
from gpu_ops.kernels.common.cpu.jit import (
    FLOATS,
    Kernel,
    as_written,
    compute,
    generic,
    inner,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

LANES = 64  # independent maxima of a row: LLVM makes no vector code of a single one


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def forward(x: Array, mask: Array | None, y: Array, *, scale: float) -> None:
    """Run forward. x, y (rows, cols); y may be x. mask (outer, middle, inner, cols or 1), their product = rows."""
    if mask is None:
        _run("unmasked", x, x[None, None], y, scale)
    elif mask.dtype == np.bool_:
        _run("bool", x, mask.view(np.uint8), y, scale)
    else:
        _run("same" if mask.dtype == x.dtype else "float32", x, mask, y, scale)


def backward(dy: Array, y: Array, dx: Array, *, scale: float) -> None:
    """Run backward. All (rows, cols); dx may be dy."""
    _run("backward", dy, y[None, None], dx, scale)


def _run(kind: str, x: Array, mask_or_y: Array, result: Array, scale: float) -> None:
    if x.size:
        chunk, streaming = items_per_task(*x.shape), not stays_in_cache(result.nbytes)
        arrays = bits(x), bits(mask_or_y), bits(result)
        launch(KERNELS[kind][x.dtype], -(-len(x) // chunk), chunk, *arrays, scale, streaming)


@inner
def exponentials(t, row_max):
    """``t = exp(t - row_max)``; returns the sum."""
    base = row_max if row_max > -np.inf else like(row_max, 0.0)
    row_sum = like(row_max, 0.0)
    for j in range(len(t)):
        t[j] = exp(t[j] - base)
        row_sum += t[j]
    return row_sum


@inner
def sum_in_float64(t):
    row_sum = 0.0
    for j in range(len(t)):
        row_sum += np.float64(t[j])
    return like(t[0], row_sum)


@generic
def weights_and_sum(row, t, row_max):
    """:func:`exponentials` with a sum that is rounded once for a row of float32."""
    if row.dtype != types.float32:
        return lambda row, t, row_max: exponentials(t, row_max)

    def of_float32(row, t, row_max):
        exponentials(t, row_max)
        return sum_in_float64(t)

    return of_float32


def _weights(kind: str) -> Any:
    """Function that fills ``t`` from a row of x and of its mask, and returns the divisor of the result."""

    @inner
    def score(row, m, scale, j):
        t = load(row, j) * scale
        if kind == "bool":
            return t if m[j] else like(scale, -np.inf)
        return t if kind == "unmasked" else t + like(scale, load(m, j))

    @inner
    def weights(row, m, scale, t, lanes):
        lanes[:] = -np.inf
        whole = len(row) // LANES * LANES
        for start in range(0, whole, LANES):
            for j in range(LANES):
                t[start + j] = score(row, m, scale, start + j)
                lanes[j] = t[start + j] if t[start + j] > lanes[j] else lanes[j]
        for j in range(whole, len(row)):
            t[j] = score(row, m, scale, j)
            lanes[0] = t[j] if t[j] > lanes[0] else lanes[0]
        row_sum = weights_and_sum(row, t, lanes.max())
        return row_sum if row_sum != 0 else like(scale, 1.0)  # all columns are hidden

    return weights


@inner
def gradients(dy, y, scale, t, lanes):
    """Fill ``t`` with y * (dy - sum(dy * y))."""
    dot = like(scale, 0.0)
    for j in range(len(y)):
        dot += load(dy, j) * load(y, j)
    for j in range(len(y)):
        t[j] = load(y, j) * (load(dy, j) - dot)
    return scale


@inner
def scaled(result, t, factor):
    for j in range(len(t)):
        store(result, j, t[j] * factor)


@as_written  # @inner would multiply by the reciprocal
def quotients(result, t, divisor):
    for j in range(len(t)):
        store(result, j, t[j] / divisor)


@generic
def divided(result, t, divisor):
    """Divide. Multiplying by a rounded reciprocal would change the last place of float32 and float64."""
    if result.dtype in (types.float32, types.float64):
        return lambda result, t, divisor: quotients(result, t, divisor)
    return lambda result, t, divisor: scaled(result, t, like(divisor, 1.0) / divisor)


def _kernel(kind: str) -> Kernel:
    fill, finished = (gradients, scaled) if kind == "backward" else (_weights(kind), divided)
    other_dtype = {"bool": "uint8", "float32": "float32"}.get(kind)

    def softmax(state, n_tasks, chunk, x, other, y, scale, streaming):
        (rows, cols), (_, middle, innermost, other_cols) = x.shape, other.shape
        t, lanes, spread = np.full(cols, scale), np.full(LANES, scale), np.full(cols, other[0, 0, 0, 0])
        result, waits, where = np.full(cols, x[0, 0]), np.full(64, x[0, 0]), np.zeros(2, np.int64)
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, rows)):
                m = read_row(other, (r // (middle * innermost), r // innermost % middle, r % innermost))
                if other_cols < cols:
                    spread[:] = m[0]
                    m = spread
                number = fill(read_row(x, (r,)), m, scale, t, lanes)
                if streaming:
                    finished(result, t, number)
                    put(result, write_row(y, (r,)), waits, where, (read_row(x, (min(r + 1, rows - 1),)),), 0)
                else:
                    finished(write_row(y, (r,)), t, number)
            if streaming:
                finish(waits, where)
                fence()
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        return types.int64, read(t, 2), read(other_dtype or t, 4), write(t, 2), compute(t), types.boolean

    softmax.__name__ = f"softmax_{kind}"
    return kernel(signature, tuple(name for name in FLOATS if name != kind))(softmax)


KERNELS = {kind: _kernel(kind) for kind in ("unmasked", "bool", "same", "float32", "backward")}
