"""RMSNorm on the CPU, forward and backward (code shared by both norms: norm.py).

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.decode_rows import chunk_elements
from gpu_ops.kernels.common.cpu.codegen.memory import scratch
from gpu_ops.kernels.common.cpu.codegen.stream import fence, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import all_bits, bits, like, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.norm.cpu import norm
from gpu_ops.kernels.norm.cpu.norm import (
    add_residual,
    config,
    shared_chunks,
    store_sum,
    sum_of_squares,
    together,
)

__all__ = ["backward", "config", "forward"]

Array = np.ndarray[Any, Any]


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
    """Run forward. All (rows, cols) except ``weight`` (cols,) and ``rstd`` (rows,); ``s`` only with ``residual``."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    arrays = all_bits(x, weight, x if residual is None else residual, y, y if s is None else s)
    streaming = not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes))
    flags = residual is not None, casting == "llama", streaming
    launch(rmsnorm_forward[x.dtype], -(-rows // chunk), chunk, *arrays, rstd, eps, weight_offset, *flags)


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
    added: Sequence[str],
) -> None:
    """Fill ``dx`` (rows, cols) and ``dweight`` (cols,), in rstd's dtype. ``added``: the sums that are added to."""
    rows, cols = x.shape
    if casting == "llama" and weight_offset:  # rounds their sum to x's dtype
        weight, weight_offset = (weight.astype(rstd.dtype) + weight_offset).astype(x.dtype), 0.0
    chunk = items_per_task(rows, cols)
    n_tasks = -(-rows // chunk)
    partial = np.zeros((n_tasks, cols))  # float64: a float32 sum over rows would lose digits
    arrays = bits(dy), bits(x), bits(weight), rstd, bits(dy if dresidual is None else dresidual), bits(dx)
    flags = dresidual is not None, casting == "llama", not stays_in_cache(dx.nbytes)
    launch(rmsnorm_backward[x.dtype], n_tasks, chunk, *arrays, partial, weight_offset, *flags)
    store_sum(dweight, partial, "dweight" in added)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 1), read(t, 2), write(t, 2), write(t, 2)),
        *(write(compute(t).name, 1), types.float64, compute(t)),
        *(types.boolean,) * 3,
    )
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama, streaming
):
    rows, cols = x.shape
    w = read_row(weight, ())
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
            scale = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(row) / cols + eps))
            rstd[r] = scale
            shared = shared_chunks(lines, 0, y, r, first, stop)
            if llama:
                norm.rms_scale_llama((out,), (row, w), (scale, weight_offset), following, shared, streaming)
            else:
                norm.rms_scale((out,), (row, w), (scale, weight_offset), following, shared, streaming)
        if streaming:
            fence()
        task = claim(state)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 2), read(t, 1), read(compute(t).name, 1), read(t, 2), write(t, 2)),
        *(write("float64", 2), compute(t)),
        *(types.boolean,) * 3,
    )
)
def rmsnorm_backward(
    state,
    n_tasks,
    chunk,
    dy,
    x,
    weight,
    rstd,
    dresidual,
    dx,
    partial,
    weight_offset,
    has_dresidual,
    llama,
    streaming,
):
    rows, cols = x.shape
    w = read_row(weight, ())
    step = together(chunk, cols)
    sums, strides = np.empty(step), (dy.strides[0], x.strides[0])
    lines = scratch(1, 2 * chunk_elements(w), weight[0])
    task = claim(state)
    while task < n_tasks:
        dw, begin, stop = write_row(partial, (task,)), task * chunk, min(rows, (task + 1) * chunk)
        for first in range(begin, stop, step):
            n = min(step, stop - first)
            starts, scales = (read_row(dy, (first,)), read_row(x, (first,))), (rstd[first:],)
            if llama:
                norm.rms_sums_llama((sums,), (dw,), starts, strides, (w,), scales, (weight_offset,), n, cols)
            else:
                norm.rms_sums((sums,), (dw,), starts, strides, (w,), scales, (weight_offset,), n, cols)
            for i in range(n):
                r = first + i
                operands, result = (read_row(dy, (r,)), read_row(x, (r,)), w), (write_row(dx, (r,)),)
                if not abs(sums[i]) < np.inf:
                    sums[i] = norm.exact_rms_sum(operands, (rstd[r], weight_offset), 0, cols)
                scalars = rstd[r], weight_offset, like(rstd[r], sums[i] / cols)
                shared = shared_chunks(lines, 0, dx, r, begin, stop)
                if has_dresidual:
                    more = (operands[0], operands[1], w, read_row(dresidual, (r,)))
                    norm.rms_gradient(result, more, scalars, (), shared, streaming)
                else:
                    norm.rms_gradient(result, operands, scalars, (), shared, streaming)
        if streaming:
            fence()
        task = claim(state)
