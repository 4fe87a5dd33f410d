"""Norm of arrays on the CPU: norms of blocks, then the norm of those. The bits are those of global_norm.cu.

A block of BLOCK elements has LANES sums. Lane i takes elements i, i + LANES, ... and keeps the rounding errors
of additions in a second number: only the squares are rounded. Lanes are added in float64, four neighbours first,
then halves. One task is a run of blocks; elements that a block lacks count as zeros. With few lanes their sums take
little of the first cache, and few loads wait because a sum was stored at the same place of a page.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import prefetch_row
from gpu_ops.kernels.common.cpu.dtype import bits, load
from gpu_ops.kernels.common.cpu.jit import Kernel, compute, exact, generic, kernel, scalar, types
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch, launch_inline

Array = np.ndarray[Any, Any]

BLOCK, LANES, TOTAL_LANES = 16384, 256, 512
AHEAD = 4096  # prefetch distance in elements: a quarter less time than without


def block_norms(x: Array, norms: Array) -> None:
    """Compute norms of blocks. x (n,) contiguous; norms float64, one for each block."""
    chunk = items_per_task(len(norms), BLOCK)
    launch(BLOCKS[x.dtype], -(-len(norms) // chunk), chunk, bits(x), norms, 1.0)


def total(norms: Array, norm: Array, found_inf: Array) -> None:
    """Compute the norm of the norms of blocks, and whether one is not finite; both (1,)."""
    launch_inline(global_norm_total[norm.dtype], 1, norms, norm, found_inf)


def line(dtype: str, readonly: bool = False) -> types.Array:
    """Type of a contiguous array of one axis."""
    return types.Array(scalar(dtype), 1, "C", readonly=readonly, aligned=True)


@generic
def rescale(squares, one):
    """Power of two by which values are scaled before their squares are summed again; 1 if the sum is in range.

    In float32, squares of values from 2^64 on overflow and those below 2^-63 lose bits. A sum below 2^-80 stays in
    range when it grows by 2^200, and bits that were lost next to larger ones do not count.
    """
    if one == types.float64:
        return lambda squares, one: (
            2.0**640 if squares < 2.0**-900 else 1.0 if squares < np.inf else 2.0**-560
        )

    def of_float32(squares, one):
        return np.float32(2.0**100 if squares < 2.0**-80 else 1.0 if squares < 2.0**126 else 2.0**-80)

    return of_float32


@exact
def add_squares(sums, errors, row, scale):
    """sums[i] + errors[i] += (scale row[i])^2, exact except for the square (Dekker's two-sum)."""
    for i in range(len(row)):
        value = load(row, i) * scale
        square = value * value
        large, small = max(sums[i], square), min(sums[i], square)
        after = sums[i] + square
        errors[i] += small - (after - large)
        sums[i] = after


@exact
def over_lanes(sums, errors, parts):
    """Sum over the lanes. The error of a sum that is not finite is NaN."""
    for i in range(LANES):
        parts[i] = np.float64(sums[i]) + (np.float64(errors[i]) if sums[i] < np.inf else 0.0)
    for i in range(LANES // 4):
        parts[i] = (parts[4 * i] + parts[4 * i + 1]) + (parts[4 * i + 2] + parts[4 * i + 3])
    return halved(parts, LANES // 4)


@exact
def halved(parts, n):
    while n > 1:
        n //= 2
        for i in range(n):
            parts[i] += parts[n + i]
    return parts[0]


@exact
def block_sum(sums, errors, parts, x, start, end, scale):
    sums[:] = 0
    errors[:] = 0
    for first in range(start, end, LANES):
        ahead = x[first + AHEAD : first + AHEAD + LANES]
        prefetch_row(ahead, len(ahead))
        add_squares(sums, errors, x[first : min(first + LANES, end)], scale)
    return over_lanes(sums, errors, parts)


def _kernel_blocks() -> Kernel:
    def global_norm_blocks(state, n_tasks, chunk, x, norms, one):
        sums, errors, parts = np.full(LANES, one), np.full(LANES, one), np.empty(LANES)
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, len(norms))):
                start, end = b * BLOCK, min((b + 1) * BLOCK, len(x))
                squares = block_sum(sums, errors, parts, x, start, end, one)
                scale = rescale(squares, one)
                if scale != 1:
                    squares = block_sum(sums, errors, parts, x, start, end, scale)
                norms[b] = math.sqrt(squares) / np.float64(scale)
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        return types.int64, line(t, True), line("float64"), compute(t)

    return kernel(signature, fastmath=frozenset())(global_norm_blocks)


@exact
def total_sum(parts, norms, scale):
    parts[:] = 0
    for first in range(0, len(norms), TOTAL_LANES):
        for i in range(min(TOTAL_LANES, len(norms) - first)):
            value = norms[first + i] * scale
            parts[i] += value * value
    return halved(parts, TOTAL_LANES)


@kernel(
    lambda t: (line("float64", True), line(t), line("float32")),
    variants=("float32", "float64"),
    fastmath=frozenset(),
)
def global_norm_total(state, n_tasks, norms, norm, found_inf):
    if claim(state) < n_tasks:
        parts = np.empty(TOTAL_LANES)
        squares = total_sum(parts, norms, 1.0)
        scale = rescale(squares, 1.0)
        if scale != 1:
            squares = total_sum(parts, norms, scale)
        norm[0] = math.sqrt(squares) / scale
        found_inf[0] = 0.0 if squares < np.inf else 1.0


BLOCKS = _kernel_blocks()
