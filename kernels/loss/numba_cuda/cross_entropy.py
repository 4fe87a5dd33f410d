"""Cross-entropy for Numba, forward and backward: the readable twin of cross_entropy.cu.

u = softcap tanh(z / softcap), or z; with target y and class weights w

forward    loss = own w_y (lse - u_y) + others sum(w (lse - u)) + z_loss lse^2      own = 1 - label_smoothing
backward   dz = dloss (p (own w_y + others sum(w) + 2 z_loss lse) - others w - own w_y [j = y]) du/dz
           p = exp(u - lse) / sum(exp(u - lse))
total      the sum of the losses, or dloss, divided by the sum of w_y, by one block

lse is rounded: float32 holds that of logits near 1e7 to the nearest integer. So lse - u is computed as
(max - u) + log(sum), and p divides by the sum of the row's exponentials.

A block takes one row; thread i owns columns i, i + 256, ... A row whose target is ignored is not read. Gradients that
are narrower than logits may overlap them.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda, float64
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block, plus
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["backward", "forward", "total"]

block_sum, block_max = over_block(plus), over_block(cuda.jit(device=True)(lambda a, b: a if a > b else b))

VALUE, COUNT, ROWS = 0, 5, 6  # kinds of numbers, as in cross_entropy.py
NOT_A_NUMBER = math.nan


@cuda.jit(device=True)
def weight_of(target, weight, weighted, cols):
    """Class weight of a row that is not ignored; NaN if its target is not a class."""
    if target < 0 or target >= cols:
        return NOT_A_NUMBER
    return float64(weight[target]) if weighted else 1.0


@cuda.jit(device=True)
def growth(weights, maximum, grown):
    """Increase of a sum of w * (maximum - u) when the maximum grows; ``weights``: the sum of w."""
    return weights * (grown - maximum) if weights != 0 else weights


@cache
def _capped(dtype: str):
    number = functions(dtype).compute
    rounded = libdevice.dmul_rn if number is float64 else libdevice.fmul_rn

    @cuda.jit(device=True)
    def capped(z, softcap):
        """Return u of a logit, and du/dz. u is rounded alike in every kernel: no FMA may include the product."""
        if softcap == number(0.0):
            return z, number(1.0)
        t = math.tanh(z / softcap)
        return rounded(softcap, t), number(1.0) - t * t

    return capped


@cache
def forward(dtype: str, targets: str) -> NumbaKernel:
    load, _, number, element, statistics = functions(dtype)
    lowest = float(np.finfo(np.float64 if dtype == "float64" else np.float32).min)
    capped = _capped(dtype)

    def cross_entropy_forward(
        targets,
        weight,
        logits,
        loss,
        lse,
        has_lse,
        ignore_index,
        weighted,
        own,
        others,
        z_loss,
        softcap,
    ):
        scratch = cuda.shared.array(WARPS, number)
        r, cols, cap = cuda.blockIdx.x, logits.shape[1], number(softcap)
        target = targets[r]
        kept = target != ignore_index
        top, exponentials, distances, weight_sum = number(lowest), number(0.0), number(0.0), number(0.0)
        for c in range(cuda.threadIdx.x, cols if kept else 0, cuda.blockDim.x):
            u, _ = capped(load(logits[r, c]), cap)
            if u > top:
                exponentials *= math.exp(top - u)
                distances += growth(weight_sum, top, u)
                top = u
            exponentials += math.exp(u - top)
            if others > 0.0:
                w = number(weight[c]) if weighted else number(1.0)
                distances += w * (top - u)
                weight_sum += w
        row_max = block_max(top, scratch)
        exponentials = block_sum(exponentials * math.exp(top - row_max), scratch)
        distances = block_sum(distances + growth(weight_sum, top, row_max), scratch)
        weight_sum = block_sum(weight_sum, scratch)
        if cuda.threadIdx.x > 0:
            return
        log_sum = math.log(exponentials)
        whole = row_max + log_sum
        if has_lse:
            lse[r] = whole if kept else number(-math.inf)
        value = number(0.0)
        if kept:
            at = number(0.0)
            if 0 <= target < cols:
                at, _ = capped(load(logits[r, target]), cap)
            # the difference first: a loss near 0 keeps its digits, as does one of large logits
            value = number(own * weight_of(target, weight, weighted, cols)) * ((row_max - at) + log_sum)
            if others > 0.0:
                value += number(others) * (distances + weight_sum * log_sum)
            value += number(z_loss) * whole * whole
        loss[r] = value

    line = f"{statistics}[::1]"
    arrays = f"{targets}[::1], {line}, {element}[:, :], {line}, {line}"
    signature = f"void({arrays}, int32, int64, int32, float64, float64, float64, float64)"
    return NumbaKernel(cross_entropy_forward, signature, f"cross_entropy_forward_{dtype}_{targets}")


@cache
def backward(dtype: str, targets: str, gradient: str) -> NumbaKernel:
    load, _, number, element, statistics = functions(dtype)
    store, capped, narrows = functions(gradient).store, _capped(dtype), gradient != dtype

    def cross_entropy_backward(
        targets, weight, dloss, factors, lse, logits, dlogits, step, ignore_index, weighted, own, others,
        z_loss, softcap,
    ):  # fmt: skip
        r, cols, cap = cuda.blockIdx.x, logits.shape[1], number(softcap)
        target = targets[r]
        if target == ignore_index:
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                dlogits[r, c] = store(number(0.0))
            return
        scratch = cuda.shared.array(WARPS, number)
        factor, row_lse, exponentials = dloss[r * step], lse[r], number(0.0)
        for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
            u, _ = capped(load(logits[r, c]), cap)
            exponentials += math.exp(u - row_lse)
        exponentials = block_sum(exponentials, scratch)
        mine = number(own * weight_of(target, weight, weighted, cols))
        weight_sum = float64(factors[1]) if weighted and others > 0.0 else float64(cols)
        scale = (mine + number(others * weight_sum) + number(2.0 * z_loss) * row_lse) / exponentials
        for start in range(0, cols, cuda.blockDim.x):
            c, value = start + cuda.threadIdx.x, number(0.0)
            if c < cols:
                u, slope = capped(load(logits[r, c]), cap)
                w = number(weight[c]) if weighted and others > 0.0 else number(1.0)
                share = math.exp(u - row_lse) * scale - number(others) * w
                if c == target:
                    share -= mine
                value = factor * share * slope
            if narrows:  # they overlap logits of this round and of earlier ones
                cuda.syncthreads()
            if c < cols:
                dlogits[r, c] = store(value)

    line = f"{statistics}[::1]"
    matrices = f"{element}[:, :], {functions(gradient).element}[:, :]"
    arrays = f"{targets}[::1], {line}, {line}, {line}, {line}, {matrices}"
    signature = f"void({arrays}, int32, int64, int32, float64, float64, float64, float64)"
    name = f"cross_entropy_backward_{dtype}_{gradient}_{targets}"
    return NumbaKernel(cross_entropy_backward, signature, name)


@cache
def total(dtype: str, targets: str, below: str) -> NumbaKernel:
    """result[0] = above / below, 0 if below is 0; result[1], if there is one, the sum of the class weights."""

    def cross_entropy_total(
        targets, weight, above, below, result, above_value, below_value, above_kind, below_kind,
        ignore_index, weighted, cols,
    ):  # fmt: skip
        scratch = cuda.shared.array(WARPS, float64)
        losses, count, weights = 0.0, 0.0, 0.0
        for i in range(cuda.threadIdx.x, len(targets), cuda.blockDim.x):
            if above_kind == ROWS:
                losses += float64(above[i])
            if below_kind == COUNT and targets[i] != ignore_index:
                count += weight_of(targets[i], weight, weighted, cols)
        if weighted and len(result) > 1:
            for c in range(cuda.threadIdx.x, cols, cuda.blockDim.x):
                weights += float64(weight[c])
        losses = block_sum(losses, scratch)
        count = block_sum(count, scratch)
        weights = block_sum(weights, scratch)
        if cuda.threadIdx.x > 0:
            return
        dividend, divisor = above_value, below_value
        if above_kind != VALUE:
            dividend = losses if above_kind == ROWS else float64(above[0])
        if below_kind != VALUE:
            divisor = count if below_kind == COUNT else float64(below[0])
        result[0] = dividend / divisor if divisor != 0.0 else 0.0
        if len(result) > 1:
            result[1] = weights

    line = f"{functions(dtype).statistics}[::1]"
    arrays = f"{targets}[::1], {line}, {line}, {below}[::1], {line}"
    signature = f"void({arrays}, float64, float64, int32, int32, int64, int32, int64)"
    return NumbaKernel(cross_entropy_total, signature, f"cross_entropy_total_{dtype}_{targets}_{below}")
