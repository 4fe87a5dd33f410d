"""Tiles of bitnet.cpp for Numba: the readable twin of ternary_pack_tiles.cu, which shows the layouts.

A thread builds one packed byte, or takes one apart. In tl1 and in the pairs of tl2, a byte holds four weights of a
row. In the rest of tl2 it holds six, whose signs are two of the 16 bits that rows r and r + 16 share. For every four
such bytes of a row r < 16, the thread of the first one writes these bits, for both rows.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int8, int64, uint8

from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.weights.numba_cuda.ternary_pack import report

__all__ = ["THREADS", "pack_kernel", "unpack_kernel"]

THREADS = 128


@cuda.jit(device=True)
def _corner(strip, first, rows, columns, step, across):
    """Row and column of the upper left weight of a strip, which is ``step`` rows of a tile of (rows, columns)."""
    steps = rows // step
    tile = strip // steps
    return tile // across * rows + strip % steps * step, first + tile % across * columns


@cuda.jit(device=True)
def _row_of(byte):
    """Row of a byte among 32 rows of tl2: 0-7, 16-23, 8-15, 24-31."""
    order = byte // 8
    return ((order & 1) << 1 | order >> 1) * 8 + byte % 8


@cache
def _four(format: str):
    """Device function for row and first column, within a strip, of its byte ``b``."""

    @cuda.jit(device=True)
    def tl1(b, step):
        row_bytes = 64 // step  # bytes per row in a step
        part = b % 64 // 16
        return part // row_bytes * 16 + b % 16, 4 * (b // 64 * row_bytes + part % row_bytes)

    @cuda.jit(device=True)
    def tl2(b, step):
        return _row_of(b % 32), 4 * (b // 32)

    return tl1 if format == "tl1" else tl2


@cache
def pack_kernel(format: str) -> NumbaKernel:
    """``(trits, packed, flags, first, rows, columns, step, across)``: packed is flat and holds this part only."""
    return _pack_triples() if format == "tl2" else _pack_pairs(format)


@cache
def unpack_kernel(format: str) -> NumbaKernel:
    """``(packed, trits, flags, first, rows, columns, step, across)``."""
    return _unpack_triples() if format == "tl2" else _unpack_pairs(format)


def _pack_pairs(format: str) -> NumbaKernel:
    four = _four(format)

    def ternary_pack(trits, packed, flags, first, rows, columns, step, across):
        bad, per_strip = 0, step * columns // 4
        for at in range(cuda.grid(1), packed.shape[0], cuda.gridsize(1)):
            row, column = _corner(at // per_strip, first, rows, columns, step, across)
            r, c = four(at % per_strip, step)
            number = 0
            for i in range(4):
                code = int64(trits[row + r, column + c + i]) + 1
                if code < 0 or code > 2:
                    bad, code = 1, 1
                number += code * (48 if i == 0 else 16 if i == 1 else 3 if i == 2 else 1)
            packed[at] = uint8(number)
        report(flags, bad)

    return NumbaKernel(ternary_pack, _PACK, f"ternary_pack_{format}")


def _unpack_pairs(format: str) -> NumbaKernel:
    four = _four(format)

    def ternary_unpack(packed, trits, flags, first, rows, columns, step, across):
        bad, per_strip = 0, step * columns // 4
        for at in range(cuda.grid(1), packed.shape[0], cuda.gridsize(1)):
            row, column = _corner(at // per_strip, first, rows, columns, step, across)
            r, c = four(at % per_strip, step)
            for i in range(2):
                number = int64(packed[at]) >> 4 * (1 - i) & 15
                if number > 8:  # not a pair: two zeros
                    bad, number = 1, 4
                trits[row + r, column + c + 2 * i] = int8(number // 3 - 1)
                trits[row + r, column + c + 2 * i + 1] = int8(number % 3 - 1)
        report(flags, bad)

    return NumbaKernel(ternary_unpack, _UNPACK, f"ternary_unpack_{format}")


@cuda.jit(device=True)
def _triple(trits, row, column):
    """``9 t0 + 3 t1 + t2``, and whether one of them is not a trit."""
    number, bad = 0, 0
    for i in range(3):
        trit = int64(trits[row, column + i])
        if trit < -1 or trit > 1:
            bad, trit = 1, 0
        number = 3 * number + trit
    return number, bad


def _pack_triples() -> NumbaKernel:
    def ternary_pack(trits, packed, flags, first, rows, columns, step, across):
        bad, per_strip = 0, 32 * columns // 6
        magnitudes = packed.shape[0] // 5 * 4
        for at in range(cuda.grid(1), magnitudes, cuda.gridsize(1)):
            row, column = _corner(at // per_strip, first, rows, columns, step, across)
            r, c = row + _row_of(at % 32), column + 6 * (at % per_strip // 32)
            high, bad_high = _triple(trits, r, c)
            low, bad_low = _triple(trits, r, c + 3)
            packed[at] = uint8(abs(high) << 4 | abs(low))
            bad |= bad_high | bad_low
            if r - row < 16 and at % per_strip // 32 % 4 == 0:
                signs = 0
                for i in range(8):
                    upper, _ = _triple(trits, r, c + 3 * i)
                    lower, _ = _triple(trits, r + 16, c + 3 * i)
                    signs = signs << 2 | int64(upper < 0) << 1 | int64(lower < 0)
                word = at // per_strip * (columns // 24) + at % per_strip // 128
                packed[magnitudes + 32 * word + 2 * (r - row)] = uint8(signs & 255)
                packed[magnitudes + 32 * word + 2 * (r - row) + 1] = uint8(signs >> 8)
        report(flags, bad)

    return NumbaKernel(ternary_pack, _PACK, "ternary_pack_tl2")


def _unpack_triples() -> NumbaKernel:
    def ternary_unpack(packed, trits, flags, first, rows, columns, step, across):
        bad, per_strip = 0, 32 * columns // 6
        magnitudes = packed.shape[0] // 5 * 4
        for at in range(cuda.grid(1), magnitudes, cuda.gridsize(1)):
            row, column = _corner(at // per_strip, first, rows, columns, step, across)
            r, pair = _row_of(at % 32), at % per_strip // 32
            word = at // per_strip * (columns // 24) + pair // 4
            byte = magnitudes + 32 * word + 2 * (r % 16)
            signs = (int64(packed[byte]) | int64(packed[byte + 1]) << 8) >> (0 if r >= 16 else 1)
            for i in range(2):
                number = int64(packed[at]) >> 4 * (1 - i) & 15
                minus = signs >> 14 - 2 * (pair % 4 * 2 + i) & 1
                if number > 13 or (minus and number == 0):
                    bad = 1
                number = 13 if number > 13 else 13 - number if minus else 13 + number
                c = column + 6 * pair + 3 * i
                trits[row + r, c] = int8(number // 9 - 1)
                trits[row + r, c + 1] = int8(number // 3 % 3 - 1)
                trits[row + r, c + 2] = int8(number % 3 - 1)
        report(flags, bad)

    return NumbaKernel(ternary_unpack, _UNPACK, "ternary_unpack_tl2")


_PACK = "void(int8[:, :], uint8[::1], int32[::1], int64, int64, int64, int64, int64)"
_UNPACK = "void(uint8[::1], int8[:, ::1], int32[::1], int64, int64, int64, int64, int64)"
