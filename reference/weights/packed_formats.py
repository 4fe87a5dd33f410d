"""Block formats of packed weights, one row each: how a block stores its fields, and what the fields mean.

A row of a matrix is a sequence of blocks. Every format stores the same fields, in its own bits:

    weight = (scale * run_scale) * value[code] - (minimum * run_minimum)

``run_scale`` and ``run_minimum`` are small integers for a run of a block's weights; formats without runs
have one scale per block. The products and the difference are rounded to float32 in this order, as in ggml, gguf-py
and bitsandbytes. Formats with zero points, those of GPTQ and AWQ, store no minimum: ``scale * (code - run_minimum)``.
Plain formats have neither scales nor a table: their codes are the bytes of floats. With nested scales
:mod:`packed_bitsandbytes` has the rule that takes the place of ``scale * run_scale``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_ops.reference.weights import packed_bitsandbytes as bitsandbytes
from gpu_ops.reference.weights import packed_encode
from gpu_ops.reference.weights.packed_encode import E2M1, E4M3, FP4, IQ4, NF4, Fields

__all__ = ["FORMATS", "GROUPS", "PLAIN", "Fields", "PackedFormat", "decode", "describe_formats", "encode"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PackedFormat:
    """A block format: ``block`` weights in ``nbytes`` bytes; every ``run`` of them shares a scale."""

    name: str
    block: int
    nbytes: int
    bits: int
    run: int
    values: tuple[float, ...]  # of the codes, exact in float32; empty for plain floats
    split: Callable[[Array], Fields]  # of (blocks, nbytes) uint8
    join: Callable[[Fields], Array]
    layout: str
    encode: Callable[[Array], Fields] | None = None  # of (blocks, block) float32
    nests: str = ""  # format of the same codes with a float32 scale per run; empty if scales are not nested

    @property
    def least_block(self) -> int:
        """Weights whose multiples rows may have."""
        return self.run if self.nests else self.block

    def for_columns(self, cols: int) -> PackedFormat:
        """Format of rows of ``cols`` weights: blocks with nested scales are as large as the rows allow."""
        if not self.nests:
            return self
        block = math.gcd(cols, bitsandbytes.BLOCK)
        return replace(self, block=block, nbytes=bitsandbytes.nbytes_of(block))

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.block

    @property
    def offset(self) -> int | None:
        """Integer that is subtracted from a code; None if a table maps codes to values, or codes are floats."""
        if not self.values:
            return None
        offset = -int(self.values[0])
        return offset if self.values == tuple(range(-offset, len(self.values) - offset)) else None


def decode(format: PackedFormat, blocks: Array) -> Array:
    """Weights of ``blocks`` (blocks, nbytes), float32 (blocks, block)."""
    fields = format.split(blocks)
    if fields.scale is None:
        return np.asarray(fields.codes.view(format.name).astype(np.float32))
    values = np.array(format.values, np.float32)[fields.codes]
    with np.errstate(all="ignore"):  # infinite and NaN scales
        scale = bitsandbytes.decoded(fields) if format.nests else numbers(fields.scale)
        if fields.run_scales is not None and not format.nests:
            scale = scale * fields.run_scales.astype(np.float32)
        if fields.minimum is None and fields.run_minimums is not None:
            values = values - fields.run_minimums.astype(np.float32)
        weights = np.repeat(scale, format.block // scale.shape[1], axis=1) * values
        if fields.minimum is None:
            return weights
        minimum = numbers(fields.minimum)
        if fields.run_minimums is not None:
            minimum = minimum * fields.run_minimums.astype(np.float32)
        return np.asarray(weights - np.repeat(minimum, format.block // minimum.shape[1], axis=1))


def encode(format: PackedFormat, weights: Array) -> Array:
    """Blocks (blocks, nbytes) of float32 ``weights`` (blocks, block), by the encoder of the format's own package."""
    if format.encode is None:
        raise ValueError(f"{format.name} is read, not written")
    return format.join(format.encode(weights))


def numbers(stored: Array) -> Array:
    """Stored scales as float32. A byte is the exponent of a power of two, biased by 128: half of E8M0."""
    if stored.dtype == np.uint8:
        return np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
    return stored.astype(np.float32)


# ---- bits --------------------------------------------------------------------------------------------------


def _half(data: Array) -> Array:
    return np.ascontiguousarray(data).view("<f2")


def _bytes(half: Array) -> Array:
    return np.ascontiguousarray(half, "<f2").view(np.uint8)


def _negated(half: Array) -> Array:
    """Float16 with the sign bit flipped, of a NaN too."""
    return np.asarray((half.view(np.uint16) ^ np.uint16(0x8000)).view(np.float16))


def _signed(data: Array) -> Array:
    """int8 as codes: the code of 0 is 128."""
    return np.asarray(data ^ np.uint8(128))


def _low_high(data: Array, run: int) -> Array:
    """Codes of nibbles: the low nibbles, then the high nibbles of each run of bytes."""
    runs = data.reshape(-1, data.shape[1] // run, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 2 * data.shape[1])


def _nibbles(codes: Array, run: int) -> Array:
    """Inverse of :func:`_low_high` for the low four bits of codes."""
    runs = codes.reshape(-1, codes.shape[1] // (2 * run), 2, run)
    return np.asarray((runs[:, :, 0] & 15 | runs[:, :, 1] << 4).reshape(-1, codes.shape[1] // 2))


def _fifth_bits(data: Array) -> Array:
    """Bits of 4 bytes, as the fifth bits of 32 codes."""
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _pack_fifth_bits(codes: Array) -> Array:
    return np.packbits(codes >> 4 & 1, axis=1, bitorder="little")


def _bit_planes(data: Array, bits: int) -> Array:
    """Codes of runs of bytes: bits j * ``bits`` and up of every byte are run j. data (..., runs, bytes)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray(data[..., None, :] >> shifts & np.uint8((1 << bits) - 1))


def _pack_bit_planes(codes: Array, bits: int) -> Array:
    """Inverse of :func:`_bit_planes`: codes (..., 8 / bits, bytes)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce((codes & np.uint8((1 << bits) - 1)) << shifts, axis=-2))


def _six_bits(data: Array) -> tuple[Array, Array]:
    """8 scales and 8 minimums of 6 bits from 12 bytes: four of each whole, four in 4 bits plus 2."""
    a, b, c = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    return scales.view(np.int8), np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)


def _pack_six_bits(scales: Array, minimums: Array) -> Array:
    s, m = scales.view(np.uint8), minimums
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([first, second, s[:, 4:] & 15 | m[:, 4:] << 4], axis=1)


# ---- formats -----------------------------------------------------------------------------------------------


def _split_q4_0(data: Array) -> Fields:
    return Fields(_low_high(data[:, 2:], 16), _half(data[:, :2]))


def _join_q4_0(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), _nibbles(f.codes, 16)])


def _split_q4_1(data: Array) -> Fields:
    return Fields(_low_high(data[:, 4:], 16), _half(data[:, :2]), minimum=_negated(_half(data[:, 2:4])))


def _join_q4_1(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), _bytes(_negated(f.minimum)), _nibbles(f.codes, 16)])


def _split_q5_0(data: Array) -> Fields:
    return Fields(_low_high(data[:, 6:], 16) | _fifth_bits(data[:, 2:6]), _half(data[:, :2]))


def _join_q5_0(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), _pack_fifth_bits(f.codes), _nibbles(f.codes, 16)])


def _split_q5_1(data: Array) -> Fields:
    codes = _low_high(data[:, 8:], 16) | _fifth_bits(data[:, 4:8])
    return Fields(codes, _half(data[:, :2]), minimum=_negated(_half(data[:, 2:4])))


def _join_q5_1(f: Fields) -> Array:
    head = _bytes(f.scale), _bytes(_negated(f.minimum)), _pack_fifth_bits(f.codes)
    return np.hstack([*head, _nibbles(f.codes, 16)])


def _split_q8_0(data: Array) -> Fields:
    return Fields(_signed(data[:, 2:]), _half(data[:, :2]))


def _join_q8_0(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), _signed(f.codes)])


def _split_mxfp4(data: Array) -> Fields:
    return Fields(_low_high(data[:, 1:], 16), data[:, :1])


def _join_mxfp4(f: Fields) -> Array:
    return np.hstack([f.scale, _nibbles(f.codes, 16)])


def _split_q2_k(data: Array) -> Fields:
    codes = _bit_planes(data[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)
    scales, minimums = (data[:, :16] & 15).view(np.int8), data[:, :16] >> 4
    return Fields(codes, _half(data[:, 80:82]), scales, _half(data[:, 82:]), minimums)


def _join_q2_k(f: Fields) -> Array:
    codes = _pack_bit_planes(f.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.hstack(
        [f.run_scales.view(np.uint8) | f.run_minimums << 4, codes, _bytes(f.scale), _bytes(f.minimum)]
    )


def _split_q3_k(data: Array) -> Fields:
    low = _bit_planes(data[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    codes = (low | _bit_planes(data[:, :32], 1) << 2).reshape(-1, 256)
    low = np.concatenate([data[:, 96:104] & 15, data[:, 96:104] >> 4], axis=1)
    high = _bit_planes(data[:, 104:108], 2).reshape(-1, 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return Fields(codes, _half(data[:, 108:]), scales)


def _join_q3_k(f: Fields) -> Array:
    codes, scales = f.codes.reshape(-1, 8, 32), (f.run_scales + np.int8(32)).view(np.uint8)
    third, low = (
        _pack_bit_planes(codes >> 2, 1),
        _pack_bit_planes(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64),
    )
    nibbles, high = (
        scales[:, :8] & 15 | scales[:, 8:] << 4,
        _pack_bit_planes((scales >> 4).reshape(-1, 4, 4), 2),
    )
    return np.hstack([third, low, nibbles, high, _bytes(f.scale)])


def _split_q4_k(data: Array) -> Fields:
    scales, minimums = _six_bits(data[:, 4:16])
    return Fields(_low_high(data[:, 16:], 32), _half(data[:, :2]), scales, _half(data[:, 2:4]), minimums)


def _join_q4_k(f: Fields) -> Array:
    head = _bytes(f.scale), _bytes(f.minimum), _pack_six_bits(f.run_scales, f.run_minimums)
    return np.hstack([*head, _nibbles(f.codes, 32)])


def _split_q5_k(data: Array) -> Fields:
    codes = _low_high(data[:, 48:], 32) | (_bit_planes(data[:, 16:48], 1) << 4).reshape(-1, 256)
    scales, minimums = _six_bits(data[:, 4:16])
    return Fields(codes, _half(data[:, :2]), scales, _half(data[:, 2:4]), minimums)


def _join_q5_k(f: Fields) -> Array:
    head = _bytes(f.scale), _bytes(f.minimum), _pack_six_bits(f.run_scales, f.run_minimums)
    return np.hstack([*head, _pack_bit_planes(f.codes.reshape(-1, 8, 32) >> 4, 1), _nibbles(f.codes, 32)])


def _split_q6_k(data: Array) -> Fields:
    high = _bit_planes(data[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return Fields(
        _low_high(data[:, :128], 64) | high << 4, _half(data[:, 208:]), data[:, 192:208].view(np.int8)
    )


def _join_q6_k(f: Fields) -> Array:
    high = _pack_bit_planes(f.codes.reshape(-1, 2, 4, 32) >> 4, 2).reshape(-1, 64)
    return np.hstack([_nibbles(f.codes, 64), high, f.run_scales.view(np.uint8), _bytes(f.scale)])


def _split_iq4_xs(data: Array) -> Fields:
    low = np.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = _bit_planes(data[:, 2:4, None], 2).reshape(-1, 8)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return Fields(_low_high(data[:, 8:], 16), _half(data[:, :2]), scales)


def _join_iq4_xs(f: Fields) -> Array:
    scales = (f.run_scales + np.int8(32)).view(np.uint8)
    low = (scales.reshape(-1, 4, 2) & 15) << np.array([0, 4], np.uint8)
    high = _pack_bit_planes((scales >> 4).reshape(-1, 2, 4, 1), 2).reshape(-1, 2)
    return np.hstack([_bytes(f.scale), high, low[..., 0] | low[..., 1], _nibbles(f.codes, 16)])


def _split_tq1_0(data: Array) -> Fields:
    """Bytes are fractions in base 3: five digits, the last four bytes four. Several bytes have the same digits."""
    fractions = data[:, None, :52] * _POWERS[::-1, None]  # modulo 1: a byte of 256ths
    digits = (fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    parts = digits[:, :, :32], digits[:, :, 32:48], digits[:, :4, 48:]
    codes = np.concatenate([part.reshape(len(data), -1) for part in parts], axis=1)
    return Fields(codes, _half(data[:, 52:]))


def _join_tq1_0(f: Fields) -> Array:
    """Lowest of the bytes with the same digits: the one that ggml writes."""
    parts = f.codes[:, :160].reshape(-1, 5, 32), f.codes[:, 160:240].reshape(-1, 5, 16)
    last = np.pad(f.codes[:, 240:].reshape(-1, 4, 4), ((0, 0), (0, 1), (0, 0)))
    digits = np.concatenate([*parts, last], axis=2).astype(np.uint16)
    number = (digits * _POWERS[:, None]).sum(axis=1, dtype=np.uint16)
    fractions = (number * np.uint16(256) + np.uint16(242)) // np.uint16(243)
    return np.hstack([fractions.astype(np.uint8), _bytes(f.scale)])


def _split_tq2_0(data: Array) -> Fields:
    codes = _bit_planes(data[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return Fields(codes, _half(data[:, 64:]))


def _join_tq2_0(f: Fields) -> Array:
    codes = _pack_bit_planes(f.codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.hstack([codes, _bytes(f.scale)])


def _split_group(data: Array, *, bits: int, has_zeros: bool) -> Fields:
    codes = data[:, 4 + has_zeros :]
    scale = np.ascontiguousarray(data[:, :4]).view("<f4")
    zeros = data[:, 4:5] if has_zeros else None
    return Fields(codes if bits == 8 else _low_high(codes, 16), scale, run_minimums=zeros)


def _join_group(f: Fields, *, bits: int) -> Array:
    head = [np.ascontiguousarray(f.scale, "<f4").view(np.uint8)]
    head += [] if f.run_minimums is None else [f.run_minimums]
    return np.hstack([*head, f.codes if bits == 8 else _nibbles(f.codes, 16)])


def _split_plain(data: Array) -> Fields:
    return Fields(np.ascontiguousarray(data), None)


def _join_plain(f: Fields) -> Array:
    return f.codes


def _integers(bits: int, offset: int) -> tuple[float, ...]:
    return tuple(range(-offset, (1 << bits) - offset))


_POWERS = np.array([81, 27, 9, 3, 1], np.uint8)
_TWELFTHS = tuple(float(np.float32(value) / np.float32(12)) for value in FP4)
_SCALES = "f16 scale"
_BOTH = "f16 scale and minimum"

# name, weights of a block, bytes, bits of a code, weights of a run, values, split, join, layout, encoder
# fmt: off
_ROWS = (
    ("q4_0", 32, 18, 4, 32, _integers(4, 8), _split_q4_0, _join_q4_0,
     f"{_SCALES}, nibbles", packed_encode.q4_0),
    ("q4_1", 32, 20, 4, 32, _integers(4, 0), _split_q4_1, _join_q4_1,
     f"{_BOTH}, nibbles", packed_encode.q4_1),
    ("q5_0", 32, 22, 5, 32, _integers(5, 16), _split_q5_0, _join_q5_0,
     f"{_SCALES}, bit 4, nibbles", packed_encode.q5_0),
    ("q5_1", 32, 24, 5, 32, _integers(5, 0), _split_q5_1, _join_q5_1,
     f"{_BOTH}, bit 4, nibbles", packed_encode.q5_1),
    ("q8_0", 32, 34, 8, 32, _integers(8, 128), _split_q8_0, _join_q8_0,
     f"{_SCALES}, int8", packed_encode.q8_0),
    ("iq4_nl", 32, 18, 4, 32, IQ4, _split_q4_0, _join_q4_0,
     f"{_SCALES}, nibbles of a table", packed_encode.iq4_nl),
    ("mxfp4", 32, 17, 4, 32, E2M1, _split_mxfp4, _join_mxfp4,
     "E8M0 scale, nibbles of E2M1", packed_encode.mxfp4),
    ("q2_k", 256, 84, 2, 16, _integers(2, 0), _split_q2_k, _join_q2_k,
     f"{_BOTH}; 16 runs: 4-bit scale and minimum", None),
    ("q3_k", 256, 110, 3, 16, _integers(3, 4), _split_q3_k, _join_q3_k,
     f"{_SCALES}; 16 runs: 6-bit scale", None),
    ("q4_k", 256, 144, 4, 32, _integers(4, 0), _split_q4_k, _join_q4_k,
     f"{_BOTH}; 8 runs: 6-bit scale and minimum", packed_encode.q4_k),
    ("q5_k", 256, 176, 5, 32, _integers(5, 0), _split_q5_k, _join_q5_k,
     f"{_BOTH}; 8 runs: 6-bit scale and minimum", packed_encode.q5_k),
    ("q6_k", 256, 210, 6, 16, _integers(6, 32), _split_q6_k, _join_q6_k,
     f"{_SCALES}; 16 runs: int8 scale", packed_encode.q6_k),
    ("iq4_xs", 256, 136, 4, 32, IQ4, _split_iq4_xs, _join_iq4_xs,
     f"{_SCALES}; 8 runs: 6-bit scale, nibbles of a table", None),
    ("tq1_0", 256, 54, 2, 256, (-1, 0, 1), _split_tq1_0, _join_tq1_0,
     f"{_SCALES}, base-3 digits", packed_encode.ternary),
    ("tq2_0", 256, 66, 2, 256, _integers(2, 1), _split_tq2_0, _join_tq2_0,
     f"{_SCALES}, 2-bit fields", packed_encode.ternary),
    ("nf4", 64, 36, 4, 64, NF4, bitsandbytes.split, bitsandbytes.join,
     "f32 scale, nibbles of quantiles", packed_encode.nf4),
    ("fp4", 64, 36, 4, 64, _TWELFTHS, bitsandbytes.split, bitsandbytes.join,
     "f32 scale, nibbles of 4-bit floats", packed_encode.fp4),
)
# fmt: on

# Group formats: GPTQ's, AWQ's and compressed-tensors' numbers, with each row's groups one after the other.
# name, bits of a code, values, whether blocks have a zero point, layout
_GROUP_ROWS = (
    ("int4", 4, _integers(4, 8), False, "f32 scale, nibbles"),
    ("uint4", 4, _integers(4, 0), True, "f32 scale, zero point, nibbles"),
    ("int8", 8, _integers(8, 128), False, "f32 scale, codes"),
    ("uint8", 8, _integers(8, 0), True, "f32 scale, zero point, codes"),
    ("e4m3", 8, E4M3, False, "f32 scale, 8-bit floats"),
)
GROUPS = (128, 64, 32)
"""Weights that share a scale in formats such as ``int4_g128``."""


def _group_formats() -> Iterator[PackedFormat]:
    for (name, bits, values, has_zeros, layout), group in itertools.product(_GROUP_ROWS, GROUPS):
        yield PackedFormat(
            name=f"{name}_g{group}",
            block=group,
            nbytes=4 + has_zeros + group * bits // 8,
            bits=bits,
            run=group,
            values=values,
            split=functools.partial(_split_group, bits=bits, has_zeros=has_zeros),
            join=functools.partial(_join_group, bits=bits),
            layout=layout,
            encode=packed_encode.GROUP_ENCODERS[name],
        )


# A block of floats is a part of a row: packed, they are in the order in which kernels read them.
PLAIN = tuple(packed_encode.PLAIN_ENCODERS)
"""Formats of floats, which keep weights of that dtype as they are."""
_PLAIN_BLOCK = 32


def _plain_formats() -> Iterator[PackedFormat]:
    for name, encoder in packed_encode.PLAIN_ENCODERS.items():
        itemsize = np.dtype(name).itemsize
        yield PackedFormat(
            name=name,
            block=_PLAIN_BLOCK,
            nbytes=_PLAIN_BLOCK * itemsize,
            bits=8 * itemsize,
            run=_PLAIN_BLOCK,
            values=(),
            split=_split_plain,
            join=_join_plain,
            layout="floats",
            encode=encoder,
        )


def _nested(flat: PackedFormat) -> PackedFormat:
    assert flat.encode is not None
    return replace(
        flat,
        name=f"{flat.name}_nested",
        block=bitsandbytes.BLOCK,
        nbytes=bitsandbytes.nbytes_of(bitsandbytes.BLOCK),
        split=bitsandbytes.split_nested,
        join=bitsandbytes.join_nested,
        layout=f"f32 factor and offset; byte per scale, {flat.layout.partition(', ')[2]}",
        encode=functools.partial(bitsandbytes.encode_nested, flat=flat.encode),
        nests=flat.name,
    )


FORMATS = {row[0]: PackedFormat(*row) for row in _ROWS}
FORMATS |= {format.name: format for format in (_nested(FORMATS["nf4"]), _nested(FORMATS["fp4"]))}
FORMATS |= {format.name: format for format in (*_group_formats(), *_plain_formats())}


def describe_formats() -> str:
    """Return the table of formats, as Markdown."""
    lines = [
        "| format | bits per weight | block | scales every | layout | written |",
        "|---|---|---|---|---|---|",
    ]
    for f in FORMATS.values():
        scales, written = f.run if f.values else "-", "yes" if f.encode else "no"
        block = f"{f.least_block} to {f.block}" if f.nests else f.block
        lines.append(f"| {f.name} | {f.bits_per_weight:.4g} | {block} | {scales} | {f.layout} | {written} |")
    return "\n".join(lines)
