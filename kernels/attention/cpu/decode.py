"""Attention of a few query rows over a key/value cache on the CPU: every K and V row is read once, in place.

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

The keys and values of a block are read in the order of memory, all KV heads of a key one after another if
they are contiguous. Reading head after head would return to every row nheads_kv times, in short pieces that
no hardware prefetcher follows. Rows are prefetched 12 KB ahead in that order: from the K rows of a block into its
V rows, and from these into the next block. A task is one part of the keys of one sequence; attention_combine of
forward.py merges the parts.

A NaN or an infinity in V reaches rows that do not see it (0 * inf). That shows in O, so the rare task
with an O that is not finite is done again, carefully (special.py).
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.config import (
    SEQUENCES,
    Prepared,
    optional_types,
    private_bytes,
    results_of,
)
from gpu_ops.kernels.attention.cpu.decode_block import (
    Work,
    add_block,
    finish_scores,
    mask_scores,
    note_special,
    place_rows,
    scale_block,
    score_block,
    sum_values,
    values_careful,
    weigh_block,
)
from gpu_ops.kernels.attention.cpu.quantized_pages import SCALE
from gpu_ops.kernels.attention.cpu.special import with_special
from gpu_ops.kernels.attention.cpu.tile import CALL, Call, is_plain, lse_of, place_lanes
from gpu_ops.kernels.common.cpu.codegen.arena import arena, arena_array, arena_size, by_reference
from gpu_ops.kernels.common.cpu.codegen.decode import ADDED_KEYS
from gpu_ops.kernels.common.cpu.codegen.decode_rows import (
    chunk_elements,
    from_slots,
    query_type,
    slot,
    to_query,
)
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.memory import lanes, larger, round_up, smaller
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import bits, like, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import (
    FLOATS,
    compute,
    device_function,
    kernel,
    noinline_function,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.parallel import claim

BLOCK_BYTES = 1 << 15  # of K rows of one head in a block: 16 KB was 5 % slower, 8 KB 20 %
AHEAD_BYTES = 3 << 12  # prefetch distance; at 32 KB rows leave the first cache before use

# (dtype, rows of a tile, dtypes of out, lse, and k and v: those of quantized pages compile as they are needed)
VARIANTS = tuple((t, rows, *results_of(t), t) for t in FLOATS for rows in (1, 2, 4))


def tile_rows(dtype: str, rows: int) -> int:
    """Number of query rows that share a register tile; a vector of scores holds at least one key."""
    width = VECTOR_BYTES // (8 if dtype == "float64" else 4)
    return min(rows if rows <= 2 else 4, width)


def block_keys(row_bytes: int) -> int:
    """Keys per block, a multiple of the keys in one vector of scores."""
    return min(max(BLOCK_BYTES // max(row_bytes, 1) // 16 * 16, 16), 256)


class Plan(NamedTuple):
    """Partition of a call. ``tile``: a tuple with a zero per query row of a register tile; its type matters."""

    tile: tuple[int, ...]
    call: Call
    heads_kv: int  # KV heads that one task reads together
    ahead: int  # keys


# as in forward.py
Arrays = namedtuple("Arrays", "q k v out lse sequences table alibi sinks k_scale v_scale part_out part_sums")


def prepare_decode(
    call: Call, dtype: np.dtype, results: tuple[Any, Any], of_keys: np.dtype, launch: Callable[..., None]
) -> Prepared:
    """``run(arrays, optional, parts)`` for ``call.block_m`` query rows per KV head; arrays as forward.py passes
    them to its kernels. ``of_keys``: the dtype of k and v."""
    rows = tile_rows(dtype.name, call.block_m)
    call = call._replace(
        block_m=round_up.py_func(call.block_m, rows), block_n=block_keys(of_keys.itemsize * call.head_dim)
    )
    variant = dtype.name, rows, *results, of_keys

    def plan_of(heads_kv: int) -> tuple[int, Plan]:
        row_bytes = max(heads_kv * of_keys.itemsize * call.head_dim, 1)
        step = ADDED_KEYS if of_keys.itemsize <= 2 else 1  # rows prefetched together belong to one block
        ahead = min(-(-AHEAD_BYTES // (row_bytes * step)) * step, call.block_n)
        tasks = call.batch * (call.nheads_kv // heads_kv) * call.n_splits
        return tasks, Plan((0,) * rows, call, heads_kv, ahead)

    together, separate = plan_of(max(call.nheads_kv, 1)), plan_of(1)

    def run(arrays: tuple[Any, ...], optional: tuple[Any, ...], parts: tuple[Any, ...]) -> None:
        # Follow memory: all heads of a key in one task when they are contiguous.
        strides = arrays[1].strides
        tasks, plan = together if abs(strides[2]) < abs(strides[1]) else separate
        launch(attention_decode[variant], tasks, plan, *arrays, *optional, *parts)

    def scratch() -> int:
        tasks, plan = together
        like_k = bits(np.empty((0, 0, 0, 0), of_keys))
        like_part = np.empty((0, 0, 0), results_of(dtype.name)[1])
        work = attention_decode_work[dtype.name, rows, of_keys]
        return private_bytes(launch, tasks, work, plan, like_k, like_part)

    return Prepared(run, scratch)


def _plan_type(rows: int) -> types.Type:
    return types.NamedTuple([types.UniTuple(types.int64, rows), CALL, types.int64, types.int64], Plan)


def _signature(t: str, rows: int, of_out: str, of_lse: str, of_keys: str) -> tuple[types.Type, ...]:
    computing = compute(t)
    return (
        _plan_type(rows),
        read(t, 4),
        *(read(of_keys, 4),) * 2,
        write(of_out, 4),
        write(of_lse, 3),
        SEQUENCES,
        *optional_types(t)[:3],
        *(SCALE,) * 2,
        types.Array(computing, 3, "C"),
        types.Array(types.float64, 3, "C"),
    )


@kernel(_signature, variants=VARIANTS)
def attention_decode(
    state,
    n_tasks,
    plan,
    q,
    k,
    v,
    out,
    lse,
    sequences,
    table,
    alibi,
    sinks,
    k_scale,
    v_scale,
    part_out,
    part_sums,
):
    options = table, alibi, sinks, k_scale, v_scale
    arrays = by_reference(Arrays(q, k, v, out, lse, sequences, *options, part_out, part_sums))
    size, call, cut = arena_size(), by_reference(plan.call), (plan.tile, plan.heads_kv, plan.ahead)
    make_work(size, call, cut, k, part_out)
    decode_tasks(state, n_tasks, arena(size[0]), call, cut, arrays)


@kernel(
    lambda t, rows, of_keys: (_plan_type(rows), read(of_keys, 4), types.Array(compute(t), 3, "C")),
    variants=tuple(dict.fromkeys((*variant[:2], variant[-1]) for variant in VARIANTS)),
)
def attention_decode_work(state, n_tasks, plan, k, part_out):
    """state[0] = scratch bytes of a thread. Only the types of the arrays matter."""
    size = arena_size()
    make_work(size, by_reference(plan.call), (plan.tile, plan.heads_kv, plan.ahead), k, part_out)
    state[0] = size[0]


@device_function
def decode_tasks(state, n_tasks, memory, call, cut, x):
    w = by_reference(make_work(memory, call, cut, x.k, x.part_out))
    rows, groups = len(w.tile), call.nheads_kv // w.heads_kv
    task = claim(state)
    while task < n_tasks:
        split = task % call.n_splits
        b = task // call.n_splits // groups
        first_kv = task // call.n_splits % groups * w.heads_kv
        q_start, q_len, k_len = x.sequences[b, 0], x.sequences[b, 1], x.sequences[b, 3]
        if q_len == 0:
            task = claim(state)
            continue
        n, first, last = place_lanes(call, first_kv, 0, q_len, k_len, w.head, w.query, w.low, w.high)
        if call.n_splits > 1:
            part = (larger(last + 1 - first, 0) + call.n_splits - 1) // call.n_splits
            first += split * part
            last = smaller(last, first + part - 1)
        pack_queries(w, call, x.q, x.k, b, q_start, n)
        finite = special = False
        for careful in (False, True):
            if not finite:
                special = careful
                finite = attend(w, call, x, b, first_kv, n, first, last, careful)

        ob = 0 if call.packed else b
        for r in range(n * w.heads_kv):
            kv = r // n
            h, i = w.head[r % n] + kv * call.heads, w.query[r % n]
            row = kv * call.block_m + r % n
            m, total = np.float64(w.row_max[row // rows, row % rows]), 0.0
            for c in range(row % rows, w.row_sum.shape[1], rows):
                total += w.row_sum[row // rows, c]
            factor = 1.0
            if call.has_sinks and call.n_splits == 1 and x.sinks[h] != -np.inf:
                sink = x.sinks[h] * LOG2E
                new = larger(m, sink)
                factor = 2.0 ** (m - new)
                total = total * factor + 2.0 ** (sink - new)
                m = new
            inverse = like(w.o[0, 0], 0.0 if total == 0 else factor / total)
            if call.n_splits > 1:
                index = (b * call.nheads + h) * call.max_seqlen_q + i
                x.part_sums[split, index, 0], x.part_sums[split, index, 1] = m, total
                finish_row(w, call, x.v, write_row(x.part_out, (split, index)), row, inverse, special)
            else:
                x.lse[ob, h, q_start + i] = lse_of(m, total)
                finish_row(w, call, x.v, write_row(x.out, (ob, q_start + i, h)), row, inverse, special)
        task = claim(state)


@noinline_function
def finish_row(w, call, v, to, row, inverse, special):
    from_slots(v, to, w.o[row], call.head_dim_v, inverse)
    if special:
        for d in range(call.head_dim_v):
            if w.special[row, d] != 0:
                store(to, d, with_special(w.o[row, slot(v, d)] * inverse, w.special[row, d]))


@device_function
def make_work(memory, call, cut, k, part_out):
    """Scratch of one thread. ``cut``: the tile, heads_kv and ahead of the plan."""
    tile, heads_kv, ahead = cut
    zero = part_out.dtype.type(0)
    width = lanes(part_out)
    rows = call.block_m * heads_kv
    chunk = chunk_elements(k)
    tiles = rows // len(tile)
    return Work(
        tile,
        heads_kv,
        ahead,
        arena_array(memory, (rows, round_up(call.head_dim, chunk)), query_type(k)),
        arena_array(memory, (rows, round_up(call.head_dim_v, chunk)), zero),
        arena_array(memory, (rows, round_up(call.head_dim_v, chunk)), zero),
        arena_array(memory, (rows, call.head_dim_v), np.uint8(0)),
        arena_array(memory, (tiles, call.block_n * len(tile) + width), zero),
        arena_array(memory, (tiles, width), zero),
        arena_array(memory, (tiles, width), zero),
        arena_array(memory, 3 * call.block_n, np.int64(0)),
        arena_array(memory, call.block_m, np.int64(0)),
        arena_array(memory, call.block_m, np.int64(0)),
        arena_array(memory, call.block_m, np.int32(0)),
        arena_array(memory, call.block_m, np.int32(0)),
    )


@device_function
def pack_queries(w, call, q, k, b, q_start, n):
    """Pack row r of q to row r of w.q as score_keys takes it; the rest is zero."""
    w.q[:] = 0
    for kv in range(w.heads_kv):
        for r in range(n):
            source = read_row(q, (0 if call.packed else b, q_start + w.query[r], w.head[r] + kv * call.heads))
            to_query(k, w.q[kv * call.block_m + r], source, call.head_dim)


@device_function
def attend(w, call, x, b, first_kv, n, first, last, careful):
    """Compute unnormalised O, row_max and row_sum over keys first..last. Returns whether O is finite."""
    w.row_max[:] = -np.inf
    w.row_sum[:] = 0
    w.o[:] = 0
    if careful:
        w.special[:] = 0
    block_n = call.block_n
    k_start, k_len = x.sequences[b, 2], x.sequences[b, 3]
    offset = k_len - x.sequences[b, 1]
    low_all, high_all = np.int64(0), k_len - 1  # keys that every row sees
    for r in range(n):
        low_all, high_all = larger(low_all, w.low[r]), smaller(high_all, w.high[r])
    k_places, v_places = w.places[:block_n], w.places[block_n : 2 * block_n]
    next_places = w.places[2 * block_n :]
    n_keys = smaller(block_n, last + 1 - first)
    if n_keys > 0:
        place_rows(next_places, x.k, x.table, call, b, k_start, first_kv, first, n_keys)
    while n_keys > 0:
        for j in range(block_n):
            k_places[j] = next_places[j]
        place_rows(v_places, x.v, x.table, call, b, k_start, first_kv, first, n_keys)
        n_next = smaller(block_n, last + 1 - first - n_keys)
        if n_next > 0:
            place_rows(next_places, x.k, x.table, call, b, k_start, first_kv, first + n_keys, n_next)
        padded = round_up(n_keys, w.row_max.shape[1] // len(w.tile))
        score_block(w, call, x.k, padded)
        scale_block(w, call, x.k, x.k_scale, x.table, b, first_kv, first, n_keys)
        if not is_plain(call):
            finish_scores(w, call, x.alibi, b, first, n_keys, n, offset)
        if first < low_all or first + n_keys - 1 > high_all or padded > n_keys:
            mask_scores(w, call, first, n_keys, padded, n)
        if careful:
            note_special(w, call, x, b, k_start, first_kv, first, n_keys, n)
        weigh_block(w, padded)
        if careful:
            values_careful(w, call, x, b, k_start, first_kv, first, n_keys, n)
        else:
            scale_block(w, call, x.v, x.v_scale, x.table, b, first_kv, first, n_keys)
            sum_values(w, call, x.v, padded)
        add_block(w, padded)
        first, n_keys = first + n_keys, n_next
    bad = 0
    for kv in range(w.heads_kv):
        for r in range(n):
            for value in w.o[kv * call.block_m + r]:
                bad += (
                    value - value != 0
                )  # of a NaN or an infinity; counts, unlike sums of floats, use vectors
    return bad == 0
