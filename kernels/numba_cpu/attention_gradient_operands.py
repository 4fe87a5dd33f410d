"""Operands of attention backward's products: floats, or pairs of bfloat16 where the CPU multiplies them.

A product sums along one axis of its operands; of bfloat16, a 32-bit word holds two neighbours along that axis.
``a``, ``b`` ... are elements of a row, each row is one query or key:

    rows            transposed      row pairs (for sums over rows)
    [ab] [cd]       [ab] [ef]       [ae] [bf] [cg] [dh]
    [ef] [gh]       [cd] [gh]

Where tile registers multiply pairs (ir/tiles.py), keys come in whole tiles, and the row pairs of dS are transposed.

For floats a word is one element: rows and row pairs are then the same array.
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from gpu_ops.kernels.numba_cpu.dtype import bfloat16_of_float32, like
from gpu_ops.kernels.numba_cpu.ir.carve import as_type, carve
from gpu_ops.kernels.numba_cpu.ir.gemm import in_tiles
from gpu_ops.kernels.numba_cpu.ir.memory import SKEW
from gpu_ops.kernels.numba_cpu.ir.scalar import smaller
from gpu_ops.kernels.numba_cpu.ir.target import lanes, round_up
from gpu_ops.kernels.numba_cpu.ir.tiles import TILE
from gpu_ops.kernels.numba_cpu.jit import alone, constant, overload, overload_array, uncounted


def _pairs(a):
    return a.dtype == types.uint32


@constant
def packing(a):
    """Elements in a word of operand ``a``."""
    return 2 if _pairs(a) else 1


def scale_floats(a, m, n, factor):
    """a *= factor; pairs of bfloat16 stay as they are."""
    raise TypeError("compiled code only")


def unscaled(a, factor):
    """What is left of ``factor`` to multiply products of operands like ``a`` by."""
    raise TypeError("compiled code only")


def row_pairs(memory, rows, m, n):
    """Room for the row pairs of ``rows``: m rows of n words in all."""
    raise TypeError("compiled code only")


def float_tile(memory, a, m, n, wide):
    """``a`` itself if it is of floats, else room for m rows of n of them."""
    raise TypeError("compiled code only")


def pair_rows(pairs, rows, n):
    """Fill the row pairs of the first n rows (an even number)."""
    raise TypeError("compiled code only")


def pair_tile(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring queries."""
    raise TypeError("compiled code only")


def pair_tile_keys(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring keys."""
    raise TypeError("compiled code only")


@overload(scale_floats)
def _scale_floats(a, m, n, factor):
    def scale(a, m, n, factor):
        x = like(a[0, 0], factor)
        for i in range(m):
            row = a[i]
            for j in range(n):
                row[j] *= x

    return (lambda a, m, n, factor: None) if _pairs(a) else scale


@overload(unscaled)
def _unscaled(a, factor):
    return (lambda a, factor: factor) if _pairs(a) else (lambda a, factor: 1.0)


@overload_array(row_pairs)
def _row_pairs(memory, rows, m, n):
    if _pairs(rows):
        return lambda memory, rows, m, n: carve(memory, (m // 2, n + SKEW), np.uint32(0))
    return lambda memory, rows, m, n: rows


@overload_array(float_tile)
def _float_tile(memory, a, m, n, wide):
    if _pairs(a):
        return lambda memory, a, m, n, wide: carve(memory, (m, n + SKEW), wide)
    return lambda memory, a, m, n, wide: a


@alone
def _interleave(pairs, rows, n):
    zero = np.uint16(0)
    for i in range(n // 2):
        low, high, to = as_type(rows[2 * i], zero), as_type(rows[2 * i + 1], zero), pairs[i]
        for d in range(smaller(len(low), len(to))):
            to[d] = np.uint32(low[d]) | np.uint32(high[d]) << np.uint32(16)


@overload(pair_rows)
def _pair_rows(pairs, rows, n):
    return (
        (lambda pairs, rows, n: _interleave(pairs, rows, n)) if _pairs(rows) else lambda pairs, rows, n: None
    )


@alone
def _narrow(target, source, rows, width):
    for j in range(rows):
        row, to = source[j], as_type(target[j], np.uint16(0))
        for c in range(width):
            to[c] = bfloat16_of_float32(row[c])


@overload(pair_tile)
def _pair_tile(target, source, rows, width):
    return (
        (lambda target, source, rows, width: _narrow(target, source, rows, width))
        if _pairs(target)
        else lambda target, source, rows, width: None
    )


@overload(pair_tile_keys)
def _pair_tile_keys(target, source, rows, width):
    def narrow(target, source, rows, width):
        for i in range(rows // 2):
            low, high, to = source[2 * i], source[2 * i + 1], target[i]
            for c in range(width):
                first, second = bfloat16_of_float32(low[c]), bfloat16_of_float32(high[c])
                to[c] = np.uint32(first) | np.uint32(second) << np.uint32(16)

    return narrow if _pairs(target) else lambda target, source, rows, width: None


@uncounted
def product_words(a, dim):
    """Words of a row of ``dim`` elements that a product takes; they are zero from there on."""
    words = (dim + packing(a) - 1) // packing(a)
    return round_up(words, TILE) if in_tiles(a) else words


@uncounted
def row_words(a, dim):
    """Words of a row of ``dim`` elements: whole vectors, so that it can be transposed."""
    return round_up((dim + packing(a) - 1) // packing(a), lanes(a))
