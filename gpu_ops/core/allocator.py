"""Allocators of results and workspaces: the device's own, or one that a thread has installed instead.

:class:`gpu_ops.memory.Trace` allocates nothing and lets nothing run; :class:`gpu_ops.memory.Arena` hands out places
in one buffer; :class:`gpu_ops.memory.Pool` counts what the device allocates. Ops do not see the difference.
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
