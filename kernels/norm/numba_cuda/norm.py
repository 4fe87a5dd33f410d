"""RMSNorm and LayerNorm for Numba, forward and backward: the readable twins of norm.cu, backward.cu and dweight.cu.

forward    s = x + residual,  n = (s - mean) * rstd,  y = n * (offset + weight) + bias
           rstd = 1 / sqrt(mean((s - mean)^2) + eps)
backward   n = (x - mean) * rstd,  m = dy * (offset + weight)
           dx = rstd * (m - n * mean(m * n) - mean(m)) + dresidual
           dweight = sum over rows of dy * n,  dbias = sum over rows of dy

RMSNorm treats the mean of s and mean(m) as 0 and has no bias; LayerNorm has no offset. A block takes one row at a
time. Thread t owns columns t, t + 256, ... in every pass over the row; all passes but the first find it in L1 or L2.
Sums over a row are float64, so that nothing finite overflows; the CUDA C++ kernel scales instead.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["kernel"]

block_sum = over_block(plus)


@cache
def kernel(norm: str, which: str, dtype: str) -> NumbaKernel:
    """``norm`` is ``rmsnorm`` or ``layernorm``, ``which`` is ``forward``, ``backward`` or ``dweight``."""
    make, signature = {
        "forward": (
            _forward,
            "({e}2, {e}1, {e}1, {e}2, {e}2, {e}2, {s}1, {s}1, float64, float64, int32, int32, int32)",
        ),
        "backward": (
            _backward,
            "({e}2, {e}2, {e}1, {s}1, {s}1, {e}2, {e}2, {p}, {p}, float64, int32, int32)",
        ),
        "dweight": (_dweight, "({p}, {s}1, int32)"),
    }[which]
    f = functions(dtype)
    shapes = {
        "{e}2": f"{f.element}[:, :]",
        "{e}1": f"{f.element}[::1]",
        "{s}1": f"{f.statistics}[::1]",
        "{p}": "float64[:, ::1]",
    }
    for short, full in shapes.items():
        signature = signature.replace(short, full)
    return NumbaKernel(make(dtype, norm == "layernorm"), f"void{signature}", f"{norm}_{which}_{dtype}")


def _forward(dtype, layer):
    load, store, compute, *_ = functions(dtype)

    def norm_forward(x, weight, bias, residual, y, s, mean, rstd, eps, offset, llama, has_bias, has_residual):
        scratch = cuda.shared.array(WARPS, float64)
        rows, cols = x.shape
        for r in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            center, squares = 0.0, 0.0
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                v = load(x[r, c])
                if has_residual:
                    rounded = store(v + load(residual[r, c]))
                    s[r, c] = rounded
                    v = load(rounded)
                if layer:
                    center += float64(v)
                else:
                    squares += float64(v) * float64(v)
            if layer:
                center = block_sum(center, scratch) / cols
                for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                    d = float64(load(s[r, c]) if has_residual else load(x[r, c])) - center
                    squares += d * d
            scale = compute(1.0 / math.sqrt(block_sum(squares, scratch) / cols + eps))
            if cuda.threadIdx.x == 0:
                rstd[r] = scale
                if layer:
                    mean[r] = compute(center)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                v = load(s[r, c]) if has_residual else load(x[r, c])
                if layer:
                    n = (v - compute(center)) * scale
                    add = load(bias[c]) if has_bias else compute(0.0)
                    result = cuda.fma(
                        n, load(weight[c]), add
                    )  # explicit, because compilers may or may not fuse
                else:
                    n, gain = v * scale, compute(offset) + load(weight[c])
                    if llama:
                        n, gain = load(store(n)), load(store(gain))
                    result = n * gain
                y[r, c] = store(result)

    return norm_forward


def _backward(dtype, layer):
    load, store, compute, *_ = functions(dtype)

    @cuda.jit(device=True)
    def normalised(x, mean, scale):
        return (load(x) - mean) * scale if layer else load(x) * scale

    @cuda.jit(device=True)
    def gradient_of_n(dy, weight, offset, llama):
        if layer:
            return load(dy) * load(weight)
        gain = compute(offset) + load(weight)
        if llama:
            gain = load(store(gain))
        m = load(dy) * gain
        return load(store(m)) if llama else m

    def norm_backward(
        dy,
        x,
        weight,
        mean,
        rstd,
        dresidual,
        dx,
        weight_partial,
        bias_partial,
        offset,
        llama,
        has_dresidual,
    ):
        scratch = cuda.shared.array(WARPS, float64)
        rows, cols = x.shape
        block = cuda.blockIdx.x
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            weight_partial[block, c] = 0.0
            if layer:
                bias_partial[block, c] = 0.0
        for r in range(block, rows, cuda.gridDim.x):
            center, scale = mean[r], rstd[r]
            products, gradients = 0.0, 0.0
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                n = normalised(x[r, c], center, scale)
                m = gradient_of_n(dy[r, c], weight[c], offset, llama)
                products += float64(m * n)
                seen = load(store(n)) if llama else n  # n as the forward multiplied it with the weight
                weight_partial[block, c] += float64(load(dy[r, c])) * float64(seen)
                if layer:
                    gradients += float64(m)
                    bias_partial[block, c] += float64(load(dy[r, c]))
            mean_product, mean_gradient = compute(block_sum(products, scratch) / cols), compute(0.0)
            if layer:
                mean_gradient = compute(block_sum(gradients, scratch) / cols)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                n = normalised(x[r, c], center, scale)
                m = gradient_of_n(dy[r, c], weight[c], offset, llama)
                gradient = scale * (m - n * mean_product - mean_gradient)
                if has_dresidual:
                    gradient += load(dresidual[r, c])
                dx[r, c] = store(gradient)

    return norm_backward


def _dweight(dtype, _):
    compute = functions(dtype).compute

    def norm_dweight(partial, dweight, add):
        """Add the blocks' sums, first to last, one thread per column; with ``add``, add to dweight."""
        c = cuda.grid(1)
        if c < partial.shape[1]:
            total = 0.0
            for block in range(partial.shape[0]):
                total += partial[block, c]
            if add:
                total += dweight[c]
            dweight[c] = compute(total)

    return norm_dweight
