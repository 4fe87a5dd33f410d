"""Run compiled kernels on a GPU, on CuPy's current device and stream.

CUDA C++ kernels run from the very cubin that :mod:`gpu_ops.kernels.compiler.jit` made, through CuPy's
``RawModule(path=...)``. CuPy's own compilation of source text is not used: it flushes denormals, and its cache
does not see our headers. Numba kernels run through numba-cuda's dispatcher.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler import cubin, nvrtc
from gpu_ops.kernels.compiler.numba_ptx import numba_cuda

__all__ = ["CudaLauncher", "NumbaLauncher", "current_device", "device_arch", "for_parameter"]


def _cupy() -> Any:
    import cupy  # only ever reached with arrays of its own

    return cupy


def current_device() -> int:
    """The ordinal of CuPy's current device."""
    return int(_cupy().cuda.runtime.getDevice())


def device_arch() -> str:
    """What to compile for on the current device."""
    digits = _cupy().cuda.Device().compute_capability  # "90"
    return nvrtc.nearest_arch((int(digits[:-1]), int(digits[-1])))


class CudaLauncher:
    """A cubin's entry, loaded on the current device.

    ``cooperative``: the driver starts all blocks of a grid together, or refuses one that does not fit.
    """

    def __init__(self, image: bytes, entry: str, *, cooperative: bool = False) -> None:
        self._lock = threading.Lock()
        self._opted_in = 0
        self._sizes = cubin.parameter_sizes(image, entry)
        with tempfile.TemporaryDirectory(prefix="gpu_ops-") as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(image)
            # get_function loads the module at once; RawKernel would read the file again on another device,
            # but a launcher belongs to one.
            module = _cupy().RawModule(path=str(path), enable_cooperative_groups=cooperative)
            self._kernel = module.get_function(entry)

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Numbers in the sizes of their parameters; the caller puts arrays in their places before each launch."""
        if len(args) != len(self._sizes):
            raise TypeError(f"the kernel takes {len(self._sizes)} arguments, {len(args)} given")
        return list(map(for_parameter, args, self._sizes))

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int
    ) -> None:
        if shared > self._opted_in:
            # Above 48 KiB a function needs leave. The leave only ever grows: lowering it for a small launch
            # would fail a large one that another thread is about to make.
            with self._lock:
                if shared > self._opted_in:
                    self._kernel.max_dynamic_shared_size_bytes = shared
                    self._opted_in = shared
        self._kernel(grid, block, tuple(args), shared_mem=shared)


def for_parameter(value: Any, size: int) -> Any:
    """A Python number as the NumPy scalar of the parameter's size; arrays and NumPy scalars as they are.

    CuPy copies a scalar's own bytes: a Python float would arrive as 8 bytes in a ``float`` parameter.
    """
    if isinstance(value, np.generic):
        if value.nbytes != size:
            raise TypeError(f"a parameter of {size} bytes was given {value!r}, {value.nbytes} bytes")
        # CuPy passes an array of one by value
        return np.asarray(value) if isinstance(value, np.void) else value
    if isinstance(value, bool | int):
        unsigned = value >= 1 << (8 * size - 1)
        return np.dtype(f"{'u' if unsigned else 'i'}{size}").type(value)
    if isinstance(value, float):
        return np.dtype(f"f{size}").type(value)
    return value


_config_lock = threading.Lock()


@contextlib.contextmanager
def _small_grids_allowed() -> Iterator[None]:
    """Without numba-cuda's warning of a grid of less than 128 blocks: a small problem has one by right."""
    from numba.cuda.dispatcher import config

    with _config_lock:  # a second thread would take the first one's 0 for the user's setting, and keep it
        before, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            yield
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


class NumbaLauncher:
    """A Numba kernel on the current device. numba-cuda compiles it for that device and keeps it in memory."""

    def __init__(self, function: Callable[..., None], signature: str) -> None:
        self._cuda = numba_cuda()
        self._dispatcher = self._cuda.jit(signature, lineinfo=True)(function)

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """As they are."""
        return list(args)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int
    ) -> None:
        stream = self._cuda.external_stream(_cupy().cuda.get_current_stream().ptr)
        with _small_grids_allowed():
            configured = self._dispatcher[grid, block, stream, shared]
        configured(*map(self._argument, args))

    def _argument(self, value: Any) -> Any:
        if not hasattr(value, "__cuda_array_interface__"):
            return value
        if value.dtype.name == "bfloat16":
            value = value.view(np.uint16)  # Numba kernels take the bits
        # The same stream as CuPy's: no need to wait for it, and waiting would break a graph capture.
        return self._cuda.as_cuda_array(value, sync=False)
