"""Steps of attention over a cache for one block of keys; decode.py walks over the blocks."""

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.quantized_pages import number, scale_at
from gpu_ops.kernels.attention.cpu.special import finite_or_zero, noted
from gpu_ops.kernels.attention.cpu.tile import cap_row, score_scale
from gpu_ops.kernels.common.cpu.codegen.decode import (
    add_values,
    added_keys,
    score_keys,
    scored_keys,
    weigh_scores,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import UNIT, slot
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.memory import smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.dtype import like, read_row
from gpu_ops.kernels.common.cpu.jit import device_function, generic


class Work(NamedTuple):
    """Scratch of one thread; a tile is ``rows`` (1, 2 or 4) query rows of one KV head."""

    tile: Any  # a tuple of ``rows`` zeros
    heads_kv: int
    ahead: int
    q: Any  # (KV heads * block_m, head_dim filled up)
    o: Any  # (KV heads * block_m, head_dim_v filled up)
    part: Any  # like o, of one block: small terms keep their digits
    special: Any  # (KV heads * block_m, head_dim_v) elements of V that are not finite; valid in a second pass
    s: Any  # (tiles, block_n * rows + lanes): scores, weights; then alpha, the factor for what was summed before
    row_max: Any  # (tiles, lanes): lane c belongs to row c % rows of the tile
    row_sum: Any
    places: Any  # (3 * block_n): addresses of the block's K rows, its V rows, the K rows of the next block
    head: Any  # of each row of the first KV head, like query and low..high, the keys it sees
    query: Any
    low: Any
    high: Any


@device_function
def place_rows(at, x, table, call, b, start, head_kv, first, n):
    """at[j] = address of the row of key first + j; the last one fills the rest of the block."""
    address = np.int64(x.ctypes.data) + head_kv * x.strides[2]
    step = x.strides[1]
    if call.page_size > 0:
        j = 0
        while j < n:
            page, inside = (first + j) // call.page_size, (first + j) % call.page_size
            row = address + table[b, page] * x.strides[0] + inside * step
            run = smaller(n - j, call.page_size - inside)
            for i in range(run):
                at[j + i] = row + i * step
            j += run
    else:
        row = address + (0 if call.packed else b) * x.strides[0] + (start + first) * step
        for j in range(n):
            at[j] = row + j * step
    for j in range(n, len(at)):
        at[j] = at[n - 1]


@device_function
def score_block(w, call, k, padded):
    """s = scale Q K^T for all KV heads, in the order of memory."""
    scale = like(w.s[0, 0], score_scale(call))
    keys, sizes = scored_keys(w.tile, k), (w.heads_kv, call.block_m // len(w.tile))
    later = prefetched(k, w.ahead, len(keys), w.heads_kv)
    for j in range(0, padded, len(keys)):
        at = j * len(w.tile)
        score_keys(w.tile, keys, k, w.places, j, later, sizes, w.q, call.head_dim, w.s, at, scale)


@generic
def scale_block(w, call, x, scales, table, b, first_kv, first, n):
    """Scores or weights of ``n`` keys from ``first`` times the scales of their rows of ``x``, if it is quantized."""
    if x.dtype not in (types.int8, types.uint8):
        return lambda w, call, x, scales, table, b, first_kv, first, n: None
    unit = np.float32(UNIT if x.dtype == types.uint8 else 1)

    def scale(w, call, x, scales, table, b, first_kv, first, n):
        rows = len(w.tile)
        tiles = call.block_m // rows
        j = 0
        while j < n:
            page, inside = table[b, (first + j) // call.page_size], (first + j) % call.page_size
            run = smaller(n - j, call.page_size - inside)
            for t in range(w.heads_kv * tiles):
                row, head = w.s[t], first_kv + t // tiles
                for i in range(run):
                    factor = scales[page, inside + i, head] * unit
                    for r in range((j + i) * rows, (j + i + 1) * rows):
                        row[r] *= factor
            j += run

    return scale


@device_function
def prefetched(x, ahead, keys, heads_kv):
    """Rows that ``score_keys`` prefetches while it reads ``keys`` rows of each KV head: as many ``ahead`` of them, in
    the order of memory where the rows of all heads are contiguous."""
    if x.strides[1] == heads_kv * x.strides[2]:
        return ahead, keys * x.strides[2], x.strides[2]
    return ahead, x.strides[2], x.strides[1]


@device_function
def weigh_block(w, padded):
    """Turn scores into weights and add them to the sums of weights."""
    for t in range(w.s.shape[0]):
        at, count = t * w.s.shape[1], padded * len(w.tile)
        weigh_scores(w.tile, w.s, at, count, w.row_max, w.row_sum, t * w.row_max.shape[1])


@device_function
def sum_values(w, call, v, padded):
    """part = p V for all KV heads, in the order of memory."""
    keys, sizes = added_keys(w.tile, v), (w.heads_kv, call.block_m // len(w.tile))
    later = prefetched(v, w.ahead, len(keys), w.heads_kv)
    w.part[:] = 0
    for j in range(0, padded, len(keys)):
        first, at = call.block_n + j, j * len(w.tile)
        add_values(w.tile, keys, v, w.places, first, later, sizes, w.s, at, w.part, call.head_dim_v)


@device_function
def add_block(w, padded):
    """O = O * alpha + part."""
    rows = len(w.tile)
    for row in range(w.o.shape[0]):
        alpha, total, part = w.s[row // rows, padded * rows + row % rows], w.o[row], w.part[row]
        for i in range(len(total)):
            total[i] = total[i] * alpha + part[i]


@device_function
def finish_scores(w, call, alibi, b, first, n_keys, n, offset):
    """Apply the options of scores except bias; leaves scores in base 2."""
    rows = len(w.tile)
    tiles = call.block_m // rows
    for t in range(w.heads_kv * tiles):
        row = w.s[t]
        cap_row(row, call, n_keys * rows)
        if call.has_alibi:
            first_row = t % tiles * rows
            for r in range(first_row, smaller(first_row + rows, n)):
                slope = alibi[b, w.head[r] + t // tiles * call.heads] * LOG2E
                position = w.query[r] + offset + call.ahead - first
                for j in range(n_keys):
                    row[j * rows + r - first_row] -= like(row[0], slope * abs(position - j))


@device_function
def mask_scores(w, call, first, n_keys, padded, n):
    """Set scores to -inf where a row does not see a key."""
    rows = len(w.tile)
    tiles = call.block_m // rows
    for t in range(w.s.shape[0]):
        row = w.s[t]
        first_row = t % tiles * rows
        for r in range(first_row, smaller(first_row + rows, n)):
            low, high = w.low[r] - first, w.high[r] - first
            for j in range(n_keys):
                if j < low or j > high:
                    row[j * rows + r - first_row] = -np.inf
        row[n_keys * rows : padded * rows] = -np.inf


@device_function
def place_of(call, x, b, k_start, kv, key):
    """Index of the row of ``key`` in V."""
    if call.page_size > 0:
        return np.int64(x.table[b, key // call.page_size]), key % call.page_size, kv
    return np.int64(0 if call.packed else b), k_start + key, kv


@device_function
def note_special(w, call, x, b, k_start, first_kv, first, n_keys, n):
    """Note elements of V that are not finite for the rows whose scores are not -inf."""
    rows = len(w.tile)
    tiles = call.block_m // rows
    for kv in range(w.heads_kv):
        for j in range(n_keys):
            place = place_of(call, x, b, k_start, first_kv + kv, first + j)
            source, scale = read_row(x.v, place), scale_at(x.v_scale, x.v, *place)
            for d in range(call.head_dim_v):
                value = number(source, d) * scale
                if value - value != 0:
                    for r in range(n):
                        if w.s[kv * tiles + r // rows, j * rows + r % rows] != -np.inf:
                            bits = w.special[kv * call.block_m + r]
                            bits[d] = noted(bits[d], value)


@device_function
def values_careful(w, call, x, b, k_start, first_kv, first, n_keys, n):
    """part = p V without elements of V that are not finite."""
    rows = len(w.tile)
    tiles = call.block_m // rows
    w.part[:] = 0
    for kv in range(w.heads_kv):
        for j in range(n_keys):
            place = place_of(call, x, b, k_start, first_kv + kv, first + j)
            source, scale = read_row(x.v, place), scale_at(x.v_scale, x.v, *place)
            for r in range(n):
                weight = w.s[kv * tiles + r // rows, j * rows + r % rows]
                total = w.part[kv * call.block_m + r]
                for d in range(call.head_dim_v):
                    total[slot(x.v, d)] += weight * finite_or_zero(number(source, d) * scale)
