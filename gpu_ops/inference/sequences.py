"""Sequences of a paged cache on the host: their tokens, their tables of pages, and the plan of a step."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops.errors import DTypeError, OptionError, OutOfPages, ShapeError, StateError
from gpu_ops.inference.pages import Node, PagePool

__all__ = ["CacheSequences", "CacheStats", "Sequence", "StepPlan", "requests", "token_ids"]

_LAST_ID = 2**31 - 1


@dataclass(frozen=True)
class CacheStats:
    """Counts of pages, and of tokens that prefixes saved. ``used + cached + free == total``."""

    total: int
    used: int
    """Pages in the table of one or several sequences."""
    cached: int
    """Pages in no table, kept until needed for sequences that begin with their tokens."""
    free: int
    tokens_added: int
    """Tokens passed to ``add``."""
    tokens_hit: int
    """Number of those that were in the cache."""


@dataclass
class Sequence:
    """One sequence. Its table has an entry for each page of tokens; those behind the window name the null page."""

    root: Node
    """Root of the tree in which its prefixes are found."""
    tokens: list[int] = field(default_factory=list)
    pages: array[int] = field(default_factory=lambda: array("i"))
    nodes: list[Node] = field(default_factory=list)
    """Nodes of its full pages whose keys and values are written."""
    gone: int = 0
    """End of the pages from ``keep`` on that are behind the window."""


@dataclass
class StepPlan:
    """Plan of a step: nothing has changed yet."""

    tokens: dict[int, list[int]]
    """New tokens, by handle."""
    starts: list[int]
    """Number of tokens of each sequence before the step."""
    gone: list[int]
    copied: list[int]
    """Handles whose last page is shared: they get a copy of it."""
    width: int
    """Number of pages of the longest sequence."""
    needed: int


class CacheSequences:
    """All sequences of a cache over one pool of pages."""

    def __init__(self, pool: PagePool, window: int, keep_pages: int) -> None:
        self.pool, self.window, self.keep_pages = pool, window, keep_pages
        self.alive: dict[int, Sequence] = {}
        self.open: dict[int, int] | None = None
        """Lengths before the reserved and uncommitted step, by handle."""
        self.parents: dict[int, list[int]] = {}
        """Parents of the new tokens of that step, for the sequences with drafts."""
        self.asked = self.hits = 0
        self._next = 0
        self._weights: weakref.ref[Any] | None = None  # weights whose prefixes are found
        self._key: Any = None

    def most_pages(self, length: int) -> int:
        pages = -(-length // self.pool.page_size)
        if self.window < 0:
            return pages
        return min(pages, self.keep_pages + 1 - (-self.window // self.pool.page_size))

    @property
    def stats(self) -> CacheStats:
        used, cached, free = self.pool.counts
        return CacheStats(self.pool.total, used, cached, free, self.asked, self.hits)

    def get(self, op: str, handle: Any) -> Sequence:
        if isinstance(handle, bool) or not isinstance(handle, (int, np.integer)):
            raise OptionError(
                f"{op}: a sequence's handle is an integer that add() returned, got {type(handle).__name__} {handle!r}"
            )
        sequence = self.alive.get(int(handle))
        if sequence is None:
            known = ", ".join(map(str, list(self.alive)[:8])) + ", ..." * (len(self.alive) > 8)
            raise OptionError(f"{op}: there is no sequence {handle}; there are: {known or 'none'}")
        return sequence

    def use_weights(self, weights: Any, key: Any) -> None:
        """Drop the prefixes unless the previous call had the same object and an equal key."""
        if self._weights is None or self._weights() is not weights or self._key != key:
            self.pool.forget_all()
            self._weights, self._key = weakref.ref(weights), key

    def check_closed(self, op: str) -> None:
        if self.open is not None:
            raise StateError(
                f"{op}: a step is open; call commit() once the model has run it, or rollback() if it will not"
            )

    def add(self, tokens: list[int]) -> int:
        """Add a sequence, with the pages of a known prefix. At least one token is left to compute."""
        size = self.pool.page_size
        nodes = self.pool.find(tokens, max(len(tokens) - 1, 0) // size)
        pages = array("i", (next(iter(node.pages)) for node in nodes))
        for page in pages:
            self.pool.hold(page)
        known = tokens[: len(nodes) * size]
        self.asked += len(tokens)
        self.hits += len(known)
        return self._insert(Sequence(self.pool.root, known, pages, nodes, self.keep_pages))

    def fork(self, sequence: Sequence) -> int:
        for page in self._resident(sequence):
            self.pool.hold(page)
        s = sequence
        return self._insert(Sequence(s.root, s.tokens.copy(), s.pages[:], s.nodes.copy(), s.gone))

    def free(self, handle: int) -> None:
        self._cut(self.alive.pop(handle), 0)

    def trim(self, sequence: Sequence, length: int) -> None:
        size, keep = self.pool.page_size, self.keep_pages
        first, end = max(length - self.window, 0) // size, -(-length // size)
        if max(first, keep) < min(sequence.gone, end):
            raise OptionError(
                f"trim: the next token after {length} would see keys that have left the window; the length has to be "
                f"at least {sequence.gone * size + self.window}, or at most {keep * size}"
            )
        self._cut(sequence, length)

    def plan(self, tokens: dict[int, list[int]]) -> StepPlan:
        """Plan a step with these new tokens; OutOfPages if the pool has too few."""
        size, refs = self.pool.page_size, self.pool.refs
        chosen = [self.alive[handle] for handle in tokens]
        gone = [self._gone_after(s) for s in chosen]
        dropped = Counter(page for s, end in zip(chosen, gone, strict=True) for page in s.pages[s.gone : end])
        freed = sum(refs[page] == count for page, count in dropped.items())
        needed, width, copied = 0, 0, []
        for (handle, new), s in zip(tokens.items(), chosen, strict=True):
            used, end = len(s.tokens), -(-(len(s.tokens) + len(new)) // size)
            needed += end - len(s.pages)
            width = max(width, end)
            if used % size and refs[last := s.pages[-1]] - dropped[last] > 1:
                dropped[last] += 1  # the last of those that share the page may keep it
                copied.append(handle)
        needed += len(copied)
        if needed > self.pool.available + freed:
            self._out_of_pages(needed, self.pool.available + freed)
        return StepPlan(tokens, [len(s.tokens) for s in chosen], gone, copied, width, needed)

    def evict(self, plan: StepPlan) -> None:
        """Return the pages that no token sees any more. A repeated call does no harm."""
        for handle, end in zip(plan.tokens, plan.gone, strict=True):
            s = self.alive[handle]
            for i in range(s.gone, end):
                self.pool.drop(s.pages[i])
                s.pages[i] = 0
            s.gone = end

    def extend(self, plan: StepPlan, copy: Callable[[list[int], list[int]], None]) -> None:
        """Give every sequence its new tokens and pages. ``copy`` copies the contents of shared pages to new ones."""
        size, pool = self.pool.page_size, self.pool
        shared = [self.alive[handle] for handle in plan.copied]
        new_pages = [pool.take() for _ in shared]
        try:
            copy([s.pages[-1] for s in shared], new_pages)
        except BaseException:
            for page in new_pages:
                pool.drop(page)
            raise
        for s, page in zip(shared, new_pages, strict=True):
            pool.drop(s.pages[-1])
            s.pages[-1] = page
        for handle, new in plan.tokens.items():
            s = self.alive[handle]
            if len(s.tokens) % size:  # after trim() it may be a page that was full and can be found
                pool.forget(s.pages[-1])
            s.tokens += new
            s.pages.extend([pool.take() for _ in range(-(-len(s.tokens) // size) - len(s.pages))])
        self.open = dict(zip(plan.tokens, plan.starts, strict=True))

    def keep(self, paths: Mapping[int, list[int]]) -> None:
        """Keep only the tokens on the paths of these trees; their keys and values are now adjacent."""
        for handle, path in paths.items():
            s, start = self.alive[handle], self.opened("accept")[handle]
            s.tokens[start : start + len(path)] = [s.tokens[start + node] for node in path]
            self._cut(s, start + len(path))
        self.parents = {}

    def commit(self) -> None:
        """Commit the open step, whose tokens are written: their full pages can be found."""
        size = self.pool.page_size
        for handle in self.opened("commit"):
            s = self.alive[handle]
            for i in range(len(s.nodes), len(s.tokens) // size):
                parent = s.nodes[-1] if s.nodes else s.root
                s.nodes.append(
                    self.pool.publish(s.pages[i], parent, tuple(s.tokens[i * size : (i + 1) * size]))
                )
        self.open = None

    def rollback(self) -> None:
        """Remove the tokens of the open step."""
        for handle, length in self.opened("rollback").items():
            self._cut(self.alive[handle], length)
        self.open, self.parents = None, {}

    def renumber(self, places: dict[int, int]) -> None:
        """Update tables after pages have moved to these places."""
        self.pool.renumber(places)
        for s in self.alive.values():
            s.pages = array("i", (places.get(page, page) for page in s.pages))  # the null page stays

    def csr(self, chosen: list[Sequence]) -> tuple[Any, Any, Any]:
        """Tables of these sequences: the start of each one's pages, the pages, and the tokens in each last page."""
        size = self.pool.page_size
        indptr = np.zeros(len(chosen) + 1, np.int32)
        np.cumsum([len(s.pages) for s in chosen], out=indptr[1:])
        indices = np.array([page for s in chosen for page in s.pages], np.int32)
        last = np.array([len(s.tokens) - (len(s.pages) - bool(s.pages)) * size for s in chosen], np.int32)
        return indptr, indices, last

    def opened(self, op: str) -> dict[int, int]:
        if self.open is None:
            raise StateError(f"{op}: no step is open; reserve() begins one")
        return self.open

    def _insert(self, sequence: Sequence) -> int:
        handle, self._next = self._next, self._next + 1
        self.alive[handle] = sequence
        return handle

    def _resident(self, s: Sequence) -> array[int]:
        """Pages of a sequence except those behind the window."""
        return s.pages[: self.keep_pages] + s.pages[s.gone :]

    def _gone_after(self, s: Sequence) -> int:
        """End of the pages whose keys no token after the last one sees."""
        behind = (len(s.tokens) - self.window) // self.pool.page_size if self.window >= 0 else 0
        return max(s.gone, behind)

    def _cut(self, s: Sequence, length: int) -> None:
        """Shorten a sequence. Its last pages are reused first, so that prefixes stay the longest."""
        size = self.pool.page_size
        end = -(-length // size)
        for i in range(len(s.pages) - 1, end - 1, -1):
            if i < self.keep_pages or i >= s.gone:
                self.pool.drop(s.pages[i])
        del s.tokens[length:], s.pages[end:], s.nodes[length // size :]
        s.gone = max(self.keep_pages, min(s.gone, end))

    def _out_of_pages(self, needed: int, free: int) -> None:
        held = {handle: len(self._resident(s)) for handle, s in self.alive.items()}
        held = dict(sorted(held.items(), key=lambda item: (-item[1], item[0])))
        holders = ", ".join(f"sequence {handle} holds {n}" for handle, n in list(held.items())[:4])
        raise OutOfPages(
            f"reserve: the step needs {needed} pages of {self.pool.page_size} tokens, and {free} of "
            f"{self.pool.total} can be had; {holders}{', ...' * (len(held) > 4)}. Free or trim sequences, give fewer "
            "tokens at a time, or make the cache with a larger num_pages",
            needed,
            free,
            held,
        )


def token_ids(op: str, tokens: Any) -> list[int]:
    """Token ids as a list of Python integers."""
    if isinstance(tokens, (list, tuple)) and all(type(t) is int for t in tokens):
        ids = list(tokens)
    else:
        try:
            x = np.asarray(tokens)
        except (TypeError, ValueError) as error:  # CuPy's arrays, for example
            raise DTypeError(
                f"{op}: token ids are neither a list of integers nor an array in host memory: {error}"
            ) from error
        if x.ndim != 1:
            raise ShapeError(
                f"{op}: token ids have shape {x.shape}, expected one axis, such as [5] or [3, 1, 4]"
            )
        if x.dtype.kind not in "iu" and x.size:
            raise DTypeError(f"{op}: token ids are {x.dtype}, expected integers")
        ids = x.astype(np.int64).tolist()
    if ids and not 0 <= min(ids) <= max(ids) <= _LAST_ID:
        raise OptionError(f"{op}: token ids lie in [0, {_LAST_ID}], got {min(ids)} to {max(ids)}")
    return ids


def requests(sequences: CacheSequences, tokens: Any) -> dict[int, list[int]]:
    """Check the argument of ``reserve`` and return it as lists."""
    if not isinstance(tokens, Mapping) or not tokens:
        raise OptionError(
            f"reserve: pass a dict of new tokens by sequence, {{handle: token ids}}; got {tokens!r}"
        )
    result: dict[int, list[int]] = {}
    for handle, new in tokens.items():
        sequences.get("reserve", handle)
        result[int(handle)] = token_ids("reserve", new)
        if not result[int(handle)]:
            raise OptionError(f"reserve: no tokens for sequence {handle}; leave it out of this step")
    return result
