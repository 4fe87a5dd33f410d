"""Pages of a cache: their contents, in plain Python on the host, and their arrays of keys and values.

A page is *used* while tables name it (``refs`` counts them). It is *cached* if none does but its tokens are known, so
that a new sequence that begins with them can take it. Otherwise it is *free*.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from gpu_ops.core.state_arrays import zeros
from gpu_ops.ops.attention.options import QUANTIZED

__all__ = ["Node", "PageArrays", "PagePool"]


class Node:
    """Tokens of a full page after those of its parent, in the tree in which prefixes are looked up.

    A node lives as long as a page, a sequence or a child refers to it: its parent's link to it is weak.
    """

    __slots__ = ("__weakref__", "children", "pages", "parent")

    def __init__(self, parent: Node | None) -> None:
        self.parent = parent
        self.children: WeakValueDictionary[tuple[int, ...], Node] = WeakValueDictionary()
        """Children by their tokens: equal hashes alone are no match."""
        self.pages: dict[int, None] = {}
        """Pages that hold the tokens, oldest first; usually one."""


class PagePool:
    """Pool of pages [first, num_pages), each with the number of table entries that name it."""

    def __init__(self, num_pages: int, page_size: int, first: int = 0) -> None:
        self.page_size, self.first, self.total = page_size, first, num_pages - first
        self.refs = [0] * num_pages
        self.root = Node(None)
        self._nodes: dict[int, Node] = {}  # nodes of the pages that can be found
        self._free = list(range(num_pages - 1, first - 1, -1))  # the last one is used next
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Number of pages that :meth:`take` can return."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of pages used, cached and free."""
        return self.total - self.available, len(self._cached), len(self._free)

    def take(self) -> int:
        """Take a page for new tokens: a free one, else the least recently used of the cached ones."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self.forget(page)
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more table entry that names the page."""
        if not self.refs[page]:
            del self._cached[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """Count one fewer table entry that names the page."""
        self.refs[page] -= 1
        if not self.refs[page]:
            if page in self._nodes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int], pages: int) -> list[Node]:
        """Find the longest chain of nodes with pages that ``tokens`` begins with, of at most ``pages`` pages."""
        chain: list[Node] = []
        node, size = self.root, self.page_size
        for start in range(0, pages * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or not child.pages:
                break
            chain.append(child)
            node = child
        return chain

    def publish(self, page: int, parent: Node, tokens: tuple[int, ...]) -> Node:
        """Register a used page that is full and written: it can be found from now on."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent)
        node.pages[page] = None
        self._nodes[page] = node
        return node

    def forget(self, page: int) -> None:
        """Remove a page that will be written from the tree: it cannot be found any more."""
        node = self._nodes.pop(page, None)
        if node is not None:
            del node.pages[page]

    def forget_all(self) -> None:
        """Remove all pages from the tree. Sequences with tokens continue below the root where they began."""
        self._free += reversed(self._cached)
        self._cached.clear()
        for node in self._nodes.values():
            node.pages.clear()
        self._nodes.clear()
        self.root = Node(None)

    def places(self) -> dict[int, int]:
        """New place of each page with tokens if all move to the front: the same, or that of a free page."""
        pages = [page for page, count in enumerate(self.refs) if count or page in self._cached]
        places = range(self.first, self.first + len(pages))
        holes = iter(sorted(set(places).difference(pages)))
        return {page: page if page in places else next(holes) for page in pages}

    def renumber(self, places: dict[int, int]) -> None:
        """Update page numbers after pages have moved to their :meth:`places`."""
        end = len(self.refs)
        counts = {place: self.refs[page] for page, place in places.items()}
        self.refs = [counts.get(page, 0) for page in range(end)]
        for node in set(self._nodes.values()):  # each once: a node may have several pages
            node.pages = {places[page]: None for page in node.pages}
        self._nodes = {places[page]: node for page, node in self._nodes.items()}
        self._cached = OrderedDict((places[page], None) for page in self._cached)
        self._free = list(range(end - 1, self.first + len(places) - 1, -1))


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
