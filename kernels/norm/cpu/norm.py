"""Code shared by RMSNorm and LayerNorm on the CPU: sums over a row, the residual, and the use of caches.

A task is a run of rows. Each row is read from memory once: later passes over it find it in the cache. Sums over a row
are float64 sums of short sums in the computing type, where these are in its range, so that no finite input overflows.
Gradients of weights are float64 partials per task, added up in order: the same result every time, whatever thread ran
which task. They grow by a few rows at a time, whose sum is in the computing type, before their dx, which may be dy's
memory.

Forward (passes in ``cpu/norm_ir.py``; results too large for a cache go past it)::

    x        | row r | row r + 1 ...         row r + 1 is prefetched while y is stored
    residual | row r | row r + 1 ...
    sums     | row r of s |                  scratch, for the passes that follow
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import place_of
from gpu_ops.kernels.common.cpu.codegen.numba_api import njit
from gpu_ops.kernels.common.cpu.codegen.rows import UNROLLED
from gpu_ops.kernels.common.cpu.codegen.sums import TOGETHER
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.common.cpu.dtype import read_row, write_row
from gpu_ops.kernels.common.cpu.jit import device_function, inner
from gpu_ops.kernels.common.cpu.parallel import items_per_task
from gpu_ops.kernels.norm.cpu import norm_ir as norm

SHORT_SUM = 16 * UNROLLED * MAX_LANES  # numbers summed in the computing type: 16 per lane
CACHED = 1 << 16  # total elements
TINY = 2.0**-80  # a sum of float32 squares below this may have lost some to underflow


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


Array = np.ndarray[Any, Any]


def store_sum(total: Array, partial: Array, add: bool) -> None:
    """Store the sum of the rows of ``partial`` in ``total``. ``add``: add to its contents."""
    column_sums = partial.sum(axis=0)
    total[...] = total + column_sums if add else column_sums


def short_sums(short: Any, exact: Any, least: float = -1.0) -> Any:
    """Function (operands, scalars, wide) for the float64 sum over rows of short sums in the computing type.

    ``short`` and ``exact`` are passes of cpu/norm_ir.py. Where the size of a sum is not between ``least`` and
    infinity, ``exact`` takes the same numbers, with the scalars ``wide``, in float64. A device function, not
    ``inner``: reordered, a sum of differences from a number would be the difference of two large sums.
    """

    @device_function
    def add_up(operands, scalars, wide):
        total, length = 0.0, len(operands[0])
        for start in range(0, length, SHORT_SUM):
            count = min(SHORT_SUM, length - start)
            value = short(operands, scalars, start, count)
            if not (least < abs(value) < np.inf):
                value = exact(operands, wide, start, count)
            total += value
        return total

    return add_up


_squares = short_sums(norm.squares, norm.exact_squares, TINY)


@device_function
def sum_of_squares(x):
    return _squares((x,), (), (0.0,))


@inner
def together(rows, cols):
    """Rows whose operands stay in the cache from one pass to the next."""
    return max(1, min(TOGETHER, CACHED // max(1, cols), rows))


@device_function
def shared_chunks(lines, of, result, r, first, stop):
    """``shared`` of ``rows.map_rows`` for row r of a result, of which the task has the rows from first to stop."""
    joined = result.strides[0] == result.shape[1] * result.itemsize
    return write_row(lines, (of,)), joined and r > first, joined and r + 1 < stop


@njit
def add_residual(sums, s, row, residual, r, after, out, shared, streaming):
    """Compute ``sums[0] = row + residual[r]``, and store it in ``s[r]``, unless y stands in for a missing s."""
    total, copy = write_row(sums, (0,)), write_row(s, (r,))
    operands, coming = (row, read_row(residual, (r,))), (read_row(residual, (after,)),)
    if place_of(copy) == place_of(out):
        norm.add_up((total,), operands, (), coming, (), streaming)
    else:
        norm.add((copy, total), operands, (), coming, shared, streaming)
