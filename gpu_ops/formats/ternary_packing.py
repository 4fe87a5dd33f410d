"""Packing and unpacking on a device: by its kernels, else by NumPy, on the host; faults are told by NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.device import CudaDevice, Device, EmulatorDevice
from gpu_ops.core.dispatch import Choice
from gpu_ops.formats.ternary_checks import on_host
from gpu_ops.reference.ternary_formats import TernaryFormat

__all__ = ["Packing", "pack_there", "repacked", "unpack_there", "why_numpy"]


def why_numpy(shape: tuple[int, ...], otherwise: str) -> str:
    """Why NumPy does this on the host, whatever the device; empty where kernels can."""
    if not math.prod(shape):
        return "there are no weights"
    beyond = max(shape) >= 1 << 31 or math.prod(shape) >= 1 << 37
    return "an axis is beyond 31 bits, or the matrix beyond 37" if beyond else otherwise


def pack_there(
    device: Device | None,
    backend: str,
    trits: Array,
    packed: Array,
    fmt: TernaryFormat,
    scale: Array | None = None,
) -> Any:
    """Kernels of ``device`` fill ``packed``; flags of what is wrong. ``scale``: embedded; anywhere, 1.0 if None."""
    from gpu_ops.kernels.lower import ternary_pack as kernels

    there = _scale_there(device, scale) if fmt.block_scale else None
    n, k = trits.shape
    return kernels.pack(device, backend, trits, packed, fmt.name, scale=there, tile=_tile(fmt, (n, k)))


def unpack_there(device: Device | None, backend: str, packed: Array, trits: Array, fmt: TernaryFormat) -> Any:
    """Kernels of ``device`` fill ``trits``; flags of what is wrong."""
    from gpu_ops.kernels.lower import ternary_pack as kernels

    n, k = trits.shape
    return kernels.unpack(device, backend, packed, trits, fmt.name, tile=_tile(fmt, (n, k)))


def repacked(
    device: CudaDevice,
    backend: str,
    codes: Array,
    shape: tuple[int, int],
    fmt: TernaryFormat,
    to: TernaryFormat,
) -> Array:
    """Sound codes of one format in another, on the device where they lie; trits where ``to`` is ``fmt``."""
    import cupy

    with cupy.cuda.Device(device.ordinal):
        trits = device.empty(shape, np.int8)
        flags = unpack_there(device, backend, codes, trits, fmt)
        result: Array = trits
        if to is not fmt:
            result = device.empty(to.packed_shape(shape), np.uint8)
            flags = pack_there(device, backend, trits, result, to)
        if on_host(flags).any():  # waits: later calls may come on other streams
            raise AssertionError(f"{fmt.name} codes made on {device} are not sound")
    return result


def _tile(fmt: TernaryFormat, shape: tuple[int, int]) -> tuple[int, int, int] | None:
    return fmt.tile(shape) if fmt.tiles else None


def _scale_there(device: Device | None, scale: Array | None) -> Any:
    """As (1 or N, 1 or blocks), where the kernels of ``device`` read it."""
    array: Any = np.ones((), np.float32) if scale is None else scale
    if array.ndim < 2:
        array = array.reshape(array.size, 1)
    if isinstance(device, CudaDevice) and isinstance(array, np.ndarray):
        import cupy

        array = cupy.asarray(array)
    if isinstance(device, EmulatorDevice):
        device.name("scale", array)
    return array


@dataclass(frozen=True)
class Packing:
    """One call: ``kernels`` gives the result and flags of what is wrong with the input, which ``numpy`` refuses."""

    choice: Choice
    arrays: Arrays
    kernels: Callable[[Device | None], tuple[Array, Array]]
    numpy: Callable[[], Array]
    why_numpy: str

    def run(self, *, strict: bool) -> Any:
        """``strict``: where kernels have found a fault, NumPy looks for it again, and says which."""
        if self.choice.device == "cpu":
            return self.arrays.give(self.numpy())
        with self.arrays.on(self.choice) as on:
            if not self.why_numpy:
                result, flags = self.kernels(on)
                if not strict or not on_host(flags).any():
                    return self.arrays.give(result)
            result = self.numpy()
            if self.choice.device == "cuda":
                import cupy

                result = cupy.asarray(result)
            return self.arrays.give(result)

    def config(self) -> str:
        if self.choice.device == "cpu":
            return "NumPy"
        if self.why_numpy:
            return f"NumPy, on the host: {self.why_numpy}"
        return self.arrays.launches(self.choice, self.kernels)
