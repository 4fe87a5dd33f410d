"""Sums of the rows of a matrix: the readable twin of column_sums.cu and sum.cu.

A thread adds up one column, ``ROWS`` rows at a time: sums of sums lose fewer digits.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "kernel"]

THREADS = 128
ROWS = 64


@cache
def kernel(dtype: str, add: bool) -> NumbaKernel:
    """Kernel that stores the sum of the rows of x in ``total`` (1, cols). ``add``: add to its contents."""
    of = functions(dtype)
    load, number = of.load, of.compute
    signature = f"void({of.element}[:, :], {of.statistics}[:, :])"

    def column_sums(x, total):
        rows, cols = x.shape
        col = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if col >= cols:
            return
        total_sum = number(0.0)
        for first in range(0, rows, ROWS):
            part = number(0.0)
            for row in range(first, min(first + ROWS, rows)):
                part += load(x[row, col])
            total_sum += part
        total[0, col] = total[0, col] + total_sum if add else total_sum

    return NumbaKernel(column_sums, signature, f"column_sums_{dtype}_{'add' if add else 'store'}")
