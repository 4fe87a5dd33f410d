"""O^T = O^T alpha + V^T P^T for a panel of queries, and V as this product takes it.

vt  [key, d]    what is packed (attention_operands.py): 8 columns of a row at a time are multiplied as vectors
vd  [d, key]    where tile registers multiply, V^T: their left operand lies in rows
"""

from __future__ import annotations

from gpu_ops.kernels.numba_cpu.attention_operands import transpose
from gpu_ops.kernels.numba_cpu.codegen.gemm import gemm_columns_scaled, gemm_rows, takes_tiles
from gpu_ops.kernels.numba_cpu.codegen.memory import round_up
from gpu_ops.kernels.numba_cpu.codegen.target import MR
from gpu_ops.kernels.numba_cpu.codegen.tiles import TILE
from gpu_ops.kernels.numba_cpu.jit import generic, noinline_function
from gpu_ops.kernels.numba_cpu.packing import steps


@generic
def transpose_v(vd, vt, n):
    """V^T of ``n`` keys, zeros up to a whole group."""

    def turn(vd, vt, n):
        full = round_up(steps(vt, n), TILE)
        for j in range(steps(vt, n), full):
            vt[j] = 0
        transpose(vd, 0, vd.shape[1], vt, 0, vt.shape[1], full, vt.shape[1])

    return turn if takes_tiles(vt) else lambda vd, vt, n: None


@generic
def add_values(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
    """A panel of ``width`` lanes at ``ot[at]`` and ``p``: keys skip..skip + count - 1 of the tile; all are finite."""

    def tiles(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
        ld, rows, depth = vd.shape[1], round_up(dim, TILE), round_up(steps(vt, count), TILE)
        rescale(ot, at // nr, dim, width, alpha[lane : lane + width])
        gemm_rows(ot, at, nr, vd, steps(vt, skip), ld, p, 0, nr, rows, width, depth, True)

    def vectors(ot, at, nr, vt, vd, skip, p, dim, width, count, alpha, lane):
        ld, rows, depth = vt.shape[1], round_up(dim, MR), steps(vt, count)
        gemm_columns_scaled(
            ot, at, nr, vt, steps(vt, skip) * ld, ld, p, 0, nr, rows, width, depth, alpha, lane
        )

    return tiles if takes_tiles(vt) else vectors


@noinline_function
def rescale(ot, first, n, width, alpha):
    changed = False
    for c in range(width):
        changed |= alpha[c] != 1
    if not changed:
        return
    for d in range(first, first + n):
        row = ot[d]
        for c in range(width):
            row[c] *= alpha[c]
