"""Attention backward on the CPU: five products per tile, O(N) memory, a fixed order of every sum.

One task is one part of the query blocks of one (batch, key head). It walks over the key tiles that
each block sees and recomputes P from lse:

    S^T = K Q^T     P^T = exp2(S^T - lse)       dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV += P^T dO    dK += dS^T Q                dQ^T += K^T dS^T

dQ stays in scratch until its block is done. dK and dV add up in a float32 workspace of the size of
dK and dV per part; parts take every n-th block, so that causal work is even, and are summed in order
at the end. flops: 2.5 times the forward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.attention_config import (
    SEQUENCES,
    VARIANTS,
    Config,
    empties,
    make_call,
    optional_types,
    select_config,
    statistics,
)
from gpu_ops.kernels.numba_cpu.attention_gradient_tile import (
    load_block,
    make_scratch,
    next_tile,
    tile_gradients,
)
from gpu_ops.kernels.numba_cpu.attention_tile import CALL, gemm_careful, gemm_careful_rows
from gpu_ops.kernels.numba_cpu.dtype import bits, like, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.ir.gemm import gemm_columns, gemm_rows
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES, round_up
from gpu_ops.kernels.numba_cpu.jit import compute, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, launch, thread_count

Array = np.ndarray[Any, Any]

KEYS_PER_SUM = 512  # keys that one task of the final sum takes


WORKSPACE_BYTES = 40 << 20  # of dK and dV that parts may take together, but four parts always may


def select_parts(batch: int, nheads_kv: int, row_blocks: int, part_bytes: int) -> int:
    """Into how many parts the query blocks of one key head go.

    Two tasks per thread, if there are blocks; each part has its own dK and dV of ``part_bytes``, so on
    many cores long sequences take fewer.
    """
    wanted = -(-2 * thread_count() // max(batch * nheads_kv, 1))
    return max(1, min(wanted, row_blocks, max(4, WORKSPACE_BYTES // max(part_bytes, 1))))


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    sequences: Array,
    *,
    dbias: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    visible: Array | None = None,
    block_table: None = None,
    block_q: int = 0,
    block_k: int = 0,
    **options: Any,
) -> Array:
    """Shapes as in ``attention.forward``; fills dq, dk, dv and, when given, dbias (bias's shape, lse's dtype).

    Returns delta = sum over head_dim_v of dout * out: (batch, nheads, seqlen_q) float64.
    """
    batch, nheads, nheads_kv = len(sequences), q.shape[2], k.shape[2]
    tiles = select_config(batch, nheads, nheads_kv, max_seqlen_q, max_seqlen_k)
    row_blocks = nheads // nheads_kv // tiles.heads * -(-tiles.heads * max_seqlen_q // tiles.block_m)
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    part_bytes = int(sequences[:, 3].sum()) * nheads_kv * (q.shape[3] + v.shape[3]) * wide.itemsize
    parts = select_parts(batch, nheads_kv, row_blocks, part_bytes)

    def call_with(heads: int, n_splits: int) -> Any:
        return make_call(
            q, v, batch, Config(tiles.block_m, tiles.block_n, heads, n_splits),
            nheads_kv=nheads_kv, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, sinks=sinks,
            alibi_slopes=alibi_slopes, bias=bias, block_q=block_q, block_k=block_k, page_size=0, **options,
        )  # fmt: skip

    call = call_with(tiles.heads, parts)
    none = empties(q)
    optional = (
        none.table,
        none.alibi if alibi_slopes is None else alibi_slopes,
        none.sinks,
        bits(none.bias if bias is None else bias),
        none.visible if visible is None else visible,
    )
    lanes = VECTOR_BYTES // wide.itemsize
    starts = np.zeros(batch + 1, np.int64)  # of each sequence's keys in the workspace, whole tiles apart
    np.cumsum(-(-sequences[:, 3] // 8) * 8 + 8, out=starts[1:])
    dk_parts, dv_parts = (
        np.zeros((parts, nheads_kv, int(starts[-1]), -(-dim // lanes) * lanes), wide)
        for dim in (call.head_dim, call.head_dim_v)
    )
    delta = np.zeros(lse.shape, np.float64)
    variant = (q.dtype, (q if bias is None else bias).dtype)
    inputs = (bits(dout), bits(q), bits(k), bits(v), bits(out), lse, sequences, *optional)
    launch(
        attention_backward[variant], batch * nheads_kv * parts, call, *inputs,
        bits(dq), delta, dk_parts, dv_parts, starts,
    )  # fmt: skip
    sums = -(-max_seqlen_k // KEYS_PER_SUM)
    for parts_of, target, scale in ((dk_parts, dk, call.scale), (dv_parts, dv, 1.0)):
        launch(
            attention_sum_parts[q.dtype], batch * nheads_kv * sums, call, parts_of, starts, sequences,
            bits(target), scale,
        )  # fmt: skip
    if dbias is not None:
        full = dbias.reshape((1,) * (4 - dbias.ndim) + dbias.shape)
        blocks = -(-max_seqlen_q // call.block_m) if full.shape[2] > 1 else 1
        launch(
            attention_backward_bias[variant], full.shape[0] * full.shape[1] * blocks, call_with(1, 1), *inputs,
            delta, full,
        )  # fmt: skip
    return delta


def _input_types(t: str, bias: str) -> tuple[types.Type, ...]:
    """call, dout, q, k, v, out, lse, sequences, and the optional arrays."""
    lse = types.Array(statistics(t), 3, "A", readonly=True)
    return (CALL, *(read(t, 4),) * 5, lse, SEQUENCES, *optional_types(bias))


STARTS = types.Array(types.int64, 1, "C", readonly=True)


@kernel(
    lambda t, bias: (
        *_input_types(t, bias),
        write(t, 4),
        types.Array(types.float64, 3, "C"),
        types.Array(compute(t), 4, "C"),
        types.Array(compute(t), 4, "C"),
        STARTS,
    ),
    variants=VARIANTS,
)
def attention_backward(
    state, n_tasks, call, dout, q, k, v, out, lse, sequences, table, alibi, sinks, bias, visible,
    dq, delta, dk_parts, dv_parts, starts,
):  # fmt: skip
    w = make_scratch(call, dk_parts.dtype.type(0), dk_parts.shape[3], dv_parts.shape[3])
    block_m = call.block_m
    dim_k, dim_v, dim_q = dk_parts.shape[3], dv_parts.shape[3], w.dqt.shape[0]
    ld, ld_q, ld_do, ld_k = w.s.shape[1], w.qr.shape[1], w.dor.shape[1], w.kt.shape[1]
    groups = call.nheads // call.heads // call.nheads_kv  # row groups that share a key head
    blocks = (call.heads * call.max_seqlen_q + block_m - 1) // block_m
    scale = like(w.dqt[0, 0], call.scale)
    task = claim(state)
    while task < n_tasks:
        part = task % call.n_splits
        head_kv = task // call.n_splits % call.nheads_kv
        b = task // call.n_splits // call.nheads_kv
        ob = 0 if call.packed else b
        rows_start = (part * call.nheads_kv + head_kv) * starts[call.batch] + starts[b]
        for unit in range(part, groups * blocks, call.n_splits):
            group = head_kv * groups + unit % groups
            block = unit // groups
            if block * block_m >= call.heads * sequences[b, 1]:
                continue
            n, first, last, finite_block = load_block(
                w, call, b, group, block, dout, q, out, lse, sequences, delta
            )
            w.dqt[:] = 0
            while first <= last:
                n_keys, seen = next_tile(w, call, b, n, first, last, visible)
                if seen > 0:
                    finite = finite_block & tile_gradients(
                        w,
                        call,
                        b,
                        head_kv,
                        n,
                        first,
                        n_keys,
                        seen,
                        k,
                        v,
                        sequences,
                        table,
                        alibi,
                        bias,
                        visible,
                    )
                    rows = round_up(n_keys, 8)
                    at_k = (rows_start + first) * dim_k
                    at_v = (rows_start + first) * dim_v
                    if finite:
                        gemm_rows(dv_parts, at_v, dim_v, w.s, 0, ld, w.dor, 0, ld_do, rows, dim_v, n, True)
                        gemm_rows(dk_parts, at_k, dim_k, w.dp, 0, ld, w.qr, 0, ld_q, rows, dim_k, n, True)
                        gemm_columns(
                            w.dqt, 0, ld, w.kt, 0, ld_k, w.dp, 0, ld, dim_q, w.width[0], n_keys, True
                        )
                    else:
                        keys = starts[b] + first
                        gemm_careful_rows(dv_parts[part, head_kv, keys:], w.s, w.dor, n_keys, dim_v, n)
                        gemm_careful_rows(dk_parts[part, head_kv, keys:], w.dp, w.qr, n_keys, dim_k, n)
                        gemm_careful(w.dqt, w.kt, w.dp, dim_q, n, n_keys)
                first += n_keys
            for c in range(n):
                target = write_row(dq, (ob, sequences[b, 0] + w.query[c], w.head[c]))
                for d in range(call.head_dim):
                    store(target, d, w.dqt[d, c] * scale)
        task = claim(state)


@kernel(
    lambda t: (
        CALL,
        types.Array(compute(t), 4, "C", readonly=True),
        STARTS,
        SEQUENCES,
        write(t, 4),
        types.float64,
    )
)
def attention_sum_parts(state, n_tasks, call, parts, starts, sequences, target, scale):
    """target = scale * (part 0 + part 1 + ...), rounded once."""
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
            row = write_row(target, (0 if call.packed else b, sequences[b, 2] + j, head_kv))
            for d in range(dim):
                store(row, d, total[d] * like(total[0], scale))
        task = claim(state)


@njit
def add_bias_tile(dbias, w, n, first, n_keys):
    """Add a tile of dS; an axis along which bias was broadcast is summed in float64 first."""
    queries, keys = dbias.shape
    if queries > 1:
        for c in range(n):
            row, total = dbias[w.query[c]], 0.0
            for j in range(n_keys):
                if keys > 1:
                    row[first + j] += w.ds[j, c]
                else:
                    total += w.ds[j, c]
            if keys == 1:
                row[0] += total
    else:
        for j in range(n_keys):
            total = 0.0
            for c in range(n):
                total += w.ds[j, c]
            dbias[0, first + j if keys > 1 else 0] += total


@kernel(
    lambda t, bias: (
        *_input_types(t, bias),
        types.Array(types.float64, 3, "C"),
        types.Array(statistics(t), 4, "C"),
    ),
    variants=VARIANTS,
)
def attention_backward_bias(
    state, n_tasks, call, dout, q, k, v, out, lse, sequences, table, alibi, sinks, bias, visible, delta, dbias
):  # fmt: skip
    """dbias = dS, summed over the axes along which bias was broadcast; one task owns what it adds to."""
    batches, heads, queries = dbias.shape[:3]
    blocks = (call.max_seqlen_q + call.block_m - 1) // call.block_m
    owned = blocks if queries > 1 else 1
    w = make_scratch(call, dbias.dtype.type(0), 0, 0)
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
                    n, first, last, _ = load_block(w, call, b, h, block, dout, q, out, lse, sequences, delta)
                    while first <= last:
                        n_keys, seen = next_tile(w, call, b, n, first, last, visible)
                        if seen > 0:
                            tile_gradients(
                                w, call, b, head_kv, n, first, n_keys, seen, k, v, sequences, table, alibi,
                                bias, visible,
                            )  # fmt: skip
                            add_bias_tile(dbias[bias_batch, bias_head], w, n, first, n_keys)
                        first += n_keys
        task = claim(state)
