"""Matrix products of the CPU backend: ``C (+)= op(A) op(B)`` on the micro-kernels of ir/gemm.py, for every dtype.

A task is one tile of C, which stays in the L2 cache as float32 (float64 for float64) while it adds up over
blocks of K:

                        columns: panels of NR                 per block of K:
                      +-------+-------+----                     A  rows x BLOCK_K, widened, in L2
    BLOCK_K of B      | panel | panel |                         B  panels of BLOCK_K x NR; the one in use
                      +-------+-------+----                        stays in L1 while A runs past it
    rows x BLOCK_K    |   C   |   C   |
    of A              +-------+-------+----                   at the end C is rounded once and stored

16-bit elements are widened while they are packed, so no widened copy of a matrix exists. The vector lanes run
along the columns of C and A is only read: of ``x @ w.T`` with few tokens, A is w (as it lies, never transposed), B is
x.T, and C is stored transposed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu.dtype import bits, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.ir.gemm import copy_transposed, copy_vector, gemm_columns, gemm_rows
from gpu_ops.kernels.numba_cpu.ir.memory import scratch
from gpu_ops.kernels.numba_cpu.ir.target import MAX_LANES, MR, lanes, round_up
from gpu_ops.kernels.numba_cpu.jit import kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, launch, thread_count

Array = np.ndarray[Any, Any]

TILE = 256  # rows and columns of a tile of C: C, its A and its B are 256 KiB of float32 each
BLOCK_K = TILE  # a panel of B takes 32 KiB; rows and columns of a tile of A fit the same scratch
TASKS_PER_THREAD = 3  # at least, for an even finish; as long as a tile keeps 32 rows


def matmul(
    a: Array,
    b: Array,
    out: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    trans_out: bool = False,
    total: Array | None = None,
    first: bool = True,
    last: bool = True,
) -> None:
    """``out = op(a) @ op(b)``, op being the transposition where asked; ``trans_out`` stores the transposed product.

    A sum of products takes several calls with the same ``total``, an array like ``out`` in the type that is
    computed in (``out`` itself by default, if it is of that type): each but the first adds to it, and the last
    writes the sum, rounded once, to ``out`` instead.
    """
    m, depth = a.shape[::-1] if trans_a else a.shape
    n = b.shape[0] if trans_b else b.shape[1]
    if total is None:
        wide = np.result_type(np.float32, *(x.dtype for x in (a, b, out) if x.dtype.itemsize > 2))
        total = out if out.dtype == wide else np.empty((0, 0), wide)
    rows, columns = tile_shape(m, n)
    n_tasks = -(-m // rows) * -(-n // columns) if m and n else 0
    launch(
        gemm[a.dtype, b.dtype, out.dtype],
        n_tasks,
        (m, n, depth),
        (rows, columns),
        bits(a),
        trans_a,
        bits(b),
        trans_b,
        bits(out),
        trans_out,
        total,
        not first,
        last,
    )


def tile_shape(m: int, n: int) -> tuple[int, int]:
    """Rows and columns of a tile: TILE or a little less, so that they are even and every thread has some."""
    columns = _even(n, TILE, 64)
    rows = TILE
    while rows > 32 and -(-m // rows) * -(-n // columns) < TASKS_PER_THREAD * thread_count():
        rows //= 2
    return _even(m, rows, MR), columns


def _even(length: int, most: int, step: int) -> int:
    """Equal parts of ``length``, at most ``most`` (rounded up to ``step``) each."""
    parts = max(1, -(-length // most))
    return max(step, -(-length // (parts * step)) * step)


# --- one tile --------------------------------------------------------------------------------------


@njit
def tile_scratch(columns, wide):
    """Packed A and B of one block of K, and rows of B on their way."""
    b = scratch(round_up(columns, 2 * MAX_LANES), BLOCK_K, wide)
    return scratch(TILE, BLOCK_K, wide), b, scratch(MAX_LANES, BLOCK_K, wide)


@njit
def tile_size(index, tile, length):
    """Where tile ``index`` starts and its size."""
    start = index * tile
    return start, min(tile, length - start)


@njit
def pack_a(to, a, trans, m0, m, k0, k):
    """op(a)[m0 : m0 + m, k0 : k0 + k] as it lies, (m, k) or (k, m); m is padded with zeros to a multiple of MR."""
    if trans:
        for kk in range(k):
            row = to[kk]
            widen(row, read_row(a, (k0 + kk,))[m0 : m0 + m])
            for i in range(m, round_up(m, MR)):
                row[i] = 0
    else:
        for i in range(m):
            widen(to[i], read_row(a, (m0 + i,))[k0 : k0 + k])
        for i in range(m, round_up(m, MR)):
            to[i] = 0


@njit
def pack_b(to, rows, b, trans, n0, n, k0, k):
    """op(b)[k0 : k0 + k, n0 : n0 + n] in panels [k, NR]; n is padded with zeros to whole vectors.

    ``rows`` holds widened rows on their way.
    """
    width = lanes(to[0])
    nr = 2 * width
    if trans:
        for j in range(0, n, width):
            for i in range(width):
                if j + i < n:
                    widen(rows[i], read_row(b, (n0 + j + i,))[k0 : k0 + k])
                else:
                    rows[i] = 0
            at = j // nr * nr * BLOCK_K + j % nr
            for kk in range(0, k, width):  # the last square may pass k: into the rest of its panel
                copy_transposed(to, at + kk * nr, nr, rows, kk, BLOCK_K)
    else:
        row = rows[0]
        for kk in range(k):
            widen(row, read_row(b, (k0 + kk,))[n0 : n0 + n])
            row[n : round_up(n, width)] = 0
            for j in range(0, n, width):
                copy_vector(to, j // nr * nr * BLOCK_K + j % nr + kk * nr, 0, row, j, 0)


@njit
def widen(to, row):
    for i in range(len(row)):
        to[i] = load(row, i)


@njit
def multiply(c, a, trans_a, b, m, n, k, accumulate):
    """C (+)= A B of packed operands."""
    ldc, lda = c.shape[1], a.shape[1]
    nr = 2 * lanes(c)
    for j in range(0, n, nr):
        width = min(nr, round_up(n - j, lanes(c)))
        if trans_a:
            gemm_columns(c, j, ldc, a, 0, lda, b, j * BLOCK_K, nr, m, width, k, accumulate)
        else:
            gemm_rows(c, j, ldc, a, 0, lda, b, j * BLOCK_K, nr, m, width, k, accumulate)


# --- the kernel ------------------------------------------------------------------------------------


def _signature(a: str, b: str, out: str) -> tuple[types.Type, ...]:
    triple, pair, flag = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2), types.boolean
    wide = "float64" if "float64" in (a, b, out) else "float32"
    return triple, pair, read(a, 2), flag, read(b, 2), flag, write(out, 2), flag, write(wide, 2), flag, flag


# what the gated MLP calls; others compile on demand
VARIANTS = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    *((t, "float32", t) for t in ("float16", "bfloat16")),
    *(("float32", t, t) for t in ("float16", "bfloat16")),
)


@kernel(_signature, VARIANTS)
def gemm(state, n_tasks, sizes, tile, a, trans_a, b, trans_b, out, trans_out, total, add, last):
    m_all, n_all, depth = sizes
    rows, columns = tile
    across = (n_all + columns - 1) // columns
    wide = total.dtype.type(0)
    c = scratch(rows, columns, wide)
    pa, pb, on_way = tile_scratch(columns, wide)
    task = claim(state)
    while task < n_tasks:
        m0, m = tile_size(task // across, rows, m_all)
        n0, n = tile_size(task % across, columns, n_all)
        for k0 in range(0, max(depth, 1), BLOCK_K):  # once for depth 0 too: zeros
            k = min(BLOCK_K, depth - k0)
            pack_a(pa, a, trans_a, m0, m, k0, k)
            pack_b(pb, on_way, b, trans_b, n0, n, k0, k)
            multiply(c, pa, trans_a, pb, m, n, k, k0 > 0)
        if trans_out:
            for j in range(n):
                if add:
                    so_far = read_row(total, (n0 + j,))[m0 : m0 + m]
                    for i in range(m):
                        c[i, j] += so_far[i]
                if last:
                    target = write_row(out, (n0 + j,))[m0 : m0 + m]
                    for i in range(m):
                        store(target, i, c[i, j])
                else:
                    keep = write_row(total, (n0 + j,))[m0 : m0 + m]
                    for i in range(m):
                        keep[i] = c[i, j]
        else:
            for i in range(m):
                row = c[i]
                if add:
                    so_far = read_row(total, (m0 + i,))[n0 : n0 + n]
                    for j in range(n):
                        row[j] += so_far[j]
                if last:
                    target = write_row(out, (m0 + i,))[n0 : n0 + n]
                    for j in range(n):
                        store(target, j, row[j])
                else:
                    keep = write_row(total, (m0 + i,))[n0 : n0 + n]
                    for j in range(n):
                        keep[j] = row[j]
        task = claim(state)
