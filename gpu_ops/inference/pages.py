"""Contents of a cache's pages, in plain Python on the host. The arrays are elsewhere.

A page is *used* while tables name it (``refs`` counts them). It is *cached* if none does but its tokens are known, so
that a new sequence that begins with them can take it. Otherwise it is *free*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

__all__ = ["Node", "PagePool"]


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
