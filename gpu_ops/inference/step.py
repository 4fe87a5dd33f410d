"""Inputs of a forward over a ragged batch, in addition to the cache: integer arrays, sent to the device as one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops.core.state_arrays import to_device
from gpu_ops.errors import DeviceError, OptionError
from gpu_ops.inference.sequences import CacheSequences, StepPlan

__all__ = [
    "MAX_QUERIES",
    "MIN_SEQUENCES",
    "MIN_TOKENS",
    "Cascade",
    "Step",
    "Tree",
    "cascade_of",
    "check_room",
    "empty_step",
    "filled",
    "sent",
    "written",
]

_ALIGNMENT = 64  # bytes; kernels load up to 16 at a time, from multiples of 16


@dataclass(frozen=True, eq=False)
class Tree:
    """Trees of draft tokens (tree.py): arrays on the cache's device.

    Sequences are padded to ``nodes``, the maximum of their new tokens.
    """

    rows: Any
    """int32 (batch, nodes): index of a node in the tokens of the step. Padding: the first of its sequence."""
    slots: Any
    """int64 (batch, nodes): slot of its key and value, as in ``slot_mapping``."""
    places: Any
    """int32 (total,): index of each token of the step in ``rows``."""
    seqused_k: Any
    """int32 (batch,): number of keys before the tree."""
    bias: Any
    """float32 (batch, 1, nodes, nodes): 0 where a node sees another one, else -inf."""
    last_position: int
    """Last position of all nodes: beyond a window, some of them would not see every key before the tree."""


@dataclass(frozen=True, eq=False)
class Cascade:
    """Shared pages of groups: arrays on the cache's device.

    A group is a run of sequences; without shared pages it has 0 keys here.
    """

    cu_seqlens_q: Any
    """int32 (groups + 1,): starts of the tokens of each group, and the total."""
    seqused_k: Any
    """int32 (groups,): tokens in the shared pages."""
    block_table: Any
    """int32 (groups, width): shared pages."""
    own_seqused_k: Any
    """int32 (batch,): keys of each sequence in its other pages."""
    own_block_table: Any
    """int32 (batch, width): other pages of each sequence."""
    max_seqlen_q: int
    """Tokens of the longest group."""


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens of some sequences, and the places of their keys and values: arrays on the cache's device.

    Row b of the tables is the b-th sequence that was passed to ``reserve``. One forward per layer::

        rope_append_kv(q, k, v, keys, values, slot_mapping=step.slot_mapping, positions=step.positions, ...)
        attention_varlen(q, keys, values, step.cu_seqlens_q, block_table=step.block_table,
                         seqused_k=step.seqused_k, max_seqlen_q=step.max_seqlen_q, causal=True, ...)

    If every sequence has one token, ``attention_decode`` with ``q[:, None]`` does the same. With ``tree`` both differ
    from what the model computes; :func:`attend` is correct in all cases.
    """

    tokens: Any
    """int32 (total,): token ids, the sequences end to end. Padding: 0."""
    positions: Any
    """int32 (total,): position of each token in its sequence; in a tree, by its depth. Padding: 0."""
    cu_seqlens_q: Any
    """int32 (batch + 1,): starts of the tokens of each sequence, and the total."""
    seqused_k: Any
    """int32 (batch,): number of keys of each sequence, including the new ones. Padding: 0."""
    block_table: Any
    """int32 (batch, width): pages of each sequence. Unused entries: -1."""
    slot_mapping: Any
    """int64 (total,): page * page_size + row of each token. Padding: -1, not stored."""
    max_seqlen_q: int
    """New tokens of the longest sequence, or the limit passed to ``empty_step``."""
    buffer: Any = field(repr=False)
    """uint8: memory of all these arrays."""
    logit_rows: Any = None
    """int32 (rows,): tokens whose logits are needed, if they are not the last of each sequence."""
    tree: Tree | None = None
    """Ancestors that each token sees, if tokens branch."""
    cascade: Cascade | None = None
    """Pages at the start of many sequences, to be read once for all of them, if that is faster."""


def empty_step(tokens: int, batch: int, width: int, max_seqlen_q: int, device: str) -> Step:
    """Make a step of padding, for ``tokens`` new tokens of ``batch`` sequences of up to ``width`` pages."""
    _check_padding("empty_step", tokens, batch, max_seqlen_q)
    step = _step(np.empty(_layout(tokens, batch, width)[1], np.uint8), tokens, batch, width, max_seqlen_q)
    _pad(step, 0, 0)
    return written(step, None, device)


def filled(sequences: CacheSequences, plan: StepPlan, out: Step | None) -> Step:
    """Step in host memory for a plan that has been carried out, with the shapes of ``out`` if that is passed."""
    counts = np.array([len(new) for new in plan.tokens.values()])
    starts, total, batch = np.array(plan.starts), int(counts.sum()), len(counts)
    shape = (total, batch, plan.width, int(counts.max())) if out is None else _shape(out)
    step = _step(np.empty(_layout(*shape[:3])[1], np.uint8), *shape)
    step.tokens[:total] = [token for new in plan.tokens.values() for token in new]
    step.cu_seqlens_q[0] = 0
    np.cumsum(counts, out=step.cu_seqlens_q[1 : batch + 1])
    step.seqused_k[:batch] = starts + counts
    step.block_table.fill(-1)
    for table, handle in zip(step.block_table, plan.tokens, strict=False):
        pages = sequences.alive[handle].pages
        table[: len(pages)] = pages
    row = np.repeat(np.arange(batch), counts)
    positions = np.arange(total) + (starts - step.cu_seqlens_q[:batch])[row]
    step.positions[:total] = positions
    page, at = np.divmod(positions, sequences.pool.page_size)
    step.slot_mapping[:total] = step.block_table[row, page].astype(np.int64) * sequences.pool.page_size + at
    _pad(step, total, batch)
    return step


def written(step: Step, out: Step | None, device: str) -> Step:
    """Copy a step in host memory to the device, to the arrays of ``out`` if that is passed."""
    on_device = to_device(step.buffer, device, blocking=False)
    if out is None and on_device is step.buffer:
        return step
    if out is None:
        return _step(on_device, *_shape(step))
    out.buffer[...] = on_device
    return out


def sent(arrays: dict[str, Any], device: str) -> dict[str, Any]:
    """Send arrays in host memory to the device in one copy."""
    starts = np.cumsum([0] + [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in arrays.values()]).tolist()
    buffer = np.empty(starts[-1], np.uint8)
    for x, start in zip(arrays.values(), starts, strict=False):
        buffer[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    on_device = to_device(buffer, device, blocking=False)
    return {
        name: on_device[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        for (name, x), start in zip(arrays.items(), starts, strict=False)
    }


def check_room(out: Any, plan: StepPlan, device: str) -> None:
    """Check that ``out`` is a step with room for this plan."""
    if not isinstance(out, Step):
        raise OptionError(f"reserve: out must be a Step made by empty_step(), got {type(out).__name__}")
    if isinstance(out.buffer, np.ndarray) != (device != "cuda"):
        raise DeviceError("reserve: out was made by a cache on another device; use empty_step() of this one")
    total, batch = sum(map(len, plan.tokens.values())), len(plan.tokens)
    longest = max(map(len, plan.tokens.values()))
    names = ("tokens", "batch", "width", "max_seqlen_q")
    for name, room, need in zip(names, _shape(out), (total, batch, plan.width, longest), strict=True):
        if need > room:
            raise OptionError(f"reserve: out was made with {name}={room}, and this step needs {need}")
    _check_padding("reserve", _shape(out)[0] - total, _shape(out)[1] - batch, out.max_seqlen_q)


def _check_padding(op: str, tokens: int, rows: int, max_seqlen_q: int) -> None:
    """Check that padding fits into rows without a sequence, which must not be longer than others may be."""
    if tokens > rows * max_seqlen_q:
        raise OptionError(
            f"{op}: the step has {tokens} tokens of padding, which {rows} rows of no sequence with up to "
            f"{max_seqlen_q} tokens each cannot take; make it with a larger batch"
        )


def _shape(step: Step) -> tuple[int, int, int, int]:
    batch, width = step.block_table.shape
    return step.tokens.shape[0], batch, width, step.max_seqlen_q


@functools.lru_cache(256)
def _layout(
    tokens: int, batch: int, width: int
) -> tuple[dict[str, tuple[slice, tuple[int, ...], np.dtype[Any]]], int]:
    """Place, shape and dtype of each array in the buffer, and the size of the buffer."""
    shapes = {
        "tokens": (tokens,),
        "positions": (tokens,),
        "cu_seqlens_q": (batch + 1,),
        "seqused_k": (batch,),
        "block_table": (batch, width),
        "slot_mapping": (tokens,),
    }
    layout, at = {}, 0
    for name, shape in shapes.items():
        dtype = np.dtype(np.int64 if name == "slot_mapping" else np.int32)
        nbytes = math.prod(shape) * dtype.itemsize
        layout[name] = slice(at, at + nbytes), shape, dtype
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, at


def _step(buffer: Any, tokens: int, batch: int, width: int, max_seqlen_q: int) -> Step:
    layout = _layout(tokens, batch, width)[0]
    views = {name: buffer[place].view(dtype).reshape(shape) for name, (place, shape, dtype) in layout.items()}
    return Step(**views, max_seqlen_q=max_seqlen_q, buffer=buffer)


def _pad(step: Step, total: int, batch: int) -> None:
    """Pad after the tokens and sequences; the padding is spread over rows without a sequence."""
    padding, rows = step.tokens.shape[0] - total, step.seqused_k.shape[0] - batch
    step.tokens[total:] = 0
    step.positions[total:] = 0
    step.slot_mapping[total:] = -1
    step.seqused_k[batch:] = 0
    step.block_table[batch:] = -1
    if rows:
        step.cu_seqlens_q[batch:] = total + np.arange(rows + 1) * padding // rows


# Cascade attention: pages at the start of many sequences of a step are read once, for the queries of all of them.
#
# Neighbours in a step that share their first pages form a group. For the shared pages the group is one sequence
# of many queries; for the other pages each sequence is separate. The two results are merged by lse. Source:
# Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference" (FlashInfer), 2024.

# Time of both parts and the merge over that of one call, decoding in float32 on two cores. With 32 queries of each
# sequence the ratios are 0.60 and 0.94, since products dominate.
#
#     sequences  shared tokens  8/8 heads of 64  32/8 heads of 128
#            16           2048             0.36               0.42
#            16            512             0.52               0.42
#            16            256             0.82               0.82
#             8            512             0.71               0.34
#             8            256             0.86               1.04
#             5           2048             0.62               0.96
MIN_SEQUENCES = 8
MIN_TOKENS = 512
MAX_QUERIES = 32


def cascade_of(step: Step, page_size: int, device: str) -> Cascade | None:
    """Groups of a step in host memory, without padding; None if no group is worth a cascade."""
    table, starts = step.block_table, step.cu_seqlens_q
    batch, width = table.shape
    if batch < MIN_SEQUENCES or width * page_size < MIN_TOKENS or step.max_seqlen_q > MAX_QUERIES:
        return None
    at = -(-MIN_TOKENS // page_size) - 1  # the last page that a group must share
    if np.count_nonzero((table[1:, at] == table[:-1, at]) & (table[1:, at] >= 0)) < MIN_SEQUENCES - 1:
        return None
    equal = (table[1:] == table[:-1]) & (table[1:] >= 0)
    # pages that a row shares with the previous one
    common = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    first = np.flatnonzero(np.r_[True, common * page_size < MIN_TOKENS])  # rows that begin a group
    ends = np.r_[first[1:], batch]
    # Pages written in this step belong to one sequence each: shared pages end before every new token.
    shared = np.array(
        [common[a : b - 1].min() if b - a >= MIN_SEQUENCES else 0 for a, b in zip(first, ends, strict=True)]
    )
    if not shared.any():
        return None
    by_row = np.repeat(shared, ends - first)
    own_table = np.full((batch, width - int(by_row.min())), -1, np.int32)
    for row, pages, n in zip(own_table, table, by_row, strict=True):
        row[: width - n] = pages[n:]
    cu_seqlens_q = np.append(starts[first], starts[-1])
    arrays = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": (shared * page_size).astype(np.int32),
        "block_table": table[first, : shared.max()],
        "own_seqused_k": (step.seqused_k - by_row * page_size).astype(np.int32),
        "own_block_table": own_table,
    }
    return Cascade(**sent(arrays, device), max_seqlen_q=int(np.diff(cu_seqlens_q).max()))
