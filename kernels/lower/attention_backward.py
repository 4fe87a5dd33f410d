"""Gradients of attention on the CPU: the arguments of ``numba_cpu/attention_backward.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.lower.attention_cpu import optional_arrays, optional_tensors
from gpu_ops.kernels.lower.attention_problem import Attention, as_bshd, sequence_table
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__ = ["backward"]


@lowers("attention_backward", "cpu")
@lowers("attention_varlen_backward", "cpu")
def backward(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import attention_backward as kernels
    from gpu_ops.kernels.numba_cpu.attention_gradient_sinks import sinks_gradient
    from gpu_ops.kernels.numba_cpu.attention_tile import UNLIMITED

    a = Attention.of(spec)
    left, right = a.window(UNLIMITED)
    inputs: tuple[Any, Any, Any] = (a.q, a.k, a.v)  # only shapes and dtypes are read
    differentiate = kernels.prepare(
        *inputs,
        a.batch,
        max_seqlen_q=a.seqlen_q,
        max_seqlen_k=a.seqlen_k,
        given=optional_tensors(a),
        left=left,
        right=right,
        softmax_scale=a.softmax_scale,
        softcap=a.softcap,
        block_q=a.block_q,
        block_k=a.block_k,
        packed=a.packed,
    )
    if a.known_lengths:
        on.constant(sequence_table(a), "sequences")
    layout = spec["layout"]

    def run(views: Mapping[str, Any]) -> None:
        dbias = views.get("dbias")
        lse, given = views["lse"], optional_arrays(a, views)
        lse = lse if lse.ndim == 3 else lse[None]
        sums = None if dbias is None else np.zeros(dbias.shape, lse.dtype)
        delta = differentiate(
            as_bshd(views["dout"], layout),
            as_bshd(views["q"], layout),
            as_bshd(views["k"], layout),
            as_bshd(views["v"], layout),
            as_bshd(views["out"], layout),
            lse,
            as_bshd(views["dq"], layout),
            as_bshd(views["dk"], layout),
            as_bshd(views["dv"], layout),
            views["sequences"],
            given,
            sums,
        )
        if dbias is not None:
            dbias[...] = sums
        if "dsinks" in views:
            views["dsinks"][...] = sinks_gradient(given["sinks"], lse, delta)

    on.call(run, str(kernels.config_of(*inputs, a.batch, a.seqlen_q, a.seqlen_k)))
