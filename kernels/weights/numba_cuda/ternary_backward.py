"""dx of a ternary product for Numba: the readable twin of ternary_backward.cu, in any dtype.

dx = dy @ (scale * trits). A block of 16 x 16 threads computes 16 tokens x 16 columns, one number per thread. The
columns are the codes of one word in each row of weights. 64 rows at a time pass through shared memory.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float64, uint32

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["TILE", "kernel"]

TILE = 16  # tokens, and columns (one word), per block
ROWS = 64  # of weights, per step
PADDED = ROWS + 1  # so that tokens start in different banks


@cache
def kernel(dtype: str) -> NumbaKernel:
    """``(dy, words, scale, dx, group)``: each scale covers ``group`` columns."""
    load, store, compute, element, _ = functions(dtype)

    def ternary_backward(dy, words, scale, dx, group):
        gradients = cuda.shared.array((TILE, PADDED), compute)
        codes = cuda.shared.array(ROWS, uint32)
        column, line = cuda.threadIdx.x, cuda.threadIdx.y
        thread = line * TILE + column
        k = cuda.blockIdx.x * TILE + column
        tokens, n = dy.shape
        shift = uint32(8 * (column % 4) + 2 * (column // 4))
        for tile in range(cuda.blockIdx.y, (tokens + TILE - 1) // TILE, cuda.gridDim.y):
            token = tile * TILE + line
            total = 0.0
            for n0 in range(0, n, ROWS):
                for i in range(thread, TILE * ROWS, TILE * TILE):
                    t, row = tile * TILE + i // ROWS, n0 + i % ROWS
                    inside = t < tokens and row < n
                    gradients[i // ROWS, i % ROWS] = load(dy[t, row]) if inside else 0
                if thread < ROWS and n0 + thread < n:
                    codes[thread] = words[n0 + thread, cuda.blockIdx.x]
                cuda.syncthreads()
                part = compute(0)  # short sums in float32 keep rounding small
                if k < dx.shape[1]:
                    for i in range(min(ROWS, n - n0)):
                        trit = compute((codes[i] >> shift) & uint32(3)) - compute(1)
                        weight = trit * compute(scale[(n0 + i) % scale.shape[0], k // group])
                        part = cuda.fma(gradients[line, i], weight, part)
                total += float64(part)
                cuda.syncthreads()
            if token < tokens and k < dx.shape[1]:
                dx[token, k] = store(compute(total))

    signature = f"void({element}[:, :], uint32[:, ::1], float32[:, ::1], {element}[:, :], int64)"
    return NumbaKernel(ternary_backward, signature, f"ternary_backward_{dtype}")
