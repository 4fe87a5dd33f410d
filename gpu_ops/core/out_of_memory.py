""":class:`OutOfMemoryError`, with bytes requested and available, from a MemoryError of NumPy, Numba or CuPy."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.errors import OutOfMemoryError

__all__ = ["available_bytes", "out_of_memory", "required_bytes", "size_text", "typed_memory_errors"]


class typed_memory_errors(contextlib.ContextDecorator):
    """Raise OutOfMemoryError in place of a MemoryError, in the name of a public function."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MemoryError) and not isinstance(error, OutOfMemoryError):
            raise out_of_memory(self._who, error) from error


def out_of_memory(who: str, error: BaseException, what: str = "", required: int = 0) -> OutOfMemoryError:
    """Convert any library's memory error to the typed one. ``what`` did not fit; ``required``: bytes of it."""
    on_gpu = type(error).__module__.partition(".")[0] == "cupy"
    required, available = required or required_bytes(error), available_bytes(on_gpu)
    text = f"{who}: no memory for {what or 'scratch or a copy of an argument'}"
    if required:
        text += f", {size_text(required)}"
    if available:
        text += f"; {size_text(available)} {'on the device' if on_gpu else 'of memory'} are available"
    return OutOfMemoryError(f"{text}. Free some, or split the arrays into several calls", required, available)


def required_bytes(error: BaseException) -> int:
    """Bytes that a NumPy or CuPy allocation requested; 0 where the error does not say."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if isinstance(shape, tuple) and isinstance(dtype, np.dtype):  # numpy's _ArrayMemoryError
        return int(math.prod(shape) * dtype.itemsize)
    return int(getattr(error, "_size", 0))  # cupy.cuda.memory.OutOfMemoryError


def available_bytes(on_gpu: bool = False) -> int:
    """Bytes that could be allocated now; 0 where the system does not say."""
    if on_gpu:
        import cupy

        return int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())
    if sys.platform != "linux":
        return 0
    import resource

    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return free
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return min(free, max(limit - used, 0))


def size_text(nbytes: int) -> str:
    """Format a number of bytes.

    >>> size_text(3 << 30), size_text(1536)
    ('3.0 GiB', '1536 bytes')
    """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 26 else f"{nbytes} bytes"
