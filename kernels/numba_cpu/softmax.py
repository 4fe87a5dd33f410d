"""Softmax on the CPU, forward and backward: one task is a run of rows.

forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))
backward   dx = scale * y * (dy - sum(dy * y))

Forward reads one array and writes one, backward reads two and writes one. Each row is read from memory once: t lies in a
scratch row, which later passes find in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.fastmath import exp2
from gpu_ops.kernels.numba_cpu.ir.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.numba_cpu.jit import FLOATS, Kernel, compute, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

LANES = 64  # maxima over a row that grow side by side: LLVM does not make vector code of a single one
LOG2E = 1.4426950408889634


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def forward(x: Array, mask: Array | None, y: Array, *, scale: float) -> None:
    """x, y (rows, cols); y may be x's memory. mask (outer, middle, inner, cols or 1), the first three making up rows."""
    rows, cols = x.shape
    if not x.size:
        return
    kind = "" if mask is None else "same" if mask.dtype == x.dtype else mask.dtype.name
    if mask is None:
        mask = x[None, None]
    chunk = items_per_task(rows, cols)
    seen = mask.view(np.uint8) if kind == "bool" else bits(mask)
    launch(FORWARD[kind][x.dtype], -(-rows // chunk), chunk, bits(x), seen, bits(y), scale, not stays_in_cache(y.nbytes))


def backward(dy: Array, y: Array, dx: Array, *, scale: float) -> None:
    """All (rows, cols); dx may be dy's memory."""
    chunk = items_per_task(*y.shape)
    launch(softmax_backward[y.dtype], -(-len(y) // chunk), chunk, bits(dy), bits(y), bits(dx), scale, not stays_in_cache(y.nbytes))


def _scores(kind: str) -> Any:
    """A function that fills ``t`` with the scores of a row, and returns the largest."""

    @inner
    def score(row, m, scale, j):
        t = load(row, j) * scale
        if kind == "bool":
            return t if m[j] else like(scale, -np.inf)
        return t if kind == "" else t + like(scale, load(m, j))

    @inner
    def scores(row, m, scale, t, lanes):
        lanes[:] = -np.inf
        whole = len(row) // LANES * LANES
        for start in range(0, whole, LANES):
            for j in range(LANES):
                t[start + j] = score(row, m, scale, start + j)
                lanes[j] = t[start + j] if t[start + j] > lanes[j] else lanes[j]
        for j in range(whole, len(row)):
            t[j] = score(row, m, scale, j)
            lanes[0] = t[j] if t[j] > lanes[0] else lanes[0]
        return lanes.max()

    return scores


@inner
def exponentials(t, row_max):
    """``t = exp(t - row_max)``; the sum."""
    base = row_max if row_max > -np.inf else like(row_max, 0.0)
    row_sum = like(row_max, 0.0)
    for j in range(len(t)):
        t[j] = exp2((t[j] - base) * like(row_max, LOG2E))
        row_sum += t[j]
    return row_sum


@inner
def write_scaled(out, t, factor):
    for j in range(len(t)):
        store(out, j, t[j] * factor)


def _forward_kernel(kind: str) -> Kernel:
    scores = _scores(kind)
    mask_dtype = {"bool": "uint8", "float32": "float32"}

    def forward(state, n_tasks, chunk, x, mask, y, scale, streaming):
        rows, cols = x.shape
        _, middle, innermost, mask_cols = mask.shape
        t, lanes = np.full(cols, scale), np.full(LANES, scale)
        line = np.full(cols, mask[0, 0, 0, 0])
        waits, where, buf = np.full(64, x[0, 0]), np.zeros(2, np.int64), np.full(cols, x[0, 0])
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, rows)):
                m = read_row(mask, (r // (middle * innermost), r // innermost % middle, r % innermost))
                if mask_cols < cols:
                    line[:] = m[0]
                    m = line
                row_max = scores(read_row(x, (r,)), m, scale, t, lanes)
                row_sum = exponentials(t, row_max)
                inverse = like(row_sum, 1.0) / row_sum if row_sum != 0 else row_sum  # 0: all is hidden
                if streaming:
                    write_scaled(buf, t, inverse)
                    put(buf, write_row(y, (r,)), waits, where, (read_row(x, (min(r + 1, rows - 1),)),), 0)
                else:
                    write_scaled(write_row(y, (r,)), t, inverse)
            if streaming:
                finish(waits, where)
                fence()
            task = claim(state)

    forward.__name__ = f"softmax_forward_{kind or 'unmasked'}"
    variants = tuple(name for name in FLOATS if name != kind)
    return kernel(
        lambda t: (types.int64, read(t, 2), read(mask_dtype.get(kind, t), 4), write(t, 2), compute(t), types.boolean), variants
    )(forward)


FORWARD = {kind: _forward_kernel(kind) for kind in ("", "bool", "same", "float32")}


@inner
def dot_product(a, b, zero):
    total = zero
    for j in range(len(a)):
        total += load(a, j) * load(b, j)
    return total


@inner
def write_gradient(dx, dy, y, dot, scale):
    for j in range(len(y)):
        store(dx, j, scale * (load(y, j) * (load(dy, j) - dot)))


@kernel(lambda t: (types.int64, read(t, 2), read(t, 2), write(t, 2), compute(t), types.boolean))
def softmax_backward(state, n_tasks, chunk, dy, y, dx, scale, streaming):
    waits, where, buf = np.full(64, y[0, 0]), np.zeros(2, np.int64), np.full(y.shape[1], y[0, 0])
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min((task + 1) * chunk, len(y))):
            dy_row, y_row = read_row(dy, (r,)), read_row(y, (r,))
            dot = dot_product(dy_row, y_row, like(scale, 0.0))
            if streaming:
                write_gradient(buf, dy_row, y_row, dot, scale)
                n = min(r + 1, len(y) - 1)
                put(buf, write_row(dx, (r,)), waits, where, (read_row(dy, (n,)), read_row(y, (n,))), 0)
            else:
                write_gradient(write_row(dx, (r,)), dy_row, y_row, dot, scale)
        if streaming:
            finish(waits, where)
            fence()
        task = claim(state)
