"""Bias of scores: what attention's tiles add of it."""

from __future__ import annotations

from gpu_ops.kernels.numba_cpu.codegen.bias import add_square
from gpu_ops.kernels.numba_cpu.codegen.decode_rows import chunk_elements
from gpu_ops.kernels.numba_cpu.codegen.memory import lanes, smaller
from gpu_ops.kernels.numba_cpu.dtype import read_row
from gpu_ops.kernels.numba_cpu.jit import device_function


@device_function
def place_bias(starts, b, n, head, query, bias):
    """The address of each lane's row; beyond, of rows that are asked for in vain."""
    for c in range(len(starts)):
        lane = smaller(c, n - 1)
        starts[c] = read_row(bias, (b, head[lane], query[lane])).ctypes.data


@device_function
def add_bias(s, first, n, lane, n_lanes, factor, starts, bias):
    """On ``n`` keys from ``first`` on; ``lane``: of the block, the first. Leaves scores in base 2."""
    step, wide, ld = lanes(s), chunk_elements(bias), s.shape[1]
    for c in range(0, n_lanes, step):
        for j in range(0, n, wide):
            keys, queries = smaller(wide, n - j), smaller(step, n_lanes - c)
            offset = (first + j) * bias.itemsize
            add_square(s, j * ld + c, ld, keys, queries, starts, lane + c, offset, bias, factor)
