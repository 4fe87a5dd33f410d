"""Draft tokens in trees: what each of them sees, and which slots move when some are kept.

A node of a tree sees the tokens before the tree, its ancestors and itself. All nodes see the tokens before it; within
the tree a bias of 0 and -inf says what they see; the two results are merged by lse. Source: Miao et al., "SpecInfer",
2024; Cai et al., "Medusa", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.inference.sequences import Sequences
from gpu_ops.inference.step import Step, sent

__all__ = ["Tree", "depths", "moves", "parent_list", "planted", "read_parents", "read_paths"]


@dataclass(frozen=True, eq=False)
class Tree:
    """Arrays on the cache's device. Sequences are padded to ``nodes``, the most new tokens of one."""

    rows: Any
    """int32 (batch, nodes): where a node is among the tokens of the step. Padding: the first of its sequence."""
    slots: Any
    """int64 (batch, nodes): where its key and value are, as in ``slot_mapping``."""
    places: Any
    """int32 (total,): where each token of the step is in ``rows``."""
    seqused_k: Any
    """int32 (batch,): keys before the tree."""
    bias: Any
    """float32 (batch, 1, nodes, nodes): 0 where a node sees another one, else -inf."""
    last_position: int
    """Of all nodes: beyond a window, some of them would not see every key before the tree."""


def read_parents(new: Mapping[int, list[int]], parents: Any) -> dict[int, list[int]]:
    """The argument of ``reserve``, checked: for some of the sequences, the parent of each new token."""
    if not isinstance(parents, Mapping):
        raise OptionError(
            f"reserve: parents is {type(parents).__name__}; pass a dict, {{handle: parent of each token}}, "
            "with -1 for a token that follows the sequence"
        )
    found: dict[int, list[int]] = {}
    for handle, given in parents.items():
        if handle not in new:
            raise OptionError(f"reserve: parents has sequence {handle!r}, which gets no tokens in this step")
        found[int(handle)] = parent_list("reserve", f"parents[{handle}]", given, len(new[handle]))
    return found


def parent_list(op: str, name: str, values: Any, count: int) -> list[int]:
    """The parents of ``count`` tokens, checked."""
    found = _indices(op, name, values)
    if len(found) != count:
        raise OptionError(f"{op}: {name} has {len(found)} entries for {count} tokens")
    for i, parent in enumerate(found):
        if not -1 <= parent < i:
            raise OptionError(
                f"{op}: {name}[{i}] is {parent}; the parent of token {i} is a token before it, in [0, {i}), or -1: "
                "it follows the sequence"
            )
    return found


def read_paths(sequences: Sequences, paths: Any) -> dict[int, list[int]]:
    """The argument of ``accept``, checked: tokens of each tree of the open step, from one that has no parent down."""
    if not isinstance(paths, Mapping):
        raise OptionError(f"accept: paths is {type(paths).__name__}; pass a dict, {{handle: tokens to keep}}")
    if set(paths) != set(sequences.parents):
        raise OptionError(
            f"accept: paths are given for the sequences {list(paths)}, and the open step has parents for "
            f"{list(sequences.parents)}"
        )
    found = {}
    for handle, given in paths.items():
        parents, label = sequences.parents[handle], f"paths[{handle}]"
        found[int(handle)] = path = _indices("accept", label, given)
        above = -1
        for i, node in enumerate(path):
            if not 0 <= node < len(parents):
                raise OptionError(f"accept: {label}[{i}] is {node}, not in [0, {len(parents)})")
            if parents[node] != above:
                raise OptionError(
                    f"accept: {label}[{i}] is {node}, whose parent is {parents[node]} and not {above}"
                )
            above = node
    return found


def _indices(op: str, name: str, values: Any) -> list[int]:
    """A sequence of integers."""
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise OptionError(f"{op}: {name} is {type(values).__name__}, expected integers")
    return [checks.integer(op, f"{name}[{i}]", value) for i, value in enumerate(values)]


def depths(parents: Sequence[int]) -> list[int]:
    """Of each node: how many ancestors it has."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def planted(
    step: Step, parents: Mapping[int, list[int]], handles: Sequence[int], device: str
) -> dict[str, Any]:
    """Give the tokens of a step in host memory the positions of their depths; what else the step has for its trees.

    ``handles``: of all its sequences, in order; ``parents``: of some.
    """
    starts = step.cu_seqlens_q
    counts, before = np.diff(starts), step.seqused_k - np.diff(starts)
    wanted = [
        np.arange(a, b) if handle in parents else [b - 1]
        for handle, a, b in zip(handles, starts[:-1], starts[1:], strict=True)
    ]
    arrays: dict[str, Any] = {"logit_rows": np.concatenate(wanted).astype(np.int32)}
    if all(parent == i - 1 for own in parents.values() for i, parent in enumerate(own)):
        return sent(arrays, device)  # no token branches: causal attention is the model's
    nodes = int(counts.max())
    bias = np.full((len(handles), 1, nodes, nodes), -np.inf, np.float32)
    for b, handle in enumerate(handles):
        own = parents.get(handle, range(-1, counts[b] - 1))
        step.positions[starts[b] : starts[b + 1]] = before[b] + np.array(depths(own))
        for i, parent in enumerate(own):
            if parent >= 0:
                bias[b, 0, i] = bias[b, 0, parent]
            bias[b, 0, i, i] = 0
    at = np.arange(nodes)
    rows = starts[:-1, None] + np.where(at < counts[:, None], at, 0)
    arrays |= {
        "rows": rows.astype(np.int32),
        "slots": step.slot_mapping[rows],
        "places": np.flatnonzero((at < counts[:, None]).reshape(-1)).astype(np.int32),
        "seqused_k": before.astype(np.int32),
        "bias": bias,
    }
    on_device = sent(arrays, device)
    logit_rows = on_device.pop("logit_rows")
    return {"logit_rows": logit_rows, "tree": Tree(**on_device, last_position=int(step.positions.max()))}


def moves(sequences: Sequences, paths: Mapping[int, list[int]]) -> tuple[list[int], list[int]]:
    """From which slots to which ones the kept tokens move, so that they follow their sequences."""
    size = sequences.pool.page_size
    source: list[int] = []
    target: list[int] = []
    for handle, path in paths.items():
        s, start = sequences.alive[handle], sequences.opened("accept")[handle]
        for i, node in enumerate(path):
            if node != i:
                for slots, at in ((source, start + node), (target, start + i)):
                    slots.append(s.pages[at // size] * size + at % size)
    return source, target
