"""Which page of a cache holds what: plain Python on the host. The arrays are elsewhere.

A page is *used* while tables name it (``refs`` counts them), *cached* if none does but its tokens are known, so that
a new sequence that begins with them can take it, and *free* otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

__all__ = ["Node", "PagePool"]


class Node:
    """The tokens of a full page after those of its parent, in the tree in which prefixes are looked up.

    A node lives as long as a page, a sequence or a child has it: its parent's link to it is weak.
    """

    __slots__ = ("__weakref__", "children", "pages", "parent")

    def __init__(self, parent: Node | None) -> None:
        self.parent = parent
        self.children: WeakValueDictionary[tuple[int, ...], Node] = WeakValueDictionary()
        """By their tokens themselves: equal hashes alone match nothing."""
        self.pages: dict[int, None] = {}
        """Pages that hold the tokens, oldest first; often one."""


class PagePool:
    """Pages [first, num_pages), each with the number of table entries that name it."""

    def __init__(self, num_pages: int, page_size: int, first: int = 0) -> None:
        self.page_size, self.first, self.total = page_size, first, num_pages - first
        self.refs = [0] * num_pages
        self.root = Node(None)
        self._nodes: dict[int, Node] = {}  # of the pages that can be found
        self._free = list(range(num_pages - 1, first - 1, -1))  # the next one last
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pages used, cached and free."""
        return self.total - self.available, len(self._cached), len(self._free)

    def take(self) -> int:
        """A page for new tokens: a free one, else the least recently used of the cached ones."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self.forget(page)
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more table entry names the page."""
        if not self.refs[page]:
            del self._cached[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One table entry less names the page."""
        self.refs[page] -= 1
        if not self.refs[page]:
            if page in self._nodes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int], pages: int) -> list[Node]:
        """The longest chain of nodes with pages that ``tokens`` begins with, of at most ``pages`` pages."""
        chain: list[Node] = []
        node, size = self.root, self.page_size
        for start in range(0, pages * size, size):
            found = node.children.get(tuple(tokens[start : start + size]))
            if found is None or not found.pages:
                break
            chain.append(found)
            node = found
        return chain

    def publish(self, page: int, parent: Node, tokens: tuple[int, ...]) -> Node:
        """A page in use is full and written: it can be found from now on."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent)
        node.pages[page] = None
        self._nodes[page] = node
        return node

    def forget(self, page: int) -> None:
        """The page is about to be written: it can be found no more."""
        node = self._nodes.pop(page, None)
        if node is not None:
            del node.pages[page]

    def forget_all(self) -> None:
        """No page can be found any more. Sequences that have tokens go on below the root that they began at."""
        self._free += reversed(self._cached)
        self._cached.clear()
        for node in self._nodes.values():
            node.pages.clear()
        self._nodes.clear()
        self.root = Node(None)

    def places(self) -> dict[int, int]:
        """For each page with tokens its place when they are at the front: its own, or one that is free."""
        pages = [page for page, count in enumerate(self.refs) if count or page in self._cached]
        places = range(self.first, self.first + len(pages))
        holes = iter(sorted(set(places).difference(pages)))
        return {page: page if page in places else next(holes) for page in pages}

    def renumber(self, places: dict[int, int]) -> None:
        """The pages have moved to their :meth:`places`."""
        end = len(self.refs)
        counts = {place: self.refs[page] for page, place in places.items()}
        self.refs = [counts.get(page, 0) for page in range(end)]
        for node in set(self._nodes.values()):  # each once: a node may have several pages
            node.pages = {places[page]: None for page in node.pages}
        self._nodes = {places[page]: node for page, node in self._nodes.items()}
        self._cached = OrderedDict((places[page], None) for page in self._cached)
        self._free = list(range(end - 1, self.first + len(places) - 1, -1))
