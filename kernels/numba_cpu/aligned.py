"""Arrays that begin on a cache line: a vector that straddles two lines costs twice, a row of a tile register too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.memory_pool import POOL

Array = np.ndarray[Any, Any]

SMALL_BYTES = 1 << 12  # to look for a cache line takes 1 us


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """Like np.empty, on a line if it is large; what is larger than that gets memory that was used before."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= SMALL_BYTES:
        return np.empty(shape, dtype)
    raw = POOL.empty((size + 64,), np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
