"""The gradients of a gated MLP so small that packing operands and asking threads takes longer than the sums.

One task does all of it, on rows as they lie, with vector lanes along them. gate, up and dh, then dgate, dup and h,
are rows of a token. All sums, and h, are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.ir.memory import scratch
from gpu_ops.kernels.numba_cpu.jit import inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import launch_here
from gpu_ops.kernels.numba_cpu.swiglu_mlp_tile import ACTIVATIONS, gate_tile_backward, sum_of

Array = np.ndarray[Any, Any]

PRODUCTS = 1 << 17  # of one product; of more, the blocks of swiglu_mlp.py are as fast


def is_small(tokens: int, hidden: int, ffn: int) -> bool:
    """``hidden``: the larger one of x and y."""
    return tokens * ffn * hidden <= PRODUCTS


def backward(
    dy: Array, x: Array, weights: Sequence[Array], dx: Array, dweights: Sequence[Array], *, activation: str
) -> None:
    arrays = map(bits, (dy, x, *weights, dx, *dweights))
    launch_here(mlp_small_backward[x.dtype], 1, ACTIVATIONS.index(activation), *arrays)


@inner
def dot(x, row):
    total = like(x[0], 0)
    for i in range(len(row)):
        total += x[i] * load(row, i)
    return total


@inner
def add(to, factor, row):
    """to += factor * row"""
    for i in range(len(row)):
        to[i] += factor * load(row, i)


@inner
def finish(to, row):
    for i in range(len(to)):
        store(to, i, row[i])


@kernel(lambda t: (types.int64, *(read(t, 2),) * 5, *(write(t, 2),) * 4))
def mlp_small_backward(
    state, n_tasks, activation, dy, x, w_gate, w_up, w_down, dx, dw_gate, dw_up, dw_down
):  # fmt: skip
    (tokens, hidden), (hidden_out, ffn) = x.shape, w_down.shape
    zero = sum_of(x)
    xs, dys, sums = (
        scratch(tokens, hidden, zero),
        scratch(tokens, hidden_out, zero),
        scratch(tokens, hidden, zero),
    )
    gate, up, dh = scratch(tokens, ffn, zero), scratch(tokens, ffn, zero), scratch(tokens, ffn, zero)
    row = scratch(1, max(hidden, ffn), zero)[0]
    xs[:], dys[:], sums[:], dh[:] = zero, zero, zero, zero
    for t in range(tokens):
        add(xs[t], zero + 1, read_row(x, (t,)))
        add(dys[t], zero + 1, read_row(dy, (t,)))
        for f in range(ffn):
            gate[t, f] = dot(xs[t], read_row(w_gate, (f,)))
            up[t, f] = dot(xs[t], read_row(w_up, (f,)))
        for o in range(hidden_out):
            add(dh[t], dys[t, o], read_row(w_down, (o,)))
    gate_tile_backward(activation, gate, up, dh, tokens, ffn)
    for f in range(ffn):
        for w, dw, factors in ((w_gate, dw_gate, gate), (w_up, dw_up, up)):
            row[:hidden] = zero
            for t in range(tokens):
                add(sums[t], factors[t, f], read_row(w, (f,)))
                add(row, factors[t, f], xs[t])
            finish(write_row(dw, (f,)), row)
    for o in range(hidden_out):
        row[:ffn] = zero
        for t in range(tokens):
            add(row, dys[t, o], dh[t])
        finish(write_row(dw_down, (o,)), row)
    for t in range(tokens):
        finish(write_row(dx, (t,)), sums[t])
