"""Scaled dot-product attention, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from gpu_ops.core import checks
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention.options import (
    DenseOptions,
    backward_flops,
    backward_raw_unsupported,
    describe,
    forward_flops,
    layout_hint,
    raw_unsupported,
    read_inputs,
    read_options,
    read_results,
    reference_options,
    results_dtypes,
    store_gradients,
    store_results,
    takes,
    visible_pairs,
    write_forward,
    write_gradients,
)

__all__ = ["attention", "attention_backward"]

LAYOUTS = ("bshd", "bhsd")


@op(cuda=True, kernels="attention.forward", dynamic=("seed",))
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    q_start: int | None = None,
    k_start: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """Attention ``out = softmax(s) v`` with ``s = softmax_scale * q k^T``, in O(N) memory.

    The order is: scale, softcap, + ALiBi + bias, masks (-inf), softmax.

    Parameters
    ----------
    q : array (batch, seqlen_q, nheads, head_dim)
        float16, bfloat16, float32 or float64; k and v have the same dtype.
    k : array (batch, seqlen_k, nheads_kv, head_dim)
        nheads must be a multiple of nheads_kv: query head h reads key head h // (nheads // nheads_kv).
    v : array (batch, seqlen_k, nheads_kv, head_dim_v)
    causal : bool
        Query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned: the last query sees all keys).
    window_size : (left, right)
        Query i sees keys from i + seqlen_k - seqlen_q - left to ... + right; -1: no limit.
    softmax_scale : float, default head_dim ** -0.5
    softcap : float
        If > 0: s = softcap * tanh(s / softcap).
    sinks : float32 array (nheads,), optional
        One extra logit per head in the softmax denominator; it takes weight and has no value. lse includes it.
    alibi_slopes : float32 array (nheads,) or (batch, nheads), optional
        Adds ``-slope * |i + seqlen_k - seqlen_q - j|``.
    dropout_p : float
        If > 0, each weight is 0 with this probability, and otherwise divided by 1 - dropout_p. Rounded to a multiple
        of 2**-16, up to 1 - 2**-15. Does not change lse.
    seed : int from 0 to 2**64 - 1, or array of one uint64 or int64
        With dropout_p: decides, together with batch entry, head, query and key, which weights are 0; the same on
        every device and backend. Pass a different seed in every layer and step, and the same seed to the backward.
        An array is read when the call runs, so a CUDA graph drops other weights after the array has changed.
    bias : array broadcastable to (batch, nheads, seqlen_q, seqlen_k), optional
        q's dtype or float32; added to the scores, -inf masks.
    block_mask : BlockMask, optional
        Blocks that are False are skipped; intersects with the other masks.
    q_start, k_start : int, optional
        Positions of the first query and of the first key, for causal, windows, ALiBi and dropout; bias and
        block_mask count from the first query and key of the arrays. If one is given, the other defaults to 0, and
        i + seqlen_k - seqlen_q above becomes i + q_start - k_start: blocks of queries and of keys may be anywhere,
        as in ring attention. With dropout, the CUDA C++ kernels require multiples of 16 and of 32.
    layout : {"bshd", "bhsd"}
        "bhsd": axes 1 and 2 of q, k, v and out are swapped. Costs no copy.
    return_lse : bool
        Also return the log of the softmax denominator, natural log.
    out_dtype : dtype, default q's
        np.float32 returns the unrounded float32 sums of float16 and bfloat16 inputs, for parts that
        :func:`attention_merge` merges.
    lse_dtype : dtype, default float32 (float64 for float64)
        np.float64 does not round the log of a row's sum to the precision of its largest score: from ``|lse| = 2839``
        on, float32 has fewer digits than the gradients of a row need.
    out : array like the result, optional
        Receives the result; may not share memory with an input. With ``return_lse`` also a pair, (out, lse).
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    out : array (batch, seqlen_q, nheads, head_dim_v), q's dtype or ``out_dtype``
    lse : array (batch, nheads, seqlen_q), float32 (float64 for float64) or ``lse_dtype``, only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    A query that sees no key gives 0 and lse -inf. A NaN that a query sees reaches its result; a masked NaN does not.
    Infinities act the same on every backend. A value of inf that a query sees makes its column inf, however small the
    weight and dropped or not, and NaN if there is -inf too. A score of -inf, from a bias or from inf in q or k, hides
    its key as a mask does. A score of inf makes the row and its lse NaN. A query that sees one key returns that
    value bit for bit (except raw float32, whose products have 22 bits).
    Sums are float32 or wider. Costs 4 * seqlen_q * seqlen_k * head_dim flops per head; key blocks that
    no query of a tile sees are skipped. Source: Vaswani et al. 2017; online softmax: Milakov and
    Gimelshein 2018; tiling: Dao et al., FlashAttention, 2022. Dropout: Srivastava et al. 2014, by Philox 4x32-10;
    ``gpu_ops.reference.attention.core.dropout_mask`` shows which weights are kept.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 128, 4, 64), dtype=np.float32) for _ in range(3))
    >>> gpu_ops.attention(q, k, v, causal=True).shape
    (1, 128, 4, 64)
    """
    call = Call("attention", device, backend, workspace)
    layout = checks.one_of(call.op, "layout", layout, LAYOUTS)
    dtype = _read_inputs(call, layout, q, k, v)
    places: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "q_start": q_start,
        "k_start": k_start,
    }
    options = read_options(
        call,
        dtype,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        seed=seed,
        bias=bias,
        block_mask=block_mask,
        **places,
    )
    *shapes, seqlens = _result_shapes(call, layout)
    return_lse = checks.flag(call.op, "return_lse", return_lse)
    write_forward(call, dtype, (shapes[0], shapes[1]), out, return_lse, out_dtype, lse_dtype)
    return call.bind(
        problem=lambda: _describe(call, layout, dtype, seqlens, options),
        unsupported=raw_unsupported,
        flops=forward_flops(call, call.axes["batch"] * visible_pairs(seqlens, **places)),
    )


@op(cuda=True, kernels="attention.backward", dynamic=("seed",))
@takes(DenseOptions)
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    layout: str = "bshd",
    delta: Any = None,
    deterministic: bool = False,
    return_extra: bool = False,
    grads: Any = None,
    accumulate: bool = False,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[DenseOptions],
) -> Bound:
    """Gradients of :func:`attention` with respect to q, k and v.

    With P the probabilities, recomputed from lse, and delta = sum(dout * out) over head_dim_v:
    ``dv = P^T dout``, ``dS = P * (dout v^T - delta)``, ``dq = scale * dS k``, ``dk = scale * dS^T q``.

    Parameters
    ----------
    dout : array like out, q's dtype or float32
        Gradient of the result. The kernels round a float32 one to q's dtype: the gradients, and delta unless it is
        given, are computed from the rounded one.
    q, k, v, and every option
        The arguments of :func:`attention`.
    out, lse : arrays
        Results of ``attention(..., return_lse=True)``; out may be float32. If the keys of a row are divided
        among calls, as in a ring, both are those of the whole row (:func:`attention_merge`), as delta is. lse may be
        float64, which keeps P accurate where lse is in the thousands: from 2839 on, the CPU and the Numba kernels
        treat a float32 lse as that of this call's keys, and sum their weights again.
    delta : float32 array like lse (float64 for float64), optional
        ``sum(dout * out)`` over head_dim_v. If given, it is not computed, and out is not read and may be None.
    deterministic : bool
        Compute sums in a fixed order. The CPU and the Numba kernels for GPUs always do.
    return_extra : bool
        Also return a dict with the gradients of ``bias`` (its shape and dtype) and ``sinks``
        (float32, float64 for float64), if these were given.
    grads : (dq, dk, dv), optional
        Arrays that receive the gradients (``out`` is the forward result here): all of q's dtype, or all float32.
    accumulate : bool
        Add dq, dk and dv to the contents of ``grads``, which must then be float32 (float64 for float64). The
        gradients of options are not added to anything.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v
    extra : dict, only with ``return_extra``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Notes
    -----
    O(N) memory. Queries that see no key have zero gradients. Source: Dao et al., FlashAttention, 2022,
    appendix B.4.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> out, lse = gpu_ops.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = gpu_ops.attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> round(float(dv[..., 0, 0].sum()), 6)  # each of the 16 queries hands out a weight of 1
    16.0
    """
    call = Call("attention_backward", device, backend, workspace)
    layout = checks.one_of(call.op, "layout", layout, LAYOUTS)
    call.read("dout", dout)
    dtype = _read_inputs(call, layout, q, k, v)
    words = read_options(call, dtype, **options)
    shape, lse_shape, seqlens = _result_shapes(call, layout)
    read_results(call, dtype, out, lse, delta, shape, lse_shape)
    call.option(deterministic=checks.flag(call.op, "deterministic", deterministic))
    finish = write_gradients(call, dtype, grads, accumulate=accumulate, return_extra=return_extra)
    return call.bind(
        problem=lambda: _describe(call, layout, dtype, seqlens, words),
        unsupported=backward_raw_unsupported,
        finish=finish,
        flops=backward_flops(call, call.axes["batch"] * visible_pairs(seqlens, **options)),
    )


def _read_inputs(call: Call, layout: str, q: Any, k: Any, v: Any) -> str:
    queries, keys = ("seqlen_q nheads", "seqlen_k nheads_kv")
    if layout == "bhsd":
        queries, keys = ("nheads seqlen_q", "nheads_kv seqlen_k")
    dtype = read_inputs(
        call,
        layout=layout,
        q=(q, f"batch {queries} head_dim"),
        k=(k, f"batch {keys} head_dim"),
        v=(v, f"batch {keys} head_dim_v"),
    )
    call.option(layout=layout, max_seqlen_q=call.axes["seqlen_q"], max_seqlen_k=call.axes["seqlen_k"])
    return dtype


def _describe(call: Call, layout: str, dtype: str, seqlens: tuple[int, int], options: str) -> str:
    """Description of the problem, with a line about the layout if it looks swapped."""
    hint = layout_hint(call, layout)
    return describe(call, dtype, seqlens, options) + (f"\n  layout    {hint}" if hint else "")


def _result_shapes(call: Call, layout: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """Shapes of out and of lse, and the lengths (seqlen_q, seqlen_k)."""
    axes = call.axes
    batch, heads, seqlen_q = axes["batch"], axes["nheads"], axes["seqlen_q"]
    middle = (seqlen_q, heads) if layout == "bshd" else (heads, seqlen_q)
    return (batch, *middle, axes["head_dim_v"]), (batch, heads, seqlen_q), (seqlen_q, axes["seqlen_k"])


@lowers("attention", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.forward import attention

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("q", "k", "v")]
        options = {**reference_options(spec, views), **results_dtypes(views)}
        store_results(views, attention(*arrays, layout=spec["layout"], return_lse=True, **options))

    builder.call(run, "NumPy, float64")


@lowers("attention_backward", "reference")
def _reference_backward(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.backward import attention_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [*(views[name] for name in ("dout", "q", "k", "v")), views.get("out"), views["lse"]]
        options = {"layout": spec["layout"], "delta": views.get("delta"), **reference_options(spec, views)}
        *gradients, extra = attention_backward(*arrays, return_extra=True, precision="float64", **options)
        store_gradients(spec, views, gradients, extra)

    builder.call(run, "NumPy, float64")
