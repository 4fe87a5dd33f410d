"""Tiles of the gated MLP: gate, up and, for the gradients, dh; and what becomes of them while they are in cache.

A task is rows of ffn by columns of tokens. All of K adds up in float32; then the activation makes of the tiles in
place, forward, h; backward dgate, dup and h. They are stored as steps of K of the products that follow.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.numba_cpu.codegen import glu
from gpu_ops.kernels.numba_cpu.codegen.memory import SKEW, lanes, round_up, scratch
from gpu_ops.kernels.numba_cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.numba_cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.numba_cpu.dtype import store, write_row
from gpu_ops.kernels.numba_cpu.gemm import multiply, tile_size
from gpu_ops.kernels.numba_cpu.jit import (
    compute,
    device_function,
    generic,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.numba_cpu.packing import elements, packed, put_rows, room_a, steps
from gpu_ops.kernels.numba_cpu.parallel import claim

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_silu, _gelu, _gelu_tanh = (glu.forward[name] for name in ACTIVATIONS)
_silu_backward, _gelu_backward, _gelu_tanh_backward = (glu.backward_hidden[name] for name in ACTIVATIONS)


@device_function
def activate(activation, h, gate, up):
    """One row; h may be gate."""
    if activation == 0:
        _silu((h,), (gate, up), (), (), (), False)
    elif activation == 1:
        _gelu((h,), (gate, up), (), (), (), False)
    else:
        _gelu_tanh((h,), (gate, up), (), (), (), False)


@device_function
def gate_tile_backward(activation, gate, up, dh, m, n):
    """gate, up and dh become dgate, dup and h."""
    for i in range(m):
        results, operands = (gate[i, :n], up[i, :n], dh[i, :n]), (dh[i], gate[i], up[i])
        if activation == 0:
            _silu_backward(results, operands, (), (), (), False)
        elif activation == 1:
            _gelu_backward(results, operands, (), (), (), False)
        else:
            _gelu_tanh_backward(results, operands, (), (), (), False)


@device_function
def put(to, tile, f0, m, t0, n):
    for i in range(m):
        row = write_row(to, (f0 + i,))[t0 : t0 + n]
        source = tile[i]
        for j in range(n):
            store(row, j, source[j])


@generic
def sum_of(packed):
    """A zero of the type in which products of ``packed`` add up."""
    zero = np.float64(0) if packed.dtype == types.float64 else np.float32(0)
    return lambda packed: zero


def _forward_signature(t: str) -> tuple[types.Type, ...]:
    pair = types.UniTuple(types.int64, 2)
    i, panels = types.int64, write(packed(t), 2)
    return pair, i, panels, i, read(t, 2), read(t, 2), panels, i, i


@kernel(_forward_signature)
def mlp_hidden(state, n_tasks, tile, activation, x, x_blocks, w_gate, w_up, h, h_blocks, tokens):
    """h (ffn, tokens) = act(w_gate x.T) * (w_up x.T)"""
    ffn, hidden = w_gate.shape
    rows, columns = tile
    nr = 2 * lanes(x)
    tiles = (tokens + columns - 1) // columns
    wide = sum_of(x)
    height = round_up(rows, MAX_LANES)
    gate, up = scratch(height, columns + SKEW, wide), scratch(height, columns + SKEW, wide)
    across, block, k_all = x.shape[0] // x_blocks, x.shape[1] // nr, steps(x, hidden)
    a = room_a(x, rows, block, False)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        following = claim(state)
        f0, m = tile_size(task // tiles, rows, ffn)
        t0, n = tile_size(task % tiles, columns, tokens)
        for b in range(x_blocks):
            k0, first = b * block, b * across + t0 // nr
            k = min(block, k_all - k0)
            f1, m1, k1 = f0, m, k0 + k
            if b + 1 == x_blocks:
                f1, m1 = tile_size(following // tiles, rows, ffn)
                k1 = 0
            at, length, add = elements(x, k0), elements(x, k), b > 0
            multiply(gate, a, w_gate, False, f0, m, k0, k, x, first, n, add, w_up, f0, m, at, length)
            at = elements(x, k1)
            multiply(up, a, w_up, False, f0, m, k0, k, x, first, n, add, w_gate, f1, m1, at, length)
        for i in range(m):
            activate(activation, gate[i, :n], gate[i], up[i])
        put_rows(h, h_blocks, gate, f0, m, t0, n)
        task = following
    close_tiles()


def _backward_signature(t: str) -> tuple[types.Type, ...]:
    pair = types.UniTuple(types.int64, 2)
    i, panels = types.int64, write(packed(t), 2)
    kept = write(t if packed(t) == "uint32" else compute(t).name, 2)
    return pair, i, panels, i, panels, i, *(read(t, 2),) * 3, *(kept,) * 3, panels, panels, i


@kernel(_backward_signature)
def mlp_hidden_backward(
    state, n_tasks, tile, activation, dy, dy_blocks, x, x_blocks, w_gate, w_up, w_down, dgate, dup, h,
    dgate_panels, dup_panels, blocks,
):  # fmt: skip
    """dgate, dup and h, all (ffn, tokens), from gate, up and dh = w_down.T dy.T"""
    (ffn, tokens), hidden, hidden_out = h.shape, w_gate.shape[1], w_down.shape[0]
    rows, columns = tile
    nr = 2 * lanes(x)
    tiles = (tokens + columns - 1) // columns
    wide = sum_of(x)
    height = round_up(rows, MAX_LANES)
    gate, up = scratch(height, columns + SKEW, wide), scratch(height, columns + SKEW, wide)
    dh = scratch(height, columns + SKEW, wide)
    across, block, k_all = x.shape[0] // x_blocks, x.shape[1] // nr, steps(x, hidden)
    a = room_a(x, rows, block, False)
    block_out, k_out = dy.shape[1] // nr, steps(x, hidden_out)
    turned = room_a(dy, rows, block_out, True)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        following = claim(state)
        f0, m = tile_size(task // tiles, rows, ffn)
        f1, m1 = tile_size(following // tiles, rows, ffn)
        t0, n = tile_size(task % tiles, columns, tokens)
        for b in range(x_blocks):
            k0, first = b * block, b * across + t0 // nr
            k = min(block, k_all - k0)
            at, length, add = elements(x, k0), elements(x, k), b > 0
            multiply(gate, a, w_gate, False, f0, m, k0, k, x, first, n, add, w_up, f0, m, at, length)
            at = elements(x, k0 + k)
            multiply(up, a, w_up, False, f0, m, k0, k, x, first, n, add, w_gate, f0, m, at, length)
        for b in range(dy_blocks):
            k0, first = b * block_out, b * across + t0 // nr
            k = min(block_out, k_out - k0)
            k1, rest, add = elements(x, k0 + k), elements(x, k), b > 0
            if b + 1 < dy_blocks:
                multiply(dh, turned, w_down, True, f0, m, k0, k, dy, first, n, add, w_down, k1, rest, f0, m)
            else:
                length = elements(x, block)
                multiply(dh, turned, w_down, True, f0, m, k0, k, dy, first, n, add, w_gate, f1, m1, 0, length)
        gate_tile_backward(activation, gate, up, dh, m, n)
        put(dgate, gate, f0, m, t0, n)
        put(dup, up, f0, m, t0, n)
        put(h, dh, f0, m, t0, n)
        put_rows(dgate_panels, blocks, gate, f0, m, t0, n)
        put_rows(dup_panels, blocks, up, f0, m, t0, n)
        task = following
    close_tiles()
