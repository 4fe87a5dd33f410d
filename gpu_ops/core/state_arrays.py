"""Arrays of any library and device, read and written through the host for saved states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, host_view, is_read_only, on_cuda, overlaps_itself
from gpu_ops.core.device import cuda_missing
from gpu_ops.errors import DeviceError, OptionError, ShapeError

__all__ = ["StateArray", "check_device", "named_dtype", "to_device", "zeros"]

_ALIGNMENT = 512  # bytes, as from cudaMalloc, so that parts of an array are aligned like separate arrays


class StateArray:
    """The caller's array, as a NumPy or CuPy view."""

    def __init__(self, op: str, name: str, x: Any) -> None:
        self.label = f"{op}: {name}"
        self._given, self._cuda = x, None
        if on_cuda(x):
            from gpu_ops.core.cuda_arrays import CudaArrays

            self._cuda = CudaArrays(op, name, x)
            self._view = self._cuda.view(name, x)
        else:
            self._view, _ = host_view(op, name, x)
        self.shape: tuple[int, ...] = tuple(self._view.shape)
        self.dtype: np.dtype[Any] = self._view.dtype

    def copied(self) -> Array:
        """Return the elements in host memory, in C order; the array itself if it is so already."""
        if self._cuda is None:
            return np.ascontiguousarray(self._view)
        import cupy

        with self._cuda.active():
            bits: Array = cupy.asnumpy(_bits(self._cuda.contiguous(self._view)))
        return bits.view(self.dtype).reshape(self.shape)

    def check_writable(self) -> None:
        if is_read_only(self._given, self._view):
            raise ShapeError(f"{self.label} is read-only; pass a writable array")
        if overlaps_itself(self._view):
            raise ShapeError(
                f"{self.label}: its elements share memory with each other; pass an array of its own"
            )

    def write(self, values: Array) -> None:
        """Write elements of this shape and dtype from host memory."""
        if self._cuda is None:
            self._view[...] = values
            return
        import cupy

        with self._cuda.active():
            _bits(self._view)[...] = cupy.asarray(_bits(values), blocking=True)


def check_device(op: str, device: str) -> None:
    missing = cuda_missing() if device == "cuda" else None
    if missing:
        raise DeviceError(f"{op}: device='cuda', and there is no usable one: {missing}")


def to_device(values: Array, device: str, *, blocking: bool = True) -> Any:
    """Copy values to a device; "cpu" and "emulator" return NumPy arrays. Not blocking: the host does not wait."""
    if device != "cuda":
        return values
    import cupy

    return cupy.asarray(_bits(values), blocking=blocking).view(values.dtype)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: str | None) -> Any:
    """Array of zeros on a device: NumPy's unless that is "cuda"."""
    size = math.prod(shape) * dtype.itemsize
    if device == "cuda":
        import cupy

        return cupy.zeros((size,), np.uint8).view(dtype).reshape(shape)
    raw = np.zeros(size + _ALIGNMENT, np.uint8)  # pages are allocated when they are written
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def named_dtype(
    op: str, name: str, value: Any, known: Mapping[str, np.dtype[Any]] = checks.FLOAT_DTYPES
) -> np.dtype[Any]:
    """Look up a dtype of ``known`` by its name or by equality."""
    if isinstance(value, str):
        return known[checks.one_of(op, name, value, known)]
    match = next((dtype for dtype in known.values() if dtype == value), None)
    if match is None:
        raise OptionError(f"{op}: {name} must be one of {', '.join(known)}; got {value!r}")
    return match


def _bits(x: Any) -> Any:
    """View as unsigned integers of the same size: CuPy does not know every dtype."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))
