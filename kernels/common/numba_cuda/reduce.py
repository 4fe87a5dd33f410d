"""Reductions over the threads of a block, for Numba kernels."""

from __future__ import annotations

from functools import cache

from numba import cuda

__all__ = ["WARPS", "over_block", "plus"]

WARPS = 8  # in a block of 256 threads


@cuda.jit(device=True)
def plus(a, b):
    return a + b


@cache
def over_block(combine):
    """Device function that reduces the values of a block's threads with ``combine``; all get the same bits.

    First within warps, then across them through ``scratch``, WARPS values in shared memory.
    """

    @cuda.jit(device=True)
    def reduce(value, scratch):
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        for shift in (16, 8, 4, 2, 1):
            value = combine(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, shift))
        if lane == 0:
            scratch[warp] = value
        cuda.syncthreads()
        total = scratch[0]
        for w in range(1, WARPS):
            total = combine(total, scratch[w])
        cuda.syncthreads()  # scratch may be overwritten
        return total

    return reduce
