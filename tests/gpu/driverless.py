"""The real CuPy on a machine without a driver: each function runs first, and a stand-in answers only if it fails at
the missing driver.

So CuPy itself checks names, signatures, dtypes, strides and kernel arguments. Arrays have addresses that nothing
reads: a CuPy kernel on the host's path is an error here, and a copy or a wait is recorded.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_ops.core import device as devices

__all__ = ["Driverless", "allocate", "at_the_driver", "cupy", "on_device"]

cupy = pytest.importorskip("cupy", reason="needs CuPy: scripts/test_cupy.sh has it", exc_type=ImportError)
if devices.cuda_missing() is None:
    pytest.skip("there is a driver: the tests marked gpu say more", allow_module_level=True)

ARCH = "90"
_addresses = itertools.count(1 << 46, 1 << 36)


def at_the_driver(error: BaseException) -> bool:
    """True if an error says that there is no driver."""
    if isinstance(error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError):
        return True
    return type(error) is RuntimeError and "libcuda" in str(error)


def through(real, stand_in):
    """Function that calls ``real``, and ``stand_in`` if that fails at the driver."""

    def call(*args, **kwargs):
        try:
            return real(*args, **kwargs)
        except Exception as error:
            if not at_the_driver(error):
                raise
        return stand_in(*args, **kwargs)

    return call


def allocate(nbytes):
    memory = cupy.cuda.UnownedMemory(next(_addresses), max(nbytes, 1), None, 0)
    return cupy.cuda.MemoryPointer(memory, 0)


def on_device(x):
    """CuPy array with the dtype, shape and strides of a NumPy array, at an arbitrary address."""
    if not isinstance(x, np.ndarray):
        return x
    if not x.size:
        return cupy.ndarray(x.shape, x.dtype, allocate(1))
    low, high = np.lib.array_utils.byte_bounds(x)
    start = x.__array_interface__["data"][0]
    return cupy.ndarray(x.shape, x.dtype, allocate(high - low) + (start - low), x.strides)


class Driverless:
    """Records of a driverless run. ``launches``: (entry, device, stream) of each; ``waits``: copies and waits of the
    host."""

    def __init__(self, monkeypatch):
        self.launches, self.waits, self.capturing = [], [], False
        self._streams = []
        null = cupy.cuda.Stream.null
        base = type(null).__mro__[1]
        state = self

        class Device(cupy.cuda.Device):
            def __init__(self, device=0):
                super().__init__(device)

            attributes = property(
                lambda _: {
                    "MultiProcessorCount": 132,
                    "MaxSharedMemoryPerBlockOptin": 227 << 10,
                    "L2CacheSize": 50 << 20,
                }
            )
            compute_capability = property(lambda _: ARCH)
            __enter__ = through(cupy.cuda.Device.__enter__, lambda self: self)

            def __exit__(self, *_):
                """Do nothing: the device was not entered, so it cannot be left."""

        class Stream(cupy.cuda.Stream):
            def __init__(self, **kind):
                through(super().__init__, lambda **_: base.__init__(self, next(_addresses), 0))(**kind)

            def __del__(self):
                """Do nothing: the object was not created, so it cannot be destroyed."""

        class Event(cupy.cuda.Event):
            def __init__(self, **kind):
                through(super().__init__, lambda **_: None)(**kind)

            record = through(cupy.cuda.Event.record, lambda *_: None)

        class MemoryPool(cupy.cuda.MemoryPool):
            set_limit = through(cupy.cuda.MemoryPool.set_limit, lambda self, size: None)
            malloc = through(cupy.cuda.MemoryPool.malloc, lambda self, nbytes: allocate(nbytes))

        def set_(name, stand_in):
            owner, _, last = name.rpartition(".")
            where = cupy
            for word in owner.split(".") if owner else ():
                where = getattr(where, word)
            monkeypatch.setattr(where, last, through(getattr(where, last), stand_in))

        set_("cuda.runtime.getDeviceCount", lambda: 1)
        set_("cuda.runtime.getDevice", lambda: 0)
        set_("cuda.runtime.getDeviceProperties", lambda ordinal: {"name": b"NVIDIA H100 80GB HBM3"})
        set_("cuda.runtime.memsetAsync", lambda *_: None)
        set_("cuda.get_current_stream", lambda: self._streams[-1] if self._streams else null)
        set_("asnumpy", self._to_host)
        set_("asarray", self._from_host)
        set_("from_dlpack", lambda x: on_device(x.host))
        set_("ascontiguousarray", lambda x: cupy.empty(x.shape, x.dtype))
        set_("zeros", cupy.empty)
        set_("cuda.device.get_cublas_handle", lambda: 7)
        set_("cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 2)
        for kind in (Device, Event, MemoryPool, Stream):
            monkeypatch.setattr(cupy.cuda, kind.__name__, kind)
        monkeypatch.setattr(cupy, "RawModule", self._module)
        monkeypatch.setattr(base, "__exit__", lambda *_: state._streams.pop())
        for name, stand_in in (
            ("__enter__", lambda stream: state._streams.append(stream)),
            ("is_capturing", lambda _: state.capturing),
            ("synchronize", lambda _: state.waits.append("synchronize")),
            ("wait_event", lambda *_: None),
        ):
            monkeypatch.setattr(base, name, through(getattr(base, name), stand_in))
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self._allocate)
        self.close = lambda: cupy.cuda.set_allocator(before)

    def _allocate(self, nbytes):
        assert not self.capturing, "memory is allocated while the stream is captured"
        return allocate(nbytes)

    def _to_host(self, x):
        self.waits.append("asnumpy")
        return np.zeros(x.shape, x.dtype)

    def _from_host(self, x, blocking=False):
        if blocking:
            self.waits.append("asarray")
        if isinstance(x, np.ndarray):
            return cupy.empty(x.shape, x.dtype)
        interface = x.__cuda_array_interface__
        memory = cupy.cuda.UnownedMemory(interface["data"][0], 1, x, 0)
        shape, dtype = interface["shape"], np.dtype(interface["typestr"])
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), interface["strides"])

    def _module(self, **options):
        module = _RawModule(**options)
        return SimpleNamespace(get_function=through(module.get_function, lambda name: _Kernel(self, name)))


_RawModule, _Function = cupy.RawModule, cupy.cuda.function.Function
_SETTABLE = frozenset(name for name in dir(cupy.RawKernel) if name.endswith("_bytes"))


class _Kernel:
    """RawKernel whose launch stops at the driver, after CuPy has accepted its arguments."""

    def __init__(self, state, name):
        self.__dict__.update(state=state, name=name, kernel=SimpleNamespace(ptr=0))

    def __setattr__(self, name, value):
        assert name in _SETTABLE, f"RawKernel.{name} is none"

    def __call__(self, grid, block, args, *, shared_mem=0):
        current = cupy.cuda.get_current_stream()
        launch = through(_Function.__new__(_Function), lambda *_, **__: None)
        launch(grid, block, args, shared_mem=shared_mem, stream=current)
        self.state.launches.append((self.name, cupy.cuda.runtime.getDevice(), current.ptr))
