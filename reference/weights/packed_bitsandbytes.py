"""Blocks of bitsandbytes: 64 nibbles and a float32 scale, or many with nested scales (double quantisation), bytes.

    scale = DYNAMIC[byte] * factor + offset        the product and the sum are rounded to float32

``factor`` is the largest magnitude of ``scale - offset`` of :data:`PERIOD` scales, counted through the whole matrix,
and ``offset`` is the mean of all scales. A block stores its factor and the offset, and ends where a factor or a row
ends: it has as many weights as the largest power of two that divides the rows, up to :data:`BLOCK`.
Dettmers et al., "QLoRA", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.reference.weights.packed_encode import Fields

__all__ = [
    "BLOCK",
    "DYNAMIC",
    "PERIOD",
    "RUN",
    "decoded",
    "encode_nested",
    "join",
    "join_nested",
    "nbytes_of",
    "nest",
    "nested",
    "split",
    "split_nested",
]

Array = np.ndarray[Any, Any]

RUN = 64
"""Weights that share a scale."""

PERIOD = 256
"""Scales that share a factor."""

BLOCK = RUN * PERIOD


def _dynamic() -> Array:
    """Values of a sign, a unary power of ten and a linear fraction in eight bits, in ascending order.

    Their bits are those of bitsandbytes where torch has fused multiply-add, as with AVX2."""
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    first, last = np.float32(0.1), np.float32(1)
    for i in range(7):
        steps = 1 << i
        step, index = np.float64((last - first) / np.float32(steps)), np.arange(steps + 1)
        is_low = index < (steps + 1) // 2
        ends = np.where(is_low, first + step * index, last - step * (steps - index)).astype(np.float32)
        means = np.float32(10.0 ** (i - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        values += [means, -means]
    return np.sort(np.concatenate(values))


DYNAMIC = _dynamic()
"""Values of the codes of scales: 8-bit dynamic quantisation. Dettmers et al., 2022, arXiv 2110.02861."""


def nbytes_of(block: int) -> int:
    """Bytes of a block: its factor and its offset, the codes of its scales, and those of its weights."""
    return 8 + block // RUN + block // 2


def split(data: Array) -> Fields:
    return Fields(_high_low(data[:, 4:]), np.ascontiguousarray(data[:, :4]).view("<f4"))


def join(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), _pairs(f.codes)])


def split_nested(data: Array) -> Fields:
    end = 8 + (data.shape[1] - 8) // (1 + RUN // 2)
    return Fields(_high_low(data[:, end:]), np.ascontiguousarray(data[:, :8]).view("<f4"), data[:, 8:end])


def join_nested(f: Fields) -> Array:
    return np.hstack([_bytes(f.scale), f.run_scales, _pairs(f.codes)])


def encode_nested(weights: Array, *, flat: Callable[[Array], Fields]) -> Fields:
    """Fields of all blocks of a matrix. ``flat``: encoder of :data:`RUN` weights with a float32 scale."""
    blocks = join(flat(weights.reshape(-1, RUN)))
    return split_nested(nested(weights.shape[1], blocks))


def _high_low(data: Array) -> Array:
    """Codes of nibbles: the high nibble of each byte comes first."""
    return np.stack([data >> 4, data & 15], axis=2).reshape(-1, 2 * data.shape[1])


def _pairs(codes: Array) -> Array:
    return codes[:, ::2] << 4 | codes[:, 1::2]


def _bytes(scale: Array) -> Array:
    return np.ascontiguousarray(scale, "<f4").view(np.uint8)


def decoded(f: Fields) -> Array:
    """Scales (blocks, runs)."""
    return np.asarray(DYNAMIC[f.run_scales] * f.scale[:, :1] + f.scale[:, 1:])


def nested(block: int, blocks: Array) -> Array:
    """Blocks of ``block`` weights of a whole matrix, from those of :data:`RUN` weights with float32 scales."""
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4").reshape(-1)
    return nest(block, blocks[:, 4:], *_scale_codes(scales))


def _scale_codes(scales: Array) -> tuple[Array, Array, np.float32]:
    """Codes, factors and offset of the float32 scales of a matrix, as in bitsandbytes' device-independent kernel."""
    centred = np.zeros((-(-scales.size // PERIOD), PERIOD), np.float32)
    with np.errstate(all="ignore"):  # scales that are not finite, and a tiny factor's reciprocal
        offset = np.float32(scales.sum(dtype=np.float64) / max(1, scales.size))
        centred.reshape(-1)[: scales.size] = scales - offset
        factors = np.abs(centred).max(axis=1)
        relative = np.clip(centred * (1 / np.maximum(factors, np.float32(1e-38)))[:, None], -1, 1)
    midpoints = (DYNAMIC[:-1] + DYNAMIC[1:]) / np.float32(2)
    codes = np.searchsorted(midpoints, relative.reshape(-1)[: scales.size]).astype(np.uint8)
    return codes, factors, offset


def nest(block: int, nibbles: Array, codes: Array, factors: Array, offset: np.float32) -> Array:
    """Blocks (blocks, bytes) of ``block`` weights. ``nibbles``: bytes of their codes, as in a block; ``codes`` of the
    scales and their ``factors``, one per :data:`PERIOD` of them, in the order of the matrix."""
    count, runs = codes.size * RUN // block, block // RUN
    result = np.empty((count, nbytes_of(block)), np.uint8)
    head = np.empty((count, 2), "<f4")
    head[:, 0], head[:, 1] = factors[np.arange(count) * runs // PERIOD], offset
    result[:, :8], result[:, 8 : 8 + runs] = head.view(np.uint8), codes.reshape(count, runs)
    result[:, 8 + runs :] = nibbles.reshape(count, block // 2)
    return result
