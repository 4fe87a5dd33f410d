"""Elementwise ops: rows cut into blocks, so that one long row too keeps every core busy."""

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
    """One long row when nothing lies between the rows: short rows would leave vectors half empty."""
    if len(arrays[0]) > 1 and all(x.flags.c_contiguous for x in arrays):
        return tuple(x.reshape(1, -1) for x in arrays)
    return arrays


def blocks_of(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """The number of blocks of ``size`` elements of (rows, cols) arrays, and how many of them one task takes."""
    rows, cols = shape
    n_blocks = rows * -(-cols // size)
    return n_blocks, items_per_task(n_blocks, min(cols, size))


def config(rows: int, cols: int, size: int) -> str:
    n_blocks, chunk = blocks_of((rows, cols), size)
    return f"{n_blocks} blocks of at most {min(cols, size)} elements, {min(n_blocks, chunk)} per task"


@inner
def block_of(row, k, count, size):
    """Where block k of ``count`` starts and stops in a row: where lines do, so that blocks share none.

    The last one is longer than ``size`` by up to a line.
    """
    past = past_line(row)
    return max(k * size - past, 0), len(row) if k == count - 1 else (k + 1) * size - past
