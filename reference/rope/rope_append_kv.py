"""RMSNorm of each head of q and k, RoPE of both, and the write of k and v into a cache.

:mod:`gpu_ops.reference.norm.rmsnorm` (casting ``fp32``) and :mod:`.rope` define the steps. Here nothing is rounded
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.reference.attention.quantized_pages import quantize
from gpu_ops.reference.norm.rmsnorm import rmsnorm
from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, steps
from gpu_ops.reference.rope.rope import RotaryOptions, rotated

__all__ = ["HeadOptions", "cache_slots", "rope_append_kv"]


def cache_slots(
    shape: tuple[int, ...],
    seqused_k: Array | None,
    block_table: Array | None,
    slot_mapping: Array | None,
    page_size: int,
) -> Array:
    """Slot of each token of ``shape``, (batch, seqlen) or (total,): page * page_size + row; negative: not stored.

    In a contiguous cache, sequence b has page b.
    """
    if slot_mapping is not None:
        return slot_mapping
    assert seqused_k is not None
    rows = seqused_k[:, None].astype(np.int64) + np.arange(shape[1])
    if block_table is None:
        return np.arange(shape[0])[:, None] * page_size + rows
    pages = np.take_along_axis(block_table.astype(np.int64), rows // page_size, axis=1)
    return pages * page_size + rows % page_size


@dataclass(frozen=True)
class HeadOptions(RotaryOptions):
    """Options of what is done to each head of q and k: its norm, if there are weights, and its rotation."""

    q_weight: Array | None = None
    """(head_dim,), like ``k_weight``."""
    k_weight: Array | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0


@takes(HeadOptions)
def rope_append_kv(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    slot_mapping: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    positions: Array | None = None,
    precision: Precision = "rounded",
    **options: Any,
) -> tuple[Array, ...]:
    """Return the rotated q, and the caches with the new rows. No argument is changed.

    q (batch, seqlen, nheads, head_dim), k and v (batch, seqlen, nheads_kv, head_dim), caches (batch, max_seqlen,
    nheads_kv, head_dim) or, with ``block_table``, (num_pages, page_size, nheads_kv, head_dim): token i of sequence b
    goes to row ``seqused_k[b] + i`` of its cache, which is also its position unless ``positions`` is given. Or q, k
    and v (total, nheads, head_dim) with ``slot_mapping`` and ``positions`` (total,).

    Caches of int8 or uint8 (e4m3) have scales, (num_pages, page_size, nheads_kv), which are returned after them.
    """
    heads = HeadOptions(**options)
    p = steps(precision, q.dtype)
    inner: Precision = "naive" if precision == "naive" else "float64"
    if positions is None:
        assert seqused_k is not None
        positions = seqused_k[:, None] + np.arange(q.shape[1])

    def normalised(x: Array, weight: Array | None) -> Any:
        if weight is None:
            return x if inner == "naive" else p.load(x)
        return rmsnorm(x, weight, eps=heads.eps, weight_offset=heads.weight_offset, precision=inner)

    q_rotated, k_rotated = rotated(
        normalised(q, heads.q_weight), normalised(k, heads.k_weight), positions, heads, precision=inner
    )
    slots = cache_slots(q.shape[:-2], seqused_k, block_table, slot_mapping, k_cache.shape[1])
    kept = slots >= 0
    place = (slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1])
    if k_scale is not None and v_scale is not None:
        caches = [np.array(x) for x in (k_cache, v_cache, k_scale, v_scale)]
        for i, x in enumerate((k_rotated, v)):
            caches[i][place], caches[2 + i][place] = quantize(x[kept], k_cache.dtype)
        return p.store(q_rotated), *caches
    new_k, new_v = np.array(p.store(k_cache)), np.array(p.store(v_cache))
    new_k[place], new_v[place] = p.store(k_rotated)[kept], p.store(v)[kept]
    return p.store(q_rotated), new_k, new_v
