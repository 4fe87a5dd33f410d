"""Operands of a matrix product, packed in the order in which the micro-kernels of codegen/gemm.py read them.

B is stored in *panels*, packed once per product and shared by its tasks: NR columns (two vectors) of a block of K,

    panels[block of K, panel][step, NR]        a panel is contiguous; its columns past n are zero

A is stored as (m, k) or (k, m), one tile and block of K at a time, per thread.

One step of K is one element, widened to the computing type; or, where the CPU multiplies bfloat16
(``target.DOT_BFLOAT16``), two of them in one word, the first in the lower half. Two neighbours in a row already are
such a word; neighbours in a column are interleaved. An odd K ends with a zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.gemm import copy_transposed, in_tiles
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, round_up, scratch, smaller, span
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, MAX_LANES, MR, TILES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE
from gpu_ops.kernels.common.cpu.dtype import (
    aligned_empty,
    bfloat16_of_float32,
    bits,
    load,
    read_row,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import FLOATS, device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, launch

Array = np.ndarray[Any, Any]

BLOCK = 1 << 17  # steps of K times columns: 512 KiB of panels, half of an L2 cache
# BLOCK for tile registers, whose A and C leave less room (256 tokens of the gated MLP: 7 % slower with 512 KiB); and
# columns up to which they take A in place, in long blocks (16 to 64 tokens: 3 to 14 % slower in short ones).
BLOCK_OF_TILES, IN_PLACE = 1 << 15, 64
GROUP = 4  # panels that one task packs
# steps that add up in a register: error 0.74 times NumPy's from K 256 to 4096; with 512 it is 1.0 to 1.4
SUM_STEPS = 128


def packed(*dtypes: str) -> str:
    """Type of one step of K for these dtypes of A and B."""
    if set(dtypes) == {"bfloat16"} and DOT_BFLOAT16:
        return "uint32"
    return "float64" if "float64" in dtypes else "float32"


def in_registers(kind: str) -> bool:
    """Whether steps of type ``kind`` are multiplied in tile registers."""
    return TILES and kind == "uint32"


@dataclass(frozen=True)
class Panels:
    """Packed B: ``n`` columns, ``depth`` elements of K in ``blocks`` blocks."""

    array: Array  # [block of K * panels + panel, step * NR + column]
    n: int
    depth: int
    blocks: int

    @classmethod
    def empty(cls, depth: int, n: int, kind: str) -> Panels:
        blocks, shape = panel_shape(depth, n, kind)
        return cls(aligned_empty(shape, np.dtype(kind)), n, depth, blocks)


def panel_shape(depth: int, n: int, kind: str) -> tuple[int, tuple[int, int]]:
    """Blocks of K, and the shape of the array of :class:`Panels`."""
    dtype = np.dtype(kind)
    nr = 2 * VECTOR_BYTES // dtype.itemsize
    steps = -(-depth // 2) if kind == "uint32" else depth
    across = max(1, -(-n // nr))
    columns = across * nr
    limit, least = (BLOCK_OF_TILES, 128) if in_registers(kind) and columns > IN_PLACE else (BLOCK, 256)
    blocks = max(1, -(-steps // max(least, min(limit // columns, 2048))))
    block = max(1, -(-steps // blocks))
    if blocks > 1:  # whole sums and tiles: a column's bits do not depend on its neighbours
        block = -(-block // SUM_STEPS) * SUM_STEPS
        blocks = -(-steps // block)
    return blocks, (blocks * across, block * nr)


def panel_bytes(depth: int, n: int, kind: str) -> int:
    """Memory of packed B, (depth, n)."""
    _, shape = panel_shape(depth, n, kind)
    return math.prod(shape) * np.dtype(kind).itemsize


def pack(b: Array, kind: str, *, trans: bool) -> Panels:
    """Pack op(b), (k, n), in panels."""
    n, depth = b.shape if trans else b.shape[::-1]
    panels = Panels.empty(depth, n, kind)
    tasks = panels.blocks * -(-len(panels.array) // (panels.blocks * GROUP))
    launch(pack_panels[b.dtype, kind], tasks, bits(b), trans, panels.array, panels.blocks, depth)
    return panels


def _signature(b: str, kind: str) -> tuple[types.Type, ...]:
    return read(b, 2), types.boolean, write(kind, 2), types.int64, types.int64


@kernel(_signature, tuple((t, packed(t)) for t in FLOATS))
def pack_panels(state, n_tasks, b, trans, panels, blocks, depth):
    n = b.shape[0] if trans else b.shape[1]
    nr = 2 * lanes(panels)
    across, block = panels.shape[0] // blocks, panels.shape[1] // nr
    groups = (across + GROUP - 1) // GROUP
    on_way = scratch(nr, round_up(block, MAX_LANES) + SKEW, panels[0, 0])
    task = claim(state)
    while task < n_tasks:
        index = task // groups
        k0 = index * block
        k = min(block, steps(panels, depth) - k0)
        for p in range(task % groups * GROUP, min((task % groups + 1) * GROUP, across)):
            panel = write_row(panels, (index * across + p,))
            width = min(nr, n - p * nr)
            if trans:
                take_rows(on_way, b, p * nr, width, k0, k)
                on_way[width:] = 0
                transpose(panel, on_way, k)
            else:
                take_columns(panel.reshape(block, nr), b, k0, k, p * nr, width, nr)
        task = claim(state)


@device_function
def transpose(to, rows, k):
    """Transpose rows [NR, k] into a panel."""
    width = lanes(to)
    nr = 2 * width
    whole = k - k % width
    for kk in range(0, whole, width):
        for j in range(0, nr, width):
            copy_transposed(to, kk * nr + j, nr, rows, j * rows.shape[1] + kk, rows.shape[1])
    for kk in range(whole, k):
        for j in range(nr):
            to[kk * nr + j] = rows[j, kk]


# ---- steps of K: widened elements, or pairs ----------------------------------------------------------------


@generic
def steps(packed, depth):
    """Steps of K in ``depth`` elements, with operands like array ``packed``."""
    if packed.dtype == types.uint32:
        return lambda packed, depth: (depth + 1) // 2
    return lambda packed, depth: depth


@generic
def elements(packed, k):
    """Elements of K in ``k`` steps."""
    if packed.dtype == types.uint32:
        return lambda packed, k: 2 * k
    return lambda packed, k: k


@generic
def take_rows(to, x, r0, m, k0, k):
    """to[:m, :k] = rows of x from r0, steps of K from k0."""

    def widen(to, x, r0, m, k0, k):
        for i in range(m):
            target, row = to[i], span(read_row(x, (r0 + i,)), k0, k)
            for kk in range(k):
                target[kk] = load(row, kk)

    def pair(to, x, r0, m, k0, k):
        halves = to.view(np.uint16)
        for i in range(m):
            target, row = halves[i], read_row(x, (r0 + i,))[2 * k0 : 2 * (k0 + k)]
            for kk in range(len(row)):
                target[kk] = row[kk]
            for kk in range(len(row), 2 * k):
                target[kk] = 0

    return pair if to.dtype == types.uint32 else widen


@generic
def take_columns(to, x, k0, k, c0, n, width):
    """to[:k, :n] = steps of K from k0, from rows of x, columns from c0; columns from n to ``width`` are zero."""

    def widen(to, x, k0, k, c0, n, width):
        for kk in range(k):
            target, row = to[kk], span(read_row(x, (k0 + kk,)), c0, n)
            for j in range(n):
                target[j] = load(row, j)
            for j in range(n, width):
                target[j] = 0

    def pair(to, x, k0, k, c0, n, width):
        for kk in range(k):
            r = 2 * (k0 + kk)
            target, low = to[kk], span(read_row(x, (r,)), c0, n)
            if r + 1 < len(x):
                high = span(read_row(x, (r + 1,)), c0, n)
                for j in range(n):
                    target[j] = np.uint32(low[j]) | np.uint32(high[j]) << np.uint32(16)
            else:
                for j in range(n):
                    target[j] = low[j]
            for j in range(n, width):
                target[j] = 0

    return pair if to.dtype == types.uint32 else widen


@generic
def put_rows(panels, blocks, c, f0, m, t0, n):
    """Store a result tile as B of another product: its rows are steps of K from f0, its columns begin at t0, the
    first of a panel."""

    def widen(panels, blocks, c, f0, m, t0, n):
        nr = 2 * lanes(panels)
        across, block = panels.shape[0] // blocks, panels.shape[1] // nr
        for i in range(m):
            index, kk = (f0 + i) // block, (f0 + i) % block
            for j in range(0, n, nr):
                target = span(write_row(panels, (index * across + (t0 + j) // nr,)), kk * nr, nr)
                source = span(c[i], j, nr)
                for lane in range(nr):
                    target[lane] = source[lane]

    def pair(panels, blocks, c, f0, m, t0, n):
        nr = 2 * lanes(panels)
        across, block = panels.shape[0] // blocks, panels.shape[1] // nr
        if m % 2:
            c[m, :n] = 0
        for i in range(0, m, 2):
            step = (f0 + i) // 2
            index, kk = step // block, step % block
            for j in range(0, n, nr):
                target = span(write_row(panels, (index * across + (t0 + j) // nr,)), kk * nr, nr)
                low, high = span(c[i], j, nr), span(c[i + 1], j, nr)
                for lane in range(nr):
                    pair = np.uint32(bfloat16_of_float32(high[lane])) << np.uint32(16)
                    target[lane] = pair | np.uint32(bfloat16_of_float32(low[lane]))

    return pair if panels.dtype == types.uint32 else widen


# ---- A: one tile and block of K ----------------------------------------------------------------------------


@device_function
def room_shape(tiled, rows, block, trans):
    """Shape of A's scratch. Tile registers take only (m, k): the last rows are scratch for the transposition."""
    if tiled:
        rows = -(-rows // TILE) * TILE
        return rows + TILE, -(-max(rows, block) // TILE) * TILE + SKEW
    return (block, rows + SKEW) if trans else (rows, block + SKEW)


@device_function(refcount=True)
def room_a(panels, rows, block, trans):
    """Scratch of :func:`room_shape`."""
    height, width = room_shape(in_tiles(panels), rows, block, trans)
    return scratch(height, width, panels[0, 0])


@device_function
def pack_a(to, a, trans, m0, m, k0, k):
    """Pack op(a)[m0 : m0 + m], k steps from k0, in its layout, (m, k) or (k, m); zeros up to whole MR rows."""
    if not trans:
        rows = round_up(m, TILE if in_tiles(to) else MR)
        take_rows(to, a, m0, m, k0, k)
        to[m:rows, :k] = 0
    elif in_tiles(to):
        ld, last = to.shape[1], len(to) - TILE
        for kk in range(0, k, TILE):
            steps = smaller(TILE, k - kk)
            take_columns(to[last:], a, k0 + kk, steps, m0, m, round_up(m, TILE))
            for c in range(0, m, TILE):
                copy_transposed(to, c * ld + kk, ld, to, last * ld + c, ld)
    else:
        take_columns(to, a, k0, k, m0, m, round_up(m, MR))
