"""Softmax for Numba, forward and backward: the readable twin of cuda/softmax.cu.

forward    t = scale * x + mask,  y = exp(t - max(t)) / sum(exp(t - max(t)))
backward   dx = scale * y * (dy - sum(dy * y))

A block takes one row at a time; thread i owns columns i, i + 256, ... The first pass over a row keeps a maximum and a
sum relative to it, and rescales the sum when the maximum grows; the second pass writes.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda

from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.numba_cuda.dtype import functions
from gpu_ops.kernels.numba_cuda.reduce import WARPS, over_block, plus

__all__ = ["backward", "forward"]


@cuda.jit(device=True)
def larger(a, b):
    return a if a > b else b


block_sum, block_max = over_block(plus), over_block(larger)


@cache
def forward(dtype: str, mask: str) -> NumbaKernel:
    """``mask``: its dtype, or empty without one; booleans come as uint8, (outer, middle, inner, cols or 1)."""
    f = functions(dtype)
    masks = "uint8" if mask == "bool" else functions(mask or dtype).element
    signature = f"void({f.element}[:, :], {masks}[:, :, :, :], {f.element}[:, :], float64)"
    return NumbaKernel(_forward(dtype, mask), signature, f"softmax_forward_{dtype}_{mask or 'unmasked'}")


@cache
def backward(dtype: str) -> NumbaKernel:
    signature = ", ".join([f"{functions(dtype).element}[:, :]"] * 3)
    return NumbaKernel(_backward(dtype), f"void({signature}, float64)", f"softmax_backward_{dtype}")


@cache
def _score(dtype, mask):
    """A device function: scale * x + mask; -inf where it is hidden."""
    load, _, number, *_ = functions(dtype)
    added = functions(dtype if mask in ("", "bool") else mask).load
    hidden = -math.inf

    @cuda.jit(device=True)
    def unmasked(x, m, scale):
        return load(x) * scale

    @cuda.jit(device=True)
    def selected(x, m, scale):
        return load(x) * scale if m else number(hidden)

    @cuda.jit(device=True)
    def shifted(x, m, scale):
        return cuda.fma(load(x), scale, number(added(m)))

    return {"": unmasked, "bool": selected}.get(mask, shifted)


def _forward(dtype, mask):
    _, store, number, *_ = functions(dtype)
    score = _score(dtype, mask)
    nothing = float(np.finfo(np.float64 if dtype == "float64" else np.float32).min)

    def softmax_forward(x, mask, y, scale):
        scratch = cuda.shared.array(WARPS, number)
        factor = number(scale)
        middle, inner, mask_cols = mask.shape[1:]
        for r in range(cuda.blockIdx.x, len(x), cuda.gridDim.x):
            m = mask[r // (middle * inner), r // inner % middle, r % inner]
            top, total = number(nothing), number(0.0)
            for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
                t = score(x[r, c], m[c if mask_cols > 1 else 0], factor)
                if t > top:
                    total, top = total * math.exp(top - t), t
                total += math.exp(t - top)
            row_max = block_max(top, scratch)
            row_sum = block_sum(total * math.exp(top - row_max), scratch)
            inverse = number(1.0) / row_sum if row_sum != number(0.0) else row_sum  # 0: all is hidden
            for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
                t = score(x[r, c], m[c if mask_cols > 1 else 0], factor)
                y[r, c] = store(math.exp(t - row_max) * inverse)

    return softmax_forward


def _backward(dtype):
    load, store, number, *_ = functions(dtype)

    def softmax_backward(dy, y, dx, scale):
        scratch = cuda.shared.array(WARPS, number)
        factor = number(scale)
        for r in range(cuda.blockIdx.x, len(y), cuda.gridDim.x):
            products = number(0.0)
            for c in range(cuda.threadIdx.x, y.shape[1], cuda.blockDim.x):
                products += load(dy[r, c]) * load(y[r, c])
            dot = block_sum(products, scratch)
            for c in range(cuda.threadIdx.x, y.shape[1], cuda.blockDim.x):
                dx[r, c] = store(factor * (load(y[r, c]) * (load(dy[r, c]) - dot)))

    return softmax_backward
