"""RMSNorm of the heads of q and k, RoPE, and the cache write on the CPU: each element is read once and written once.

All heads of a token are processed together if their halves are whole vectors and their results neighbours in memory::

    x      | head | head | ...     read; the next token's heads are prefetched while results are stored
    line   | head | head |         x * (offset + weight) / rms, rotated (cpu/rotate_ir.py)
    out    | head | head | ...     past the caches, if too large for them; else line is not needed

Other heads are processed one by one, through ``head``, in the computing type. Values are copied. Heads of quantized
pages are always processed one by one: keys wait in ``turned``, values in ``head``, until a head's scale is known.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.quantized_pages import NO_SCALE, encode_row
from gpu_ops.kernels.common.cpu.codegen.memory import LINE_BYTES, copy_row, from_beginning, scratch
from gpu_ops.kernels.common.cpu.codegen.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import all_bits, bits, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import (
    FLOATS,
    REASSOC,
    compute,
    device_function,
    generic,
    inner,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.norm.cpu import norm
from gpu_ops.kernels.norm.cpu.norm import SHORT_SUM, TINY, sum_of_squares
from gpu_ops.kernels.rope.cpu.rope import rotate
from gpu_ops.kernels.rope.cpu.rotate_ir import rotate_halves

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
    k_scale: Array | None,
    v_scale: Array | None,
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
    """Run the op. q, out, k, v (batch, seqlen, heads, head_dim), caches (pages, page_size, nheads_kv, head_dim).

    ``slot_mapping`` (batch, seqlen), or ``seqused_k`` and maybe ``block_table``; ``cos``, ``sin`` and ``rows`` as
    in rope.py. ``out`` may be q. ``k_scale`` and ``v_scale``: of caches of int8 or e4m3.
    """
    chunk = _tokens_per_task(q, k)
    weights = _no_weights(q.dtype) if q_weight is None or k_weight is None else (q_weight, k_weight)
    arrays = (
        *all_bits(q, out, k, v),
        *map(bits, (k_cache, v_cache)),
        *all_bits(*weights),
        NO_SCALE if k_scale is None else k_scale,
        NO_SCALE if v_scale is None else v_scale,
        _NO_LENGTHS if seqused_k is None else seqused_k,
        _NO_TABLE if block_table is None else block_table,
        _NO_SLOTS if slot_mapping is None else slot_mapping,
        *(cos, sin, rows),
    )
    streaming = not stays_in_cache(out.nbytes + k.nbytes + v.nbytes)
    options = eps, weight_offset, rotary_dim, interleaved, streaming
    n_tasks = -(-q.shape[0] * q.shape[1] // chunk)
    of_cache = q.dtype if k_scale is None else arrays[4].dtype
    launch(append_tokens[q.dtype, of_cache], n_tasks, chunk, *arrays, *options)


@cache
def _no_weights(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return (np.empty(0, dtype),) * 2


def _tokens_per_task(q: Array, k: Array) -> int:
    batch, seqlen, nheads, head_dim = q.shape
    return items_per_task(batch * seqlen, (nheads + 2 * k.shape[2]) * head_dim)


def _signature(dtype: str, cache: str) -> tuple[types.Type, ...]:
    table = types.Array(compute(dtype), 2, "C", readonly=True)
    return (
        types.int64,
        read(dtype, 4),
        write(dtype, 4),
        *(read(dtype, 4),) * 2,
        *(write(cache, 4),) * 2,
        *(read(dtype, 1),) * 2,
        *(write("float32", 3),) * 2,
        read("int32", 1),
        read("int32", 2),
        read("int64", 2),
        table,
        table,
        read("int64", 2),
        types.float64,
        compute(dtype),
        types.int64,
        *(types.boolean,) * 2,
    )


@device_function
def find_scales(scales, x, b, s, eps, normalise):
    """Compute 1 / rms of each head of a token, or 1: all before the first is needed, to hide their latency."""
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
    """Fill ``gain`` with ``offset + weight`` in the computing type; 1 without weights."""
    gain[:] = 1
    for i in range(len(weight)):
        gain[i] = offset + load(weight, i)


class Heads(NamedTuple):
    """Arguments and scratch of the normalisation and rotation of q's or k's heads."""

    gain: Any  # offset + weight
    normalise: bool
    eps: float
    rotary_dim: int
    interleaved: bool
    together: bool  # all heads of a token at once
    streaming: bool
    scales: Any  # 1 / rms of each head
    head: Any  # one head, if they are processed one by one
    line: Any  # a token's heads that are stored past the caches
    waits: Any  # see stream.put
    where: Any


@device_function
def append_heads(x, b, s, y, page, row, cos, sin, how):
    """Write all heads of token b, s of x, normalised and rotated, to y[page, row]."""
    nheads, head_dim = x.shape[2:]
    scales, gain, rotary_dim, head = how.scales, how.gain, how.rotary_dim, how.head
    find_scales(scales, x, b, s, how.eps, how.normalise)
    if how.together:
        count, step, unit = nheads * head_dim, x.strides[2] // x.itemsize, cos.dtype.type(1)
        target, source = from_beginning(write_row(y, (page, row, 0)), count), read_row(x, (b, s, 0))
        line = how.line[:count] if how.streaming else target
        rotate_halves(
            source, step, line, head_dim, nheads, cos, sin, 0, rotary_dim // 2, unit, (gain, scales)
        )
        if how.streaming:
            coming = (read_row(x, (b, min(s + 1, x.shape[1] - 1), 0)),)
            put(line, target, how.waits, how.where, coming, 0)
    else:
        for h in range(nheads):
            scaled(head, read_row(x, (b, s, h)), scales[h], gain)
            rotated(head, write_row(y, (page, row, h)), cos, sin, rotary_dim, how.interleaved)


@device_function
def go_together(y, rotary_dim, interleaved):
    """Whether the heads of a token of y can be rotated, and stored, at once."""
    neighbours = y.strides[2] == y.shape[3] * y.itemsize
    return neighbours and rotary_dim == y.shape[3] and not interleaved


@generic
def append_keys(k, b, s, cache, scales, page, row, cos, sin, how, turned):
    """Write the keys of a token to its row in the cache."""

    def quantized(k, b, s, cache, scales, page, row, cos, sin, how, turned):
        find_scales(how.scales, k, b, s, how.eps, how.normalise)
        for h in range(k.shape[2]):
            scaled(how.head, read_row(k, (b, s, h)), how.scales[h], how.gain)
            rotated(how.head, turned, cos, sin, how.rotary_dim, how.interleaved)
            scales[page, row, h] = encode_row(write_row(cache, (page, row, h)), turned)

    def floats(k, b, s, cache, scales, page, row, cos, sin, how, turned):
        append_heads(k, b, s, cache, page, row, cos, sin, how)

    return quantized if cache.dtype in (types.int8, types.uint8) else floats


@generic
def append_values(v, b, s, cache, scales, page, row, how):
    """Write the values of a token to its row in the cache."""

    def quantized(v, b, s, cache, scales, page, row, how):
        for h in range(v.shape[2]):
            source, head = read_row(v, (b, s, h)), how.head
            for i in range(len(head)):
                head[i] = load(source, i)
            scales[page, row, h] = encode_row(write_row(cache, (page, row, h)), head)

    def floats(v, b, s, cache, scales, page, row, how):
        nheads_kv, head_dim = v.shape[2:]
        pieces, size = (1, nheads_kv * head_dim) if how.together else (nheads_kv, head_dim)
        for h in range(pieces):
            source = read_row(v, (b, s, h))
            target = from_beginning(write_row(cache, (page, row, h)), size)
            if how.streaming:
                coming = (read_row(v, (b, min(s + 1, v.shape[1] - 1), h)),)
                put(source, target, how.waits, how.where, coming, 0)
            else:
                copy_row(target, source, size)

    return quantized if cache.dtype in (types.int8, types.uint8) else floats


@kernel(_signature, variants=tuple((t, t) for t in FLOATS), fastmath=REASSOC)
def append_tokens(
    state,
    n_tasks,
    chunk,
    q,
    out,
    k,
    v,
    k_cache,
    v_cache,
    q_weight,
    k_weight,
    k_scale,
    v_scale,
    seqused_k,
    block_table,
    slot_mapping,
    cos,
    sin,
    rows,
    eps,
    weight_offset,
    rotary_dim,
    interleaved,
    streaming,
):
    seqlen, page_size = q.shape[1], k_cache.shape[1]
    n_tokens = q.shape[0] * seqlen
    batch_step = 1 if rows.shape[0] > 1 else 0  # or all sequences share one row of positions
    streaming = streaming and q.ctypes.data != out.ctypes.data
    normalise, paged, mapped = len(q_weight) > 0, len(block_table) > 0, len(slot_mapping) > 0
    nheads_kv, head_dim = k.shape[2:]
    heads = max(q.shape[2], nheads_kv)
    numbers = scratch(5, max(head_dim, heads), cos[0, 0])  # gains, scales, and a head before and after
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
        turned = write_row(numbers, (4,))[:head_dim]
        shared, line = (normalise, eps, rotary_dim, interleaved), write_row(lines, (0,))
        q_waits, k_waits = write_row(waiting, (0,)), write_row(waiting, (1,))
        q_where, k_where = write_row(places, (0,)), write_row(places, (1,))
        q_heads = Heads(q_gain, *shared, q_together, streaming, scales, head, line, q_waits, q_where)
        k_heads = Heads(k_gain, *shared, k_together, streaming, scales, head, line, k_waits, k_where)
        v_waits, v_where = write_row(waiting, (2,)), write_row(places, (2,))
        v_heads = Heads(k_gain, *shared, v_together, streaming, scales, head, line, v_waits, v_where)
        for token in range(task * chunk, min(n_tokens, (task + 1) * chunk)):
            b, s = token // seqlen, token % seqlen
            position = rows[b * batch_step, s]
            c, sn = read_row(cos, (position,)), read_row(sin, (position,))
            append_heads(q, b, s, out, b, s, c, sn, q_heads)
            if mapped:
                slot = slot_mapping[b, s]
                if slot < 0:
                    continue
                page, row = slot // page_size, slot % page_size
            else:
                page, row = b, seqused_k[b] + s
                if paged:
                    page, row = np.int64(block_table[b, row // page_size]), row % page_size
            append_keys(k, b, s, k_cache, k_scale, page, row, c, sn, k_heads, turned)
            append_values(v, b, s, v_cache, v_scale, page, row, v_heads)
        if streaming:
            for i in range(3):
                finish(write_row(waiting, (i,)), write_row(places, (i,)))
            fence()
        task = claim(state)
