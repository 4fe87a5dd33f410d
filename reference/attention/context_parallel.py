"""Attention over a sequence that is divided among ranks, with the shards of all ranks in one list.

Source: Liu, Zaharia and Abbeel, "Ring Attention", 2023; zigzag: Zhu, ring-flash-attention, 2024; striped: Brandon et
al., 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.reference.attention.forward import attention
from gpu_ops.reference.precision import Array

__all__ = ["join", "ring_attention", "sequence_positions", "shard"]


def sequence_positions(rank: int, size: int, seqlen: int, layout: str = "zigzag") -> list[int]:
    """Positions of the tokens of a rank: of chunks ``0 .. 2 size - 1`` the chunks ``rank`` and ``2 size - 1 - rank``
    (zigzag), a run (contiguous), or every ``size``-th token (striped)."""

    def owner(position: int) -> int:
        if layout == "striped":
            return position % size
        if layout == "contiguous":
            return position // (seqlen // size)
        chunk = position // (seqlen // (2 * size))
        return min(chunk, 2 * size - 1 - chunk)

    return [position for position in range(seqlen) if owner(position) == rank]


def shard(x: Array, size: int, layout: str = "zigzag", axis: int = 1) -> list[Array]:
    """Parts of all ranks along ``axis``."""
    each = (sequence_positions(rank, size, x.shape[axis], layout) for rank in range(size))
    return [np.take(x, positions, axis) for positions in each]


def join(shards: Sequence[Array], layout: str = "zigzag", axis: int = 1) -> Array:
    """Whole array from the parts of all ranks."""
    size, seqlen = len(shards), sum(x.shape[axis] for x in shards)
    order = np.concatenate([sequence_positions(rank, size, seqlen, layout) for rank in range(size)])
    return np.take(np.concatenate(shards, axis), np.argsort(order), axis)


def ring_attention(
    q: Sequence[Array], k: Sequence[Array], v: Sequence[Array], *, layout: str = "zigzag", **options: Any
) -> list[tuple[Array, Array]]:
    """Return out and lse of each rank from its shards: those of :func:`attention` of the whole sequence."""
    out, lse = attention(*(join(x, layout) for x in (q, k, v)), return_lse=True, **options)
    return list(zip(shard(out, len(q), layout), shard(lse, len(q), layout, axis=2), strict=True))
