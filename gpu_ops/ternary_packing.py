"""Packing and unpacking on a device: by kernels where there are any, else by NumPy on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_ops.arrays import Array, Arrays
from gpu_ops.devices import Device
from gpu_ops.dispatch import Choice
from gpu_ops.ternary_matrix import on_host

__all__ = ["Packing", "why_numpy"]


def why_numpy(format: str, shape: tuple[int, ...], otherwise: str) -> str:
    """Why NumPy does this on the host, whatever the device; empty where a kernel can."""
    from gpu_ops.kernels.ternary_pack import LAYOUTS

    if format not in LAYOUTS:
        return f"{format} has no kernel; {', '.join(LAYOUTS)} have"
    if not math.prod(shape):
        return "there are no weights"
    return "an axis is beyond 31 bits" if max(shape) >= 1 << 31 else otherwise


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
