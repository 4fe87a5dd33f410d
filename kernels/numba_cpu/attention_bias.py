"""Bias of scores. Its rows are queries, which in S^T are lanes: squares of it are transposed on the way.

bias    | query 0: keys ... |      bfloat16  words of two keys, a square of words, widened where they are added
        | query 1: keys ... |      else      widened first, two squares
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from gpu_ops.kernels.numba_cpu.dtype import as_float32, load, read_row
from gpu_ops.kernels.numba_cpu.ir.carve import as_type
from gpu_ops.kernels.numba_cpu.ir.gemm import copy_transposed
from gpu_ops.kernels.numba_cpu.ir.memory import copy_row, prefetch_row
from gpu_ops.kernels.numba_cpu.ir.scalar import smaller
from gpu_ops.kernels.numba_cpu.jit import overload, uncounted

# Times log2 e still finite: a very negative finite bias is not a mask, a very large one no infinity.
LARGEST, LARGEST_FLOAT64 = 2.3e38, 1.2e308


@uncounted
def add_bias(s, b, first, n, n_lanes, width, head, query, bias, terms):
    """On ``n`` keys from ``first`` on; -inf is a mask."""
    rows, turned = terms.rows, terms.turned
    step, wide = rows.shape
    for c in range(0, n_lanes, step):
        for j in range(0, n, wide):
            keys, queries, here = smaller(wide, n - j), smaller(step, n_lanes - c), first + j
            for i in range(queries):
                source = read_row(bias, (b, head[c + i], query[c + i]))
                take_row(rows, i, source, here, keys)
                prefetch_row(source[smaller(here + 2 * wide, len(source)) :], 1)
            for i in range(queries, step):  # lanes without a query weigh nothing, but for a NaN
                for k in range(wide):
                    rows[i, k] = 0
            turn(turned, rows, keys, bias)
            # a whole vector: LLVM would unroll a length that it knows, element by element
            count = smaller(step, width - c)
            for k in range(keys):
                add_turned(s[j + k, c : c + step], turned, k, count, bias)


def take_row(rows, i, source, first, count):
    """rows[i] = source[first : first + count], widened or in words."""
    raise TypeError("compiled code only")


def turn(turned, rows, count, bias):
    """Transpose rows of ``count`` keys."""
    raise TypeError("compiled code only")


def add_turned(row, turned, k, count, bias):
    """The scores of key k, ``count`` lanes."""
    raise TypeError("compiled code only")


@overload(take_row)
def _take_row(rows, i, source, first, count):
    def words(rows, i, source, first, count):
        copy_row(as_type(rows, np.uint32(0))[i], source[first:], count)

    def floats(rows, i, source, first, count):
        row = rows[i]
        for k in range(count):
            row[k] = load(source, first + k)

    return words if source.dtype == types.uint16 else floats


@overload(turn)
def _turn(turned, rows, count, bias):
    def words(turned, rows, count, bias):
        to, source = as_type(turned, np.uint32(0)), as_type(rows, np.uint32(0))
        copy_transposed(to, 0, rows.shape[0], source, 0, rows.shape[1])

    def floats(turned, rows, count, bias):
        step, wide = rows.shape
        for k in range(0, count, step):
            copy_transposed(turned, k * step, step, rows, k, wide)

    return words if bias.dtype == types.uint16 else floats


@overload(add_turned)
def _add_turned(row, turned, k, count, bias):
    def words(row, turned, k, count, bias):
        more, shift = as_type(turned, np.uint32(0))[k // 2], np.uint32(16 * (1 - k % 2))
        for i in range(count):
            add = as_float32(np.uint32(np.uint32(more[i] << shift) & np.uint32(0xFFFF0000)))
            row[i] = masked_sum(row[i], add)

    def floats(row, turned, k, count, bias):
        more = turned[k]
        for i in range(count):
            row[i] = masked_sum(row[i], more[i])

    return words if bias.dtype == types.uint16 else floats


def largest(score):
    """The largest sum of a score and a bias, both finite."""
    raise TypeError("compiled code only")


@overload(largest)
def _largest(score):
    value = np.float64(LARGEST_FLOAT64) if score == types.float64 else np.float32(LARGEST)
    return lambda score: value


@uncounted
def masked_sum(score, add):
    """-inf from the bias alone, and then also for a NaN score, or from the score alone."""
    total, most = score + add, largest(score)
    total = -most if (total < -most) & (score != -np.inf) else total
    total = most if (total > most) & (total < np.inf) else total
    return total if add != -np.inf else add
