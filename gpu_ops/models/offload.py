"""Inputs of layers in pinned host memory while the GPU computes other layers.

Copies run on a separate stream. They wait for the work that made an array, and work that uses it again waits for
them; the host does not wait. Arrays in host memory are not moved.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np

from gpu_ops.core.allocator import allocator, new_array

__all__ = ["OnHost", "fetched", "offloaded", "prefetch", "release"]


def offloaded(x: Any) -> Any:
    """Start to copy ``x`` to the host; :func:`fetched` returns it."""
    current = allocator()
    if current is not None and not current.runs:
        return _Planned(x) if current.on_gpu else x
    if isinstance(x, np.ndarray) or not x.flags.c_contiguous:  # a strided one stays on the device
        return x
    return OnHost(x, _cuda())


def release(x: Any) -> None:
    """Free the device's memory: later work on the current stream, which may reuse it, waits for the copy."""
    if isinstance(x, (OnHost, _Planned)):
        x.release()


def prefetch(x: Any) -> None:
    """Start to copy back, overlapping the work that follows."""
    if isinstance(x, (OnHost, _Planned)):
        x.prefetch()


def fetched(x: Any) -> Any:
    """Return the array, on its device."""
    return x.fetch() if isinstance(x, (OnHost, _Planned)) else x


class OnHost:
    """An array of a GPU and its copy in pinned memory. It stays on the device until :meth:`release`."""

    def __init__(self, x: Any, cuda: Any) -> None:
        self.shape, self.dtype, self.nbytes = tuple(x.shape), x.dtype, int(x.nbytes)
        self._cuda = cuda
        self._device: Any = x
        self._back: Any = None
        self._host = cuda.pinned(self.nbytes)
        cuda.copies_wait_for_compute()
        self._copied = cuda.copy(self._host.ctypes.data, x.data.ptr, self.nbytes, self._host)

    def release(self) -> None:
        if self._device is not None:
            self._cuda.compute_waits_for(self._copied)
            self._device = None

    def prefetch(self) -> None:
        if self._device is None and self._back is None:
            self._back = new_array(self.shape, self.dtype, "x from the host")
            self._cuda.copies_wait_for_compute()  # which may still use the reused memory
            arrays = self._back, self._host
            self._copied = self._cuda.copy(self._back.data.ptr, self._host.ctypes.data, self.nbytes, arrays)

    def fetch(self) -> Any:
        if self._device is not None:
            return self._device
        self.prefetch()
        self._cuda.compute_waits_for(self._copied)
        return self._back


class _Planned:
    """Stand-in for :class:`OnHost` in a trace: bytes only."""

    def __init__(self, x: Any) -> None:
        self.shape, self.dtype, self.nbytes = tuple(x.shape), x.dtype, int(x.nbytes)
        self._device: Any = x

    def release(self) -> None:
        self._device = None

    def prefetch(self) -> None:
        if self._device is None:
            # a trace's arrays are NumPy's
            self._device = new_array(self.shape, self.dtype, "x from the host", on_host=True)

    def fetch(self) -> Any:
        self.prefetch()
        return self._device


class _Cuda:
    """CuPy calls of offloading: the current stream computes, another one copies."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._flying: collections.deque[tuple[Any, Any]] = collections.deque()

    def pinned(self, nbytes: int) -> Any:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def copies_wait_for_compute(self) -> None:
        self._copies.wait_event(self._cupy.cuda.get_current_stream().record())

    def compute_waits_for(self, event: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(event)

    def copy(self, to: int, source: int, nbytes: int, arrays: Any) -> Any:
        """Start a copy; return the event of its end. ``arrays`` are kept until then: pools ignore other streams."""
        runtime = self._cupy.cuda.runtime
        if nbytes:
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self._copies.ptr)
        event = self._copies.record()
        self._flying.append((event, arrays))
        while self._flying[0][0].done and len(self._flying) > 1:
            self._flying.popleft()
        return event


def _cuda() -> _Cuda:
    import cupy

    return _cuda_of(int(cupy.cuda.runtime.getDevice()))


@functools.cache
def _cuda_of(ordinal: int) -> _Cuda:
    return _Cuda()
