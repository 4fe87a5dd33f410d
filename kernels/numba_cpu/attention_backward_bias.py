"""The gradient of attention's bias on the CPU: dS, summed over the axes along which bias was broadcast.

It recomputes what it needs of P and dS tile by tile, as attention_backward.py does, in an order of its own: a task
owns what it adds to.
"""

from gpu_ops.kernels.numba_cpu.attention_config import VARIANTS, backward_types
from gpu_ops.kernels.numba_cpu.attention_gradient_options import any_gradients, split_lse
from gpu_ops.kernels.numba_cpu.attention_gradient_tile import (
    clear_rows,
    load_block,
    load_keys,
    make_scratch,
    next_tile,
)
from gpu_ops.kernels.numba_cpu.attention_operands import operand
from gpu_ops.kernels.numba_cpu.codegen.arena import arena, arena_size, by_reference
from gpu_ops.kernels.numba_cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.numba_cpu.jit import compute, device_function, kernel, types
from gpu_ops.kernels.numba_cpu.parallel import claim


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
        types.Array(types.float64, 3, "C"),
        types.Array(compute(t), 4, "C"),
    ),
    variants=VARIANTS,
)
def attention_backward_bias(
    state, n_tasks, call, dout, q, k, v, out, lse, sequences, table, alibi, sinks, bias, visible, delta, dbias
):  # fmt: skip
    """dbias = dS, summed over the axes along which bias was broadcast; one task owns what it adds to."""
    memory, options, wide = arena_size(), by_reference(call), dbias.dtype.type(0)
    make_scratch(memory, options, operand(q, wide), wide)  # counts the bytes
    bias_tasks(
        state, n_tasks, arena(memory[0]), options, dout, q, k, v, out, lse, sequences, alibi, sinks, bias, visible,
        delta, dbias,
    )  # fmt: skip


@device_function
def bias_tasks(
    state, n_tasks, memory, call, dout, q, k, v, out, lse, sequences, alibi, sinks, bias, visible, delta, dbias
):  # fmt: skip
    batches, heads, queries = dbias.shape[:3]
    blocks = (call.max_seqlen_q + call.block_m - 1) // call.block_m
    owned, wide = (blocks if queries > 1 else 1), dbias.dtype.type(0)
    w = by_reference(make_scratch(memory, call, operand(q, wide), wide))
    clear_rows(w)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        start = task % owned
        bias_head = task // owned % heads
        bias_batch = task // owned // heads
        stop = start + 1 if queries > 1 else blocks
        for b in range(call.batch) if batches == 1 else range(bias_batch, bias_batch + 1):
            for h in range(call.nheads) if heads == 1 else range(bias_head, bias_head + 1):
                head_kv = h * call.nheads_kv // call.nheads
                for block in range(start, stop):
                    n, first, last, _, coarse = load_block(
                        w, call, b, h, block, dout, q, out, lse, sequences, alibi, bias, delta
                    )
                    if coarse:
                        split_lse(w, call, b, head_kv, n, first, last, k, v, sequences, sinks, bias, visible)
                    while first <= last:
                        n_keys, seen = next_tile(w, call, b, n, first, last, visible)
                        if seen:
                            finite = load_keys(w, call, b, head_kv, first, n_keys, k, v, sequences)
                            any_gradients(w, call, n, first, n_keys, finite, bias)
                            add_bias_tile(dbias[bias_batch, bias_head], w, n, first, n_keys)
                        first += n_keys
        task = claim(state)
    close_tiles()
