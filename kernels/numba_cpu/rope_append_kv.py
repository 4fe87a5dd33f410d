"""RMSNorm of the heads of q and k, RoPE, and the cache write on the CPU: each element is read once and written once.

Per head of a token, in the computing type: ``line = x * rstd * (offset + weight)`` (or just x), which stays in the
cache, then rope.py's rotation from there to q's result or to the key's row in its cache. Values are copied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import all_bits, like, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.numba_cpu.rope import rotate

Array = np.ndarray[Any, Any]

_NO_LENGTHS, _NO_TABLE, _NO_SLOTS = (
    np.empty(0, np.int32),
    np.empty((0, 0), np.int32),
    np.empty((0, 0), np.int64),
)


def config(q: Array, k: Array) -> str:
    return f"{_tokens_per_task(q, k)} tokens per task"


def append(
    q: Array,
    out: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seqused_k: Array | None,
    block_table: Array | None,
    slot_mapping: Array | None,
    q_weight: Array | None,
    k_weight: Array | None,
    eps: float,
    weight_offset: float,
    cos: Array,
    sin: Array,
    rows: Array,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    """All of q, out, k, v (batch, seqlen, heads, head_dim), caches (pages, page_size, nheads_kv, head_dim).

    ``slot_mapping`` (batch, seqlen), or ``seqused_k`` and perhaps ``block_table``; ``cos``, ``sin`` and ``rows`` as
    in rope.py. ``out`` may be q.
    """
    chunk = _tokens_per_task(q, k)
    weights = _no_weights(q.dtype) if q_weight is None or k_weight is None else (q_weight, k_weight)
    launch(
        append_tokens[q.dtype],
        -(-q.shape[0] * q.shape[1] // chunk),
        chunk,
        *all_bits(q, out, k, v, k_cache, v_cache, *weights),
        _NO_LENGTHS if seqused_k is None else seqused_k,
        _NO_TABLE if block_table is None else block_table,
        _NO_SLOTS if slot_mapping is None else slot_mapping,
        cos,
        sin,
        rows,
        eps,
        weight_offset,
        rotary_dim,
        interleaved,
        q_weight is not None,
        block_table is not None,
        slot_mapping is not None,
    )


@cache
def _no_weights(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return (np.empty(0, dtype),) * 2


def _tokens_per_task(q: Array, k: Array) -> int:
    batch, seqlen, nheads, head_dim = q.shape
    return items_per_task(batch * seqlen, (nheads + 2 * k.shape[2]) * head_dim)


def _signature(dtype: str) -> tuple[types.Type, ...]:
    table = types.Array(compute(dtype), 2, "C", readonly=True)
    return (
        types.int64,
        read(dtype, 4),
        write(dtype, 4),
        *(read(dtype, 4),) * 2,
        *(write(dtype, 4),) * 2,
        *(read(dtype, 1),) * 2,
        read("int32", 1),
        read("int32", 2),
        read("int64", 2),
        table,
        table,
        read("int64", 2),
        types.float64,
        compute(dtype),
        types.int64,
        *(types.boolean,) * 4,
    )


@inner
def fill(line, x, gain, eps, offset, normalise):
    """``line = x``, or its RMSNorm with weights ``offset + gain``."""
    if normalise:
        total = 0.0
        for i in range(len(line)):
            value = np.float64(load(x, i))
            total += value * value
        scale = like(offset, 1.0 / np.sqrt(total / len(line) + eps))
        for i in range(len(line)):
            line[i] = load(x, i) * scale * (offset + load(gain, i))
    else:
        for i in range(len(line)):
            line[i] = load(x, i)


@inner
def rotated(line, y, cos, sin, rotary_dim, interleaved):
    rotate(line, 0, y, 0, 1, cos, sin, rotary_dim, interleaved, False)
    for i in range(rotary_dim, len(line)):
        store(y, i, line[i])


@kernel(_signature, fastmath=REASSOC)
def append_tokens(
    state, n_tasks, chunk, q, out, k, v, k_cache, v_cache, q_weight, k_weight, seqused_k, block_table,
    slot_mapping, cos, sin, rows, eps, weight_offset, rotary_dim, interleaved, has_weights, paged, mapped
):  # fmt: skip
    seqlen, page_size = q.shape[1], k_cache.shape[1]
    n_tokens = q.shape[0] * seqlen
    batch_step = 1 if rows.shape[0] > 1 else 0  # or all sequences share one row of positions
    q_gain = read_row(q_weight, ())
    k_gain = read_row(k_weight, ())
    line = np.empty(q.shape[3], cos.dtype)
    task = claim(state)
    while task < n_tasks:
        for token in range(task * chunk, min(n_tokens, (task + 1) * chunk)):
            b, s = token // seqlen, token % seqlen
            turn = rows[b * batch_step, s]
            c, sn = read_row(cos, (turn,)), read_row(sin, (turn,))
            for h in range(q.shape[2]):
                fill(line, read_row(q, (b, s, h)), q_gain, eps, weight_offset, has_weights)
                rotated(line, write_row(out, (b, s, h)), c, sn, rotary_dim, interleaved)
            if mapped:
                slot = slot_mapping[b, s]
                if slot < 0:
                    continue
                page, row = slot // page_size, slot % page_size
            else:
                page, row = b, seqused_k[b] + s
                if paged:
                    page, row = np.int64(block_table[b, row // page_size]), row % page_size
            for h in range(k.shape[2]):
                fill(line, read_row(k, (b, s, h)), k_gain, eps, weight_offset, has_weights)
                rotated(line, write_row(k_cache, (page, row, h)), c, sn, rotary_dim, interleaved)
                value, kept = read_row(v, (b, s, h)), write_row(v_cache, (page, row, h))
                for i in range(len(value)):
                    kept[i] = value[i]
        task = claim(state)
