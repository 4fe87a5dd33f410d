"""Products with packed weights and int8 activations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpu_ops.reference.gemm.linear import linear
from gpu_ops.reference.precision import Array

__all__ = ["MIN_ABSMAX", "linear_int8", "quantized_activations"]

MIN_ABSMAX = 2.0**-100
"""Smaller activations count as zeros: 127 / absmax might overflow."""


def quantized_activations(x: Array, block: int) -> Array:
    """``s * rint(x * 127 / absmax)`` with ``s = absmax / 127`` per block of ``block`` elements, float64.

    The division, its inverse and the product are float32. A block with a NaN or an infinity is NaN.
    """
    values = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    absmax = np.abs(values).max(axis=-1, keepdims=True, initial=0.0)
    finite = np.isfinite(absmax)
    usable = finite & (absmax >= np.float32(MIN_ABSMAX))
    scale = np.where(usable, absmax / np.float32(127), np.float32(0))
    factor = np.where(usable, np.float32(127) / np.where(usable, absmax, np.float32(1)), np.float32(0))
    codes = np.rint(np.where(finite, values, np.float32(0)) * factor)
    result = codes.astype(np.float64) * np.where(finite, scale, np.nan)
    return np.asarray(result.reshape(x.shape))


def linear_int8(
    x: Array,
    weight: Array,
    blocks: Iterable[tuple[int, int]],
    bias: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """:func:`linear` of quantised x, in float64, rounded once.

    Parameters
    ----------
    weight : (out_features, in_features)
        Unpacked.
    blocks : pairs
        Runs of rows: their number, and the elements of x that share a scale.

    Returns
    -------
    (..., out_features) in x's dtype
    """
    parts, first = [], 0
    for rows, block in blocks:
        part = weight[first : first + rows].astype(np.float64)
        parts.append(linear(quantized_activations(x, block), part))
        first += rows
    y = np.concatenate(parts, axis=-1)
    for addend in (bias, residual):
        if addend is not None:
            y = y + addend.astype(np.float64)
    return np.asarray(y.astype(x.dtype))
