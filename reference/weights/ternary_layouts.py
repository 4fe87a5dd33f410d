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

from gpu_ops.reference.weights.ternary_formats import ternary_format
from gpu_ops.reference.weights.ternary_layouts_bits import (
    Array,
    LayoutError,
    codes_to_trits,
    join,
    pad_columns,
    refuse,
    refuse_code,
    refuse_padding,
    split,
)
from gpu_ops.reference.weights.ternary_layouts_blocks import block_scales as _block_scales
from gpu_ops.reference.weights.ternary_layouts_blocks import blocks_decode, blocks_encode
from gpu_ops.reference.weights.ternary_layouts_tl import tl1_decode, tl1_encode, tl2_decode, tl2_encode

__all__ = ["CHUNK", "LayoutError", "block_scales", "chunk_bitmap", "decode", "encode"]

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
    return _block_scales(packed, shape, ternary_format(format))


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


# --- planes ------------------------------------------------------------------------------------


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


# --- 16-code words: w2 and bitnet_gpu ------------------------------------------------------------


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
