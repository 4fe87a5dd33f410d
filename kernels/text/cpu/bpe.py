"""Byte pair encoding on the CPU: words of a text, their tokens, and the learning of merges.

word      a run of letters, digits, other signs or white space, at most 128 bytes. A space before another
          run belongs to it, as does a single sign before letters. Bytes from 128 on are letters, so that no
          character of UTF-8 changes the kind
encoding  per word: the pair of the earliest merge is replaced until none is left; merges are in a hash table. A word
          of n bytes takes n * n / 2 steps at most
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.jit import device_function, kernel, types
from gpu_ops.kernels.common.cpu.parallel import claim, launch, launch_inline

Array = np.ndarray[Any, Any]

MOST_WORD = 128
BYTES = 256

_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio
_NONE = np.int32(2**31 - 1)


def split(data: Array) -> Array:
    """Ends of the words of ``data`` (uint8)."""
    ends, count = np.empty(len(data), np.int64), np.zeros(1, np.int64)
    launch_inline(bpe_split[None], 1, data, ends, count)
    return ends[: count[0]]


def table_of(merges: Array) -> Array:
    """Hash table of merges, int32 (n, 2): (pair, token) per slot, at most a quarter full."""
    table = np.full((1 << (4 * len(merges) + 1).bit_length(), 2), -1, np.int64)
    launch_inline(bpe_table[None], 1, merges, table)
    return table


def encode(data: Array, cuts: Array, table: Array) -> Array:
    """Tokens (int32) of ``data`` (uint8); words begin at all ``cuts`` (int64), from 0 to the end of ``data``."""
    n_tasks = len(cuts) - 1
    tokens, counts = np.empty(len(data), np.int32), np.zeros(n_tasks, np.int64)
    scratch = np.empty((n_tasks, MOST_WORD), np.int32)
    launch(bpe_encode[None], n_tasks, data, cuts, table, scratch, tokens, counts)
    return np.concatenate(
        [tokens[at : at + n] for at, n in zip(cuts.tolist(), counts.tolist(), strict=False)]
    )


@device_function
def kind_of(byte):
    """Kind of a byte. 0: white space, 1: letters, 2: digits, 3: other signs."""
    if byte == 32 or 9 <= byte <= 13:
        return 0
    if byte >= 128 or 97 <= byte <= 122 or 65 <= byte <= 90:
        return 1
    return 2 if 48 <= byte <= 57 else 3


@device_function
def word_end(data, start, end):
    """End of the word that begins at ``start``; at ``end`` a word begins or the text ends."""
    at = start
    if at + 1 < end:
        first, second = kind_of(data[at]), kind_of(data[at + 1])
        if (data[at] == 32 and second != 0) or (first == 3 and second == 1):
            at += 1
    char_class = kind_of(data[at])
    limit = min(end, start + MOST_WORD)
    at += 1
    while at < limit and kind_of(data[at]) == char_class:
        at += 1
    if char_class == 0 and at < end and at - start > 1 and data[at - 1] == 32 and kind_of(data[at]) != 0:
        at -= 1  # this space belongs to the next word
    return at


def packed(dtype, ndim):
    return types.Array(dtype, ndim, "C")


DATA = types.Array(types.uint8, 1, "C", readonly=True)
CUTS = types.Array(types.int64, 1, "C", readonly=True)
MERGES = types.Array(types.int32, 2, "C", readonly=True)
LOOKUP = types.Array(types.int64, 2, "C", readonly=True)
VECTOR, TABLE = packed(types.int64, 1), packed(types.int64, 2)


@kernel(lambda _: (DATA, VECTOR, VECTOR), variants=(None,))
def bpe_split(state, n_tasks, data, ends, found):
    at = count = 0
    while at < len(data):
        at = word_end(data, at, len(data))
        ends[count] = at
        count += 1
    found[0] = count


@device_function
def slot_of(table, left, right):
    """Slot of a pair in the table, or the free slot for it."""
    key = (np.int64(left) << 32) | right
    slot = ((key * _SPREAD) >> 32) & (len(table) - 1)
    while table[slot, 0] != key and table[slot, 0] >= 0:
        slot = (slot + 1) & (len(table) - 1)
    return slot


@kernel(lambda _: (MERGES, TABLE), variants=(None,))
def bpe_table(state, n_tasks, merges, table):
    for i in range(len(merges)):
        slot = slot_of(table, merges[i, 0], merges[i, 1])
        table[slot, 0], table[slot, 1] = (np.int64(merges[i, 0]) << 32) | merges[i, 1], BYTES + i


@device_function
def token_of(table, left, right):
    """Token that a pair merges to."""
    token = table[slot_of(table, left, right), 1]
    return np.int32(token) if token >= 0 else _NONE


@device_function
def encode_word(word, table, merged, tokens):
    """Encode a word. ``tokens[j]`` and its successor merge to ``merged[j]``. Returns the number of tokens."""
    count = len(word)
    for j in range(count):
        tokens[j] = word[j]
    for j in range(count - 1):
        merged[j] = token_of(table, word[j], word[j + 1])
    while count > 1:
        best = 0
        for j in range(1, count - 1):
            if merged[j] < merged[best]:
                best = j
        if merged[best] == _NONE:
            break
        tokens[best] = merged[best]
        count -= 1
        for j in range(best + 1, count):
            tokens[j] = tokens[j + 1]
            merged[j - 1] = merged[j]
        if best > 0:
            merged[best - 1] = token_of(table, tokens[best - 1], tokens[best])
        if best < count - 1:
            merged[best] = token_of(table, tokens[best], tokens[best + 1])
    return count


@kernel(
    lambda _: (DATA, CUTS, LOOKUP, packed(types.int32, 2), packed(types.int32, 1), VECTOR), variants=(None,)
)
def bpe_encode(state, n_tasks, data, cuts, table, scratch, tokens, found):
    task = claim(state)
    while task < n_tasks:
        at = written = cuts[task]
        while at < cuts[task + 1]:
            end = word_end(data, at, cuts[task + 1])
            written += encode_word(data[at:end], table, scratch[task], tokens[written:])
            at = end
        found[task] = written - cuts[task]
        task = claim(state)


# Byte pair encoding on the CPU: learning of merges from the words of a text.
#
# place   a byte of a distinct word: its token, the next and the previous place of the word, and the places of
#         the same pair of tokens, linked in both directions. A merge visits only the places of its pair
# heap    pairs, by their count when they were inserted. Counts of old pairs only fall, so that a pair on top whose
#         count is still right is the most frequent of all
#
# A place is visited once per merge it takes part in, at most as often as its word has bytes.

SYMBOL, NEXT, PREVIOUS, AFTER, BEFORE, PAIR, WORD = range(7)  # fields of a place
LEFT, RIGHT, COUNT, FIRST, LAST = range(5)  # fields of a pair
MADE, USED, QUEUED, ENDED = range(4)  # progress: merges, pairs, pairs in the heap, whether no pair is left

PLACES = packed(types.int32, 2)
LEARNED = (PLACES, VECTOR, TABLE, TABLE)


class Learner:
    """Learner of merges from words, some at a time.

    ``symbols`` (uint8): the words end to end, none of them empty; ``lengths`` and ``counts`` of each.
    """

    def __init__(self, symbols: Array, lengths: Array, counts: Array, most: int) -> None:
        n = len(symbols)
        self._places = np.full((n, 7), -1, np.int32)
        self._places[:, SYMBOL] = symbols
        self._places[:, NEXT], self._places[:, PREVIOUS] = np.arange(1, n + 1), np.arange(-1, n - 1)
        ends = np.cumsum(lengths)
        self._places[ends - 1, NEXT] = self._places[ends - lengths, PREVIOUS] = -1
        self._places[:, WORD] = np.repeat(np.arange(len(lengths)), lengths)
        self._counts = counts.astype(np.int64)
        self._pairs = np.zeros((2 * BYTES * BYTES, 5), np.int64)
        self._heap = np.empty((2 * BYTES * BYTES, 2), np.int64)
        # pairs of the new token: with each token on the left, on the right
        self._new = np.full((2, BYTES + most), -1, np.int32)
        self._learn = bpe_learn[None]  # compiled before the caller shows progress
        self._merges, self._progress = np.empty((most, 2), np.int32), np.zeros(4, np.int64)
        launch_inline(bpe_begin[None], 1, self._places, self._counts, self._pairs, self._heap, self._progress)

    @property
    def merges(self) -> Array:
        return self._merges[: self._progress[MADE]]

    def learn(self, count: int) -> bool:
        """Learn ``count`` more merges, while there are pairs that occur twice. Returns whether there may be more."""
        until = min(int(self._progress[MADE]) + count, len(self._merges))
        while self._progress[MADE] < until and not self._progress[ENDED]:
            args = (self._places, self._counts, self._pairs, self._heap, self._new)
            launch_inline(self._learn, 1, *args, self._merges, self._progress, until)
            if self._progress[MADE] < until and not self._progress[ENDED]:  # no room for more pairs
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)])
                self._heap = np.concatenate([self._heap, np.empty_like(self._heap)])
        return until < len(self._merges) and not self._progress[ENDED]


@device_function
def add_place(places, counts, pairs, pair, i):
    """Append the place of the left token to the pair's list: places of a list are in the order of the words."""
    last = pairs[pair, LAST]
    places[i, PAIR], places[i, BEFORE], places[i, AFTER] = pair, last, -1
    if last < 0:
        pairs[pair, FIRST] = i
    else:
        places[last, AFTER] = i
    pairs[pair, LAST] = i
    pairs[pair, COUNT] += counts[places[i, WORD]]


@device_function
def remove_place(places, counts, pairs, i):
    pair, before, after = places[i, PAIR], places[i, BEFORE], places[i, AFTER]
    if before < 0:
        pairs[pair, FIRST] = after
    else:
        places[before, AFTER] = after
    if after < 0:
        pairs[pair, LAST] = before
    else:
        places[after, BEFORE] = before
    pairs[pair, COUNT] -= counts[places[i, WORD]]


@device_function
def comes_first(pairs, count, pair, other_count, other):
    """Whether a pair comes first: it is more frequent, or as frequent with lower tokens."""
    if count != other_count:
        return count > other_count
    if pairs[pair, LEFT] != pairs[other, LEFT]:
        return pairs[pair, LEFT] < pairs[other, LEFT]
    return pairs[pair, RIGHT] < pairs[other, RIGHT]


@device_function
def push(heap, pairs, queued, pair):
    at, count = queued, pairs[pair, COUNT]
    while at > 0:
        up = (at - 1) // 2
        if not comes_first(pairs, count, pair, heap[up, 0], heap[up, 1]):
            break
        heap[at, 0], heap[at, 1] = heap[up, 0], heap[up, 1]
        at = up
    heap[at, 0], heap[at, 1] = count, pair


@device_function
def place_on_top(heap, pairs, queued, count, pair):
    """Replace the pair on top of a heap of ``queued`` pairs."""
    at = 0
    while 2 * at + 1 < queued:
        down = 2 * at + 1
        if down + 1 < queued and comes_first(
            pairs, heap[down + 1, 0], heap[down + 1, 1], heap[down, 0], heap[down, 1]
        ):
            down += 1
        if comes_first(pairs, count, pair, heap[down, 0], heap[down, 1]):
            break
        heap[at, 0], heap[at, 1] = heap[down, 0], heap[down, 1]
        at = down
    heap[at, 0], heap[at, 1] = count, pair


@device_function
def pop_best(heap, pairs, queued):
    """Most frequent pair that occurs twice, or -1; and the number of pairs left in the heap."""
    while queued > 0:
        count, pair = heap[0, 0], heap[0, 1]
        now = pairs[pair, COUNT]
        if 1 < now < count:
            place_on_top(heap, pairs, queued, now, pair)
            continue
        queued -= 1
        place_on_top(heap, pairs, queued, heap[queued, 0], heap[queued, 1])
        if now == count:
            return pair, queued
    return -1, 0


@kernel(lambda _: (*LEARNED, VECTOR), variants=(None,))
def bpe_begin(state, n_tasks, places, counts, pairs, heap, progress):
    """Make the pairs of bytes: number left * 256 + right."""
    for pair in range(BYTES * BYTES):
        pairs[pair, LEFT], pairs[pair, RIGHT] = pair // BYTES, pair % BYTES
        pairs[pair, FIRST] = pairs[pair, LAST] = -1
    for i in range(len(places)):
        if places[i, NEXT] >= 0:
            add_place(places, counts, pairs, places[i, SYMBOL] * BYTES + places[i + 1, SYMBOL], i)
    queued = 0
    for pair in range(BYTES * BYTES):
        if pairs[pair, COUNT] > 1:
            push(heap, pairs, queued, pair)
            queued += 1
    progress[USED], progress[QUEUED] = BYTES * BYTES, queued


@device_function
def add_new(places, counts, pairs, by_token, token, left, right, used, i):
    """Add a place of a pair of the new token; ``by_token`` has the existing pairs. Returns the number of pairs."""
    if by_token[token] < 0:
        by_token[token] = used
        pairs[used, LEFT], pairs[used, RIGHT], pairs[used, COUNT] = left, right, 0
        pairs[used, FIRST] = pairs[used, LAST] = -1
        used += 1
    add_place(places, counts, pairs, by_token[token], i)
    return used


@device_function
def merge(places, counts, pairs, new, pair, token, used):
    """Replace a pair by a token everywhere, from left to right. Returns the number of pairs."""
    while pairs[pair, FIRST] >= 0:
        i = pairs[pair, FIRST]
        gone, before = places[i, NEXT], places[i, PREVIOUS]
        after = places[gone, NEXT]
        remove_place(places, counts, pairs, i)
        if after >= 0:
            remove_place(places, counts, pairs, gone)
            places[after, PREVIOUS] = i
        places[i, SYMBOL], places[i, NEXT] = token, after
        if before >= 0:
            remove_place(places, counts, pairs, before)
            left = places[before, SYMBOL]
            used = add_new(places, counts, pairs, new[0], left, left, token, used, before)
        if after >= 0:
            right = places[after, SYMBOL]
            used = add_new(places, counts, pairs, new[1], right, token, right, used, i)
    return used


@kernel(lambda _: (*LEARNED, PLACES, PLACES, VECTOR, types.int64), variants=(None,))
def bpe_learn(state, n_tasks, places, counts, pairs, heap, new, merges, progress, until):
    made, used, queued = progress[MADE], progress[USED], progress[QUEUED]
    while made < until and used + 2 * (BYTES + made + 1) <= len(pairs):  # a new token makes no more pairs
        best, queued = pop_best(heap, pairs, queued)
        if best < 0:
            progress[ENDED] = 1
            break
        merges[made, 0], merges[made, 1] = pairs[best, LEFT], pairs[best, RIGHT]
        before, used = used, merge(places, counts, pairs, new, best, BYTES + made, used)
        made += 1
        for pair in range(before, used):
            new[0, pairs[pair, LEFT]] = new[1, pairs[pair, RIGHT]] = -1
            if pairs[pair, COUNT] > 1:
                push(heap, pairs, queued, pair)
                queued += 1
    progress[MADE], progress[USED], progress[QUEUED] = made, used, queued
