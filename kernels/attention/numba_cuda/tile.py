"""Steps of the Numba attention kernel on one tile of keys: scores, online softmax, dropout, weighted values.

Device functions for thread (r, c) of the block's 8 x 16 grid, which has rows r, r + 8, ... and keys or columns c,
c + 16, ... They are inlined, so that the kernel's arrays ``s``, ``o``, ``row_max`` and ``row_sum`` stay in registers.
Each is built once per set of sizes and shared by all variants of the kernel.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, uint32, uint64
from numba.cuda import libdevice

from gpu_ops.kernels.attention.numba_cuda.config import ROW_THREADS, ROWS
from gpu_ops.kernels.common.numba_cuda.memory import fetch, take
from gpu_ops.kernels.common.numba_cuda.philox import philox4x32

__all__ = ["WARP", "accumulators", "keeper", "scorer", "weigher"]

WARP = 0xFFFFFFFF  # all lanes


@cache
def scorer(number, block_m: int, block_n: int, chunk: int, stride: int):
    """Device function for ``s += Q K^T`` over the staged columns. K follows Q in shared memory."""
    my_rows, my_keys, width = block_m // ROWS, block_n // ROW_THREADS, 128 // number.bitwidth
    staged_k = block_m * stride

    @cuda.jit(device=True, forceinline=True)
    def multiply(s, staged, r, c):
        few = cuda.local.array((1, width), number)
        some = cuda.local.array((my_keys, width), number)
        for d in range(0, chunk, width):
            for j in range(my_keys):
                fetch(some, j, staged, staged_k + (c + j * ROW_THREADS) * stride + d)
            for i in range(my_rows):
                fetch(few, 0, staged, (r + i * ROWS) * stride + d)
                for j in range(my_keys):
                    for e in range(width):
                        s[i, j] = cuda.fma(few[0, e], some[j, e], s[i, j])

    return multiply


@cache
def weigher(number, my_rows: int, my_keys: int, my_columns: int, stride_p: int):
    """Device function for the online softmax: turns scores into weights in shared memory.

    ``special``: O may hold infinities, which stay whatever the new maximum is.
    """
    exp2 = libdevice.exp2 if number is float64 else libdevice.exp2f
    infinity, zero, hidden = float("inf"), 0.0, -0.0

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, p, o, row_max, row_sum, special, r, c):
        for i in range(my_rows):
            top = row_max[i]
            for j in range(my_keys):
                top = max(top, s[i, j])
            for distance in (8, 4, 2, 1):
                top = max(top, cuda.shfl_xor_sync(WARP, top, distance))
            base = top if top > -infinity else number(zero)  # no key seen yet: avoid -inf - -inf
            shrink = exp2(row_max[i] - base)
            row_max[i] = top
            row_sum[i] *= shrink
            for j in range(my_keys):
                weight = number(hidden) if s[i, j] == -infinity else exp2(s[i, j] - base)
                row_sum[i] += weight
                p[(r + i * ROWS) * stride_p + c + j * ROW_THREADS] = weight
            if special and shrink == 0:  # 0 * inf would be NaN
                for t in range(my_columns):
                    if abs(o[i, t]) < infinity:
                        o[i, t] = zero
            else:
                for t in range(my_columns):
                    o[i, t] *= shrink

    return weigh


@cache
def accumulators(number, my_rows: int, my_columns: int, chunk_v: int, slab: int, stride_p: int):
    """Two device functions for ``o += P V`` over the staged rows of V.

    The second one skips hidden keys, and adds an infinity whatever its weight, unless that is NaN.
    """
    width, infinity = 128 // number.bitwidth, float("inf")

    @cuda.jit(device=True, forceinline=True)
    def accumulate(o, p, staged, first_v, r, c):
        few = cuda.local.array((1, width), number)
        some = cuda.local.array((width, my_columns), number)
        for j in range(0, chunk_v, width):
            for e in range(width):
                for t in range(my_columns):
                    some[e, t] = take(staged, (j + e) * slab + c + t * ROW_THREADS)
            for i in range(my_rows):
                fetch(few, 0, p, (r + i * ROWS) * stride_p + first_v + j)
                for e in range(width):
                    for t in range(my_columns):
                        o[i, t] = cuda.fma(few[0, e], some[e, t], o[i, t])

    @cuda.jit(device=True, forceinline=True)
    def accumulate_seen(o, p, staged, first_v, r, c):
        for j in range(chunk_v):
            for i in range(my_rows):
                weight = take(p, (r + i * ROWS) * stride_p + first_v + j)
                if weight != 0 or math.copysign(1.0, weight) > 0:  # not -0
                    for t in range(my_columns):
                        x = take(staged, j * slab + c + t * ROW_THREADS)
                        factor = number(1.0) if abs(x) == infinity and weight == weight else weight
                        o[i, t] = cuda.fma(factor, x, o[i, t])

    return accumulate, accumulate_seen


# Dropout of attention weights in Numba kernels; ``reference/attention/core.py`` defines which are kept.
#
# One call of Philox per weight, of which an eighth is used: easy to read. The CUDA C++ kernels use all of it.


@cache
def keeper(dropout: str):
    """Device function that returns whether the weight of a pair is kept. ``dropout``: of Features."""
    in_array = dropout == "array"

    @cuda.jit(device=True)
    def keep(seed, dropout_p, sequence, head, query, key):
        number = uint64(seed[0]) if in_array else uint64(seed)
        i, j = uint32(query), uint32(key)
        row_group = (i >> uint32(4)) << uint32(3) | i & uint32(7)
        key_group = (j >> uint32(5)) << uint32(3) | j & uint32(7)
        w0, w1, w2, w3 = philox4x32(
            row_group, key_group, uint32(head), uint32(sequence), uint32(number), uint32(number >> uint64(32))
        )
        low, high = (w1, w3) if j & uint32(8) else (w0, w2)
        word = high if j & uint32(16) else low
        half = uint32(word >> ((i & uint32(8)) << uint32(1))) & uint32(0xFFFF)
        return half >= uint32(dropout_p * 65536)

    return keep
