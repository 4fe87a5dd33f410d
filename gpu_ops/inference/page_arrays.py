"""Memory of a paged cache: keys and values of all layers in one array, so that copies of pages take few steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core.state_arrays import zeros
from gpu_ops.ops.attention.quantized_pages import QUANTIZED

__all__ = ["PageArrays"]

_COPY_BYTES = 1 << 26  # bytes to copy at a time, through a temporary array
_ALIGNMENT = 16  # alignment in bytes of quantized pages and their scales: CUDA C++ kernels read 16 at a time


@dataclass(frozen=True)
class PageArrays:
    """Arrays of planes; a plane is the keys or the values of a layer."""

    words: Any
    """All bytes, for copies: (planes, num_pages, words of a page)."""
    numbers: tuple[Any, ...]
    """Numbers of each plane, (num_pages, page_size, nheads_kv, head_dim)."""
    scales: tuple[Any, ...]
    """Scales of each plane, float32 (num_pages, page_size, nheads_kv), after the numbers of each page; or None."""
    parts: tuple[tuple[int, int], ...]
    """First byte and number of bytes in a page of the numbers, and of the scales if any. Each has rows."""

    @classmethod
    def zeros(
        cls, planes: int, num_pages: int, page: tuple[int, int, int], dtype: np.dtype[Any], device: str
    ) -> PageArrays:
        """Allocate zeros. ``page``: its size, nheads_kv and head_dim."""
        quantized, count, rows = dtype in QUANTIZED.values(), math.prod(page), math.prod(page[:-1])
        start = nbytes = count * dtype.itemsize
        if quantized:
            start += -start % _ALIGNMENT
            nbytes = start + 4 * rows
            nbytes += -nbytes % _ALIGNMENT
        word = np.dtype(f"u{math.gcd(nbytes, 8)}")
        words = zeros((planes, num_pages, nbytes // word.itemsize), word, device)
        stored = np.dtype(np.uint8) if dtype == QUANTIZED["float8_e4m3fn"] else dtype
        numbers = tuple(x.view(stored)[:, :count].reshape(num_pages, *page) for x in words)
        if not quantized:
            return cls(words, numbers, (None,) * planes, ((0, nbytes),))
        place = slice(start // 4, start // 4 + rows)
        scales = (x.view(np.float32)[:, place].reshape(num_pages, *page[:-1]) for x in words)
        return cls(words, numbers, tuple(scales), ((0, count * dtype.itemsize), (start, 4 * rows)))

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy pages of all layers, with their scales, to other pages."""
        if not source:
            return
        nbytes = len(source) * self.words[0, 0].nbytes
        planes = max(1, _COPY_BYTES // nbytes)
        for start in range(0, self.words.shape[0], planes):
            part = self.words[start : start + planes]
            part[:, target] = part[:, source]

    def move(self, source: list[int], target: list[int]) -> None:
        """Move tokens of all layers to other slots. All are read first: a slot may be in both lists."""
        if not source:
            return
        size, octets = self.numbers[0].shape[1], self.words.view(np.uint8)
        (from_page, from_row), (to_page, to_row) = (np.divmod(slots, size) for slots in (source, target))
        for start, nbytes in self.parts:
            rows = octets[:, :, start : start + nbytes].reshape(*octets.shape[:2], size, -1)
            rows[:, to_page, to_row] = rows[:, from_page, from_row]
