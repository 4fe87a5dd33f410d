"""Gated activations on the CPU, ``y = act(gate) * up``: one pass, forward and backward.

Bytes per element: forward reads 2 and writes 1, backward reads 3 and writes 2; 20 (silu) to 40 flops,
which vector code hides behind the memory.

One kernel per activation, whose function is inlined into the loop. Infinities take their limits,
act(-inf) = -0 and act'(inf) = 1: where ``inf * 0`` would appear, the infinite factor is first clamped to
the largest finite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.fastmath import exp
from gpu_ops.kernels.numba_cpu.ir.memory import block, by_blocks, fence, same, scratch, stays_in_cache
from gpu_ops.kernels.numba_cpu.jit import Kernel, elementwise, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

# A longer row is cut into blocks of this many elements, so that one row too keeps every core busy.
BLOCK = 1 << 13


def config(rows: int, cols: int) -> str:
    n_blocks, chunk = _blocks(rows, cols)
    return f"{n_blocks} blocks of at most {min(cols, BLOCK)} elements, {min(n_blocks, chunk)} per task"


def forward(gate: Array, up: Array, y: Array, *, activation: str) -> None:
    """``y = act(gate) * up``, all (rows, cols); y may be gate's memory."""
    streaming = not stays_in_cache(y.nbytes)
    gate, up, y = _long_rows(gate, up, y)
    n_blocks, chunk = _blocks(*gate.shape)
    n_tasks = -(-n_blocks // chunk)
    launch(FORWARD[activation][gate.dtype], n_tasks, chunk, bits(gate), bits(up), bits(y), streaming)


def backward(
    dy: Array,
    gate: Array,
    up: Array,
    dgate: Array,
    dup: Array,
    *,
    activation: str,
) -> None:
    """``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``, all (rows, cols).

    dgate may be gate's memory and dup up's.
    """
    in_place = _same_memory(dgate, gate) and _same_memory(dup, up)
    arrays = _long_rows(dy, gate, up, dgate, dup)
    n_blocks, chunk = _blocks(*arrays[0].shape)
    n_tasks = -(-n_blocks // chunk)
    launch(BACKWARD[activation][gate.dtype], n_tasks, chunk, *map(bits, arrays), in_place)


def _same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data  # the caller allows no other overlap


def _long_rows(*arrays: Array) -> tuple[Array, ...]:
    """One long row when nothing lies between the rows: short rows would leave vectors half empty."""
    if len(arrays[0]) > 1 and all(x.flags.c_contiguous for x in arrays):
        return tuple(x.reshape(1, -1) for x in arrays)
    return arrays


def _blocks(rows: int, cols: int) -> tuple[int, int]:
    """The number of blocks, and how many of them one task takes."""
    n_blocks = rows * -(-cols // BLOCK)
    return n_blocks, items_per_task(n_blocks, min(cols, BLOCK))


# --- act(g) = g * c(g), where c rises from 0 to 1 -------------------------------------------------


@njit(inline="always")
def silu(g):
    s, _ = sigmoid(g)
    return above_minus_infinity(g) * s


@njit(inline="always")
def silu_backward(g):
    """act and act'."""
    s, rest = sigmoid(g)
    return above_minus_infinity(g) * s, s * (like(g, 1.0) + finite(g) * rest)


@njit(inline="always")
def gelu(g):
    phi, _ = normal(g)
    return above_minus_infinity(g) * phi


@njit(inline="always")
def gelu_backward(g):
    phi, density = normal(g)
    return above_minus_infinity(g) * phi, phi + finite(g) * density


@njit(inline="always")
def gelu_tanh(g):
    s, _ = sigmoid(tanh_argument(g))
    return above_minus_infinity(g) * s


@njit(inline="always")
def gelu_tanh_backward(g):
    s, rest = sigmoid(tanh_argument(g))
    near = clamp(g, like(g, -40.0), like(g, 40.0))  # beyond, s is 0 or 1 and the slope could overflow
    slope = like(g, SLOPE_1) + like(g, SLOPE_3) * near * near
    return above_minus_infinity(g) * s, s * (like(g, 1.0) + near * slope * rest)


@njit(inline="always")
def sigmoid(x):
    """sigmoid(x) and 1 - sigmoid(x), the latter without cancellation; their product is always finite."""
    e = exp(-x)
    s = like(x, 1.0) / (like(x, 1.0) + e)
    return s, finite(e) * s


# (1 + tanh z) / 2 = sigmoid(2 z),  2 z = SLOPE_1 * g + SLOPE_3 / 3 * g**3
SLOPE_1 = 2.0 * math.sqrt(2.0 / math.pi)
SLOPE_3 = 3.0 * 0.044715 * SLOPE_1


@njit(inline="always")
def tanh_argument(g):
    return g * (like(g, SLOPE_1) + like(g, SLOPE_3 / 3.0) * g * g)


def normal(g):
    """The normal distribution function and its density."""
    raise TypeError("compiled code only")


@overload(normal)
def _normal(g):
    return (lambda g: normal_float64(g)) if g == types.float64 else (lambda g: normal_float32(g))


@njit(inline="always")
def normal_float64(g):
    return 0.5 * math.erfc(-g * math.sqrt(0.5)), math.sqrt(0.5 / math.pi) * exp(-0.5 * g * g)


@njit(inline="always")
def normal_float32(g):
    """Phi(-a) = exp(-a^2 / 2) * polynomial in t = 1 / (1 + 0.3 a) for a >= 0: one formula, no branches.

    The polynomial is the minimax fit of exp(a^2 / 2) * Phi(-a) on [0, 14] in relative error, 5.8e-8;
    with float32 rounding Phi is within 2e-7.
    """
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3) * abs(g))
    p = np.float32(0.03837834852134263)
    p = p * t + np.float32(-0.16916638279325766)
    p = p * t + np.float32(0.2286606067688054)
    p = p * t + np.float32(-0.07650703619797662)
    p = p * t + np.float32(0.14253587883624855)
    p = p * t + np.float32(0.094683386164979)
    p = p * t + np.float32(0.12192037344142682)
    p = p * t + np.float32(0.11948768510479232)
    p = p * t + np.float32(7.169070897206087e-06)
    e = exp(np.float32(-0.5) * g * g)
    tail = e * p
    return select(g < np.float32(0.0), tail, np.float32(1.0) - tail), np.float32(math.sqrt(0.5 / math.pi)) * e


@njit(inline="always")
def select(condition, yes, no):
    return yes if condition else no


@njit(inline="always")
def clamp(x, low, high):
    """NaN passes through."""
    return low if x < low else (high if x > high else x)


@njit(inline="always")
def finite(x):
    """Infinities become the largest finite numbers, NaN stays."""
    return clamp(x, -largest(x), largest(x))


@njit(inline="always")
def above_minus_infinity(x):
    return -largest(x) if x < -largest(x) else x


def largest(x):
    raise TypeError("compiled code only")


@overload(largest, inline="always")
def _largest(x):
    value = np.finfo(np.float64).max if x == types.float64 else np.finfo(np.float32).max
    return lambda x: value


# --- kernels ---------------------------------------------------------------------------------------


def _forward_kernel(name: str, act: Callable[..., Any]) -> Kernel:
    @elementwise
    def gated(operands, start, y):
        gate, up = operands
        gate, up = gate[start : start + len(y)], up[start : start + len(y)]
        for i in range(len(y)):
            store(y, i, act(load(gate, i)) * load(up, i))

    def forward(state, n_tasks, chunk, gate, up, y, streaming):
        rows, cols = gate.shape
        line = scratch(1, block(y), y[0, 0])
        blocks_per_row = (cols + BLOCK - 1) // BLOCK
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
                r, start = b // blocks_per_row, b % blocks_per_row * BLOCK
                stop = min(start + BLOCK, cols)
                after = start if stop == cols else stop
                row_g, row_u, row_y = read_row(gate, (r,)), read_row(up, (r,)), write_row(y, (r,))
                operands, out = (row_g[start:stop], row_u[start:stop]), row_y[start:stop]
                following = (row_g[after:], row_u[after:])
                by_blocks(
                    gated, operands, out, write_row(line, (0,)), same(row_g, row_y), streaming, following
                )
            if streaming:
                fence()
            task = claim(state)

    forward.__name__ = f"swiglu_forward_{name}"
    return kernel(lambda t: (types.int64, read(t, 2), read(t, 2), write(t, 2), types.boolean))(forward)


def _backward_kernel(name: str, act_backward: Callable[..., Any]) -> Kernel:
    def backward(state, n_tasks, chunk, dy, gate, up, dgate, dup, in_place):
        rows, cols = gate.shape
        blocks_per_row = (cols + BLOCK - 1) // BLOCK
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
                r, start = b // blocks_per_row, b % blocks_per_row * BLOCK
                stop = min(start + BLOCK, cols)
                rdy = read_row(dy, (r,))[start:stop]
                rdg = write_row(dgate, (r,))[start:stop]
                rdu = write_row(dup, (r,))[start:stop]
                if in_place:
                    for i in range(stop - start):
                        a, slope = act_backward(load(rdg, i))
                        d = load(rdy, i)
                        store(rdg, i, d * load(rdu, i) * slope)
                        store(rdu, i, d * a)
                else:
                    rg = read_row(gate, (r,))[start:stop]
                    ru = read_row(up, (r,))[start:stop]
                    for i in range(stop - start):
                        a, slope = act_backward(load(rg, i))
                        d = load(rdy, i)
                        store(rdg, i, d * load(ru, i) * slope)
                        store(rdu, i, d * a)
            task = claim(state)

    backward.__name__ = f"swiglu_backward_{name}"
    return kernel(lambda t: (types.int64, *(read(t, 2),) * 3, *(write(t, 2),) * 2, types.boolean))(backward)


FORWARD = {
    "silu": _forward_kernel("silu", silu),
    "gelu": _forward_kernel("gelu", gelu),
    "gelu_tanh": _forward_kernel("gelu_tanh", gelu_tanh),
}
BACKWARD = {
    "silu": _backward_kernel("silu", silu_backward),
    "gelu": _backward_kernel("gelu", gelu_backward),
    "gelu_tanh": _backward_kernel("gelu_tanh", gelu_tanh_backward),
}
