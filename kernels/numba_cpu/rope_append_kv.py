"""RMSNorm of the heads of q and k, RoPE, and the cache write on the CPU: each element is read once and written once.

All heads of a token go together where their halves are whole vectors and their results neighbours in memory::

    x      | head | head | ...     read; as much of the next token's is fetched while results are stored
    line   | head | head |         x * (offset + weight) / rms, rotated (codegen/rotate.py)
    out    | head | head | ...     past the caches, if too large for them; else line is not needed

Others one by one, by way of ``head``, in the computing type. Values are copied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.codegen import norm
from gpu_ops.kernels.numba_cpu.codegen.memory import LINE_BYTES, copy_row, from_beginning, scratch
from gpu_ops.kernels.numba_cpu.codegen.rotate import rotate_halves
from gpu_ops.kernels.numba_cpu.codegen.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.numba_cpu.dtype import all_bits, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, device_function, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.numba_cpu.rmsnorm import SHORT_SUM, TINY, sum_of_squares
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
        not stays_in_cache(out.nbytes + k.nbytes + v.nbytes),
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
        *(types.boolean,) * 5,
    )


@device_function
def find_scales(scales, x, b, s, eps, normalise):
    """1 / rms of each head of a token, or 1. All before the first is needed: each takes a while to come."""
    for h in range(x.shape[2]):
        scales[h] = 1
        if normalise:
            row = read_row(x, (b, s, h))
            total = norm.squares((row,), (), 0, len(row))  # here: the call took 4 to 10 % of the time
            if not (TINY < total < np.inf and len(row) <= SHORT_SUM):
                total = sum_of_squares(row)
            scales[h] = 1.0 / np.sqrt(total / len(row) + eps)


@inner
def scaled(line, x, scale, gain):
    for i in range(len(line)):
        line[i] = load(x, i) * scale * gain[i]


@inner
def rotated(line, y, cos, sin, rotary_dim, interleaved):
    rotate(line, 0, y, 0, 1, cos, sin, 0, rotary_dim, interleaved, False)
    for i in range(rotary_dim, len(line)):
        store(y, i, line[i])


@inner
def widen(gain, weight, offset):
    """``offset + weight``, in the computing type; 1 without weights."""
    gain[:] = 1
    for i in range(len(weight)):
        gain[i] = offset + load(weight, i)


@device_function
def append_heads(
    x, b, s, y, page, row, together, scales, head, line, waits, where, gain, eps, cos, sin, rotary_dim, interleaved,
    normalise, streaming,
):  # fmt: skip
    """All heads of token b, s of x, normalised and rotated, into y[page, row]."""
    nheads, head_dim = x.shape[2:]
    find_scales(scales, x, b, s, eps, normalise)
    if together:
        count, step, one = nheads * head_dim, x.strides[2] // x.itemsize, cos.dtype.type(1)
        target, source = from_beginning(write_row(y, (page, row, 0)), count), read_row(x, (b, s, 0))
        to = line[:count] if streaming else target
        rotate_halves(source, step, to, head_dim, nheads, cos, sin, 0, rotary_dim // 2, one, (gain, scales))
        if streaming:
            put(to, target, waits, where, (read_row(x, (b, min(s + 1, x.shape[1] - 1), 0)),), 0)
    else:
        for h in range(nheads):
            scaled(head, read_row(x, (b, s, h)), scales[h], gain)
            rotated(head, write_row(y, (page, row, h)), cos, sin, rotary_dim, interleaved)


@device_function
def go_together(y, rotary_dim, interleaved):
    """Whether the heads of a token of y can be rotated, and stored, at once."""
    neighbours = y.strides[2] == y.shape[3] * y.itemsize
    return neighbours and rotary_dim == y.shape[3] and not interleaved


@kernel(_signature, fastmath=REASSOC)
def append_tokens(
    state, n_tasks, chunk, q, out, k, v, k_cache, v_cache, q_weight, k_weight, seqused_k, block_table,
    slot_mapping, cos, sin, rows, eps, weight_offset, rotary_dim, interleaved, has_weights, paged, mapped, streaming
):  # fmt: skip
    seqlen, page_size = q.shape[1], k_cache.shape[1]
    n_tokens = q.shape[0] * seqlen
    batch_step = 1 if rows.shape[0] > 1 else 0  # or all sequences share one row of positions
    streaming = streaming and q.ctypes.data != out.ctypes.data
    nheads_kv, head_dim = k.shape[2:]
    heads = max(q.shape[2], nheads_kv)
    numbers = scratch(4, max(head_dim, heads), cos[0, 0])  # gains, scales and a head
    lines = scratch(1, heads * head_dim, q_weight.dtype.type(0))
    # of q, k and v, for the next token
    waiting = scratch(3, LINE_BYTES // q.itemsize, q_weight.dtype.type(0))
    places = np.zeros((3, 2), np.int64)
    widen(write_row(numbers, (0,))[:head_dim], read_row(q_weight, ()), weight_offset)
    widen(write_row(numbers, (1,))[:head_dim], read_row(k_weight, ()), weight_offset)
    q_together = go_together(out, rotary_dim, interleaved)
    k_together = go_together(k_cache, rotary_dim, interleaved)
    v_together = v.strides[2] == v_cache.strides[2] == head_dim * v.itemsize
    task = claim(state)
    while task < n_tasks:
        q_gain, k_gain = write_row(numbers, (0,))[:head_dim], write_row(numbers, (1,))[:head_dim]
        scales, head = write_row(numbers, (2,)), write_row(numbers, (3,))[:head_dim]
        line = write_row(lines, (0,))
        for token in range(task * chunk, min(n_tokens, (task + 1) * chunk)):
            b, s = token // seqlen, token % seqlen
            turn = rows[b * batch_step, s]
            c, sn = read_row(cos, (turn,)), read_row(sin, (turn,))
            append_heads(
                q, b, s, out, b, s, q_together, scales, head, line, write_row(waiting, (0,)),
                write_row(places, (0,)), q_gain, eps, c, sn, rotary_dim, interleaved, has_weights, streaming,
            )  # fmt: skip
            if mapped:
                slot = slot_mapping[b, s]
                if slot < 0:
                    continue
                page, row = slot // page_size, slot % page_size
            else:
                page, row = b, seqused_k[b] + s
                if paged:
                    page, row = np.int64(block_table[b, row // page_size]), row % page_size
            append_heads(
                k, b, s, k_cache, page, row, k_together, scales, head, line, write_row(waiting, (1,)),
                write_row(places, (1,)), k_gain, eps, c, sn, rotary_dim, interleaved, has_weights, streaming,
            )  # fmt: skip
            pieces, size = (1, nheads_kv * head_dim) if v_together else (nheads_kv, head_dim)
            for h in range(pieces):
                source, target = (
                    read_row(v, (b, s, h)),
                    from_beginning(write_row(v_cache, (page, row, h)), size),
                )
                if streaming:
                    following = (read_row(v, (b, min(s + 1, seqlen - 1), h)),)
                    put(source, target, write_row(waiting, (2,)), write_row(places, (2,)), following, 0)
                else:
                    copy_row(target, source, size)
        if streaming:
            for i in range(3):
                finish(write_row(waiting, (i,)), write_row(places, (i,)))
            fence()
        task = claim(state)
