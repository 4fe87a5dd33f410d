"""Trits to bytes and back, format by format, in plain NumPy.

``encode(trits, format)`` and ``decode(packed, shape, format)``; the table of formats is
:mod:`ternary_formats`. A decoder is strict by default: it names the first byte that no encoder would
have written. ``strict=False`` returns what the format's published decoder computes from such bytes,
which may lie outside -1..1 (a 2-bit code 3 gives +2).

Scales live apart, except that tq1_0 and tq2_0 hold an fp16 per 256 weights, last in each block.
Of an I2_S tensor in a file only the codes are meant here: its trailer (a float32 scale and 28 bytes
without meaning) is not part of the packed array; pass that scale separately.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .ternary_formats import TernaryFormat, ternary_format

__all__ = ["LayoutError", "block_scales", "decode", "encode"]

Array = npt.NDArray[Any]


class LayoutError(ValueError):
    """Bytes that no encoder of the format writes, or a scale that it cannot hold."""


_POW3 = np.array([1, 3, 9, 27, 81], np.uint8)


def encode(trits: Array, format: str, *, scale: Array | float | None = None) -> Array:
    """Packed uint8 array of ``trits`` (N, K); shape as ``ternary_format(format).packed_shape``.

    ``scale`` goes into formats that embed one (fp16, broadcast to one per 256 weights, 1.0 when
    absent); the others refuse it.
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
        digits = _pad_columns(codes, 5, 1).reshape(n, -1, 5)
        packed = (digits * _POW3).sum(axis=-1, dtype=np.uint8)
    elif format == "hf_bitnet":
        quarters = np.zeros((4 * packed_shape[0], k), np.uint8)  # padding rows are zero bits, as in its files
        quarters[:n] = codes
        packed = _join(quarters.reshape(4, -1, k), axis=0, shifts=(0, 2, 4, 6))
    elif format == "bitnet_gpu":
        tiles = (codes + np.uint8(1)).reshape(n // 16, 16, k // 32, 32).transpose(0, 2, 1, 3)
        packed = _interleave(tiles.reshape(-1, 512)[:, _bitnet_order()])
    elif format == "i2_s":
        packed = _join(codes.reshape(-1, 4, 32), axis=1, shifts=(6, 4, 2, 0))
    elif format == "tq1_0":
        packed = _with_scales(_tq1_encode(codes), n, k, scale)
    elif format == "tq2_0":
        qs = _join(codes.reshape(-1, 2, 4, 32), axis=2, shifts=(0, 2, 4, 6))
        packed = _with_scales(qs.reshape(-1, 64), n, k, scale)
    else:
        packed = _interleave(_pad_columns(codes, 64, 1))
    return np.ascontiguousarray(packed.reshape(packed_shape))


def decode(packed: Array, shape: tuple[int, int], format: str, *, strict: bool = True) -> Array:
    """Trits (N, K) int8 of ``packed``; LayoutError names the format, the fault and its byte."""
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
            _refuse(data > 242, data, format, "is not 5 base-3 digits")
        digits = ((data[..., None] // _POW3) % 3).reshape(n, -1)
        trits = _codes_to_trits(digits, k, format, strict)
    elif format == "hf_bitnet":
        rows = _split(data[None], axis=0, shifts=(0, 2, 4, 6)).reshape(4 * packed_shape[0], k)
        if strict:
            _refuse_padding(rows[n:], 0, format, "rows")
            _refuse_code(rows[:n], 3, format)
        trits = (rows[:n] - np.uint8(1)).view(np.int8)
    elif format == "bitnet_gpu":
        stored = _deinterleave(data.reshape(-1, 128))
        if strict:
            _refuse_code(stored, 0, format)
        tiles = np.empty_like(stored)
        tiles[:, _bitnet_order()] = stored
        codes = tiles.reshape(n // 16, k // 32, 16, 32).transpose(0, 2, 1, 3).reshape(n, k)
        trits = (codes - np.uint8(2)).view(np.int8)
    elif format == "i2_s":
        codes = _split(data.reshape(-1, 1, 32), axis=1, shifts=(6, 4, 2, 0)).reshape(n, k)
        trits = _codes_to_trits(codes, k, format, strict)
    elif format in ("tq1_0", "tq2_0"):
        if strict:
            scales = block_scales(data, shape, format)
            _refuse(~np.isfinite(scales), scales, format, "as the scale of a block is not finite")
        blocks = data.reshape(-1, fmt.unit_bytes)[:, :-2]
        if format == "tq1_0":
            trits = _codes_to_trits(_tq1_decode(blocks, strict).reshape(n, k), k, format, False)
        else:
            codes = _split(blocks.reshape(-1, 2, 1, 32), axis=2, shifts=(0, 2, 4, 6)).reshape(n, k)
            trits = _codes_to_trits(codes, k, format, strict)
    else:
        trits = _codes_to_trits(_deinterleave(data), k, format, strict)
    return np.ascontiguousarray(trits)


def block_scales(packed: Array, shape: tuple[int, int], format: str) -> Array:
    """Embedded scales of tq1_0 or tq2_0 as float32, one per 256 weights: (N, K/256)."""
    fmt: TernaryFormat = ternary_format(format)
    blocks = packed.reshape(-1, fmt.unit_bytes)
    fp16 = np.ascontiguousarray(blocks[:, -2:]).view("<f2")
    return fp16.astype(np.float32).reshape(shape[0], shape[1] // fmt.block_scale)


# --- planes ------------------------------------------------------------------------------------


def _bits(plane: Array) -> Array:
    """(N, K) bool -> (N, 4*ceil(K/32)) bytes; bit e%8 of byte e/8 is bit e%32 of LE word e/32."""
    return np.packbits(_pad_columns(plane, 32, False), axis=1, bitorder="little")


def _planes_decode(data: Array, n: int, k: int, strict: bool) -> Array:
    planes = np.unpackbits(data.reshape(n, 2, -1), axis=2, bitorder="little").view(np.int8)
    plus, minus = planes[:, 0], planes[:, 1]
    if strict:
        both = (plus & minus)[:, :k]
        _refuse(both == 1, both, "planes", "marks a weight that is both plus and minus", show=False)
        _refuse_padding(planes[:, :, k:], 0, "planes", "columns")
    return (plus - minus)[:, :k]


# --- 16-code words: w2 and bitnet_gpu ------------------------------------------------------------


def _interleave(codes: Array) -> Array:
    """(..., 16*g) codes -> (..., 4*g) bytes: code e of 16 sits in byte e%4 at bits 2*(e//4).

    So byte lanes 0..3 of ``word >> 2i & 0x03030303`` are codes 4i..4i+3, in order: a dot product of
    four int8 takes them without a permutation of the activations.
    """
    *lead, k = codes.shape
    return _join(codes.reshape(*lead, k // 16, 4, 4), axis=-2, shifts=(0, 2, 4, 6)).reshape(*lead, k // 4)


def _deinterleave(data: Array) -> Array:
    *lead, size = data.shape
    words = data.reshape(*lead, size // 4, 1, 4)
    return _split(words, axis=-2, shifts=(0, 2, 4, 6)).reshape(*lead, 4 * size)


def _bitnet_order() -> Array:
    """Position in the row-major 16x32 tile of each stored code p = 32*i + j."""
    p = np.arange(512)
    i, j = p // 32, p % 32
    q = 2 * i + j // 16
    row = (q // 16) * 8 + q % 8
    col = j % 16 + 16 * ((q % 16) // 8)
    return np.asarray(row * 32 + col)


# --- tq1_0 ---------------------------------------------------------------------------------------
# Five digits d0..d4 of a byte are the fraction 0.d0d1d2d3d4 in base 3, rounded up to 1/256: then
# (byte * 3^n mod 256) * 3 >> 8 is digit n, without a division. The last four bytes hold four digits.


def _tq1_fraction(digits: Array) -> Array:
    """(..., 5, m) digits -> (..., m) bytes."""
    q = (digits.astype(np.uint16) * _POW3[::-1, None]).sum(axis=-2, dtype=np.uint16)
    rounded_up: Array = (q * np.uint16(256) + np.uint16(242)) // np.uint16(243)
    return rounded_up.astype(np.uint8)


def _tq1_encode(codes: Array) -> Array:
    blocks = codes.reshape(-1, 256)
    high = np.zeros((len(blocks), 5, 4), np.uint8)
    high[:, :4] = blocks[:, 240:].reshape(-1, 4, 4)
    wide, narrow = blocks[:, :160].reshape(-1, 5, 32), blocks[:, 160:240].reshape(-1, 5, 16)
    return np.concatenate([_tq1_fraction(wide), _tq1_fraction(narrow), _tq1_fraction(high)], axis=1)


def _tq1_decode(blocks: Array, strict: bool) -> Array:
    digits = ((blocks[:, None, :] * _POW3[:, None]).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    digits = digits.astype(np.uint8)  # (block, digit, byte)
    if strict:
        low, high = _tq1_fraction(digits), _tq1_fraction(np.where(np.arange(5)[:, None] < 4, digits, 0))
        canonical = np.concatenate([low[:, :48], high[:, 48:]], axis=1)
        _refuse(canonical != blocks, blocks, "tq1_0", "is the code of no digits")
    parts = digits[:, :, :32], digits[:, :, 32:48], digits[:, :4, 48:]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)


def _with_scales(qs: Array, n: int, k: int, scale: Array | float | None) -> Array:
    """Append one fp16 scale to each block of codes."""
    scales = np.asarray(1.0 if scale is None else scale, np.float32)
    scales = scales[:, None] if scales.ndim == 1 else scales
    with np.errstate(over="ignore"):
        fp16 = np.broadcast_to(scales, (n, k // 256)).astype("<f2")
    if not np.isfinite(fp16).all():
        raise LayoutError("scale does not fit fp16, in which this format stores it (at most 65504)")
    return np.concatenate([qs, np.ascontiguousarray(fp16.reshape(-1, 1)).view(np.uint8)], axis=1)


# --- shared --------------------------------------------------------------------------------------

_LENGTH_HINT = {
    "i2_s": "; a tensor from a file ends in 32 more bytes (float32 scale, then filler): cut them off",
}


def _pad_columns(x: Array, multiple: int, value: int) -> Array:
    extra = -x.shape[1] % multiple
    return np.pad(x, ((0, 0), (0, extra)), constant_values=value) if extra else x


def _join(codes: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """Four 2-bit codes along ``axis`` -> one byte."""
    moved = np.moveaxis(codes, axis, 0)
    fields = [code << np.uint8(shift) for code, shift in zip(moved, shifts, strict=True)]
    return np.asarray(fields[0] | fields[1] | fields[2] | fields[3])


def _split(data: Array, *, axis: int, shifts: tuple[int, ...]) -> Array:
    """The inverse of :func:`_join`; ``data`` has length 1 on ``axis``."""
    return np.concatenate([data >> np.uint8(s) & np.uint8(3) for s in shifts], axis=axis)


def _codes_to_trits(codes: Array, k: int, format: str, strict: bool) -> Array:
    if strict:
        _refuse_padding(codes[:, k:], 1, format, "columns")
        _refuse_code(codes[:, :k], 3, format)
    return (codes[:, :k] - np.uint8(1)).view(np.int8)


def _refuse_code(codes: Array, code: int, format: str) -> None:
    bad = codes == code
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise LayoutError(
            f"{format}: code {code} at {where} is no trit ({int(bad.sum())} of {codes.size} such)"
        )


def _refuse_padding(padding: Array, filler: int, format: str, which: str) -> None:
    if (padding != filler).any():
        raise LayoutError(f"{format}: the padding {which} hold something other than {filler}: wrong shape?")


def _refuse(bad: Array, values: Array, format: str, why: str, *, show: bool = True) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        value = f"value {values[where]} at {where} " if show else f"position {where} "
        raise LayoutError(f"{format}: {value}{why} ({int(bad.sum())} such)")
