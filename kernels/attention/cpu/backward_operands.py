"""Operands of attention backward's products, in floats or in pairs of bfloat16, and their loading by a thread.

A product sums along one axis of its operands. Where the CPU multiplies bfloat16, a 32-bit word holds two neighbours
along that axis. With elements ``a``, ``b``, ..., one row per query or key:

    rows            transposed      row pairs (for sums over rows)
    [ab] [cd]       [ab] [ef]       [ae] [bf] [cg] [dh]
    [ef] [gh]       [cd] [gh]

Tile registers (codegen/tiles.py) multiply whole tiles of keys, and take the row pairs of dS transposed. A float is a
separate word: rows and row pairs are then the same array.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.backward_ir import PANEL
from gpu_ops.kernels.attention.cpu.operands import finite, k_unroll, put_row, transpose, turned
from gpu_ops.kernels.attention.cpu.tile import (
    is_linear,
    make_terms,
    place_lanes,
    place_terms,
    score_scale,
)
from gpu_ops.kernels.common.cpu.codegen.arena import arena_array, as_type
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import in_tiles
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, larger, round_up, smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE
from gpu_ops.kernels.common.cpu.dtype import bfloat16_of_float32, like, read_row
from gpu_ops.kernels.common.cpu.jit import constant, device_function, exact, generic, noinline_function

LOG2E_HIGH, LOG2E_LOW = (
    1.4426950514316559,
    -1.0542692496784412e-08,
)  # halves of its digits; their sum is LOG2E

# The inputs of a backward call, as backward.py describes them, with lse and delta in float64 and of rows
# with a large lse what split_lse says.
Arrays = namedtuple(
    "Arrays", "dout q k v lse sequences alibi sinks bias visible seed delta split_from coarse_from"
)


class Scratch(NamedTuple):
    """Scratch of one thread; m = block_m lanes, n = block_n keys. See the module for operands."""

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
    dscore: Any  # (n, m) gradient of the finished score, if it differs; else the same memory as dp
    lse2: Any  # (m) lse in base 2; +inf in unused lanes and in rows that see nothing, so that P is 0
    rest: Any  # (m) rounding error of lse2: see split_lse. P is divided by 1 - dropout_p, which is included here
    delta: Any  # (m) times 1 - dropout_p
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
    """Scratch from an arena. ``x``: a zero of the operands' type; ``wide``: a zero of the computing type."""
    sample = arena_array(memory, (0, 0), x)
    m, n = round_up(call.block_m, PANEL), round_up(call.block_n, k_unroll(sample))
    words, words_v = row_words(sample, call.head_dim), row_words(sample, call.head_dim_v)
    dim, dim_v, width = words * packing(sample), words_v * packing(sample), m // packing(sample)
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
        arena_array(memory, (n if in_tiles(sample) else 0, PANEL), wide),
        arena_array(memory, (n if in_tiles(sample) else 0, PANEL), wide),
        arena_array(memory, (n, m + SKEW), wide) if not is_linear(call) else dp,
        arena_array(memory, m, wide),
        arena_array(memory, m, wide),
        arena_array(memory, m, wide),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int64(0)),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, m, np.int32(0)),
        make_terms(memory, n if not is_linear(call) else 0, m + SKEW, wide),
        arena_array(memory, m, np.int32(0)),
        arena_array(memory, (m // PANEL, 4), np.int64(0)),
        arena_array(memory, (m // PANEL, 2), np.int64(0)),
    )


def _pairs(a):
    return a.dtype == types.uint32


@constant
def packing(a):
    """Elements in a word of operand ``a``."""
    return 2 if _pairs(a) else 1


@generic
def scale_floats(a, m, n, factor):
    """a *= factor; pairs of bfloat16 are unchanged."""

    def scale(a, m, n, factor):
        x = like(a[0, 0], factor)
        for i in range(m):
            row = a[i]
            for j in range(n):
                row[j] *= x

    return (lambda a, m, n, factor: None) if _pairs(a) else scale


@generic
def unscaled(a, factor):
    """The part of ``factor`` that :func:`scale_floats` has not applied to products of operands like ``a``."""
    return (lambda a, factor: factor) if _pairs(a) else (lambda a, factor: 1.0)


@generic(refcount=True)
def row_pairs(memory, rows, m, n):
    """Memory for the row pairs of ``rows``, m rows of n words."""
    if _pairs(rows):
        return lambda memory, rows, m, n: arena_array(memory, (m // 2, n + SKEW), np.uint32(0))
    return lambda memory, rows, m, n: rows


@generic(refcount=True)
def float_tile(memory, a, m, n, wide):
    """``a`` itself if it holds floats, otherwise an array of floats (m, n)."""
    if _pairs(a):
        return lambda memory, a, m, n, wide: arena_array(memory, (m, n + SKEW), wide)
    return lambda memory, a, m, n, wide: a


@noinline_function
def _interleave(pairs, rows, n):
    zero = np.uint16(0)
    for i in range(n // 2):
        low, high, words = as_type(rows[2 * i], zero), as_type(rows[2 * i + 1], zero), pairs[i]
        for d in range(smaller(len(low), len(words))):
            words[d] = np.uint32(low[d]) | np.uint32(high[d]) << np.uint32(16)


@generic
def pair_rows(pairs, rows, n):
    """Fill the row pairs of the first n rows (an even number)."""
    return (
        (lambda pairs, rows, n: _interleave(pairs, rows, n)) if _pairs(rows) else lambda pairs, rows, n: None
    )


@noinline_function
def _narrow(target, source, rows, width):
    for j in range(rows):
        row, words = source[j], as_type(target[j], np.uint16(0))
        for c in range(width):
            words[c] = bfloat16_of_float32(row[c])


@generic
def pair_tile(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring queries."""
    return (
        (lambda target, source, rows, width: _narrow(target, source, rows, width))
        if _pairs(target)
        else lambda target, source, rows, width: None
    )


@generic
def pair_tile_keys(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring keys."""

    def narrow(target, source, rows, width):
        for i in range(rows // 2):
            low, high, words = source[2 * i], source[2 * i + 1], target[i]
            for c in range(width):
                first, second = bfloat16_of_float32(low[c]), bfloat16_of_float32(high[c])
                words[c] = np.uint32(first) | np.uint32(second) << np.uint32(16)

    return narrow if _pairs(target) else lambda target, source, rows, width: None


@device_function
def product_words(a, dim):
    """Words of a row of ``dim`` elements that a product takes; later words are zero."""
    words = (dim + packing(a) - 1) // packing(a)
    return round_up(words, TILE) if in_tiles(a) else words


@device_function
def row_words(a, dim):
    """Words of a row of ``dim`` elements: whole vectors, so that it can be transposed."""
    return round_up((dim + packing(a) - 1) // packing(a), lanes(a))


@device_function
def clear_rows(w):
    """Clear the operands: elements past head_dim stay 0."""
    for a in (w.q, w.do, w.k, w.v):
        clear(a, 0, a.shape[0])


@noinline_function
def clear(a, first, last):
    """Set rows first..last - 1 of ``a`` to 0."""
    clear_columns(a, first, last, 0, a.shape[1])


@device_function
def clear_columns(a, first, last, start, stop):
    for j in range(first, last):
        row = a[j]
        for c in range(start, stop):
            row[c] = 0


@noinline_function
def extremes(x, start, stop):
    least = greatest = np.int64(x[start])
    for c in range(start + 1, stop):
        least, greatest = smaller(least, np.int64(x[c])), larger(greatest, np.int64(x[c]))
    return least, greatest


@device_function
def load_block(w, call, x, b, group, block):
    """Load lanes, Q, dO, lse and delta of one block of queries.

    Returns (lanes used, first and last key that any of them sees, whether Q and dO are finite, whether ``split_lse``
    is to follow).
    """
    q_start, q_len, k_len = x.sequences[b, 0], x.sequences[b, 1], x.sequences[b, 3]
    n, first, last = place_lanes(call, group, block, q_len, k_len, w.head, w.query, w.low, w.high)
    place_terms(w.terms, call, b, x.alibi, x.bias, n, k_len - q_len, w.head, w.query)
    width = round_up(n, PANEL)
    for c in range(width):
        w.top[c] = w.high[c]
    ob, split = 0 if call.packed else b, False
    for c in range(n):
        at, h = q_start + w.query[c], w.head[c]
        put_row(w.q[c], read_row(x.q, (ob, at, h)), call.head_dim)
        put_row(w.do[c], read_row(x.dout, (ob, at, h)), call.head_dim_v)
        row_lse = x.lse[ob, h, at]
        w.lse2[c] = np.inf if row_lse == -np.inf else row_lse * LOG2E
        w.delta[c] = x.delta[ob, h, at] * (1.0 - call.dropout_p) if row_lse != -np.inf else 0.0
        split |= is_large(row_lse, x.split_from)
    for c in range(width):
        w.rest[c] = kept_log2(call)
    if w.lse2.itemsize == 8:
        for c in range(n):
            w.rest[c] += rest_in_base_2(x.lse[ob, w.head[c], q_start + w.query[c]])
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
    return n, first, last, finite(w.q, n, words) and finite(w.do, n, words_v), split


@device_function
def kept_log2(call):
    return np.log2(1.0 - call.dropout_p)


@exact
def rest_in_base_2(lse):
    """Rounding error of lse * LOG2E (Dekker, 1971). Without it a weight would be wrong by the same factor."""
    if not abs(lse) < 1e100:
        return 0.0
    high = np.float64(lse) * 134217729.0  # 2^27 + 1
    high -= high - lse
    low = lse - high
    error = high * LOG2E_HIGH - lse * LOG2E
    return error + high * LOG2E_LOW + low * LOG2E_HIGH + low * LOG2E_LOW


@device_function
def is_large(lse, least):
    return least <= abs(lse) < np.inf


@device_function
def load_keys(w, call, x, b, head_kv, first, n_keys):
    """Load K and V of a tile. Returns whether all are finite."""
    kb, start, rows = 0 if call.packed else b, x.sequences[b, 2] + first, round_up(n_keys, k_unroll(w.k))
    for j in range(n_keys):
        put_row(w.k[j], read_row(x.k, (kb, start + j, head_kv)), call.head_dim)
        put_row(w.v[j], read_row(x.v, (kb, start + j, head_kv)), call.head_dim_v)
    clear(w.k, n_keys, rows)
    clear(w.v, n_keys, rows)
    pair_rows(w.k_pairs, w.k, rows)
    words, words_v = product_words(w.k, call.head_dim), product_words(w.v, call.head_dim_v)
    return finite(w.k, n_keys, words) and finite(w.v, n_keys, words_v)
