"""Conversion of packed codes on a device, or by NumPy where kernels cannot; scales embedded in blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.device import CudaDevice
from gpu_ops.core.run import Linked, program_of
from gpu_ops.errors import DTypeError, FormatError
from gpu_ops.formats.ternary_checks import on_host
from gpu_ops.kernels.program import Layout, Spec, lower_module
from gpu_ops.reference.weights.ternary_formats import FORMATS, TernaryFormat
from gpu_ops.reference.weights.ternary_layouts import block_scales

__all__ = ["dense", "repacked", "tile_of", "whole_scale", "why_numpy", "with_embedded_scale"]

for _op in ("ternary_pack", "ternary_unpack"):
    lower_module(_op, "gpu_ops.kernels.weights.ternary_pack")


def why_numpy(shape: tuple[int, ...], otherwise: str) -> str:
    """Reason why NumPy does this on the host, whatever the device; empty if kernels can."""
    if not math.prod(shape):
        return "there are no weights"
    beyond = max(shape) >= 1 << 31 or math.prod(shape) >= 1 << 37
    return "an axis is beyond 31 bits, or the matrix beyond 37" if beyond else otherwise


def tile_of(fmt: TernaryFormat, shape: tuple[int, int]) -> tuple[int, int, int]:
    """BM, BK and bm of a format with tiles; zeros for other formats."""
    return fmt.tile(shape) if fmt.tiles else (0, 0, 0)


def repacked(
    device: CudaDevice,
    backend: str,
    codes: Array,
    shape: tuple[int, int],
    fmt: TernaryFormat,
    to: TernaryFormat,
) -> Array:
    """Convert valid codes to another format on their device; to trits if ``to`` is ``fmt``."""
    with device:
        trits: Array = device.empty(shape, np.int8, "trits")
        flags = _convert(device, backend, "ternary_unpack", fmt, {"packed": codes, "trits": trits}, shape)
        result = trits
        if to is not fmt:
            result = device.empty(to.packed_shape(shape), np.uint8, "packed")
            arrays = {"trits": trits, "packed": result}
            flags = _convert(device, backend, "ternary_pack", to, arrays, shape)
        if on_host(flags).any():  # waits: later calls may come on other streams
            raise AssertionError(f"{fmt.name} codes made on {device} are not sound")
    return result


def _convert(
    device: CudaDevice,
    backend: str,
    op: str,
    fmt: TernaryFormat,
    arrays: dict[str, Any],
    shape: tuple[int, int],
) -> Array:
    """Run the kernels; return their error flags."""
    layouts = tuple((name, Layout.contiguous(tuple(x.shape), x.dtype)) for name, x in arrays.items())
    need = math.prod(fmt.packed_shape(shape))
    options = {"format": fmt.name, "tile": tile_of(fmt, shape), "by_numpy": "", "need": need}
    spec = Spec(op, layouts, tuple(options.items()))
    views = dict(arrays)
    Linked(program_of(spec, backend, device.limits), device, op)(views)
    flags: Array = views["flags"]
    return flags


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
