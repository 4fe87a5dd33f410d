"""Gated MLP for a few tokens: bound by memory, with each weight read once.

A task multiplies some rows of the weights by all tokens. Vector lanes run along K, rows are read in place, four at a
time, and the next ones are prefetched; gate and up meet at the end of a group of rows:

    addresses of a task's rows    gate 0..15 | up 0..15 | gate 16..31 | up 16..31 | ...     (fewer rows per group
    per group and four tokens     sums[row, token] of one vector                              for four tokens)

Tokens are widened once per thread, in the order in which codegen/decode_rows.py widens 16-bit weights. All sums and h
are float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.decode import score_keys
from gpu_ops.kernels.common.cpu.codegen.decode_rows import to_slots
from gpu_ops.kernels.common.cpu.codegen.memory import lanes, round_up, row_address, scratch
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import aligned_empty, bits, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, launcher, thread_count
from gpu_ops.kernels.gemm.cpu.swiglu_mlp_tile import ACTIVATIONS, activate, sum_of

Array = np.ndarray[Any, Any]

AT_ONCE = 4  # rows; as many are prefetched


def forward(x: Array, weights: Sequence[Array], y: Array, *, activation: str, kept: Sequence[Array]) -> None:
    w_down = weights[2]
    h, down = hidden(x, weights, activation=activation, kept=kept), rows_per_task(len(w_down))
    launch = launcher(_time(x, weights))
    launch(few_down[x.dtype], -(-len(w_down) // down), down, h, bits(w_down), bits(y))


def hidden(x: Array, weights: Sequence[Array], *, activation: str, kept: Sequence[Array]) -> Array:
    """h (tokens, ffn). ``kept``: gate and up are stored there, (tokens, ffn) or without rows."""
    w_gate, w_up, _ = weights
    h = aligned_empty((len(x), len(w_gate)), np.float64 if x.dtype == np.float64 else np.float32)
    rows, arrays = rows_per_task(len(w_gate)), [bits(a) for a in (x, w_gate, w_up, *kept)]
    launch = launcher(_time(x, weights))
    launch(few_hidden[x.dtype], -(-len(w_gate) // rows), rows, ACTIVATIONS.index(activation), *arrays, h)
    return h


def _time(x: Array, weights: Sequence[Array]) -> float:
    return sum(w.size for w in weights) * (0.4 + len(x) / 20)


def rows_per_task(rows: int) -> int:
    """Rows per task: a few whole groups."""
    even = -(-rows // (8 * thread_count()))
    return max(1, min(4, even // MAX_LANES)) * MAX_LANES


@device_function(refcount=True)
def widened(x, w):
    """Rows of x, and zeros up to a multiple of four, in the order of the vectors of w."""
    tokens, depth = x.shape
    tokens_wide = scratch(round_up(tokens, 4), round_up(depth, 4 * MAX_LANES), sum_of(w))
    tokens_wide[:] = 0
    unit = sum_of(w) + 1
    for t in range(tokens):
        to_slots(w, tokens_wide[t], read_row(x, (t,)), depth, unit)
    return tokens_wide


@generic
def few(sums):
    """Two tuples: one of four, or of the lanes of a vector of sums if fewer; one of the rows that fill a vector."""
    width = VECTOR_BYTES * 8 // sums.dtype.bitwidth
    four = (0,) * min(AT_ONCE, width)
    rows = (0,) * (width // len(four))
    return lambda sums: (four, rows)


@device_function
def list_rows(addresses, at, w, first, stop, n):
    """Addresses of rows of w, as many as there are; the last repeats."""
    for j in range(n):
        addresses[at + j] = row_address(w, min(first + j, stop), 0)


@device_function(refcount=True)
def group_sums(sums, addresses, at, w, x, tokens, n_rows):
    """sums[token, row] = x[token] . w[row] of the rows whose addresses start at ``at``."""
    depth, unit = w.shape[1], sum_of(w) + 1
    four, rows = few(sums)
    later = AT_ONCE, 0, w.strides[0]
    if tokens == 1:
        for first in range(0, n_rows, len(four)):
            score_keys((0,), four, w, addresses, at + first, later, (1, 1), x, depth, sums, first, unit)
    else:
        tiles = len(x) // len(four)
        part_sums = scratch(tiles, lanes(sums), sums[0, 0])
        for first in range(0, n_rows, len(rows)):
            score_keys(four, rows, w, addresses, at + first, later, (1, tiles), x, depth, part_sums, 0, unit)
            for t in range(tokens):
                for j in range(len(rows)):
                    sums[t, first + j] = part_sums[t // len(four), j * len(four) + t % len(four)]


def _hidden_signature(t: str) -> tuple[types.Type, ...]:
    i = types.int64
    return i, i, *(read(t, 2),) * 3, *(write(t, 2),) * 2, write(compute(t).name, 2)


@kernel(_hidden_signature)
def few_hidden(state, n_tasks, chunk, activation, x, w_gate, w_up, gate_kept, up_kept, h):
    """h = act(x w_gate.T) * (x w_up.T); the two products are kept if there are rows for them."""
    tokens, ffn = h.shape
    width = lanes(h)
    inputs = widened(x, w_gate)
    gate, up = scratch(len(inputs), width, sum_of(w_gate)), scratch(len(inputs), width, sum_of(w_gate))
    addresses = np.zeros(2 * (chunk + width) + AT_ONCE, np.int64)
    task = claim(state)
    while task < n_tasks:
        first, stop = task * chunk, min(ffn, (task + 1) * chunk)
        for r in range(0, chunk + width, width):
            list_rows(addresses, 2 * r, w_gate, first + r, ffn - 1, width)
            list_rows(addresses, 2 * r + width, w_up, first + r, ffn - 1, width)
        for r in range(first, stop, width):
            at, n = 2 * (r - first), min(width, stop - r)
            group_sums(gate, addresses, at, w_gate, inputs, tokens, width)
            group_sums(up, addresses, at + width, w_gate, inputs, tokens, width)
            for t in range(len(gate_kept)):
                gate_row, up_row = write_row(gate_kept, (t,)), write_row(up_kept, (t,))
                for j in range(n):
                    store(gate_row, r + j, gate[t, j])
                    store(up_row, r + j, up[t, j])
            for t in range(tokens):
                row = write_row(h, (t,))[r : r + n]
                activate(activation, row, gate[t], up[t])
        task = claim(state)


def _down_signature(t: str) -> tuple[types.Type, ...]:
    return types.int64, read(compute(t).name, 2), read(t, 2), write(t, 2)


@kernel(_down_signature)
def few_down(state, n_tasks, chunk, h, w, y):
    """y = h w.T"""
    tokens, rows = y.shape
    width = lanes(h)
    inputs = widened(h, w)
    sums = scratch(len(inputs), width, sum_of(w))
    addresses = np.zeros(chunk + width + AT_ONCE, np.int64)
    task = claim(state)
    while task < n_tasks:
        first, stop = task * chunk, min(rows, (task + 1) * chunk)
        list_rows(addresses, 0, w, first, rows - 1, chunk + width)
        for r in range(first, stop, width):
            group_sums(sums, addresses, r - first, w, inputs, tokens, width)
            for t in range(tokens):
                row = write_row(y, (t,))[r : min(r + width, stop)]
                for j in range(len(row)):
                    store(row, j, sums[t, j])
        task = claim(state)
