"""Devices that run programs: the CPU, a CUDA device through CuPy, and the emulator.

A :class:`Device` knows its limits, allocates, and turns each step of a program into a function of the call's arrays
by name. Nothing else of the library asks where it runs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import operator
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler.jit import CudaKernel
from gpu_ops.kernels.program import Constant, Dynamic, HostCall, Launch, LibraryCall, Limits, Memset, Tensor
from gpu_ops.memory_pool import POOL
from gpu_ops.presets import ARCHES, DevicePreset, find_preset, select_preset

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

_DEFAULT_ARCH = "sm_80"  # the oldest with bfloat16, cp.async and tensor cores for it


class Device(Protocol):
    """What runs a program."""

    limits: Limits
    is_capturing: bool

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Any:
        """A result or a workspace, uninitialised. ``name`` is for the emulator's messages."""

    def carve(self, workspace: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array at a place within the caller's workspace."""

    def zero(self, name: str, views: Views) -> None:
        """Fill an array with zeros."""

    def constant(self, constant: Constant) -> Any:
        """A constant of a program, where kernels read it."""

    def link(self, step: Any) -> Step:
        """A function that runs a step."""


class HostDevice:
    """The CPU: steps are functions."""

    limits = Limits()
    is_capturing = False

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
        return step.function


HOST = HostDevice()


class EmulatorDevice:
    """The emulator, for one call of an op: NumPy arrays, each known by name to the sanitizer.

    ``GPU_OPS_ARCH`` selects the card it stands for (default sm_80), ``GPU_OPS_SANITIZE=0`` switches the
    sanitizer off, which is several times as fast.
    """

    is_capturing = False

    def __init__(self) -> None:
        wanted = os.environ.get("GPU_OPS_ARCH")
        preset = select_preset(None if wanted else _DEFAULT_ARCH)
        self._preset = preset.name
        self.limits = Limits(preset.arch.name, preset.sms, preset.arch.smem_per_block_optin, "", preset.name)
        self.sanitize = os.environ.get("GPU_OPS_SANITIZE") != "0"
        self._why_arch = "from GPU_OPS_ARCH" if wanted else "the default; GPU_OPS_ARCH selects another"
        self._names: dict[int, str] = {}
        self._unwritten: set[int] = set()
        self._keep: list[Array] = []  # a freed array's address could come back as another's

    def __str__(self) -> str:
        sanitizer = "on" if self.sanitize else "off (GPU_OPS_SANITIZE=0)"
        return f"as {self.limits.arch} with {self.limits.sms} SMs ({self._why_arch}), sanitizer {sanitizer}"

    def name(self, name: str, array: Array, *, written: bool = True) -> None:
        """What messages call an array; not ``written``: reading it before a kernel wrote it is a fault.

        Two arrays at one address, as with ``out=x``, hold something if either does.
        """
        at = _address(array)
        if at in self._names and at not in self._unwritten:
            return
        self._names[at] = name
        self._keep.append(array)
        (self._unwritten.discard if written else self._unwritten.add)(at)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Array:
        array = np.empty(shape, dtype)
        if array.size:
            array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN: what no thread writes does not look right
            self.name(name, array, written=False)
        return array

    def constant(self, constant: Constant) -> Array:
        self.name(constant.name, constant.values)
        return constant.values

    def link(self, step: Any) -> Step:
        if isinstance(step, Memset):
            return functools.partial(self.zero, step.name)
        assert isinstance(step, Launch)
        return functools.partial(self._launch, step)

    def carve(self, workspace: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        return workspace[offset : offset + nbytes].view(dtype).reshape(shape)

    def zero(self, name: str, views: Views) -> None:
        views[name].fill(0)
        self._unwritten.discard(_address(views[name]))

    def _launch(self, launch: Launch, views: Views) -> None:
        from gpu_ops import emulator
        from gpu_ops.kernels.compiler.jit import compile_kernel

        compiled = compile_kernel(launch.kernel, self.limits.arch)
        if launch.cooperative:
            self._check_resident(launch, compiled)
        args = [_numpy_argument(a, views) for a in launch.arguments]
        buffers = [self._buffer(a) if isinstance(a, np.ndarray) else a for a in args]
        emulator.launch(
            compiled.ptx,
            compiled.entry,
            launch.grid,
            launch.block,
            buffers,
            shared=launch.shared,
            arch=self._preset,
            sanitize=self.sanitize,
            together=launch.cooperative,
        )
        # What one launch has been given the next may read: which bytes it wrote is not carried over.
        self._unwritten.difference_update(_address(a) for a in args if isinstance(a, np.ndarray))

    def _buffer(self, array: Array) -> Any:
        from gpu_ops.emulator import Buffer

        at = _address(array)
        bits = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        return Buffer(bits, self._names.get(at, ""), at not in self._unwritten)

    def _check_resident(self, launch: Launch, compiled: Any) -> None:
        """A driver refuses a cooperative launch of more blocks than run at the same time."""
        from gpu_ops.emulator import EmulatorError
        from gpu_ops.kernels.compiler import cubin

        blocks, threads = math.prod(launch.grid), math.prod(launch.block)
        needs = cubin.resources(compiled.cubin, compiled.entry, compiled.log)
        fit = cubin.occupancy(needs, threads, launch.shared, ARCHES[self.limits.arch]).blocks
        if blocks > fit * self.limits.sms:
            most = f"{fit} run at the same time on each of {self.limits.sms} SMs"
            raise EmulatorError(f"{compiled.entry}: a cooperative grid of {blocks} blocks; {most}")


def _numpy_argument(a: Any, views: Views) -> Any:
    if isinstance(a, Dynamic):
        return dynamic_value(a, views)
    if not isinstance(a, Tensor):
        return a
    base = views[a.name]
    if a.is_whole:
        return base if base.ndim else base.reshape(1)  # the emulator takes an array without axes for a number
    root = base
    while isinstance(root.base, np.ndarray):
        root = root.base
    data = root.ravel(order="K").view(np.uint8)
    if not np.may_share_memory(data, root):  # an owner with gaps, as another library's strided array
        low, high = np.lib.array_utils.byte_bounds(root)
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    # a view, so that the emulator sees how far it lies from the start of its allocation
    offset = _address(base) - _address(data) + a.offset
    view = np.ndarray(a.shape, a.dtype, data, offset, a.strides)
    view.flags.writeable = base.flags.writeable
    return view


def dynamic_value(a: Dynamic, views: Views) -> Any:
    """The kernel argument of a value that changes from call to call."""
    if a.struct is None:
        return a.dtype.type(views[a.name])
    struct = a.struct.copy()
    struct[a.name] = views[a.name]
    return struct


def _placeholder(a: Any) -> Any:
    """What stands in a launch's arguments until the arrays are known."""
    if isinstance(a, Dynamic):
        return a.dtype.type(0) if a.struct is None else a.struct
    return 0 if isinstance(a, Tensor) else a


def _by_value(a: Dynamic, views: Views) -> Any:
    """CuPy passes a structure as an array of one element."""
    value = dynamic_value(a, views)
    return value if a.struct is None else np.asarray(value)


class CudaDevice:
    """A CUDA device, used through CuPy on its current stream."""

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

    def constant(self, constant: Constant) -> Any:
        """Copied and waited for once. Other streams will read it, so a captured call must not be the first."""
        key = constant.values.tobytes() + constant.values.dtype.str.encode()
        found = self._constants.get(key)
        if found is None:
            found = self._cupy.asarray(constant.values, blocking=True)
            if len(self._constants) >= _MOST_CONSTANTS:
                self._constants.pop(next(iter(self._constants)))
            self._constants[key] = found
        return found

    def carve(self, workspace: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array at a place within another."""
        return self._cupy.ndarray(shape, dtype, workspace.data + offset)

    def zero(self, name: str, views: Views) -> None:
        """On the current stream: a captured graph repeats it."""
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
        from gpu_ops.kernels.compiler import jit

        with self._device:
            launcher = jit.load(launch.kernel)
        template = launcher.arguments([_placeholder(a) for a in launch.arguments])
        by_pointer = isinstance(launch.kernel, CudaKernel)
        whole: list[tuple[int, str]] = []
        made: list[tuple[int, Callable[[Views], Any]]] = []
        for i, a in enumerate(launch.arguments):
            if isinstance(a, Dynamic):
                made.append((i, functools.partial(_by_value, a)))
            elif isinstance(a, Tensor):
                if a.is_whole or (by_pointer and not a.offset):
                    whole.append((i, a.name))
                else:
                    made.append((i, functools.partial(self._view_of, a, a.offset)))
        grid, block, shared = launch.grid, launch.block, launch.shared

        def run(views: Views) -> None:
            args = template.copy()
            for i, name in whole:
                args[i] = views[name]
            for i, make in made:
                args[i] = make(views)
            launcher(grid, block, args, shared)

        return run

    def _view_of(self, a: Tensor, offset: int, views: Views) -> Any:
        return self._cupy.ndarray(a.shape, a.dtype, views[a.name].data + offset, a.strides)


_MOST_CONSTANTS = 64  # kept on a device: as many models' RoPE frequencies


@functools.cache
def cuda_device(ordinal: int) -> CudaDevice:
    """One object per device of this process."""
    return CudaDevice(ordinal)


def current_device(device: str) -> Any:
    """What runs a call whose arrays lie on no device of their own."""
    if device == "cpu":
        return HOST
    if device == "emulator":
        return EmulatorDevice()
    import cupy

    return cuda_device(cupy.cuda.runtime.getDevice())


@functools.cache
def cuda_missing() -> str | None:
    """Why no CUDA device can be used; None when one can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'gpu-ops[cuda13]' or 'gpu-ops[cuda12]')"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy without its libraries, no driver, a driver that is too old
        return " ".join(str(error).split()) or type(error).__name__
    return None if count else "the NVIDIA driver reports no device"


_RAW_SINCE = 80  # cp.async, bfloat16 conversions, mma.sync of both


def too_old(device: str, backend: str) -> str | None:
    """Why the card that a call would run on cannot run a backend's kernels; None when it can."""
    if backend != "raw":
        return None
    arch = current_device(device).limits.arch
    if int(arch[3:].rstrip("af")) >= _RAW_SINCE:
        return None
    return f"the CUDA C++ kernels need sm_{_RAW_SINCE} or later, this is {arch}"


@functools.cache
def compiler_missing(backend: str) -> str | None:
    """Why the kernels of a backend cannot be compiled here; None when they can."""
    from gpu_ops.kernels.compiler import nvrtc, toolkit

    if backend == "numba":
        found = importlib.util.find_spec("numba_cuda") is not None
        return None if found else f"numba-cuda is not installed; {toolkit.INSTALL}"
    try:
        nvrtc.version()
    except KernelCompileError as error:
        return str(error).partition("\n")[0]
    return None


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
