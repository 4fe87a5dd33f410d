"""The arguments of ``rope_append_kv``, checked: weights, caches, where tokens go, and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays, bounds_of
from gpu_ops.core.checks import Axes
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.ops.rope_options import BY_LENGTH, Positions, positions_of

__all__ = [
    "caches_of",
    "check_slots",
    "longest_of",
    "place_of",
    "token_positions",
    "used_rows",
    "weights_of",
]

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def weights_of(arrays: Arrays, axes: Axes, q_weight: Any, k_weight: Any) -> dict[str, Any]:
    given = {"q_weight": q_weight, "k_weight": k_weight}
    missing = [name for name, weight in given.items() if weight is None]
    if len(missing) == 1:
        raise OptionError(f"{arrays.op}: {missing[0]} is missing; pass q_weight and k_weight, or neither")
    if missing:
        return dict.fromkeys(given)
    weights: dict[str, Any] = {}
    for name, weight in given.items():
        weights[name] = read = arrays.read(name, weight)
        axes.bind(name, read, "head_dim")
    return weights


def caches_of(
    arrays: Arrays, axes: Axes, k_cache: Any, v_cache: Any, dtype: np.dtype[Any], *, paged: bool
) -> tuple[Array, Array]:
    found = arrays.update("k_cache", k_cache, dtype), arrays.update("v_cache", v_cache, dtype)
    rows = "num_pages page_size" if paged else "batch max_seqlen"
    for name, cache in zip(("k_cache", "v_cache"), found, strict=True):
        axes.bind(name, cache, f"{rows} nheads_kv head_dim")
    return found


def place_of(
    arrays: Arrays, axes: Axes, seqused_k: Any, block_table: Any, slot_mapping: Any
) -> dict[str, Any]:
    """The arrays that say where tokens go, checked; what lies on a GPU is checked there, token by token."""
    op = arrays.op
    if slot_mapping is not None:
        if seqused_k is not None or block_table is not None:
            raise OptionError(f"{op}: slot_mapping says where every token goes; pass it without seqused_k and "
                              "block_table, or those without it")  # fmt: skip
        slots = arrays.read("slot_mapping", slot_mapping)
        checks.exactly(op, "slot_mapping", slots, (axes["total"],), _INT64)
        if not arrays.on_cuda:
            check_slots(op, slots, axes["num_pages"], axes["page_size"])
        return {"seqused_k": None, "block_table": None, "slot_mapping": slots}
    if seqused_k is None:
        raise OptionError(
            f"{op}: where do the tokens go? Pass seqused_k=, the keys of each sequence that its cache holds "
            "already, or slot_mapping="
        )
    used = arrays.read("seqused_k", seqused_k)
    checks.exactly(op, "seqused_k", used, (axes["batch"],), _INT32)
    table = None if block_table is None else arrays.read("block_table", block_table)
    if table is not None:
        axes.bind("block_table", table, "batch max_pages")
        checks.exactly(op, "block_table", table, table.shape, _INT32)
    if not arrays.on_cuda and axes["seqlen"]:
        check_used(op, axes, used, table)
    return {"seqused_k": used, "block_table": table, "slot_mapping": None}


def check_slots(op: str, slots: Array, num_pages: int, page_size: int) -> None:
    if slots.size and bounds_of(slots)[1] >= num_pages * page_size:
        beyond = np.flatnonzero(slots >= num_pages * page_size)
        raise OptionError(
            f"{op}: slot_mapping[{beyond[0]}] is {slots[beyond[0]]}; {num_pages} pages of {page_size} have "
            f"slots in [0, {num_pages * page_size}), negative ones store nothing"
        )
    if (same := _two_of_one(slots)) is not None:
        raise OptionError(
            f"{op}: slot_mapping[{same[0]}] and slot_mapping[{same[1]}] are both {slots[same[0]]}; no two tokens may "
            "share a slot, give one of them its own, or a negative one to store it nowhere"
        )


def _two_of_one(slots: Array) -> tuple[int, int] | None:
    """Indices of two tokens with one slot that is not negative."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    same = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    return (int(order[same[0]]), int(order[same[0] + 1])) if len(same) else None


def check_used(op: str, axes: Axes, used: Array, table: Array | None) -> None:
    """Every new token has a row in its sequence's cache, and with pages the row has a page, and the token alone."""
    seqlen = axes["seqlen"]
    page_size = axes["max_seqlen" if table is None else "page_size"]
    capacity = page_size if table is None else page_size * table.shape[1]
    lengths = used.tolist()
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity - seqlen:
        raise OptionError(
            f"{op}: seqused_k must lie in [0, {capacity - seqlen}] for {seqlen} new tokens in a cache of {capacity}; "
            f"got {np.array2string(used, threshold=8)}"
        )
    if table is None:
        return
    _pages_exist(op, axes, used, table)
    rows = used[:, None] + np.arange(seqlen)
    at = rows // page_size
    slots = np.take_along_axis(table, at, axis=1) * np.int64(page_size) + rows % page_size
    if (same := _two_of_one(slots.ravel())) is not None:
        (b, i), (c, j) = (divmod(token, seqlen) for token in same)
        page, row = divmod(int(slots[b, i]), page_size)
        raise OptionError(
            f"{op}: token {i} of sequence {b} and token {j} of sequence {c} both go to row {row} of page {page}, "
            f"which is block_table[{b}, {at[b, i]}] and block_table[{c}, {at[c, j]}]; no two new tokens may share a "
            "row, give the sequences pages of their own"
        )


def _pages_exist(op: str, axes: Axes, used: Array, table: Array) -> None:
    if not (table.view(np.uint32) >= axes["num_pages"]).any():  # -1 is large too
        return
    seqlen, page_size = axes["seqlen"], axes["page_size"]
    page = np.arange(table.shape[1])
    needed = (page >= used[:, None] // page_size) & (page <= (used[:, None] + (seqlen - 1)) // page_size)
    bad = np.argwhere(needed & ((table < 0) | (table >= axes["num_pages"])))
    if len(bad):
        b, i = (int(n) for n in bad[0])
        raise OptionError(
            f"{op}: block_table[{b}, {i}] is {int(table[b, i])}, not a page in [0, {axes['num_pages']}), but "
            f"sequence {b} grows from {int(used[b])} to {int(used[b]) + seqlen} keys"
        )


def used_rows(op: str, axes: Axes, *, paged: bool) -> Callable[..., tuple[Array, int, int]]:
    """``f(seqused_k, block_table)`` on the CPU, for arrays whose shapes are checked: the rows of the new tokens in
    their sequences, the first and the last of them, after a look at all that :func:`check_used` looks at."""
    from gpu_ops.kernels.numba_cpu.lengths import apart, cached

    page_size, new = axes["page_size" if paged else "max_seqlen"], axes["seqlen"]
    num_pages, steps = axes["num_pages"] if paged else 0, np.arange(new)
    found_of = cached(seqlen_q=0, new=new, page_size=page_size, num_pages=num_pages)
    differ = apart(new, page_size) if paged else None

    def rows_of(used: Array, table: Array | None) -> tuple[Array, int, int]:
        found = found_of(used, table)
        shortest, longest, sound, _ = found[-1].tolist()
        if not sound or (differ and table is not None and not differ(used, table)):  # it has to say where
            check_used(op, axes, used, table)
        starts = found[:-1, 3:]
        return starts if new == 1 else starts + steps, shortest, longest + new - 1

    return rows_of


def token_positions(arrays: Arrays, axes: Axes, positions: Any, place: dict[str, Any]) -> Positions | None:
    """Of every token; None: the rows in its sequence that arrays on a GPU say."""
    op, used = arrays.op, place["seqused_k"]
    if positions is None:
        if used is None:
            raise OptionError(f"{op}: slot_mapping says where tokens are kept; pass positions= as well")
        if arrays.on_cuda:
            return None
        turns = used[:, None] + np.arange(axes["seqlen"])
        return Positions(turns, 0, axes["seqlen"], turns.size)
    if isinstance(positions, (int, float, np.number)):
        raise ShapeError(f"{op}: positions is the number {positions}; pass an array, or seqused_k alone")
    where = positions_of(op, arrays, positions, axes, "bshd" if used is not None else "packed")
    if not arrays.on_cuda:
        where.check_bounds(op)
    return where


def longest_of(
    arrays: Arrays,
    axes: Axes,
    seqlen: Any,
    scaling: RopeScaling,
    where: Positions | None,
    place: dict[str, Any],
) -> int:
    """The length that some scalings go by; of positions on a GPU, which must be waited for, only for those."""
    if seqlen is not None:
        return checks.integer(arrays.op, "seqlen", seqlen, low=0)
    if arrays.on_cuda and scaling.kind not in BY_LENGTH:
        return 0
    if where is not None:
        return max(where.bounds[1] + 1, 0)
    return int(place["seqused_k"].max()) + axes["seqlen"] if axes["batch"] else 0
