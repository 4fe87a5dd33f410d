"""The first half of a tile of the attention backward pass: from Q, K, V, dO and lse to P and dS.

Here is what a block and a tile load, and P and dS of plain scores; attention_gradient_options.py has every option.

Layout as in ``attention_tile``: queries in the lanes, so S^T, P^T, dP^T and dS^T are (keys, lanes). Lanes go in
panels of PANEL; a panel works on the keys that some lane of it sees, and the rest of what is read is 0:

           panels of queries
           +---+---+---+---+
           |   |   |   |   |
    keys   | 0 +   |   |   |    a causal tile on the diagonal: w.rows says where a panel's keys start and end
           |   | 0 +   |   |
           |   |   | 0 +   |
           +---+---+---+---+
"""

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.numba_cpu.attention_gradient_operands import (
    float_tile,
    packing,
    pair_rows,
    product_words,
    row_pairs,
    row_words,
    scale_floats,
    unscaled,
)
from gpu_ops.kernels.numba_cpu.attention_operands import finite, k_unroll, put_row, transpose, turned
from gpu_ops.kernels.numba_cpu.attention_tile import make_terms, place_lanes, place_terms, score_scale
from gpu_ops.kernels.numba_cpu.codegen.arena import arena_array
from gpu_ops.kernels.numba_cpu.codegen.attention_gradient import PANEL, score_tile
from gpu_ops.kernels.numba_cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.numba_cpu.codegen.gemm import gemm_rows, in_tiles
from gpu_ops.kernels.numba_cpu.codegen.memory import SKEW, larger, round_up, smaller
from gpu_ops.kernels.numba_cpu.codegen.numba_api import types
from gpu_ops.kernels.numba_cpu.codegen.target import MR
from gpu_ops.kernels.numba_cpu.dtype import like, load, read_row
from gpu_ops.kernels.numba_cpu.jit import device_function, generic, inner, noinline_function

KEY_GROUP = 32  # keys that share a range of panels in the products of dK and dV
RESOLUTION = 2.0**-12  # lse in base 2 is too large to hold the sum of a row where adding this is lost


class Scratch(NamedTuple):
    """What one thread works in; m = block_m lanes, n = block_n keys. Operands: see attention_gradient_operands."""

    q: Any  # (m, head_dim) rows of Q
    qt: Any  # (head_dim, m) transposed: operand of S^T = K Q^T
    q_pairs: Any  # (m, head_dim) row pairs: operand of dK += dS^T Q
    do: Any  # (m, head_dim_v) dO likewise
    dot: Any
    do_pairs: Any
    k: Any  # (n, head_dim) rows of K
    k_pairs: Any  # (n, head_dim) row pairs: operand of dQ += dS K
    v: Any  # (n, head_dim_v) rows of V
    dq: Any  # (m, head_dim padded) accumulates dQ, of floats
    p: Any  # (n, m) P^T
    ds: Any  # (n, m) dS^T: the gradient of softmax_scale * q.k
    ds_keys: Any  # (n, m) its row pairs
    ds_rows: Any  # (m, n) for tiles, these transposed
    s: Any  # (n, m) S^T and P^T in floats; the same memory as p, if that is of floats
    dp: Any  # (n, m) dP^T and dS^T likewise
    s_panel: Any  # (n, PANEL) for tiles, S^T and dP^T of one panel, which stay in the first caches
    dp_panel: Any
    dscore: Any  # (n, m) gradient of the score after softcap, if it differs; else the same memory as dp
    lse2: Any  # (m) lse in base 2; +inf in unused lanes and in rows that see nothing, so that P is 0
    rest: Any  # (m) what lse2 leaves out: see split_lse
    delta: Any  # (m)
    head: Any  # (m) and so on: see place_lanes
    query: Any
    low: Any
    high: Any
    terms: Any  # see Terms
    top: Any  # (m) high, in this tile: -1 where a block mask hides it
    span: Any  # (panels, 4) smallest and largest low, smallest and largest high of a panel
    rows: Any  # (panels, 2) rows of the tile on which a panel works: first and last + 1


@device_function
def make_scratch(memory, call, x, wide):
    """Carved out of memory. ``x``: a zero of the type of operands; ``wide``: of the type to compute in."""
    one = arena_array(memory, (0, 0), x)
    m, n = round_up(call.block_m, PANEL), round_up(call.block_n, k_unroll(one))
    words, words_v = row_words(one, call.head_dim), row_words(one, call.head_dim_v)
    dim, dim_v, width = words * packing(one), words_v * packing(one), m // packing(one)
    q, do = arena_array(memory, (m, words + SKEW), x), arena_array(memory, (m, words_v + SKEW), x)
    k, p, ds = (
        arena_array(memory, (n, words + SKEW), x),
        arena_array(memory, (n, width + SKEW), x),
        arena_array(memory, (n, width + SKEW), x),
    )
    v = arena_array(memory, (n, words_v + SKEW), x)
    dp, ds_keys = float_tile(memory, ds, n, m, wide), row_pairs(memory, ds, n, m)
    return Scratch(
        q,
        arena_array(memory, (words, m + SKEW), x),
        row_pairs(memory, q, m, dim),
        do,
        arena_array(memory, (words_v, m + SKEW), x),
        row_pairs(memory, do, m, dim_v),
        k,
        row_pairs(memory, k, n, dim),
        v,
        arena_array(memory, (m, dim + SKEW), wide),
        p,
        ds,
        ds_keys,
        turned(memory, ds_keys),
        float_tile(memory, p, n, m, wide),
        dp,
        arena_array(memory, (n if in_tiles(one) else 0, PANEL), wide),
        arena_array(memory, (n if in_tiles(one) else 0, PANEL), wide),
        arena_array(memory, (n, m + SKEW), wide) if call.softcap > 0 else dp,
        arena_array(memory, m, wide),
        arena_array(memory, m, wide),
        arena_array(memory, m, wide),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, m, np.int32(0)),
        make_terms(memory, n if call.softcap > 0 else 0, m + SKEW, wide),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, (m // PANEL, 4), np.int64(0)),
        arena_array(memory, (m // PANEL, 2), np.int64(0)),
    )


@device_function
def make_sums(memory, call, dk_parts, dv_parts):
    """dK and dV of a key head that has one part."""
    keys, wide = call.max_seqlen_k + KEY_GROUP if call.n_splits == 1 else 0, dk_parts.dtype.type(0)
    return arena_array(memory, (keys, dk_parts.shape[3]), wide), arena_array(
        memory, (keys, dv_parts.shape[3]), wide
    )


@device_function
def clear_rows(w):
    """What lies behind head_dim in a row stays 0."""
    for a in (w.q, w.do, w.k, w.v):
        clear(a, 0, a.shape[0])


@noinline_function
def clear(a, first, last):
    """Whole rows."""
    clear_columns(a, first, last, 0, a.shape[1])


@device_function
def clear_columns(a, first, last, start, stop):
    for j in range(first, last):
        row = a[j]
        for c in range(start, stop):
            row[c] = 0


@inner
def dot_float64(x, y, n):
    total = 0.0
    for d in range(n):
        total += np.float64(load(x, d)) * np.float64(load(y, d))
    return total


@noinline_function
def extremes(x, start, stop):
    least = most = np.int64(x[start])
    for c in range(start + 1, stop):
        least, most = smaller(least, np.int64(x[c])), larger(most, np.int64(x[c]))
    return least, most


@device_function
def load_block(w, call, b, group, block, dout, q, out, lse, sequences, alibi, bias, delta):
    """Lanes, Q, dO, lse and delta of one block of queries.

    Returns (lanes used, first and last key that any of them sees, whether Q and dO are finite, whether ``split_lse``
    is to follow).
    """
    q_start, q_len, k_len = sequences[b, 0], sequences[b, 1], sequences[b, 3]
    n, first, last = place_lanes(call, group, block, q_len, k_len, w.head, w.query, w.low, w.high)
    place_terms(w.terms, call, b, alibi, bias, n, k_len - q_len, w.head, w.query)
    width = round_up(n, PANEL)
    for c in range(width):
        w.top[c] = w.high[c]
    ob, coarse = 0 if call.packed else b, False
    for c in range(n):
        at, h = q_start + w.query[c], w.head[c]
        gradient = read_row(dout, (ob, at, h))
        put_row(w.q[c], read_row(q, (ob, at, h)), call.head_dim)
        put_row(w.do[c], gradient, call.head_dim_v)
        row_lse = np.float64(lse[ob, h, at])
        total = dot_float64(gradient, read_row(out, (ob, at, h)), call.head_dim_v)
        delta[ob, h, at] = total
        w.lse2[c] = np.inf if row_lse == -np.inf else row_lse * LOG2E
        w.delta[c] = total if row_lse != -np.inf else 0.0
        coarse |= is_coarse(w.lse2[c])
    for c in range(width):
        w.rest[c] = 0
    for c in range(n, width):
        clear(w.q, c, c + 1)
        clear(w.do, c, c + 1)
        w.lse2[c] = np.inf
        w.delta[c] = 0
    words, words_v = row_words(w.q, call.head_dim), row_words(w.do, call.head_dim_v)
    transpose(w.qt, 0, w.qt.shape[1], w.q, 0, w.q.shape[1], width, words)
    scale_floats(w.qt, words, width, score_scale(call))
    transpose(w.dot, 0, w.dot.shape[1], w.do, 0, w.do.shape[1], width, words_v)
    pair_rows(w.q_pairs, w.q, width)
    pair_rows(w.do_pairs, w.do, width)
    for i in range(width // PANEL):
        span = w.span[i]
        span[0], span[1] = extremes(w.low, i * PANEL, smaller((i + 1) * PANEL, n))
        span[2], span[3] = extremes(w.high, i * PANEL, smaller((i + 1) * PANEL, n))
    return n, first, last, finite(w.q, n, words) and finite(w.do, n, words_v), coarse


@device_function
def is_coarse(lse):
    return lse + like(lse, RESOLUTION) == lse and abs(lse) != np.inf


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
def load_keys(w, call, b, head_kv, first, n_keys, k, v, sequences):
    """K and V of a tile. True if all is finite."""
    kb, start, rows = 0 if call.packed else b, sequences[b, 2] + first, round_up(n_keys, k_unroll(w.k))
    for j in range(n_keys):
        put_row(w.k[j], read_row(k, (kb, start + j, head_kv)), call.head_dim)
        put_row(w.v[j], read_row(v, (kb, start + j, head_kv)), call.head_dim_v)
    clear(w.k, n_keys, rows)
    clear(w.v, n_keys, rows)
    pair_rows(w.k_pairs, w.k, rows)
    words, words_v = product_words(w.k, call.head_dim), product_words(w.v, call.head_dim_v)
    return finite(w.k, n_keys, words) and finite(w.v, n_keys, words_v)


@device_function
def multiply_scores(w, s, dp, row, n, lane, width, words, words_v):
    """S^T and dP^T in floats, of keys row ... row + n - 1 and ``width`` lanes, into the first columns of s and dp."""
    ld, k, v = s.shape[1], w.k.shape[1], w.v.shape[1]
    at = row * ld
    gemm_rows(s, at, ld, w.k, row * k, k, w.qt, lane, w.qt.shape[1], n, width, words, False)
    gemm_rows(dp, at, ld, w.v, row * v, v, w.dot, lane, w.dot.shape[1], n, width, words_v, False)


@generic
def plain_gradients(w, call, width, first, n_keys):
    """P^T and dS^T of finite numbers without softcap, ALiBi or bias. False for float64: nothing done."""

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
