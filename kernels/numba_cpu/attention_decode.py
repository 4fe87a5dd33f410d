"""Attention of a few query rows over a key/value cache on the CPU: every K and V row is read once, as it lies.

Reading the cache is the work: 2 * head_dim elements per key and KV head, and 4 * rows * head_dim flops,
where the rows are all queries of all heads that share the KV head (GQA). So nothing is packed, and
vectors run along head_dim:

                        head_dim                  block of keys
                    +--------------+             +-------------+
    block of keys   |  K rows      | . Q rows -> |  s, then p  |  per tile of 1, 2 or 4 rows
                    +--------------+             +-------------+
                        head_dim_v                     |
                    +--------------+                   v
    block of keys   |  V rows      | ------> O rows = O * alpha + p V
                    +--------------+

While the K rows of a block are used, its V rows are asked for (prefetch), and while the V rows are
used, the K rows that come next: the rows of one KV head lie nheads_kv * head_dim elements apart or in
pages, which no hardware prefetcher follows. A task is one part of the keys of one sequence, for all KV
heads if they lie side by side in memory: head after head would come back to every memory page nheads_kv
times, and the address translations cost as much as the arithmetic (46 against 30 ns per key, bfloat16,
8 heads of 128). attention_combine of attention.py merges the parts.

A NaN or an infinity in V reaches rows that do not see it (0 * inf). That shows in O, so the rare task
with an O that is not finite is done again, carefully.
"""

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_decode_block import (
    Work,
    finish_scores,
    inner,
    mask_scores,
    place_rows,
    score_block,
    sum_values,
    values_careful,
    weigh_tile,
)
from gpu_ops.kernels.numba_cpu.attention_tile import CALL, LN2, LOG2E, Call, place_lanes
from gpu_ops.kernels.numba_cpu.dtype import like, read_row, write_row
from gpu_ops.kernels.numba_cpu.ir.decode_rows import chunk_elements, from_slots, to_slots
from gpu_ops.kernels.numba_cpu.ir.memory import scratch
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES, lanes, round_up
from gpu_ops.kernels.numba_cpu.jit import FLOATS, compute, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, launch

BLOCK_BYTES = 1 << 14  # of K rows in one block: 8 KB and 32 KB were 5-15 % slower

# (dtype, rows of a tile)
VARIANTS = tuple((t, rows) for t in FLOATS for rows in (1, 2, 4))


def tile_rows(dtype: str, rows: int) -> int:
    """Query rows that share a register tile; a vector of scores holds at least one key."""
    width = VECTOR_BYTES // (8 if dtype == "float64" else 4)
    return min(rows if rows <= 2 else 4, width)


def block_keys(row_bytes: int) -> int:
    """Keys per block, a multiple of those in one vector of scores."""
    return min(max(BLOCK_BYTES // max(row_bytes, 1) // 16 * 16, 16), 256)


def decode(
    call: Call, arrays: tuple[Any, ...], optional: tuple[Any, ...], parts: tuple[Any, ...], dtype: np.dtype
) -> None:
    """Launch for ``call.block_m`` query rows per KV head; arrays as attention.py hands them to its kernels."""
    k = arrays[1]
    rows = tile_rows(dtype.name, call.block_m)
    call = call._replace(
        block_m=round_up.py_func(call.block_m, rows), block_n=block_keys(k.itemsize * call.head_dim)
    )
    # Follow memory: all heads of a key in one task when they lie side by side.
    heads_kv = call.nheads_kv if abs(k.strides[2]) < abs(k.strides[1]) else 1
    tasks = call.batch * (call.nheads_kv // heads_kv) * call.n_splits
    tile = (0,) * rows
    launch(attention_decode[dtype.name, rows], tasks, tile, call, heads_kv, *arrays, *optional, *parts)


@kernel(
    lambda t, rows: (
        types.UniTuple(types.int64, rows),
        CALL,
        types.int64,
        read(t, 4),
        read(t, 4),
        read(t, 4),
        write(t, 4),
        types.Array(types.float64 if t == "float64" else types.float32, 3, "A"),
        types.Array(types.int64, 2, "C", readonly=True),
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.float64, 2, "A", readonly=True),
        types.Array(types.float64, 1, "A", readonly=True),
        types.Array(compute(t), 3, "C"),
        types.Array(types.float64, 2, "C"),
    ),
    variants=VARIANTS,
)
def attention_decode(
    state,
    n_tasks,
    tile,
    call,
    heads_kv,
    q,
    k,
    v,
    out,
    lse,
    sequences,
    table,
    alibi,
    sinks,
    part_out,
    part_lse,
):
    rows = len(tile)
    w = work(call, tile, heads_kv, q, part_out)
    groups = call.nheads_kv // heads_kv
    task = claim(state)
    while task < n_tasks:
        split = task % call.n_splits
        b = task // call.n_splits // groups
        first_kv = task // call.n_splits % groups * heads_kv
        q_len, k_len = sequences[b, 1], sequences[b, 3]
        if q_len == 0:
            task = claim(state)
            continue
        n, first, last = place_lanes(call, first_kv, 0, q_len, k_len, w.head, w.query, w.low, w.high)
        if call.n_splits > 1:
            part = (max(last + 1 - first, 0) + call.n_splits - 1) // call.n_splits
            first += split * part
            last = min(last, first + part - 1)
        pack_queries(w, q, call, heads_kv, b, sequences[b, 0], n)
        finite = False
        for careful in (False, True):
            if not finite:
                finite = attend(
                    w,
                    tile,
                    call,
                    heads_kv,
                    k,
                    v,
                    table,
                    alibi,
                    b,
                    first_kv,
                    n,
                    sequences,
                    first,
                    last,
                    careful,
                )

        ob, at = 0 if call.packed else b, sequences[b, 0]
        for r in range(n * heads_kv):
            kv = r // n
            h, i = w.head[r % n] + kv * call.heads, w.query[r % n]
            row = kv * call.block_m + r % n
            m, total = np.float64(w.row_max[row // rows, row % rows]), 0.0
            for c in range(row % rows, w.row_sum.shape[1], rows):
                total += w.row_sum[row // rows, c]
            factor = 1.0
            if call.has_sinks and call.n_splits == 1 and sinks[h] != -np.inf:
                sink = sinks[h] * LOG2E
                new = max(m, sink)
                factor = 2.0 ** (m - new)
                total = total * factor + 2.0 ** (sink - new)
                m = new
            inverse = like(w.o[0, 0], 0.0 if total == 0 else factor / total)
            row_lse = -np.inf if total == 0 else (m + np.log2(total)) * LN2
            source = w.o[row]
            if call.n_splits > 1:
                index = (b * call.nheads + h) * call.max_seqlen_q + i
                part_lse[split, index] = row_lse
                from_slots(v, write_row(part_out, (split, index)), source, call.head_dim_v, inverse)
            else:
                lse[ob, h, at + i] = row_lse
                from_slots(v, write_row(out, (ob, at + i, h)), source, call.head_dim_v, inverse)
        task = claim(state)


@inner
def work(call, tile, heads_kv, q, part_out):
    """Scratch for one thread."""
    zero = part_out.dtype.type(0)
    width = lanes(part_out)
    rows = call.block_m * heads_kv
    chunk = chunk_elements(q)
    head = np.empty(call.block_m, np.int64)
    keys = np.empty(call.block_n, np.int64)
    low = np.empty(call.block_m, np.int32)
    return Work(
        scratch(rows, round_up(call.head_dim, chunk), zero),
        scratch(rows, round_up(call.head_dim_v, chunk), zero),
        scratch(call.block_m // len(tile), call.block_n * len(tile) + width, zero),
        scratch(rows // len(tile), width, zero),
        scratch(rows // len(tile), width, zero),
        keys,
        np.empty_like(keys),
        head,
        np.empty_like(head),
        low,
        np.empty_like(low),
    )


@inner
def pack_queries(w, q, call, heads_kv, b, q_start, n):
    """Row r of w.q = scale * q of row r in the order of the vectors; zero where nothing is."""
    plain = call.softcap == 0 and not call.has_alibi  # scores in base 2 at once
    scale = like(w.q[0, 0], call.scale * LOG2E if plain else call.scale)
    w.q[:] = 0
    for kv in range(heads_kv):
        for r in range(n):
            source = read_row(q, (0 if call.packed else b, q_start + w.query[r], w.head[r] + kv * call.heads))
            to_slots(q, w.q[kv * call.block_m + r], source, call.head_dim, scale)


@inner
def attend(w, tile, call, heads_kv, k, v, table, alibi, b, first_kv, n, sequences, first, last, careful):
    """Unnormalised O, row_max and row_sum over keys first..last. False if O is not finite."""
    w.row_max[:] = -np.inf
    w.row_sum[:] = 0
    w.o[:] = 0
    rows, tiles = len(tile), w.s.shape[0]
    k_start, k_len = sequences[b, 2], sequences[b, 3]
    offset = k_len - sequences[b, 1]
    low_all, high_all = np.int64(0), k_len - 1  # keys that every row sees
    for r in range(n):
        low_all, high_all = max(low_all, w.low[r]), min(high_all, w.high[r])
    keys_per_vector = w.row_max.shape[1] // rows
    n_keys = min(call.block_n, last + 1 - first)
    if n_keys > 0:
        place_rows(w.keys, k, table, call, b, k_start, first_kv, first, n_keys)
    while n_keys > 0:
        place_rows(w.values, v, table, call, b, k_start, first_kv, first, n_keys)
        padded = round_up(n_keys, keys_per_vector)
        edge = first < low_all or first + n_keys - 1 > high_all or padded > n_keys
        n_next = min(call.block_n, last + 1 - first - n_keys)
        for kv in range(heads_kv):
            score_block(w, tile, k, v, call, padded, kv)
            if call.softcap > 0 or call.has_alibi:
                finish_scores(w, call, rows, b, kv, first, n_keys, n, offset, alibi)
            if edge:
                mask_scores(w, rows, first, n_keys, padded, n)
            for t in range(tiles):
                weigh_tile(w, tile, t, padded, kv * tiles + t)
            next_kv = kv + 1
            if next_kv == heads_kv:  # K rows of the next block, if there is one, at its first head
                next_kv = 0
                if n_next > 0:
                    place_rows(w.keys, k, table, call, b, k_start, first_kv, first + n_keys, n_next)
            if careful:
                values_careful(w, v, call, table, rows, b, k_start, first_kv, kv, first, n_keys, padded, n)
            else:
                sum_values(w, tile, k, v, call, n_keys, padded, kv, next_kv)
        first, n_keys = first + n_keys, n_next
    bad = 0
    for kv in range(heads_kv):
        for r in range(n):
            for x in w.o[kv * call.block_m + r]:
                bad += x - x != 0  # of a NaN or an infinity; counts, unlike sums of floats, use vectors
    return bad == 0
