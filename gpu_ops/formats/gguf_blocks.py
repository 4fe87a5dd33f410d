"""Numbers as GGUF stores them: plain, or as blocks of small integers and their scales.

A quantised weight is ``scale * q``, or ``scale * q - offset`` in the types with an offset, in float32 as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array

__all__ = ["FLOATS", "Blocks"]


@dataclass(frozen=True)
class Blocks:
    """A type of blocks: ``count`` numbers in ``nbytes`` bytes; ``decode`` maps (blocks, bytes) to numbers."""

    count: int
    nbytes: int
    decode: Callable[[Array], Array]


def _plain(dtype: Any) -> Blocks:
    return Blocks(1, np.dtype(dtype).itemsize, lambda data: data.view(dtype))


def _q4_0(data: Array) -> Array:
    """Decode q4_0: float16 scale; 16 bytes, whose low nibbles are the first half."""
    q = np.concatenate([data[:, 2:] & 15, data[:, 2:] >> 4], axis=1)
    return np.asarray(_half(data[:, :2]) * (q.view(np.int8) - np.int8(8)))


def _q8_0(data: Array) -> Array:
    """Decode q8_0: float16 scale; 32 integers."""
    return np.asarray(_half(data[:, :2]) * data[:, 2:].view(np.int8))


def _q4_k(data: Array) -> Array:
    """Decode q4_k: float16 scales of the scales and of the offsets; 8 of each; 128 bytes of nibbles."""
    return _scaled(data[:, :16], _nibbles(data[:, 16:], 32))


def _q5_k(data: Array) -> Array:
    """Decode q5_k: q4_k with 32 bytes before the nibbles, whose bit j is the fifth bit of run j."""
    fifth = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _scaled(data[:, :16], _nibbles(data[:, 48:], 32) | fifth << 4)


def _q6_k(data: Array) -> Array:
    """Decode q6_k: 128 bytes of nibbles, 64 of the two bits above them; 16 scales of 8 bits; their float16 scale."""
    low = _nibbles(data[:, :128], 64).reshape(-1, 2, 4, 32)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    scale = _half(data[:, 208:]) * data[:, 192:208].view(np.int8)
    return np.asarray(scale[..., None] * q).reshape(-1, 256)


def _half(data: Array) -> Array:
    """Read a float16 per block, as float32 (blocks, 1)."""
    half: Array = data.copy().view("<f2").astype(np.float32)
    return half


def _nibbles(data: Array, run: int) -> Array:
    """Low nibbles, then high nibbles of each run of bytes: (blocks, runs, 32)."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1, 32)


def _scaled(head: Array, q: Array) -> Array:
    """Apply 6-bit scales and offsets to runs of 32: four of each are stored in 6 bits, four in 4 bits plus 2."""
    a, b, c = head[:, 4:8], head[:, 8:12], head[:, 12:]
    scale = _half(head[:, :2]) * np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    offset = _half(head[:, 2:4]) * np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return np.asarray(scale[..., None] * q - offset[..., None]).reshape(len(q), 256)


FLOATS = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _plain(ml_dtypes.bfloat16),
    "F64": _plain("<f8"),
    "Q4_0": Blocks(32, 18, _q4_0),
    "Q8_0": Blocks(32, 34, _q8_0),
    "Q4_K": Blocks(256, 144, _q4_k),
    "Q5_K": Blocks(256, 176, _q5_k),
    "Q6_K": Blocks(256, 210, _q6_k),
}
