"""Packing and unpacking trits for Numba: the readable twin of ternary_pack.cu.

Parts of the packed lines alternate among blocks. To pack, a thread builds one byte from its codes, trit + 1; to
unpack, it takes the byte apart. Formats differ in which weights a byte holds, and how:

w2         byte b of a line: columns 16 (b / 4) + b % 4 + 4i at bits 2i; padding is 1
hf_bitnet  byte b: column b of rows line + i * lines at bits 2i; padding rows are 0
planes     byte b of the first half of a line: bit e is set if column 8 b + e is +1; of the second half, if it is -1
base3      byte b: columns 5 b + i as digits, the first one lowest; padding is 1
i2_s       byte b: columns 128 (b / 32) + b % 32 + 32 i at bits 6 - 2i
bitnet_gpu byte b: byte b % 4 of word q = b / 4 % 32 of a tile of 16 x 32, codes trit + 2. The word has 16 columns, as
           in w2 (the upper ones if q / 8 is odd), of row q / 16 * 8 + q % 8. A line is 16 rows
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int8, int64, uint8

from gpu_ops.kernels.compiler.jit import NumbaKernel

__all__ = ["THREADS", "pack_kernel", "report", "unpack_kernel"]

THREADS = 128


@cuda.jit(device=True)
def report(flags, bad):
    """Store whether any thread of the block found an error."""
    any_bad = cuda.syncthreads_or(bad)
    if cuda.threadIdx.x == 0:
        flags[cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x] = any_bad


@cuda.jit(device=True)
def _first():
    return cuda.blockIdx.y * THREADS + cuda.threadIdx.x


@cuda.jit(device=True)
def _step():
    return cuda.gridDim.y * THREADS


@cache
def _place(format: str):
    """Device function for row and column of part ``i`` of byte ``b`` of a line."""

    @cuda.jit(device=True)
    def w2(line, b, i, lines):
        return line, 16 * (b // 4) + b % 4 + 4 * i

    @cuda.jit(device=True)
    def hf_bitnet(line, b, i, lines):
        return line + i * lines, b

    @cuda.jit(device=True)
    def base3(line, b, i, lines):
        return line, 5 * b + i

    @cuda.jit(device=True)
    def i2_s(line, b, i, lines):
        return line, 128 * (b // 32) + b % 32 + 32 * (3 - i)

    @cuda.jit(device=True)
    def bitnet_gpu(line, b, i, lines):
        q = b // 4 % 32
        return 16 * line + q // 16 * 8 + q % 8, b // 128 * 32 + q // 8 % 2 * 16 + b % 4 + 4 * i

    return {"w2": w2, "hf_bitnet": hf_bitnet, "base3": base3, "i2_s": i2_s, "bitnet_gpu": bitnet_gpu}[format]


@cache
def pack_kernel(format: str) -> NumbaKernel:
    """``(trits, packed, flags, lines, pitch)``: packed is flat."""
    if format == "planes":
        return _pack_planes()
    place = _place(format)
    base, parts = (3, 5) if format == "base3" else (4, 4)
    beyond, zero = int(format != "hf_bitnet"), 2 if format == "bitnet_gpu" else 1

    def ternary_pack(trits, packed, flags, lines, pitch):
        bad = 0
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(_first(), pitch, _step()):
                number, power = 0, 1
                for i in range(parts):
                    row, column = place(line, b, i, lines)
                    code = beyond
                    if row < trits.shape[0] and column < trits.shape[1]:
                        code = int64(trits[row, column]) + zero
                        if code < zero - 1 or code > zero + 1:
                            bad, code = 1, zero
                    number += code * power
                    power *= base
                packed[line * pitch + b] = uint8(number)
        report(flags, bad)

    return NumbaKernel(ternary_pack, _PACK, f"ternary_pack_{format}")


@cache
def unpack_kernel(format: str) -> NumbaKernel:
    """``(packed, trits, flags, lines, pitch)``: packed is flat."""
    if format == "planes":
        return _unpack_planes()
    place = _place(format)
    base, parts, end = (3, 5, 243) if format == "base3" else (4, 4, 256)
    beyond, zero = int(format != "hf_bitnet"), 2 if format == "bitnet_gpu" else 1

    def ternary_unpack(packed, trits, flags, lines, pitch):
        bad = 0
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(_first(), pitch, _step()):
                number = int64(packed[line * pitch + b])
                if number >= end:
                    bad = 1
                for i in range(parts):
                    row, column = place(line, b, i, lines)
                    code = number % base
                    number //= base
                    if row < trits.shape[0] and column < trits.shape[1]:
                        trits[row, column] = int8(code - zero)
                        if code < zero - 1 or code > zero + 1:
                            bad = 1
                    elif code != beyond:
                        bad = 1
        report(flags, bad)

    return NumbaKernel(ternary_unpack, _UNPACK, f"ternary_unpack_{format}")


def _pack_planes() -> NumbaKernel:
    def ternary_pack_planes(trits, packed, flags, lines, pitch):
        bad, half = 0, pitch // 2
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(_first(), half, _step()):
                plus, minus = 0, 0
                for e in range(8):
                    trit = trits[line, 8 * b + e] if 8 * b + e < trits.shape[1] else int8(0)
                    plus |= int64(trit == 1) << e
                    minus |= int64(trit == -1) << e
                    if trit < -1 or trit > 1:
                        bad = 1
                packed[line * pitch + b] = uint8(plus)
                packed[line * pitch + half + b] = uint8(minus)
        report(flags, bad)

    return NumbaKernel(ternary_pack_planes, _PACK, "ternary_pack_planes")


def _unpack_planes() -> NumbaKernel:
    def ternary_unpack_planes(packed, trits, flags, lines, pitch):
        bad, half = 0, pitch // 2
        for line in range(cuda.blockIdx.x, lines, cuda.gridDim.x):
            for b in range(_first(), half, _step()):
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
        report(flags, bad)

    return NumbaKernel(ternary_unpack_planes, _UNPACK, "ternary_unpack_planes")


_PACK = "void(int8[:, :], uint8[::1], int32[::1], int64, int64)"
_UNPACK = "void(uint8[::1], int8[:, ::1], int32[::1], int64, int64)"
