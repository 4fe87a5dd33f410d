"""Blocks of GGUF files for Numba: the readable twin of ternary_pack_blocks.cu.

To pack, a thread builds one byte from its codes, trit + 1, and the first thread of a block writes the scale; to
unpack, it takes the byte apart. Formats differ in which weights of a block a byte holds:

tq1_0   byte b < 32: b + 32 i; b < 48: 160 + (b - 32) + 16 i; else 240 + (b - 48) + 4 i, and the fifth digit is 0
tq2_0   byte b: 128 (b / 32) + b % 32 + 32 i at bits 2i
q2_0    byte b: 4 b + i at bits 2i

A byte of tq1_0 is the fraction 0.d0d1d2d3d4 in base 3, rounded up to a multiple of 1 / 256. Multiplied by 3^(n + 1),
its integer part ends in digit n.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int8, int64, uint8

from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.weights.numba_cuda.ternary_pack import report

__all__ = ["THREADS", "pack_kernel", "unpack_kernel"]

THREADS = 128


class _Layout(NamedTuple):
    weights: int
    code_bytes: int
    first: int  # first byte of the codes; the scale precedes or follows them


_LAYOUTS = {"tq1_0": _Layout(256, 52, 0), "tq2_0": _Layout(256, 64, 0), "q2_0": _Layout(64, 16, 2)}


@cache
def _weight(format: str):
    """Device function for the weight in part ``i`` of byte ``b`` of a block."""

    @cuda.jit(device=True)
    def tq1_0(b, i):
        if b < 32:
            return b + 32 * i
        if b < 48:
            return 160 + b - 32 + 16 * i
        return 240 + b - 48 + 4 * i

    @cuda.jit(device=True)
    def tq2_0(b, i):
        return 128 * (b // 32) + b % 32 + 32 * i

    @cuda.jit(device=True)
    def q2_0(b, i):
        return 4 * b + i

    return {"tq1_0": tq1_0, "tq2_0": tq2_0, "q2_0": q2_0}[format]


@cuda.jit(device=True)
def _fraction(number):
    return (number * 256 + 242) // 243


@cache
def pack_kernel(format: str) -> NumbaKernel:
    """``(trits, packed, halves, flags, scale)``: packed is flat; scale is (1 or N, 1 or blocks).

    ``halves`` is packed as float16, for the scales.
    """
    weights, code_bytes, first = _LAYOUTS[format]
    weight, thirds = _weight(format), format == "tq1_0"

    def ternary_pack(trits, packed, halves, flags, scale):
        bad = 0
        per_row = trits.shape[1] // weights
        for at in range(cuda.grid(1), trits.shape[0] * per_row * code_bytes, cuda.gridsize(1)):
            block, b = at // code_bytes, at % code_bytes
            row, across = block // per_row, block % per_row
            parts = 4 if not thirds or b >= 48 else 5
            number = 0
            for i in range(parts):
                code = int64(trits[row, across * weights + weight(b, i)]) + 1
                if code < 0 or code > 2:
                    bad, code = 1, 1
                number = 3 * number + code if thirds else number | code << 2 * i
            if thirds:
                number = _fraction(number if parts == 5 else 3 * number)
            packed[block * (code_bytes + 2) + first + b] = uint8(number)
            if b == 0:
                of = np.float16(scale[min(row, scale.shape[0] - 1), min(across, scale.shape[1] - 1)])
                halves[(block * (code_bytes + 2) + (0 if first else code_bytes)) // 2] = of
                if not abs(float32(of)) <= 65504.0:
                    bad = 1
        report(flags, bad)

    signature = "void(int8[:, :], uint8[::1], float16[::1], int32[::1], float32[:, :])"
    return NumbaKernel(ternary_pack, signature, f"ternary_pack_{format}")


@cache
def unpack_kernel(format: str) -> NumbaKernel:
    """``(packed, trits, flags)``: packed is flat."""
    weights, code_bytes, first = _LAYOUTS[format]
    weight, thirds = _weight(format), format == "tq1_0"
    exponent_at = 1 if first else code_bytes + 1  # the byte that holds a scale's exponent

    def ternary_unpack(packed, trits, flags):
        bad = 0
        per_row = trits.shape[1] // weights
        for at in range(cuda.grid(1), trits.shape[0] * per_row * code_bytes, cuda.gridsize(1)):
            block, b = at // code_bytes, at % code_bytes
            row, column = block // per_row, block % per_row * weights
            byte = int64(packed[block * (code_bytes + 2) + first + b])
            parts = 4 if not thirds or b >= 48 else 5
            number, rest = 0, byte
            for i in range(parts):
                if thirds:
                    code, rest = 3 * rest >> 8, 3 * rest & 255
                    number = 3 * number + code
                else:
                    code, rest = rest & 3, rest >> 2
                trits[row, column + weight(b, i)] = int8(code - 1)
                if code == 3:
                    bad = 1
            if thirds and _fraction(number if parts == 5 else 3 * number) != byte:
                bad = 1
            if b == 0 and packed[block * (code_bytes + 2) + exponent_at] & 0x7C == 0x7C:
                bad = 1
        report(flags, bad)

    return NumbaKernel(
        ternary_unpack, "void(uint8[::1], int8[:, ::1], int32[::1])", f"ternary_unpack_{format}"
    )
