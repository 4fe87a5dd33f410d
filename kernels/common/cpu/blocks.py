"""Division of rows into blocks for elementwise ops, so that even one long row keeps every core busy."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.stream import past_line
from gpu_ops.kernels.common.cpu.jit import inner
from gpu_ops.kernels.common.cpu.parallel import items_per_task

Array = np.ndarray[Any, Any]


def same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data  # the caller allows no other overlap


def long_rows(*arrays: Array) -> tuple[Array, ...]:
    """Arrays as one long row if their rows are contiguous: short rows would leave vectors half empty."""
    if len(arrays[0]) > 1 and all(x.flags.c_contiguous for x in arrays):
        return tuple(x.reshape(1, -1) for x in arrays)
    return arrays


def blocks_of(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """Number of blocks of ``size`` elements in (rows, cols) arrays, and number of blocks per task."""
    rows, cols = shape
    n_blocks = rows * -(-cols // size)
    return n_blocks, items_per_task(n_blocks, min(cols, size))


def config(rows: int, cols: int, size: int) -> str:
    n_blocks, chunk = blocks_of((rows, cols), size)
    return f"{n_blocks} blocks of at most {min(cols, size)} elements, {min(n_blocks, chunk)} per task"


@inner
def block_of(row, k, count, size):
    """Start and end of block k of ``count`` in a row, at boundaries of cache lines, so that blocks share no line.

    The last block is longer than ``size`` by up to a line.
    """
    past = past_line(row)
    return max(k * size - past, 0), len(row) if k == count - 1 else (k + 1) * size - past
