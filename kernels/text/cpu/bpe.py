"""Byte pair encoding on the CPU: words of a text, and their tokens. :mod:`.bpe_learn` finds the merges.

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
