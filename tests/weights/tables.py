"""Independent implementation of every ternary layout, one element after the other, in Python integers.

No code is shared with the encoders: each function computes the position of the code of element (r, k) of a
matrix (N, K), and the contents of the bytes around it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Trits = npt.NDArray[np.int8]


def planes(t: Trits) -> bytes:
    n, k = t.shape
    words = -(-k // 32)
    out = []
    for r in range(n):
        for expected in (1, -1):
            for word in range(words):
                value = 0
                for bit in range(32):
                    e = 32 * word + bit
                    if e < k and t[r, e] == expected:
                        value |= 1 << bit
                out.append(value.to_bytes(4, "little"))
    return b"".join(out)


def base3(t: Trits) -> bytes:
    n, k = t.shape
    out = bytearray()
    for r in range(n):
        for first in range(0, k, 5):
            digits = [int(t[r, e]) + 1 if e < k else 1 for e in range(first, first + 5)]
            out.append(digits[0] + 3 * digits[1] + 9 * digits[2] + 27 * digits[3] + 81 * digits[4])
    return bytes(out)


def hf_bitnet(t: Trits) -> bytes:
    n, k = t.shape
    rows = -(-n // 4)
    out = bytearray(rows * k)
    for r in range(n):
        for e in range(k):
            out[(r % rows) * k + e] |= (int(t[r, e]) + 1) << (2 * (r // rows))
    return bytes(out)


def bitnet_gpu(t: Trits) -> bytes:
    """Encode by the address arithmetic of the published GEMV kernel: word and purpose of each read of a thread."""
    n, k = t.shape
    assert k % 128 == 0, "the kernel steps through K in 128s"
    out = bytearray(n * k // 4)
    for block in range(n // 16):
        for step in range(k // 128):
            for ty in range(16):
                for tx in range(8):
                    byte = block * 16 * k // 4 + step * 8 * 16 * 16 // 4
                    byte += (tx >> 1) * 32 * 16 // 4 + (ty >> 3) * 64 + (tx & 1) * 32 + (ty & 7) * 4
                    word = 0
                    for e in range(16):  # activation 16*tx + e of this step meets code e
                        code = int(t[block * 16 + ty, step * 128 + 16 * tx + e]) + 2
                        word |= code << ((e % 4) * 8 + (e // 4) * 2)
                    out[byte : byte + 4] = word.to_bytes(4, "little")
    return bytes(out)


def i2_s(t: Trits) -> bytes:
    flat = t.reshape(-1)
    out = bytearray(flat.size // 4)
    for e in range(flat.size):
        out[32 * (e // 128) + e % 32] |= (int(flat[e]) + 1) << (6 - 2 * ((e % 128) // 32))
    return bytes(out)


ONE = np.float16(1).tobytes()


def tq1_0(t: Trits) -> bytes:
    out = bytearray()
    for block in t.reshape(-1, 256):
        for m in range(32):
            out.append(_fraction([int(block[m + 32 * i]) + 1 for i in range(5)]))
        for m in range(16):
            out.append(_fraction([int(block[160 + m + 16 * i]) + 1 for i in range(5)]))
        for m in range(4):
            out.append(_fraction([int(block[240 + m + 4 * i]) + 1 for i in range(4)] + [0]))
        out += ONE
    return bytes(out)


def _fraction(digits: list[int]) -> int:
    q = 0
    for digit in digits:
        q = 3 * q + digit
    return -(-q * 256 // 243)


def tq2_0(t: Trits) -> bytes:
    out = bytearray()
    for block in t.reshape(-1, 256):
        qs = bytearray(64)
        for e in range(256):
            qs[32 * (e // 128) + e % 32] |= (int(block[e]) + 1) << (2 * ((e % 128) // 32))
        out += qs + ONE
    return bytes(out)


def q2_0(t: Trits) -> bytes:
    out = bytearray()
    for block in t.reshape(-1, 64):
        qs = bytearray(16)
        for e in range(64):
            qs[e // 4] |= (int(block[e]) + 1) << (2 * (e % 4))
        out += ONE + qs
    return bytes(out)


def tl1(t: Trits, tile: tuple[int, int, int] = (256, 128, 32)) -> bytes:
    """Encode by the address arithmetic of the published kernel: codes held by each vector register."""
    n, k = t.shape
    big_m, big_k, bm = tile
    by = 256 // bm
    out = bytearray(n * k // 4)
    for r in range(n):
        for e in range(0, k, 2):
            number = 3 * int(t[r, e]) + int(t[r, e + 1]) + 4
            row, column = r % big_m, e % big_k
            byte = (r // big_m) * big_m * k // 4 + (e // big_k) * big_m * big_k // 4  # the tile
            byte += (row // bm) * bm * big_k // 4 + (column // by) * bm * by // 4  # a step: 64 bytes
            vector = (row % bm // 16) * (by // 4) + column % by // 4  # a vector of 16 bytes, one of 4
            byte += 16 * vector + row % 16
            out[byte] |= number << (4 if column % 4 == 0 else 0)
    return bytes(out)


def _lane(row: int) -> int:
    """Byte of an AVX2 register that holds a row of 32: unpacking puts lanes 0-7, 16-23 first, then the others."""
    return {0: 0, 1: 16, 2: 8, 3: 24}[row // 8] + row % 8


def tl2(t: Trits, tile: tuple[int, int] = (256, 96)) -> bytes:
    n, k = t.shape
    big_m, big_k = tile
    k3 = k // big_k * big_k
    codes, signs, pairs = bytearray(n * k3 // 6), bytearray(n * k3 // 24), bytearray(n * (k - k3) // 4)
    for r in range(n):
        row = r % big_m
        for e in range(0, k3, 3):
            number = 9 * int(t[r, e]) + 3 * int(t[r, e + 1]) + int(t[r, e + 2])
            triple = e % big_k // 3
            step = (r // big_m) * (k3 // big_k) + e // big_k  # the tile, then 32 rows of it
            step = step * (big_m // 32) + row // 32
            codes[32 * (step * (big_k // 6) + triple // 2) + _lane(row % 32)] |= abs(number) << (
                0 if triple % 2 else 4
            )
            if number < 0:
                bit = 15 - 2 * (triple % 8) - (row % 32) // 16
                word = 16 * (step * (big_k // 24) + triple // 8) + row % 16
                signs[2 * word + bit // 8] |= 1 << (bit % 8)  # little-endian
        for e in range(k3, k, 2):
            number = 3 * int(t[r, e]) + int(t[r, e + 1]) + 4
            pair = (e - k3) % 32 // 2
            step = ((r // big_m) * ((k - k3) // 32) + (e - k3) // 32) * (big_m // 32) + row // 32
            pairs[32 * (step * 8 + pair // 2) + _lane(row % 32)] |= number << (0 if pair % 2 else 4)
    return bytes(codes + signs + pairs)


def w2(t: Trits) -> bytes:
    n, k = t.shape
    out = []
    for r in range(n):
        for first in range(0, -(-k // 64) * 64, 16):
            word = 0
            for e in range(16):
                code = int(t[r, first + e]) + 1 if first + e < k else 1
                word |= code << ((e % 4) * 8 + (e // 4) * 2)
            out.append(word.to_bytes(4, "little"))
    return b"".join(out)


TABLES: dict[str, Callable[[Trits], bytes]] = {
    f.__name__: f for f in (planes, base3, hf_bitnet, bitnet_gpu, i2_s, tl1, tl2, tq1_0, tq2_0, q2_0, w2)
}

# A shape per format that is not its smallest: several rows, blocks, and padding where there is any.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "planes": [(3, 70), (2, 32), (1, 1)],
    "base3": [(3, 13), (2, 5), (1, 1)],
    "hf_bitnet": [(8, 5), (9, 3), (6, 4), (1, 2), (5, 1)],
    "bitnet_gpu": [(32, 256), (16, 128)],
    "i2_s": [(2, 192), (3, 128)],
    "tl1": [(256, 256), (512, 128)],
    "tl2": [(256, 160), (512, 192), (256, 64)],
    "tq1_0": [(2, 512), (1, 256)],
    "tq2_0": [(2, 512), (1, 256)],
    "q2_0": [(3, 128), (1, 64)],
    "w2": [(3, 130), (2, 64), (1, 1)],
}
