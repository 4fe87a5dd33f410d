"""Packing of Q, K and V for the matrix products of attention, and of O back into rows.

    qt  [panel, d, lane]   queries in the lanes, panels of NR = 2 vectors of them     q.k:  d steps
    kt  [key, d]           rows
    vt  [key, d]           rows                                                       p.v:  key steps
    ot  [panel, d, lane]   accumulates O^T

Elements are widened, except where the CPU multiplies bfloat16 (``target.DOT_BFLOAT16``): two steps of a product are
then one uint32, the pair of bfloat16 that ``codegen.gemm`` takes. Functions tell the two apart by the array's dtype.

Every tile of K and V is copied, so that one path serves pages, any strides and every dtype: in-place reads of V
would place 8 of its columns in one set of the L1 cache. Quantized rows become float32 in the copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpu_ops.kernels.attention.cpu.quantized_pages import put_scaled, scale_at
from gpu_ops.kernels.common.cpu.codegen.arena import arena_array, as_type
from gpu_ops.kernels.common.cpu.codegen.gemm import (
    copy_transposed,
    copy_transposed_scaled,
    in_tiles,
    takes_tiles,
)
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, copy_row, lanes, round_up, smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.codegen.softmax import ROWS
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE
from gpu_ops.kernels.common.cpu.dtype import float32_of_bfloat16, load, read_row
from gpu_ops.kernels.common.cpu.jit import constant, device_function, generic, noinline_function
from gpu_ops.kernels.common.cpu.packing import steps


class Keys(NamedTuple):
    """Keys of one task: K and V of batch entry ``b`` and head ``head``, from row ``start`` on."""

    k: Any
    v: Any
    k_scale: Any  # of quantized pages, like v_scale
    v_scale: Any
    table: Any  # of pages
    b: int
    start: int
    head: int


@constant
def is_pairs(packed):
    """Whether array ``packed`` holds pairs of bfloat16."""
    return packed.dtype == types.uint32


@generic
def operand(x, wide):
    """Zero of the operand type of the products of array ``x``, computed in the type of ``wide``."""
    if x.dtype == types.uint16 and DOT_BFLOAT16:
        return lambda x, wide: np.uint32(0)
    return lambda x, wide: wide


@generic(refcount=True)
def weights(packed, s):
    """Array in which the softmax leaves the weights of the scores ``s``: the same memory."""
    if packed.dtype == types.uint32:
        return lambda packed, s: as_type(s, np.uint32(0))
    return lambda packed, s: s


@generic
def element(x, step, column):
    """Widened element ``step`` of a product, in an operand whose first axis counts the steps."""

    def of_pair(x, step, column):
        word = x[step // 2, column]
        return float32_of_bfloat16(word >> np.uint32(16 * (step % 2)) & np.uint32(0xFFFF))

    return of_pair if x.dtype == types.uint32 else (lambda x, step, column: x[step, column])


@generic
def put_scaled_row(to, row, dim, scale):
    """Write ``row`` times its scale, which is 1 unless the row is quantized."""
    if row.dtype in (types.int8, types.uint8):
        return lambda to, row, dim, scale: put_scaled(to, row, dim, scale)
    return lambda to, row, dim, scale: put_row(to, row, dim)


@generic
def put_row(to, row, dim):
    """Write ``dim`` elements of ``row`` along the steps. An odd number of bfloat16 is followed by a zero."""
    if to.dtype == row.dtype:
        return lambda to, row, dim: copy_row(to, row, dim)

    def widen(to, row, dim):
        for d in range(dim):
            to[d] = load(row, d)

    def pairs(to, row, dim):
        if dim % 2 == 1:
            to[dim // 2] = 0
        copy_row(to, row, dim)

    return pairs if to.dtype == types.uint32 else widen


@generic
def put_values(to, j, row, dim, scale):
    """Write row j of V; where operands are pairs, an odd row is paired with the row before."""

    def pairs(to, j, row, dim, scale):
        words = to[j // 2]
        if j % 2 == 0:
            for d in range(dim):
                words[d] = row[d]
        else:
            for d in range(dim):
                words[d] |= np.uint32(row[d]) << np.uint32(16)

    if to.dtype == types.uint32:
        return pairs
    return lambda to, j, row, dim, scale: put_scaled_row(to[j], row, dim, scale)


@generic
def transpose_queries(qt, at, nr, rows, d, factor):
    """Transpose a square of ``rows`` from column ``d``, times ``factor`` (pairs: its sign), to ``qt[at]``."""

    def pairs(qt, at, nr, rows, d, factor):
        if factor[0] < 0:
            for row in rows:
                for k in range(d, d + rows.shape[0]):
                    row[k] ^= np.uint32(0x80008000)
        copy_transposed(qt, at, nr, rows, d, rows.shape[1])

    def floats(qt, at, nr, rows, d, factor):
        copy_transposed_scaled(qt, at, nr, rows, d, rows.shape[1], factor, 0)

    return pairs if rows.dtype == types.uint32 else floats


@generic(refcount=True)
def turned(memory, a):
    """Memory for the transpose of operand ``a`` where tile registers multiply (their left operand is in rows); else
    ``a`` itself."""

    def room(memory, a):
        steps, columns = a.shape
        return arena_array(memory, (columns, round_up(steps, TILE) + SKEW), np.uint32(0))

    return room if takes_tiles(a) else lambda memory, a: a


@device_function
def k_unroll(a):
    """Keys per step of a product of operands like ``a``: a tile of pairs, or the softmax's unrolled rows."""
    return 2 * TILE if in_tiles(a) else ROWS


@device_function
def transpose(to, to0, ldt, source, source0, lds, m, n):
    """to[j, i] = source[i, j] for m rows of n words, both whole vectors, from offsets to0 and source0."""
    step = lanes(source)
    for i in range(0, m, step):
        for j in range(0, n, step):
            copy_transposed(to, to0 + j * ldt + i, ldt, source, source0 + i * lds + j, lds)


@generic
def transpose_v(vd, vt, n):
    """vd = V^T of ``n`` keys, zero up to a whole tile, where tile registers multiply: they take rows of V^T."""

    def turn(vd, vt, n):
        full = round_up(steps(vt, n), TILE)
        for j in range(steps(vt, n), full):
            vt[j] = 0
        transpose(vd, 0, vd.shape[1], vt, 0, vt.shape[1], full, vt.shape[1])

    return turn if takes_tiles(vt) else lambda vd, vt, n: None


@generic
def finite(a, m, n):
    """Whether the first ``n`` words of each of the first ``m`` rows of an operand are finite."""
    # an exponent of ones carries into the bit above it
    if a.dtype == types.float64:
        word, ones, unit, above = np.uint64, 0x7FF << 52, 1 << 52, 1 << 63
    elif a.dtype == types.float32:
        word, ones, unit, above = np.uint32, 0x7F800000, 0x00800000, 0x80000000
    else:
        word, ones, unit, above = np.uint32, 0x7F807F80, 0x00800080, 0x80008000
    ones, unit, above = word(ones), word(unit), word(above)

    def check(a, m, n):
        words, carry = as_type(a, word(0)), word(0)
        for i in range(m):
            row = words[i]
            for d in range(n):
                carry = word(carry | word(word(row[d] & ones) + unit))
        return carry & above == 0

    return check


@noinline_function
def key_run(keys, call, key, n):
    """Batch entry (or page) and row of ``key``, and the number of the ``n`` rows that are contiguous from there."""
    if call.page_size > 0:
        row = key % call.page_size
        return np.int64(keys.table[keys.b, key // call.page_size]), row, smaller(n, call.page_size - row)
    return 0 if call.packed else keys.b, keys.start + key, n


@noinline_function
def pack_queries(qt, rows, q, call, b, q_start, n, head, query, factor):
    """Fill the panels of ``n`` lanes with Q times the vector ``factor``; lanes without a query are zero. ``rows`` is
    scratch for a vector of rows."""
    width, depth = rows.shape[0], rows.shape[1]
    nr = qt.shape[1]
    kb = 0 if call.packed else b
    for c in range(0, n, width):
        for i in range(c, smaller(c + width, n)):
            put_row(rows[i - c], read_row(q, (kb, q_start + query[i], head[i])), call.head_dim)
        rows[smaller(n - c, width) :] = 0
        at = c // nr * depth * nr + c % nr
        for d in range(0, depth, width):
            transpose_queries(qt, at + d * nr, nr, rows, d, factor)


@noinline_function
def pack_keys(kt, keys, call, first, n):
    """Pack rows first..first + n - 1 of K."""
    j = 0
    while j < n:
        entry, row, run = key_run(keys, call, first + j, n - j)
        for i in range(run):
            scale = scale_at(keys.k_scale, keys.k, entry, row + i, keys.head)
            put_scaled_row(kt[j + i], read_row(keys.k, (entry, row + i, keys.head)), call.head_dim, scale)
        j += run


@noinline_function
def pack_values(vt, keys, call, first, n):
    """Pack values of V. Returns whether all are finite."""
    j = 0
    while j < n:
        entry, row, run = key_run(keys, call, first + j, n - j)
        for i in range(run):
            scale = scale_at(keys.v_scale, keys.v, entry, row + i, keys.head)
            put_values(vt, j + i, read_row(keys.v, (entry, row + i, keys.head)), call.head_dim_v, scale)
        j += run
    return finite(vt, steps(vt, n), vt.shape[1])
