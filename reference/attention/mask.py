"""Visibility of keys to queries, and the ALiBi term of scores.

Query ``i`` is aligned with key ``i + offset``, and all position rules count from there. By default the diagonal is
bottom-right aligned, the last query with the last key: ``offset = seqlen_k - seqlen_q``.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from gpu_ops.reference.precision import Array

__all__ = ["BlockMaskLike", "alibi_bias", "distance", "expand_block_mask", "visible_keys"]


class BlockMaskLike(Protocol):
    """Attributes that a block mask must provide (``gpu_ops.BlockMask`` does)."""

    @property
    def visible(self) -> Any: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...


def distance(seqlen_q: int, seqlen_k: int, offset: int) -> Array:
    """Distance of key ``j`` to the left of query ``i``: ``i + offset - j``."""
    query = np.arange(seqlen_q)[:, None] + offset
    return query - np.arange(seqlen_k)[None, :]


def expand_block_mask(block_mask: BlockMaskLike, seqlen_q: int, seqlen_k: int) -> Array:
    """The dense form ``(..., seqlen_q, seqlen_k)``; blocks count from query 0 and key 0."""
    visible = np.asarray(block_mask.visible, dtype=bool)
    blocks = (-(-seqlen_q // block_mask.block_q), -(-seqlen_k // block_mask.block_k))
    visible = np.broadcast_to(visible, (*visible.shape[:-2], *blocks))
    block_of_query = np.arange(seqlen_q) // block_mask.block_q
    block_of_key = np.arange(seqlen_k) // block_mask.block_k
    return visible[..., block_of_query[:, None], block_of_key[None, :]]


def visible_keys(
    shape: tuple[int, int, int, int],
    *,
    causal: bool,
    window_size: tuple[int, int],
    offset: int,
    bias: Array | None,
    block_mask: BlockMaskLike | None,
) -> Array:
    """Bool ``(batch, nheads, seqlen_q, seqlen_k)``: the intersection of all masks, including -inf in ``bias``."""
    seqlen_q, seqlen_k = shape[2:]
    left, right = window_size
    d = distance(seqlen_q, seqlen_k, offset)
    visible = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if causal:
        visible &= d >= 0
    if left >= 0:
        visible &= d <= left
    if right >= 0:
        visible &= d >= -right
    visible = np.broadcast_to(visible, shape)
    if bias is not None:
        visible = visible & (bias != -np.inf)
    if block_mask is not None:
        visible = visible & expand_block_mask(block_mask, seqlen_q, seqlen_k)
    return visible


def alibi_bias(slopes: Array, seqlen_q: int, seqlen_k: int, offset: int) -> Array:
    """``-slope * |i + offset - j|`` as ``(batch or 1, nheads, seqlen_q, seqlen_k)``.

    Press, Smith and Lewis, "Train Short, Test Long" (2022), with the distance taken on both sides.
    """
    per_batch = slopes if slopes.ndim == 2 else slopes[None]
    return -per_batch[:, :, None, None] * np.abs(distance(seqlen_q, seqlen_k, offset))
