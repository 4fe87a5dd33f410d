"""Devices that run programs: the CPU, a CUDA device through CuPy, and the emulator.

A :class:`Device` knows its limits, allocates, and turns each step of a program into a function of the call's arrays
by name. No other part of the library depends on where it runs.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core.emulator_device import EmulatorDevice, dynamic_value
from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler.kernel import CudaKernel
from gpu_ops.kernels.compiler.toolkit import install_command
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Constant, Dynamic, HostCall, Launch, LibraryCall, Limits, Memset, Tensor
from gpu_ops.memory_pool import POOL
from gpu_ops.presets import DevicePreset, find_preset

__all__ = [
    "HOST",
    "CudaDevice",
    "Device",
    "EmulatorDevice",
    "HostDevice",
    "compiler_missing",
    "cuda_device",
    "cuda_missing",
    "current_device",
    "too_old",
]

Array = np.ndarray[Any, Any]  # or a cupy.ndarray, which has the same shape, dtype and strides
Views: TypeAlias = "dict[str, Any]"
Step: TypeAlias = "Callable[[Views], None]"


class Device(Protocol):
    """Interface of a device that runs programs."""

    limits: Limits
    is_capturing: bool
    on_host: bool
    """Whether its arrays are NumPy's."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Any:
        """Return an uninitialised result or workspace. ``name`` is for the emulator's messages."""

    def carve(self, workspace: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array at an offset in the caller's workspace."""

    def zero(self, name: str, views: Views) -> None:
        """Fill an array with zeros."""

    def constant(self, constant: Constant) -> Any:
        """Return a constant of a program in memory that kernels read."""

    def link(self, step: Any) -> Step:
        """Return a function that runs a step."""


class HostDevice:
    """The CPU: steps are functions."""

    limits = Limits()
    is_capturing = False
    on_host = True

    def carve(self, workspace: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        raise AssertionError("programs of the CPU take no workspace of the caller's")

    def zero(self, name: str, views: Views) -> None:
        views[name].fill(0)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Array:
        return POOL.empty(shape, dtype)

    def constant(self, constant: Constant) -> Array:
        return constant.values

    def link(self, step: Any) -> Step:
        if isinstance(step, Memset):
            return functools.partial(self.zero, step.name)
        assert isinstance(step, HostCall)
        # Overflow gives inf on every backend, whatever the caller's np.seterr.
        return np.errstate(all="ignore")(step.function)


HOST = HostDevice()


@functools.cache
@uninterrupted
def _jit() -> ModuleType:
    from gpu_ops.kernels.compiler import jit

    return jit


def _placeholder(a: Any) -> Any:
    """Value of a launch's argument until the arrays are known."""
    if isinstance(a, Dynamic):
        return a.dtype.type(0) if a.struct is None else a.struct
    return 0 if isinstance(a, Tensor) else a


class CudaDevice:
    """A CUDA device, used through CuPy on its current stream."""

    on_host = False

    def __init__(self, ordinal: int) -> None:
        import cupy

        self._cupy = cupy
        self.ordinal = ordinal
        self._device = cupy.cuda.Device(ordinal)
        attributes = self._device.attributes
        arch = f"sm_{self._device.compute_capability}"
        card = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()
        preset = find_preset(card, self._device.compute_capability)
        sms, smem = int(attributes["MultiProcessorCount"]), int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.preset: DevicePreset | None = preset
        self.limits = Limits(arch, sms, smem, card, preset.name if preset else "")
        self._constants: dict[bytes, Any] = {}
        self._uploads: Any = None

    def __str__(self) -> str:
        return f"device {self.ordinal}: {self.limits.card}, {self.limits.arch} with {self.limits.sms} SMs"

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)

    @property
    def is_current(self) -> bool:
        return bool(self._cupy.cuda.runtime.getDevice() == self.ordinal)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Any:
        return self._cupy.empty(shape, dtype)

    def upload(self, values: Array) -> Any:
        """Copy values to the device; any stream may read the copy. A captured call must not be the first to need it.

        The host waits only for the copy, which runs on a separate stream and so never queues behind other work.
        """
        with self._device:
            if self._uploads is None:
                self._uploads = self._cupy.cuda.Stream(non_blocking=True)
            with self._uploads:
                return self._cupy.asarray(values, blocking=True)

    def constant(self, constant: Constant) -> Any:
        """Return the device's copy of a constant, made once."""
        key = constant.values.tobytes() + constant.values.dtype.str.encode()
        array = self._constants.get(key)
        if array is None:
            array = self.upload(constant.values)
            if len(self._constants) >= _MOST_CONSTANTS:
                self._constants.pop(next(iter(self._constants)))
            self._constants[key] = array
        return array

    def carve(self, workspace: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array at an offset in another one."""
        return self._cupy.ndarray(shape, dtype, workspace.data + offset)

    def zero(self, name: str, views: Views) -> None:
        """Fill an array with zeros on the current stream; a captured graph repeats it."""
        view = views[name]
        if not view.flags.c_contiguous:
            view.fill(0)
            return
        self._cupy.cuda.runtime.memsetAsync(
            view.data.ptr, 0, view.nbytes, self._cupy.cuda.get_current_stream().ptr
        )

    def link(self, step: Any) -> Step:
        if isinstance(step, Memset):
            return functools.partial(self.zero, step.name)
        if isinstance(step, LibraryCall):
            return self._link_library(step)
        assert isinstance(step, Launch)
        return self._link_launch(step)

    def _link_library(self, call: LibraryCall) -> Step:
        arguments = [self._argument(a) for a in call.arguments]
        return lambda views: call.function(*[make(views) for make in arguments])

    def _argument(self, a: Any) -> Callable[[Views], Any]:
        if not isinstance(a, Tensor):
            return lambda views: a
        return operator.itemgetter(a.name) if a.is_whole else functools.partial(self._view_of, a, a.offset)

    def _link_launch(self, launch: Launch) -> Step:
        with self._device:
            launcher = _jit().load(launch.kernel)
        template = launcher.arguments([_placeholder(a) for a in launch.arguments])
        by_pointer = isinstance(launch.kernel, CudaKernel)
        whole: list[tuple[int, str]] = []
        computed: list[tuple[int, Callable[[Views], Any]]] = []
        for i, a in enumerate(launch.arguments):
            if isinstance(a, Dynamic):
                computed.append((i, functools.partial(dynamic_value, a)))
            elif isinstance(a, Tensor):
                if a.is_whole or (by_pointer and not a.offset):
                    whole.append((i, a.name))
                else:
                    computed.append((i, functools.partial(self._view_of, a, a.offset)))
        grid, block, shared = launch.grid, launch.block, launch.shared

        def run(views: Views) -> None:
            args = template.copy()
            for i, name in whole:
                args[i] = views[name]
            for i, make in computed:
                args[i] = make(views)
            launcher(grid, block, args, shared)

        return run

    def _view_of(self, a: Tensor, offset: int, views: Views) -> Any:
        return self._cupy.ndarray(a.shape, a.dtype, views[a.name].data + offset, a.strides)


_MOST_CONSTANTS = 64  # kept on a device: RoPE frequencies of as many models


@functools.cache
def cuda_device(ordinal: int) -> CudaDevice:
    """Return the device's only object in this process."""
    return CudaDevice(ordinal)


def current_device(device: str) -> Any:
    """The device that runs a call whose arrays are in host memory."""
    if device == "cpu":
        return HOST
    if device == "emulator":
        return EmulatorDevice()
    import cupy

    return cuda_device(cupy.cuda.runtime.getDevice())


@functools.cache
@uninterrupted
def cuda_missing() -> str | None:
    """Reason why no CUDA device can be used; None when one can."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {install_command('cuda13')}, or cuda12 for a driver of CUDA 12"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy without its libraries, no driver, a driver that is too old
        return " ".join(str(error).split()) or type(error).__name__
    return None if count else "the NVIDIA driver reports no device"


_RAW_SINCE = 80  # cp.async, bfloat16 conversions, mma.sync of both


def too_old(device: str, backend: str) -> str | None:
    """Reason why the card that a call would run on cannot run a backend's kernels; None when it can."""
    if backend != "raw":
        return None
    arch = current_device(device).limits.arch
    if int(arch[3:].rstrip("af")) >= _RAW_SINCE:
        return None
    return f"the CUDA C++ kernels need sm_{_RAW_SINCE} or later, this is {arch}"


@functools.cache
@uninterrupted
def compiler_missing(backend: str) -> str | None:
    """Reason why the kernels of a backend cannot be compiled here; None when they can."""
    from gpu_ops.kernels.compiler import nvrtc, toolkit

    if backend == "numba":
        installed = importlib.util.find_spec("numba_cuda") is not None
        return None if installed else f"numba-cuda is not installed; {toolkit.install_hint()}"
    try:
        nvrtc.version()
    except KernelCompileError as error:
        return str(error).partition("\n")[0]
    return None
