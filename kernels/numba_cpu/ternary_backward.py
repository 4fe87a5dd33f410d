"""Gradients of the ternary matmul on the CPU: ``dx = dy @ W`` and ``dw = dy.T @ xq``.

W exists dense some rows at a time, and xq, which the forward multiplied, as a copy; sums are float32 (float64 for
float64). For a few tokens a task takes columns of dx, and a tile of W exists dense in its L2 cache:

                       columns of dx
                    +----------------+
    rows of W       |  W, unpacked   |      C[token, column] += dy[token, rows] W[rows, columns]
                    +----------------+

Products so small that packing operands and asking threads takes longer than the sums go row by row:

    for each row of W     dx += dy[:, n] * W[n]       dw[n] = sum over tokens of dy[:, n] * xq
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.dtype import bits, like, load, read_row, write_row
from gpu_ops.kernels.numba_cpu.gemm import matmul
from gpu_ops.kernels.numba_cpu.ir.gemm import gemm_rows
from gpu_ops.kernels.numba_cpu.ir.memory import SKEW, scratch
from gpu_ops.kernels.numba_cpu.ir.target import MR, round_up
from gpu_ops.kernels.numba_cpu.ir.ternary import WORD, unpack_row
from gpu_ops.kernels.numba_cpu.jit import compute, inner, kernel, read, types, uncounted, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch, launch_here
from gpu_ops.kernels.numba_cpu.swiglu_mlp_small import add, finish
from gpu_ops.kernels.numba_cpu.ternary_tokens import absmax_of

Array = np.ndarray[Any, Any]

DENSE = 1 << 22  # weights that exist dense at a time: 16 MiB of float32
SMALL = 1 << 17  # products up to which rows are faster
FEW = 64  # tokens up to which dx is made of tiles of W that no other task sees
TILE_ROWS, TILE_COLUMNS = 128, 256  # of such a tile: 128 KiB of float32


def config(tokens: int, n: int, k: int, wide: np.dtype[Any]) -> str:
    if tokens * n * k <= SMALL:
        return f"{wide} sums; W dense one row at a time"
    if tokens <= FEW:
        return f"{wide} tiles; W dense {TILE_ROWS} rows x {TILE_COLUMNS} columns at a time"
    return f"{wide} tiles; W dense {_rows_at_a_time(k)} rows at a time"


def _rows_at_a_time(k: int) -> int:
    return max(DENSE // max(k, 1), 1)


def backward(
    dy: Array, x: Array, codes: Array, scale: Array, dx: Array, dw: Array, *, activations: str
) -> None:
    """dy (tokens, N), x and dx (tokens, K), dw (N, K); w2 codes (N, bytes), scale (1 or N, groups)."""
    (tokens, n), k, wide = dy.shape, x.shape[1], dw.dtype
    rounding = activations == "int8"
    if tokens * n * k <= SMALL:
        arrays = bits(dy), bits(x), codes, scale, bits(dx), dw
        launch_here(ternary_small_backward[x.dtype], 1, rounding, *arrays)
        return
    used, gradient = x.astype(wide, copy=False), dy.astype(wide, copy=False)
    if rounding:
        used, chunk = np.empty(x.shape, wide), items_per_task(tokens, k)
        launch(ternary_used_tokens[x.dtype], -(-tokens // chunk), chunk, bits(x), used)
    if tokens <= FEW:
        filled = np.zeros((round_up.py_func(tokens, MR), n), wide)
        filled[:tokens] = gradient
        launch(ternary_few_dx[x.dtype], -(-k // TILE_COLUMNS), filled, codes, scale, bits(dx))
        matmul(gradient, used, dw, trans_a=True)
        return
    total = dx if dx.dtype == wide else np.empty(dx.shape, wide)
    step = _rows_at_a_time(k)
    room = np.empty((min(step, n), k), wide)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        dense, chunk = room[: rows.stop - first], items_per_task(rows.stop - first, k)
        of_rows = scale[rows] if len(scale) > 1 else scale
        launch(ternary_dense_rows[wide], -(-len(dense) // chunk), chunk, codes[rows], of_rows, dense)
        matmul(dense, gradient[:, rows], total, trans_a=True, trans_b=True, trans_out=True, first=first == 0)
        matmul(gradient[:, rows], used, dw[rows], trans_a=True)
    if total is not dx:
        dx[...] = total


@inner
def scale_groups(to, scale, group, first):
    """Columns from ``first`` on times the scales of their groups."""
    for g in range(first // group, (first + len(to) - 1) // group + 1):
        for i in range(max(g * group, first), min((g + 1) * group, first + len(to))):
            to[i - first] *= scale[g]


@uncounted
def round_tokens(to, row, zero):
    """What the forward multiplies of one token: rounded to int8, in the units of its scale."""
    absmax = absmax_of(row, zero)
    finite = absmax < np.inf
    s, unit = 127.0 / absmax if finite else 0.0, absmax / 127.0 if finite else np.nan
    for i in range(len(row)):
        q = np.rint(np.float64(load(row, i)) * s) if finite else 0.0
        to[i] = q * unit


@kernel(lambda t: (types.int64, read("uint8", 2), read("float32", 2), write(t, 2)), ("float32", "float64"))
def ternary_dense_rows(state, n_tasks, chunk, codes, scale, dense):
    n, k = dense.shape
    per_row, group = min(len(scale) - 1, 1), max(1, k // scale.shape[1])
    row = scratch(1, 4 * codes.shape[1], dense[0, 0])[0]
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(n, (task + 1) * chunk)):
            unpack_row(row, read_row(codes, (r,)))
            scale_groups(row[:k], read_row(scale, (r * per_row,)), group, 0)
            finish(write_row(dense, (r,)), row)
        task = claim(state)


@kernel(lambda t: (read(compute(t).name, 2), read("uint8", 2), read("float32", 2), write(t, 2)))
def ternary_few_dx(state, n_tasks, dy, codes, scale, dx):
    """dx = dy W; dy has as many rows as a product takes."""
    (tokens, k), n = dx.shape, len(codes)
    per_row, group = min(len(scale) - 1, 1), max(1, k // scale.shape[1])
    one = like(dy[0, 0], 1)
    c = scratch(len(dy), TILE_COLUMNS + SKEW, one)
    w = scratch(TILE_ROWS, TILE_COLUMNS + SKEW, one)
    task = claim(state)
    while task < n_tasks:
        k0 = task * TILE_COLUMNS
        width = min(TILE_COLUMNS, k - k0)
        span = round_up(width, WORD)
        for n0 in range(0, n, TILE_ROWS):
            rows = min(TILE_ROWS, n - n0)
            for r in range(rows):
                unpack_row(w[r, :span], read_row(codes, (n0 + r,))[k0 // 4 : (k0 + span) // 4])
                scale_groups(w[r, :width], read_row(scale, ((n0 + r) * per_row,)), group, k0)
            ldc, lda, ldb = c.shape[1], dy.shape[1], w.shape[1]
            gemm_rows(c, 0, ldc, dy, n0, lda, w, 0, ldb, len(dy), span, rows, n0 > 0)
        for t in range(tokens):
            finish(write_row(dx, (t,))[k0 : k0 + width], c[t])
        task = claim(state)


@kernel(lambda t: (types.int64, read(t, 2), write(compute(t).name, 2)), fastmath=frozenset())
def ternary_used_tokens(state, n_tasks, chunk, x, used):
    zero = np.zeros(1, x.dtype)
    task = claim(state)
    while task < n_tasks:
        for t in range(task * chunk, min(len(x), (task + 1) * chunk)):
            round_tokens(write_row(used, (t,)), read_row(x, (t,)), zero)
        task = claim(state)


@kernel(
    lambda t: (
        types.boolean, read(t, 2), read(t, 2), read("uint8", 2), read("float32", 2), write(t, 2),
        write(compute(t).name, 2),
    )
)  # fmt: skip
def ternary_small_backward(state, n_tasks, rounding, dy, x, codes, scale, dx, dw):
    (tokens, n), k = dy.shape, x.shape[1]
    per_row, group = min(len(scale) - 1, 1), max(1, k // scale.shape[1])
    one = like(dw[0, 0], 1)
    row = scratch(1, 4 * codes.shape[1], one)[0]
    used, sums = scratch(tokens, k, one), scratch(tokens, k, one)
    used[:], sums[:] = 0, 0
    zero = np.zeros(1, x.dtype)
    for t in range(tokens):
        if rounding:
            round_tokens(used[t], read_row(x, (t,)), zero)
        else:
            add(used[t], one, read_row(x, (t,)))
    for r in range(n):
        unpack_row(row, read_row(codes, (r,)))
        weights, target = row[:k], write_row(dw, (r,))
        scale_groups(weights, read_row(scale, (r * per_row,)), group, 0)
        target[:] = 0
        for t in range(tokens):
            factor = load(read_row(dy, (t,)), r)
            add(sums[t], factor, weights)
            add(target, factor, used[t])
    for t in range(tokens):
        finish(write_row(dx, (t,)), sums[t])
