"""Ternary x ternary for Numba: the readable twin of ternary_planes.cu.

A word has 32 codes, 1 + trit in two bits; two words give 64 bits of each plane. A block of 16 x 16 threads computes
16 rows of a x 16 rows of w, one number per thread:

dot = popc(both) - 2 popc(both & (plus_a ^ plus_w)), both = nonzero_a & nonzero_w
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, float32, float64, int64

from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["TILE", "matmul_kernel"]

TILE = 16
LOW, HIGH, ONE = np.uint64(0x5555555555555555), np.uint64(0xAAAAAAAAAAAAAAAA), np.uint64(1)


@cache
def matmul_kernel(skip: bool) -> NumbaKernel:
    """``(a, a_scale, w, w_scale, starts, chunks, y)``; ``skip``: row r of w has chunks[starts[r]:starts[r + 1]]."""

    def ternary_planes(a, a_scale, w, w_scale, starts, chunks, y):
        column = cuda.blockIdx.x * TILE + cuda.threadIdx.x
        if column >= w.shape[0]:
            return
        units = a.shape[1] // 2
        first, end = int64(0), (units + 1) // 2
        if skip:
            first, end = starts[column], starts[column + 1]
        for row in range(cuda.blockIdx.y * TILE + cuda.threadIdx.y, a.shape[0], cuda.gridDim.y * TILE):
            like, unlike = int64(0), int64(0)
            for at in range(first, end):
                chunk = int64(chunks[at]) if skip else at
                for unit in range(2 * chunk, min(2 * chunk + 2, units)):
                    a0, a1 = a[row, 2 * unit], a[row, 2 * unit + 1]
                    w0, w1 = w[column, 2 * unit], w[column, 2 * unit + 1]
                    zero = ((a0 | w0) & LOW) << ONE | ((a1 | w1) & LOW)
                    other = ((a0 ^ w0) & HIGH) | ((a1 ^ w1) & HIGH) >> ONE
                    like += int64(cuda.popc(~zero))
                    unlike += int64(cuda.popc(~zero & other))
            gain = float64(a_scale[row % a_scale.shape[0], 0]) * float64(
                w_scale[column % w_scale.shape[0], 0]
            )
            y[row, column] = float32(float64(like - 2 * unlike) * gain)

    words, scale = "uint64[:, ::1]", "float32[:, ::1]"
    signature = f"void({words}, {scale}, {words}, {scale}, int64[::1], int32[::1], float32[:, :])"
    return NumbaKernel(ternary_planes, signature, "ternary_planes_skip" if skip else "ternary_planes")
