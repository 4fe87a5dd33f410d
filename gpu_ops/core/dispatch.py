"""Choice of the device and the backend that run a call, with the reason.

============  =========================  ==============================================================
device        backends, best first       what it is
============  =========================  ==============================================================
``cpu``       ``numba``, ``reference``   compiled kernels on all cores; NumPy, the definition of correct
``cuda``      ``raw``, ``numba``         CUDA C++ kernels, Numba kernels, on a GPU
``emulator``  ``raw``, ``numba``         the same kernels, run on the CPU and checked; slow
============  =========================  ==============================================================

CUDA arrays run on ``cuda``. NumPy arrays run on ``cpu``, or on a usable GPU where the estimate, copies included, is
below half of the CPU's. They are copied to the current device and the results back. The emulator runs only on
request.

``device=`` and ``backend=`` decide; else the environment variables ``GPU_OPS_DEVICE`` and ``GPU_OPS_BACKEND``; else
the estimate and the first backend that can run the problem. An explicit choice that cannot run raises. An automatic
one falls back to the next, and ``explain`` reports it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_ops.core import device as devices
from gpu_ops.core.checks import one_of
from gpu_ops.core.defaults import default
from gpu_ops.errors import DeviceError, OptionError
from gpu_ops.kernels.compiler.numba_import import numba_disabled
from gpu_ops.kernels.compiler.progress import without_stderr
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

__all__ = [
    "BACKENDS",
    "WITH_CUDA_KERNELS",
    "Choice",
    "choose",
    "has_cuda_kernels",
    "is_emulated",
    "lowering",
    "require_cuda_kernels",
    "unavailable",
]

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("numba", "reference"),
    "cuda": ("raw", "numba"),
    "emulator": ("raw", "numba"),
}
_ALL_BACKENDS = tuple(dict.fromkeys(name for names in BACKENDS.values() for name in names))
_LOWERING = {("cpu", "numba"): "cpu", ("cpu", "reference"): "reference"}

WITH_CUDA_KERNELS: list[str] = []  # filled by the ops themselves: @op(cuda=True)

# For the estimate only: a server CPU's core (multiply-adds of 8 to 16 float32 lanes) and the host's memory.
_CORE_FLOPS, _HOST_BYTES, _HOST_SECONDS = 100e9, 40e9, 10e-6
_TRANSFER_BYTES, _LAUNCH_SECONDS = (
    10e9,
    50e-6,
)  # copies of pageable memory; launches, and the wait for the results
_EFFICIENCY = 0.5  # of a card's peaks
_WORTH_COPYING = 0.5  # of the CPU's time


@dataclass(frozen=True)
class Choice:
    """A device and a backend, with the reason for each one passed over.

    ``copies``: the arrays are in host memory, and the device is a GPU.
    """

    device: str
    backend: str
    reason: str
    passed_over: dict[str, str] = field(default_factory=dict)
    copies: bool = False


def lowering(choice: Choice) -> str:
    """The name under which kernels register how they lower an op: a GPU's backend, ``cpu`` or ``reference``."""
    return _LOWERING.get((choice.device, choice.backend), choice.backend)


@functools.cache
@uninterrupted  # it imports, or looks for packages
def unavailable(device: str, backend: str) -> str | None:
    """Reason why a backend cannot run on this machine at all; None when it can."""
    if device == "cpu":
        if backend == "numba" and importlib.util.find_spec("numba") is None:
            return "the package numba is not installed (pip install numba)"
        if backend == "numba" and (why := numba_disabled()):
            import logging  # not at the top: import time of gpu_ops

            with without_stderr():
                logging.getLogger("gpu_ops").warning("ops run on the slow NumPy reference: %s", why)
            return why
        return None
    if (device == "emulator" or backend == "numba") and (why := numba_disabled()):
        return why
    return (devices.cuda_missing() if device == "cuda" else None) or devices.compiler_missing(backend)


def has_cuda_kernels(op: str) -> bool:
    """Whether an op runs on the devices ``cuda`` and ``emulator``."""
    return op in WITH_CUDA_KERNELS


def require_cuda_kernels(op: str, because: str) -> None:
    if not has_cuda_kernels(op):
        raise DeviceError(
            f"{op}: {because}, but this op has no CUDA kernels yet; {', '.join(WITH_CUDA_KERNELS)} have. "
            "Run it on the CPU: device='cpu' and arrays in host memory (cupy.asnumpy(x), x.cpu())"
        )


def choose(
    op: str,
    device: Any,
    backend: Any,
    on_cuda: bool = False,
    *,
    unsupported: Mapping[str, str] | Callable[[bool], Mapping[str, str]] | None = None,
    work: tuple[float, float] = (0.0, 0.0),
) -> Choice:
    """Pick device and backend.

    ``on_cuda``: the arrays are on a CUDA device. ``unsupported`` maps a backend, or a device and a backend as in
    ``"cpu numba"``, to the reason why it cannot run this problem. A function that returns this mapping is called for
    GPU devices only; its argument is whether the arrays will be copied to the device.
    ``work``: bytes and flops, for the estimate.
    """
    device_source, device = _setting("device", device)
    backend_source, wanted = _setting("backend", backend)
    if backend is not None and type(backend) is not str:  # an object of any type
        wanted = one_of(op, backend_source, backend, _ALL_BACKENDS)
    estimate = ""
    if device is None and on_cuda:
        device = "cuda"
    elif device is None:
        device, estimate = _by_estimate(op, wanted, *work)
    device = one_of(op, device_source, device, BACKENDS, meant={"gpu": "cuda", "GPU": "cuda"})
    if callable(unsupported):
        unsupported = unsupported(device == "cuda" and not on_cuda) if device != "cpu" else {}
    unsupported = unsupported or {}
    if device != "cpu":
        require_cuda_kernels(op, f"{device_source}={device!r}")
    if on_cuda and device != "cuda":
        raise DeviceError(
            f"{op}: {device_source}={device!r}, but the arrays are on a CUDA device; "
            "copy them to the host first (cupy.asnumpy(x), x.cpu())"
        )
    if device == "cuda" and (missing := devices.cuda_missing()):
        raise DeviceError(f"{op}: {device_source}='cuda', but there is no usable CUDA device: {missing}")
    refused: dict[str, str] = {}
    for name in BACKENDS[device]:
        why = unavailable(device, name)
        if why is None and device != "cpu":
            why = devices.too_old(device, name)
        why = why or unsupported.get(f"{device} {name}", unsupported.get(name))
        if why is None and wanted in (None, name):
            reason = "asked for" if wanted else "first choice" if not refused else "next choice"
            copies = device == "cuda" and not on_cuda
            return Choice(device, name, reason + estimate, refused, copies)
        refused[name] = why or "not asked for"
    others = [repr(other) for other, names in BACKENDS.items() if isinstance(wanted, str) and wanted in names]
    if others and repr(device) not in others:
        raise OptionError(
            f"{op}: {backend_source}={wanted!r} is a backend of {' and '.join(others)}, but this call runs on "
            f"{device!r}, whose are {', '.join(map(repr, BACKENDS[device]))}; pass one of them, or device= as well"
        )
    wanted = one_of(op, backend_source, wanted, BACKENDS[device]) if wanted else None
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items() if wanted in (None, name))
    raise DeviceError(f"{op}: no backend on {device} can run this: {reasons}")


def is_emulated(device: Any) -> bool:
    """Whether a call with this ``device=`` runs on the emulator."""
    _, chosen = _setting("device", device)
    return isinstance(chosen, str) and chosen == "emulator"


def _by_estimate(op: str, backend: str | None, nbytes: float, flops: float) -> tuple[str, str]:
    """The device for arrays in host memory, and the text that :func:`explain` adds for it."""
    on_gpu = backend is None or backend in BACKENDS["cuda"]
    if not nbytes or not on_gpu or not has_cuda_kernels(op) or devices.cuda_missing():
        return "cpu", ""
    preset = devices.current_device("cuda").preset
    if preset is None:
        return "cpu", ""
    cpu = _HOST_SECONDS + max(nbytes / _HOST_BYTES, flops / (_CORE_FLOPS * (os.cpu_count() or 1)))
    busy = max(nbytes / (preset.memory_gbps * 1e9), flops / (preset.peaks.float16 * 1e12))
    gpu = _LAUNCH_SECONDS + nbytes / _TRANSFER_BYTES + busy / _EFFICIENCY
    text = f"; estimates: cpu {1e3 * cpu:.3g} ms, cuda {1e3 * gpu:.3g} ms with copies"
    return ("cuda" if gpu < _WORTH_COPYING * cpu else "cpu"), text


def _setting(name: str, argument: Any) -> tuple[str, str | None]:
    """Return (source of the choice, the choice): the argument, else the environment."""
    if argument is not None:
        return name, argument
    variable = f"GPU_OPS_{name.upper()}"
    return variable, default(variable) or None
