"""AdamW for Numba: the readable twin of adamw.cu.

g = scale grads,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
p = p - decay p - size m / (sqrt(v) correction + eps)

factors    one thread: computes scale, decay, size, correction from step, learning rate and others, in float64
step       a thread takes one element; it updates master if there is one, and params receive the rounded result

8-bit moments have a scale for each block of 256 elements, of m and of sqrt(v): code c is scale c |c| / most^2.

No operation is fused with another, so that bits are those of other devices.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda, float32, float64, int64, uint16, uint32, uint64
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.common.numba_cuda.philox import philox4x32
from gpu_ops.kernels.common.numba_cuda.reduce import WARPS, over_block
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["factors", "step"]

SCALE, DECAY, SIZE, CORRECTION, SKIP, STEP = range(6)


@cache
def factors(step: str, lr: str, grad_scale: str, skip: str) -> NumbaKernel:
    """Kernel for the factors. The names are dtypes of arrays; a kind of 0 means that there is none."""

    def adamw_factors(
        step, lr, grad_scale, skip, step_value, lr_value, scale_value, step_kind, lr_kind, scale_kind, skip_kind,
        beta1, beta2, weight_decay, factors,
    ):  # fmt: skip
        t = max(float64(step[0]) if step_kind else float64(step_value), 1.0)
        rate = float64(lr[0]) if lr_kind else lr_value
        factors[SCALE] = float64(grad_scale[0]) if scale_kind else scale_value
        factors[DECAY] = rate * weight_decay
        factors[SIZE] = rate / (1.0 - math.pow(beta1, t))
        factors[CORRECTION] = 1.0 / math.sqrt(1.0 - math.pow(beta2, t))
        factors[SKIP] = 1.0 if skip_kind and skip[0] != 0 else 0.0
        factors[STEP] = t

    dtypes = (step, lr, grad_scale, skip)
    arrays = ", ".join(f"{dtype}[::1]" for dtype in dtypes)
    numbers = "int64, float64, float64, int32, int32, int32, int32, float64, float64, float64"
    signature = f"void({arrays}, {numbers}, float64[::1])"
    return NumbaKernel(adamw_factors, signature, "_".join(("adamw_factors", *dtypes)))


@cuda.jit(device=True)
def stochastic(x, random):
    """Round to bfloat16, up or down by 16 random bits. Exact and non-finite numbers are unchanged."""
    word = uint32(libdevice.float_as_int(x))
    down, up = word >> uint32(16), (word + random) >> uint32(16)
    if x != x:
        return uint16(down | uint32(0x40))
    if up & uint32(0x7F80) == uint32(0x7F80) or down & uint32(0x7F80) == uint32(0x7F80):
        return uint16(down)
    return uint16(up)


@cuda.jit(device=True)
def random_bits(i, seed, t):
    """Random bits of element i, as defined in reference/rows/adamw.py."""
    tile, place = i // int64(256), uint32(i % int64(256))
    counter = uint64(tile) * uint64(32) + uint64((place >> uint32(2)) & uint32(31))
    word0, word1, word2, word3 = philox4x32(
        uint32(counter), uint32(counter >> uint64(32)), uint32(t), uint32(t >> uint64(32)),
        uint32(seed), uint32(seed >> uint64(32)),
    )  # fmt: skip
    low, high = (word2, word3) if place & uint32(2) else (word0, word1)
    word = high if place & uint32(1) else low
    return word >> uint32(16) if place >= uint32(128) else word & uint32(0xFFFF)


block_max = over_block(cuda.jit(device=True)(lambda a, b: a if a > b else b))


@cuda.jit(device=True)
def take_plain(line, scale, i, most):
    return line[i]


@cuda.jit(device=True)
def keep_plain(line, scale, i, most, value):
    if i < len(line):
        line[i] = value


@cuda.jit(device=True)
def take_code(codes, scale, i, most):
    c = float32(codes[i])
    return libdevice.fmul_rn(c * abs(c), libdevice.fdiv_rn(scale[cuda.blockIdx.x], most * most))


@cuda.jit(device=True)
def keep_code(codes, scale, i, most, value):
    """Write codes and their scale. All threads of a block call it."""
    scratch = cuda.shared.array(WARPS, np.int32)
    # bits of magnitudes have the order of the numbers, NaN above infinity
    bits = np.int32(libdevice.float_as_int(value) & np.int32(0x7FFFFFFF))
    top = libdevice.int_as_float(block_max(bits, scratch))
    if i >= len(codes):
        return
    if cuda.threadIdx.x == 0:
        scale[cuda.blockIdx.x] = top
    part = libdevice.fdiv_rn(abs(value), top) if top > float32(0.0) else float32(0.0)
    near = libdevice.rintf(libdevice.fmul_rn(libdevice.fsqrt_rn(part), most))
    c = np.int32(near) if near <= most else np.int32(most)
    if most > float32(127.0) and c == 0 and value != float32(0.0):
        c = np.int32(1)  # a step divides by it
    codes[i] = -c if value < float32(0.0) else c


@cache
def step(params: str, grads: str, has_master: bool, bits: int) -> NumbaKernel:
    load, store, real, element, statistics = functions(params)
    load_grad = functions(grads).load
    letter = "d" if params == "float64" else "f"
    mul, add, div, sqrt = (getattr(libdevice, f"{letter}{name}_rn") for name in ("mul", "add", "div", "sqrt"))
    take, keep = (take_code, keep_code) if bits == 8 else (take_plain, keep_plain)
    may_draw, holds_roots = params == "bfloat16", bits == 8

    def adamw_step(
        params, grads, m, v, m_scale, v_scale, master, mask, factors, seed, beta1, rest1, beta2, rest2, eps, masked,
        is_stochastic,
    ):  # fmt: skip
        if factors[SKIP] != 0.0:
            return
        i = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        g, first, second = real(0.0), real(0.0), real(0.0)
        if i < len(m):
            g = mul(real(load_grad(grads[i])), real(factors[SCALE]))
            first, second = take(m, m_scale, i, real(127.0)), take(v, v_scale, i, real(255.0))
        if holds_roots:
            second = mul(second, second)
        first = add(mul(real(beta1), first), mul(real(rest1), g))
        second = add(mul(real(beta2), second), mul(mul(real(rest2), g), g))
        root = sqrt(second)
        keep(m, m_scale, i, real(127.0), first)
        keep(v, v_scale, i, real(255.0), root if holds_roots else second)
        if i >= len(m):
            return
        update = div(mul(real(factors[SIZE]), first), add(mul(root, real(factors[CORRECTION])), real(eps)))
        w = master[i] if has_master else load(params[i])
        decay = real(factors[DECAY])
        if decay != real(0.0) and (not masked or mask[i]):  # 0 * inf would be NaN
            w = add(w, -mul(decay, w))
        w = add(w, -update)
        if has_master:
            master[i] = w
        if may_draw and is_stochastic:
            params[i] = stochastic(w, random_bits(i, seed, uint64(factors[STEP])))
        else:
            params[i] = store(w)

    line = f"{statistics}[::1]"
    moments = "int8[::1], uint8[::1]" if bits == 8 else f"{line}, {line}"
    arrays = f"{element}[::1], {functions(grads).element}[::1], {moments}, {line}, {line}, {line}, uint8[::1]"
    signature = (
        f"void({arrays}, float64[::1], uint64, float64, float64, float64, float64, float64, int32, int32)"
    )
    name = f"adamw_step_{params}_{grads}{'_master' * has_master}{'_8bit' * holds_roots}"
    return NumbaKernel(adamw_step, signature, name)
