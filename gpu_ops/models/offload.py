"""The inputs of layers in pinned host memory, while the GPU that will need them again is busy with other layers.

Copies run on a stream of their own. They wait for what made an array, and what uses it again waits for them: the host
waits for nothing. Arrays in host memory stay where they are.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np

from gpu_ops.core.allocator import allocator, new_array

__all__ = ["OnHost", "fetched", "offloaded", "prefetch", "release"]


def offloaded(x: Any) -> Any:
    """``x`` on its way to the host, to be taken back by :func:`fetched`."""
    instead = allocator()
    if instead is not None and not instead.runs:
        return _Planned(x) if instead.on_gpu else x
    if isinstance(x, np.ndarray) or not x.flags.c_contiguous:  # a strided one stays on the device
        return x
    return OnHost(x, _cuda())


def release(x: Any) -> None:
    """Let go of the device's memory: later work on the current stream, which may get it, waits for the copy."""
    if isinstance(x, (OnHost, _Planned)):
        x.release()


def prefetch(x: Any) -> None:
    """Begin to copy back, beside the work that follows."""
    if isinstance(x, (OnHost, _Planned)):
        x.prefetch()


def fetched(x: Any) -> Any:
    """The array, on its device."""
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
            self._cuda.copies_wait_for_compute()  # whose memory it may have been
            arrays = self._back, self._host
            self._copied = self._cuda.copy(self._back.data.ptr, self._host.ctypes.data, self.nbytes, arrays)

    def fetch(self) -> Any:
        if self._device is not None:
            return self._device
        self.prefetch()
        self._cuda.compute_waits_for(self._copied)
        return self._back


class _Planned:
    """The same in a trace: bytes alone."""

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
    """What offloading needs of CuPy: the current stream computes, another one copies."""

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
        """Begin a copy; the event of its end. ``arrays`` live until then: pools know nothing of other streams."""
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
