"""Ternary weights: quantise to -1, 0, +1, pack, unpack and multiply. Defines the correct results."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.precision import Array, Precision, steps
from gpu_ops.reference.weights.ternary_layouts import decode, encode

__all__ = [
    "DEFAULT_THRESHOLD",
    "EPS",
    "quantize_activations",
    "ternary_matmul",
    "ternary_matmul_backward",
    "ternary_pack",
    "ternary_product",
    "ternary_quantize",
    "ternary_unpack",
]

Method = Literal["absmean", "absmax", "twn", "percentile", "meanstd", "manual"]

EPS = 1e-5
# Defaults of ``threshold``, whose meaning depends on the method: a factor, a percentile, a count of std.
DEFAULT_THRESHOLD = {"absmax": 0.7, "twn": 0.7, "percentile": 50.0, "meanstd": 0.0}


def ternary_quantize(
    w: Array,
    *,
    method: Method = "absmean",
    group_size: int | None = None,
    threshold: float | None = None,
    precision: Precision = "rounded",
) -> tuple[Array, Array]:
    """Trits (N, K) int8 and scale float32 with ``w`` about ``scale * trits``.

    absmean (BitNet b1.58): ``scale = max(mean|w|, 1e-5)``, ``t = clip(round_half_even(w / scale), -1, 1)``.
    The others: ``t = sign(w)`` where ``|w| > d``, ``scale = mean|w|`` over those (1 if none), with

    ===========  ==================================================
    absmax       d = threshold * max|w|, threshold 0.7
    twn          d = threshold * mean|w|, threshold 0.7 (TWN paper)
    percentile   d = percentile of |w|, threshold 50
    meanstd      d = mean|w| + threshold * std|w|, threshold 0
    manual       d = threshold
    ===========  ==================================================

    Statistics are over the tensor (group_size None; scale ()), a row (-1; scale (N,)) or groups of
    ``group_size`` along K (scale (N, K / group_size)).
    """
    st = steps(precision, w.dtype)
    n, k = w.shape
    size = n * k if group_size is None else k if group_size == -1 else group_size
    scopes = (n * k) // size if size else (n if group_size == -1 else 1)
    groups = st.load(w).reshape(scopes, size)
    magnitude = np.abs(groups)
    dtype = np.float64 if precision == "float64" else np.float32

    if method == "absmean":
        mean = st.step(magnitude.mean(axis=1)) if size else np.zeros(scopes)
        scale = np.maximum(mean, EPS).astype(dtype)
        # Divide by the scale that is returned, so that the pair satisfies its own definition.
        trits = np.clip(np.rint(st.step(groups / scale[:, None].astype(np.float64))), -1, 1)
    else:
        value = DEFAULT_THRESHOLD[method] if threshold is None and method != "manual" else threshold
        assert value is not None
        limit = st.step(_limit(method, magnitude, value)) if size else np.zeros(scopes)
        kept = magnitude > limit[:, None]
        count = kept.sum(axis=1)
        total = st.step(np.where(kept, magnitude, 0.0).sum(axis=1))
        scale = np.where(count > 0, total / np.maximum(count, 1), 1.0).astype(dtype)
        trits = np.where(kept, np.sign(groups), 0.0)

    shape = () if group_size is None else (n,) if group_size == -1 else (n, k // group_size)
    return trits.astype(np.int8).reshape(n, k), scale.reshape(shape)


def _limit(method: Method, magnitude: Array, value: float) -> Array:
    if method == "absmax":
        return np.asarray(value * magnitude.max(axis=1))
    if method == "twn":
        return np.asarray(value * magnitude.mean(axis=1))
    if method == "percentile":
        return np.asarray(np.percentile(magnitude, value, axis=1))
    if method == "meanstd":
        return np.asarray(magnitude.mean(axis=1) + value * magnitude.std(axis=1))
    return np.full(len(magnitude), value)


def ternary_pack(trits: Array, format: str, *, scale: Array | float | None = None) -> Array:
    """One uint8 array; :mod:`ternary_formats` lists the formats."""
    return encode(trits, format, scale=scale)


def ternary_unpack(packed: Array, shape: tuple[int, int], format: str, *, strict: bool = True) -> Array:
    """Trits (N, K) int8."""
    return decode(packed, shape, format, strict=strict)


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """Per token: ``s = 127 / max(max|x|, 1e-5)``, ``q = clip(round_half_even(x * s), -128, 127)``.

    Returns q, int8 shaped like x, and ``1 / s``, float64 shaped like x without its last axis. A token with a NaN or
    an infinity gets q = 0 and a NaN scale, which then shows in the result.
    """
    x64 = x.astype(np.float64)
    absmax = np.maximum(np.abs(x64).max(axis=-1, initial=0.0), EPS)
    finite = np.isfinite(absmax)
    s = 127.0 / np.where(finite, absmax, 1.0)
    q = np.clip(np.rint(np.where(finite[..., None], x64, 0.0) * s[..., None]), -128, 127)
    return q.astype(np.int8), np.where(finite, absmax / 127.0, np.nan)


def ternary_matmul(
    x: Array,
    trits: Array,
    scale: Array,
    *,
    x_scale: Array | None = None,
    activations: Literal["int8", "native"] = "int8",
    out_dtype: npt.DTypeLike | None = None,
    precision: Precision = "rounded",
) -> Array:
    """``y[..., n] = sum_k x[..., k] * scale * trits[n, k]``, in x's dtype, shape (..., N).

    ``activations="int8"`` quantises each token of x first (:func:`quantize_activations`); the sum over
    k is then exact, in integers, and only the scales are floating point. ``"native"`` keeps x. An int8 x is
    multiplied unchanged, and by ``x_scale`` (per token, or one for all); y is then in ``out_dtype``, by default that
    of x_scale.
    """
    st = steps(precision, x.dtype if x_scale is None else out_dtype or x_scale.dtype)
    n, k = trits.shape
    tokens = x.reshape(int(np.prod(x.shape[:-1])), k)
    scales = _by_group(scale, n)
    groups = scales.shape[1]
    group = k // groups if groups > 1 else k
    if activations == "native" and precision == "naive":
        # textbook code: dequantise, then one product, summed in float32 (float64) as any GEMM does
        dtype = np.float64 if x.dtype == np.float64 else np.float32
        dense: Array = (np.repeat(scales, group, axis=1) * trits).astype(dtype)
        product: Array = st.load(tokens).astype(dtype) @ dense.T
        return st.store(product.reshape(*x.shape[:-1], n))
    left: Array
    if x_scale is not None:
        left = tokens.astype(np.int64)
        token_scale = np.broadcast_to(x_scale.astype(np.float64).reshape(-1), len(tokens))
    elif activations == "int8":
        q, token_scale = quantize_activations(tokens)
        left = q.astype(np.int64)
    else:
        left, token_scale = st.load(tokens), np.ones(len(tokens))
    y = np.zeros((len(tokens), n))
    for g in range(groups):
        part = slice(g * group, (g + 1) * group)
        total: Array = left[:, part] @ trits[:, part].T.astype(left.dtype)
        y = st.step(y + st.step(total * scales[:, g].astype(np.float64)))
    y = st.step(y * token_scale[:, None])
    return st.store(y.reshape(*x.shape[:-1], n))


def ternary_matmul_backward(
    dy: Array,
    x: Array,
    trits: Array,
    scale: Array,
    *,
    activations: Literal["int8", "native"] = "int8",
    only: str | None = None,
    precision: Precision = "rounded",
) -> Any:
    """Straight-through gradients ``dx = dy @ (scale * trits)`` and ``dw = dy.T @ xq``: rounding counts as identity.

    ``xq`` is the forward's operand: x quantised and scaled back for ``"int8"``, otherwise x. dw is the gradient of
    the latent weights that ``trits`` were quantised from, including those that were clipped. dx is like x, dw (N, K)
    float32 (float64 for float64). ``only``: return just "dx" or "dw".
    """
    st = steps(precision, x.dtype)
    n, k = trits.shape
    tokens = int(np.prod(x.shape[:-1]))
    gradient, used = st.load(dy).reshape(tokens, n), st.load(x).reshape(tokens, k)
    if activations == "int8":
        q, token_scale = quantize_activations(x.reshape(tokens, k))
        used = st.step(q * token_scale[:, None])
    scales = _by_group(scale, n).astype(np.float64)
    dense = st.step(np.repeat(scales, k // max(scales.shape[1], 1), axis=1) * trits)
    dx, dw = st.matmul(gradient, dense), st.matmul(gradient.T, used)
    grads = {"dx": st.store(dx.reshape(x.shape)), "dw": st.store(dw, np.float32)}
    return tuple(grads.values()) if only is None else grads[only]


def ternary_product(a: Array, a_scale: Array, w: Array, w_scale: Array) -> Array:
    """``(a_scale * a) @ (w_scale * w).T`` of trits (M, K) and (N, K), with scales per tensor or row; float32 (M, N).

    Sums are integers, and the product of the scales is exact in float64.
    """
    sums = a.astype(np.int64) @ w.T.astype(np.int64)
    factor = _by_group(a_scale, len(a)).astype(np.float64) * _by_group(w_scale, len(w)).T
    return np.asarray(sums * factor, np.float32)


def _by_group(scale: Array, n: int) -> Array:
    """``scale`` as (N, groups)."""
    return (
        scale.reshape(n, scale.shape[1] if scale.ndim == 2 else 1) if scale.ndim else np.full((n, 1), scale)
    )
