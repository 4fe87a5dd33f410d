"""RoPE on the CPU: one pass over q and k, in place or not, forward and (with the opposite sign) backward.

Per token: ``2 * (nheads + nheads_kv) * head_dim`` elements read or written and one row of the cos and sin
tables read, which the heads of the token share. Memory bound: 6 flops per pair.

Results too large for a cache are stored past it, unless they are in place: heads gather in a block of BLOCK_BYTES
as long as they are neighbours in memory (``codegen/stream.py``)::

    x     | head | head | head | ...     read; the next heads are prefetched while a block is stored
    line  | head | head | head |         rotated
    out   | head | head | head | ...     whole lines
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import copy_row, from_beginning, place_of, scratch, span
from gpu_ops.kernels.common.cpu.codegen.numba_api import njit
from gpu_ops.kernels.common.cpu.codegen.stream import fence, finish, put, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import all_bits, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch
from gpu_ops.kernels.rope.cpu.rotate_ir import (
    rotate_halves,
    rotate_halves_each,
    rotate_pairs,
    rotate_pairs_each,
)

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 13  # of heads, in the first cache
BLOCK_TOKENS = 64  # tokens of a head whose cos and sin are in the first cache too


def config(inputs: list[Array]) -> str:
    return f"{_tokens_per_task(inputs)} tokens per task"


def rope(
    inputs: list[Array],
    outputs: list[Array],
    cos: Array,
    sin: Array,
    rows: Array,
    *,
    rotary_dim: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Rotate one or two arrays (batch, seqlen, nheads, head_dim), which may differ in nheads only.

    ``cos``, ``sin``: (positions, rotary_dim / 2) in the computing type; ``rows`` (batch or 1, seqlen): which
    row of them each token takes. An output may be exactly its input; otherwise they must not overlap.
    """
    q, q_out = inputs[0], outputs[0]
    # without k: q with no heads
    k, k_out = (inputs[1], outputs[1]) if len(inputs) == 2 else (q[:, :, :0], q_out[:, :, :0])
    n_tokens = q.shape[0] * q.shape[1]
    chunk = _tokens_per_task(inputs)
    streaming = not stays_in_cache(q_out.nbytes + k_out.nbytes)
    arrays = *all_bits(q, q_out, k, k_out), cos, sin, rows
    options = rotary_dim, interleaved, conjugate, streaming
    launch(rope_rotate[q.dtype], -(-n_tokens // chunk), chunk, *arrays, *options)


def _tokens_per_task(inputs: list[Array]) -> int:
    batch, seqlen, _, head_dim = inputs[0].shape
    return items_per_task(batch * seqlen, sum([x.shape[2] for x in inputs]) * head_dim)


def _signature(dtype: str) -> tuple[types.Type, ...]:
    table = types.Array(compute(dtype), 2, "C", readonly=True)
    inout, rows = (read(dtype, 4), write(dtype, 4)), types.Array(types.int64, 2, "A", readonly=True)
    return types.int64, *inout, *inout, table, table, rows, types.int64, *(types.boolean,) * 3


class Turn(NamedTuple):
    """Arguments of the rotation of tokens: see :func:`rope`."""

    cos: Any
    sin: Any
    rows: Any
    rotary_dim: int
    interleaved: bool
    conjugate: bool


class Line(NamedTuple):
    """Buffer for heads that are stored past the caches."""

    block: Any  # rotated heads, which are neighbours in memory
    waits: Any  # the end of the last block: see stream.put
    where: Any


@kernel(_signature)
def rope_rotate(
    state, n_tasks, chunk, q, q_out, k, k_out, cos, sin, rows, rotary_dim, interleaved, conjugate, streaming
):
    n_tokens = q.shape[0] * q.shape[1]
    # follow memory: in (batch, nheads, seqlen, head_dim) arrays the tokens of one head are neighbours
    heads_outer = abs(q_out.strides[1]) < abs(q_out.strides[2])
    lines = scratch(2, max(q.shape[3], BLOCK_BYTES // q.itemsize), q.dtype.type(0))
    where, options = np.zeros(2, np.int64), Turn(cos, sin, rows, rotary_dim, interleaved, conjugate)
    task = claim(state)
    while task < n_tasks:
        first = task * chunk
        count = min(chunk, n_tokens - first)
        line = Line(write_row(lines, (0,)), write_row(lines, (1,)), where)
        for x, out in ((q, q_out), (k, k_out)):
            rotate_tokens(x, out, options, first, count, heads_outer, line, streaming)
        if streaming:
            fence()
        task = claim(state)


@device_function
def rotate_tokens(x, out, turn, first, count, heads_outer, line, streaming):
    """Rotate all heads of ``count`` tokens from ``first`` on, counted over batch and seqlen.

    Neighbours in memory are processed together: the heads of a token, or (``heads_outer``) tokens of a head whose
    positions are consecutive, then those of the next head, with the same cos and sin.
    """
    seqlen, nheads, head_dim = x.shape[1:]
    cos, sin, rows, rotary_dim = turn.cos, turn.sin, turn.rows, turn.rotary_dim
    interleaved, conjugate = turn.interleaved, turn.conjugate
    in_place = x.ctypes.data == out.ctypes.data
    axis = 1 if heads_outer else 2
    x_step, y_step = x.strides[axis] // x.itemsize, out.strides[axis] // out.itemsize
    turn_step = cos.shape[1] if heads_outer else 0
    batch_step = 1 if rows.shape[0] > 1 else 0  # or all sequences share one row of positions
    streaming = streaming and not in_place
    max_tokens = min(BLOCK_TOKENS, max(len(line.block) // head_dim, 1)) if streaming else BLOCK_TOKENS
    at_once = 1
    if y_step == head_dim or not streaming:
        at_once = max_tokens if heads_outer else nheads
        if streaming:
            at_once = min(at_once, len(line.block) // head_dim)
    gathered = np.int64(0)  # elements in line.block, which go to ``block``
    block = write_row(out, (first // seqlen, first % seqlen, 0))
    b, s, done = first // seqlen, first % seqlen, 0
    while done < count:
        row, tokens = b * batch_step, 1
        if heads_outer:
            tokens = min(max_tokens, count - done, seqlen - s)
            if at_once > 1:
                tokens = following(rows, row, s, tokens)
        c, sn = read_row(cos, (rows[row, s],)), read_row(sin, (rows[row, s],))
        h = t = 0
        while h < nheads:
            n = min(at_once, tokens - t if heads_outer else nheads - h)
            if t > 0 or n < tokens:  # otherwise they are those of the first head
                c, sn = read_row(cos, (rows[row, s + t],)), read_row(sin, (rows[row, s + t],))
            target, step = write_row(out, (b, s + t, h)), y_step
            if in_place:
                # the same pointer twice: LLVM then sees that nothing else aliases and still uses vectors
                rotate(target, step, target, step, n, c, sn, turn_step, rotary_dim, interleaved, conjugate)
            else:
                source = read_row(x, (b, s + t, h))
                if streaming:
                    size = n * head_dim
                    end = place_of(block) + gathered * out.itemsize
                    if gathered + size > len(line.block) or place_of(target) != end:
                        destination = from_beginning(block, gathered)
                        put(line.block, destination, line.waits, line.where, (source,), 0)
                        gathered, block = np.int64(0), target
                    target, step = line.block[gathered : gathered + size], head_dim
                    gathered += size
                rotate(source, x_step, target, step, n, c, sn, turn_step, rotary_dim, interleaved, conjugate)
                if rotary_dim < head_dim:
                    for i in range(n):
                        at = (b, s + t + i, h) if heads_outer else (b, s, h + i)
                        kept, place = read_row(x, at)[rotary_dim:], step * i + rotary_dim
                        copy_row(span(target, place, len(kept)), kept, len(kept))  # place may be negative
            if heads_outer:
                t += n
                if t == tokens:
                    h, t = h + 1, 0
            else:
                h += n
        s, done = s + tokens, done + tokens
        if s == seqlen:
            b, s = b + 1, 0
    if gathered > 0:
        put(line.block, from_beginning(block, gathered), line.waits, line.where, (), 0)
        finish(line.waits, line.where)


@njit(inline="always")
def following(rows, row, s, most):
    """Number of tokens from s on, at most ``most``, whose positions are consecutive."""
    n = 1
    while n < most and rows[row, s + n] == rows[row, s] + n:
        n += 1
    return n


@njit(inline="always")
def rotate(x, x_step, y, y_step, n, cos, sin, turn_step, rotary_dim, interleaved, conjugate):
    """Rotate ``n`` heads of a token, or tokens of a head, whose cos and sin are ``turn_step`` > 0 apart."""
    half, sign = rotary_dim // 2, cos.dtype.type(-1.0 if conjugate else 1.0)
    if turn_step > 0 and interleaved:
        rotate_pairs_each(x, x_step, y, y_step, n, cos, sin, turn_step, half, sign, ())
    elif turn_step > 0:
        rotate_halves_each(x, x_step, y, y_step, n, cos, sin, turn_step, half, sign, ())
    elif interleaved:
        rotate_pairs(x, x_step, y, y_step, n, cos, sin, 0, half, sign, ())
    elif n == 1:  # no loop
        rotate_halves(x, 0, y, 0, 1, cos, sin, 0, half, sign, ())
    else:
        rotate_halves(x, x_step, y, y_step, n, cos, sin, 0, half, sign, ())
