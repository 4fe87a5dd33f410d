"""The steps of attention over a cache for one block of keys; attention_decode.py walks over the blocks."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.attention_tile import LOG2E, TINY
from gpu_ops.kernels.numba_cpu.dtype import like, load, read_row
from gpu_ops.kernels.numba_cpu.fastmath import exp2, tanh
from gpu_ops.kernels.numba_cpu.ir.decode import (
    MANY,
    add_values,
    add_weights,
    chunks_in_registers,
    score_keys,
    subtract_max,
)
from gpu_ops.kernels.numba_cpu.ir.decode_rows import chunk_elements, slot
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES

inner = njit(
    no_cpython_wrapper=True, no_cfunc_wrapper=True
)  # called by compiled code only: half a second less


class Work(NamedTuple):
    """Scratch arrays of one thread."""

    q: Any  # (KV heads * block_m, head_dim filled up), scaled
    o: Any  # (KV heads * block_m, head_dim_v filled up)
    s: Any  # (tiles of a KV head, block_n * rows of a tile + lanes): scores, weights; then alpha
    row_max: Any  # (tiles of all KV heads, lanes): lane c belongs to row c % rows of the tile
    row_sum: Any
    keys: Any  # addresses of the block's K rows
    values: Any
    head: Any  # of each row of the first KV head, like query and low..high, the keys it sees
    query: Any
    low: Any
    high: Any


@inner
def place_rows(at, x, table, call, b, start, head_kv, first, n):
    """at[j] = address of the row of key first + j; the last one fills the rest of the block."""
    address = np.int64(x.ctypes.data) + head_kv * x.strides[2]
    step = x.strides[1]
    if call.page_size > 0:
        j = 0
        while j < n:
            page, inside = (first + j) // call.page_size, (first + j) % call.page_size
            row = address + table[b, page] * x.strides[0] + inside * step
            run = min(n - j, call.page_size - inside)
            for i in range(run):
                at[j + i] = row + i * step
            j += run
    else:
        row = address + (0 if call.packed else b) * x.strides[0] + (start + first) * step
        for j in range(n):
            at[j] = row + j * step
    for j in range(n, len(at)):
        at[j] = at[n - 1]


@inner
def score_block(w, tile, k, v, call, padded, kv):
    """s = Q K^T for all tiles; V rows of these keys are asked for."""
    rows, width = len(tile), w.row_max.shape[1]
    limit = call.head_dim_v * v.itemsize
    stride, s_stride = w.q.shape[1], w.s.shape[1]
    here, ahead = kv * k.strides[2], kv * v.strides[2]
    for j in range(0, padded, width // rows):
        for t in range(w.s.shape[0]):
            q_at, s_at = (kv * call.block_m + t * rows) * stride, t * s_stride + j * rows
            if t == 0:
                fetch = w.values
            else:  # these K rows are in the cache now: asking for them again is free
                fetch, ahead = w.keys, here
            score_keys(
                tile, k, w.keys, here, fetch, ahead, j, limit, w.q, q_at, stride, call.head_dim, w.s, s_at
            )
        ahead = kv * v.strides[2]


@inner
def weigh_tile(w, tile, t, padded, at):
    """Scores of tile t become weights; behind them alpha, the factor for what was summed before."""
    n, width, s_stride = padded * len(tile), w.row_max.shape[1], w.s.shape[1]
    subtract_max(tile, w.s, t * s_stride, n, w.row_max, at * width)
    row = w.s[t]
    for i in range(n + width):
        row[i] = exp2(row[i])
    add_weights(w.s, t * s_stride, n, w.row_sum, at * width)


@inner
def sum_values(w, tile, k, v, call, n, padded, kv, next_kv):
    """O = O * alpha + p V for all tiles; the K rows that come next are asked for."""
    rows, elements = len(tile), chunk_elements(v)
    limit = call.head_dim * k.itemsize
    stride, s_stride = w.o.shape[1], w.s.shape[1]
    full, rest = call.head_dim_v // elements, call.head_dim_v % elements
    many = chunks_in_registers(tile, v)
    here, ahead, fetch = kv * v.strides[2], next_kv * k.strides[2], w.keys
    for t in range(w.s.shape[0]):
        p, alpha = t * s_stride, t * s_stride + padded * rows
        o = (kv * call.block_m + t * rows) * stride
        c = 0
        while c + many <= full:
            byte, column = c * VECTOR_BYTES, o + c * elements
            add_values(
                tile,
                MANY,
                v,
                w.values,
                here,
                fetch,
                ahead,
                n,
                limit,
                byte,
                rest,
                w.s,
                p,
                alpha,
                w.o,
                column,
                stride,
            )
            c += many
        while c < full:
            byte, column = c * VECTOR_BYTES, o + c * elements
            add_values(
                tile,
                1,
                v,
                w.values,
                here,
                fetch,
                ahead,
                n,
                limit,
                byte,
                rest,
                w.s,
                p,
                alpha,
                w.o,
                column,
                stride,
            )
            c += 1
        if rest > 0:
            byte, column = c * VECTOR_BYTES, o + c * elements
            add_values(
                tile,
                0,
                v,
                w.values,
                here,
                fetch,
                ahead,
                n,
                limit,
                byte,
                rest,
                w.s,
                p,
                alpha,
                w.o,
                column,
                stride,
            )
        fetch, ahead = w.values, here  # enough asked for


@inner
def finish_scores(w, call, rows, b, kv, first, n_keys, n, offset, alibi):
    """softcap and ALiBi on scores in natural units; leaves them in base 2."""
    for t in range(w.s.shape[0]):
        row = w.s[t]
        if call.softcap > 0:
            cap, inverse = like(row[0], call.softcap), like(row[0], 1.0 / call.softcap)
            for i in range(n_keys * rows):
                row[i] = cap * tanh(row[i] * inverse)
        if call.has_alibi:
            for r in range(min(rows, n - t * rows)):
                slope = alibi[b, w.head[t * rows + r] + kv * call.heads]
                position = w.query[t * rows + r] + offset - first
                for j in range(n_keys):
                    row[j * rows + r] -= like(row[0], slope * abs(position - j))
        for i in range(n_keys * rows):
            row[i] *= like(row[0], LOG2E)


@inner
def mask_scores(w, rows, first, n_keys, padded, n):
    """-inf where a row does not see a key."""
    for t in range(w.s.shape[0]):
        row = w.s[t]
        for r in range(min(rows, n - t * rows)):
            low, high = w.low[t * rows + r] - first, w.high[t * rows + r] - first
            for j in range(n_keys):
                if j < low or j > high:
                    row[j * rows + r] = -np.inf
        row[n_keys * rows : padded * rows] = -np.inf


@inner
def values_careful(w, v, call, table, rows, b, k_start, first_kv, kv, first, n_keys, padded, n):
    """O = O * alpha + p V over visible keys only, none with weight 0, so that what is not finite in V shows."""
    for r in range(n):
        t, lane = r // rows, r % rows
        total = w.o[kv * call.block_m + r]
        for i in range(len(total)):
            total[i] *= w.s[t, padded * rows + lane]
        for j in range(max(w.low[r] - first, 0), min(w.high[r] - first + 1, n_keys)):
            key = first + j
            if call.page_size > 0:
                source = read_row(v, (table[b, key // call.page_size], key % call.page_size, first_kv + kv))
            else:
                source = read_row(v, (0 if call.packed else b, k_start + key, first_kv + kv))
            weight = w.s[t, j * rows + lane]
            weight = like(weight, TINY) if weight < like(weight, TINY) else weight
            for d in range(call.head_dim_v):
                total[slot(v, d)] += weight * load(source, d)
