"""Attention forward on the CPU: tiled, online softmax, O(N) memory.

One task is a block of queries of one (batch, head group) and, when there are few such blocks, one
part of the keys (split-KV). It walks over the key tiles that its queries can see:

    S^T = K Q^T    scores, masked where the tile is not fully visible
    P^T = exp2(S^T - row_max), row_sum and O^T rescaled when row_max grows
    O^T += V^T P^T

K and V are packed tile by tile (operands.py); a tile meets one panel of queries after another (panel.py).

Parts of the keys leave their O and row sums in a workspace; :func:`attention_combine` merges
them. flops: 4 * seqlen_q * seqlen_k * head_dim per head, less what the masks hide in whole tiles.
Scratch per thread: at most a MB up to head_dim 128.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import numpy as np

from gpu_ops.kernels.attention.cpu.config import (
    FORWARD_VARIANTS,
    SEQUENCES,
    Config,
    Prepared,
    decode_nanoseconds,
    launcher_of,
    make_call,
    optional_arrays,
    optional_types,
    private_bytes,
    results_of,
    select_config,
)
from gpu_ops.kernels.attention.cpu.decode import prepare_decode
from gpu_ops.kernels.attention.cpu.operands import (
    Keys,
    pack_keys,
    pack_queries,
    pack_values,
    transpose_v,
)
from gpu_ops.kernels.attention.cpu.panel import add_tile, factors, finish_block, make_work, start_block
from gpu_ops.kernels.attention.cpu.quantized_pages import NO_SCALE, SCALE
from gpu_ops.kernels.attention.cpu.tile import CALL, Call, block_visibility, lse_of
from gpu_ops.kernels.common.cpu.codegen.arena import arena, arena_size, by_reference
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import in_tiles
from gpu_ops.kernels.common.cpu.codegen.memory import larger, smaller
from gpu_ops.kernels.common.cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import aligned_empty, all_bits, bits, like, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import FLOATS, compute, device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, launcher
from gpu_ops.kernels.recording import refuse_recording

Array = np.ndarray[Any, Any]

ELEMENT_NANOSECONDS = 0.3  # to add an element of a part


def prepare(
    q: Array,
    k: Array,
    v: Array,
    batch: int,
    *,
    results: tuple[Any, Any],
    config: Config,
    max_seqlen_q: int,
    max_seqlen_k: int,
    given: dict[str, Array],
    **options: Any,
) -> Prepared:
    """``run(q, k, v, out, lse, sequences, given)`` for these options and arrays like these, which are not kept.

    q, out (batch, seqlen_q, nheads, dim), k, v (batch, seqlen_k, nheads_kv, dim), lse (batch, nheads, seqlen_q).
    ``results``: the dtypes of out and lse.
    ``sequences``: int64 (batch, 4), per sequence q start, q length, k start, k length. ``given``: the optional arrays
    block_table (k and v are then pages), k_scale and v_scale (of pages in one byte per element), alibi_slopes, sinks,
    bias and visible. ``options``: fields of :class:`Call`: left, right, packed and others.
    """
    sizes = {"nheads_kv": k.shape[2], "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    page_size = k.shape[1] if "block_table" in given else 0
    call = make_call(q, v, batch, config, page_size=page_size, given=given, **sizes, **options)
    dtype, split = q.dtype, call.n_splits > 1
    fill, no_scales = optional_arrays(dtype), (NO_SCALE, NO_SCALE)
    unsplit = _parts(call, 0, dtype)
    blocks = -(-call.heads * max_seqlen_q // call.block_m)
    tasks = call.n_splits * blocks * call.batch * (call.nheads // call.heads)
    quantized = k.dtype != dtype
    of_keys = bits(np.empty(0, k.dtype)).dtype if quantized else dtype
    variant = dtype, given.get("bias", q).dtype, *results, of_keys
    of_parts = dtype, *results
    launch = launcher_of(call)
    if config.kernel == "decode":
        launch = launcher(decode_nanoseconds(call.batch, call.nheads_kv, max_seqlen_k, k.dtype))
        decode = prepare_decode(call, dtype, results, of_keys, launch)

    rows = call.batch * call.nheads * max_seqlen_q
    launch_combine = launcher(call.n_splits * rows * call.head_dim_v * ELEMENT_NANOSECONDS)

    def run(
        q: Array, k: Array, v: Array, out: Array, lse: Array, sequences: Array, given: dict[str, Array]
    ) -> None:
        optional = fill(given)
        parts = _parts(call, rows, dtype) if split else unsplit
        inputs = map(bits, (q, k, v)) if quantized else all_bits(q, k, v)
        arrays = *inputs, bits(out), lse, sequences
        scales = (given["k_scale"], given["v_scale"]) if quantized else no_scales
        if config.kernel == "decode":
            decode.run(arrays, (*optional[:3], *scales), parts)
        else:
            launch(attention_forward[variant], tasks, call, *arrays, *optional, *scales, *parts)
        if split:
            combine = attention_combine[of_parts]
            launch_combine(combine, call.batch * call.nheads, call, *parts, *arrays[3:], optional[2])

    def scratch() -> int:
        of_parts = call.n_splits * rows * (call.head_dim_v * unsplit[0].itemsize + 16) if split else 0
        if config.kernel == "decode":
            return of_parts + decode.scratch()
        like_k, sums = bits(np.empty((0, 0, 0, 0), of_keys)), unsplit[0].reshape(-1)
        return of_parts + private_bytes(launch, tasks, attention_work[of_keys, dtype], call, like_k, sums)

    return Prepared(run, scratch)


def prepare_ragged(
    q: Array, k: Array, v: Array, batch: int, *, config: Config, few: int, max_seqlen_q: int, **rest: Any
) -> Prepared:
    """:func:`prepare` for long and short sequences. The decode kernel takes those of up to ``few`` queries: in tiles
    each head would pack their keys again, for a lane or two."""
    heads, shapes = (q.shape[2], k.shape[2]), (q, k, v, batch)
    attend = prepare(*shapes, config=config, max_seqlen_q=max_seqlen_q, **rest)

    @functools.cache
    def decode(longest: int) -> Prepared:
        cut = select_config(batch, *heads, longest, rest["max_seqlen_k"], decode=True, dtype=k.dtype)
        return prepare(*shapes, config=cut, max_seqlen_q=longest, **rest)

    def run(
        q: Array, k: Array, v: Array, out: Array, lse: Array, sequences: Array, given: dict[str, Array]
    ) -> None:
        refuse_recording("long and short sequences in one pass")
        queries = sequences[:, 1]
        is_short = queries <= few
        longest = int(queries.max(initial=0, where=is_short))
        if longest > 0:
            short, sequences = sequences.copy(), sequences.copy()
            short[~is_short, 1] = sequences[is_short, 1] = 0
            decode(longest).run(q, k, v, out, lse, short, given)
        attend.run(q, k, v, out, lse, sequences, given)

    return Prepared(run, lambda: max(attend.scratch(), decode(few).scratch()))


def _parts(call: Call, rows: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Workspace for parts of the keys: O, and per row the largest score and the sum of the weights relative to it.

    Not lse, which cannot hold the sum next to a score of -1e38.
    """
    sum_dtype = np.float64 if dtype == np.float64 else np.float32
    shape = call.n_splits, rows
    return aligned_empty((*shape, call.head_dim_v), sum_dtype), np.empty((*shape, 2), np.float64)


# as prepare describes them; part_out and part_sums as _parts makes them
Arrays = namedtuple(
    "Arrays",
    "q k v out lse sequences table alibi sinks bias visible seed k_scale v_scale part_out part_sums",
)


@kernel(
    lambda t, bias, of_out, of_lse, of_keys: (
        CALL,
        read(t, 4),
        *(read(of_keys, 4),) * 2,
        write(of_out, 4),
        write(of_lse, 3),
        SEQUENCES,
        *optional_types(bias),
        *(SCALE,) * 2,
        types.Array(compute(t), 3, "C"),
        types.Array(types.float64, 3, "C"),
    ),
    variants=FORWARD_VARIANTS,
)
def attention_forward(
    state,
    n_tasks,
    call,
    q,
    k,
    v,
    out,
    lse,
    sequences,
    table,
    alibi,
    sinks,
    bias,
    visible,
    seed,
    k_scale,
    v_scale,
    part_out,
    part_sums,
):
    options = table, alibi, sinks, bias, visible, seed, k_scale, v_scale
    arrays = by_reference(Arrays(q, k, v, out, lse, sequences, *options, part_out, part_sums))
    size, settings = arena_size(), by_reference(call)
    make_work(size, settings, k, part_out.dtype.type(0))
    attend(state, n_tasks, arena(size[0]), settings, arrays)


@kernel(
    lambda of_keys, t: (CALL, read(of_keys, 4), types.Array(compute(t), 1, "C")),
    variants=tuple((t, t) for t in FLOATS),
)
def attention_work(state, n_tasks, call, k, wide):
    """state[0] = scratch bytes of a thread. Only the types of ``k`` and ``wide`` matter."""
    size = arena_size()
    make_work(size, by_reference(call), k, wide.dtype.type(0))
    state[0] = size[0]


@device_function
def attend(state, n_tasks, memory, call, x):
    zero = x.part_out.dtype.type(0)
    w = by_reference(make_work(memory, call, x.k, zero))
    w.vt[:] = 0  # columns beyond head_dim_v stay 0
    if in_tiles(w.kt):
        w.kt[:] = 0  # columns beyond head_dim stay 0
        w.q_rows[:] = 0
    open_tiles()
    groups = call.nheads // call.heads
    blocks = (call.heads * call.max_seqlen_q + call.block_m - 1) // call.block_m
    scale = like(zero, factors(call, w.p)[0])

    task = claim(state)
    while task < n_tasks:
        split = task % call.n_splits
        pair = task // call.n_splits
        block = blocks - 1 - pair // (call.batch * groups)  # causal: longest first
        b = pair % (call.batch * groups) // groups
        group = pair % groups
        sequence = x.sequences[b]
        q_start, q_len, k_start, k_len = sequence[0], sequence[1], sequence[2], sequence[3]
        if block * call.block_m >= call.heads * q_len:  # a shorter sequence of the batch
            task = claim(state)
            continue
        n, first, last = start_block(w, call, x, b, group, block, q_len, k_len)
        head_kv = group * call.heads * call.nheads_kv // call.nheads
        keys = by_reference(Keys(x.k, x.v, x.k_scale, x.v_scale, x.table, b, k_start, head_kv))
        w.alpha[:] = scale
        pack_queries(w.qt, w.q_rows, x.q, call, b, q_start, n, w.head, w.query, w.alpha)
        if call.n_splits > 1:
            tiles = (last + 1 - first + call.block_n - 1) // call.block_n
            part = (tiles + call.n_splits - 1) // call.n_splits * call.block_n
            first += split * part
            last = smaller(last, first + part - 1)
        while first <= last:
            n_keys = smaller(call.block_n, last + 1 - first)
            seen = 2
            if call.block_q > 0:
                n_keys = smaller(n_keys, call.block_k - first % call.block_k)
                seen = block_visibility(x.visible, call, b, first, n, w.head, w.query)
            if seen > 0:
                pack_keys(w.kt, keys, call, first, n_keys)
                finite = pack_values(w.vt, keys, call, first, n_keys)
                transpose_v(w.vd, w.vt, n_keys)
                add_tile(w, call, x, b, n, first, n_keys, seen, finite)
            first += n_keys
        finish_block(w, call, x, b, n, split, q_start)
        task = claim(state)
    close_tiles()


@kernel(
    lambda t, of_out, of_lse: (
        CALL,
        types.Array(compute(t), 3, "C", readonly=True),
        types.Array(types.float64, 3, "C", readonly=True),
        write(of_out, 4),
        write(of_lse, 3),
        SEQUENCES,
        types.Array(types.float64, 1, "A", readonly=True),
    ),
    variants=tuple((t, *results_of(t)) for t in FLOATS),
)
def attention_combine(state, n_tasks, call, part_out, part_sums, out, lse, sequences, sinks):
    """Combine parts: out = sum over parts of weight * out_part / sum of the weights, which is exp(lse)."""
    total = np.empty(call.head_dim_v, part_out.dtype)
    task = claim(state)
    while task < n_tasks:
        b, h = task // call.nheads, task % call.nheads
        ob = 0 if call.packed else b
        for i in range(sequences[b, 1]):
            index = task * call.max_seqlen_q + i
            has_sink = call.has_sinks and sinks[h] != -np.inf
            m = sink = sinks[h] * LOG2E if has_sink else -np.inf
            for p in range(call.n_splits):
                m = larger(m, part_sums[p, index, 0])
            mass = 2.0 ** (sink - m) if has_sink else 0.0
            total[:] = 0
            for p in range(call.n_splits):
                if part_sums[p, index, 1] != 0:  # a part without visible keys
                    weight = part_sums[p, index, 1] * 2.0 ** (part_sums[p, index, 0] - m)
                    mass += weight
                    source = read_row(part_out, (p, index))
                    share = like(total[0], weight)
                    for d in range(call.head_dim_v):
                        x = source[d]
                        total[d] += x * share if x - x == 0 or share != 0 else x  # 0 * inf would be NaN
            at = sequences[b, 0] + i
            lse[ob, h, at] = lse_of(m, mass)
            inverse = like(total[0], 0.0 if mass == 0 else 1.0 / mass)
            target = write_row(out, (ob, at, h))
            for d in range(call.head_dim_v):
                store(target, d, total[d] * inverse)
        task = claim(state)
