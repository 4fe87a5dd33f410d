"""The emulator as a device that runs programs."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import as_bits
from gpu_ops.core.defaults import default
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Constant, Dynamic, Launch, Limits, Memset, Tensor
from gpu_ops.presets import ARCHES, select_preset

__all__ = ["EmulatorDevice", "dynamic_value"]

Array = np.ndarray[Any, Any]
Views = dict[str, Any]

_DEFAULT_ARCH = "sm_80"  # the oldest with bfloat16, cp.async and tensor cores for it


class EmulatorDevice:
    """The emulator as the device of one call: NumPy arrays, whose names the sanitizer knows.

    ``GPU_OPS_ARCH`` selects the emulated card (default sm_80). ``GPU_OPS_SANITIZE=0`` switches the sanitizer off,
    which is several times as fast; ``collect`` reports all faults of a launch, not only the first.
    """

    is_capturing = False
    on_host = True

    def __init__(self) -> None:
        arch = default("GPU_OPS_ARCH") or _DEFAULT_ARCH
        from_variable = arch == os.environ.get("GPU_OPS_ARCH")
        preset = select_preset(None if from_variable else arch)  # None: an error names GPU_OPS_ARCH
        self._preset = preset.name
        self.limits = Limits(preset.arch.name, preset.sms, preset.arch.smem_per_block_optin, "", preset.name)
        mode = os.environ.get("GPU_OPS_SANITIZE", "")
        self.sanitize: bool | str = "collect" if mode == "collect" else mode != "0"
        self._why_arch = "from GPU_OPS_ARCH" if from_variable else "the default; GPU_OPS_ARCH selects another"
        self._names: dict[int, str] = {}
        self._unwritten: set[int] = set()
        self._keep: list[Array] = []  # a freed array's address could come back as another's

    def __str__(self) -> str:
        modes = {False: "off (GPU_OPS_SANITIZE=0)", "collect": "collects faults (GPU_OPS_SANITIZE=collect)"}
        sanitizer = modes.get(self.sanitize, "on")
        return f"as {self.limits.arch} with {self.limits.sms} SMs ({self._why_arch}), sanitizer {sanitizer}"

    def name(self, name: str, array: Array, *, written: bool = True) -> None:
        """Name an array for messages. Not ``written``: reading it before a kernel wrote it is a fault.

        Of two arrays at one address, as with ``out=x``, both count as written if either is.
        """
        address = _address(array)
        if address in self._names and address not in self._unwritten:
            return
        self._names[address] = name
        self._keep.append(array)
        (self._unwritten.discard if written else self._unwritten.add)(address)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, name: str) -> Array:
        array = np.empty(shape, dtype)
        if array.size:
            array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN, so that unwritten elements are noticed
            self.name(name, array, written=False)
        return array

    def constant(self, constant: Constant) -> Array:
        self.name(constant.name, constant.values)
        return constant.values

    def link(self, step: Any) -> Callable[[Views], None]:
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
        emulator, jit = _emulator()
        compiled = jit.compile_kernel(launch.kernel, self.limits.arch)
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
            max_seconds=math.inf,  # a large call takes long, but it ends
        )
        # Later launches may read any array passed to this one: which bytes it wrote is not tracked between launches.
        self._unwritten.difference_update(_address(a) for a in args if isinstance(a, np.ndarray))

    def _buffer(self, array: Array) -> Any:
        address = _address(array)
        return _emulator()[0].Buffer(
            as_bits(array), self._names.get(address, ""), address not in self._unwritten
        )

    def _check_resident(self, launch: Launch, compiled: Any) -> None:
        """Refuse, as a driver does, a cooperative launch of more blocks than can run at the same time."""
        from gpu_ops.emulator import EmulatorError
        from gpu_ops.kernels.compiler import cubin  # jit has imported it

        blocks, threads = math.prod(launch.grid), math.prod(launch.block)
        needs = cubin.resources(compiled.cubin, compiled.entry, compiled.log)
        fit = cubin.occupancy(needs, threads, launch.shared, ARCHES[self.limits.arch]).blocks
        if blocks > fit * self.limits.sms:
            limit = f"{fit} run at the same time on each of {self.limits.sms} SMs"
            raise EmulatorError(f"{compiled.entry}: a cooperative grid of {blocks} blocks; {limit}")


@functools.cache
@uninterrupted
def _emulator() -> tuple[ModuleType, ModuleType]:
    from gpu_ops import emulator
    from gpu_ops.kernels.compiler import jit

    return emulator, jit


def _numpy_argument(a: Any, views: Views) -> Any:
    if isinstance(a, Dynamic):
        return dynamic_value(a, views)[()]
    if not isinstance(a, Tensor):
        return a
    base = views[a.name]
    if a.is_whole:
        return base if base.ndim else base.reshape(1)  # the emulator treats an array without axes as a number
    root = base
    while isinstance(root.base, np.ndarray):
        root = root.base
    data = root.ravel(order="K").view(np.uint8)
    if not np.may_share_memory(data, root):  # the owner has gaps, like another library's strided array
        low, high = np.lib.array_utils.byte_bounds(root)
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    # a view, so that the emulator sees its offset from the start of the allocation
    offset = _address(base) - _address(data) + a.offset
    view = np.ndarray(a.shape, a.dtype, data, offset, a.strides)
    view.flags.writeable = base.flags.writeable
    return view


def dynamic_value(a: Dynamic, views: Views) -> Any:
    """Kernel argument for a value that changes from call to call. CuPy takes a structure as a 0-d array."""
    if a.struct is None:
        return a.dtype.type(views[a.name])
    # NumPy copies a structure field by field: 7 us
    struct = np.ndarray((), a.dtype, bytearray(a.struct.tobytes()))
    struct[a.name] = views[a.name]
    return struct


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
