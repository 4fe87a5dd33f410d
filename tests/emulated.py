"""Run programs on the emulator over NumPy arrays, without the checks of a public function."""

from __future__ import annotations

from dataclasses import replace

from gpu_ops.core.device import EmulatorDevice
from gpu_ops.core.run import Linked
from gpu_ops.kernels.program import Layout, Spec, lower


def layout_of(x):
    return Layout(x.shape, x.strides, x.dtype, x.ctypes.data % 16)


def device_with(sms=None, **arrays):
    """An emulated GPU, with fewer SMs if given, that knows its arrays by name."""
    device = EmulatorDevice()
    device.limits = replace(device.limits, sms=sms or device.limits.sms)
    for name, array in arrays.items():
        device.name(name, array)
    return device


def run(device, op, options, arrays):
    """The CUDA C++ kernels of an op. Arrays by name; those that are None are left out."""
    views = {name: x for name, x in arrays.items() if x is not None}
    layouts = tuple((name, layout_of(x)) for name, x in views.items())
    program, _ = lower(Spec(op, layouts, tuple(options.items())), "raw", device.limits)
    Linked(program, device)(views)
