"""A linear layer on the CPU: :mod:`.gemm` with the bias and the residual in its epilogue, and sums over tokens.

forward     y = x w^T, as (w x^T)^T: w is read in place, once per ``TOKENS`` tokens; few tokens: linear_few.py
backward    dx = dy w, as (w^T dy^T)^T; dweight = dy^T x, which adds up in float32 in place
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import bits, load, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, kernel, read, types, write
from gpu_ops.kernels.common.cpu.packing import pack, packed, panel_bytes
from gpu_ops.kernels.common.cpu.parallel import claim, launch
from gpu_ops.kernels.gemm.cpu import linear_few
from gpu_ops.kernels.gemm.cpu.gemm import matmul, private_bytes, tile_size

Array = np.ndarray[Any, Any]

TOKENS = 1024
COLUMNS = 256  # of a sum over tokens, per task
ROWS = 64  # terms of one sum: sums of sums lose fewer digits


def spans(length: int, step: int = TOKENS) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def scratch_bytes(tokens: int, rows: int, cols: int, dtype: str) -> tuple[int, int, int]:
    """Scratch bytes of y, dx and dweight of a weight (rows, cols)."""
    n, element = min(tokens, TOKENS), packed(dtype)
    few = linear_few.is_few(tokens, dtype)
    dense = panel_bytes(cols, n, element) + private_bytes(rows, n, cols, element)
    return (
        linear_few.scratch_bytes(cols, dtype) if few else dense,
        panel_bytes(rows, n, element) + private_bytes(cols, n, rows, element, trans_a=True),
        panel_bytes(n, cols, element) + private_bytes(rows, cols, n, element, trans_a=True),
    )


def forward(x: Array, weight: Array, bias: Array | None, residual: Array | None, y: Array) -> None:
    """Compute y; x is (tokens, in_features), y and residual (tokens, out_features)."""
    row = None if bias is None else bias[None]
    if linear_few.is_few(len(x), x.dtype.name) and y.dtype == x.dtype:  # not the float32 logits of a loss
        linear_few.forward(x, weight, (residual, row), y)
        return
    for t in spans(len(x)):
        panels = pack(x[t], packed(x.dtype.name), trans=True)
        addends = (None if residual is None else residual[t], row)
        matmul(weight, panels, y[t], trans_out=True, addends=addends)
        del panels  # before the next panels are made


def backward_input(dy: Array, weight: Array, dx: Array) -> None:
    for t in spans(len(dy)):
        panels = pack(dy[t], packed(dy.dtype.name), trans=True)
        matmul(weight, panels, dx[t], trans_a=True, trans_out=True)
        del panels


def backward_weight(dy: Array, x: Array, dweight: Array, *, add: bool) -> None:
    """Compute dweight. ``add``: add to its contents."""
    for t in spans(len(x)):
        panels = pack(x[t], packed(x.dtype.name), trans=False)
        matmul(dy[t], panels, dweight, trans_a=True, first=t.start == 0 and not add)
        del panels


def sum_rows(x: Array, total: Array, *, add: bool) -> None:
    """Store the sum of the rows of x in ``total`` (columns,). ``add``: add to its contents."""
    tasks = -(-x.shape[1] // COLUMNS)
    launch(column_sums[x.dtype], tasks, bits(x), total[None], add)


def _signature(dtype: str) -> tuple[types.Type, ...]:
    return read(dtype, 2), write(compute(dtype).name, 2), types.boolean


@kernel(_signature)
def column_sums(state, n_tasks, x, total, add):
    sums, part = np.empty(COLUMNS, total.dtype), np.empty(COLUMNS, total.dtype)
    task = claim(state)
    while task < n_tasks:
        start, width = tile_size(task, COLUMNS, x.shape[1])
        sums_row = write_row(total, (0,))
        for j in range(width):
            sums[j] = sums_row[start + j] if add else total.dtype.type(0)
        for first in range(0, x.shape[0], ROWS):
            part[:] = total.dtype.type(0)
            for i in range(first, min(first + ROWS, x.shape[0])):
                row = read_row(x, (i,))
                for j in range(width):
                    part[j] += load(row, start + j)
            for j in range(width):
                sums[j] += part[j]
        for j in range(width):
            sums_row[start + j] = sums[j]
        task = claim(state)
