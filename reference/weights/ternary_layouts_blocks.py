"""Block formats with an embedded fp16 scale: tq1_0, tq2_0, q2_0.

tq1_0 has 256 weights per block. The five digits d0..d4 of a byte form the fraction 0.d0d1d2d3d4 in base 3, rounded
up to 1/256, so that ``(byte * 3^n mod 256) * 3 >> 8`` is digit n, without a division. The last four bytes hold four
digits.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.weights.ternary_formats import TernaryFormat
from gpu_ops.reference.weights.ternary_layouts_bits import (
    Array,
    LayoutError,
    codes_to_trits,
    join,
    refuse,
    split,
)

__all__ = ["block_scales", "blocks_decode", "blocks_encode"]

_POW3 = np.array([1, 3, 9, 27, 81], np.uint8)


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
        scales = block_scales(data, shape, fmt)
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


def block_scales(packed: Array, shape: tuple[int, int], fmt: TernaryFormat) -> Array:
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
