"""Arithmetic of the builders of ``BlockMask``, and the checks of their arguments.

Every pattern is covered as tightly as possible: a block is True exactly if one of its pairs is visible. Query ``i``
is at position ``i + seqlen_k - seqlen_q`` among the keys (bottom-right aligned, as in attention). Time and memory
grow with the number of blocks, for documents also with the number of positions, never with the number of pairs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.errors import DTypeError, OptionError, ShapeError

__all__ = ["block_size", "causal", "document", "prefix_lm", "sliding_window", "strided"]

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Built: TypeAlias = tuple[Bools, int, int]
"""Arguments of ``BlockMask``: visible, block_q, block_k."""
LONGEST = 1 << 48  # limit of lengths and block sizes; larger windows and strides are equivalent to it


def causal(seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> Built:
    sizes = _sizes("BlockMask.causal", seqlen_q, seqlen_k, block_q, block_k)
    return _band(*sizes, -1, 0), *sizes[2:]


def sliding_window(seqlen_q: int, seqlen_k: int, window_size: Any, block_q: int, block_k: int) -> Built:
    op = "BlockMask.sliding_window"
    sizes = _sizes(op, seqlen_q, seqlen_k, block_q, block_k)
    left, right = (min(side, 2 * LONGEST) for side in checks.window(op, window_size))
    return _band(*sizes, left, right), *sizes[2:]


def prefix_lm(seqlen_q: int, seqlen_k: int, prefix_len: Any, block_q: int, block_k: int) -> Built:
    op = "BlockMask.prefix_lm"
    sizes = _sizes(op, seqlen_q, seqlen_k, block_q, block_k)
    prefix = _ints(op, "prefix_len", prefix_len)
    if prefix.ndim > 1:
        raise ShapeError(f"{op}: prefix_len has shape {prefix.shape}, expected an int or (batch,)")
    if ((prefix < 0) | (prefix > sizes[1])).any():
        raise OptionError(f"{op}: prefix_len must lie in [0, seqlen_k={sizes[1]}], got {prefix_len}")
    if prefix.ndim:
        prefix = prefix[:, None, None, None]
    first, _ = _edges(sizes[1], sizes[3])
    return _band(*sizes, -1, 0) | (first < prefix), *sizes[2:]


def document(ids_q: Any, ids_k: Any, causal: bool, block_q: int, block_k: int) -> Built:
    op = "BlockMask.document"
    ids_q = _ints(op, "document_ids_q", ids_q)
    ids_k = ids_q if ids_k is None else _ints(op, "document_ids_k", ids_k)
    for name, ids in (("q", ids_q), ("k", ids_k)):
        if ids.ndim not in (1, 2):
            expected = f"(seqlen_{name},) or (batch, seqlen_{name})"
            raise ShapeError(f"{op}: document_ids_{name} has shape {ids.shape}, expected {expected}")
    batches = {len(ids) for ids in (ids_q, ids_k) if ids.ndim == 2}
    if len(batches) > 1:
        raise ShapeError(
            f"{op}: document_ids_q has shape {ids_q.shape} but document_ids_k {ids_k.shape}: "
            "batch must be the same"
        )
    causal = checks.flag(op, "causal", causal)
    *lengths, block_q, block_k = _sizes(op, ids_q.shape[-1], ids_k.shape[-1], block_q, block_k)
    if not batches:
        return _shared(ids_q, ids_k, causal, block_q, block_k), block_q, block_k
    batch = batches.pop()
    blocks = [-(-length // block) for length, block in zip(lengths, (block_q, block_k), strict=True)]
    visible = np.empty((batch, 1, *blocks), np.bool_)
    rows = (np.broadcast_to(ids, (batch, ids.shape[-1])) for ids in (ids_q, ids_k))
    for layer, q, k in zip(visible, *rows, strict=True):
        layer[0] = _shared(q, k, causal, block_q, block_k)
    return visible, block_q, block_k


def strided(
    seqlen_q: int, seqlen_k: int, stride: int, local: int | None, block_q: int, block_k: int
) -> Built:
    op = "BlockMask.strided"
    sizes = _sizes(op, seqlen_q, seqlen_k, block_q, block_k)
    stride = min(checks.integer(op, "stride", stride, low=1), 2 * LONGEST)
    local = stride if local is None else min(checks.integer(op, "local", local, low=0), 2 * LONGEST)
    # The blocks of keys that contain the positions of a block of queries are consecutive, from ``top`` to ``bottom``.
    top, bottom = (position // sizes[3] for position in _positions(*sizes[:3]))
    block = np.arange(-(-sizes[1] // sizes[3]))
    near = (block > top - local) & (block < bottom + local) & (local > 0)
    # A multiple of the stride is among the distances from them.
    every = (bottom - block) // stride > (top - 1 - block) // stride
    return near | every, *sizes[2:]


def block_size(name: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise DTypeError(f"BlockMask.{name} must be an int, got {type(size).__name__}")
    if not 1 <= size <= LONGEST:
        raise OptionError(f"BlockMask.{name} must be at least 1 and at most 2**48, got {size}")
    return int(size)


def _sizes(op: str, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> tuple[int, int, int, int]:
    return (
        checks.integer(op, "seqlen_q", seqlen_q, low=0, high=LONGEST),
        checks.integer(op, "seqlen_k", seqlen_k, low=0, high=LONGEST),
        block_size("block_q", block_q),
        block_size("block_k", block_k),
    )


def _ints(op: str, name: str, x: Any) -> Ints:
    array = np.asarray(x)
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"{op}: {name} must be of integers, got {array.dtype}")
    return array.astype(np.int64)


def _edges(seqlen: int, block: int) -> tuple[Ints, Ints]:
    """First and last position of each block."""
    first = np.arange(0, seqlen, block, dtype=np.int64)
    return first, np.minimum(first + block, seqlen) - 1


def _positions(seqlen_q: int, seqlen_k: int, block_q: int) -> tuple[Ints, Ints]:
    """First and last position of each block of queries among the keys, as columns."""
    first, last = _edges(seqlen_q, block_q)
    return (first + (seqlen_k - seqlen_q))[:, None], (last + (seqlen_k - seqlen_q))[:, None]


def _band(seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, left: int, right: int) -> Bools:
    """Mask of keys from position - left to position + right; -1: no limit."""
    top, bottom = _positions(seqlen_q, seqlen_k, block_q)
    first, last = _edges(seqlen_k, block_k)
    # Windows of neighbours overlap or touch, so those of one block of queries form one interval.
    visible = np.ones((len(top), len(first)), np.bool_)
    if left >= 0:
        visible &= last >= top - left
    if right >= 0:
        visible &= first <= bottom + right
    return visible


def _shared(ids_q: Ints, ids_k: Ints, causal: bool, block_q: int, block_k: int) -> Bools:
    """Mask of keys with the query's id, for one sequence; ``causal``: only those up to its position."""
    visible = np.zeros((-(-len(ids_q) // block_q), -(-len(ids_k) // block_k)), np.bool_)
    if not visible.size:
        return visible
    blocks_q, blocks_k = visible.shape
    _, ids = np.unique(np.concatenate((ids_q, ids_k)), return_inverse=True)
    # (document, block) as one number. Of queries that share both only the last matters, of keys the first.
    held_q, from_end = np.unique(
        (ids[: len(ids_q)] * blocks_q + np.arange(len(ids_q)) // block_q)[::-1], return_index=True
    )
    held_k, first = np.unique(
        ids[len(ids_q) :] * blocks_k + np.arange(len(ids_k)) // block_k, return_index=True
    )
    last = len(ids_k) - 1 - from_end  # bottom-right aligned: the same distance from the end as in the queries
    # Join on the document, by which both are sorted.
    documents = held_q // blocks_q
    start, stop = (np.searchsorted(held_k, document * blocks_k) for document in (documents, documents + 1))
    count = stop - start
    row = np.repeat(np.arange(len(held_q)), count)
    column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - start, count)
    if causal:
        seen = first[column] <= last[row]
        row, column = row[seen], column[seen]
    visible[held_q[row] % blocks_q, held_k[column] % blocks_k] = True
    return visible
