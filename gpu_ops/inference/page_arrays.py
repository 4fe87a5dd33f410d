"""The arrays of a paged cache, and copies between their pages and slots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.core.out_of_memory import typed_memory_errors
from gpu_ops.training.state_arrays import zeros

__all__ = ["PageArrays"]

_COPY_BYTES = 1 << 26  # that are copied at a time, through a temporary array


class PageArrays:
    """Keys and values of all layers in one block of memory: ``shape`` is that of one of them, pages first."""

    @typed_memory_errors("PagedKVCache")
    def __init__(self, nlayers: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> None:
        nbytes = math.prod(shape[1:]) * dtype.itemsize
        word = np.dtype(f"u{math.gcd(nbytes, 8)}")
        self._pages = zeros((2 * nlayers, shape[0], nbytes // word.itemsize), word, device)
        self._page_size = shape[1]
        arrays = tuple(x.view(dtype).reshape(shape) for x in self._pages)
        self.keys, self.values = arrays[:nlayers], arrays[nlayers:]

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy pages of all layers to others."""
        _copy(self._pages, source, target)

    def move(self, source: list[int], target: list[int]) -> None:
        """Move tokens of all layers from slots to others, which may be slots that other ones leave."""
        planes, num_pages, _ = self._pages.shape
        slots = self._pages.view(np.uint8).reshape(planes, num_pages * self._page_size, -1)
        _copy(slots, source, target)


def _copy(rows: Any, source: list[int], target: list[int]) -> None:
    """``rows[:, target] = rows[:, source]``, where all of a plane are read before one is written."""
    if not source:
        return
    planes = max(1, _COPY_BYTES // (len(source) * rows[0, 0].nbytes))
    for start in range(0, rows.shape[0], planes):
        part = rows[start : start + planes]
        part[:, target] = part[:, source]
