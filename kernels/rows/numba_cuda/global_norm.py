"""Euclidean norm of arrays for Numba: the readable twin of global_norm.cu, with the same bits.

blocks   the norm of each block of BLOCK elements. Thread t has lanes 4 t .. 4 t + 3 of LANES; lane i takes elements
         i, i + LANES, ... and keeps the rounding errors of additions. Lanes are added in float64.
total    the norm of these norms, and whether one is not finite, by one block
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float32, float64, int64
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["blocks", "total"]

BLOCK, LANES, THREADS, TOTAL_THREADS = 16384, 256, 64, 512
INFINITY = math.inf


@cache
def _over_threads(threads: int):
    """Device function for the sum over the threads of a block, by halves in order. All threads get it."""

    @cuda.jit(device=True)
    def over_threads(value, scratch):
        cuda.syncthreads()  # the last sum has been read
        scratch[cuda.threadIdx.x] = value
        half = threads // 2
        while half > 0:
            cuda.syncthreads()
            if cuda.threadIdx.x < half:
                scratch[cuda.threadIdx.x] += scratch[cuda.threadIdx.x + half]
            half //= 2
        cuda.syncthreads()
        return scratch[0]

    return over_threads


@cache
def _rescale(dtype: str):
    """Device function for the power of two that scales values before their squares are summed again, or 1."""
    number, small, grown, large, shrunk = float32, 2.0**-80, 2.0**100, 2.0**126, 2.0**-80
    if dtype == "float64":
        number, small, grown, large, shrunk = float64, 2.0**-900, 2.0**640, INFINITY, 2.0**-560

    @cuda.jit(device=True)
    def rescale(squares):
        return number(grown) if squares < small else number(1.0) if squares < large else number(shrunk)

    return rescale


@cache
def blocks(dtype: str) -> NumbaKernel:
    of = functions(dtype)
    load, number = of.load, of.compute
    multiply = libdevice.dmul_rn if dtype == "float64" else libdevice.fmul_rn  # never fused with an addition
    rescale, over_threads = _rescale(dtype), _over_threads(THREADS)

    @cuda.jit(device=True)
    def lane(x, first, end, scale):
        sum_, error = number(0.0), number(0.0)
        for i in range(first, end, LANES):
            value = load(x[i]) * scale
            square = multiply(value, value)
            large, small = (square, sum_) if square > sum_ else (sum_, square)
            sum_ += square
            error += small - (sum_ - large)
        # the error of a sum that is not finite is NaN
        return float64(sum_) + (float64(error) if sum_ < INFINITY else 0.0)

    @cuda.jit(device=True)
    def block_sum(x, start, end, scale, scratch):
        first = start + 4 * cuda.threadIdx.x
        low = lane(x, first, end, scale) + lane(x, first + 1, end, scale)
        return over_threads(low + (lane(x, first + 2, end, scale) + lane(x, first + 3, end, scale)), scratch)

    def global_norm_blocks(x, norms):
        scratch = cuda.shared.array(THREADS, float64)
        start = int64(cuda.blockIdx.x) * BLOCK
        end = min(start + BLOCK, len(x))
        squares = block_sum(x, start, end, number(1.0), scratch)
        scale = rescale(squares)
        if scale != number(1.0):
            squares = block_sum(x, start, end, scale, scratch)
        if cuda.threadIdx.x == 0:
            norms[cuda.blockIdx.x] = math.sqrt(squares) / float64(scale)

    return NumbaKernel(
        global_norm_blocks, f"void({of.element}[::1], float64[::1])", f"global_norm_blocks_{dtype}"
    )


@cache
def total(dtype: str) -> NumbaKernel:
    rescale, over_threads = _rescale("float64"), _over_threads(TOTAL_THREADS)

    @cuda.jit(device=True)
    def total_sum(norms, scale, scratch):
        part = 0.0
        for i in range(cuda.threadIdx.x, len(norms), TOTAL_THREADS):
            value = norms[i] * scale
            part += libdevice.dmul_rn(value, value)
        return over_threads(part, scratch)

    def global_norm_total(norms, norm, found_inf):
        scratch = cuda.shared.array(TOTAL_THREADS, float64)
        squares = total_sum(norms, 1.0, scratch)
        scale = rescale(squares)
        if scale != 1.0:
            squares = total_sum(norms, scale, scratch)
        if cuda.threadIdx.x == 0:
            norm[0] = math.sqrt(squares) / scale
            found_inf[0] = 0.0 if squares < INFINITY else 1.0

    signature = f"void(float64[::1], {dtype}[::1], float32[::1])"
    return NumbaKernel(global_norm_total, signature, f"global_norm_total_{dtype}")
