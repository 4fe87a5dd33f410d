"""Gated activations for Numba, forward and backward: the readable twin of swiglu.cu.

forward    y = act(gate) * up
backward   dgate = dy * up * act'(gate),  dup = dy * act(gate)

A thread takes one column of every ``gridDim.y``-th row. act(g) = g * c(g), where c rises from 0 to 1, and
act'(g) = c + g * c'. Infinities give their limits: ``inf * 0`` is avoided, not corrected afterwards.
"""

from __future__ import annotations

import math
from functools import cache

from numba import cuda

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["kernel"]

SATURATED = 1e4  # beyond +-1e4 every c is 0 or 1 and every c' is 0


@cache
def kernel(which: str, dtype: str, activation: str) -> NumbaKernel:
    """``which`` is ``forward`` or ``backward``; ``activation`` is ``silu``, ``gelu``, ``gelu_tanh`` or ``relu2``."""
    make, arrays = {"forward": (_forward, 3), "backward": (_backward, 5)}[which]
    signature = ", ".join([f"{functions(dtype).element}[:, :]"] * arrays)
    return NumbaKernel(make(dtype, activation), f"void({signature})", f"swiglu_{which}_{activation}_{dtype}")


@cache
def gate(activation, dtype):
    """Device function for c and c' of a finite g."""
    real = functions(dtype).compute
    unit, half = real(1.0), real(0.5)
    linear, cubic = real(math.sqrt(8 / math.pi)), real(0.044715 * math.sqrt(8 / math.pi))

    @cuda.jit(device=True)
    def sigmoid(x):
        """sigmoid(x) and 1 - sigmoid(x), without cancellation."""
        return unit / (unit + math.exp(-x)), unit / (unit + math.exp(x))

    @cuda.jit(device=True)
    def silu(g):
        c, rest = sigmoid(g)
        return c, c * rest

    @cuda.jit(device=True)
    def gelu(g):
        """The normal distribution function and its density."""
        return half * math.erfc(-g * real(math.sqrt(0.5))), real(math.sqrt(0.5 / math.pi)) * math.exp(
            -half * g * g
        )

    @cuda.jit(device=True)
    def gelu_tanh(g):
        """(1 + tanh(z)) / 2 = sigmoid(2 z)."""
        c, rest = sigmoid(g * (linear + cubic * g * g))
        return c, c * rest * (linear + real(3.0) * cubic * g * g)

    return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[activation]


@cache
def activated(activation, dtype):
    """Device function for act and act' of any g."""
    real = functions(dtype).compute
    if activation == "relu2":
        return _relu2(real)
    gate_of = gate(activation, dtype)

    @cuda.jit(device=True)
    def of(g):
        near = min(max(g, real(-SATURATED)), real(SATURATED)) if g == g else g
        c, slope = gate_of(near)
        act = real(-0.0) if g == real(-math.inf) else g * c
        return act, c + near * slope

    return of


def _relu2(real):
    """Act and act' of relu2, whose c is max(g, 0) and has no limit at 1."""

    @cuda.jit(device=True)
    def relu2(g):
        c = real(0.0) if g < real(0.0) else g  # max would drop a NaN
        return c * c, real(2.0) * c

    return relu2


def _forward(dtype, activation):
    load, store, *_ = functions(dtype)
    act_of = activated(activation, dtype)

    def swiglu_forward(gate, up, y):
        rows, cols = y.shape
        c = cuda.grid(1)
        if c < cols:
            for r in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
                act, _ = act_of(load(gate[r, c]))
                y[r, c] = store(act * load(up[r, c]))

    return swiglu_forward


def _backward(dtype, activation):
    load, store, *_ = functions(dtype)
    act_of = activated(activation, dtype)

    def swiglu_backward(dy, gate, up, dgate, dup):
        rows, cols = dy.shape
        c = cuda.grid(1)
        if c < cols:
            for r in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
                act, slope = act_of(load(gate[r, c]))
                d = load(dy[r, c])
                dgate[r, c] = store(
                    d * slope * load(up[r, c])
                )  # dy * up may be infinite where the slope is 0
                dup[r, c] = store(d * act)

    return swiglu_backward
