"""Launch of the attention gradients: arguments of the CPU kernels in ``cpu/backward.py``.

:mod:`.backward_raw` launches the CUDA C++ kernels for GPUs; :mod:`.backward_numba` launches their twins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.attention import (
    backward_numba as attention_backward_numba,
)
from gpu_ops.kernels.attention import (
    backward_raw as attention_backward_raw,
)
from gpu_ops.kernels.attention.lower_cpu import optional_arrays, optional_tensors, prepared
from gpu_ops.kernels.attention.problem import Attention, as_bshd, sequence_table
from gpu_ops.kernels.compiler.jit import Variant
from gpu_ops.kernels.program import Builder, Spec, lowers

__all__ = ["backward", "variants"]

for _op in ("attention_backward", "attention_varlen_backward"):
    lowers(_op, "numba")(attention_backward_numba.backward)
    lowers(_op, "raw")(attention_backward_raw.backward)


@lowers("attention_backward", "cpu")
@lowers("attention_varlen_backward", "cpu")
def backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.cpu import backward as kernels
    from gpu_ops.kernels.attention.cpu.backward_bias import sinks_gradient
    from gpu_ops.kernels.attention.cpu.backward_rows import deltas, round_rows

    a = Attention.of(spec)
    lse_dtype = spec.tensor("lse").dtype
    computing = np.dtype(np.float64 if a.q.dtype == np.float64 else np.float32)
    differentiate = prepared(kernels.prepare, a, lse_dtype=lse_dtype, add=spec["accumulate"])
    inputs: tuple[Any, Any, Any] = (a.q, a.k, a.v)  # only shapes and dtypes are read
    if a.known_lengths:
        builder.constant(sequence_table(a), "sequences")
    layout, dout_ = spec["layout"], as_bshd(spec.tensor("dout"), spec["layout"])
    rounds = dout_.dtype != a.q.dtype
    if rounds:
        builder.empty(dout_.shape, a.q.dtype, "rounded dout")
    has_options = bool(optional_tensors(a))

    def run(views: Mapping[str, Any]) -> None:
        dout, q, k, v = views["dout"], views["q"], views["k"], views["v"]
        lse, delta, dq, dk, dv = views["lse"], views.get("delta"), views["dq"], views["dk"], views["dv"]
        if layout != "bshd":
            dout, q, k, v = as_bshd(dout, layout), as_bshd(q, layout), as_bshd(k, layout), as_bshd(v, layout)
            dq, dk, dv = as_bshd(dq, layout), as_bshd(dk, layout), as_bshd(dv, layout)
            lse = lse if lse.ndim == 3 else lse[None]
        if rounds:
            dout = round_rows(dout, views["rounded dout"])
        delta = deltas(dout, as_bshd(views["out"], layout)) if delta is None else delta.reshape(lse.shape)
        lse, delta = np.asarray(lse, np.float64), np.asarray(delta, np.float64)
        dbias, options = views.get("dbias"), optional_arrays(a, views) if has_options else {}
        sums = None if dbias is None else np.zeros(dbias.shape, computing)
        differentiate.run(dout, q, k, v, lse, delta, dq, dk, dv, views["sequences"], options, sums)
        if dbias is not None:
            dbias[...] = sums
        if "dsinks" in views:
            views["dsinks"][...] = sinks_gradient(options["sinks"], lse, delta, computing)

    shape = *inputs, a.batch, a.seqlen_q, a.seqlen_k
    dbias, delta, rows = spec.get("dbias"), spec.get("delta"), spec.tensor("lse").size
    scratch_bytes = 0 if dbias is None else dbias.size * computing.itemsize
    for x in (spec.tensor("lse"), delta):  # in float64 for the kernels
        scratch_bytes += 8 * rows if x is None or x.dtype != np.float64 else 0
    builder.call(run, str(kernels.config_of(*shape)), lambda: scratch_bytes + differentiate.scratch())


def variants(arch: str) -> Iterator[Variant]:
    """Most commonly used kernels."""
    yield from attention_backward_numba.numba_variants()
