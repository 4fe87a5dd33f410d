"""Helpers that lower a call and run its program on the emulator, without checks; profiles of emulator/profile.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops import emulator
from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.run import Linked
from gpu_ops.kernels.program import Builder, Layout, Program, Spec, Tensor, lower


def run_program(
    op: str,
    backend: str,
    arrays: dict[str, np.ndarray],
    options: dict[str, Any],
    *,
    results: tuple[str, ...] = ("out", "lse"),
    device: EmulatorDevice | None = None,
) -> dict[str, np.ndarray]:
    """Run a program; return all arrays by name, workspaces included. ``results``: arrays that the program writes."""
    device = EmulatorDevice() if device is None else device
    layouts = {name: layout_of(x) for name, x in arrays.items()}
    spec = Spec(op, tuple(layouts.items()), tuple(options.items()))
    program, _ = lower(spec, backend, device.limits)
    return _run(program, device, arrays, results)


def run_part(
    launch: Callable[..., Any],
    arrays: dict[str, np.ndarray],
    *more: Any,
    results: tuple[str, ...] = (),
    device: EmulatorDevice | None = None,
    **values: Any,
) -> tuple[Any, dict[str, np.ndarray]]:
    """Result of ``launch(builder, *tensors, *more)``, and all arrays by name after its launches have run.

    ``values``: values of ``Dynamic`` arguments.
    """
    device = EmulatorDevice() if device is None else device
    builder = Builder(device.limits)
    made = launch(builder, *(Tensor.of(name, layout_of(x)) for name, x in arrays.items()), *more)
    return made, _run(builder.program(), device, arrays, results, **values)


def _run(
    program: Program,
    device: EmulatorDevice,
    arrays: dict[str, np.ndarray],
    results: tuple[str, ...],
    **values: Any,
) -> dict[str, np.ndarray]:
    for name, x in arrays.items():
        device.name(name, x, written=name not in results)
    views: dict[str, Any] = {**arrays, **values}
    Linked(program, device)(views)
    return views


def layout_of(x: np.ndarray) -> Layout:
    return Layout(x.shape, x.strides, x.dtype, x.ctypes.data % 16)


def device_with(sms: int | None = None, **arrays: np.ndarray) -> EmulatorDevice:
    """Emulated GPU, with fewer SMs if given, that knows its arrays by name."""
    device = EmulatorDevice()
    device.limits = replace(device.limits, sms=sms or device.limits.sms)
    for name, array in arrays.items():
        device.name(name, array)
    return device


def run_raw(device: EmulatorDevice, op: str, options: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Run the CUDA C++ kernels of an op over arrays that the device knows; None arrays are left out."""
    views = {name: x for name, x in arrays.items() if x is not None}
    layouts = tuple((name, layout_of(x)) for name, x in views.items())
    program, _ = lower(Spec(op, layouts, tuple(options.items())), "raw", device.limits)
    Linked(program, device)(views)


SOURCE = (Path(__file__).parents[1] / "emulator" / "profile.cu").read_text(encoding="utf-8")


def profiled(name, grid, block, args, **options):
    return emulator.profile(SOURCE, name, grid, block, args, **options)


def line_of(text):
    """Number of the only line of SOURCE with this text."""
    (number,) = [n for n, line in enumerate(SOURCE.splitlines(), 1) if text in line]
    return number


def buffer(profile, name):
    (match,) = [b for b in profile.buffers if b.name == name]
    return match


def named(x, y):
    return emulator.Buffer(x, "x"), emulator.Buffer(y, "y")


def only(profile, form):
    """Profile of the only instruction of this form."""
    (match,) = [i for i in profile.instructions if i.form.startswith(form)]
    return match
