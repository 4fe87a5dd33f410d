"""AdamW on the CPU: one pass over parameters, gradients and moments, in blocks that stay in the first cache.

g = scale grads,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
u = size m / (sqrt(v) correction + eps),  p = p - decay p - u

8-bit moments are codes with a scale for each tile of 256 elements, of m and of sqrt(v): see reference/rows/adamw.py.

A block takes several short loops: LLVM makes vector code of a loop that writes three arrays, and gives up on one that
writes five. No operation is fused with another, so that bits are those of other devices.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import scratch
from gpu_ops.kernels.common.cpu.dtype import (
    as_uint32,
    bits,
    load,
    magnitude,
    of_magnitude,
    read_row,
    store,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import Kernel, as_written, compute, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.common.cpu.philox import philox4x32

Array = np.ndarray[Any, Any]

BLOCK = 1024  # elements: 512 to 4096 are as fast
TILE = 256  # elements that share 32 counters of Philox, and a scale of 8-bit moments
ROUND = np.float32(1.5 * 2.0**23)  # x + this - this is x rounded to an integer


class Numbers(NamedTuple):
    """Numbers of a step, in the order of the kernels' array."""

    scale: float
    decay: float
    size: float
    correction: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float


def config(size: int) -> str:
    n_blocks = -(-size // BLOCK)
    return f"{n_blocks} blocks of {BLOCK} elements, {items_per_task(n_blocks, BLOCK)} per task"


def adamw_step(arrays: list[Any], numbers: Numbers, random: tuple[int, int] | None) -> None:
    """``arrays``: params, grads, m, v, master or None, mask or None, all (n,); 8-bit m and v with their scales.

    ``random``: seed and step of stochastic rounding; None: to nearest.
    """
    params, grads, m, v, master, mask = arrays
    quantized = isinstance(m, tuple)
    (m, m_scale), (v, v_scale) = (m, v) if quantized else ((m, m), (v, v))
    n_blocks = -(-len(m) // BLOCK)
    chunk = items_per_task(n_blocks, BLOCK)
    weights = params if master is None else master
    variant = "rounded" if weights.dtype.itemsize == 2 else "own" if master is None else "master"
    flags = mask is not None, random is not None
    mask_or_m = m if mask is None else mask  # m stands in for a mask that is not read
    states = m, v, m_scale, v_scale, m_scale if master is None else master
    lines = bits(params), bits(grads), *states, mask_or_m.view(np.uint8)
    seed, step = (0, 0) if random is None else random
    launch(
        KERNELS[variant, quantized][params.dtype, grads.dtype], -(-n_blocks // chunk), chunk, *lines,
        np.array(numbers, m_scale.dtype), *map(np.uint64, (seed, step)), *flags,
    )  # fmt: skip


@as_written
def moments(g, m, v, u, scale, beta1, rest1, beta2, rest2, size, correction, eps):
    for i in range(len(m)):
        x = load(g, i) * scale
        new_m = beta1 * m[i] + rest1 * x
        new_v = beta2 * v[i] + rest2 * x * x
        m[i], v[i] = new_m, new_v
        u[i] = size * new_m / (np.sqrt(new_v) * correction + eps)


@as_written
def changed(w, u):
    for i in range(len(w)):
        w[i] = w[i] - u[i]


@as_written
def decayed(w, u, decay):
    for i in range(len(w)):
        w[i] = w[i] - decay * w[i] - u[i]


@as_written
def decayed_where(w, u, decay, mask):
    for i in range(len(w)):
        w[i] = (w[i] - decay * w[i] if mask[i] else w[i]) - u[i]


@as_written
def widened(w, x):
    for i in range(len(w)):
        w[i] = load(x, i)


@as_written
def nearest(x, w):
    for i in range(len(w)):
        store(x, i, w[i])


@as_written
def stochastic(x, w, low):
    """Round stochastically. ``low``: 16 random bits for each element. See reference/rows/adamw.py."""
    for i in range(len(w)):
        u = as_uint32(w[i])
        down = u >> np.uint32(16)
        up = (u + low[i]) >> np.uint32(16)
        whole = u & np.uint32(0x7FFFFFFF)
        near = down if (up & np.uint32(0x7FFF)) == np.uint32(0x7F80) or whole >= np.uint32(0x7F800000) else up
        x[i] = np.uint16(near | np.uint32(0x40) if whole > np.uint32(0x7F800000) else near)


@as_written
def random_bits(low, words, first, seed, step):
    """Draw bits for the elements of a block from ``first`` on, a multiple of TILE."""
    count = words.shape[1]
    c0, c1, c2, c3 = words[0], words[1], words[2], words[3]
    for i in range(count):
        counter = np.uint64(first // 8 + i)
        c0[i], c1[i] = np.uint32(counter), np.uint32(counter >> np.uint64(32))
        c2[i], c3[i] = np.uint32(step), np.uint32(step >> np.uint64(32))
    philox4x32(c0, c1, c2, c3, count, np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    for tile in range(count // 32):
        for lane in range(32):
            i, at = 32 * tile + lane, TILE * tile + 4 * lane
            low[at], low[at + 1] = c0[i] & np.uint32(0xFFFF), c1[i] & np.uint32(0xFFFF)
            low[at + 2], low[at + 3] = c2[i] & np.uint32(0xFFFF), c3[i] & np.uint32(0xFFFF)
        for lane in range(32):
            i, at = 32 * tile + lane, TILE * tile + 128 + 4 * lane
            low[at], low[at + 1] = c0[i] >> np.uint32(16), c1[i] >> np.uint32(16)
            low[at + 2], low[at + 3] = c2[i] >> np.uint32(16), c3[i] >> np.uint32(16)


@as_written
def rows_of_states(m, v, m_scale, v_scale, wide, first, stop):
    return write_row(m, ())[first:stop], write_row(v, ())[first:stop]


@as_written
def keep_states(new_m, new_v, m, v, m_scale, v_scale, first):
    pass


@as_written
def decoded_states(m, v, m_scale, v_scale, wide, first, stop):
    for start in range(first, stop, TILE):
        end, at = min(start + TILE, stop), start - first
        decode(
            wide[0, at : at + end - start],
            read_row(m, ())[start:end],
            m_scale[start // TILE],
            np.float32(127),
        )
        root = wide[1, at : at + end - start]
        decode(root, read_row(v, ())[start:end], v_scale[start // TILE], np.float32(255))
        for i in range(len(root)):
            root[i] = root[i] * root[i]
    return wide[0, : stop - first], wide[1, : stop - first]


@as_written
def decode(x, codes, scale, most):
    unit = scale / (most * most)
    for i in range(len(x)):
        c = np.float32(codes[i])
        x[i] = c * abs(c) * unit


@as_written
def encode_states(new_m, new_v, m, v, m_scale, v_scale, first):
    for at in range(0, len(new_m), TILE):
        end, start = min(at + TILE, len(new_m)), first + at
        stop, tile = start + end - at, start // TILE
        x, root = new_m[at:end], new_v[at:end]
        for i in range(len(root)):
            root[i] = np.sqrt(root[i])
        m_scale[tile], v_scale[tile] = largest(x), largest(root)
        encode_signed(write_row(m, ())[start:stop], x, m_scale[tile])
        encode_unsigned(write_row(v, ())[start:stop], root, v_scale[tile])


@as_written
def largest(x):
    top = magnitude(x[0])
    for i in range(len(x)):
        top = max(top, magnitude(x[i]))
    return of_magnitude(top)


@as_written
def code_of(x, scale, most):
    part = abs(x) / scale if scale > np.float32(0) else np.float32(0)
    c = (np.sqrt(part) * most + ROUND) - ROUND
    return c if c <= most else most


@as_written
def encode_signed(codes, x, scale):
    for i in range(len(x)):
        c = np.int32(code_of(x[i], scale, np.float32(127)))
        codes[i] = -c if x[i] < np.float32(0) else c


@as_written
def encode_unsigned(codes, x, scale):
    for i in range(len(x)):
        c = np.int32(code_of(x[i], scale, np.float32(255)))
        codes[i] = 1 if c == 0 and x[i] != np.float32(0) else c


def _kernel(kind: str, quantized: bool) -> Kernel:
    """Kernel. ``own``: float32 or float64 params; ``master``: params rounded from it; ``rounded``: no master."""
    find, keep = (decoded_states, encode_states) if quantized else (rows_of_states, keep_states)

    def adamw(
        state, n_tasks, chunk, params, grads, m, v, m_scale, v_scale, master, mask, numbers, seed, step, masked,
        is_stochastic,
    ):  # fmt: skip
        scale, decay, size, correction = numbers[0], numbers[1], numbers[2], numbers[3]
        beta1, rest1, beta2, rest2, eps = numbers[4], numbers[5], numbers[6], numbers[7], numbers[8]
        updates, weights, states = (
            scratch(1, BLOCK, numbers[0]),
            scratch(1, BLOCK, numbers[0]),
            scratch(2, BLOCK, numbers[0]),
        )
        low, words = scratch(1, BLOCK, np.uint32(0)), scratch(4, BLOCK // 8, np.uint32(0))
        task = claim(state)
        while task < n_tasks:
            for first in range(task * chunk * BLOCK, min((task + 1) * chunk * BLOCK, len(m)), BLOCK):
                stop = min(first + BLOCK, len(m))
                u, x = updates[0, : stop - first], write_row(params, ())[first:stop]
                new_m, new_v = find(m, v, m_scale, v_scale, states, first, stop)
                moments(
                    read_row(grads, ())[first:stop], new_m, new_v, u,
                    scale, beta1, rest1, beta2, rest2, size, correction, eps,
                )  # fmt: skip
                keep(new_m, new_v, m, v, m_scale, v_scale, first)
                if kind == "own":
                    w = x
                elif kind == "master":
                    w = write_row(master, ())[first:stop]
                else:
                    w = weights[0, : stop - first]
                    widened(w, x)
                if decay == 0:  # 0 * inf would be NaN
                    changed(w, u)
                elif masked:
                    decayed_where(w, u, decay, read_row(mask, ())[first:stop])
                else:
                    decayed(w, u, decay)
                if kind == "own":
                    continue
                if is_stochastic:
                    random_bits(low[0], words, first, seed, step)
                    stochastic(x, w, low[0])
                else:
                    nearest(x, w)
            task = claim(state)

    def signature(param: str, grad: str) -> tuple[types.Type, ...]:
        real = compute(param)
        codes = (write("int8", 1), write("uint8", 1)) if quantized else (write(real.name, 1),) * 2
        states = (*codes, *(write(real.name, 1),) * 3)
        arrays = (write(param, 1), read(grad, 1), *states, read("uint8", 1), read(real.name, 1))
        return (types.int64, *arrays, types.uint64, types.uint64, types.boolean, types.boolean)

    adamw.__name__ = f"adamw_{kind}{'_8bit' * quantized}"
    variants = tuple(v for v in VARIANTS[kind] if not (quantized and "float64" in v))
    return kernel(signature, variants, fastmath=frozenset())(adamw)


VARIANTS = {
    "own": (*(("float32", grad) for grad in ("float32", "bfloat16", "float16")), ("float64", "float64")),
    "master": tuple((x, grad) for x in ("bfloat16", "float16") for grad in (x, "float32")),
    "rounded": (("bfloat16", "bfloat16"), ("bfloat16", "float32")),
}
KERNELS = {
    (kind, quantized): _kernel(kind, quantized)
    for kind, quantized in itertools.product(VARIANTS, (False, True))
}
