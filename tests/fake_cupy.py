"""As much of CuPy as gpu_ops uses, over host memory; kernels run on the emulator.

For what happens around a kernel on a GPU: which arrays are taken in, copied, refused and given back, on which device
and stream. It proves nothing about CuPy itself; the tests marked ``gpu`` do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import math
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from gpu_ops.core.device import EmulatorDevice
from gpu_ops.kernels.program import Launch


class FakePointer:
    """Memory of a device, as ``cupy.cuda.MemoryPointer``."""

    def __init__(self, ptr, owner):
        self.ptr, self.owner = ptr, owner

    def __add__(self, offset):
        return FakePointer(self.ptr + offset, self.owner)


class FakeArray:
    """A cupy.ndarray on device ``ordinal``, whose memory is a NumPy array's."""

    def __init__(self, host, ordinal=0, memptr=None, strides=None):
        if memptr is not None:  # cupy.ndarray(shape, dtype, memptr, strides)
            shape, dtype = host, np.dtype(ordinal)
            steps = strides or tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
            typestr = f"|V{dtype.itemsize}" if dtype.name == "bfloat16" else dtype.str
            interface = {"shape": shape, "strides": steps, "typestr": typestr, "version": 3}
            interface["data"] = (memptr.ptr, False)
            host = np.asarray(SimpleNamespace(__array_interface__=interface, owner=memptr.owner)).view(dtype)
            ordinal = memptr.owner.device.id
        self.host = host
        self.device = SimpleNamespace(id=ordinal)

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    itemsize = property(lambda self: self.host.itemsize)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    flags = property(lambda self: self.host.flags)
    data = property(lambda self: FakePointer(self.host.__array_interface__["data"][0], self))

    def reshape(self, *shape):
        return FakeArray(self.host.reshape(*shape), self.device.id)

    def ravel(self):
        return FakeArray(self.host.ravel(), self.device.id)

    def view(self, dtype):
        return FakeArray(self.host.view(dtype), self.device.id)

    def fill(self, value):
        self.host.fill(value)

    def transpose(self, axes):
        return FakeArray(self.host.transpose(axes), self.device.id)

    def swapaxes(self, a, b):
        return FakeArray(self.host.swapaxes(a, b), self.device.id)

    def __getitem__(self, key):
        return FakeArray(self.host[key], self.device.id)

    def __dlpack_device__(self):
        return (2, self.device.id)

    def __array__(self, *_, **__):
        raise TypeError("CuPy refuses to become NumPy by itself")


class ForeignArray:
    """A device array of a library without DLPack, such as Numba's."""

    def __init__(self, host, *, stream=None, read_only=False, ordinal=0, typestr=None, mask=None):
        self.host, self.ordinal = host, ordinal
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "strides": host.strides,
            "typestr": typestr or host.dtype.str,
            "data": (host.__array_interface__["data"][0], read_only),
            "version": 3,
            "stream": stream,
            "mask": mask,
        }


class ForeignDLPack:
    """A device array of which only DLPack is known."""

    def __init__(self, host, ordinal=0):
        self.host, self.ordinal = host, ordinal

    def __dlpack_device__(self):
        return (2, self.ordinal)

    def __dlpack__(self, **options):
        raise AssertionError("FakeCupy.from_dlpack takes the memory itself")


class _Stream:
    def __init__(self, cupy, number):
        self.cupy, self.number, self.ptr = cupy, number, number

    def is_capturing(self):
        return self.cupy.capturing

    def __enter__(self):
        self.cupy.streams.append(self.number)

    def __exit__(self, *_):
        self.cupy.streams.pop()


class _Device:
    """An A30, as the generic row of sm_80."""

    def __init__(self, cupy, ordinal):
        self.cupy, self.ordinal = cupy, ordinal
        self.compute_capability = "80"
        self.attributes = {"MultiProcessorCount": 56, "MaxSharedMemoryPerBlockOptin": 163 * 1024}

    def __enter__(self):
        self.cupy.entered.append(self.ordinal)

    def __exit__(self, *_):
        self.cupy.entered.pop()


class FakeCupy(ModuleType):
    """The module. ``streams``: those entered; ``launched``: (kernel label, device, stream) of each launch."""

    def __init__(self, devices=1):
        super().__init__("cupy")
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.ndarray = FakeArray
        self.streams, self.entered, self.launched = [], [], []
        self.capturing = False
        self.graph = []  # what a captured stream has recorded: functions
        stream = SimpleNamespace(null=_Stream(self, 0), ptds=_Stream(self, 2))
        runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDevice=self.current_device,
            getDeviceProperties=lambda ordinal: {"name": b"NVIDIA A30"},
            memsetAsync=self.memset,
        )
        self.cuda = SimpleNamespace(
            Device=lambda n: _Device(self, n),
            Stream=stream,
            ExternalStream=lambda n: _Stream(self, n),
            get_current_stream=lambda: _Stream(self, self.streams[-1] if self.streams else 0),
            runtime=runtime,
        )

    def current_device(self):
        return self.entered[-1] if self.entered else 0

    @contextlib.contextmanager
    def capture(self):
        """A graph: work is recorded, and run; what a driver refuses in a capture is an error."""
        self.capturing, self.graph = True, []
        try:
            yield
        finally:
            self.capturing = False

    def replay(self):
        for work in self.graph:
            work()

    def _allocate(self):
        assert not self.capturing, "memory is allocated or the host waits while the stream is captured"

    def asarray(self, x, blocking=False):
        self._allocate()
        if isinstance(x, np.ndarray):
            assert x.dtype != np.dtype(ml_dtypes.bfloat16), "goes as bits"
            return FakeArray(x.copy(), self.current_device())
        interface = x.__cuda_array_interface__
        assert interface["typestr"] != "<V2", "CuPy does not know it"
        owner = getattr(x, "owner", x)
        host = np.asarray(
            SimpleNamespace(__array_interface__=dict(interface, data=interface["data"]), owner=x)
        )
        return FakeArray(host, owner.ordinal)

    def from_dlpack(self, x):
        return FakeArray(x.host, x.ordinal)

    def asnumpy(self, x):
        self._allocate()
        assert isinstance(x, FakeArray)
        return x.host.copy()

    def empty(self, shape, dtype):
        self._allocate()
        return FakeArray(np.empty(shape, dtype), self.current_device())

    def zeros(self, shape, dtype):
        self._allocate()
        return FakeArray(np.zeros(shape, dtype), self.current_device())

    def ascontiguousarray(self, x):
        self._allocate()
        assert self.current_device() == x.device.id
        return FakeArray(np.ascontiguousarray(x.host), x.device.id)

    def memset(self, ptr, value, nbytes, stream):
        self.run(lambda: ctypes.memset(ptr, value, nbytes))

    def run(self, work):
        """Work for the current stream."""
        if self.capturing:
            self.graph.append(work)
        work()

    def load(self, kernel):
        """In place of gpu_ops.kernels.compiler.jit.load."""
        return FakeLauncher(self, kernel)


class FakeLauncher:
    """Runs a kernel on the emulator."""

    def __init__(self, cupy, kernel):
        self.cupy, self.kernel = cupy, kernel

    def arguments(self, args):
        return list(args)

    def __call__(self, grid, block, args, shared):
        cupy = self.cupy
        assert not any(isinstance(a, np.ndarray) and a.ndim for a in args), "host memory does not reach a GPU"
        assert all(a.device.id == cupy.current_device() for a in args if isinstance(a, FakeArray))
        stream = cupy.streams[-1] if cupy.streams else None
        cupy.launched.append((self.kernel.label, cupy.current_device(), stream))
        host = [np.atleast_1d(a.host) if isinstance(a, FakeArray) else a for a in args]
        host = [a[()] if isinstance(a, np.ndarray) and not a.ndim else a for a in host]  # structures
        launch = Launch(self.kernel, grid, block, tuple(host), shared)
        cupy.run(lambda: EmulatorDevice().link(launch)({}))
