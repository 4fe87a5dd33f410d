"""Attention forward on the CPU: tiled, online softmax, O(N) memory.

One task is a block of queries of one (batch, head group) and, when there are few such blocks, one
part of the keys (split-KV). It walks over the key tiles that its queries can see:

    S^T = K Q^T    scores, masked where the tile is not fully visible
    P^T = exp2(S^T - row_max), row_sum and O^T rescaled when row_max grows
    O^T += V^T P^T

Parts of the keys leave their normalised O and lse in a workspace; :func:`attention_combine` merges
them. flops: 4 * seqlen_q * seqlen_k * head_dim per head, less what the masks hide in whole tiles.
Scratch per thread: about 1 MB at head_dim 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_config import (
    SEQUENCES,
    VARIANTS,
    Config,
    empties,
    make_call,
    optional_types,
    statistics,
)
from gpu_ops.kernels.numba_cpu.attention_decode import decode
from gpu_ops.kernels.numba_cpu.attention_tile import (
    CALL,
    LN2,
    LOG2E,
    Call,
    block_visibility,
    cap_scores,
    finish_scores,
    gemm_careful,
    mask_block,
    mask_scores,
    pack_keys,
    pack_lanes,
    place_lanes,
    softmax_tile,
)
from gpu_ops.kernels.numba_cpu.dtype import bits, like, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.ir.gemm import gemm_columns, gemm_rows
from gpu_ops.kernels.numba_cpu.ir.memory import SKEW, scratch
from gpu_ops.kernels.numba_cpu.ir.target import lanes, round_up
from gpu_ops.kernels.numba_cpu.jit import compute, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, launch

Array = np.ndarray[Any, Any]


def forward(q: Array, k: Array, v: Array, out: Array, lse: Array, sequences: Array, **options: Any) -> None:
    """:func:`prepare`, for one call."""
    prepare(q, k, v, len(sequences), **options)(q, k, v, out, lse, sequences)


def prepare(
    q: Array,
    k: Array,
    v: Array,
    batch: int,
    *,
    config: Config,
    max_seqlen_q: int,
    max_seqlen_k: int,
    left: int,
    right: int,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    visible: Array | None = None,
    block_q: int = 0,
    block_k: int = 0,
    block_table: Array | None = None,
    packed: bool = False,
) -> Callable[[Array, Array, Array, Array, Array, Array], None]:
    """``run(q, k, v, out, lse, sequences)`` for these options and for arrays like these, which it does not keep.

    q, out (batch, seqlen_q, nheads, dim), k, v (batch, seqlen_k, nheads_kv, dim), lse (batch, nheads, seqlen_q).
    ``sequences``: int64 (batch, 4), per sequence q start, q length, k start, k length. ``packed``: the
    arrays have one batch entry that holds all sequences. With ``block_table`` k and v are pages.
    """
    call = make_call(
        q,
        v,
        batch,
        config,
        nheads_kv=k.shape[2],
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        left=left,
        right=right,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bias=bias,
        block_q=block_q,
        block_k=block_k,
        page_size=0 if block_table is None else k.shape[1],
        packed=packed,
    )
    dtype, split = q.dtype, call.n_splits > 1
    none = empties(q)
    optional = (
        none.table if block_table is None else block_table,
        none.alibi if alibi_slopes is None else alibi_slopes,
        none.sinks if sinks is None else sinks,
        bits(none.bias if bias is None else bias),
        none.visible if visible is None else visible,
    )
    unsplit = _parts(call, 0, dtype)
    blocks = -(-call.heads * max_seqlen_q // call.block_m)
    tasks = call.n_splits * blocks * call.batch * (call.nheads // call.heads)
    variant = dtype, (q if bias is None else bias).dtype

    def run(q: Array, k: Array, v: Array, out: Array, lse: Array, sequences: Array) -> None:
        parts = _parts(call, call.batch * call.nheads * max_seqlen_q, dtype) if split else unsplit
        arrays = (bits(q), bits(k), bits(v), bits(out), lse, sequences)
        if config.kernel == "decode":
            decode(call, arrays, optional[:3], parts, dtype)
        else:
            launch(attention_forward[variant], tasks, call, *arrays, *optional, *parts)
        if split:
            combine = attention_combine[dtype]
            launch(combine, call.batch * call.nheads, call, *parts, *arrays[3:], optional[2])

    return run


def _parts(call: Call, rows: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Where the parts of the keys leave their O and lse."""
    wide = np.float64 if dtype == np.float64 else np.float32
    return np.empty((call.n_splits, rows, call.head_dim_v), wide), np.empty((call.n_splits, rows), np.float64)


@kernel(
    lambda t, bias: (
        CALL,
        read(t, 4),
        read(t, 4),
        read(t, 4),
        write(t, 4),
        types.Array(statistics(t), 3, "A"),
        SEQUENCES,
        *optional_types(bias),
        types.Array(compute(t), 3, "C"),
        types.Array(types.float64, 2, "C"),
    ),
    variants=VARIANTS,
)
def attention_forward(
    state, n_tasks, call, q, k, v, out, lse, sequences, table, alibi, sinks, bias, visible, part_out, part_lse
):
    block_m, block_n = call.block_m, call.block_n
    dim_v = round_up(call.head_dim_v, 8)
    wide = part_out.dtype.type(0)
    ld, ld_v = block_m + SKEW, dim_v + SKEW  # lengths of rows in memory
    qt = scratch(call.head_dim, ld, wide)
    kt = scratch(round_up(block_n, 8) + 1, call.head_dim, wide)
    vt = scratch(round_up(block_n, 8) + 1, ld_v, wide)
    s = scratch(round_up(block_n, 8), ld, wide)
    ot = scratch(dim_v, ld, wide)
    row_max = np.empty(block_m, part_out.dtype)
    row_sum = np.empty(block_m, part_out.dtype)
    alpha = np.empty(block_m, part_out.dtype)
    tile_max = np.empty(block_m, part_out.dtype)
    tile_sum = np.empty(block_m, part_out.dtype)
    head = np.empty(block_m, np.int64)
    query = np.empty(block_m, np.int64)
    low = np.empty(block_m, np.int32)
    high = np.empty(block_m, np.int32)
    groups = call.nheads // call.heads
    blocks = (call.heads * call.max_seqlen_q + block_m - 1) // block_m
    plain = call.softcap == 0 and not call.has_alibi and not call.has_bias
    scale = like(wide, call.scale * LOG2E if plain else call.scale)

    task = claim(state)
    while task < n_tasks:
        split = task % call.n_splits
        pair = task // call.n_splits
        block = blocks - 1 - pair // (call.batch * groups)  # causal: the longest first
        b = pair % (call.batch * groups) // groups
        group = pair % groups
        q_start, q_len = sequences[b, 0], sequences[b, 1]
        k_start, k_len = sequences[b, 2], sequences[b, 3]
        if block * block_m >= call.heads * q_len:  # a shorter sequence of the batch
            task = claim(state)
            continue
        n, first, last = place_lanes(call, group, block, q_len, k_len, head, query, low, high)
        low_all, high_all = low[:n].max(), high[:n].min()  # keys that every lane sees
        width = round_up(n, lanes(row_max))
        offset = k_len - q_len
        head_kv = group * call.heads * call.nheads_kv // call.nheads
        pack_lanes(qt, q, call, b, q_start, n, width, head, query, call.head_dim, scale)
        row_max[:] = -np.inf
        row_sum[:] = 0
        ot[:] = 0
        if call.n_splits > 1:
            tiles = (last + 1 - first + block_n - 1) // block_n
            part = (tiles + call.n_splits - 1) // call.n_splits * block_n
            first += split * part
            last = min(last, first + part - 1)
        while first <= last:
            n_keys = min(block_n, last + 1 - first)
            seen = 2
            if call.block_q > 0:
                n_keys = min(n_keys, call.block_k - first % call.block_k)
                seen = block_visibility(visible, call, b, first, n, head, query)
            if seen > 0:
                pack_keys(kt, k, table, call, b, k_start, head_kv, first, n_keys, call.head_dim)
                rows = round_up(n_keys, 8)
                gemm_rows(s, 0, ld, kt, 0, call.head_dim, qt, 0, ld, rows, width, call.head_dim, False)
                if call.softcap > 0:
                    cap_scores(s, call.softcap, n_keys, width, s, False)
                if not plain:
                    finish_scores(s, call, b, first, n_keys, n, width, head, query, offset, alibi, bias)
                if first < low_all or first + n_keys - 1 > high_all:
                    mask_scores(s, first, n_keys, width, low, high)
                if seen == 1:
                    mask_block(s, visible, call, b, first, n_keys, n, head, query)
                finite = pack_keys(vt, v, table, call, b, k_start, head_kv, first, n_keys, call.head_dim_v)
                if softmax_tile(s, n_keys, width, row_max, row_sum, alpha, tile_max, tile_sum, not finite):
                    for d in range(dim_v):
                        row = ot[d]
                        for c in range(width):
                            row[c] *= alpha[c]
                if finite:
                    gemm_columns(ot, 0, ld, vt, 0, ld_v, s, 0, ld, dim_v, width, n_keys, True)
                else:
                    gemm_careful(ot, vt, s, dim_v, width, n_keys)
            first += n_keys

        ob = 0 if call.packed else b
        for c in range(n):
            h, i = head[c], query[c]
            m, total = np.float64(row_max[c]), np.float64(row_sum[c])
            factor = 1.0
            if call.has_sinks and call.n_splits == 1 and sinks[h] != -np.inf:
                sink = sinks[h] * LOG2E
                new = max(m, sink)
                factor = 2.0 ** (m - new)
                total = total * factor + 2.0 ** (sink - new)
                m = new
            inverse = like(wide, 0.0 if total == 0 else factor / total)
            row_lse = -np.inf if total == 0 else (m + np.log2(total)) * LN2
            if call.n_splits > 1:
                index = (b * call.nheads + h) * call.max_seqlen_q + i
                part_lse[split, index] = row_lse
                for d in range(call.head_dim_v):
                    part_out[split, index, d] = ot[d, c] * inverse
            else:
                lse[ob, h, q_start + i] = row_lse
                target = write_row(out, (ob, q_start + i, h))
                for d in range(call.head_dim_v):
                    store(target, d, ot[d, c] * inverse)
        task = claim(state)


@kernel(
    lambda t: (
        CALL,
        types.Array(compute(t), 3, "C", readonly=True),
        types.Array(types.float64, 2, "C", readonly=True),
        write(t, 4),
        types.Array(statistics(t), 3, "A"),
        SEQUENCES,
        types.Array(types.float64, 1, "A", readonly=True),
    )
)
def attention_combine(state, n_tasks, call, part_out, part_lse, out, lse, sequences, sinks):
    """out = sum over parts of exp(lse_part - lse) * out_part, lse = log of the sum of exp(lse_part)."""
    total = np.empty(call.head_dim_v, part_out.dtype)
    task = claim(state)
    while task < n_tasks:
        b, h = task // call.nheads, task % call.nheads
        ob = 0 if call.packed else b
        for i in range(sequences[b, 1]):
            index = task * call.max_seqlen_q + i
            has_sink = call.has_sinks and sinks[h] != -np.inf
            m = sinks[h] if has_sink else -np.inf
            for p in range(call.n_splits):
                m = max(m, part_lse[p, index])
            mass = np.exp(sinks[h] - m) if has_sink else 0.0
            total[:] = 0
            for p in range(call.n_splits):
                if part_lse[p, index] != -np.inf:  # a part without visible keys
                    weight = np.exp(part_lse[p, index] - m)
                    mass += weight
                    source = read_row(part_out, (p, index))
                    for d in range(call.head_dim_v):
                        total[d] += like(total[0], weight) * source[d]
            nothing = mass == 0
            at = sequences[b, 0] + i
            lse[ob, h, at] = -np.inf if nothing else m + np.log(mass)
            inverse = like(total[0], 0.0 if nothing else 1.0 / mass)
            target = write_row(out, (ob, at, h))
            for d in range(call.head_dim_v):
                store(target, d, total[d] * inverse)
        task = claim(state)
