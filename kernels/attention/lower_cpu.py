"""Attention on the CPU, forward: tiles, and the arguments of ``cpu/forward.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.attention.problem import UNLIMITED_INT64, Attention, as_bshd, sequence_table
from gpu_ops.kernels.common.arguments import seed_on_host
from gpu_ops.kernels.program import Builder, Spec

__all__ = ["forward", "optional_arrays", "optional_tensors", "prepared"]

Array = np.ndarray[Any, Any]


def forward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.cpu import forward as kernels
    from gpu_ops.kernels.attention.cpu.config import DECODE_ROWS, select_config

    a = Attention.of(spec)
    decodes = a.bias is None and a.visible is None and not a.dropped
    config = select_config(
        a.batch,
        a.nheads,
        a.nheads_kv,
        a.seqlen_q,
        a.seqlen_k,
        a.num_splits,
        decode=decodes,
        dtype=a.k.dtype,
        dims=a.head_dim + a.head_dim_v,
    )
    few = DECODE_ROWS // (a.nheads // a.nheads_kv) if a.packed and decodes and config.kernel == "tiled" else 0
    more: dict[str, Any] = {"config": config, "results": (a.out.dtype, a.lse_dtype)}
    if few:
        attend = prepared(kernels.prepare_ragged, a, few=few, **more)
    else:
        attend = prepared(kernels.prepare, a, **more)
    if a.lse is None:
        builder.empty(a.lse_shape, a.lse_dtype, "lse")
    if a.known_lengths:
        builder.constant(sequence_table(a), "sequences")
    layout, k_name, v_name = spec["layout"], a.k.name, a.v.name
    has_options = bool(optional_tensors(a))

    def run(views: Mapping[str, Any]) -> None:
        q, k, v, out, lse = views["q"], views[k_name], views[v_name], views["out"], views["lse"]
        if layout != "bshd":
            q, k = as_bshd(q, layout), as_bshd(k, layout)
            v, out = as_bshd(v, layout), as_bshd(out, layout)
            lse = lse if lse.ndim == 3 else lse[None]
        attend.run(q, k, v, out, lse, views["sequences"], optional_arrays(a, views) if has_options else {})

    text = f"{config}; sequences of up to {few} queries: decode kernel" if few else str(config)
    builder.call(run, text, attend.scratch)


def prepared(prepare: Callable[..., Any], a: Attention, **more: Any) -> Any:
    """Call ``prepare`` of the forward or backward kernels for this call. Its result has ``run`` and ``scratch``."""
    left, right = a.window(UNLIMITED_INT64)
    return prepare(
        a.q,  # only shape and dtype of the arrays are read
        a.k,
        a.v,
        a.batch,
        max_seqlen_q=a.seqlen_q,
        max_seqlen_k=a.seqlen_k,
        left=left,
        right=right,
        block_q=a.block_q,
        block_k=a.block_k,
        packed=a.packed,
        given=optional_tensors(a),
        **a.numbers,
        **more,
    )


def optional_tensors(a: Attention) -> dict[str, Any]:
    """Arrays of a call in addition to q, k and v, by the names of the CPU kernels."""
    from gpu_ops.kernels.attention.cpu.config import OPTIONAL

    return {name: x for name in OPTIONAL if (x := getattr(a, name)) is not None}


def optional_arrays(a: Attention, views: Mapping[str, Any]) -> dict[str, Array]:
    """Optional arrays of one call, in the form that the CPU kernels take."""
    arrays = {}
    if a.block_table is not None:
        arrays["block_table"] = views["block_table"]
    if a.k_scale is not None:
        arrays["k_scale"], arrays["v_scale"] = views["k_scale"], views["v_scale"]
    if a.sinks is not None:
        arrays["sinks"] = views["sinks"].astype(np.float64)
    if a.alibi_slopes is not None:
        arrays["alibi_slopes"] = _broadcast(views["alibi_slopes"].astype(np.float64), (a.batch, a.nheads))
    if a.bias is not None:
        # Kernels need unit stride on the last axis: only that axis is written out, the others stay broadcast.
        bias = views["bias"] if a.bias.ndim else views["bias"][None]
        if bias.shape[-1] != a.seqlen_k or bias.strides[-1] != bias.itemsize:
            bias = np.ascontiguousarray(np.broadcast_to(bias, (*bias.shape[:-1], a.seqlen_k)))
        arrays["bias"] = _broadcast(bias, (a.batch, a.nheads, a.seqlen_q, a.seqlen_k))
    if a.visible is not None:
        blocks = -(-a.seqlen_q // a.block_q), -(-a.seqlen_k // a.block_k)
        arrays["visible"] = _broadcast(views["block_mask.visible"], (a.batch, a.nheads, *blocks))
    if a.dropped:
        arrays["dropout_seed"] = seed_on_host(views["seed"])
    return arrays


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast ``x``. NumPy's function takes 2 us even where it only adds axes."""
    x = x[(None,) * (len(shape) - x.ndim)]
    return x if x.shape == shape else np.broadcast_to(x, shape)
