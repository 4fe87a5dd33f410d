"""Lengths of the sequences of a batch on the CPU: checked, and in the table that attention's kernels read.

Later calls of a kind skip what shapes and options decide. What arrays of lengths and pages hold they look at every
time, here: 2 us, where NumPy's calls add up to 10 and 30.

    found    | q start | q length | k start | k length |    per sequence
             | shortest, longest, ...                  |    the last row, with whether all of it is sound
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.jit import kernel, read, types
from gpu_ops.kernels.numba_cpu.parallel import launch_here

Array = np.ndarray[Any, Any]

_NO_TABLE = np.empty((0, 0), np.int32)


def packed(starts_q: Array, starts_k: Array, total_q: int, total_k: int) -> Array:
    """``found`` for sequences laid end to end; the last row: the longest of q, the longest of k, and 1 if both
    start at 0, never fall and end at their totals."""
    found = np.empty((len(starts_q), 4), np.int64)
    launch_here(packed_lengths[None], 1, starts_q, starts_k, total_q, total_k, found)
    return found


def cached(
    used: Array,
    table: Array | None,
    *,
    seqlen_q: int,
    new: int,
    page_size: int,
    num_pages: int,
    capacity: int,
) -> Array:
    """``found`` for ``used`` keys of each sequence in a cache that ``new`` ones will join; the last row: the
    shortest, the longest, and 1 if no sequence outgrows ``capacity`` or lacks a page in ``table``: of those that hold
    its keys, with new keys of those that hold these.
    """
    found = np.empty((len(used) + 1, 4), np.int64)
    pages = _NO_TABLE if table is None else table
    launch_here(cached_lengths[None], 1, used, pages, seqlen_q, new, page_size, num_pages, capacity, found)
    return found


@kernel(
    lambda _: (
        read("int32", 1),
        read("int32", 1),
        types.int64,
        types.int64,
        types.Array(types.int64, 2, "C"),
    ),
    variants=(None,),
)
def packed_lengths(state, n_tasks, starts_q, starts_k, total_q, total_k, found):
    batch = len(starts_q) - 1
    sound = (
        starts_q[0] == 0 and starts_q[batch] == total_q and starts_k[0] == 0 and starts_k[batch] == total_k
    )
    longest_q, longest_k = np.int64(0), np.int64(0)
    for b in range(batch):
        q, k = np.int64(starts_q[b]), np.int64(starts_k[b])
        n_q, n_k = np.int64(starts_q[b + 1]) - q, np.int64(starts_k[b + 1]) - k
        sound = sound and n_q >= 0 and n_k >= 0
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
            for i in range(first, (n + new + page_size - 1) // max(page_size, 1)):
                fits = fits and 0 <= table[b, i] < num_pages
        sound = sound and fits
        shortest, longest = min(shortest, n), max(longest, n)
        found[b, 0], found[b, 1], found[b, 2], found[b, 3] = 0, seqlen_q, 0, n
    found[batch, 0], found[batch, 1], found[batch, 2], found[batch, 3] = shortest, longest, sound, 0
