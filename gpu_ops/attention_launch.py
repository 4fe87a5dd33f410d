"""From a checked attention problem to the CPU kernels' arguments, and to the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.arrays import Array
from gpu_ops.attention_problem import Problem

__all__ = ["backward", "config", "forward"]


def config(problem: Problem, num_splits: int = 0) -> Any:
    """The CPU kernel's tile configuration for this problem."""
    from gpu_ops.kernels.numba_cpu.attention_config import select_config

    p = problem
    plain = p.options.bias is None and p.options.block_mask is None
    return select_config(p.batch, p.nheads, p.nheads_kv, p.seqlen_q, p.seqlen_k, num_splits, decode=plain)


def forward(problem: Problem, out: Array, lse: Array, num_splits: int = 0) -> None:
    """Fill ``out`` (batch, seqlen_q, nheads, head_dim_v) and ``lse`` (batch, nheads, seqlen_q)."""
    from gpu_ops.kernels.numba_cpu import attention as kernels

    p = problem
    kernels.forward(p.q, p.k, p.v, out, lse, p.sequences, config=config(p, num_splits), **_arguments(p))


def backward(
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
) -> Array:
    """Fill the gradients; returns delta = sum over head_dim_v of dout * out, (batch, nheads, seqlen_q)."""
    from gpu_ops.kernels.numba_cpu import attention_backward as kernels

    p = problem
    return kernels.backward(
        dout, p.q, p.k, p.v, out, lse, dq, dk, dv, p.sequences, dbias=dbias, **_arguments(p)
    )


def _arguments(p: Problem) -> dict[str, Any]:
    from gpu_ops.kernels.numba_cpu.attention_tile import UNLIMITED

    o = p.options
    left, right = (UNLIMITED if side < 0 else side for side in o.window_size)
    arguments: dict[str, Any] = {
        "max_seqlen_q": p.seqlen_q,
        "max_seqlen_k": p.seqlen_k,
        "left": left,
        "right": min(right, 0) if o.causal else right,
        "softmax_scale": o.softmax_scale,
        "softcap": o.softcap,
        "packed": p.packed,
        "block_table": p.block_table,
    }
    if o.sinks is not None:
        arguments["sinks"] = o.sinks.astype(np.float64)
    if o.alibi_slopes is not None:
        slopes = o.alibi_slopes.astype(np.float64)
        arguments["alibi_slopes"] = np.broadcast_to(slopes, (p.batch, p.nheads))
    if o.bias is not None:
        # Kernels need unit stride on the last axis: only that axis is written out, the others stay broadcast.
        bias = np.atleast_1d(o.bias)
        if bias.shape[-1] != p.seqlen_k or bias.strides[-1] != bias.itemsize:
            bias = np.ascontiguousarray(np.broadcast_to(bias, (*bias.shape[:-1], p.seqlen_k)))
        arguments["bias"] = np.broadcast_to(bias, (p.batch, p.nheads, p.seqlen_q, p.seqlen_k))
    if o.block_mask is not None:
        mask = o.block_mask
        blocks = mask.num_blocks(p.seqlen_q, p.seqlen_k)
        arguments["visible"] = np.broadcast_to(np.asarray(mask.visible), (p.batch, p.nheads, *blocks))
        arguments["block_q"], arguments["block_k"] = mask.block_q, mask.block_k
    return arguments
