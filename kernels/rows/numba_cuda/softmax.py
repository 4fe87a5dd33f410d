"""Softmax for Numba, forward and backward: the readable twin of softmax.cu.

forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))
backward   dx = scale * y * (dy - sum(dy * y))

A block takes one row; thread i owns columns i, i + 256, ... The first pass over a row keeps a maximum and a sum
relative to it, and rescales the sum when the maximum grows; the second pass writes.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["backward", "forward"]

block_sum, block_max = over_block(plus), over_block(cuda.jit(device=True)(lambda a, b: a if a > b else b))


@cache
def forward(dtype: str, mask: str) -> NumbaKernel:
    """Forward kernel. ``mask``: its dtype, or empty; it is (outer, middle, inner, cols or 1), booleans as uint8."""
    load, store, number, element, _ = functions(dtype)
    added = functions(dtype if mask in ("", "bool") else mask)
    lowest = float(np.finfo(np.float64 if dtype == "float64" else np.float32).min)
    hidden = -math.inf

    @cuda.jit(device=True)
    def score(x, m, scale):
        if mask == "bool":
            return load(x) * scale if m else number(hidden)
        return load(x) * scale if mask == "" else cuda.fma(load(x), scale, number(added.load(m)))

    def softmax_forward(x, mask, y, scale):
        scratch = cuda.shared.array(WARPS, number)
        r, cols, (_, middle, inner, mask_cols) = cuda.blockIdx.x, x.shape[1], mask.shape
        m = mask[r // (middle * inner), r // inner % middle, r % inner]
        factor, top, total = number(scale), number(lowest), number(0.0)
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            t = score(x[r, c], m[c if mask_cols > 1 else 0], factor)
            if t > top:
                total, top = total * math.exp(top - t), t
            total += math.exp(t - top)
        row_max = block_max(top, scratch)
        row_sum = block_sum(total * math.exp(top - row_max), scratch)
        inverse = number(1.0) / row_sum if row_sum != number(0.0) else row_sum  # 0: all is hidden
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            t = score(x[r, c], m[c if mask_cols > 1 else 0], factor)
            y[r, c] = store(math.exp(t - row_max) * inverse)

    masks = "uint8" if mask == "bool" else added.element
    signature = f"void({element}[:, :], {masks}[:, :, :, :], {element}[:, :], float64)"
    return NumbaKernel(softmax_forward, signature, f"softmax_forward_{dtype}_{mask or 'unmasked'}")


@cache
def backward(dtype: str) -> NumbaKernel:
    load, store, number, element, _ = functions(dtype)

    def softmax_backward(dy, y, dx, scale):
        scratch = cuda.shared.array(WARPS, number)
        r, products = cuda.blockIdx.x, number(0.0)
        for c in range(cuda.threadIdx.x, y.shape[1], cuda.blockDim.x):
            products += load(dy[r, c]) * load(y[r, c])
        dot = block_sum(products, scratch)
        for c in range(cuda.threadIdx.x, y.shape[1], cuda.blockDim.x):
            dx[r, c] = store(number(scale) * (load(y[r, c]) * (load(dy[r, c]) - dot)))

    signature = f"void({', '.join([f'{element}[:, :]'] * 3)}, float64)"
    return NumbaKernel(softmax_backward, signature, f"softmax_backward_{dtype}")
