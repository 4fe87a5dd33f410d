"""Trees of draft tokens: the tokens that each one sees, and the slots that move if some are kept.

A node of a tree sees the tokens before the tree, its ancestors and itself. All nodes see all tokens before the tree;
within the tree a bias of 0 or -inf masks tokens. The two results are merged by lse. Source: Miao et al.,
"SpecInfer", 2024; Cai et al., "Medusa", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.inference.sequences import CacheSequences
from gpu_ops.inference.step import Step, Tree, sent

__all__ = ["depths", "moves", "parent_list", "planted", "read_parents", "read_paths"]


def read_parents(new: Mapping[int, list[int]], parents: Any) -> dict[int, list[int]]:
    """Check the argument of ``reserve``: for some of the sequences, the parent of each new token."""
    if not isinstance(parents, Mapping):
        raise OptionError(
            f"reserve: parents is {type(parents).__name__}; pass a dict, {{handle: parent of each token}}, "
            "with -1 for a token that follows the sequence"
        )
    result: dict[int, list[int]] = {}
    for handle, parent_ids in parents.items():
        if handle not in new:
            raise OptionError(f"reserve: parents has sequence {handle!r}, which gets no tokens in this step")
        result[int(handle)] = parent_list("reserve", f"parents[{handle}]", parent_ids, len(new[handle]))
    return result


def parent_list(op: str, name: str, values: Any, count: int) -> list[int]:
    """Check the parents of ``count`` tokens and return them."""
    parents = _indices(op, name, values)
    if len(parents) != count:
        raise OptionError(f"{op}: {name} has {len(parents)} entries for {count} tokens")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise OptionError(
                f"{op}: {name}[{i}] is {parent}; the parent of token {i} is a token before it, in [0, {i}), or -1: "
                "it follows the sequence"
            )
    return parents


def read_paths(sequences: CacheSequences, paths: Any) -> dict[int, list[int]]:
    """Check the argument of ``accept``: tokens of each tree of the open step, down from one without a parent."""
    if not isinstance(paths, Mapping):
        raise OptionError(f"accept: paths is {type(paths).__name__}; pass a dict, {{handle: tokens to keep}}")
    if set(paths) != set(sequences.parents):
        raise OptionError(
            f"accept: paths are given for the sequences {list(paths)}, and the open step has parents for "
            f"{list(sequences.parents)}"
        )
    result = {}
    for handle, node_ids in paths.items():
        parents, label = sequences.parents[handle], f"paths[{handle}]"
        result[int(handle)] = path = _indices("accept", label, node_ids)
        above = -1
        for i, node in enumerate(path):
            if not 0 <= node < len(parents):
                raise OptionError(f"accept: {label}[{i}] is {node}, not in [0, {len(parents)})")
            if parents[node] != above:
                raise OptionError(
                    f"accept: {label}[{i}] is {node}, whose parent is {parents[node]} and not {above}"
                )
            above = node
    return result


def _indices(op: str, name: str, values: Any) -> list[int]:
    """Convert a sequence of integers to a list."""
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise OptionError(f"{op}: {name} is {type(values).__name__}, expected integers")
    return [checks.integer(op, f"{name}[{i}]", value) for i, value in enumerate(values)]


def depths(parents: Sequence[int]) -> list[int]:
    """Number of ancestors of each node."""
    result: list[int] = []
    for parent in parents:
        result.append(result[parent] + 1 if parent >= 0 else 0)
    return result


def planted(
    step: Step, parents: Mapping[int, list[int]], handles: Sequence[int], device: str
) -> dict[str, Any]:
    """Set the positions of a step's tokens in host memory by their depths; return its other arrays for trees.

    ``handles``: those of all its sequences, in order; ``parents``: those of some.
    """
    starts = step.cu_seqlens_q
    counts, before = np.diff(starts), step.seqused_k - np.diff(starts)
    wanted = [
        np.arange(a, b) if handle in parents else [b - 1]
        for handle, a, b in zip(handles, starts[:-1], starts[1:], strict=True)
    ]
    arrays: dict[str, Any] = {"logit_rows": np.concatenate(wanted).astype(np.int32)}
    if all(parent == i - 1 for tree_parents in parents.values() for i, parent in enumerate(tree_parents)):
        return sent(arrays, device)  # no token branches: causal attention is correct
    nodes = int(counts.max())
    bias = np.full((len(handles), 1, nodes, nodes), -np.inf, np.float32)
    for b, handle in enumerate(handles):
        tree_parents = parents.get(handle, range(-1, counts[b] - 1))
        step.positions[starts[b] : starts[b + 1]] = before[b] + np.array(depths(tree_parents))
        for i, parent in enumerate(tree_parents):
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


def moves(sequences: CacheSequences, paths: Mapping[int, list[int]]) -> tuple[list[int], list[int]]:
    """Source and target slots of the kept tokens, which move so that they follow their sequences."""
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
