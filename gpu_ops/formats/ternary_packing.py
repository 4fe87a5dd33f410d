"""Conversion of packed codes on a device, and the cases in which NumPy converts instead."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.device import CudaDevice
from gpu_ops.core.run import Linked, program_of
from gpu_ops.formats.ternary_checks import on_host
from gpu_ops.kernels.program import Layout, Spec, lower_module
from gpu_ops.reference.weights.ternary_formats import TernaryFormat

__all__ = ["repacked", "tile_of", "why_numpy"]

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
