"""Tile of the attention backward pass: P and dS from Q, K, V, dO and lse, then dQ, dK and dV.

Lanes are queries, as in ``tile.py``: S^T, P^T, dP^T and dS^T are (keys, lanes). Lanes are grouped in panels of
PANEL. A panel works on the keys that at least one of its lanes sees; the rest of the product's operands is 0:

           panels of queries
           +---+---+---+---+
           |   |   |   |   |
    keys   | 0 +   |   |   |    a causal tile on the diagonal: w.rows holds where a panel's keys start and end
           |   | 0 +   |   |
           |   |   | 0 +   |
           +---+---+---+---+

``plain_gradients`` computes P and dS of plain scores in one pass, ``any_gradients`` with all options. The products of
dK and dV take, per group of keys, the panels that see one of them; the product of dQ takes, per panel, the keys that
one of its lanes sees. Neighbours with the same range are processed together.
"""

import numpy as np

from gpu_ops.kernels.attention.cpu.backward_ir import PANEL, score_tile
from gpu_ops.kernels.attention.cpu.backward_operands import (
    clear,
    clear_columns,
    extremes,
    is_large,
    kept_log2,
    load_block,
    load_keys,
    packing,
    pair_tile,
    pair_tile_keys,
    product_words,
    unscaled,
)
from gpu_ops.kernels.attention.cpu.dropout import drop_lanes
from gpu_ops.kernels.attention.cpu.operands import k_unroll, transpose
from gpu_ops.kernels.attention.cpu.tile import (
    TINY_LOG2,
    finish_scores,
    is_plain,
    mask_scores,
    score_scale,
    unfinish_gradients,
)
from gpu_ops.kernels.common.cpu.codegen.arena import arena_array
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import gemm_columns, gemm_rows, in_tiles, takes_tiles
from gpu_ops.kernels.common.cpu.codegen.memory import larger, round_up, smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.codegen.target import MR
from gpu_ops.kernels.common.cpu.dtype import like, load, read_row
from gpu_ops.kernels.common.cpu.fastmath import exp2
from gpu_ops.kernels.common.cpu.jit import device_function, generic, noinline_function

KEY_GROUP = 32  # keys that share a range of panels in the products of dK and dV


@device_function
def next_tile(w, call, b, n, first, last, visible):
    """(keys of the tile from ``first``, whether a block mask lets any lane see it)."""
    n_keys = smaller(call.block_n, last + 1 - first)
    if call.block_q == 0:
        return n_keys, True
    n_keys = smaller(n_keys, call.block_k - first % call.block_k)
    seen = False
    for c in range(n):
        here = visible[b, w.head[c], w.query[c] // call.block_q, first // call.block_k]
        w.top[c] = smaller(np.int64(w.high[c]), first + n_keys - 1) if here else -1
        seen |= here
    return n_keys, seen


@device_function
def multiply_scores(w, s, dp, row, n, lane, width, words, words_v):
    """Write S^T and dP^T in floats, of keys row ... row + n - 1 and ``width`` lanes, to columns 0 ... of s and dp."""
    ld, k, v = s.shape[1], w.k.shape[1], w.v.shape[1]
    at = row * ld
    gemm_rows(s, at, ld, w.k, row * k, k, w.qt, lane, w.qt.shape[1], n, width, words, False)
    gemm_rows(dp, at, ld, w.v, row * v, v, w.dot, lane, w.dot.shape[1], n, width, words_v, False)


@generic
def plain_gradients(w, call, width, first, n_keys):
    """Compute P^T and dS^T of finite numbers and plain scores. Returns False for float64, with nothing done."""

    def by_panels(w, call, width, first, n_keys):
        step = k_unroll(w.p)
        rows = round_up(n_keys, step)
        words, words_v = product_words(w.q, call.head_dim), product_words(w.q, call.head_dim_v)
        scale = np.float32(unscaled(w.q, score_scale(call)))
        for i in range(width // PANEL):
            lane = i * PANEL
            start = larger(w.span[i, 0] - first, 0) // step * step
            stop = smaller(round_up(larger(w.span[i, 3] + 1 - first, 0), step), rows)
            start = smaller(start, stop)
            if call.block_q > 0 and extremes(w.top, lane, lane + PANEL)[1] < first:
                start = stop = np.int64(0)
            if in_tiles(w.p):
                multiply_scores(w, w.s_panel, w.dp_panel, start, stop - start, lane, PANEL, words, words_v)
            for j in range(start, stop, MR):
                key = first + j
                masked = key < w.span[i, 1] or key + MR - 1 > w.span[i, 2] or call.block_q > 0
                score_tile(w, j, lane, key, masked, scale, words, words_v)
            first_row, end = 0, rows
            # later panels see later keys, and all that meet a group of keys are neighbours
            if call.heads == 1 and call.block_q == 0:
                first_row, end = start // KEY_GROUP * KEY_GROUP, smaller(round_up(stop, KEY_GROUP), rows)
            for a in (w.p, w.ds):
                c = lane // packing(a)
                clear_columns(a, first_row, start, c, c + PANEL // packing(a))
                clear_columns(a, stop, end, c, c + PANEL // packing(a))
            w.rows[i, 0], w.rows[i, 1] = start, stop
        return True

    fused = w.type_of("lse2").dtype == types.float32
    return by_panels if fused else lambda w, call, width, first, n_keys: False


@device_function
def any_scores(w, call, n, first, n_keys, bias):
    """Write masked S^T in base 2 to w.s, and dP^T."""
    width, rows = round_up(n, PANEL), round_up(n_keys, k_unroll(w.p))
    words, words_v = product_words(w.q, call.head_dim), product_words(w.q, call.head_dim_v)
    multiply_scores(w, w.s, w.dp, 0, rows, 0, width, words, words_v)
    factor = like(w.lse2[0], unscaled(w.q, score_scale(call)))
    if is_plain(call):
        scale_scores(w.s, n_keys, width, factor)
    else:
        finish_scores(w.s, call, first, n_keys, 0, n, width, factor, w.terms, True, bias)
    mask_scores(w.s, first, n_keys, width, w.low, w.top)


@device_function
def scale_scores(s, n, width, factor):
    if factor != 1:
        for j in range(n):
            for c in range(width):
                s[j, c] *= factor


@device_function
def split_lse(w, call, x, b, head_kv, n, first, last):
    """Fill w.lse2 and w.rest of rows with a large lse (``split_from``). Their sum is lse in base 2.

    From ``coarse_from`` on lse does not hold the sum of a row: float32 of -1e9 + log 100 is -1e9, and keys that all
    have such a bias would weigh 1 each. There w.lse2 is the largest score of this call's keys, and w.rest the log2 of
    the sum of the weights relative to it.
    """
    ob, coarse = 0 if call.packed else b, False
    for c in range(n):
        row_lse = x.lse[ob, w.head[c], x.sequences[b, 0] + w.query[c]]
        w.rest[c] = 0
        if is_large(row_lse, x.coarse_from):
            has_sink = call.has_sinks and x.sinks[w.head[c]] != -np.inf
            w.lse2[c] = x.sinks[w.head[c]] * LOG2E if has_sink else -np.inf
            w.rest[c] = 1 if has_sink else 0  # initial sum
            coarse = True
        elif is_large(row_lse, x.split_from):
            w.rest[c] = row_lse * LOG2E - w.lse2[c]
    while coarse and first <= last:
        n_keys, seen = next_tile(w, call, b, n, first, last, x.visible)
        if seen:
            load_keys(w, call, x, b, head_kv, first, n_keys)
            any_scores(w, call, n, first, n_keys, x.bias)
            for c in range(n):
                if is_large(x.lse[ob, w.head[c], x.sequences[b, 0] + w.query[c]], x.coarse_from):
                    sum_weights(w, c, n_keys)
        first += n_keys
    for c in range(n):
        if coarse and is_large(x.lse[ob, w.head[c], x.sequences[b, 0] + w.query[c]], x.coarse_from):
            w.rest[c] = np.log2(w.rest[c]) if w.rest[c] > 0 else 0
        w.rest[c] += kept_log2(call)


@noinline_function
def sum_weights(w, c, n_keys):
    top, total = w.lse2[c], w.rest[c]
    for j in range(n_keys):
        score = w.s[j, c]
        if score > top:
            total, top = total * exp2(top - score), score
        if score != -np.inf:
            total += exp2(score - top)
    w.lse2[c], w.rest[c] = top, total


@noinline_function
def weigh_visible(s, lse, n_keys, width):
    """Weigh scores. A visible key never weighs exactly 0, so that its NaN shows; ``s`` and ``lse`` are in base 2."""
    for j in range(n_keys):
        row = s[j]
        for c in range(width):
            least = lse[c] + like(lse[0], TINY_LOG2)
            if row[c] < least and row[c] != -np.inf and lse[c] != np.inf:
                row[c] = least


@device_function
def any_gradients(w, call, x, b, n, first, n_keys, finite):
    """P^T and dS^T with every option, in floats: w.s, w.dp and (of the finished scores) w.dscore.

    dS is that of weights after dropout, P that of all weights, scaled.
    """
    width, rows = round_up(n, PANEL), round_up(n_keys, k_unroll(w.p))
    any_scores(w, call, n, first, n_keys, x.bias)
    if call.dropout_p > 0:
        drop_lanes(w.dp, w, call, x, b, width, first, n_keys, False)
    if not finite:
        weigh_visible(w.s, w.lse2, n_keys, width)
    lse, rest, delta, zero = w.lse2, w.rest, w.delta, like(w.lse2[0], 0.0)
    for j in range(n_keys):
        s, dp = w.s[j], w.dp[j]
        for c in range(width):
            score, weight = s[c], exp2(s[c] - lse[c] - rest[c])
            p = weight if score != -np.inf else zero  # lse may be NaN
            gradient = p * (dp[c] - delta[c])
            s[c], dp[c] = p, gradient if p != 0 else zero  # p = 0 may face a NaN behind a mask
    unfinish_gradients(w.dp, w.dscore, call, n_keys, width, w.terms)
    clear(w.s, n_keys, rows)
    clear(w.dp, n_keys, rows)


@device_function
def pair_gradients(w, width, n_keys):
    """Make the operands of the products from P^T and dS^T in floats."""
    rows = round_up(n_keys, k_unroll(w.p))
    pair_tile(w.p, w.s, rows, width)
    pair_tile(w.ds, w.dp, rows, width)
    pair_tile_keys(w.ds_keys, w.dp, rows, width)
    for i in range(len(w.rows)):
        w.rows[i, 0], w.rows[i, 1] = 0, rows


@device_function
def make_sums(memory, call, dk_parts, dv_parts):
    """Scratch for dK and dV of a key head that has one part."""
    keys, zero = call.max_seqlen_k + KEY_GROUP if call.n_splits == 1 else 0, dk_parts.dtype.type(0)
    return arena_array(memory, (keys, dk_parts.shape[3]), zero), arena_array(
        memory, (keys, dv_parts.shape[3]), zero
    )


@device_function
def panels_of(w, panels, key):
    """First and last + 1 panel that sees a key of the group from row ``key``."""
    first, last = panels, 0
    for i in range(panels):
        if w.rows[i, 0] < key + KEY_GROUP and key < w.rows[i, 1]:
            first, last = smaller(first, i), i + 1
    return first, last


@device_function
def add_products(w, width, dk, dv, at, n_keys):
    """Add products: dV += P^T dO, dK += dS^T Q from row ``at`` on, and dQ += dS K."""
    rows, panels, pack = round_up(n_keys, k_unroll(w.p)), width // PANEL, packing(w.p)
    dim, dim_v = dk.shape[1], dv.shape[1]
    key = 0
    while key < rows:
        first, last = panels_of(w, panels, key)
        stop = key + KEY_GROUP
        while stop < rows and panels_of(w, panels, stop) == (first, last):
            stop += KEY_GROUP
        m, k, lane = smaller(stop, rows) - key, (last - first) * PANEL // pack, first * PANEL // pack
        if k > 0:
            a, row, ld, ld_v = key * w.p.shape[1] + lane, at + key, w.q_pairs.shape[1], w.do_pairs.shape[1]
            gemm_rows(
                dv, row * dim_v, dim_v, w.p, a, w.p.shape[1], w.do_pairs, lane * ld_v, ld_v, m, dim_v, k, True
            )
            gemm_rows(dk, row * dim, dim, w.ds, a, w.ds.shape[1], w.q_pairs, lane * ld, ld, m, dim, k, True)
        key = stop
    i = 0
    while i < panels:
        start, end = w.rows[i, 0], w.rows[i, 1]
        stop = i + 1
        while stop < panels and w.rows[stop, 0] == start and w.rows[stop, 1] == end:
            stop += 1
        m, k, key, lane = (stop - i) * PANEL, (end - start) // pack, start // pack, i * PANEL
        if k > 0:
            add_queries(w, w.ds_keys, lane, m, key, k, dim)
        i = stop


@generic
def add_queries(w, ds, lane, m, key, k, dim):
    """Add dQ += dS K for ``m`` lanes and ``k`` steps from ``key`` on; ``ds`` is ``w.ds_keys``."""

    def tiles(w, ds, lane, m, key, k, dim):
        ld, ld_ds, ld_dq, ld_k = w.ds_rows.shape[1], ds.shape[1], w.dq.shape[1], w.k_pairs.shape[1]
        at_dq, at = lane * ld_dq, lane * ld + key
        transpose(w.ds_rows, at, ld, ds, key * ld_ds + lane, ld_ds, k, m)
        gemm_rows(w.dq, at_dq, ld_dq, w.ds_rows, at, ld, w.k_pairs, key * ld_k, ld_k, m, dim, k, True)

    def vectors(w, ds, lane, m, key, k, dim):
        ld_ds, ld_dq, ld_k = ds.shape[1], w.dq.shape[1], w.k_pairs.shape[1]
        at_dq, at = lane * ld_dq, key * ld_ds + lane
        gemm_columns(w.dq, at_dq, ld_dq, ds, at, ld_ds, w.k_pairs, key * ld_k, ld_k, m, dim, k, True)

    return tiles if takes_tiles(ds) else vectors


@device_function
def add_products_carefully(w, call, x, b, head_kv, n, dk, dv, at, first, n_keys):
    """Add products except terms whose weight is 0: their other factor may be NaN or infinite."""
    kb = 0 if call.packed else b
    for c in range(n):
        row = (kb, x.sequences[b, 0] + w.query[c], w.head[c])
        gradient, query = read_row(x.dout, row), read_row(x.q, row)
        for j in range(n_keys):
            p, ds = w.s[j, c], w.dp[j, c]
            if p != 0:
                add_row(dv[at + j], p, gradient, call.head_dim_v)
            if ds != 0:
                key = read_row(x.k, (kb, x.sequences[b, 2] + first + j, head_kv))
                add_row(dk[at + j], ds, query, call.head_dim)
                add_row(w.dq[c], ds, key, call.head_dim)


@noinline_function
def add_row(total, weight, row, dim):
    for d in range(dim):
        total[d] += weight * load(row, d)


@device_function
def add_block(w, call, x, b, head_kv, group, block, dk, dv, start):
    """Write dQ of a block of queries to w.dq; add its dK and dV, whose rows begin at ``start``. Return lanes used."""
    n, first, last, finite_block, split = load_block(w, call, x, b, group, block)
    if split:
        split_lse(w, call, x, b, head_kv, n, first, last)
    width, plain = round_up(n, PANEL), is_plain(call) and call.dropout_p == 0 and not split
    clear(w.dq, 0, width)
    while first <= last:
        n_keys, seen = next_tile(w, call, b, n, first, last, x.visible)
        if seen:
            finite = load_keys(w, call, x, b, head_kv, first, n_keys)
            all_finite = finite and finite_block
            if not (all_finite and plain and plain_gradients(w, call, width, first, n_keys)):
                any_gradients(w, call, x, b, n, first, n_keys, finite)
                if call.dropout_p > 0:
                    drop_lanes(w.s, w, call, x, b, width, first, n_keys, not all_finite)
                pair_gradients(w, width, n_keys)
            if all_finite:
                add_products(w, width, dk, dv, start + first, n_keys)
            else:
                add_products_carefully(w, call, x, b, head_kv, n, dk, dv, start + first, first, n_keys)
        first += n_keys
    return n
