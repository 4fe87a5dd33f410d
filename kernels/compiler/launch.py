"""Launches of compiled kernels on a GPU, on CuPy's current device and stream.

CUDA C++ kernels run from the cubin that :mod:`gpu_ops.kernels.compiler.jit` made, through CuPy's
``RawModule(path=...)``. CuPy does not compile the source text itself: it would flush denormals, and its cache does
not track our headers. Numba kernels run through numba-cuda's dispatcher.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.errors import DeviceError
from gpu_ops.kernels.compiler import cubin, nvrtc
from gpu_ops.kernels.compiler.numba_ptx import numba_cuda

__all__ = ["CudaLauncher", "NumbaLauncher", "current_device", "device_arch", "for_parameter"]


def _cupy() -> Any:
    import cupy  # only reached with CuPy arrays, so it is installed

    return cupy


def current_device() -> int:
    """The ordinal of CuPy's current device."""
    return int(_cupy().cuda.runtime.getDevice())


def device_arch() -> str:
    """The architecture to compile for on the current device."""
    digits = _cupy().cuda.Device().compute_capability  # "90"
    return nvrtc.nearest_arch((int(digits[:-1]), int(digits[-1])))


class CudaLauncher:
    """One entry of a cubin, loaded on the current device.

    ``cooperative``: all blocks of a grid start together; a grid that does not fit is refused.
    """

    def __init__(self, image: bytes, entry: str, *, cooperative: bool = False) -> None:
        self._lock = threading.Lock()
        self._opted_in = 0
        self._cooperative = cooperative
        self._resident: dict[tuple[int, int], int] = {}  # blocks, by threads and shared memory of each
        self._entry, self._sizes = entry, cubin.parameter_sizes(image, entry)
        with tempfile.TemporaryDirectory(prefix="gpu_ops-") as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(image)
            # get_function loads the module at once. RawKernel would read the file again for another device, but a
            # launcher belongs to one device.
            module = _cupy().RawModule(path=str(path), enable_cooperative_groups=cooperative)
            self._kernel = module.get_function(entry)

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Numbers in the sizes of their parameters; the caller inserts arrays before each launch."""
        if len(args) != len(self._sizes):
            raise TypeError(f"the kernel takes {len(self._sizes)} arguments, {len(args)} given")
        return list(map(for_parameter, args, self._sizes))

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int
    ) -> None:
        if shared > self._opted_in:
            # More than 48 KiB must be requested per function. The limit only ever grows: lowering it for a small
            # launch would break a large one that another thread is about to make.
            with self._lock:
                if shared > self._opted_in:
                    self._kernel.max_dynamic_shared_size_bytes = shared
                    self._opted_in = shared
        if self._cooperative:
            self._check_resident(math.prod(grid), math.prod(block), shared)
        self._kernel(grid, block, tuple(args), shared_mem=shared)

    def _check_resident(self, blocks: int, threads: int, shared: int) -> None:
        """Refuse a grid that does not fit. CuPy would warn and launch fewer blocks, which would wait forever."""
        cap = self._resident.get((threads, shared))
        if cap is None:
            cuda = _cupy().cuda
            per_sm = cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                self._kernel.kernel.ptr, threads, shared
            )
            cap = self._resident[threads, shared] = per_sm * cuda.Device().attributes["MultiProcessorCount"]
        if blocks > cap:
            raise DeviceError(
                f"{self._entry}: its {blocks} blocks wait for each other, and this device runs {cap} of them at the "
                "same time; pass backend='numba', whose kernels do not wait"
            )


def for_parameter(value: Any, size: int) -> Any:
    """A Python number as a NumPy scalar of the parameter's size; arrays and NumPy scalars unchanged.

    CuPy copies a scalar's own bytes: a Python float would reach a ``float`` parameter as 8 bytes.
    """
    if isinstance(value, np.generic):
        if value.nbytes != size:
            raise TypeError(f"a parameter of {size} bytes was given {value!r}, {value.nbytes} bytes")
        # CuPy passes an array of one element by value
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
    """Silence numba-cuda's warning about grids of fewer than 128 blocks: small problems need no more."""
    from numba.cuda.dispatcher import config

    with _config_lock:  # otherwise a second thread would restore the first one's 0 as the user's setting
        before, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            yield
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


class NumbaLauncher:
    """A Numba kernel on the current device. numba-cuda compiles it for that device and caches it in memory."""

    def __init__(self, function: Callable[..., None], signature: str) -> None:
        self._cuda = numba_cuda()
        self._dispatcher = self._cuda.jit(signature, lineinfo=True)(function)

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Arguments, unchanged."""
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
            value = value.view(np.uint16)  # Numba kernels take raw bits
        # Numba runs on CuPy's stream, so it need not wait for it; waiting would break a graph capture.
        return self._cuda.as_cuda_array(value, sync=False)
