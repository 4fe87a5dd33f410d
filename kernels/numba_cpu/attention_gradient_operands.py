"""Operands of attention backward's products: floats, or pairs of bfloat16 where the CPU multiplies them.

A product sums along one axis of its operands; of bfloat16, a 32-bit word holds two neighbours along that axis.
``a``, ``b`` ... are elements of a row, each row is one query or key:

    rows            transposed      row pairs (for sums over rows)
    [ab] [cd]       [ab] [ef]       [ae] [bf] [cg] [dh]
    [ef] [gh]       [cd] [gh]

Where tile registers multiply pairs (codegen/tiles.py), keys come in whole tiles, and the row pairs of dS are transposed.

For floats a word is one element: rows and row pairs are then the same array.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.numba_cpu.codegen.arena import arena_array, as_type
from gpu_ops.kernels.numba_cpu.codegen.gemm import in_tiles
from gpu_ops.kernels.numba_cpu.codegen.memory import SKEW, lanes, round_up, smaller
from gpu_ops.kernels.numba_cpu.codegen.numba_api import types
from gpu_ops.kernels.numba_cpu.codegen.tiles import TILE
from gpu_ops.kernels.numba_cpu.dtype import bfloat16_of_float32, like
from gpu_ops.kernels.numba_cpu.jit import constant, device_function, generic, noinline_function


def _pairs(a):
    return a.dtype == types.uint32


@constant
def packing(a):
    """Elements in a word of operand ``a``."""
    return 2 if _pairs(a) else 1


@generic
def scale_floats(a, m, n, factor):
    """a *= factor; pairs of bfloat16 stay as they are."""

    def scale(a, m, n, factor):
        x = like(a[0, 0], factor)
        for i in range(m):
            row = a[i]
            for j in range(n):
                row[j] *= x

    return (lambda a, m, n, factor: None) if _pairs(a) else scale


@generic
def unscaled(a, factor):
    """What is left of ``factor`` to multiply products of operands like ``a`` by."""
    return (lambda a, factor: factor) if _pairs(a) else (lambda a, factor: 1.0)


@generic(refcount=True)
def row_pairs(memory, rows, m, n):
    """Room for the row pairs of ``rows``: m rows of n words in all."""
    if _pairs(rows):
        return lambda memory, rows, m, n: arena_array(memory, (m // 2, n + SKEW), np.uint32(0))
    return lambda memory, rows, m, n: rows


@generic(refcount=True)
def float_tile(memory, a, m, n, wide):
    """``a`` itself if it is of floats, else room for m rows of n of them."""
    if _pairs(a):
        return lambda memory, a, m, n, wide: arena_array(memory, (m, n + SKEW), wide)
    return lambda memory, a, m, n, wide: a


@noinline_function
def _interleave(pairs, rows, n):
    zero = np.uint16(0)
    for i in range(n // 2):
        low, high, to = as_type(rows[2 * i], zero), as_type(rows[2 * i + 1], zero), pairs[i]
        for d in range(smaller(len(low), len(to))):
            to[d] = np.uint32(low[d]) | np.uint32(high[d]) << np.uint32(16)


@generic
def pair_rows(pairs, rows, n):
    """Fill the row pairs of the first n rows (an even number)."""
    return (
        (lambda pairs, rows, n: _interleave(pairs, rows, n)) if _pairs(rows) else lambda pairs, rows, n: None
    )


@noinline_function
def _narrow(target, source, rows, width):
    for j in range(rows):
        row, to = source[j], as_type(target[j], np.uint16(0))
        for c in range(width):
            to[c] = bfloat16_of_float32(row[c])


@generic
def pair_tile(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring queries."""
    return (
        (lambda target, source, rows, width: _narrow(target, source, rows, width))
        if _pairs(target)
        else lambda target, source, rows, width: None
    )


@generic
def pair_tile_keys(target, source, rows, width):
    """Round a (keys, queries) tile to words of neighbouring keys."""

    def narrow(target, source, rows, width):
        for i in range(rows // 2):
            low, high, to = source[2 * i], source[2 * i + 1], target[i]
            for c in range(width):
                first, second = bfloat16_of_float32(low[c]), bfloat16_of_float32(high[c])
                to[c] = np.uint32(first) | np.uint32(second) << np.uint32(16)

    return narrow if _pairs(target) else lambda target, source, rows, width: None


@device_function
def product_words(a, dim):
    """Words of a row of ``dim`` elements that a product takes; they are zero from there on."""
    words = (dim + packing(a) - 1) // packing(a)
    return round_up(words, TILE) if in_tiles(a) else words


@device_function
def row_words(a, dim):
    """Words of a row of ``dim`` elements: whole vectors, so that it can be transposed."""
    return round_up((dim + packing(a) - 1) // packing(a), lanes(a))
