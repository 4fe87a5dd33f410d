"""Matrix products on the CPU: ``C (+)= op(A) op(B)`` on the micro-kernels of codegen/gemm.py, for every dtype.

A task is one tile of C, which stays in the L2 cache as float32 (float64 for float64) while it adds up over
blocks of K:

                        columns: panels of NR                 per block of K:
                      +-------+-------+----                     A  rows x block, packed by the task, in L1 and L2
        block of B    | panel | panel |                         B  panels that all tasks share (packing.py), in L2
                      +-------+-------+----                     the next A is prefetched meanwhile: a line every
    rows x block      |   C   |   C   |                            few steps, in the micro-kernel's loop
    of A              +-------+-------+----                   at the end C is rounded once and stored

The vector lanes run along the columns of C. For ``x @ w.T``, A is w, read once per 512 tokens: its rows are copied,
widened or interleaved, never transposed, or multiplied in place (``_widest_in_place``). B is x.T, small and
packed once; C is stored transposed.
A packed row is SKEW longer than its block: rows a power of two of bytes apart would share a few sets of the caches.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.arena import as_type
from gpu_ops.kernels.common.cpu.codegen.gemm import (
    ROUND,
    columns_1,
    columns_2,
    copy_transposed,
    gemm_rows,
    rows_1,
    rows_2,
    takes_tiles,
)
from gpu_ops.kernels.common.cpu.codegen.memory import (
    LINE_BYTES,
    SKEW,
    lanes,
    round_up,
    row_address,
    scratch,
    smaller,
    span,
)
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR, VECTOR_BYTES, XEON
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, close_tiles, later, multiply_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import bits, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.packing import (
    IN_PLACE,
    SUM_STEPS,
    Panels,
    elements,
    in_registers,
    pack,
    pack_a,
    packed,
    panel_shape,
    room_a,
    room_shape,
    steps,
)
from gpu_ops.kernels.common.cpu.parallel import TASKS_PER_THREAD, claim, launch, most_threads, thread_count

Array = np.ndarray[Any, Any]
# of a tile: C 256 KiB, A 128 KiB and B 512 KiB of 4 bytes; half and double are as fast. In tile registers C 512 KiB,
# and A is packed once for 1024 tokens (7 % less time)
ROWS, COLUMNS, COLUMNS_OF_TILES = 128, 512, 1024
# of tile registers: rows and steps of A; 16 KiB, as a panel of B, both in L1 (256 steps: 5 % slower)
BAND, DEPTH = 32, 128


def matmul(
    a: Array,
    b: Array | Panels,
    out: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    trans_out: bool = False,
    total: Array | None = None,
    first: bool = True,
    last: bool = True,
    addends: Sequence[Array | None] = (None, None),
) -> None:
    """``out = op(a) @ op(b)``, where op transposes if requested; ``trans_out`` stores the transposed product.

    A sum of products takes several calls with the same ``total``, an array like ``out`` in the type in which
    products add up (``out`` itself by default, if it is of that type): each but the first adds to it, and the last
    writes the sum, rounded once, to ``out`` instead. It adds ``addends`` before: an array like ``out``, and one row.
    """
    if not isinstance(b, Panels):
        b = pack(b, packed(a.dtype.name, b.dtype.name), trans=trans_b)
    element = b.array.dtype.name
    sum_dtype = np.dtype(np.float64 if element == "float64" else np.float32)
    if total is None:
        total = out if out.dtype == sum_dtype else np.empty((0, 0), sum_dtype)
    m = out.shape[1] if trans_out else out.shape[0]
    absent = np.empty((0, 0), out.dtype)
    rows, columns = tile_shape(m, b.n, element)
    n_tasks = -(-m // rows) * -(-b.n // columns) if m and b.n else 0
    launch(
        gemm[a.dtype, element, out.dtype],
        n_tasks,
        (rows, columns),
        (m, b.n, b.depth),
        bits(a),
        trans_a,
        b.array,
        b.blocks,
        bits(out),
        trans_out,
        total,
        tuple(bits(absent if x is None else x) for x in addends),
        not first,
        last,
    )


def tile_shape(m: int, n: int, kind: str) -> tuple[int, int]:
    """Rows and columns of a tile, about ROWS x COLUMNS: even sizes, and tiles for all threads down to 32 rows."""
    columns = _even(n, COLUMNS_OF_TILES if in_registers(kind) else COLUMNS, 64)
    rows = ROWS if n > 64 else 32  # long blocks of K: A stays in L2 (16 tokens: 14 ms against 17)
    while rows > 32 and -(-m // rows) * -(-n // columns) < TASKS_PER_THREAD * thread_count():
        rows //= 2
    return _even(m, rows, BAND if in_registers(kind) else MR), columns


def _even(length: int, most: int, step: int) -> int:
    """Equal parts of ``length``, at most ``most`` (rounded up to ``step``) each."""
    parts = max(1, -(-length // most))
    return max(step, -(-length // (parts * step)) * step)


@device_function
def tile_size(index, tile, length):
    """Start and size of tile ``index``."""
    start = index * tile
    return start, max(0, min(tile, length - start))


# rows x columns of an array to prefetch, from (r0, c0)
Region = namedtuple("Region", "array r0 rows c0 columns")


@device_function(refcount=True)
def region(a, packed, trans, m0, m, k0, k):
    """Region of m rows from m0 and k steps from k0 of op(a)."""
    if trans:
        return Region(a, elements(packed, k0), elements(packed, k), m0, m)
    return Region(a, m0, m, elements(packed, k0), elements(packed, k))


@device_function
def place(ahead, at, advance):
    """Argument ``ahead`` of ``build.prefetcher``: from ``at`` bytes into the region, ``advance`` bytes each time."""
    length, stride = max(1, ahead.columns * ahead.array.itemsize), ahead.array.strides[0]
    start = row_address(ahead.array, ahead.r0, ahead.c0)
    return start + at // length * stride, at % length, advance, length, stride


def _multiply(wide: Any, narrow: Any, columns_form: bool) -> Any:
    @device_function
    def multiply(c, a, a0, lda, panels, first, m, n, k, accumulate, ahead):
        """C (+)= A B; meanwhile prefetches the region ``ahead``."""
        ldc, nr = c.shape[1], 2 * lanes(c)
        next_a, step_a = (MR, lda) if columns_form else (MR * lda, 1)
        down, across = (m + MR - 1) // MR, (n + nr - 1) // nr
        pieces = down * across * ((k + SUM_STEPS - 1) // SUM_STEPS)
        share = ahead.rows * ahead.columns * ahead.array.itemsize // max(1, pieces)  # bytes per piece
        advance, at = (share > 0) * (ROUND * share // max(1, min(k, SUM_STEPS)) + 1), 0
        for tile in range(down * across):
            # a Xeon's first cache keeps a panel of B (5 % less time), Zen's rows of A
            i, j = (tile % down, tile // down) if XEON else (tile // across, tile % across)
            panel = write_row(panels, (first + j,))
            for kk in range(0, max(1, k), SUM_STEPS):
                at_c, at_a = i * MR * ldc + j * nr, a0 + i * next_a + kk * step_a
                steps, add = min(SUM_STEPS, k - kk), accumulate | (kk > 0)
                coming = place(ahead, at, advance)
                if n - j * nr > nr // 2:
                    wide(c, at_c, ldc, a, at_a, lda, panel, kk * nr, nr, steps, add, coming)
                else:  # half a panel
                    narrow(c, at_c, ldc, a, at_a, lda, panel, kk * nr, nr, steps, add, coming)
                at += share

    return multiply


_multiply_rows, _multiply_columns = _multiply(rows_2, rows_1, False), _multiply(columns_2, columns_1, True)


@generic
def products(c, a, a0, lda, trans, panels, first, m, n, k, accumulate, ahead):
    """C (+)= A B of words from offset a0, packed by ``pack_a`` or in place, B from panel ``first`` on."""

    def vectors(c, a, a0, lda, trans, panels, first, m, n, k, accumulate, ahead):
        if trans:
            _multiply_columns(c, a, a0, lda, panels, first, m, n, k, accumulate, ahead)
        else:
            _multiply_rows(c, a, a0, lda, panels, first, m, n, k, accumulate, ahead)

    def tiles(c, a, a0, lda, trans, panels, first, m, n, k, accumulate, ahead):
        ldc, panel, nr = c.shape[1], panels.shape[1], 2 * lanes(c)
        width = round_up(n, TILE)
        whole = k // TILE * TILE
        # a line per 16 steps: with two in flight tiles wait for their own loads (1024 tokens: 8 % slower)
        coming = place(ahead, 0, (ahead.rows > 0) * LINE_BYTES)
        for i in range(0, m, BAND):
            height, at_c, row = round_up(smaller(BAND, m - i), TILE), i * ldc, a0 + i * lda
            for kk in range(0, whole, DEPTH):
                depth, more = smaller(DEPTH, whole - kk), accumulate | (kk > 0)
                at_a, at_b = row + kk, first * panel + kk * nr
                sizes = height, width, depth
                multiply_tiles(c, at_c, ldc, a, at_a, lda, panels, at_b, nr, panel, sizes, more, coming)
                coming = later(coming, round_up(width, nr) // nr * depth // TILE)
            if (whole < k) | (k == 0):  # an empty sum is written too
                more = accumulate | (whole > 0)
                for j in range(0, width, nr):
                    at_b, across = (first + j // nr) * panel + whole * nr, smaller(nr, width - j)
                    gemm_rows(
                        c,
                        at_c + j,
                        ldc,
                        a,
                        row + whole,
                        lda,
                        panels,
                        at_b,
                        nr,
                        height,
                        across,
                        k - whole,
                        more,
                    )

    return tiles if takes_tiles(panels) else vectors


def _widest_in_place(a: types.Array, panels: types.Array) -> int:
    """Limit of columns up to which A is multiplied in place. Time over that with packed A, on a Xeon: float32 0.82
    (16 columns), 0.88 (64), 1.0 (1024); bfloat16 in tiles, whose loads wait for memory, 0.68, 0.80, 1.02 (96).
    """
    if takes_tiles(panels):
        return IN_PLACE if a.dtype == types.uint16 else 0
    return 1 << 62 if XEON and a.dtype == panels.dtype else 0


@generic
def multiply(c, room, a, trans, m0, m, k0, k, panels, first, n, accumulate, ahead):
    """C (+)= op(A) B: m rows of op(A) from m0 and k steps from k0, B from panel ``first`` on.

    ``room`` is scratch for packed A, ``ahead`` the region to prefetch meanwhile.
    """
    widest, step = _widest_in_place(a, panels), TILE if takes_tiles(panels) else MR

    def packed(c, room, a, trans, m0, m, k0, k, panels, first, n, accumulate, ahead):
        pack_a(room, a, trans, m0, m, k0, k)
        products(c, room, 0, room.shape[1], trans, panels, first, m, n, k, accumulate, ahead)

    def in_place(c, room, a, trans, m0, m, k0, k, panels, first, n, accumulate, ahead):
        words, whole = as_type(a, panels[0, 0]), m // step * step
        ld, misaligned = a.strides[0] // words.itemsize, a.strides[0] % words.itemsize
        if (
            trans
            | (n > widest)
            | (k0 + k > words.shape[1])
            | (a.strides[1] != a.itemsize)
            | (misaligned != 0)
        ):
            whole = 0
        if whole > 0:
            # the hardware prefetches rows that are read in order, faster (float32, 16, 64 tokens: 0.78, 0.98)
            at, none = m0 * ld + k0, Region(ahead.array, ahead.r0, 0, ahead.c0, ahead.columns)
            products(c, words, at, ld, False, panels, first, whole, n, k, accumulate, none)
        if whole < m:
            below, rest = c[whole:], m - whole
            pack_a(room, a, trans, m0 + whole, rest, k0, k)
            products(below, room, 0, room.shape[1], trans, panels, first, rest, n, k, accumulate, ahead)

    return in_place if widest > 0 else packed


def _signature(a: str, kind: str, out: str) -> tuple[types.Type, ...]:
    triple, pair, flag = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2), types.boolean
    product = read(a, 2), flag, write(kind, 2), types.int64, write(out, 2), flag
    total, addends = write(compute(kind).name, 2), types.UniTuple(read(out, 2), 2)
    return pair, triple, *product, total, addends, flag, flag


# variants that the gated MLP and linear layers call; others compile on demand
VARIANTS = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    *((t, packed(t), out) for t in ("float16", "bfloat16") for out in (t, "float32")),
    *(("float32", "float32", t) for t in ("float16", "bfloat16") if packed(t) == "float32"),
)


@kernel(_signature, VARIANTS)
def gemm(state, n_tasks, tile, sizes, a, trans_a, panels, blocks, out, trans_out, total, addends, add, last):
    rows, columns = tile
    m_all, n_all, depth = sizes
    nr = 2 * lanes(panels)
    across, block, k_all = panels.shape[0] // blocks, panels.shape[1] // nr, steps(panels, depth)
    n_tiles = (n_all + columns - 1) // columns
    c = scratch(round_up(rows, MAX_LANES), columns + SKEW, total.dtype.type(0))
    pa = room_a(panels, rows, block, trans_a)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        following = claim(state)
        m0, m = tile_size(task // n_tiles, rows, m_all)
        n0, n = tile_size(task % n_tiles, columns, n_all)
        for b in range(blocks):
            k = min(block, k_all - b * block)
            if b + 1 < blocks:
                k1 = (b + 1) * block
                ahead = region(a, panels, trans_a, m0, m, k1, min(block, k_all - k1))
            else:
                m1, mn = tile_size(following // n_tiles, rows, m_all)
                ahead = region(a, panels, trans_a, m1, mn, 0, block)
            first = b * across + n0 // nr
            multiply(c, pa, a, trans_a, m0, m, b * block, k, panels, first, n, b > 0, ahead)
        finish(c, m0, m, n0, n, out, trans_out, total, addends, add, last)
        task = following
    close_tiles()


@device_function(refcount=True)
def finish(c, m0, m, n0, n, out, trans_out, total, addends, add, last):
    """Add the sum so far, and store C there or, with the addends and rounded, in ``out``."""
    if trans_out:
        width = lanes(c)
        turned = scratch(width, round_up(m, width), c[0, 0])
        for j in range(0, n, width):
            turn(turned, c, j, m)
            for jj in range(min(width, n - j)):
                finish_row(turned[jj], n0 + j + jj, m0, m, out, total, addends, add, last)
    else:
        for i in range(m):
            finish_row(c[i], m0 + i, n0, n, out, total, addends, add, last)


@device_function
def turn(turned, c, j, m):
    """Transpose columns of m rows of c, from j on and as many as a vector holds, into rows."""
    for i in range(0, m, lanes(c)):
        copy_transposed(turned, i, turned.shape[1], c, i * c.shape[1] + j, c.shape[1])


@device_function
def finish_row(row, r, start, length, out, total, addends, add, last):
    if add:
        so_far = span(read_row(total, (r,)), start, length)
        for j in range(length):
            row[j] += so_far[j]
    if last:
        like_out, one_row = addends
        if like_out.shape[0] > 0:
            more = span(read_row(like_out, (r,)), start, length)
            for j in range(length):
                row[j] += load(more, j)
        if one_row.shape[0] > 0:
            more = span(read_row(one_row, (0,)), start, length)
            for j in range(length):
                row[j] += load(more, j)
        target = span(write_row(out, (r,)), start, length)
        for j in range(length):
            store(target, j, row[j])
    else:
        keep = span(write_row(total, (r,)), start, length)
        for j in range(length):
            keep[j] = row[j]


def private_bytes(m: int, n: int, depth: int, kind: str, *, trans_a: bool = False) -> int:
    """Scratch of all threads of a product, (m, depth) by (depth, n)."""
    rows, columns = tile_shape(m, n, kind)
    of_one = tile_bytes(rows, columns, kind) + room_bytes(kind, depth, n, rows, trans=trans_a)
    return most_threads(launch, -(-m // rows) * -(-n // columns)) * of_one


def tile_bytes(rows: int, columns: int, kind: str) -> int:
    """Bytes of a tile of sums, and of a few of its columns transposed into rows."""
    height, itemsize = -(-rows // MAX_LANES) * MAX_LANES, 8 if kind == "float64" else 4
    return height * ((columns + SKEW) * itemsize + VECTOR_BYTES)


def room_bytes(kind: str, depth: int, n: int, rows: int, *, trans: bool) -> int:
    """Bytes of packed rows of A, for a product with B of (depth, n)."""
    itemsize = np.dtype(kind).itemsize
    block = panel_shape(depth, n, kind)[1][1] // (2 * VECTOR_BYTES // itemsize)
    return math.prod(room_shape.py_func(in_registers(kind), rows, block, trans)) * itemsize
