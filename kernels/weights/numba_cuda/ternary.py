"""Ternary matmul for Numba: in any dtype and for any K. The readable twin of ternary_gemv.cu,
ternary_gemm.cu and ternary_tokens.cu.

int8       q = round half to even (x s), s = 127 / max(max|x|, 1e-5) per token; y = scale * sum(trit * q) / s
native     y = scale * sum(trit * x)

A block of 16 x 16 threads computes 16 tokens x 16 rows of weights, one number per thread. 64 codes and activations at
a time pass through shared memory. A word has 16 codes, trit + 1: code e is in byte e % 4, at bits 2 (e / 4).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, float64, int8, int32, int64, uint32

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["QUANTIZE_THREADS", "TILE", "matmul_kernel", "quantize_kernel"]

TILE = 16  # tokens, and rows of weights, per block
UNIT = 64  # codes at a time
WORDS = UNIT // 16
PADDED_WORDS, PADDED_UNIT = WORDS + 1, UNIT + 1  # so that rows start in different banks
QUANTIZE_THREADS = 128


@cache
def quantize_kernel(dtype: str, back: bool = False) -> NumbaKernel:
    """Kernel ``(x, q, inverse)``, one block per token; inverse is 1 / s in float64, NaN for a non-finite token.

    ``back``: write q / s in x's dtype in place of q.
    """
    load, store, compute, element, _ = functions(dtype)

    def ternary_quantize_tokens(x, q, inverse):
        shared = cuda.shared.array(QUANTIZE_THREADS, float64)
        token, thread = cuda.blockIdx.x, cuda.threadIdx.x
        largest, finite = compute(0.0), 1
        for k in range(thread, x.shape[1], QUANTIZE_THREADS):
            v = abs(load(x[token, k]))
            largest = max(largest, v)
            if not v < np.inf:
                finite = 0
        shared[thread] = largest
        finite = cuda.syncthreads_and(finite)
        absmax = 1e-5
        for i in range(QUANTIZE_THREADS):
            absmax = max(absmax, shared[i])
        s, step = 127.0 / absmax, absmax / 127.0 if finite else np.nan
        for k in range(thread, x.shape[1], QUANTIZE_THREADS):
            number = int8(round(float64(load(x[token, k])) * s)) if finite else int8(0)
            q[token, k] = store(compute(number * step)) if back else number
        if thread == 0:
            inverse[token] = step

    signature = f"void({element}[:, :], {element if back else 'int8'}[:, ::1], float64[::1])"
    name = "ternary_round_tokens" if back else "ternary_quantize_tokens"
    return NumbaKernel(ternary_quantize_tokens, signature, f"{name}_{dtype}")


@cuda.jit(device=True)
def _multiply_add(a, b, c):
    return a * b + c


@cuda.jit(device=True)
def _fma(a, b, c):
    return cuda.fma(a, b, c)


@cache
def matmul_kernel(dtype: str, activations: str, inverse_dtype: str = "float64") -> NumbaKernel:
    """Kernel ``(x, inverse, words, scale, y, group)``; for int8, x is q, and only then inverse (tokens or 1) is read.

    ``dtype``: of y, and of an x that is not int8.
    """
    load, store, compute, element, _ = functions(dtype)
    exact = activations == "int8"
    number, entered = (int64, int32) if exact else (compute, compute)
    multiply_add = _multiply_add if exact else _fma

    def ternary_matmul(x, inverse, words, scale, y, group):
        xs = cuda.shared.array((TILE, PADDED_UNIT), entered)
        ws = cuda.shared.array((TILE, PADDED_WORDS), uint32)
        column, line = cuda.threadIdx.x, cuda.threadIdx.y
        thread = line * TILE + column
        row = cuda.blockIdx.x * TILE + column
        tokens, k_end = x.shape
        n = words.shape[0]
        for tile in range(cuda.blockIdx.y, (tokens + TILE - 1) // TILE, cuda.gridDim.y):
            token = tile * TILE + line
            acc, total, g = number(0), 0.0, 0
            for k0 in range(0, k_end, UNIT):
                for i in range(thread, TILE * UNIT, TILE * TILE):
                    t, k = tile * TILE + i // UNIT, k0 + i % UNIT
                    inside = t < tokens and k < k_end
                    if exact:
                        xs[i // UNIT, i % UNIT] = x[t, k] if inside else 0
                    else:
                        xs[i // UNIT, i % UNIT] = load(x[t, k]) if inside else 0
                if thread < TILE * WORDS:
                    r = cuda.blockIdx.x * TILE + thread // WORDS
                    word = words[r, k0 // 16 + thread % WORDS] if r < n else uint32(0)
                    ws[thread // WORDS, thread % WORDS] = word
                cuda.syncthreads()
                for w in range(WORDS):
                    word = ws[column, w]
                    for plane in range(4):
                        four = word >> uint32(2 * plane)
                        at = 16 * w + 4 * plane
                        for byte in range(4):
                            trit = entered(int32((four >> uint32(8 * byte)) & uint32(3)) - 1)
                            acc = multiply_add(trit, xs[line, at + byte], acc)
                        if g < scale.shape[1] and k0 + at + 4 == (g + 1) * group:  # the group ends
                            if row < n:
                                total += float64(acc) * scale[row % scale.shape[0], g]
                            acc, g = number(0), g + 1
                if not exact and g < scale.shape[1] and row < n:  # short sums in float32 keep rounding small
                    total += float64(acc) * scale[row % scale.shape[0], g]
                    acc = number(0)
                cuda.syncthreads()
            if row < n and token < tokens:
                if exact:
                    total = total * inverse[token % inverse.shape[0]]
                y[token, row] = store(compute(total))

    entering = "int8" if exact else element
    arrays = f"{entering}[:, :], {inverse_dtype}[::1], uint32[:, ::1], float32[:, ::1], {element}[:, :]"
    name = f"ternary_matmul_{activations}_{dtype}"
    return NumbaKernel(ternary_matmul, f"void({arrays}, int64)", name)
