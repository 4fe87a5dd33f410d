"""Gradients of attention in NumPy: the definition of correct for the backward pass.

With ``P`` the probabilities and ``delta_i = sum_d dout_id out_id``::

    dP = D * dout v^T            dS = P * (dP - delta)             dv = (D * P)^T dout
    dbias = dS                   dZ = dS * ds/dz * softmax_scale   with the scores s of z = softmax_scale * q.k
    dq = dZ k                    dk = dZ^T q                       dsink = -sum_i P_sink,i delta_i

where D is 1, or the factor of dropout on the probabilities: 0 or 1 / (1 - dropout_p). (Dao et al.,
"FlashAttention", 2022, appendix B.4; a sink is a column whose value is 0.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.reference.attention.core import (
    DenseOptions,
    Options,
    WeightOptions,
    matmul_visible,
    repeat_heads,
    sequences,
    softmax_rows,
    sum_groups,
    to_bhsd,
)
from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, Steps, steps

__all__ = ["attention_backward", "attention_varlen_backward"]

_ULPS = 16  # an lse that differs from ours by less is ours, rounded
_COARSE = 2.0**40  # |lse| from which no dtype holds the sum of a row next to its largest score


@takes(DenseOptions)
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    *,
    layout: str = "bshd",
    delta: Array | None = None,
    return_extra: bool = False,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Gradients of ``sum(dout * attention(q, k, v, ...))``.

    Parameters
    ----------
    dout : shaped like the output of :func:`attention`
    q, k, v, and all options : as given to :func:`attention`
    out, lse : results of :func:`attention`, or of all keys if ``k`` and ``v`` are a part of them. They are used in
        rows whose lse is not that of ``q`` and ``k`` alone; for other rows, with None, and with
        ``precision="naive"``, this reference computes its own, unrounded
    delta : (batch, nheads, seqlen_q) ``sum(dout * out)`` over head_dim_v; ``out`` may be None then
    return_extra : also return a dict with the gradients of ``bias`` and ``sinks``, if given

    Returns
    -------
    dq, dk, dv : shapes and dtypes of ``q``, ``k``, ``v``
    extra : ``{"bias": dbias, "sinks": dsinks}``, only with ``return_extra``. dbias has the shape and dtype
        of ``bias``; dsinks is float32 (float64 for float64 inputs).

    Queries that see no key have zero gradients and contribute none.
    """
    parsed = DenseOptions(**options)
    s = steps(precision, q.dtype)
    statistics = None if precision == "naive" or lse is None else (out, lse, delta)
    dq, dk, dv, dscores, dsinks = _backward(dout, q, k, v, statistics, parsed, s, layout)
    dq, dk, dv = (s.store(x) for x in (dq, dk, dv))
    if not return_extra:
        return dq, dk, dv
    extra = {}
    if parsed.bias is not None:
        dbias = _sum_to_shape(dscores, parsed.bias.shape)
        extra["bias"] = dbias if precision == "float64" else dbias.astype(parsed.bias.dtype)
    if parsed.sinks is not None:
        extra["sinks"] = s.store(dsinks, np.float32)
    return dq, dk, dv, extra


@takes(WeightOptions)
def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    delta: Array | None = None,
    return_extra: bool = False,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Gradients of ``sum(dout * attention_varlen(q, k, v, ...))``; see :func:`attention_backward`.

    Returns
    -------
    dq, dk, dv : shapes and dtypes of ``q``, ``k``, ``v``
    extra : ``{"sinks": dsinks}`` if sinks are given, only with ``return_extra``
    """
    parsed = WeightOptions(**options)
    s = steps(precision, q.dtype)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dsinks = np.zeros(q.shape[1])
    for b, rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        arrays = [x[None] for x in (dout[rows], q[rows], k[keys], v[keys])]
        statistics: Any = None
        if precision != "naive" and lse is not None:
            given_out = None if out is None else out[None, rows]
            statistics = given_out, lse[None, :, rows], None if delta is None else delta[None, :, rows]
        one_options = parsed.of_sequence(b)
        grads = _backward(arrays[0], arrays[1], arrays[2], arrays[3], statistics, one_options, s, sequence=b)
        dq[rows], dk[keys], dv[keys] = grads[0][0], grads[1][0], grads[2][0]
        dsinks += grads[4]
    result = (s.store(dq), s.store(dk), s.store(dv))
    if not return_extra:
        return result
    return *result, {} if parsed.sinks is None else {"sinks": s.store(dsinks, np.float32)}


def _backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    statistics: tuple[Array | None, Array, Array | None] | None,
    options: Options,
    s: Steps,
    layout: str = "bshd",
    sequence: int = 0,
) -> tuple[Array, Array, Array, Array, Array]:
    """dq, dk, dv, dscores (batch, nheads, seqlen_q, seqlen_k) and dsinks (nheads,), before the last rounding.

    dscores is also the gradient of a full-size bias. ``statistics``: out, lse and delta; None: computed.
    """
    dout, q, k, v = (to_bhsd(x, layout) for x in (dout, q, k, v))
    nheads, nheads_kv = q.shape[1], k.shape[1]
    dout, q = s.load(dout), s.load(q)
    k, v = (s.load(repeat_heads(x, nheads)) for x in (k, v))
    with np.errstate(all="ignore"):  # NaN or overflow in the inputs are valid here
        rows = softmax_rows(q, k, options, s, sequence)
        out = s.step(matmul_visible(s.step(rows.probs * rows.kept), v, rows.visible, s))
        delta = None
        if statistics is not None:
            out_or_none, lse, delta = statistics
            factor = _weight(rows.lse, lse)
            probs = np.where(rows.visible, rows.probs * factor[..., None], 0.0)
            rows = replace(rows, probs=probs, sink_probs=rows.sink_probs * factor)
            if out_or_none is not None:
                out = np.where(factor[..., None] == 1.0, out, to_bhsd(s.load(out_or_none), layout))
        delta = s.step((dout * out).sum(axis=-1)) if delta is None else s.load(delta)
        weights = s.step(rows.probs * rows.kept)
        dprobs = s.step(s.step(s.matmul(dout, v.swapaxes(-1, -2))) * rows.kept)
        dscores = np.where(rows.visible, s.step(rows.probs * s.step(dprobs - delta[..., None])), 0.0)
        dproducts = s.step(s.step(dscores * rows.slope) * options.scale(q.shape[-1]))
        dproducts = np.where(rows.visible, dproducts, 0.0)  # removes the slope of a masked NaN
        seen_by = rows.visible.swapaxes(-1, -2)
        dq = matmul_visible(dproducts, k, rows.visible, s)
        dk = s.step(matmul_visible(dproducts.swapaxes(-1, -2), q, seen_by, s))
        dv = s.step(matmul_visible(weights.swapaxes(-1, -2), dout, seen_by, s))
        dsinks = -(rows.sink_probs * delta).sum(axis=(0, 2))
    dq, dk, dv = (
        to_bhsd(x, layout) for x in (s.step(dq), sum_groups(dk, nheads_kv), sum_groups(dv, nheads_kv))
    )
    return dq, dk, dv, dscores, dsinks


def _weight(own: Array, lse: Array) -> Array:
    """Factor from weights relative to ``own`` to weights relative to ``lse``; 1 where they differ by rounding."""
    near = np.abs(own - lse) <= _ULPS * np.finfo(lse.dtype).eps * (1 + np.abs(lse))
    return np.asarray(np.exp(np.where(near | (own == lse) | (np.abs(lse) >= _COARSE), 0.0, own - lse)))


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Adjoint of broadcasting from ``shape``."""
    x = np.sum(x, axis=tuple(range(x.ndim - len(shape))))
    return np.asarray(x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True))
