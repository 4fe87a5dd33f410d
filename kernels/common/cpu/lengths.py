"""Checked lengths of the sequences of a batch on the CPU, in the table that attention's kernels read.

Repeated calls skip the checks of shapes and options. The values in arrays of lengths and pages are checked by every
call, here: in 2 us, where NumPy would take 10 to 30.

    found    | q start | q length | k start | k length |    per sequence
             | shortest, longest, ...                  |    the last row, with whether all of it is sound

New tokens must go to different slots of a cache: a hash table finds two that are equal, in 2 ns per token.

These functions return a function, so that its kernel is compiled in the first call with such options, not the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.jit import inner, kernel, read, types
from gpu_ops.kernels.common.cpu.parallel import launch_inline

Array = np.ndarray[Any, Any]

_NONE, _NO_TABLE = np.empty(0, np.int32), np.empty((0, 0), np.int32)
# 2^64 over the golden ratio: spreads slots at any distance from each other
_SPREAD = 0x9E3779B97F4A7C15 - 2**64


def packed(total_q: int, total_k: int, *, num_pages: int, page_size: int) -> Callable[..., Array]:
    """Function of the starts of packed sequences that returns ``found``. The last row: the longest of q, the longest
    of k, and 1 if both start at 0, never fall and end at their totals.

    It also takes the number of keys in use of each sequence, and a table of pages in place of the starts of k;
    ``total_k`` is then the capacity of the pages of a sequence. Sound: the keys in use fit, and their pages exist.
    """
    look = packed_lengths[None]

    def found_of(
        starts_q: Array, starts_k: Array | None, used: Array | None = None, table: Array | None = None
    ) -> Array:
        lengths = np.empty((len(starts_q), 4), np.int64)
        arrays = [_NONE if x is None else x for x in (starts_k, used)]
        pages = _NO_TABLE if table is None else table
        launch_inline(look, 1, starts_q, *arrays, pages, total_q, total_k, num_pages, page_size, lengths)
        return lengths

    return found_of


def cached(
    *, seqlen_q: int, new: int, page_size: int, num_pages: int
) -> Callable[[Array, Array | None], Array]:
    """Function of ``used`` keys of each sequence, in a cache that ``new`` keys will join, and optionally a table of
    its pages, that returns ``found``. Last row: shortest, longest, and 1 if no sequence outgrows the cache or lacks a
    page: a page for its keys or, with new keys, for those.
    """
    look = cached_lengths[None]

    def found_of(used: Array, table: Array | None) -> Array:
        lengths = np.empty((len(used) + 1, 4), np.int64)
        pages, capacity = (_NO_TABLE, page_size) if table is None else (table, page_size * table.shape[1])
        launch_inline(look, 1, used, pages, seqlen_q, new, page_size, num_pages, capacity, lengths)
        return lengths

    return found_of


def apart(new: int, page_size: int) -> Callable[[Array, Array], bool]:
    """Function of keys and pages like those of :func:`cached`, if they are sound: whether no two of the new
    tokens share a row of a page."""
    look = paged_slots[None]

    def differ(used: Array, table: Array) -> bool:
        sound = np.empty(1, np.int64)
        launch_inline(look, 1, used, table, new, page_size, sound)
        return bool(sound[0])

    return differ


def mapped(num_slots: int) -> Callable[[Array], bool]:
    """Function of slots: whether all are below ``num_slots`` and the nonnegative ones are distinct."""
    look = mapped_slots[None]

    def differ(slots: Array) -> bool:
        sound = np.empty(1, np.int64)
        launch_inline(look, 1, slots, num_slots, sound)
        return bool(sound[0])

    return differ


@inner
def none_taken(count):
    """Empty hash table for ``count`` slots: a power of two in size, at most half full."""
    size = 2
    while size < 2 * count:
        size *= 2
    return np.full(size, -1, np.int64)


@inner
def take(taken, slot):
    """Insert ``slot``. Returns whether it was new."""
    last = len(taken) - 1
    at = (slot * _SPREAD >> 32) & last
    while taken[at] >= 0:
        if taken[at] == slot:
            return False
        at = (at + 1) & last
    taken[at] = slot
    return True


@inner
def pages_exist(table, b, first, last, num_pages):
    """Whether entries [first, last) of row b are pages."""
    exist = True
    for i in range(first, last):
        exist = exist and 0 <= table[b, i] < num_pages
    return exist


@kernel(
    lambda _: (
        *(read("int32", 1),) * 3,
        read("int32", 2),
        *(types.int64,) * 4,
        types.Array(types.int64, 2, "C"),
    ),
    variants=(None,),
)
def packed_lengths(
    state, n_tasks, starts_q, starts_k, used, table, total_q, total_k, num_pages, page_size, found
):
    batch = len(starts_q) - 1
    sound = starts_q[0] == 0 and starts_q[batch] == total_q
    if len(starts_k) > 0:
        sound = sound and starts_k[0] == 0 and starts_k[batch] == total_k
    longest_q, longest_k = np.int64(0), np.int64(0)
    for b in range(batch):
        q = np.int64(starts_q[b])
        n_q = np.int64(starts_q[b + 1]) - q
        k, n_k = np.int64(0), total_k
        if len(starts_k) > 0:
            k = np.int64(starts_k[b])
            n_k = np.int64(starts_k[b + 1]) - k
        sound = sound and n_q >= 0 and n_k >= 0
        if len(used) > 0:
            sound = sound and 0 <= used[b] <= n_k
            n_k = np.int64(used[b])
        if sound and len(table) > 0:
            sound = pages_exist(table, b, 0, (n_k + page_size - 1) // max(page_size, 1), num_pages)
        longest_q, longest_k = max(longest_q, n_q), max(longest_k, n_k)
        found[b, 0], found[b, 1], found[b, 2], found[b, 3] = q, n_q, k, n_k
    found[batch, 0], found[batch, 1], found[batch, 2], found[batch, 3] = longest_q, longest_k, sound, 0


@kernel(
    lambda _: (read("int32", 1), read("int32", 2), *(types.int64,) * 5, types.Array(types.int64, 2, "C")),
    variants=(None,),
)
def cached_lengths(state, n_tasks, used, table, seqlen_q, new, page_size, num_pages, capacity, found):
    batch = len(used)
    sound = True
    shortest, longest = capacity, np.int64(0)
    for b in range(batch):
        n = np.int64(used[b])
        fits = 0 <= n <= capacity - new
        if fits and len(table) > 0:
            first = n // page_size if new > 0 and page_size > 0 else 0
            last = (n + new + page_size - 1) // max(page_size, 1)
            fits = pages_exist(table, b, first, last, num_pages)
        sound = sound and fits
        shortest, longest = min(shortest, n), max(longest, n)
        found[b, 0], found[b, 1], found[b, 2], found[b, 3] = 0, seqlen_q, 0, n
    found[batch, 0], found[batch, 1], found[batch, 2], found[batch, 3] = shortest, longest, sound, 0


@kernel(
    lambda _: (read("int32", 1), read("int32", 2), *(types.int64,) * 2, types.Array(types.int64, 1, "C")),
    variants=(None,),
)
def paged_slots(state, n_tasks, used, table, new, page_size, found):
    taken = none_taken(len(used) * new)
    sound = True
    for b in range(len(used)):
        n, end = np.int64(used[b]), np.int64(used[b]) + new
        while n < end:
            page, row = n // page_size, n % page_size
            slot = np.int64(table[b, page]) * page_size + row
            last = slot + min(end - n, page_size - row)
            n += last - slot
            while slot < last:
                sound = take(taken, slot) and sound
                slot += 1
    found[0] = sound


@kernel(
    lambda _: (read("int64", 1), types.int64, types.Array(types.int64, 1, "C")),
    variants=(None,),
)
def mapped_slots(state, n_tasks, slots, num_slots, found):
    taken = none_taken(len(slots))
    sound = True
    for i in range(len(slots)):
        slot = slots[i]
        if slot >= 0:
            sound = sound and slot < num_slots and take(taken, slot)
    found[0] = sound
