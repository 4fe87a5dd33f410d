"""Merging attention over two sets of keys, for Numba: the readable twin of merge.cu.

lse = ln(e^lse1 + e^lse2)      out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2

A row (one query of one head) belongs to 16 threads, half a warp; thread c of them owns columns c, c + 16, ... All
read the row's two lse before the first one writes, so that lse1 and out1 may receive the results.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64, int64
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["merge_kernel"]

LANES = 16


@cache
def merge_kernel(dtype: str, lse1: str, lse2: str, lse: str) -> NumbaKernel:
    """Kernel that merges arrays (outer, middle, inner, cols) and lse (outer, middle, inner), in any strides."""
    load, store, number, element, _ = functions(dtype)
    lse_number = float64 if lse == "float64" else number
    exp, log1p = (libdevice.exp, libdevice.log1p) if number is float64 else (libdevice.expf, libdevice.log1pf)
    minus_infinity = -math.inf

    def attention_merge(out1, lse1, out2, lse2, out, lse):
        _, middle, inner, cols = out.shape
        thread = int64(cuda.grid(1))
        lane, row = thread % LANES, thread // LANES
        exists = row < out.shape[0] * middle * inner
        row = row if exists else int64(0)  # reads the first row, and writes nothing
        i, j, k = row // (middle * inner), row // inner % middle, row % inner
        a, b = lse_number(lse1[i, j, k]), lse_number(lse2[i, j, k])
        difference = b - a if a > b else a - b
        smaller = number(1.0) if a == b else exp(number(difference))  # of the two weights, the larger is 1
        inverse = number(1.0) / (number(1.0) + smaller)
        weight1 = inverse if a >= b else smaller * inverse
        weight2 = inverse if b >= a else smaller * inverse
        cuda.syncwarp()
        if exists and lane == 0:
            lse[i, j, k] = (a if a > b else b) + lse_number(log1p(smaller))
        if exists:
            for c in range(lane, cols, LANES):
                total = number(0.0)
                if a != minus_infinity:
                    total = weight1 * load(out1[i, j, k, c])
                if b != minus_infinity:
                    total += weight2 * load(out2[i, j, k, c])
                out[i, j, k, c] = store(total)

    part = f"{element}[:, :, :, :]"
    signature = f"void({part}, {lse1}[:, :, :], {part}, {lse2}[:, :, :], {part}, {lse}[:, :, :])"
    words = ",".join(dict.fromkeys((dtype, f"lse {lse1}", f"lse {lse2}")))
    return NumbaKernel(attention_merge, signature, f"attention_merge[{words}]")
