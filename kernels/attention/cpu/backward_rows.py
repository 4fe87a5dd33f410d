"""Row statistics of attention backward on the CPU: delta = sum over head_dim_v of dout * out, in float64.

A float32 dout with 16-bit inputs is rounded to their dtype first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import bits, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import FLOATS, inner, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, launcher

__all__ = ["deltas", "round_rows"]

Array = np.ndarray[Any, Any]

ROWS_PER_TASK = 256
_PRODUCTS_PER_NANOSECOND = 4

VARIANTS = (*((t, t) for t in FLOATS), ("bfloat16", "float32"), ("float16", "float32"))


def deltas(dout: Array, out: Array) -> Array:
    """Delta (batch, nheads, queries) of dout and out (batch, queries, nheads, head_dim_v); out may be float32."""
    batch, queries, heads, dim = dout.shape
    delta = np.empty((batch, heads, queries))
    launch = launcher(delta.size * dim / _PRODUCTS_PER_NANOSECOND)
    tasks = batch * heads * -(-queries // ROWS_PER_TASK)
    launch(attention_backward_delta[dout.dtype, out.dtype], tasks, bits(dout), bits(out), delta)
    return delta


@kernel(
    lambda dout, out: (read(dout, 4), read(out, 4), types.Array(types.float64, 3, "C")),
    variants=VARIANTS,
)
def attention_backward_delta(state, n_tasks, dout, out, delta):
    batch, queries, heads, dim = dout.shape
    task = claim(state)
    while task < n_tasks:
        b, h, start = task % batch, task // batch % heads, task // batch // heads * ROWS_PER_TASK
        for i in range(start, min(start + ROWS_PER_TASK, queries)):
            delta[b, h, i] = dot_float64(read_row(dout, (b, i, h)), read_row(out, (b, i, h)), dim)
        task = claim(state)


def round_rows(x: Array, to: Array) -> Array:
    """Round float32 rows (batch, queries, heads, dim) into a float16 or bfloat16 array, and return it."""
    batch, queries, heads, _ = x.shape
    launch = launcher(x.size / _PRODUCTS_PER_NANOSECOND)
    tasks = batch * heads * -(-queries // ROWS_PER_TASK)
    launch(attention_backward_round[to.dtype], tasks, x, bits(to))
    return to


@kernel(lambda t: (read("float32", 4), write(t, 4)), variants=("bfloat16", "float16"))
def attention_backward_round(state, n_tasks, x, to):
    batch, queries, heads, dim = x.shape
    task = claim(state)
    while task < n_tasks:
        b, h, start = task % batch, task // batch % heads, task // batch // heads * ROWS_PER_TASK
        for i in range(start, min(start + ROWS_PER_TASK, queries)):
            source, row = read_row(x, (b, i, h)), write_row(to, (b, i, h))
            for d in range(dim):
                store(row, d, source[d])
        task = claim(state)


@inner
def dot_float64(x, y, n):
    total = 0.0
    for d in range(n):
        total += np.float64(load(x, d)) * np.float64(load(y, d))
    return total
