"""Attention backward on the CPU: five products per tile, O(N) memory, a fixed order of every sum.

One task is one part of the query blocks of one (batch, key head). It walks over the key tiles that
each block sees and recomputes P from lse:

    S^T = K Q^T     P^T = exp2(S^T - lse)       dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV += P^T dO    dK += dS^T Q                dQ^T += K^T dS^T

dQ stays in scratch until its block is done. dK and dV of a key head stay there until its task is, if it has one
part. With fewer heads than threads the query blocks are divided: each part takes every n-th block, so causal work
is even, and has separate float32 dK and dV, which are summed in order at the end. flops: 2.5 times the forward pass.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from gpu_ops.kernels.attention.cpu.backward_bias import attention_backward_bias
from gpu_ops.kernels.attention.cpu.backward_ir import PANEL
from gpu_ops.kernels.attention.cpu.backward_operands import Arrays, clear, clear_rows, make_scratch
from gpu_ops.kernels.attention.cpu.backward_tile import KEY_GROUP, add_block, make_sums
from gpu_ops.kernels.attention.cpu.config import (
    SEQUENCES,
    VARIANTS,
    Config,
    Prepared,
    backward_types,
    launcher_of,
    make_call,
    optional_arrays,
    private_bytes,
)
from gpu_ops.kernels.attention.cpu.operands import operand
from gpu_ops.kernels.attention.cpu.tile import CALL
from gpu_ops.kernels.common.cpu.codegen.arena import arena, arena_size, by_reference
from gpu_ops.kernels.common.cpu.codegen.target import TILES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.codegen.tiles import close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import (
    aligned_empty,
    all_bits,
    bits,
    like,
    load,
    read_row,
    store,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import compute, device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, thread_count

Array = np.ndarray[Any, Any]

# queries and keys of a tile: with 512 queries dK and dV are passed over twice as often
BLOCK_M, BLOCK_N = (
    1024,
    128,
)
# With tile registers P and dS should stay in the L2 cache (head_dim 128: 58 ms, with 1024 queries 76).
BLOCK_M_TILES = 512
KEYS_PER_SUM = 512  # keys that one task of the final sum takes
# |lse| from which a row uses it in two parts, and from which it is too coarse to be used at all: see split_lse. By
# computing dtype and dtype of lse. A float32 lse below 2^12 / log2(e) has a smaller error than the scores.
_FLOAT32, _FLOAT64 = 2839.0, 2.0**40
SPLIT_LSE = {
    ("float32", "float32"): (_FLOAT32, _FLOAT32),
    ("float32", "float64"): (128.0, _FLOAT64),
    ("float64", "float64"): (_FLOAT64, _FLOAT64),
}
WORKSPACE_BYTES = 40 << 20  # for dK and dV of all parts; four parts are always allowed


def select_config(
    batch: int, nheads: int, nheads_kv: int, seqlen_q: int, seqlen_k: int, part_bytes: int, block_m: int
) -> Config:
    """Tile sizes, with at most ``block_m`` queries, and number of parts of the query blocks of a key head.

    Two tasks per thread, if there are enough blocks. With several parts each has dK and dV of ``part_bytes``
    in all, so on many cores long sequences take fewer.
    """
    group = nheads // max(nheads_kv, 1)
    heads = group if seqlen_q < 64 else 1  # few queries: heads that share keys fill the lanes
    rows, tasks, wanted = max(heads * seqlen_q, 1), max(batch * nheads_kv, 1), 2 * thread_count()
    block_m = min(block_m, -(-rows // PANEL) * PANEL)
    while block_m > 2 * PANEL and tasks * (group // heads) * -(-rows // block_m) < wanted:
        block_m = -(-block_m // 2 // PANEL) * PANEL
    blocks = group // heads * -(-rows // block_m)
    parts = min(-(-wanted // tasks), blocks, max(4, WORKSPACE_BYTES // max(part_bytes, 1)))
    return Config(block_m, max(1, min(BLOCK_N, seqlen_k)), heads, max(1, parts))


def config_of(q: Array, k: Array, v: Array, batch: int, max_seqlen_q: int, max_seqlen_k: int) -> Config:
    """Configuration for arrays as :func:`prepare` takes them."""
    part_bytes = k.shape[0] * k.shape[1] * k.shape[2] * (q.shape[3] + v.shape[3]) * _sums_of(q).itemsize
    block_m = BLOCK_M_TILES if TILES and q.dtype.name == "bfloat16" else BLOCK_M
    return select_config(batch, q.shape[2], k.shape[2], max_seqlen_q, max_seqlen_k, part_bytes, block_m)


def _widths(q: Array, v: Array, wide: int) -> list[int]:
    """Columns of dK and dV of a part: whole vectors."""
    lanes = VECTOR_BYTES // wide
    return [-(-x.shape[3] // lanes) * lanes for x in (q, v)]


def _sums_of(q: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


def prepare(
    q: Array,
    k: Array,
    v: Array,
    batch: int,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    given: dict[str, Array],
    lse_dtype: np.dtype[Any],
    add: bool,
    **options: Any,
) -> Prepared:
    """``run(dout, q, k, v, lse, delta, dq, dk, dv, sequences, given, dbias=None)`` for arrays like these, which it
    does not keep. lse and delta are float64 (batch, nheads, seqlen_q).

    Shapes and options as in ``attention.prepare``. It fills dq, dk, dv and dbias (bias's shape, computing dtype), or
    with ``add`` adds to the first three. ``lse_dtype``: the dtype that lse had.
    """
    nheads_kv, dtype, wide = k.shape[2], q.dtype, _sums_of(q)
    config = config_of(q, k, v, batch, max_seqlen_q, max_seqlen_k)
    sizes = {"nheads_kv": nheads_kv, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    call = make_call(q, v, batch, config, page_size=0, given=given, **sizes, **options)
    fill, parts, variant = optional_arrays(dtype), config.n_splits, (dtype, given.get("bias", q).dtype)
    limits = SPLIT_LSE[wide.name, lse_dtype.name]
    widths = _widths(q, v, wide.itemsize)
    sums, launch, by_head = -(-max_seqlen_k // KEYS_PER_SUM), launcher_of(call, 2.5), call._replace(heads=1)

    def sums_of_parts(keys: int) -> list[Array]:
        return [aligned_empty((parts, nheads_kv, keys, width), wide) for width in widths]

    no_starts, no_sums = np.zeros(batch + 1, np.int64), sums_of_parts(0)

    def run(
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        delta: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        sequences: Array,
        given: dict[str, Array],
        dbias: Array | None = None,
    ) -> None:
        starts, parts_of = no_starts, no_sums
        if parts > 1:
            # of each sequence's keys in the workspace, room for a group between them
            starts = no_starts.copy()
            np.cumsum(sequences[:, 3] + KEY_GROUP, out=starts[1:])
            parts_of = sums_of_parts(int(starts[-1]))
        grads = dq.dtype
        dq, *targets = all_bits(dq, dk, dv)
        inputs = *all_bits(dout, q, k, v), lse, sequences, *fill(given), delta, *limits
        results = dq, *targets, *parts_of, starts, add
        launch(attention_backward[*variant, grads], batch * nheads_kv * parts, call, *inputs, *results)
        if parts > 1:
            for part, target, scale in zip(parts_of, targets, (call.softmax_scale, 1.0), strict=True):
                arrays = part, starts, sequences, target
                launch(attention_sum_parts[grads], batch * nheads_kv * sums, call, *arrays, scale, add)
        if dbias is not None:
            full = dbias.reshape((1,) * (4 - dbias.ndim) + dbias.shape)
            blocks = -(-max_seqlen_q // call.block_m) if full.shape[2] > 1 else 1
            tasks = full.shape[0] * full.shape[1] * blocks
            launch(attention_backward_bias[variant], tasks, by_head, *inputs, full)

    def scratch() -> int:
        keys = k.shape[0] * k.shape[1] + batch * KEY_GROUP
        of_parts = parts * nheads_kv * keys * sum(widths) * wide.itemsize if parts > 1 else 0
        like_q = bits(np.empty((0, 0, 0, 0), dtype))
        sizes, tasks = attention_backward_work[dtype], batch * nheads_kv * parts
        return of_parts + private_bytes(launch, tasks, sizes, call, like_q, *no_sums)

    return Prepared(run, scratch)


STARTS = types.Array(types.int64, 1, "C", readonly=True)


@kernel(
    lambda t, bias, grads: (
        *backward_types(t, bias),
        *(write(grads, 4),) * 3,
        types.Array(compute(t), 4, "C"),
        types.Array(compute(t), 4, "C"),
        STARTS,
        types.boolean,
    ),
    variants=tuple(dict.fromkeys((*v, grads) for v in VARIANTS for grads in (v[0], compute(v[0]).name))),
)
def attention_backward(
    state, n_tasks, call, dout, q, k, v, lse, sequences, table, alibi, sinks, bias, visible, seed, delta, split_from,
    coarse_from, dq, dk, dv, dk_parts, dv_parts, starts, add,
):  # fmt: skip
    inputs = by_reference(
        Arrays(
            dout, q, k, v, lse, sequences, alibi, sinks, bias, visible, seed, delta, split_from, coarse_from
        )
    )
    results = by_reference(Results(dq, dk, dv, dk_parts, dv_parts, starts, add))
    size, options, zero = arena_size(), by_reference(call), dk_parts.dtype.type(0)
    make_scratch(size, options, operand(q, zero), zero)
    make_sums(size, options, dk_parts, dv_parts)
    backward_tasks(state, n_tasks, arena(size[0]), options, inputs, results)


# of a call; parts of the query blocks have dk_parts and dv_parts, in rows from starts[b] on
Results = namedtuple("Results", "dq dk dv dk_parts dv_parts starts add")


@kernel(lambda t: (CALL, read(t, 4), types.Array(compute(t), 4, "C"), types.Array(compute(t), 4, "C")))
def attention_backward_work(state, n_tasks, call, q, dk_parts, dv_parts):
    """state[0] = scratch bytes of a thread. Only the types of the arrays and the width of the parts matter."""
    size, options, zero = arena_size(), by_reference(call), dk_parts.dtype.type(0)
    make_scratch(size, options, operand(q, zero), zero)
    make_sums(size, options, dk_parts, dv_parts)
    state[0] = size[0]


@device_function
def backward_tasks(state, n_tasks, memory, call, x, y):
    zero = y.dk_parts.dtype.type(0)
    w = by_reference(make_scratch(memory, call, operand(x.q, zero), zero))
    clear_rows(w)
    open_tiles()
    own_dk, own_dv = make_sums(memory, call, y.dk_parts, y.dv_parts)
    groups = call.nheads // call.heads // call.nheads_kv  # row groups that share a key head
    blocks = (call.heads * call.max_seqlen_q + call.block_m - 1) // call.block_m
    scale = like(zero, call.softmax_scale)
    task = claim(state)
    while task < n_tasks:
        part = task % call.n_splits
        head_kv = task // call.n_splits % call.nheads_kv
        b = task // call.n_splits // call.nheads_kv
        ob, sequence = 0 if call.packed else b, x.sequences[b]
        if call.n_splits > 1:
            dk_sum, dv_sum, start = y.dk_parts[part, head_kv], y.dv_parts[part, head_kv], y.starts[b]
        else:
            dk_sum, dv_sum, start = own_dk, own_dv, 0
        clear(dk_sum, start, start + sequence[3])
        clear(dv_sum, start, start + sequence[3])
        for unit in range(part, groups * blocks, call.n_splits):
            group = head_kv * groups + unit % groups
            block = unit // groups
            if block * call.block_m < call.heads * sequence[1]:
                n = add_block(w, call, x, b, head_kv, group, block, dk_sum, dv_sum, start)
                for c in range(n):
                    row = (ob, sequence[0] + w.query[c], w.head[c])
                    store_row(y.dq, row, w.dq[c], call.head_dim, scale, y.add)
        if call.n_splits == 1:
            for j in range(sequence[3]):
                row = (ob, sequence[2] + j, head_kv)
                store_row(y.dk, row, own_dk[j], call.head_dim, scale, y.add)
                store_row(y.dv, row, own_dv[j], call.head_dim_v, like(zero, 1.0), y.add)
        task = claim(state)
    close_tiles()


@device_function
def store_row(target, index, source, dim, scale, add):
    row = write_row(target, index)
    if add:
        for d in range(dim):
            store(row, d, load(row, d) + source[d] * scale)
    else:
        for d in range(dim):
            store(row, d, source[d] * scale)


@kernel(
    lambda t: (
        CALL,
        types.Array(compute(t), 4, "C", readonly=True),
        STARTS,
        SEQUENCES,
        write(t, 4),
        types.float64,
        types.boolean,
    )
)
def attention_sum_parts(state, n_tasks, call, parts, starts, sequences, target, scale, add):
    """target = scale * (part 0 + part 1 + ...), rounded once; with ``add``, target += that."""
    dim = target.shape[3]
    total = np.empty(dim, parts.dtype)
    sums = (call.max_seqlen_k + KEYS_PER_SUM - 1) // KEYS_PER_SUM
    task = claim(state)
    while task < n_tasks:
        chunk = task % sums
        head_kv = task // sums % call.nheads_kv
        b = task // sums // call.nheads_kv
        for j in range(chunk * KEYS_PER_SUM, min((chunk + 1) * KEYS_PER_SUM, sequences[b, 3])):
            total[:] = 0
            for p in range(call.n_splits):
                source = read_row(parts, (p, head_kv, starts[b] + j))
                for d in range(dim):
                    total[d] += source[d]
            index = (0 if call.packed else b, sequences[b, 2] + j, head_kv)
            store_row(target, index, total, dim, like(total[0], scale), add)
        task = claim(state)
