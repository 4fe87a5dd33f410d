"""RMSNorm of each head of q and k, RoPE of both, and the write of k and v into a cache.

:mod:`.rmsnorm` (casting ``fp32``) and :mod:`.rope` define the steps. Here nothing is rounded between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.reference.attention.quantized_pages import quantize
from gpu_ops.reference.norm.rmsnorm import rmsnorm
from gpu_ops.reference.precision import Array, Precision, steps
from gpu_ops.reference.rope.rope import rope
from gpu_ops.reference.rope.rope_scaling import Scaling

__all__ = ["cache_slots", "rope_append_kv"]


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
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    positions: Array | None = None,
    theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    seqlen: int | None = None,
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """Return the rotated q, and the caches with the new rows. No argument is changed.

    q (batch, seqlen, nheads, head_dim), k and v (batch, seqlen, nheads_kv, head_dim), caches (batch, max_seqlen,
    nheads_kv, head_dim) or, with ``block_table``, (num_pages, page_size, nheads_kv, head_dim): token i of sequence b
    goes to row ``seqused_k[b] + i`` of its cache, which is also its position unless ``positions`` is given. Or q, k
    and v (total, nheads, head_dim) with ``slot_mapping`` and ``positions`` (total,).

    Caches of int8 or uint8 (e4m3) have scales, (num_pages, page_size, nheads_kv), which are returned after them.
    """
    p = steps(precision, q.dtype)
    inner: Precision = "naive" if precision == "naive" else "float64"
    if positions is None:
        assert seqused_k is not None
        positions = seqused_k[:, None] + np.arange(q.shape[1])

    def normalised(x: Array, weight: Array | None) -> Any:
        if weight is None:
            return x if inner == "naive" else p.load(x)
        return rmsnorm(x, weight, eps=eps, weight_offset=weight_offset, precision=inner)

    q_rotated, k_rotated = rope(
        normalised(q, q_weight),
        normalised(k, k_weight),
        positions=positions,
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=scaling,
        seqlen=seqlen,
        precision=inner,
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
