"""Dropout on the CPU, forward and backward; ``reference/rows/dropout.py`` defines which elements are kept.

A block's bits are drawn by fours into memory that stays in the first cache, and become ones and zeros; then one pass
over the block multiplies. Results too large for a cache are streamed past it, unless they are in place.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.blocks import Array, block_of, blocks_of, long_rows, same_memory
from gpu_ops.kernels.common.cpu.blocks import config as config_of
from gpu_ops.kernels.common.cpu.codegen.memory import LINE_BYTES, scratch
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.codegen.philox import DRAWN, draw_bits
from gpu_ops.kernels.common.cpu.codegen.rows import map_rows
from gpu_ops.kernels.common.cpu.codegen.stream import fence, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import bits, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, kernel, read, write
from gpu_ops.kernels.common.cpu.parallel import claim, launch

# Dropout of a row as LLVM IR: (y,) = x * kept * factor, where ``kept`` is 1 or 0 in the dtype of the row.
#
# In this order: x * factor may overflow where x is dropped.

drop = map_rows(lambda operands, scalars: (operands[0] * operands[1] * scalars[0],))


BLOCK = 1 << 11  # elements, whose ones and zeros take 8 KB in float32
AHEAD = 1 << 12  # bytes of a row that are prefetched
SPACE = BLOCK + LINE_BYTES + 4 * DRAWN  # elements
_THREE, _TWO, _HALF = np.uint64(3), np.uint64(2), np.uint64(32)


def config(rows: int, cols: int) -> str:
    return config_of(rows, cols, BLOCK)


def dropout(
    x: Array, y: Array, *, seed: np.uint64, offset: np.uint64, dropped: np.uint32, factor: float
) -> None:
    """Apply dropout. x, y (rows, cols); y may be x's memory. Bits below ``dropped`` drop an element."""
    streaming = not (stays_in_cache(y.nbytes) or same_memory(x, y))
    x, y = long_rows(x, y)
    n_blocks, chunk = blocks_of(x.shape, BLOCK)
    args = bits(x), bits(y), seed, offset, dropped, factor, streaming
    launch(DROPOUT[x.dtype], -(-n_blocks // chunk), chunk, *args)


def _dropout(state, n_tasks, chunk, x, y, seed, offset, dropped, factor, streaming):
    rows, cols = x.shape
    blocks_per_row = (cols + BLOCK - 1) // BLOCK
    low, high = np.uint32(seed), np.uint32(seed >> _HALF)
    kept = scratch(1, SPACE, x[0, 0])
    task = claim(state)
    while task < n_tasks:
        for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
            r, y_row = b // blocks_per_row, write_row(y, (b // blocks_per_row,))
            start, stop = block_of(y_row, b % blocks_per_row, blocks_per_row, BLOCK)
            first = offset + np.uint64(r) * np.uint64(cols) + np.uint64(start)
            past, n = np.int64(first & _THREE), stop - start
            draw_bits(kept, first >> _TWO, (past + n + 3) // 4, low, high, dropped)
            x_row = read_row(x, (r,))
            operands = (x_row[start:stop], read_row(kept, (0,))[past : past + n])
            following = (x_row[min(start + AHEAD // x.itemsize, cols) :],)
            drop((y_row[start:stop],), operands, (factor,), following, (), streaming)
        if streaming:
            fence()
        task = claim(state)


def _signature(t: str) -> tuple[types.Type, ...]:
    arrays = types.int64, read(t, 2), write(t, 2)
    return *arrays, types.uint64, types.uint64, types.uint32, compute(t), types.boolean


_dropout.__name__ = "dropout"
DROPOUT = kernel(_signature)(_dropout)
