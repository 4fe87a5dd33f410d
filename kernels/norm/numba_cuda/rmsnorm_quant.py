"""RMSNorm with per-row int8 quantisation for Numba: the readable twin of rmsnorm_quant.cu.

s = x + residual,  y = s * rstd * (offset + weight),  absmax = max(max|y|, 1e-5)
q = round half to even (y * 127 / absmax),  scale = absmax / 127,  rowsum = sum of q

A block takes one row at a time and makes three passes over it; the last two find it in L1 or L2. Thread t owns
columns t, t + 256, ... The sum of squares is float64, so that nothing finite overflows.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int32

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["kernel"]


@cache
def kernel(dtype: str) -> NumbaKernel:
    f = functions(dtype)
    rows, row = f"{f.element}[:, :]", f"{f.element}[::1]"
    arrays = f"{rows}, {row}, {rows}, int8[:, :], {f.statistics}[::1], int32[::1], {rows}"
    signature = f"void({arrays}, float64, float64, int32, int32)"
    return NumbaKernel(_forward(dtype), signature, f"rmsnorm_quant_int8_{dtype}")


@cuda.jit(device=True)
def larger(a, b):
    """Maximum of two numbers; NaN if either is NaN."""
    return a if a > b or a != a else b


def _forward(dtype):
    load, store, compute, *_ = functions(dtype)
    total, largest = over_block(plus), over_block(larger)

    @cuda.jit(device=True)
    def normalised(s, weight, rstd, offset, llama):
        n, gain = load(s) * rstd, compute(offset) + load(weight)
        if llama:
            return load(store(load(store(n)) * load(store(gain))))
        return n * gain

    def rmsnorm_quant_int8(x, weight, residual, q, scale, rowsum, s, eps, offset, llama, has_residual):
        sums, maxima = cuda.shared.array(WARPS, float64), cuda.shared.array(WARPS, compute)
        codes = cuda.shared.array(WARPS, int32)
        rows, cols = x.shape
        for r in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            squares = float64(0.0)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                if has_residual:
                    s[r, c] = store(load(x[r, c]) + load(residual[r, c]))
                v = float64(load(s[r, c]))
                squares += v * v
            rstd = compute(1.0 / math.sqrt(total(squares, sums) / cols + eps))
            absmax = compute(1e-5)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                absmax = larger(abs(normalised(s[r, c], weight[c], rstd, offset, llama)), absmax)
            absmax = largest(absmax, maxima)
            factor = compute(127.0) / absmax
            mine = int32(0)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                code = int32(0)
                if absmax < compute(math.inf):  # false for NaN too
                    y = normalised(s[r, c], weight[c], rstd, offset, llama)
                    code = int32(round(y * factor))
                q[r, c] = code
                mine += code
            sum_of_codes = total(mine, codes)
            if cuda.threadIdx.x == 0:
                scale[r] = absmax / compute(127.0)
                rowsum[r] = sum_of_codes

    return rmsnorm_quant_int8
