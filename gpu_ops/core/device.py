"""What runs GPU kernels: a CUDA device, the emulator, and a recorder that runs none and tells.

Host functions in ``kernels/<op>.py`` take one of them first and ask nothing else of where they run:
``device.arch``, ``device.card``, ``device.sms``, ``device.smem_per_block_optin``, ``device.empty(shape, dtype)``,
``device.zeros``, and ``device.launch(kernel, grid, block, args, shared=...)``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler.numba_import import import_numba
from gpu_ops.presets import ARCHES, select_preset

if TYPE_CHECKING:
    from gpu_ops.kernels.compiler.jit import Compiled, CudaKernel, NumbaKernel

__all__ = [
    "CudaDevice",
    "Device",
    "EmulatorDevice",
    "Recorder",
    "compiler_missing",
    "cuda_device",
    "cuda_missing",
    "current_device",
    "host_function",
]

Array = np.ndarray[Any, Any]  # or a cupy.ndarray, which has the same shape, dtype and strides

_DEFAULT_ARCH = "sm_80"  # the oldest with bfloat16, cp.async and tensor cores for it


class Device(Protocol):
    """What a host function of a kernel may know and ask."""

    @property
    def arch(self) -> str:
        """The compute capability, such as ``"sm_90"``."""

    @property
    def card(self) -> str:
        """The name that its driver reports; empty for the emulator, of which nothing can be measured."""

    @property
    def sms(self) -> int:
        """Streaming multiprocessors."""

    @property
    def smem_per_block_optin(self) -> int:
        """Bytes of shared memory that a block may have."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Any:
        """Workspace or a result: uninitialised. ``name`` is for the emulator's messages."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Any:
        """Workspace in which kernels look for what has not been written yet."""

    def launch(
        self,
        kernel: CudaKernel | NumbaKernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared: int = 0,
    ) -> None:
        """Run a kernel: ``args`` are arrays of this device and numbers; ``shared`` is dynamic, in bytes."""


class EmulatorDevice:
    """The emulator, for one call of an op: NumPy arrays, each known by name to the sanitizer.

    ``GPU_OPS_ARCH`` selects the card it stands for (default sm_80), ``GPU_OPS_SANITIZE=0`` switches the
    sanitizer off, which is several times as fast.
    """

    def __init__(self) -> None:
        wanted = os.environ.get("GPU_OPS_ARCH")
        preset = select_preset(None if wanted else _DEFAULT_ARCH)
        self._preset = preset.name
        self.arch = preset.arch.name
        self.card = ""
        self.sms = preset.sms
        self.smem_per_block_optin = preset.arch.smem_per_block_optin
        self.sanitize = os.environ.get("GPU_OPS_SANITIZE") != "0"
        self._why_arch = "from GPU_OPS_ARCH" if wanted else "the default; GPU_OPS_ARCH selects another"
        self._names: dict[int, str] = {}
        self._unwritten: set[int] = set()
        self._keep: list[Array] = []  # a freed array's address could come back as another's

    def __str__(self) -> str:
        sanitizer = "on" if self.sanitize else "off (GPU_OPS_SANITIZE=0)"
        return f"as {self.arch} with {self.sms} SMs ({self._why_arch}), sanitizer {sanitizer}"

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

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Array:
        array = np.empty(shape, dtype)
        if array.size:
            array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN: what no thread writes does not look right
            self.name(name, array, written=False)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Array:
        array = np.zeros(shape, dtype)
        self.name(name, array)
        return array

    def launch(
        self, kernel: CudaKernel | NumbaKernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any],
        *, shared: int = 0,
    ) -> None:  # fmt: skip
        from gpu_ops import emulator
        from gpu_ops.kernels.compiler.jit import CudaKernel, compile_kernel

        if 0 in grid:
            return
        compiled = compile_kernel(kernel, self.arch)
        together = isinstance(kernel, CudaKernel) and kernel.cooperative
        if together:
            self._check_resident(compiled, math.prod(grid), math.prod(block), shared)
        buffers = [self._buffer(a) if isinstance(a, np.ndarray) else a for a in args]
        emulator.launch(
            compiled.ptx,
            compiled.entry,
            grid,
            block,
            buffers,
            shared=shared,
            arch=self._preset,
            sanitize=self.sanitize,
            together=together,
        )
        # What one launch has been given the next may read: which bytes it wrote is not carried over.
        self._unwritten.difference_update(_address(a) for a in args if isinstance(a, np.ndarray))

    def _buffer(self, array: Array) -> Any:
        from gpu_ops.emulator import Buffer

        at = _address(array)
        bits = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        return Buffer(bits, self._names.get(at, ""), at not in self._unwritten)

    def _check_resident(self, compiled: Compiled, blocks: int, threads: int, shared: int) -> None:
        """A driver refuses a cooperative launch of more blocks than run at the same time."""
        from gpu_ops.emulator import EmulatorError
        from gpu_ops.kernels.compiler import cubin

        assert compiled.cubin is not None  # as of every CUDA C++ kernel
        needs = cubin.resources(compiled.cubin, compiled.entry, compiled.log)
        fit = cubin.occupancy(needs, threads, shared, ARCHES[self.arch]).blocks
        if blocks > fit * self.sms:
            most = f"{fit} run at the same time on each of {self.sms} SMs"
            raise EmulatorError(f"{compiled.entry}: a cooperative grid of {blocks} blocks; {most}")


class CudaDevice:
    """A CUDA device, used through CuPy on its current stream."""

    def __init__(self, ordinal: int) -> None:
        import cupy

        self.ordinal = ordinal
        self._device = cupy.cuda.Device(ordinal)
        attributes = self._device.attributes
        self.arch = f"sm_{self._device.compute_capability}"
        self.sms = int(attributes["MultiProcessorCount"])
        self.smem_per_block_optin = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.card = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()

    def __str__(self) -> str:
        return f"device {self.ordinal}: {self.card}, {self.arch} with {self.sms} SMs"

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Any:
        import cupy

        with self._device:
            return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Any:
        import cupy

        with self._device:
            return cupy.zeros(shape, dtype)

    def launch(
        self,
        kernel: CudaKernel | NumbaKernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared: int = 0,
    ) -> None:
        from gpu_ops.kernels.compiler.jit import launch

        with self._device:
            launch(kernel, grid, block, args, shared=shared)


class Recorder:
    """Stands for a device, notes what is launched and launches nothing: how ``explain()`` knows."""

    def __init__(self, device: Device) -> None:
        self.arch = device.arch
        self.card = device.card
        self.sms = device.sms
        self.smem_per_block_optin = device.smem_per_block_optin
        self.launches: list[str] = []

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str = "workspace") -> Array:
        """An address and strides, as of memory that a host function may ask about and only a kernel would touch."""
        itemsize = np.dtype(dtype).itemsize
        strides = tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides, writeable=False)

    zeros = empty

    def launch(
        self,
        kernel: CudaKernel | NumbaKernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared: int = 0,
    ) -> None:
        grid_text, block_text = (" x ".join(map(str, _without_ones(size))) for size in (grid, block))
        shared_text = f", {shared} bytes of dynamic shared memory" if shared else ""
        self.launches.append(f"{kernel.label}: grid {grid_text}, block {block_text}{shared_text}")


def _without_ones(size: tuple[int, ...]) -> tuple[int, ...]:
    """A grid or block without the axes at its end that have length one."""
    return _without_ones(size[:-1]) if len(size) > 1 and size[-1] == 1 else size


def host_function(name: str, on: Device | None, backend: str) -> Callable[..., None]:
    """A host function such as ``"rmsnorm.forward"`` of the kernels that were chosen.

    ``on`` None: the one of ``kernels/numba_cpu``. Otherwise that of ``kernels``, which takes the device and the
    backend first; given here, so that the arguments are the same everywhere.
    """
    return (
        functools.partial(_function(f"lower.{name}"), on, backend) if on else _function(f"numba_cpu.{name}")
    )


@functools.cache
def _function(path: str) -> Callable[..., None]:
    import_numba()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"gpu_ops.kernels.{module}"), name)  # type: ignore[no-any-return]


@functools.cache
def cuda_device(ordinal: int) -> CudaDevice:
    """One object per device of this process."""
    return CudaDevice(ordinal)


def current_device(device: str) -> Device:
    """What runs a call whose arrays lie on no device of their own."""
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
    arch = current_device(device).arch
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
