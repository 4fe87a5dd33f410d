"""Lowers a call and runs its program on the emulator, without the checks of the public functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.run import Linked
from gpu_ops.kernels.program import Layout, Spec, lower


def run_program(
    op: str,
    backend: str,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    *,
    results: tuple[str, ...] = ("out", "lse"),
    device: EmulatorDevice | None = None,
) -> None:
    """``results``: names of the arrays that the program writes."""
    device = EmulatorDevice() if device is None else device
    layouts = {name: Layout(x.shape, x.strides, x.dtype, x.ctypes.data % 16) for name, x in arrays.items()}
    spec = Spec(op, tuple(layouts.items()), tuple(options.items()))
    program, _ = lower(spec, backend, device.limits)
    for name, x in arrays.items():
        device.name(name, x, written=name not in results)
    Linked(program, device)(dict(arrays))
