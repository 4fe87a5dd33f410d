"""The steps of one tile of the attention backward pass: from Q, K, V, dO and lse to P and dS.

Layout as in ``attention_tile``: queries in the lanes, so S^T, P^T, dP^T and dS^T are (keys, lanes).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.attention_tile import (
    LOG2E,
    TINY,
    block_visibility,
    cap_scores,
    finish_scores,
    mask_block,
    mask_scores,
    pack_keys,
    pack_lanes,
    place_lanes,
)
from gpu_ops.kernels.numba_cpu.dtype import like, load, read_row
from gpu_ops.kernels.numba_cpu.fastmath import exp2
from gpu_ops.kernels.numba_cpu.ir.gemm import gemm_rows
from gpu_ops.kernels.numba_cpu.ir.memory import SKEW, scratch
from gpu_ops.kernels.numba_cpu.ir.target import lanes, round_up


class Scratch(NamedTuple):
    """What one thread works in. Sizes in elements; m = block_m lanes, n = block_n keys; rows are SKEW longer."""

    qt: Any  # (head_dim, m) scaled queries, transposed: operand of S^T = K Q^T
    qr: Any  # (m, head_dim padded) queries by rows: operand of dK += dS^T Q
    dot: Any  # (head_dim_v, m) and by rows (m, head_dim_v padded): dO likewise
    dor: Any
    dqt: Any  # (head_dim padded, m) accumulates dQ^T
    kt: Any  # (n + 1, head_dim padded) keys, wide; one spare row
    vt: Any  # (n + 1, head_dim_v)
    s: Any  # (n, m) S^T, then P^T
    dp: Any  # (n, m) dP^T, then the gradient of softmax_scale * q.k
    ds: Any  # (n, m) gradient of the score after softcap, if it differs; else the same memory as dp
    slope: Any  # (n, m) slope of softcap
    lse2: Any  # (m) lse in base 2; +inf in unused lanes and in rows that see nothing, so that P is 0
    delta: Any  # (m)
    head: Any  # (m) and so on: see place_lanes
    query: Any
    low: Any
    high: Any
    seen: Any  # (2) keys that every lane sees: first, last
    width: Any  # (1) lanes in use, rounded up to vectors


@njit
def make_scratch(call, wide, dim_k, dim_v):
    """``dim_k``, ``dim_v``: padded row lengths of qr and dor (0: not used)."""
    m, n = call.block_m, round_up(call.block_n, 8)
    ld = m + SKEW  # length of a row of lanes in memory
    capped = n if call.softcap > 0 else 1
    dp = scratch(n, ld, wide)
    return Scratch(
        scratch(call.head_dim, ld, wide),
        scratch(m, dim_k + SKEW, wide),
        scratch(call.head_dim_v, ld, wide),
        scratch(m, dim_v + SKEW, wide),
        scratch(round_up(call.head_dim, 8), ld, wide),
        scratch(n + 1, round_up(call.head_dim, 8) + SKEW, wide),
        scratch(n + 1, call.head_dim_v, wide),
        scratch(n, ld, wide),
        dp,
        scratch(n, ld, wide) if call.softcap > 0 else dp,
        scratch(capped, ld, wide),
        np.empty(m, dp.dtype),
        np.empty(m, dp.dtype),
        np.empty(m, np.int64),
        np.empty(m, np.int64),
        np.empty(m, np.int32),
        np.empty(m, np.int32),
        np.empty(2, np.int64),
        np.empty(1, np.int64),
    )


@njit
def load_block(w, call, b, group, block, dout, q, out, lse, sequences, delta):
    """Lanes, Q, dO, lse and delta of one block of queries.

    Returns (lanes used, first and last key that any of them sees, whether Q and dO are finite).
    """
    q_start, q_len, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 3]
    n, first, last = place_lanes(call, group, block, q_len, k_len, w.head, w.query, w.low, w.high)
    width = round_up(n, lanes(w.lse2))
    w.width[0] = width
    w.seen[0], w.seen[1] = w.low[:n].max(), w.high[:n].min()
    plain = call.softcap == 0 and not call.has_alibi and not call.has_bias
    one = like(w.lse2[0], 1.0)
    scale = one * like(one, call.scale * LOG2E if plain else call.scale)
    pack_lanes(w.qt, q, call, b, q_start, n, width, w.head, w.query, call.head_dim, scale)
    pack_lanes(w.dot, dout, call, b, q_start, n, width, w.head, w.query, call.head_dim_v, one)
    ob = 0 if call.packed else b
    check = one * 0
    for c in range(n):
        at = q_start + w.query[c]
        source = read_row(dout, (ob, at, w.head[c]))
        result = read_row(out, (ob, at, w.head[c]))
        total = 0.0
        for d in range(call.head_dim_v):
            g = load(source, d)
            total += np.float64(g) * np.float64(load(result, d))
            check += g * 0
        for d in range(w.dor.shape[1]):
            w.dor[c, d] = load(source, d) if d < call.head_dim_v else 0
        source = read_row(q, (ob, at, w.head[c]))
        for d in range(call.head_dim):
            check += load(source, d) * 0
        for d in range(w.qr.shape[1]):
            w.qr[c, d] = load(source, d) if d < call.head_dim else 0
        row_lse = np.float64(lse[ob, w.head[c], at])
        w.lse2[c] = np.inf if row_lse == -np.inf else row_lse * LOG2E
        w.delta[c] = total
        delta[ob, w.head[c], at] = total
    for c in range(n, width):
        w.lse2[c] = np.inf
        w.delta[c] = 0
    return n, first, last, check == 0


@njit
def next_tile(w, call, b, n, first, last, visible):
    """(keys of the tile from ``first``, how a block mask treats it: see block_visibility)."""
    n_keys = min(call.block_n, last + 1 - first)
    if call.block_q == 0:
        return n_keys, 2
    n_keys = min(n_keys, call.block_k - first % call.block_k)
    return n_keys, block_visibility(visible, call, b, first, n, w.head, w.query)


@njit
def tile_gradients(w, call, b, head_kv, n, first, n_keys, seen, k, v, sequences, table, alibi, bias, visible):
    """Leave P^T in w.s, dS^T in w.ds and, through softcap, the gradient of q.k in w.dp. True if all is finite."""
    ld, width = w.s.shape[1], w.width[0]
    rows = round_up(n_keys, 8)
    k_start, offset = sequences[b, 2], sequences[b, 3] - sequences[b, 1]
    finite = pack_keys(w.kt, k, table, call, b, k_start, head_kv, first, n_keys, call.head_dim)
    finite &= pack_keys(w.vt, v, table, call, b, k_start, head_kv, first, n_keys, call.head_dim_v)
    gemm_rows(w.s, 0, ld, w.kt, 0, w.kt.shape[1], w.qt, 0, ld, rows, width, call.head_dim, False)
    gemm_rows(w.dp, 0, ld, w.vt, 0, w.vt.shape[1], w.dot, 0, ld, rows, width, call.head_dim_v, False)
    if call.softcap > 0:
        cap_scores(w.s, call.softcap, n_keys, width, w.slope, True)
    if call.softcap > 0 or call.has_alibi or call.has_bias:
        finish_scores(w.s, call, b, first, n_keys, n, width, w.head, w.query, offset, alibi, bias)
    if first < w.seen[0] or first + n_keys - 1 > w.seen[1]:
        mask_scores(w.s, first, n_keys, width, w.low, w.high)
    if seen == 1:
        mask_block(w.s, visible, call, b, first, n_keys, n, w.head, w.query)
    for j in range(n_keys):
        s, dp = w.s[j], w.dp[j]
        for c in range(width):
            p = exp2(s[c] - w.lse2[c]) if s[c] != -np.inf else like(w.lse2[c], 0.0)  # lse may be NaN
            if not finite:  # a visible key never weighs exactly 0, so that its NaN shows
                p = like(p, TINY) if p < like(p, TINY) and s[c] != -np.inf and w.lse2[c] != np.inf else p
            s[c] = p
            dp[c] = p * (dp[c] - w.delta[c]) if p != 0 else 0  # p = 0 may face a NaN behind a mask
    if call.softcap > 0:
        for j in range(n_keys):
            dp, ds, slope = w.dp[j], w.ds[j], w.slope[j]
            for c in range(width):
                ds[c] = dp[c]
                dp[c] = dp[c] * slope[c]
    for j in range(n_keys, rows):
        w.s[j, :] = 0
        w.dp[j, :] = 0
    return finite
