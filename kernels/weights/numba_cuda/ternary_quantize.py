"""Ternary quantisation for Numba: the readable twin of ternary_quantize.cu, in any dtype and for any group.

A run is a contiguous part of a row with one scale: a group or the whole row. A scope has one scale: a run or
the tensor. Statistics are taken per run first, then combined per scope:

sums       sum |w|, max |w|          limit, and, for absmean, the scale
squares    sum (|w| - limit)^2       limit = mean + threshold * std, if the limit is the mean
kept       sum |w| and count of |w| > limit       scale = sum / count

``ranks`` finds a percentile as the limit: one block per scope finds the weight of a rank by radix selection on its
bits, counting the weights that begin with the digits known so far.

A word has 16 codes, 1 + trit: code e is in byte e % 4, at bits 2 (e / 4). Sums are float64, in a fixed order.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda, float32, float64, int64, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "WITH_STD", "encode", "limits", "ranks", "scales", "statistics"]

THREADS = 128
ABSMEAN, ABSMAX, TWN, MANUAL, MEANSTD, PERCENTILE, WITH_STD = range(7)


@cache
def statistics(what: str, dtype: str) -> NumbaKernel:
    """``(w, length, limit, partial)``, one block per run; partial is (2, runs)."""
    load, _, _, element, _ = functions(dtype)
    squares, kept = what == "squares", what == "kept"

    def ternary_statistics(w, length, limit, partial):
        firsts, seconds = cuda.shared.array(THREADS, float64), cuda.shared.array(THREADS, float64)
        run, thread = cuda.blockIdx.x, cuda.threadIdx.x
        per_row = w.shape[1] // length
        row, column = run // per_row, run % per_row * length
        border = limit[run % limit.shape[0]] if squares or kept else 0.0
        first, second = 0.0, 0.0
        for i in range(thread, length, THREADS):
            a = float64(abs(load(w[row, column + i])))
            if squares:
                first += (a - border) * (a - border)
            elif kept:
                first += a if a > border else 0.0
                second += 1.0 if a > border else 0.0
            else:
                first += a
                second = max(second, a)
        firsts[thread], seconds[thread] = first, second
        cuda.syncthreads()
        if thread == 0:
            for t in range(1, THREADS):
                first += firsts[t]
                second = second + seconds[t] if kept else max(second, seconds[t])
            partial[0, run], partial[1, run] = first, second

    signature = f"void({element}[:, :], int64, float64[::1], float64[:, ::1])"
    return NumbaKernel(ternary_statistics, signature, f"ternary_quantize_{what}_{dtype}")


@cache
def limits() -> NumbaKernel:
    """``(partial, limit, scale, per_scope, size, method, threshold)``, one thread per scope."""

    def ternary_limits(partial, limit, scale, per_scope, size, method, threshold):
        scope = cuda.grid(1)
        if scope >= limit.shape[0]:
            return
        total, largest = 0.0, 0.0
        for run in range(scope * per_scope, (scope + 1) * per_scope):
            total += partial[0, run]
            largest = max(largest, partial[1, run])
        mean = total / size
        if method == WITH_STD:
            limit[scope] += threshold * math.sqrt(mean)
        elif not total < np.inf:
            limit[scope] = np.nan
            scale[scope] = float32(np.nan)
        elif method == ABSMEAN:
            nearest = float32(max(mean, 1e-5))
            scale[scope] = nearest
            limit[scope] = float64(nearest) / 2.0
        elif method == ABSMAX:
            limit[scope] = threshold * largest
        elif method == TWN:
            limit[scope] = threshold * mean
        else:
            limit[scope] = threshold if method == MANUAL else mean

    signature = "void(float64[:, ::1], float64[::1], float32[::1], int64, float64, int64, float64)"
    return NumbaKernel(ternary_limits, signature, "ternary_quantize_limits")


@cuda.jit(device=True)
def _key_of_float32(value):
    return int64(libdevice.float_as_int(abs(value)))


@cuda.jit(device=True)
def _key_of_float64(value):
    return libdevice.double_as_longlong(abs(value))


@cuda.jit(device=True)
def _float32_of_key(key):
    return float64(libdevice.int_as_float(np.int32(key)))


@cuda.jit(device=True)
def _float64_of_key(key):
    return libdevice.longlong_as_double(key)


@cuda.jit(device=True)
def _bin_of(counts, bins, rank):
    """Bin that holds a rank, and the count below it; ``bins`` if the rank is beyond all of them."""
    below = 0
    for b in range(bins):
        if rank < below + counts[b]:
            return b, below
        below += counts[b]
    return bins, below


@cache
def ranks(dtype: str, per_tensor: bool) -> tuple[NumbaKernel, int]:
    """``(w, size, rank, share, limit)``, one block per scope; NaN limits stay. Also returns the threads per block."""
    load, _, _, element, _ = functions(dtype)
    threads, digit = (1024, 8) if per_tensor else (THREADS, 4)  # fewer passes, or fewer bins
    bins = 1 << digit
    is_float64 = dtype == "float64"
    key_of, number_of = (
        (_key_of_float64, _float64_of_key) if is_float64 else (_key_of_float32, _float32_of_key)
    )
    bits, low = (64, 0) if is_float64 else (32, {"float32": 0, "float16": 8, "bfloat16": 16}[dtype])
    beyond = np.int64(2**63 - 1)

    def ternary_ranks(w, size, rank, share, limit):
        counts, above = cuda.shared.array(bins, int64), cuda.shared.array(1, int64)
        scope, thread, k = cuda.blockIdx.x, cuda.threadIdx.x, w.shape[1]
        if limit[scope] != limit[scope]:
            return
        prefix, key, other = int64(0), int64(0), int64(0)
        for shift in range(bits - digit, low - 1, -digit):
            for b in range(thread, bins, threads):
                counts[b] = 0
            if thread == 0:
                above[0] = beyond
            cuda.syncthreads()
            for i in range(scope * size + thread, (scope + 1) * size, threads):
                of = key_of(load(w[i // k, i % k]))
                begins = of >> shift >> digit
                if begins == prefix:
                    cuda.atomic.add(counts, of >> shift & bins - 1, 1)
                elif begins > prefix:
                    cuda.atomic.min(above, 0, of)
            cuda.syncthreads()
            b, below = _bin_of(counts, bins, rank)
            after, _ = _bin_of(counts, bins, rank + 1)
            key = (prefix << digit | b) << shift
            other = (
                (prefix << digit | after) << shift if after < bins else above[0] if above[0] < beyond else key
            )
            prefix, rank = prefix << digit | b, rank - below
            cuda.syncthreads()
        if thread == 0:
            lower, upper = number_of(key), number_of(other)
            difference = upper - lower
            if share < 0.5:
                limit[scope] = libdevice.dadd_rn(lower, libdevice.dmul_rn(difference, share))
            else:
                limit[scope] = libdevice.dadd_rn(upper, -libdevice.dmul_rn(difference, 1.0 - share))

    signature = f"void({element}[:, :], int64, int64, float64, float64[::1])"
    return NumbaKernel(ternary_ranks, signature, f"ternary_quantize_ranks_{dtype}_{threads}"), threads


@cache
def encode(dtype: str) -> NumbaKernel:
    """``(w, length, limit, words)``, one thread per word."""
    load, _, _, element, _ = functions(dtype)

    def ternary_encode(w, length, limit, words):
        n, k = w.shape
        at = int64(cuda.grid(1))
        row, first = at // words.shape[1], at % words.shape[1] * 16
        if row >= n:
            return
        word = uint32(0)
        for e in range(16):
            code = uint32(1)
            if first + e < k:
                run = row * (k // length) + (first + e) // length
                v = float64(load(w[row, first + e]))
                if abs(v) > limit[run % limit.shape[0]]:
                    code = uint32(2) if v > 0.0 else uint32(0) if v < 0.0 else uint32(1)
            word |= code << uint32(8 * (e % 4) + 2 * (e // 4))
        words[row, first // 16] = word

    signature = f"void({element}[:, :], int64, float64[::1], uint32[:, ::1])"
    return NumbaKernel(ternary_encode, signature, f"ternary_quantize_encode_{dtype}")


@cache
def scales() -> NumbaKernel:
    """``(partial, limit, scale, per_scope)``, one thread per scope."""

    def ternary_scales(partial, limit, scale, per_scope):
        scope = cuda.grid(1)
        if scope >= limit.shape[0]:
            return
        total, count = 0.0, 0.0
        for run in range(scope * per_scope, (scope + 1) * per_scope):
            total += partial[0, run]
            count += partial[1, run]
        mean = total / count if count > 0.0 else 1.0
        scale[scope] = float32(mean if limit[scope] == limit[scope] else np.nan)

    signature = "void(float64[:, ::1], float64[::1], float32[::1], int64)"
    return NumbaKernel(ternary_scales, signature, "ternary_quantize_scales")
