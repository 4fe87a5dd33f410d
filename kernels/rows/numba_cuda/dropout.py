"""Dropout for Numba: the readable twin of dropout.cu. ``reference/rows/dropout.py`` defines the mask.

A thread takes the four elements of one call of Philox, of every ``gridDim.y``-th row.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int64, uint32, uint64

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.philox import DROPOUT_DOMAIN, SEED_TYPES, philox4x32
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["kernel"]


@cache
def kernel(dtype: str, seed: str) -> NumbaKernel:
    """Dropout kernel. ``seed``: a key of SEED_TYPES."""
    element = f"{functions(dtype).element}[:, :]"
    signature = f"void({element}, {element}, {SEED_TYPES[seed]}, uint64, uint32, float64)"
    return NumbaKernel(_dropout(dtype, seed == "array"), signature, f"dropout_{dtype}_{seed}")


def _dropout(dtype, in_array):
    load, store, real, *_ = functions(dtype)

    def dropout(x, y, seed, offset, dropped, factor):
        rows, cols = x.shape
        number = uint64(seed[0]) if in_array else uint64(seed)
        low, high = uint32(number), uint32(number >> uint64(32))
        for r in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            first = offset + uint64(r) * uint64(cols)
            column = 4 * int64(cuda.grid(1)) - int64(first & uint64(3))
            if column < cols:
                group = (first >> uint64(2)) + uint64(cuda.grid(1))
                w0, w1, w2, w3 = philox4x32(
                    uint32(group), uint32(group >> uint64(32)), uint32(0), uint32(DROPOUT_DOMAIN), low, high
                )
                words = uint32(w0), uint32(w1), uint32(w2), uint32(w3)
                for e in range(4):
                    c = column + e
                    if 0 <= c < cols:
                        y[r, c] = store(load(x[r, c]) * (real(factor) if words[e] >= dropped else real(0.0)))

    return dropout
