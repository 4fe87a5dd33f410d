"""Scales embedded in the blocks of tq1_0, tq2_0 and q2_0, combined with separate ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import DTypeError, FormatError
from gpu_ops.reference.weights.ternary_formats import FORMATS
from gpu_ops.reference.weights.ternary_layouts import block_scales

__all__ = ["dense", "whole_scale", "with_embedded_scale"]


def whole_scale(codes: Array, scale: Array, shape: tuple[int, int], format: str) -> Array:
    """``scale`` times the scales in the blocks of ``codes``: (), (N,) or (N, groups), float32."""
    block = FORMATS[format].block_scale
    if not block:
        return scale
    embedded = block_scales(codes, shape, format)
    if (embedded == 1).all():
        return scale
    if scale.ndim == 2:  # groups on both sides: cut K at every boundary of either
        k = shape[1]
        common = math.gcd(k // scale.shape[1], block)
        scale = np.repeat(scale, k // scale.shape[1] // common, axis=1)
        embedded = np.repeat(embedded, block // common, axis=1)
    elif scale.ndim == 1:
        scale = scale[:, None]
    return np.asarray(scale * embedded, np.float32)


def with_embedded_scale(what: str, codes: Array, scale: Array, shape: tuple[int, int], format: str) -> Array:
    """Codes whose blocks embed the whole scale, rounded to float16; FormatError if they cannot hold it."""
    if (scale == 1).all():
        return codes
    fmt = FORMATS[format]
    n, blocks = shape[0], shape[1] // fmt.block_scale
    whole = whole_scale(codes, scale, shape, format)
    if whole.ndim == 2:
        run = shape[1] // whole.shape[1]
        if run % fmt.block_scale:
            raise FormatError(
                f"{what} has a scale per {run} weights, and {format} holds one per {fmt.block_scale}: quantise with "
                f"a group_size of None, -1 or a multiple of {fmt.block_scale}"
            )
        whole = np.repeat(whole, run // fmt.block_scale, axis=1)
    columns = np.broadcast_to(whole[:, None] if whole.ndim == 1 else whole, (n, blocks))
    with np.errstate(all="ignore"):
        halves = columns.astype("<f2")
    bad = ~np.isfinite(halves) | ((halves == 0) & (columns != 0))
    if bad.any():
        raise FormatError(f"{what} has the scale {columns[bad][0]}, and {format} stores scales as float16")
    result = codes.copy()
    field = result.reshape(-1, fmt.unit_bytes)
    field = field[:, :2] if fmt.scale_first else field[:, -2:]
    field[:] = halves.reshape(-1, 1).view(np.uint8)
    return result


def dense(op: str, trits: Array, scale: Array, dtype: Any) -> Array:
    """``scale * t`` as an array of ``dtype``, computed in float64 and rounded once."""
    try:
        checked = np.dtype(dtype)
    except TypeError:
        checked = np.dtype(object)
    if checked.hasobject or checked.names is not None:
        raise DTypeError(f"{op}: dtype={dtype!r} is no dtype of numbers")
    factors = scale.astype(np.float64)
    if factors.ndim == 1:
        factors = factors[:, None]
    elif factors.ndim == 2:
        factors = np.repeat(factors, trits.shape[1] // max(factors.shape[1], 1), axis=1)
    return np.asarray(trits * factors).astype(checked)
