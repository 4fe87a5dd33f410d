"""tl1 and tl2: the table-lookup layouts of bitnet.cpp, in the tiles of its published kernels.

A matrix (N, K) is cut into tiles of BM rows and BK columns, and a tile into steps of bm rows by `by` columns, so
that a step fills vector registers. (BM, BK, bm) follows from the matrix's shape, by ``tile`` of
:class:`TernaryFormat`. Codes are base-3 numbers of neighbouring weights, c = t + 1:

tl1, by = 256 / bm                     two codes a byte, high nibble first, each 3 c0 + c1: 0..8
    bytes [N/BM][K/BK][BM/bm][BK/by][bm/16][by/4][16 rows]

tl2, bm = 32                           a triple's number 9 t0 + 3 t1 + t2 as a magnitude, 0..13, and a sign
    magnitudes [N/BM][K3/BK][BM/32][BK/6][32 rows]    two a byte, high nibble first; K3 = K rounded down to BK
    signs      [N/BM][K3/BK][BM/32][BK/24][16 words]  word r: rows r and r + 16, 8 triples each; 1 is minus,
                                                      bit 15 - 2i row r of triple i, bit 14 - 2i row r + 16
    pairs      [N/BM][K2/32][BM/32][8][32 rows]       the remaining K2 = K - K3 columns, coded as in tl1
The 32 rows of a step are in the order 0-7, 16-23, 8-15, 24-31, in which AVX2 unpacks bytes.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.weights.ternary_layouts_bits import Array, LayoutError

__all__ = ["Tile", "tl1_decode", "tl1_encode", "tl2_decode", "tl2_encode"]

Tile = tuple[int, int, int]


class _Order:
    """Order in which elements are stored: a matrix reshaped to ``sizes``, then transposed by ``axes``."""

    def __init__(self, sizes: tuple[int, ...], axes: tuple[int, ...]) -> None:
        self.sizes, self.axes = sizes, axes

    def store(self, matrix: Array) -> Array:
        return np.ascontiguousarray(matrix.reshape(self.sizes).transpose(self.axes)).reshape(-1)

    def load(self, stored: Array, rows: int) -> Array:
        moved = stored.reshape([self.sizes[axis] for axis in self.axes])
        return moved.transpose(np.argsort(self.axes)).reshape(rows, -1)


def _tl1_order(n: int, k: int, tile: Tile) -> _Order:
    big_m, big_k, bm = tile
    by = 256 // bm
    sizes = (n // big_m, big_m // bm, bm // 16, 16, k // big_k, big_k // by, by // 4, 2)
    return _Order(sizes, (0, 4, 1, 5, 2, 6, 3, 7))


def _rows32_order(n: int, tiles: int, steps: int, big_m: int) -> _Order:
    """Two codes of each of 32 rows at a time; rows 8 * (2 * a + b) + c in the order b, a, c."""
    return _Order((n // big_m, big_m // 32, 2, 2, 8, tiles, steps, 2), (0, 5, 1, 6, 3, 2, 4, 7))


def _sign_order(n: int, tiles: int, steps: int, big_m: int) -> _Order:
    return _Order((n // big_m, big_m // 32, 2, 16, tiles, steps, 8), (0, 4, 1, 5, 3, 6, 2))


def tl1_encode(codes: Array, tile: Tile) -> Array:
    n, k = codes.shape
    return _nibbles(_tl1_order(n, k, tile).store(_pairs(codes)))


def tl1_decode(data: Array, shape: tuple[int, int], tile: Tile, strict: bool) -> Array:
    """Trits. A lenient decoder reads a number above 8 as two zeros."""
    n, k = shape
    return _pair_trits(_tl1_order(n, k, tile).load(_split_nibbles(data), n), "tl1", strict)


def tl2_encode(codes: Array, tile: Tile) -> Array:
    n, k = codes.shape
    big_m, big_k, _ = tile
    k3 = k - k % big_k
    t = codes[:, :k3].reshape(n, k3 // 3, 3).view(np.int8) - np.int8(1)
    number = 9 * t[..., 0] + 3 * t[..., 1] + t[..., 2]
    magnitudes = _rows32_order(n, k3 // big_k, big_k // 6, big_m).store(np.abs(number).view(np.uint8))
    signs = _sign_order(n, k3 // big_k, big_k // 24, big_m).store(number < 0)
    words = np.packbits(signs.reshape(-1, 16), axis=1).view(">u2").astype("<u2")
    pairs = _rows32_order(n, (k - k3) // 32, 8, big_m).store(_pairs(codes[:, k3:]))
    return np.concatenate([_nibbles(magnitudes), words.reshape(-1).view(np.uint8), _nibbles(pairs)])


def tl2_decode(data: Array, shape: tuple[int, int], tile: Tile, strict: bool) -> Array:
    """Trits. A lenient decoder reads a magnitude of 14 or 15, a pair above 8, and a minus zero as zeros."""
    n, k = shape
    big_m, big_k, _ = tile
    k3 = k - k % big_k
    first, second = n * k3 // 6, n * k3 // 6 + n * k3 // 24
    order = _rows32_order(n, k3 // big_k, big_k // 6, big_m)
    magnitude = order.load(_split_nibbles(data[:first]), n)
    words = np.ascontiguousarray(data[first:second]).view("<u2").astype(">u2")
    bits = np.unpackbits(words.view(np.uint8)).view(np.bool_)
    minus = _sign_order(n, k3 // big_k, big_k // 24, big_m).load(bits, n)
    if strict:
        _refuse_number(magnitude > 13, magnitude, 3, "tl2", "is not a triple of trits")
        _refuse_number(minus & (magnitude == 0), magnitude, 3, "tl2", "has the sign of minus zero")
    number = np.where(minus, -magnitude.view(np.int8), magnitude.view(np.int8))
    number = np.where(magnitude > 13, 0, number) + 13
    triples = np.stack([number // 9, number // 3 % 3, number % 3], axis=-1).astype(np.int8) - np.int8(1)
    rest = _rows32_order(n, (k - k3) // 32, 8, big_m).load(_split_nibbles(data[second:]), n)
    return np.concatenate([triples.reshape(n, k3), _pair_trits(rest, "tl2", strict, k3)], axis=1)


def _pairs(codes: Array) -> Array:
    return np.asarray(3 * codes[:, 0::2] + codes[:, 1::2])


def _pair_trits(numbers: Array, format: str, strict: bool, first: int = 0) -> Array:
    """(N, K/2) numbers of pairs -> (N, K) trits; ``first`` is their first column, for messages."""
    bad = numbers > 8
    if strict:
        _refuse_number(bad, numbers, 2, format, "is not a pair of trits", first)
    numbers = np.where(bad, np.uint8(4), numbers)
    trits = np.stack([numbers // 3, numbers % 3], axis=-1).view(np.int8) - np.int8(1)
    return trits.reshape(len(numbers), 2 * numbers.shape[1])


def _nibbles(codes: Array) -> Array:
    return np.asarray(codes[0::2] << np.uint8(4) | codes[1::2])


def _split_nibbles(data: Array) -> Array:
    return np.stack([data >> np.uint8(4), data & np.uint8(15)], axis=-1).reshape(-1)


def _refuse_number(bad: Array, numbers: Array, width: int, format: str, why: str, first: int = 0) -> None:
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        where = f"of the weights at ({row}, {first + width * column}..)"
        raise LayoutError(f"{format}: number {numbers[row, column]} {where} {why} ({int(bad.sum())} such)")
