"""Gradients of attention's bias and sinks on the CPU.

dbias is dS, summed over the axes along which bias was broadcast. P and dS are recomputed tile by tile, as in
backward.py, in another order: a task owns the part of dbias that it adds to. For sinks a task is a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.attention.cpu.backward_operands import (
    Arrays,
    clear_rows,
    load_block,
    load_keys,
    make_scratch,
)
from gpu_ops.kernels.attention.cpu.backward_tile import any_gradients, next_tile, split_lse
from gpu_ops.kernels.attention.cpu.config import ROWS, VARIANTS, backward_types
from gpu_ops.kernels.attention.cpu.operands import operand
from gpu_ops.kernels.common.cpu.codegen.arena import arena, arena_size, by_reference
from gpu_ops.kernels.common.cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.jit import FLOATS, compute, device_function, kernel, types
from gpu_ops.kernels.common.cpu.parallel import claim, launcher

Array = np.ndarray[Any, Any]

EXP_NANOSECONDS = 5


@device_function
def add_bias_tile(dbias, w, n, first, n_keys):
    """Add a tile of dS; an axis along which bias was broadcast is summed in float64 first."""
    queries, keys = dbias.shape
    if queries > 1:
        for c in range(n):
            row, total = dbias[w.query[c]], 0.0
            for j in range(n_keys):
                if keys > 1:
                    row[first + j] += w.dscore[j, c]
                else:
                    total += w.dscore[j, c]
            if keys == 1:
                row[0] += total
    else:
        for j in range(n_keys):
            total = 0.0
            for c in range(n):
                total += w.dscore[j, c]
            dbias[0, first + j if keys > 1 else 0] += total


@kernel(
    lambda t, bias: (
        *backward_types(t, bias),
        types.Array(compute(t), 4, "C"),
    ),
    variants=VARIANTS,
)
def attention_backward_bias(
    state, n_tasks, call, dout, q, k, v, lse, sequences, table, alibi, sinks, bias, visible, seed, delta, split_from,
    coarse_from, dbias,
):  # fmt: skip
    """dbias = dS, summed over the axes along which bias was broadcast. A task owns the part that it adds to."""
    inputs = by_reference(
        Arrays(
            dout, q, k, v, lse, sequences, alibi, sinks, bias, visible, seed, delta, split_from, coarse_from
        )
    )
    size, options, zero = arena_size(), by_reference(call), dbias.dtype.type(0)
    make_scratch(size, options, operand(q, zero), zero)
    bias_tasks(state, n_tasks, arena(size[0]), options, inputs, dbias)


@device_function
def bias_tasks(state, n_tasks, memory, call, x, dbias):
    batches, heads, queries = dbias.shape[:3]
    blocks = (call.max_seqlen_q + call.block_m - 1) // call.block_m
    owned, zero = (blocks if queries > 1 else 1), dbias.dtype.type(0)
    w = by_reference(make_scratch(memory, call, operand(x.q, zero), zero))
    clear_rows(w)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        start = task % owned
        bias_head = task // owned % heads
        bias_batch = task // owned // heads
        stop, target = start + 1 if queries > 1 else blocks, dbias[bias_batch, bias_head]
        for b in range(call.batch) if batches == 1 else range(bias_batch, bias_batch + 1):
            for h in range(call.nheads) if heads == 1 else range(bias_head, bias_head + 1):
                for block in range(start, stop):
                    add_bias_block(target, w, call, x, b, h, block)
        task = claim(state)
    close_tiles()


@device_function
def add_bias_block(dbias, w, call, x, b, h, block):
    head_kv = h * call.nheads_kv // call.nheads
    n, first, last, _, split = load_block(w, call, x, b, h, block)
    if split:
        split_lse(w, call, x, b, head_kv, n, first, last)
    while first <= last:
        n_keys, seen = next_tile(w, call, b, n, first, last, x.visible)
        if seen:
            finite = load_keys(w, call, x, b, head_kv, first, n_keys)
            any_gradients(w, call, x, b, n, first, n_keys, finite)
            add_bias_tile(dbias, w, n, first, n_keys)
        first += n_keys


def sinks_gradient(sinks: Array, lse: Array, delta: Array, dtype: np.dtype[Any]) -> Array:
    """Gradient of sinks, in ``dtype``. Sinks float64 (nheads,); lse and delta float64 (batch, nheads, queries).

    d lse / d sink is the sink's probability; its value is 0, so only -delta remains.
    """
    gradient = np.empty(sinks.shape, dtype)
    launch = launcher(lse.size * EXP_NANOSECONDS)
    launch(attention_sinks_gradient[dtype], len(sinks), sinks, lse, delta, gradient)
    return gradient


def _signature(t: str) -> tuple[types.Type, ...]:
    return (types.Array(types.float64, 1, "A", readonly=True), ROWS, ROWS, types.Array(compute(t), 1, "C"))


@kernel(_signature, tuple(dict.fromkeys(compute(t).name for t in FLOATS)))
def attention_sinks_gradient(state, n_tasks, sinks, lse, delta, gradient):
    head = claim(state)
    while head < n_tasks:
        total = 0.0
        for b in range(lse.shape[0]):
            for i in range(lse.shape[2]):
                if lse[b, head, i] != -np.inf:  # otherwise its sink is -inf as well
                    total += np.exp(sinks[head] - lse[b, head, i]) * delta[b, head, i]
        gradient[head] = -total
        head = claim(state)
