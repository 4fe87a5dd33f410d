"""Packing of trits to bytes and back, format by format, in plain NumPy.

``encode(trits, format)`` and ``decode(packed, shape, format)``; the table of formats is :mod:`ternary_formats`. A
decoder is strict by default: its error names the first byte that no encoder writes. ``strict=False`` returns what
the format's published decoder computes from such bytes, which may be outside -1..1 (a 2-bit code 3 gives +2).

Scales are separate, except that tq1_0, tq2_0 and q2_0 embed an fp16 per block. For I2_S, TL1 and TL2 tensors of a
file, the packed array is only the codes, without the trailer (a float32 scale and filler); pass that scale
separately.
"""

from __future__ import annotations

import math

import numpy as np

from gpu_ops.reference.precision import Array
from gpu_ops.reference.weights.ternary_formats import TernaryFormat, ternary_format

__all__ = [
    "CHUNK",
    "Array",
    "LayoutError",
    "Tile",
    "block_scales",
    "blocks_decode",
    "blocks_encode",
    "chunk_bitmap",
    "codes_to_trits",
    "decode",
    "encode",
    "join",
    "pad_columns",
    "refuse",
    "refuse_code",
    "refuse_padding",
    "scales_of_blocks",
    "split",
    "tl1_decode",
    "tl1_encode",
    "tl2_decode",
    "tl2_encode",
]

CHUNK = 128  # weights per bit of a chunk bitmap

_LENGTH_HINT = dict.fromkeys(
    ("i2_s", "tl1", "tl2"),
    "; a tensor from a file ends in filler and its float32 scale: cut them off, or read_gguf() does it",
)
_POW3 = np.array([1, 3, 9, 27, 81], np.uint8)


def encode(trits: Array, format: str, *, scale: Array | float | None = None) -> Array:
    """Packed uint8 array of ``trits`` (N, K), shaped as ``ternary_format(format).packed_shape``.

    ``scale`` goes into formats that embed one (fp16, broadcast to the blocks, 1.0 if absent); other formats refuse
    it.
    """
    fmt = ternary_format(format)
    n, k = trits.shape
    packed_shape = fmt.packed_shape((n, k))
    if scale is not None and not fmt.block_scale:
        raise LayoutError(f"format {format!r} keeps scales apart: it has no place for scale=")
    if n * k == 0:
        return np.zeros(packed_shape, np.uint8)
    codes = (trits + np.int8(1)).astype(np.uint8)
    if format == "planes":
        packed = np.concatenate([_bits(trits == 1), _bits(trits == -1)], axis=1)
    elif format == "base3":
        digits = pad_columns(codes, 5, 1).reshape(n, -1, 5)
        packed = (digits * _POW3).sum(axis=-1, dtype=np.uint8)
    elif format == "hf_bitnet":
        quarters = np.zeros(
            (4 * packed_shape[0], k), np.uint8
        )  # padding rows are zero bits, as in the published files
        quarters[:n] = codes
        packed = join(quarters.reshape(4, -1, k), axis=0, shifts=(0, 2, 4, 6))
    elif format == "bitnet_gpu":
        tiles = (codes + np.uint8(1)).reshape(n // 16, 16, k // 32, 32).transpose(0, 2, 1, 3)
        packed = _interleave(tiles.reshape(-1, 512)[:, _bitnet_order()])
    elif format == "i2_s":
        packed = join(codes.reshape(-1, 4, 32), axis=1, shifts=(6, 4, 2, 0))
    elif format == "tl1":
        packed = tl1_encode(codes, fmt.tile((n, k)))
    elif format == "tl2":
        packed = tl2_encode(codes, fmt.tile((n, k)))
    elif fmt.block_scale:
        packed = blocks_encode(codes, fmt, scale)
    else:
        packed = _interleave(pad_columns(codes, 64, 1))
    return np.ascontiguousarray(packed.reshape(packed_shape))


def decode(packed: Array, shape: tuple[int, int], format: str, *, strict: bool = True) -> Array:
    """Trits (N, K) int8 of ``packed``. LayoutError names the format, the fault and its byte."""
    fmt = ternary_format(format)
    n, k = shape
    packed_shape = fmt.packed_shape(shape)
    need = math.prod(packed_shape)
    flat = packed.reshape(-1)
    if flat.size < need or (strict and flat.size != need):
        hint = _LENGTH_HINT.get(format, "") if flat.size > need else ""
        raise LayoutError(f"{format}: shape {tuple(shape)} takes {need} bytes, got {flat.size}{hint}")
    if n * k == 0:
        return np.zeros((n, k), np.int8)
    data = flat[:need].reshape(packed_shape)
    if format == "planes":
        trits = _planes_decode(data, n, k, strict)
    elif format == "base3":
        if strict:
            refuse(data > 242, data, format, "is not 5 base-3 digits")
        digits = ((data[..., None] // _POW3) % 3).reshape(n, -1)
        trits = codes_to_trits(digits, k, format, strict)
    elif format == "hf_bitnet":
        rows = split(data[None], axis=0, shifts=(0, 2, 4, 6)).reshape(4 * packed_shape[0], k)
        if strict:
            refuse_padding(rows[n:], 0, format, "rows")
            refuse_code(rows[:n], 3, format)
        trits = (rows[:n] - np.uint8(1)).view(np.int8)
    elif format == "bitnet_gpu":
        stored = _deinterleave(data.reshape(-1, 128))
        if strict:
            refuse_code(stored, 0, format)
        tiles = np.empty_like(stored)
        tiles[:, _bitnet_order()] = stored
        codes = tiles.reshape(n // 16, k // 32, 16, 32).transpose(0, 2, 1, 3).reshape(n, k)
        trits = (codes - np.uint8(2)).view(np.int8)
    elif format == "i2_s":
        codes = split(data.reshape(-1, 1, 32), axis=1, shifts=(6, 4, 2, 0)).reshape(n, k)
        trits = codes_to_trits(codes, k, format, strict)
    elif format == "tl1":
        trits = tl1_decode(data, shape, fmt.tile(shape), strict)
    elif format == "tl2":
        trits = tl2_decode(data, shape, fmt.tile(shape), strict)
    elif fmt.block_scale:
        trits = blocks_decode(data, shape, fmt, strict)
    else:
        trits = codes_to_trits(_deinterleave(data), k, format, strict)
    return np.ascontiguousarray(trits)


def block_scales(packed: Array, shape: tuple[int, int], format: str) -> Array:
    """Embedded scales of tq1_0, tq2_0 or q2_0 as float32, one per block: (N, K / block)."""
    return scales_of_blocks(packed, shape, ternary_format(format))


def chunk_bitmap(trits: Array) -> Array:
    """Chunks of 128 weights of a row with a nonzero: bit c%8 of byte c/8 is chunk c; (N, ceil(K/1024)) uint8.

    The last chunk of a row may be shorter; bits past it are 0.
    """
    n, k = trits.shape
    starts = np.arange(0, k, CHUNK)
    used = (
        np.add.reduceat(trits != 0, starts, axis=1, dtype=np.int64) > 0 if k else np.zeros((n, 0), np.bool_)
    )
    return np.packbits(used, axis=1, bitorder="little")


# ---- planes ------------------------------------------------------------------------------------------------


def _bits(plane: Array) -> Array:
    """(N, K) bool -> (N, 4*ceil(K/32)) bytes; bit e%8 of byte e/8 is bit e%32 of LE word e/32."""
    return np.packbits(pad_columns(plane, 32, False), axis=1, bitorder="little")


def _planes_decode(data: Array, n: int, k: int, strict: bool) -> Array:
    planes = np.unpackbits(data.reshape(n, 2, -1), axis=2, bitorder="little").view(np.int8)
    plus, minus = planes[:, 0], planes[:, 1]
    if strict:
        both = (plus & minus)[:, :k]
        refuse(both == 1, both, "planes", "marks a weight that is both plus and minus", show=False)
        refuse_padding(planes[:, :, k:], 0, "planes", "columns")
    return (plus - minus)[:, :k]


# ---- 16-code words: w2 and bitnet_gpu ----------------------------------------------------------------------


def _interleave(codes: Array) -> Array:
    """(..., 16*g) codes -> (..., 4*g) bytes: code e of 16 is in byte e%4 at bits 2*(e//4).

    So byte lanes 0..3 of ``word >> 2i & 0x03030303`` are codes 4i..4i+3, in order: a dot product of
    four int8 takes them without a permutation of the activations.
    """
    *lead, k = codes.shape
    return join(codes.reshape(*lead, k // 16, 4, 4), axis=-2, shifts=(0, 2, 4, 6)).reshape(*lead, k // 4)


def _deinterleave(data: Array) -> Array:
    *lead, size = data.shape
    words = data.reshape(*lead, size // 4, 1, 4)
    return split(words, axis=-2, shifts=(0, 2, 4, 6)).reshape(*lead, 4 * size)


def _bitnet_order() -> Array:
    """Position in the row-major 16x32 tile of each stored code p = 32*i + j."""
    p = np.arange(512)
    i, j = p // 32, p % 32
    q = 2 * i + j // 16
    row = (q // 16) * 8 + q % 8
    col = j % 16 + 16 * ((q % 16) // 8)
    return np.asarray(row * 32 + col)


# Block formats with an embedded fp16 scale: tq1_0, tq2_0, q2_0.
#
# tq1_0 has 256 weights per block. The five digits d0..d4 of a byte form the fraction 0.d0d1d2d3d4 in base 3,
# rounded up to 1/256, so that ``(byte * 3^n mod 256) * 3 >> 8`` is digit n, without a division. The last four
# bytes hold four digits.


def blocks_encode(codes: Array, fmt: TernaryFormat, scale: Array | float | None) -> Array:
    """(N, K) codes -> one row of bytes per block, with its scale first or last."""
    n, k = codes.shape
    if fmt.name == "tq1_0":
        fields = _tq1_encode(codes)
    elif fmt.name == "tq2_0":
        fields = join(codes.reshape(-1, 2, 4, 32), axis=2, shifts=(0, 2, 4, 6)).reshape(-1, 64)
    else:
        fields = join(codes.reshape(-1, 16, 4), axis=2, shifts=(0, 2, 4, 6))
    parts = [fields, _scale_bytes(n, k // fmt.block_scale, scale)]
    return np.concatenate(parts[::-1] if fmt.scale_first else parts, axis=1)


def blocks_decode(data: Array, shape: tuple[int, int], fmt: TernaryFormat, strict: bool) -> Array:
    """Trits (N, K); scales are only checked."""
    if strict:
        scales = scales_of_blocks(data, shape, fmt)
        refuse(~np.isfinite(scales), scales, fmt.name, "as the scale of a block is not finite")
    blocks = data.reshape(-1, fmt.unit_bytes)
    blocks = blocks[:, 2:] if fmt.scale_first else blocks[:, :-2]
    if fmt.name == "tq1_0":
        return codes_to_trits(_tq1_decode(blocks, strict).reshape(shape), shape[1], fmt.name, False)
    if fmt.name == "tq2_0":
        codes = split(blocks.reshape(-1, 2, 1, 32), axis=2, shifts=(0, 2, 4, 6))
    else:
        codes = split(blocks[:, :, None], axis=2, shifts=(0, 2, 4, 6))
    return codes_to_trits(codes.reshape(shape), shape[1], fmt.name, strict)


def scales_of_blocks(packed: Array, shape: tuple[int, int], fmt: TernaryFormat) -> Array:
    """Embedded scales as float32, one per block: (N, K / fmt.block_scale)."""
    blocks = packed.reshape(-1, fmt.unit_bytes)
    fp16 = np.ascontiguousarray(blocks[:, :2] if fmt.scale_first else blocks[:, -2:]).view("<f2")
    return fp16.astype(np.float32).reshape(shape[0], shape[1] // fmt.block_scale)


def _scale_bytes(n: int, blocks: int, scale: Array | float | None) -> Array:
    """One fp16 per block, as (N * blocks, 2) bytes."""
    scales = np.asarray(1.0 if scale is None else scale, np.float32)
    scales = scales[:, None] if scales.ndim == 1 else scales
    with np.errstate(over="ignore"):
        fp16 = np.broadcast_to(scales, (n, blocks)).astype("<f2")
    if not np.isfinite(fp16).all():
        raise LayoutError("scale does not fit fp16, in which this format stores it (at most 65504)")
    return np.ascontiguousarray(fp16.reshape(-1, 1)).view(np.uint8)


def _tq1_fraction(digits: Array) -> Array:
    """(..., 5, m) digits -> (..., m) bytes."""
    q = (digits.astype(np.uint16) * _POW3[::-1, None]).sum(axis=-2, dtype=np.uint16)
    rounded_up: Array = (q * np.uint16(256) + np.uint16(242)) // np.uint16(243)
    return rounded_up.astype(np.uint8)


def _tq1_encode(codes: Array) -> Array:
    blocks = codes.reshape(-1, 256)
    high = np.zeros((len(blocks), 5, 4), np.uint8)
    high[:, :4] = blocks[:, 240:].reshape(-1, 4, 4)
    columns, narrow = blocks[:, :160].reshape(-1, 5, 32), blocks[:, 160:240].reshape(-1, 5, 16)
    return np.concatenate([_tq1_fraction(columns), _tq1_fraction(narrow), _tq1_fraction(high)], axis=1)


def _tq1_decode(blocks: Array, strict: bool) -> Array:
    digits = ((blocks[:, None, :] * _POW3[:, None]).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    digits = digits.astype(np.uint8)  # (block, digit, byte)
    if strict:
        low, high = _tq1_fraction(digits), _tq1_fraction(np.where(np.arange(5)[:, None] < 4, digits, 0))
        canonical = np.concatenate([low[:, :48], high[:, 48:]], axis=1)
        refuse(canonical != blocks, blocks, "tq1_0", "is the code of no digits")
    parts = digits[:, :, :32], digits[:, :, 32:48], digits[:, :4, 48:]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


# tl1 and tl2: the table-lookup layouts of bitnet.cpp, in the tiles of its published kernels.
#
# A matrix (N, K) is cut into tiles of BM rows and BK columns, and a tile into steps of bm rows by `by` columns,
# so that a step fills vector registers. (BM, BK, bm) follows from the matrix's shape, by ``tile`` of
# :class:`TernaryFormat`. Codes are base-3 numbers of neighbouring weights, c = t + 1:
#
# tl1, by = 256 / bm                     two codes a byte, high nibble first, each 3 c0 + c1: 0..8
#     bytes [N/BM][K/BK][BM/bm][BK/by][bm/16][by/4][16 rows]
#
# tl2, bm = 32                           a triple's number 9 t0 + 3 t1 + t2 as a magnitude, 0..13, and a sign
#     magnitudes [N/BM][K3/BK][BM/32][BK/6][32 rows]    two a byte, high nibble first; K3 = K rounded down to
# BK
#     signs      [N/BM][K3/BK][BM/32][BK/24][16 words]  word r: rows r and r + 16, 8 triples each; 1 is minus,
#                                                       bit 15 - 2i row r of triple i, bit 14 - 2i row r + 16
#     pairs      [N/BM][K2/32][BM/32][8][32 rows]       the remaining K2 = K - K3 columns, coded as in tl1
# The 32 rows of a step are in the order 0-7, 16-23, 8-15, 24-31, in which AVX2 unpacks bytes.

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


class LayoutError(ValueError):
    """Bytes that no encoder of the format writes, or a scale that the format cannot hold."""


def pad_columns(x: Array, multiple: int, value: int) -> Array:
    extra = -x.shape[1] % multiple
    return np.pad(x, ((0, 0), (0, extra)), constant_values=value) if extra else x


def join(codes: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """Four 2-bit codes along ``axis`` -> one byte."""
    moved = np.moveaxis(codes, axis, 0)
    fields = [code << np.uint8(shift) for code, shift in zip(moved, shifts, strict=True)]
    return np.asarray(fields[0] | fields[1] | fields[2] | fields[3])


def split(data: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """Inverse of :func:`join`; ``data`` has length 1 on ``axis``."""
    return np.concatenate([data >> np.uint8(s) & np.uint8(3) for s in shifts], axis=axis)


def codes_to_trits(codes: Array, k: int, format: str, strict: bool) -> Array:
    if strict:
        refuse_padding(codes[:, k:], 1, format, "columns")
        refuse_code(codes[:, :k], 3, format)
    return (codes[:, :k] - np.uint8(1)).view(np.int8)


def refuse_code(codes: Array, code: int, format: str) -> None:
    bad = codes == code
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise LayoutError(
            f"{format}: code {code} at {where} is no trit ({int(bad.sum())} of {codes.size} such)"
        )


def refuse_padding(padding: Array, filler: int, format: str, which: str) -> None:
    if (padding != filler).any():
        raise LayoutError(f"{format}: the padding {which} hold something other than {filler}: wrong shape?")


def refuse(bad: Array, values: Array, format: str, why: str, *, show: bool = True) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        value = f"value {values[where]} at {where} " if show else f"position {where} "
        raise LayoutError(f"{format}: {value}{why} ({int(bad.sum())} such)")
