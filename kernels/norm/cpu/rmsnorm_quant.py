"""RMSNorm and int8 quantisation on the CPU in one pass: one task is a run of rows.

s = x + residual,  y = s * rstd * (offset + weight),  absmax = max(max|y|, 1e-5)
q = round(y * 127 / absmax),  scale = absmax / 127,  rowsum = sum of q

Each row is read from memory once and its y lives in a scratch row in the cache, so 3 bytes move per 16-bit
element instead of the 7 of a norm followed by a quantisation. max|y| is taken over the bits as integers:
they have the order of the magnitudes, with NaN largest, and LLVM makes vector code of an integer maximum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import (
    bits,
    like,
    load,
    magnitude,
    of_magnitude,
    read_row,
    rounded,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import REASSOC, compute, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.norm.cpu import norm
from gpu_ops.kernels.norm.cpu.norm import sum_of_squares

Array = np.ndarray[Any, Any]


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    q: Array,
    scale: Array,
    rowsum: Array,
    s: Array | None,
    *,
    eps: float,
    weight_offset: float,
    llama: bool,
) -> None:
    """Run forward. x, residual, q, s (rows, cols); weight (cols,); scale, rowsum (rows,); ``s`` if ``residual``."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    scratch = np.empty((1, 1), x.dtype) if s is None else s
    launch(
        rmsnorm_quant_int8[x.dtype],
        -(-rows // chunk),
        chunk,
        bits(x),
        bits(weight),
        bits(x if residual is None else residual),
        q,
        scale,
        rowsum,
        bits(scratch),
        eps,
        weight_offset,
        residual is not None,
        llama,
    )


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 1),
        read(t, 2),
        write("int8", 2),
        write(compute(t).name, 1),
        write("int32", 1),
        write(t, 2),
        types.float64,
        compute(t),
        types.boolean,
        types.boolean,
    ),
    fastmath=REASSOC,
)
def rmsnorm_quant_int8(
    state, n_tasks, chunk, x, weight, residual, q, scale, rowsum, s, eps, weight_offset, has_residual, llama
):
    rows, cols = x.shape
    w = read_row(weight, ())
    y = np.empty(cols, scale.dtype)
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rx = read_row(x, (r,))
            if has_residual:  # from here on the row is s
                norm.add_up((write_row(s, (r,)),), (rx, read_row(residual, (r,))), (), (), (), False)
                rx = read_row(s, (r,))
            rstd = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(rx) / cols + eps))
            if llama:
                for i in range(cols):
                    n = rounded(rx, load(rx, i) * rstd)
                    y[i] = rounded(rx, n * rounded(w, weight_offset + load(w, i)))
            else:
                for i in range(cols):
                    y[i] = load(rx, i) * rstd * (weight_offset + load(w, i))
            largest = magnitude(like(weight_offset, 0.0))
            for i in range(cols):
                largest = max(largest, magnitude(y[i]))
            absmax = of_magnitude(largest)
            absmax = like(absmax, 1e-5) if absmax < like(absmax, 1e-5) else absmax  # NaN passes
            scale[r] = absmax / like(absmax, 127.0)
            inverse = like(absmax, 127.0) / absmax
            rq = write_row(q, (r,))
            codes = np.int32(0)
            for i in range(cols):
                v = y[i] * inverse
                v = v if abs(v) <= like(v, 128.0) else like(v, 0.0)  # false for NaN: its code is 0
                code = np.int32(np.rint(v))
                rq[i] = code
                codes += code
            rowsum[r] = codes
        task = claim(state)
