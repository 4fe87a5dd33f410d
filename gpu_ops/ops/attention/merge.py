"""Merging the results of attention over two sets of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention.dense import LAYOUTS

__all__ = ["attention_merge"]

LSE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


@op(cuda=True, kernels="attention.merge")
def attention_merge(
    out1: Any,
    lse1: Any,
    out2: Any,
    lse2: Any,
    *,
    layout: str = "bshd",
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """:func:`attention` over two disjoint sets of keys, from its results over each of them.

    ``lse = log(exp(lse1) + exp(lse2))`` and ``out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2``.

    Parameters
    ----------
    out1, out2 : arrays (batch, seqlen_q, nheads, head_dim_v), or (total_q, nheads, head_dim_v)
        float16, bfloat16, float32 or float64, the same for both. With parts in float32 (``out_dtype``) the result is
        as accurate as that of one call.
    lse1, lse2 : arrays (batch, nheads, seqlen_q), or (nheads, total_q)
        float32 or float64 each, natural logs.
    layout : {"bshd", "bhsd"}
        "bhsd": axes 1 and 2 of out1, out2 and out are swapped.
    out : (out, lse), optional
        Arrays that receive the results. ``out=(out1, lse1)`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    out : array like out1
    lse : array like lse1; float64 if any array is

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    Computed in float32 (float64 for float64), with weights divided by their sum. A part with lse -inf saw no key
    and does not count; where both are, out is 0 and lse -inf. Give sinks to one part only. Moves three times
    the bytes of out. Source: Milakov and Gimelshein, 2018; Liu, Zaharia and Abbeel, "Ring Attention", 2023.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8))
    >>> def half(keys):  # each query sees itself and the keys before it
    ...     options = {"causal": True, "q_start": 0, "k_start": keys.start, "return_lse": True}
    ...     return gpu_ops.attention(q, k[:, keys], v[:, keys], **options)
    >>> out, lse = gpu_ops.attention_merge(*half(slice(0, 32)), *half(slice(32, 64)))
    >>> np.allclose(out, gpu_ops.attention(q, k, v, causal=True), rtol=1e-12)
    True
    """
    call = Call("attention_merge", device, backend, workspace)
    layout = checks.one_of(call.op, "layout", layout, LAYOUTS)
    views = {"out1": call.read("out1", out1), "out2": call.read("out2", out2)}
    logs = {"lse1": call.read("lse1", lse1), "lse2": call.read("lse2", lse2)}
    axes, of_lse = "batch seqlen_q nheads head_dim_v", "batch nheads seqlen_q"
    if layout == "bhsd":
        axes = "batch nheads seqlen_q head_dim_v"
    if views["out1"].ndim == 3:
        layout, axes, of_lse = "thd", "total_q nheads head_dim_v", "nheads total_q"
    for name, x in views.items():
        call.axes.bind(name, x, axes)
    for name, x in logs.items():
        call.axes.bind(name, x, of_lse)
        if x.dtype not in LSE_DTYPES:
            raise DTypeError(
                f"{call.op}: {name} is {x.dtype}, expected float32 or float64; cast it: {name}.astype('float32')"
            )
    dtype = checks.float_dtype(call.op, **views)
    call.option(layout=layout)
    lse_dtype = np.result_type(checks.computing_dtype(dtype), *(x.dtype for x in logs.values()))
    shape, lse_shape = views["out1"].shape, logs["lse1"].shape
    results = {"out": (shape, checks.FLOAT_DTYPES[dtype]), "lse": (lse_shape, lse_dtype)}
    call.write_each(results, out, in_place={"out": "out1", "lse": "lse1"})
    return call.bind(
        problem=lambda: f"out {shape}, {dtype}, layout {layout}, lse {lse_dtype}",
        unsupported=checks.unsupported(dtype),
        flops=4.0 * views["out1"].size,
    )


@lowers("attention_merge", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.merge import attention_merge

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("out1", "lse1", "out2", "lse2")]
        store(views, ("out", "lse"), attention_merge(*arrays, layout=spec["layout"]))

    builder.call(run, "NumPy, float64")
