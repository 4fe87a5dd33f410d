"""RoPE for Numba: the readable twin of rope.cu.

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin,    angle = position * inv_freq[i]

A block takes one token at a time, for all heads of q and then of k. Thread t owns pairs t, t + 128, ... and computes
cos and sin of each once, in float64; the CUDA C++ kernel uses fixed-point turns. Adjacent lanes read adjacent
columns.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "kernel"]

THREADS = 128


@cache
def kernel(dtype: str, positions: str) -> NumbaKernel:
    """RoPE kernel. ``positions``: the dtype of that array (batch or 1, seqlen), or ``""`` if there is none."""
    load, store, compute, element, _ = functions(dtype)
    has_positions = bool(positions)

    @cuda.jit(device=True)
    def rotate_heads(x, y, b, s, i, cos, sin, interleaved, pairs):
        """Rotate pair i of every head of a token."""
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
        for h in range(x.shape[2]):
            x1, x2 = load(x[b, s, h, first]), load(x[b, s, h, second])
            y[b, s, h, first] = store(x1 * cos - x2 * sin)
            y[b, s, h, second] = store(x2 * cos + x1 * sin)

    @cuda.jit(device=True)
    def copy_column(x, y, b, s, column):
        for h in range(x.shape[2]):
            y[b, s, h, column] = x[b, s, h, column]

    def rope(q, k, q_out, k_out, positions, inv_freq, first, interleaved, tail, cos_scale, sin_scale):
        batch, seqlen, pairs = q.shape[0], q.shape[1], inv_freq.shape[0]
        for token in range(cuda.blockIdx.x, batch * seqlen, cuda.gridDim.x):
            b, s = token // seqlen, token % seqlen
            if has_positions:
                position = positions[b if positions.shape[0] > 1 else 0, s]
            else:
                position = first + s
            for i in range(cuda.threadIdx.x, pairs, cuda.blockDim.x):
                angle = float64(position) * inv_freq[i]
                cos, sin = compute(cos_scale * math.cos(angle)), compute(sin_scale * math.sin(angle))
                rotate_heads(q, q_out, b, s, i, cos, sin, interleaved, pairs)
                rotate_heads(k, k_out, b, s, i, cos, sin, interleaved, pairs)
            for column in range(2 * pairs + cuda.threadIdx.x, 2 * pairs + tail, cuda.blockDim.x):
                copy_column(q, q_out, b, s, column)
                copy_column(k, k_out, b, s, column)

    heads = f"{element}[:, :, :, :]"
    where = f"{positions}[:, :]" if has_positions else "int64"
    signature = f"{', '.join([heads] * 4)}, {where}, float64[::1], int64, int32, int64, float64, float64"
    name = f"rope_{dtype}" + (f"_{positions}" if has_positions else "")
    return NumbaKernel(rope, f"void({signature})", name)
