"""RMSNorm for Numba, forward and backward: the readable twin of cuda/rmsnorm*.cu.

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n

A block takes a row at a time; thread t owns columns t, t + 256, ... of it, in both passes over the row, of which the
second finds it in L1 or L2. Sums over a row are float64: nothing finite overflows, where the CUDA C++ kernel scales.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda, float64

from gpu_ops.kernels.jit import NumbaKernel
from gpu_ops.kernels.numba_cuda.dtype import functions

__all__ = ["kernel"]

WARPS = 8  # of the 256 threads of a block


@cuda.jit(device=True)
def block_sum(value, scratch):
    """The sum over the threads of a block, the same bits for all: within warps, then over them."""
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    for shift in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, shift)
    if lane == 0:
        scratch[warp] = value
    cuda.syncthreads()
    total = 0.0
    for w in range(WARPS):
        total += scratch[w]
    cuda.syncthreads()  # scratch is free for the next sum
    return total


@cache
def kernel(which: str, dtype: str, residual: bool) -> NumbaKernel:
    """``which`` is ``forward``, ``backward`` or ``dweight``; ``residual``: whether that argument is there."""
    make, signature = {
        "forward": (_forward, "({e}2, {e}1, {e}2, {e}2, {e}2, {s}1, float64, float64, int32)"),
        "backward": (_backward, "({e}2, {e}2, {e}1, {s}1, {e}2, {e}2, float64[:, ::1], float64, int32)"),
        "dweight": (_dweight, "(float64[:, ::1], {s}1)"),
    }[which]
    f = functions(dtype)
    shapes = {"{e}2": f"{f.element}[:, :]", "{e}1": f"{f.element}[::1]", "{s}1": f"{f.statistics}[::1]"}
    for short, full in shapes.items():
        signature = signature.replace(short, full)
    name = f"rmsnorm_{which}_{dtype}" + ("_residual" if residual else "")
    return NumbaKernel(make(dtype, residual), f"void{signature}", name)


def _forward(dtype, has_residual):
    load, store, compute, *_ = functions(dtype)

    def rmsnorm_forward(x, weight, residual, y, s, rstd, eps, offset, llama):
        scratch = cuda.shared.array(WARPS, float64)
        rows, cols = x.shape
        for r in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
            squares = 0.0
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                v = load(x[r, c])
                if has_residual:
                    rounded = store(v + load(residual[r, c]))
                    s[r, c] = rounded
                    v = load(rounded)
                squares += float64(v) * float64(v)
            scale = compute(1.0 / math.sqrt(block_sum(squares, scratch) / cols + eps))
            if cuda.threadIdx.x == 0:
                rstd[r] = scale
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                v = load(s[r, c]) if has_residual else load(x[r, c])
                n, gain = v * scale, compute(offset) + load(weight[c])
                if llama:
                    n, gain = load(store(n)), load(store(gain))
                y[r, c] = store(n * gain)

    return rmsnorm_forward


def _backward(dtype, has_dresidual):
    load, store, compute, *_ = functions(dtype)

    @cuda.jit(device=True)
    def gradient_of_n(dy, weight, offset, llama):
        gain = compute(offset) + load(weight)
        if llama:
            gain = load(store(gain))
        m = load(dy) * gain
        return load(store(m)) if llama else m

    def rmsnorm_backward(dy, x, weight, rstd, dresidual, dx, partial, offset, llama):
        scratch = cuda.shared.array(WARPS, float64)
        rows, cols = x.shape
        block = cuda.blockIdx.x
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            partial[block, c] = 0.0
        for r in range(block, rows, cuda.gridDim.x):
            scale = rstd[r]
            products = 0.0
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                n = load(x[r, c]) * scale
                products += float64(gradient_of_n(dy[r, c], weight[c], offset, llama) * n)
                seen = load(store(n)) if llama else n  # by the weight, in the forward
                partial[block, c] += float64(load(dy[r, c])) * float64(seen)
            mean = compute(block_sum(products, scratch) / cols)
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                n = load(x[r, c]) * scale
                gradient = scale * (gradient_of_n(dy[r, c], weight[c], offset, llama) - n * mean)
                if has_dresidual:
                    gradient += load(dresidual[r, c])
                dx[r, c] = store(gradient)

    return rmsnorm_backward


def _dweight(dtype, _):
    compute = functions(dtype).compute

    def rmsnorm_dweight(partial, dweight):
        """A thread per column adds the blocks' sums, first to last."""
        c = cuda.grid(1)
        if c < partial.shape[1]:
            total = 0.0
            for block in range(partial.shape[0]):
                total += partial[block, c]
            dweight[c] = compute(total)

    return rmsnorm_dweight
