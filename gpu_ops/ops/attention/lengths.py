"""Lengths that attention calls take as arrays: starts of packed sequences, keys in use, page tables.

Shapes and dtypes are checked once, values in every call, by a ``check_values=`` hook. Values on a GPU are not
checked, since that would wait for it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call, CheckValues
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.ops.attention.options import INT32

__all__ = ["Lengths", "longest_used", "packed_lengths", "pages_exist", "read_pages", "read_used"]

_STARTS = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Lengths:
    """Lengths of the sequences of a call."""

    queries: Array
    keys: Array
    longest: tuple[int, int]
    check_values: CheckValues | None

    def pairs(self, causal: Any) -> int:
        """Number of (query, key) pairs that ``causal`` alone leaves visible."""
        hidden = self.queries * (self.queries - 1) // 2
        if causal:
            blind = np.maximum(self.queries - self.keys, 0)
            hidden = hidden - blind * (blind - 1) // 2
        return int((self.queries * self.keys - (hidden if causal else 0)).sum())


def packed_lengths(call: Call, arrays: dict[str, Any], bounds: dict[str, int | None]) -> Lengths:
    """Read the lengths of ``attention_varlen``, forward or backward: ``arrays`` by argument, some of them None.

    ``bounds``: the caller's max_seqlen_q and max_seqlen_k.
    """
    op, axes = call.op, call.axes
    _check_combination(op, arrays)
    starts = [_read_starts(call, name, arrays[name]) for name in _STARTS if arrays[name] is not None]
    batch = starts[0].size - 1
    if starts[-1].size != batch + 1:
        raise ShapeError(
            f"{op}: cu_seqlens_q and cu_seqlens_k describe {batch} and {starts[1].size - 1} "
            "sequences; both need batch + 1 entries"
        )
    axes.set("batch", batch, "cu_seqlens_q")
    if arrays.get("seqused_k") is not None:
        read_used(call, arrays["seqused_k"])
    num_pages, page_size, total_k = 0, 0, axes["total_k"] if len(starts) == 2 else 0
    if arrays.get("block_table") is not None:
        num_pages, page_size, total_k = read_pages(call, arrays["block_table"])
    max_seqlens = [None if n is None else checks.integer(op, name, n, low=0) for name, n in bounds.items()]
    totals = axes["total_q"], total_k
    if call.on_cuda:
        longest = [
            total if n is None else min(n, total) for n, total in zip(max_seqlens, totals, strict=True)
        ]
        check_values, queries, keys = None, *(np.array([n]) for n in longest)
    else:
        check_values = _check_values(op, totals, (num_pages, page_size), max_seqlens)
        views = dict(call.views)
        longest = list(check_values(views, "reference")[0].values())
        queries = np.diff(views["cu_seqlens_q"]).astype(np.int64)
        keys = views.get("seqused_k", np.diff(views.get("cu_seqlens_k", queries))).astype(np.int64)
    call.option(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    return Lengths(queries, keys, (longest[0], longest[1]), check_values)


def read_used(call: Call, seqused_k: Any) -> None:
    """Read the number of keys of each sequence that are in use."""
    used = call.read("seqused_k", seqused_k)
    checks.exactly(call.op, "seqused_k", used, (call.axes["batch"],), INT32)


def read_pages(call: Call, block_table: Any) -> tuple[int, int, int]:
    """Read the page table. Return the number of pages, their size, and how many keys the pages of a sequence hold."""
    axes, table = call.axes, call.read("block_table", block_table)
    axes.bind("block_table", table, "batch max_pages")
    checks.exactly(call.op, "block_table", table, table.shape, INT32)
    return axes["num_pages"], axes["page_size"], axes["max_pages"] * axes["page_size"]


def _check_combination(op: str, arrays: dict[str, Any]) -> None:
    """Check which of the arrays are given."""
    if arrays["cu_seqlens_q"] is None:
        raise OptionError(
            f"{op}: cu_seqlens_q is missing: where each sequence of q starts, int32 (batch + 1,)"
        )
    if arrays.get("block_table") is None:
        if arrays["cu_seqlens_k"] is None:
            pages = "; keys in pages take block_table and seqused_k in its place" * ("block_table" in arrays)
            raise OptionError(
                f"{op}: cu_seqlens_k is missing: where each sequence of k starts, int32 (batch + 1,){pages}"
            )
    elif arrays["cu_seqlens_k"] is not None or arrays["seqused_k"] is None:
        raise OptionError(
            f"{op}: with block_table the keys lie in pages: pass their lengths as seqused_k, "
            "for example np.diff(cu_seqlens_k), and omit cu_seqlens_k"
        )


def _read_starts(call: Call, name: str, x: Any) -> Array:
    starts = call.read(name, x)
    if starts.dtype != INT32:
        raise DTypeError(
            f"{call.op}: {name} is {starts.dtype}, expected int32; cast it: {name}.astype('int32')"
        )
    if starts.ndim != 1 or starts.size == 0:
        raise ShapeError(f"{call.op}: {name} has shape {starts.shape}, expected (batch + 1,)")
    return starts


def _check_values(
    op: str, totals: tuple[int, int], pages: tuple[int, int], bounds: list[int | None]
) -> CheckValues:
    """``totals``: number of queries, and of packed keys or of keys in a sequence's pages. ``pages``: number, size."""

    def check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        sound, extra_views = False, {}
        if backend == "cpu":
            get = views.get
            arrays = get("cu_seqlens_q"), get("cu_seqlens_k"), get("seqused_k"), get("block_table")
            table = _table(*totals, *pages)(*arrays)
            *longest, sound, _ = table[-1].tolist()
            extra_views["sequences"] = table[:-1]
        if not sound:  # on the CPU: find the error and report it
            longest = [_longest(op, "cu_seqlens_q", views["cu_seqlens_q"], totals[0])]
            longest.append(_longest_keys(op, views, totals[1], pages))
        _check_bounds(op, bounds, longest)
        return {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}, extra_views

    return check_values


@functools.lru_cache(256)
@uninterrupted
def _table(total_q: int, total_k: int, num_pages: int, page_size: int) -> Callable[..., Array]:
    from gpu_ops.kernels.common.cpu.lengths import packed

    return packed(total_q, total_k, num_pages=num_pages, page_size=page_size)


def _check_bounds(op: str, bounds: list[int | None], longest: list[int]) -> None:
    for name, bound, n in zip(("max_seqlen_q", "max_seqlen_k"), bounds, longest, strict=True):
        if bound is not None and bound < n:
            raise OptionError(
                f"{op}: {name}={bound}, but the longest sequence has {n} tokens; omit it or raise it"
            )


def _longest(op: str, name: str, offsets: Array, total: int) -> int:
    """Length of the longest sequence. Checks that starts begin at 0, never fall, and end at ``total``."""
    starts = offsets.tolist()  # usually few, for which Python is faster than NumPy
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
        raise OptionError(
            f"{op}: {name} must start at 0, never fall, and end at the total {total}; "
            f"got {np.array2string(offsets, threshold=8)}"
        )
    return max(lengths, default=0)


def _longest_keys(op: str, views: dict[str, Any], total: int, pages: tuple[int, int]) -> int:
    """Number of keys of the longest sequence: packed keys, the used part of them, or pages."""
    starts = views.get("cu_seqlens_k")
    if starts is None:
        longest = longest_used(op, views["seqused_k"], total)
        pages_exist(op, views["block_table"], views["seqused_k"], *pages)
        return longest
    longest = _longest(op, "cu_seqlens_k", starts, total)
    used = views.get("seqused_k")
    if used is None:
        return longest
    bad = np.flatnonzero((used < 0) | (used > np.diff(starts)))
    if len(bad):
        b = int(bad[0])
        raise OptionError(
            f"{op}: seqused_k[{b}] is {int(used[b])}, but cu_seqlens_k gives sequence {b} room for "
            f"{int(starts[b + 1] - starts[b])} keys"
        )
    return int(used.max(initial=0))


def longest_used(op: str, used: Array, capacity: int) -> int:
    """Maximum of ``used``, after checking every entry."""
    lengths = used.tolist()
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
        raise OptionError(
            f"{op}: seqused_k must lie in [0, {capacity}], what the cache holds; "
            f"got {np.array2string(used, threshold=8)}"
        )
    return max(lengths, default=0)


def pages_exist(op: str, table: Array, used: Array, num_pages: int, page_size: int) -> None:
    """Refuse a page number that a used key needs and that does not exist."""
    if not (table.view(np.uint32) >= num_pages).any():  # -1 is large too
        return
    needed = np.arange(table.shape[1]) < -(-used[:, None] // max(page_size, 1))
    bad = np.argwhere(needed & ((table < 0) | (table >= num_pages)))
    if len(bad):
        b, page = (int(i) for i in bad[0])
        raise OptionError(
            f"{op}: block_table[{b}, {page}] is {int(table[b, page])}, not a page in [0, {num_pages}), "
            f"but seqused_k[{b}] = {int(used[b])} needs it"
        )
