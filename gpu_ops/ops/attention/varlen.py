"""Attention within packed sequences of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from gpu_ops.core import checks
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention.lengths import packed_lengths
from gpu_ops.ops.attention.options import (
    WeightOptions,
    backward_flops,
    backward_raw_unsupported,
    describe,
    forward_flops,
    raw_unsupported,
    read_inputs,
    read_options,
    read_results,
    reference_options,
    results_dtypes,
    store_gradients,
    store_results,
    takes,
    write_forward,
    write_gradients,
)

__all__ = ["attention_varlen", "attention_varlen_backward"]


@op(cuda=True, kernels="attention.forward", dynamic=("seed",))
@takes(WeightOptions)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    block_table: Any = None,
    seqused_k: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[WeightOptions],
) -> Bound:
    """:func:`attention` of each sequence of a packed batch: training, or chunked prefill over a cache in pages.

    Parameters
    ----------
    q : array (total_q, nheads, head_dim)
        Sequence b is ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``.
    k, v : arrays (total_k, nheads_kv, head_dim or head_dim_v)
        With ``block_table``: pages, (num_pages, page_size, nheads_kv, ...).
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,)
        Start at 0, never fall, end at the total. Sequences may be empty. Omit ``cu_seqlens_k`` with pages.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries past the last used key are
        ignored and may be -1.
    seqused_k : int32 array (batch,), optional
        Number of keys of each sequence that are in use; the others are never read. Required with pages. Without
        pages it is at most the length in ``cu_seqlens_k``.
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), optional
        Scales of quantized pages, see :func:`attention_decode`.
    max_seqlen_q, max_seqlen_k : int, optional
        Length of the longest sequence, or an upper bound; a smaller value is an error. Pass it with arrays on a
        GPU: their lengths are not checked, since that would wait for the GPU, and without a bound blocks are
        launched for sequences as long as the total.
    **options, return_lse, out_dtype, lse_dtype, out
        Same as in :func:`attention`; causal is bottom-right aligned within each sequence: the last query has the
        position of the last key, or of the last one in use.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    out : array (total_q, nheads, head_dim_v)
    lse : array (nheads, total_q), float32 (float64 for float64) or ``lse_dtype``, only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8), dtype=np.float32)
    >>> lengths = np.array([0, 3, 10], np.int32)  # two sequences, of 3 and 7 tokens
    >>> gpu_ops.attention_varlen(q, k, v, lengths, lengths, causal=True).shape
    (10, 2, 8)

    Over pages of 4 keys: the second sequence adds 7 tokens to a cache, which then holds 9 of its tokens.

    >>> pages, used = np.zeros((5, 4, 2, 8), np.float32), np.array([3, 9], np.int32)
    >>> table = np.array([[4, -1, -1], [0, 3, 1]], np.int32)
    >>> gpu_ops.attention_varlen(
    ...     q, pages, pages, lengths, block_table=table, seqused_k=used, causal=True
    ... ).shape
    (10, 2, 8)
    """
    call = Call("attention_varlen", device, backend, workspace)
    dtype = _read_inputs(call, q, k, v, (k_scale, v_scale), paged=block_table is not None)
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    used = {"seqused_k": seqused_k, "block_table": block_table}
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths = packed_lengths(call, starts | used, bounds)
    words = read_options(call, dtype, **options)
    return_lse, shapes = checks.flag(call.op, "return_lse", return_lse), _result_shapes(call)
    write_forward(call, dtype, shapes, out, return_lse, out_dtype, lse_dtype)
    return call.bind(
        problem=lambda: describe(call, dtype, lengths.longest, words),
        unsupported=raw_unsupported,
        check_values=lengths.check_values,
        flops=forward_flops(call, lengths.pairs(options.get("causal"))),
    )


@op(cuda=True, kernels="attention.backward", dynamic=("seed",))
@takes(WeightOptions)
def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    delta: Any = None,
    deterministic: bool = False,
    return_extra: bool = False,
    grads: Any = None,
    accumulate: bool = False,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[WeightOptions],
) -> Bound:
    """Gradients of :func:`attention_varlen`; see :func:`attention_backward`.

    Parameters
    ----------
    dout, out : arrays (total_q, nheads, head_dim_v), q's dtype or float32
    lse : array (nheads, total_q)
        Results of ``attention_varlen(..., return_lse=True)``.
    q, k, v, cu_seqlens_q, cu_seqlens_k, and every option
        The arguments of :func:`attention_varlen`.
    delta, deterministic, return_extra, grads, accumulate
        Same as in :func:`attention_backward`.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v
    extra : dict with the gradient of ``sinks`` when given, only with ``return_extra``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8))
    >>> cu = np.array([0, 3, 10], np.int32)
    >>> out, lse = gpu_ops.attention_varlen(q, k, v, cu, cu, return_lse=True)
    >>> dq, dk, dv = gpu_ops.attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, cu, cu)
    >>> dv.shape
    (10, 2, 8)
    """
    call = Call("attention_varlen_backward", device, backend, workspace)
    call.read("dout", dout)
    dtype = _read_inputs(call, q, k, v)
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths = packed_lengths(call, starts, bounds)
    words = read_options(call, dtype, **options)
    read_results(call, dtype, out, lse, delta, *_result_shapes(call))
    call.option(deterministic=checks.flag(call.op, "deterministic", deterministic))
    finish = write_gradients(call, dtype, grads, accumulate=accumulate, return_extra=return_extra)
    return call.bind(
        problem=lambda: describe(call, dtype, lengths.longest, words),
        unsupported=backward_raw_unsupported,
        check_values=lengths.check_values,
        finish=finish,
        flops=backward_flops(call, lengths.pairs(options.get("causal"))),
    )


def _read_inputs(
    call: Call, q: Any, k: Any, v: Any, scales: tuple[Any, Any] | None = None, *, paged: bool = False
) -> str:
    call.option(layout="thd")
    rows = "num_pages page_size" if paged else "total_k"
    return read_inputs(
        call,
        scales,
        paged=paged,
        q=(q, "total_q nheads head_dim"),
        k=(k, f"{rows} nheads_kv head_dim"),
        v=(v, f"{rows} nheads_kv head_dim_v"),
    )


def _result_shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and of lse."""
    total, heads = call.axes["total_q"], call.axes["nheads"]
    return (total, heads, call.axes["head_dim_v"]), (heads, total)


@lowers("attention_varlen", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.forward import attention_varlen

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("q", "k", "v", "cu_seqlens_q")]
        names = ("cu_seqlens_k", "block_table", "seqused_k")
        options: dict[str, Any] = {name: views.get(name) for name in names}
        options |= {**reference_options(spec, views), **results_dtypes(views)}
        store_results(views, attention_varlen(*arrays, return_lse=True, **options))

    builder.call(run, "NumPy, float64")


@lowers("attention_varlen_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.backward import attention_varlen_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [*(views[name] for name in ("dout", "q", "k", "v")), views.get("out")]
        arrays += [views[name] for name in ("lse", "cu_seqlens_q", "cu_seqlens_k")]
        options = {"delta": views.get("delta"), **reference_options(spec, views)}
        *gradients, extra = attention_varlen_backward(
            *arrays, return_extra=True, precision="float64", **options
        )
        store_gradients(spec, views, gradients, extra)

    builder.call(run, "NumPy, float64")
