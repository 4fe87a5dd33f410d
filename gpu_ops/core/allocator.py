"""Who allocates the results and workspaces of calls: the device, or an allocator that a thread has put in its place.

:class:`gpu_ops.memory.Trace` allocates nothing and lets nothing run; :class:`gpu_ops.memory.Arena` hands out places
in one buffer; :class:`gpu_ops.memory.Pool` counts what the device allocates. None is seen by the ops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from gpu_ops.core import device as devices
from gpu_ops.errors import OptionError

__all__ = ["IN_USE", "Allocator", "allocator", "empty_like", "new_array", "use_allocator"]


class Allocator(Protocol):
    """Takes the place of a device's own allocations in one thread."""

    runs: bool
    """Whether calls run; False: they are validated, lowered and allocated for, no more."""
    on_gpu: bool
    """Whether the arrays are those of a GPU, planned or real."""
    from_device: bool
    """Whether the memory is the device's, so that another allocator may take its place for a while."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], label: str, device: Any) -> Any:
        """A result or a workspace, uninitialised. ``device``: who would have allocated it."""

    def scratch(self, nbytes: int, op: str) -> AbstractContextManager[None]:
        """Around the steps of a call: what its functions on the CPU allocate themselves meanwhile."""


IN_USE: dict[int, Allocator] = {}
"""By thread. Almost always empty; testing it is cheaper than calling :func:`allocator`."""


def allocator() -> Allocator | None:
    """The allocator of this thread; None: the device's own."""
    return IN_USE.get(threading.get_ident())


@contextlib.contextmanager
def use_allocator(one: Allocator) -> Iterator[None]:
    """Allocate from ``one`` in this thread."""
    thread = threading.get_ident()
    before = IN_USE.get(thread)
    if before is not None and not before.from_device:
        raise OptionError("memory: a trace or an arena is in use in this thread already; leave it first")
    IN_USE[thread] = one
    try:
        yield
    finally:
        if before is None:
            del IN_USE[thread]
        else:
            IN_USE[thread] = before


def empty_like(x: Any, label: str) -> Any:
    """A contiguous uninitialised array of ``x``'s shape, dtype and library, from the allocator of this thread."""
    return new_array(tuple(x.shape), x.dtype, label, on_host=isinstance(x, np.ndarray))


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any], label: str, *, on_host: bool = False) -> Any:
    """An uninitialised array, of NumPy or on the current CUDA device, from the allocator of this thread."""
    device, instead = devices.current_device("cpu" if on_host else "cuda"), allocator()
    if instead is not None:
        return instead.allocate(shape, dtype, label, device)
    return device.empty(shape, dtype, label)
