"""What the threads of a block make of their values together, in Numba kernels."""

from __future__ import annotations

from functools import cache

from numba import cuda

__all__ = ["WARPS", "over_block", "plus"]

WARPS = 8  # of the 256 threads of a block


@cuda.jit(device=True)
def plus(a, b):
    return a + b


@cache
def over_block(combine):
    """A device function: what ``combine`` makes of the values of a block's threads, the same bits for all.

    Within warps, then over them, through ``scratch`` of WARPS values in shared memory.
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
        cuda.syncthreads()  # scratch is free for the next one
        return total

    return reduce
