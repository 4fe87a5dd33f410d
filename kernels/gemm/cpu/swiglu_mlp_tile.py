"""Tiles of the gated MLP: gate, up and, for gradients, dh, with the activation applied while they are cached.

A task is rows of ffn by columns of tokens. Sums over K are float32. Then the activation turns the tiles into h
(forward) or dgate, dup and h (backward), in place. They are stored as steps of K of the products that follow.
Tiles are (ffn, tokens); gate and up kept by the forward are (tokens, ffn), and the backward transposes them again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.gemm import copy_transposed
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, from_beginning, lanes, round_up, scratch, span
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.common.cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import load, read_row, rounded, store, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.packing import packed, put_rows, room_a, steps
from gpu_ops.kernels.common.cpu.parallel import claim
from gpu_ops.kernels.gemm.cpu import glu_ir as glu
from gpu_ops.kernels.gemm.cpu.gemm import multiply, region, tile_size, turn

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
_silu, _gelu, _gelu_tanh, _relu2 = (glu.forward[name] for name in ACTIVATIONS)
_silu_backward, _gelu_backward, _gelu_tanh_backward, _relu2_backward = (
    glu.backward_hidden[name] for name in ACTIVATIONS
)


@device_function
def activate(activation, h, gate, up):
    """Apply the activation to one row; h may be gate."""
    if activation == 0:
        _silu((h,), (gate, up), (), (), (), False)
    elif activation == 1:
        _gelu((h,), (gate, up), (), (), (), False)
    elif activation == 2:
        _gelu_tanh((h,), (gate, up), (), (), (), False)
    else:
        _relu2((h,), (gate, up), (), (), (), False)


@device_function
def gate_tile_backward(activation, gate, up, dh, m, n):
    """Replace gate, up and dh by dgate, dup and h."""
    for i in range(m):
        operands = dh[i], gate[i], up[i]
        results = from_beginning(gate[i], n), from_beginning(up[i], n), from_beginning(dh[i], n)
        if activation == 0:
            _silu_backward(results, operands, (), (), (), False)
        elif activation == 1:
            _gelu_backward(results, operands, (), (), (), False)
        elif activation == 2:
            _gelu_tanh_backward(results, operands, (), (), (), False)
        else:
            _relu2_backward(results, operands, (), (), (), False)


@device_function
def put(to, tile, f0, m, t0, n):
    for i in range(m):
        row = span(write_row(to, (f0 + i,)), t0, n)
        source = tile[i]
        for j in range(n):
            store(row, j, source[j])


@device_function(refcount=True)
def keep_tile(to, tile, f0, m, t0, n):
    """Store a tile, transposed and rounded, in rows from t0 and columns from f0."""
    width = lanes(tile)
    turned = scratch(width, round_up(m, width), tile[0, 0])
    for j in range(0, n, width):
        turn(turned, tile, j, m)
        for jj in range(min(width, n - j)):
            row = span(write_row(to, (t0 + j + jj,)), f0, m)
            for i in range(m):
                store(row, i, turned[jj, i])


@device_function(refcount=True)
def kept_tile(tile, kept, f0, m, t0, n):
    """Load a tile that :func:`keep_tile` stored."""
    width = lanes(tile)
    turned = scratch(width, round_up(m, width), tile[0, 0])
    for j in range(0, n, width):
        for jj in range(min(width, n - j)):
            row = span(read_row(kept, (t0 + j + jj,)), f0, m)
            for i in range(m):
                turned[jj, i] = load(row, i)
        for i in range(0, m, width):
            copy_transposed(tile, i * tile.shape[1] + j, tile.shape[1], turned, i, turned.shape[1])


@device_function
def round_tile(tile, m, n, like):
    """Round a tile to the dtype of array ``like``, as if it had been stored."""
    of = read_row(like, (0,))
    for i in range(m):
        row = tile[i]
        for j in range(n):
            row[j] = rounded(of, row[j])


@generic
def sum_of(packed):
    """Zero of the type in which products of ``packed`` add up."""
    zero = np.float64(0) if packed.dtype == types.float64 else np.float32(0)
    return lambda packed: zero


class Plan(NamedTuple):
    """Partition of a product: tiles of rows of ffn by columns of tokens, and operands in blocks of K."""

    rows: int
    columns: int
    activation: int
    tokens: int
    x_blocks: int
    dy_blocks: int
    h_blocks: int


_PLAN = types.NamedUniTuple(types.int64, len(Plan._fields), Plan)


def _forward_signature(t: str) -> tuple[types.Type, ...]:
    panels = write(packed(t), 2)
    return _PLAN, panels, read(t, 2), read(t, 2), panels, write(t, 2), write(t, 2)


@kernel(_forward_signature)
def mlp_hidden(state, n_tasks, plan, x, w_gate, w_up, h, gate_kept, up_kept):
    """h (ffn, tokens) = act(w_gate x.T) * (w_up x.T); the two products are kept if there are rows for them."""
    (ffn, hidden), tokens, rows, columns = w_gate.shape, plan.tokens, plan.rows, plan.columns
    nr = 2 * lanes(x)
    tiles = (tokens + columns - 1) // columns
    zero = sum_of(x)
    height = round_up(rows, MAX_LANES)
    gate, up = scratch(height, columns + SKEW, zero), scratch(height, columns + SKEW, zero)
    across, block, k_all = x.shape[0] // plan.x_blocks, x.shape[1] // nr, steps(x, hidden)
    a = room_a(x, rows, block, False)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        following = claim(state)
        f0, m = tile_size(task // tiles, rows, ffn)
        t0, n = tile_size(task % tiles, columns, tokens)
        for b in range(plan.x_blocks):
            k0, first, add = b * block, b * across + t0 // nr, b > 0
            k = min(block, k_all - k0)
            f1, m1, k1 = f0, m, k0 + k
            if b + 1 == plan.x_blocks:
                f1, m1 = tile_size(following // tiles, rows, ffn)
                k1 = 0
            ahead = region(w_up, x, False, f0, m, k0, k)
            multiply(gate, a, w_gate, False, f0, m, k0, k, x, first, n, add, ahead)
            ahead = region(w_gate, x, False, f1, m1, k1, k)
            multiply(up, a, w_up, False, f0, m, k0, k, x, first, n, add, ahead)
        if gate_kept.shape[0] > 0:
            keep_tile(gate_kept, gate, f0, m, t0, n)
            keep_tile(up_kept, up, f0, m, t0, n)
        for i in range(m):
            activate(plan.activation, from_beginning(gate[i], n), gate[i], up[i])
        put_rows(h, plan.h_blocks, gate, f0, m, t0, n)
        task = following
    close_tiles()


def _backward_signature(t: str) -> tuple[types.Type, ...]:
    panels, kept = write(packed(t), 2), write(t if packed(t) == "uint32" else compute(t).name, 2)
    return _PLAN, *(panels,) * 2, *(read(t, 2),) * 5, *(kept,) * 3, *(panels,) * 2


@kernel(_backward_signature)
def mlp_hidden_backward(
    state,
    n_tasks,
    plan,
    dy,
    x,
    w_gate,
    w_up,
    w_down,
    gate_kept,
    up_kept,
    dgate,
    dup,
    h,
    dgate_panels,
    dup_panels,
):
    """dgate, dup and h, all (ffn, tokens), from gate, up and dh = w_down.T dy.T; from x if nothing is kept."""
    (ffn, tokens), hidden, hidden_out = h.shape, w_gate.shape[1], w_down.shape[0]
    rows, columns = plan.rows, plan.columns
    nr = 2 * lanes(x)
    tiles = (tokens + columns - 1) // columns
    zero = sum_of(x)
    height = round_up(rows, MAX_LANES)
    gate, up = scratch(height, columns + SKEW, zero), scratch(height, columns + SKEW, zero)
    dh = scratch(height, columns + SKEW, zero)
    across, block, k_all = x.shape[0] // plan.x_blocks, x.shape[1] // nr, steps(x, hidden)
    a = room_a(x, rows, block, False)
    block_out, k_out = dy.shape[1] // nr, steps(x, hidden_out)
    transposed = room_a(dy, rows, block_out, True)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        following = claim(state)
        f0, m = tile_size(task // tiles, rows, ffn)
        f1, m1 = tile_size(following // tiles, rows, ffn)
        t0, n = tile_size(task % tiles, columns, tokens)
        if gate_kept.shape[0] > 0:
            kept_tile(gate, gate_kept, f0, m, t0, n)
            kept_tile(up, up_kept, f0, m, t0, n)
        else:
            for b in range(plan.x_blocks):
                k0, first, add = b * block, b * across + t0 // nr, b > 0
                k = min(block, k_all - k0)
                ahead = region(w_up, x, False, f0, m, k0, k)
                multiply(gate, a, w_gate, False, f0, m, k0, k, x, first, n, add, ahead)
                ahead = region(w_gate, x, False, f0, m, k0 + k, k)
                multiply(up, a, w_up, False, f0, m, k0, k, x, first, n, add, ahead)
            round_tile(gate, m, n, w_gate)
            round_tile(up, m, n, w_up)
        for b in range(plan.dy_blocks):
            k0, first, add = b * block_out, b * across + t0 // nr, b > 0
            k = min(block_out, k_out - k0)
            ahead = region(w_down, x, True, f0, m, k0 + k, k)
            if b + 1 == plan.dy_blocks:
                ahead = region(w_gate, x, False, f1, m1, 0, block)
            multiply(dh, transposed, w_down, True, f0, m, k0, k, dy, first, n, add, ahead)
        gate_tile_backward(plan.activation, gate, up, dh, m, n)
        put(dgate, gate, f0, m, t0, n)
        put(dup, up, f0, m, t0, n)
        put(h, dh, f0, m, t0, n)
        put_rows(dgate_panels, plan.h_blocks, gate, f0, m, t0, n)
        put_rows(dup_panels, plan.h_blocks, up, f0, m, t0, n)
        task = following
    close_tiles()
