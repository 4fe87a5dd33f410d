"""Paged cache against lists of tokens, under random calls in any order (a state machine of hypothesis).

Instead of keys and values, a step writes the number of the prefix of each token: equal numbers, equal prefixes.
Values read through a table then show which tokens the table refers to.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpu_ops.errors import OptionError, OutOfPages, StateError
from gpu_ops.inference import PagedKVCache

LAYERS = 2
# two distinct tokens: many sequences share a prefix
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
PICK = st.integers(0, 999)


def path_to(parents, node):
    """Nodes of a tree from the root to this node; empty for -1."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


class Cache(RuleBasedStateMachine):
    """State machine. ``tokens``: the model. ``content``: tokens up to the end of each page that can be found."""

    operations = 0

    @initialize(
        num_pages=st.integers(6, 40),
        page_size=st.integers(1, 5),
        window=st.sampled_from([-1, -1, 0, 3, 6]),
        keep=st.integers(0, 7),
        dtype=st.sampled_from(["float64", "int8"]),
    )
    def begin(self, num_pages, page_size, window, keep, dtype):
        keep = keep if window >= 0 else 0
        sizes = {"num_pages": num_pages, "page_size": page_size}
        self.cache = PagedKVCache(LAYERS, 1, 1, dtype=dtype, window=window, keep=keep, **sizes)
        self.keys, self.values = self.cache.keys, self.cache.values
        if dtype == "int8":  # scales follow their pages
            scales = self.cache.key_scales, self.cache.value_scales
            self.keys, self.values = ([x[..., None] for x in arrays] for arrays in scales)
        self.numbers: dict[tuple[int, int], int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.out = self.cache.empty_step(tokens=44, batch=5, width=1000)
        self.keep = -(-keep // page_size) * page_size
        self.null = window >= 0

    def marks(self, handle):
        """Number (from 1) of the prefix that ends with each token of a sequence."""
        marks, mark = [], 0
        for token in self.tokens[handle]:
            mark = self.numbers.setdefault((mark, token), len(self.numbers) + 1)
            marks.append(mark)
        return marks

    def pick(self, n):
        handles = list(self.tokens)
        return handles[n % len(handles)]

    def table(self, handle):
        indptr, indices, last = self.cache.csr([handle])
        assert indptr.tolist() == [0, len(indices)]
        assert last[0] == len(self.tokens[handle]) - max(len(indices) - 1, 0) * self.cache.page_size
        return indices

    def visible(self, n):
        """Positions that the next token of a sequence of n may see, or that are kept."""
        window = self.cache.window
        behind = np.arange(n) < n - window if window >= 0 else np.zeros(n, bool)
        return np.flatnonzero(~behind | (np.arange(n) < self.keep))

    def longest_prefix(self, tokens):
        size, known = self.cache.page_size, set(self.content.values())
        n = 0
        while n + size < len(tokens) and tuple(tokens[: n + size]) in known:
            n += size
        return n

    @precondition(lambda self: len(self.tokens) < 10)
    @rule(like=PICK, length=st.integers(0, 30), more=st.lists(st.integers(0, 1), max_size=7))
    def add(self, like, length, more):
        tokens = (self.tokens[self.pick(like)][:length] if self.tokens else []) + more
        handle = self.cache.add(tokens)
        known = self.cache.length(handle)
        assert known == self.longest_prefix(tokens)
        self.tokens[handle] = tokens[:known]

    @precondition(lambda self: 0 < len(self.tokens) < 10)
    @rule(n=PICK)
    def fork(self, n):
        of = self.pick(n)
        self.tokens[self.cache.fork(of)] = self.tokens[of].copy()

    @precondition(lambda self: self.tokens)
    @rule(n=PICK)
    def free(self, n):
        handle = self.pick(n)
        self.cache.free(handle)
        del self.tokens[handle]
        with pytest.raises(OptionError, match=f"there is no sequence {handle}"):
            self.cache.length(handle)

    @precondition(lambda self: self.tokens)
    @rule(n=PICK, cut=st.integers(0, 12))
    def trim(self, n, cut):
        handle = self.pick(n)
        length = max(len(self.tokens[handle]) - cut, 0)
        needed = self.visible(length) // self.cache.page_size
        if length % self.cache.page_size:  # the next token is stored there
            needed = np.append(needed, length // self.cache.page_size)
        if self.null and not self.table(handle)[needed].all():
            with pytest.raises(OptionError, match="have left the window; the length has to be at least"):
                self.cache.trim(handle, length)
        else:
            self.cache.trim(handle, length)
            del self.tokens[handle][length:]

    @rule()
    def defragment(self):
        places = self.cache._sequences.pool.places()
        self.cache.defragment()
        self.content = {places[page]: tokens for page, tokens in self.content.items()}
        used = {page for handle in self.tokens for page in self.table(handle).tolist()} | set(self.content)
        assert max(used, default=0) < len(used | {0} if self.null else used) or not used

    @precondition(lambda self: self.tokens)
    @rule(
        new=st.dictionaries(PICK, TOKENS, min_size=1, max_size=3),
        fixed=st.booleans(),
        run=st.sampled_from([True, True, True, False]),
    )
    def step(self, new, fixed, run):
        self.run_step({self.pick(n): tokens for n, tokens in new.items()}, fixed, run)

    @precondition(lambda self: self.tokens)
    @rule(first=PICK, count=st.integers(1, 4), token=st.integers(0, 1), fixed=st.booleans())
    def single_tokens(self, first, count, token, fixed):
        self.run_step({self.pick(first + i): [token] for i in range(count)}, fixed, True)

    @precondition(lambda self: self.tokens)
    @rule(first=PICK, tree=st.lists(st.tuples(st.integers(0, 1), PICK), min_size=1, max_size=9), end=PICK)
    def drafts(self, first, tree, end):
        """Add a tree, which branches if there is no window, and keep the path to one node."""
        handle, start = self.pick(first), self.tokens[self.pick(first)]
        state, tokens = self.state(), [token for token, _ in tree]
        parents = [i - 1 if self.null else n % (i + 1) - 1 for i, (_, n) in enumerate(tree)]
        try:
            step = self.cache.reserve({handle: tokens}, parents={handle: parents})
        except OutOfPages:
            assert self.state() == state
            return
        marks = []
        for node in range(len(tree)):
            path = path_to(parents, node)
            self.tokens[handle] = start + [tokens[i] for i in path]
            marks.append(self.marks(handle)[-1])
            assert step.positions[node] == len(start) + len(path) - 1
        for page in set((step.slot_mapping // self.cache.page_size).tolist()):
            self.content.pop(page, None)
        self.put(step.slot_mapping, marks)
        path = path_to(parents, end % (len(tree) + 1) - 1)
        self.cache.accept({handle: path})
        self.tokens[handle] = start + [tokens[i] for i in path]
        self.remember([handle], {handle: len(start)})

    def run_step(self, new, fixed, run):
        state = self.state()
        try:
            step = self.cache.reserve(new, out=self.out if fixed else None)
        except OutOfPages as error:
            self.check_refusal(error, new)
            assert self.state() == state
            return
        lengths = {handle: len(self.tokens[handle]) for handle in new}
        for handle, tokens in new.items():
            self.tokens[handle] += tokens
        self.check_step(step, new)
        self.write(step, new, whole=run)
        for call in (lambda: self.cache.fork(0), lambda: self.cache.reserve({}), self.cache.defragment):
            with pytest.raises(StateError, match="a step is open"):
                call()
        if run:
            self.cache.commit()
            self.remember(new, lengths)
        else:
            self.cache.rollback()
            for handle, length in lengths.items():
                del self.tokens[handle][length:]

    def state(self):
        sequences = [
            (handle, self.cache.tokens(handle), self.table(handle).tolist()) for handle in self.tokens
        ]
        return self.cache.stats, sequences

    def check_refusal(self, error, new):
        """Check that no step that fits is refused: without forks and window its pages can be counted."""
        size, stats = self.cache.page_size, self.cache.stats
        needed = sum(
            -(-(len(self.tokens[handle]) + len(tokens)) // size) - len(self.table(handle))
            for handle, tokens in new.items()
        )
        assert needed <= error.needed <= needed + len(new)
        assert error.needed > error.free >= stats.free + stats.cached
        assert sum(error.held.values()) == sum(self.entries().values())

    def check_step(self, step, new):
        """Check that the arguments of the ops match the model."""
        batch, size = len(new), self.cache.page_size
        starts = step.cu_seqlens_q
        assert starts[0] == 0
        assert starts[-1] == len(step.tokens)
        assert (np.diff(starts) >= 0).all()
        assert np.diff(starts).max() <= step.max_seqlen_q
        for b, (handle, tokens) in enumerate(new.items()):
            rows = slice(starts[b], starts[b + 1])
            n, table = len(self.tokens[handle]), self.table(handle)
            assert step.tokens[rows].tolist() == tokens
            assert step.positions[rows].tolist() == list(range(n - len(tokens), n))
            assert step.seqused_k[b] == n
            assert step.block_table[b, : len(table)].tolist() == table.tolist()
            assert (step.block_table[b, len(table) :] == -1).all()
            at = step.positions[rows]
            assert (step.slot_mapping[rows] == table[at // size] * size + at % size).all()
        total = starts[batch]
        assert (step.slot_mapping[total:] == -1).all()
        assert (step.seqused_k[batch:] == 0).all()
        slots = step.slot_mapping[:total]
        assert len(set(slots.tolist())) == total, "two new tokens share a slot"
        entries = self.entries()
        shared = [page for page in set((slots // size).tolist()) if entries[page] != 1]
        assert not shared, "a page of several sequences is written"
        for page in set((slots // size).tolist()):
            self.content.pop(page, None)

    def write(self, step, new, *, whole):
        """Write as a forward does; if it fails halfway, only every second token."""
        total = sum(map(len, new.values()))
        marks = [mark for handle, tokens in new.items() for mark in self.marks(handle)[-len(tokens) :]]
        some = slice(0, total, 1 if whole else 2)
        self.put(step.slot_mapping[some], marks[some])

    def put(self, slots, marks):
        page, row = np.divmod(slots, self.cache.page_size)
        for layer in range(LAYERS):
            for sign, cache in ((1, self.keys[layer]), (-1, self.values[layer])):
                cache[page, row, 0, 0] = sign * (np.array(marks) * LAYERS + layer)

    def remember(self, new, lengths):
        size = self.cache.page_size
        for handle in new:
            table = self.table(handle)
            for page in range(lengths[handle] // size, len(self.tokens[handle]) // size):
                self.content[int(table[page])] = tuple(self.tokens[handle][: (page + 1) * size])

    def entries(self):
        """Number of tables that contain each page, except the null page."""
        return Counter(
            page
            for handle in self.tokens
            for page in self.table(handle).tolist()
            if not (self.null and page == 0)
        )

    @invariant()
    def pages_add_up(self):
        if not hasattr(self, "cache"):
            return
        Cache.operations += 1
        entries, stats = self.entries(), self.cache.stats
        pool = self.cache._sequences.pool
        assert Counter({page: n for page, n in enumerate(pool.refs) if n}) == entries
        assert stats.used == len(entries)
        assert stats.used + stats.cached + stats.free == stats.total == self.cache.num_pages - self.null
        unused = [*pool._free, *pool._cached]
        assert sorted([*unused, *entries]) == list(range(self.null, self.cache.num_pages))
        assert set(pool._cached) <= set(self.content)

    @invariant()
    def tables_read_their_own_tokens(self):
        if not hasattr(self, "cache"):
            return
        size = self.cache.page_size
        for handle, tokens in self.tokens.items():
            assert self.cache.tokens(handle) == tokens
            table, at = self.table(handle), self.visible(len(tokens))
            expected = np.array(self.marks(handle), np.int64)[at]
            for layer in range(LAYERS):
                stored = self.keys[layer][table[at // size], at % size, 0, 0]
                assert (stored == expected * LAYERS + layer).all()
                assert (self.values[layer][table[at // size], at % size, 0, 0] == -stored).all()
        if self.null:
            assert not self.keys[0][0].any()


def test_random_calls_keep_to_the_model():
    Cache.operations = 0
    run_state_machine_as_test(Cache, settings=settings(max_examples=120, stateful_step_count=100))
    assert Cache.operations > 8000
