"""Allocators of results and workspaces, and the error that they raise for lack of memory.

:class:`gpu_ops.memory.Trace` allocates nothing and lets nothing run; :class:`gpu_ops.memory.Arena` hands out places
in one buffer; :class:`gpu_ops.memory.Pool` counts what the device allocates. Ops do not see the difference.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpu_ops.core import device as devices
from gpu_ops.errors import OptionError, OutOfMemoryError

__all__ = [
    "IN_USE",
    "Allocator",
    "allocator",
    "available_bytes",
    "empty_like",
    "new_array",
    "out_of_memory",
    "required_bytes",
    "size_text",
    "typed_memory_errors",
    "use_allocator",
]


class Allocator(Protocol):
    """Replacement for a device's own allocations in one thread."""

    runs: bool
    """Whether calls run; False: they are only validated, lowered and allocated for."""
    on_gpu: bool
    """Whether the arrays are on a GPU, planned or real."""
    from_device: bool
    """Whether the memory is the device's, so that another allocator may replace this one for a while."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, device: Any) -> Any:
        """Return an uninitialised result or workspace. ``device``: the one that would have allocated it."""

    def scratch(self, nbytes: int, op: str) -> AbstractContextManager[None]:
        """Context around the steps of a call. ``nbytes``: bytes that its CPU functions allocate themselves."""


IN_USE: dict[int, Allocator] = {}
"""Allocators by thread id. Almost always empty; testing it is cheaper than calling :func:`allocator`."""


def allocator() -> Allocator | None:
    """Return the allocator of this thread; None: the device's own."""
    return IN_USE.get(threading.get_ident())


@contextlib.contextmanager
def use_allocator(one: Allocator) -> Iterator[None]:
    """Allocate from ``one`` in this thread."""
    thread = threading.get_ident()
    previous = IN_USE.get(thread)
    if previous is not None and not previous.from_device:
        raise OptionError("memory: a trace or an arena is in use in this thread already; leave it first")
    IN_USE[thread] = one
    try:
        yield
    finally:
        if previous is None:
            del IN_USE[thread]
        else:
            IN_USE[thread] = previous


def empty_like(x: Any, label: str) -> Any:
    """A contiguous uninitialised array of ``x``'s shape, dtype and library, from the allocator of this thread."""
    return new_array(tuple(x.shape), x.dtype, label, on_host=isinstance(x, np.ndarray))


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any], label: str, *, on_host: bool = False) -> Any:
    """An uninitialised array, NumPy's or on the current CUDA device, from the allocator of this thread."""
    device, current = devices.current_device("cpu" if on_host else "cuda"), allocator()
    if current is not None:
        return current.allocate(shape, dtype, label, device)
    return device.empty(shape, dtype, label)


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
