"""Packing and unpacking trits for Numba: the readable twin of cuda/ternary_pack.cu.

A block takes lines of packed bytes in turn. To pack, a thread makes a byte of the codes, trit + 1, that belong in it;
to unpack, it takes the byte apart. Which weights a byte has, and how, is all that the formats differ in:

w2         byte b of a line: columns 16 (b / 4) + b % 4 + 4i at bits 2i; padding 1
hf_bitnet  byte b: column b of the rows line + i lines at bits 2i; padding rows 0
planes     byte b of the first half of a line: bit e says that column 8 b + e is +1; of the second half, that it is -1
base3      byte b: columns 5 b + i as digits, the first one lowest; padding 1
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int8, int64, uint8

from gpu_ops.kernels.jit import NumbaKernel

__all__ = ["THREADS", "pack_kernel", "unpack_kernel"]

THREADS = 128


@cache
def _place(format: str):
    """A device function: row and column of part ``i`` of byte ``b`` of a line."""

    @cuda.jit(device=True)
    def w2(line, b, i, lines):
        return line, 16 * (b // 4) + b % 4 + 4 * i

    @cuda.jit(device=True)
    def hf_bitnet(line, b, i, lines):
        return line + i * lines, b

    @cuda.jit(device=True)
    def base3(line, b, i, lines):
        return line, 5 * b + i

    return {"w2": w2, "hf_bitnet": hf_bitnet, "base3": base3}[format]


@cache
def pack_kernel(format: str) -> NumbaKernel:
    """``(trits, packed, flags, lines, pitch)``: packed is flat."""
    if format == "planes":
        return _pack_planes()
    place = _place(format)
    base, parts = (3, 5) if format == "base3" else (4, 4)
    beyond = 0 if format == "hf_bitnet" else 1

    def ternary_pack(trits, packed, flags, lines, pitch):
        bad = 0
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(cuda.threadIdx.x, pitch, THREADS):
                number, power = 0, 1
                for i in range(parts):
                    row, column = place(line, b, i, lines)
                    code = beyond
                    if row < trits.shape[0] and column < trits.shape[1]:
                        code = int64(trits[row, column]) + 1
                        if code < 0 or code > 2:
                            bad, code = 1, 1
                    number += code * power
                    power *= base
                packed[line * pitch + b] = uint8(number)
        any_bad = cuda.syncthreads_or(bad)
        if cuda.threadIdx.x == 0:
            flags[cuda.blockIdx.x] = any_bad

    return NumbaKernel(ternary_pack, _PACK, f"ternary_pack_{format}")


@cache
def unpack_kernel(format: str) -> NumbaKernel:
    """``(packed, trits, flags, lines, pitch)``: packed is flat."""
    if format == "planes":
        return _unpack_planes()
    place = _place(format)
    base, parts, end = (3, 5, 243) if format == "base3" else (4, 4, 256)
    beyond = 0 if format == "hf_bitnet" else 1

    def ternary_unpack(packed, trits, flags, lines, pitch):
        bad = 0
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(cuda.threadIdx.x, pitch, THREADS):
                number = int64(packed[line * pitch + b])
                if number >= end:
                    bad = 1
                for i in range(parts):
                    row, column = place(line, b, i, lines)
                    code = number % base
                    number //= base
                    if row < trits.shape[0] and column < trits.shape[1]:
                        trits[row, column] = int8(code - 1)
                        if code == 3:
                            bad = 1
                    elif code != beyond:
                        bad = 1
        any_bad = cuda.syncthreads_or(bad)
        if cuda.threadIdx.x == 0:
            flags[cuda.blockIdx.x] = any_bad

    return NumbaKernel(ternary_unpack, _UNPACK, f"ternary_unpack_{format}")


def _pack_planes() -> NumbaKernel:
    def ternary_pack_planes(trits, packed, flags, lines, pitch):
        bad, half = 0, pitch // 2
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(cuda.threadIdx.x, half, THREADS):
                plus, minus = 0, 0
                for e in range(8):
                    trit = trits[line, 8 * b + e] if 8 * b + e < trits.shape[1] else int8(0)
                    plus |= int64(trit == 1) << e
                    minus |= int64(trit == -1) << e
                    if trit < -1 or trit > 1:
                        bad = 1
                packed[line * pitch + b] = uint8(plus)
                packed[line * pitch + half + b] = uint8(minus)
        any_bad = cuda.syncthreads_or(bad)
        if cuda.threadIdx.x == 0:
            flags[cuda.blockIdx.x] = any_bad

    return NumbaKernel(ternary_pack_planes, _PACK, "ternary_pack_planes")


def _unpack_planes() -> NumbaKernel:
    def ternary_unpack_planes(packed, trits, flags, lines, pitch):
        bad, half = 0, pitch // 2
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(cuda.threadIdx.x, half, THREADS):
                plus = int64(packed[line * pitch + b])
                minus = int64(packed[line * pitch + half + b])
                for e in range(8):
                    positive, negative = plus >> e & 1, minus >> e & 1
                    if 8 * b + e < trits.shape[1]:
                        trits[line, 8 * b + e] = int8(positive - negative)
                        if positive and negative:
                            bad = 1
                    elif positive or negative:
                        bad = 1
        any_bad = cuda.syncthreads_or(bad)
        if cuda.threadIdx.x == 0:
            flags[cuda.blockIdx.x] = any_bad

    return NumbaKernel(ternary_unpack_planes, _UNPACK, "ternary_unpack_planes")


_PACK = "void(int8[:, :], uint8[::1], int32[::1], int64, int64)"
_UNPACK = "void(uint8[::1], int8[:, ::1], int32[::1], int64, int64)"
