"""RMSNorm: ``y = x * rstd * (weight_offset + weight)`` with ``rstd = 1 / sqrt(mean(x**2) + eps)``.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4.

Models differ in where they round. ``precision="rounded"`` makes these roundings, because they define the casting
mode; ``"float64"`` makes none, so there the modes agree; ``"naive"`` rounds after every operation.

=========  =============================================================================  ================
casting    roundings to x's dtype                                                         used by
=========  =============================================================================  ================
``llama``  ``n = x * rstd``, ``weight_offset + weight``, and their product: three         Llama, Mistral
``gemma``  the result only; ``n * (weight_offset + weight)`` is formed in wide precision  Gemma (offset 1)
``fp32``   the result only                                                                most kernels
=========  =============================================================================  ================

``gemma`` and ``fp32`` are thus the same, under the two names in use. Neither implies a ``weight_offset``.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.norm.norm import (
    add_residual,
    input_gradient,
    norm_results,
    reciprocal_rms,
    sum_rows,
)
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["Casting", "rmsnorm", "rmsnorm_backward", "rmsnorm_quant_int8"]

Casting = Literal["llama", "gemma", "fp32"]

ABSMAX_MIN = 1e-5  # a row of zeros gets scale ABSMAX_MIN / 127, not a division by zero


def _narrow(x: Array, dtype: npt.DTypeLike, casting: Casting, precision: Precision) -> Array:
    """The rounding that only ``casting="llama"`` makes; the identity otherwise."""
    if casting not in ("llama", "gemma", "fp32"):
        raise ValueError(f"casting must be 'llama', 'gemma' or 'fp32', got {casting!r}")
    if casting == "llama" and precision == "rounded":
        return x.astype(dtype).astype(np.float64)
    return x


def _normalise(
    x: Array,
    weight: Array,
    eps: float,
    residual: Array | None,
    weight_offset: float,
    casting: Casting,
    precision: Precision,
) -> tuple[Array, Array, Array]:
    """y before its last rounding, s as returned, and rstd with its last axis kept."""
    p = steps(precision, x.dtype)
    s, rounded = add_residual(x, residual, p)
    rstd = reciprocal_rms(rounded, eps, p)
    n = _narrow(p.step(rounded * rstd), x.dtype, casting, precision)
    gain = _narrow(p.step(weight_offset + p.load(weight)), x.dtype, casting, precision)
    return p.step(n * gain), s, rstd


def rmsnorm(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
    return_sum: bool = True,
    return_rstd: bool = False,
    precision: Precision = "rounded",
) -> Array | tuple[Array, ...]:
    """RMSNorm over the last axis, after an optional residual add.

    Parameters
    ----------
    x : (..., columns)
    weight : (columns,)
    eps : added to the mean square
    residual : (..., columns), optional
        The norm is then of ``s = x + residual``, rounded to x's dtype.
    weight_offset : 0 for Llama, 1 for Gemma
    casting : where the result is rounded; see the table at the top of this module
    return_sum : with a residual, also return s
    return_rstd : also return ``1 / sqrt(mean(s**2) + eps)``, which the backward needs

    Returns
    -------
    y [, s] [, rstd]
        y and s in x's shape and dtype; rstd ``(...,)`` float32 (float64 for float64 inputs).
    """
    p = steps(precision, x.dtype)
    y, s, rstd = _normalise(x, weight, eps, residual, weight_offset, casting, precision)
    has_sum = residual is not None and return_sum
    return norm_results(y, s if has_sum else None, (rstd,) if return_rstd else (), p)


def rmsnorm_backward(
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    *,
    dresidual: Array | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
    dweight: Array | None = None,
    precision: Precision = "rounded",
) -> tuple[Array, Array]:
    """Gradients of :func:`rmsnorm`.

    With ``m = dy * (weight_offset + weight)`` and N columns::

        dx = rstd * m - rstd**3 * x * sum(m * x) / N  [+ dresidual]
        dweight = sum over rows of dy * (x * rstd)

    ``casting="llama"`` rounds ``weight_offset + weight``, ``m`` and ``x * rstd`` to x's dtype, as differentiating
    that forward does. A rounding passes the gradient through unchanged.

    Parameters
    ----------
    dy : (..., columns), gradient of y
    x : (..., columns), the tensor that was normalised: s if the forward added a residual
    weight : (columns,)
    rstd : (...,), from the forward
    dresidual : (..., columns), optional: gradient that reaches s from its other uses

    Returns
    -------
    dx, dweight
        dx in x's dtype: the gradient of s, and so of both x and the residual.
        dweight ``(columns,)`` float32 (float64 for float64 inputs), added to the one given.
    """
    p = steps(precision, x.dtype)
    dy64, x64, r = p.load(dy), p.load(x), p.load(rstd)[..., None]
    gain = _narrow(p.step(weight_offset + p.load(weight)), x.dtype, casting, precision)
    m = _narrow(p.step(dy64 * gain), x.dtype, casting, precision)
    n = p.step(x64 * r)
    mean_mn = p.step(np.mean(m * n, axis=-1, keepdims=True))
    dx = p.step(r * p.step(m - p.step(n * mean_mn)))
    products = p.step(dy64 * _narrow(n, x.dtype, casting, precision))
    return input_gradient(dx, dresidual, p), sum_rows(products, dweight, p)


def rmsnorm_quant_int8(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """RMSNorm, then symmetric per-row int8 quantisation: the input of an int8 or ternary matmul.

    For each row, ``absmax = max(max|y|, 1e-5)`` and ::

        q = clip(round_half_even(y * 127 / absmax), -128, 127)
        scale = absmax / 127            so that  y is about q * scale
        rowsum = sum of q               what a matmul with codes t + 1 subtracts

    For ``fp32`` and ``gemma``, y is the unrounded result: the only cast is the one to int8. For ``llama`` y is in x's
    dtype, as its product is. A NaN gives code 0 and scale NaN.

    Returns
    -------
    q, scale, rowsum [, s]
        q (..., columns) int8; scale (...,) float32 (float64 for float64 inputs); rowsum (...,) int32;
        s = x + residual in x's dtype, if a residual is given. ``precision="float64"`` widens scale and s only.

    Source: activations of BitNet b1.58, Ma et al., arXiv:2402.17764, section 2, with a scale per row.
    """
    p = steps(precision, x.dtype)
    y, s, _ = _normalise(x, weight, eps, residual, weight_offset, casting, precision)
    y = _narrow(y, x.dtype, casting, precision)
    absmax = np.maximum(np.max(np.abs(y), axis=-1, keepdims=True, initial=0.0), ABSMAX_MIN)
    with np.errstate(invalid="ignore"):  # an infinite weight: inf * 0
        codes = np.clip(np.rint(p.step(y * p.step(127.0 / absmax))), -128, 127)
    q = np.nan_to_num(codes, nan=0.0).astype(np.int8)
    results = (q, p.store(absmax[..., 0] / 127.0, np.float32), q.sum(axis=-1, dtype=np.int32))
    return results if residual is None else (*results, s)
