"""Fake of the part of CuPy that gpu_ops uses, over host memory and by the driver's rules (fake_driver.py).

It tests the work around a kernel on a GPU: the arrays that are accepted, copied, refused and returned, and their
device and stream. It proves nothing about CuPy itself; the tests marked ``gpu`` do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import math
import sys
import weakref
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from tests.support.fake_driver import FakeDriver, FakeEvent, FakeStream


class FakePointer:
    """Memory of a device, like ``cupy.cuda.MemoryPointer``."""

    def __init__(self, ptr, owner):
        self.ptr, self.owner = ptr, owner

    def __add__(self, offset):
        return FakePointer(self.ptr + offset, self.owner)

    device_id = property(lambda self: self.owner.device.id)


class FakeMemoryPool:
    """Fake ``cupy.cuda.MemoryPool``: multiples of 512 bytes, and a limit; 0 is none."""

    def __init__(self, cupy):
        self.cupy, self.limit, self.used = cupy, 0, 0

    def set_limit(self, *, size):
        self.limit = size

    def malloc(self, nbytes):
        size = -(-nbytes // 512) * 512
        if self.limit and self.used + size > self.limit:
            raise MemoryError
        self.used += size
        memory = np.empty(size + 1, np.uint8)
        weakref.finalize(memory, self._back, size)
        owner = SimpleNamespace(memory=memory, device=SimpleNamespace(id=self.cupy.current_device()))
        return FakePointer(memory.ctypes.data, owner)

    def _back(self, size):
        self.used -= size


class FakeArray:
    """Fake cupy.ndarray on device ``ordinal``, whose memory is a NumPy array's."""

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
        sys.modules["cupy"].run(lambda: self.host.fill(value))

    def set(self, values):
        """Copy from the host."""
        assert values.dtype != np.dtype(ml_dtypes.bfloat16), "goes as bits"
        cupy, staged = sys.modules["cupy"], values.copy()
        cupy.run(lambda: np.copyto(self.host, staged))

    def max(self):
        """Maximum. CuPy runs a kernel; reading the number waits for that kernel."""
        cupy = sys.modules["cupy"]
        result = cupy.empty((), self.dtype)
        cupy.run(lambda: np.copyto(result.host, self.host.max()))
        return result

    def astype(self, dtype, order="K", copy=True):
        bfloat16 = np.dtype(ml_dtypes.bfloat16)
        if not copy and self.dtype == dtype:
            return self
        assert bfloat16 not in (self.dtype, np.dtype(dtype)), "goes as bits"
        cupy = sys.modules["cupy"]
        result = cupy.empty(self.shape, dtype)
        cupy.run(lambda: np.copyto(result.host, self.host, casting="unsafe"))
        return result

    def sum(self, axis):
        cupy = sys.modules["cupy"]
        result = cupy.empty(tuple(n for i, n in enumerate(self.shape) if i != axis % self.ndim), self.dtype)
        cupy.run(lambda: np.sum(self.host, axis, out=result.host))
        return result

    def __len__(self):
        return len(self.host)

    def __int__(self):
        return int(sys.modules["cupy"].asnumpy(self))

    def copy(self):
        return sys.modules["cupy"].ascontiguousarray(self)

    def transpose(self, axes):
        return FakeArray(self.host.transpose(axes), self.device.id)

    def swapaxes(self, a, b):
        return FakeArray(self.host.swapaxes(a, b), self.device.id)

    def __getitem__(self, key):
        return FakeArray(self.host[key], self.device.id)

    def __setitem__(self, key, value):
        assert self.dtype != np.dtype(ml_dtypes.bfloat16), "goes as bits"
        sys.modules["cupy"].run(lambda: self.host.__setitem__(key, value.host))

    def __dlpack_device__(self):
        return (2, self.device.id)

    def __array__(self, *_, **__):
        raise TypeError("CuPy refuses to become NumPy by itself")


def _operator(function, in_place=False):
    """Operator of FakeArray."""

    def apply(self, other=None):
        cupy = sys.modules["cupy"]
        inputs = [self.host] if other is None else [self.host, getattr(other, "host", other)]
        assert not any(getattr(x, "dtype", None) == ml_dtypes.bfloat16 for x in inputs), (
            "CuPy does not know it"
        )
        like = function(*(x[..., :0] if getattr(x, "ndim", 0) else x for x in inputs))
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        result = self if in_place else cupy.empty(shape, like.dtype)
        cupy.run(lambda: function(*inputs, out=result.host))
        return result

    return apply


for _name, _function in (
    *(("add", np.add), ("radd", np.add), ("sub", np.subtract), ("mul", np.multiply), ("rmul", np.multiply)),
    *(("rshift", np.right_shift), ("lshift", np.left_shift), ("and", np.bitwise_and), ("gt", np.greater)),
    ("invert", np.invert),
):
    setattr(FakeArray, f"__{_name}__", _operator(_function))
FakeArray.__iadd__ = _operator(np.add, in_place=True)


class ForeignArray:
    """Device array of a library without DLPack, such as Numba's."""

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
    """Device array that has only DLPack."""

    def __init__(self, host, ordinal=0):
        self.host, self.ordinal = host, ordinal

    def __dlpack_device__(self):
        return (2, self.ordinal)

    def __dlpack__(self, **options):
        raise AssertionError("FakeCupy.from_dlpack takes the memory itself")


class _Device:
    """Device A30, as the generic row of sm_80."""

    def __init__(self, cupy, ordinal):
        self.cupy, self.ordinal = cupy, ordinal
        self.compute_capability = "80"
        self.attributes = {"MultiProcessorCount": cupy.sms, "MaxSharedMemoryPerBlockOptin": 163 * 1024}

    def __enter__(self):
        self.cupy.entered.append(self.ordinal)

    def __exit__(self, *_):
        self.cupy.entered.pop()

    def use(self):
        self.cupy.default_device = self.ordinal


class FakeCupy(ModuleType, FakeDriver):
    """Fake module and its driver. A capture refuses allocations, copies and waits; waits are recorded."""

    def __init__(self, devices=1):
        super().__init__("cupy")
        FakeDriver.__init__(self)
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.ndarray, self.RawModule = FakeArray, self.module
        self._allocator = None
        runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDevice=self.current_device,
            getDeviceProperties=lambda ordinal: {"name": b"NVIDIA A30"},
            memsetAsync=lambda ptr, value, nbytes, stream: self.run(
                lambda: ctypes.memset(ptr, value, nbytes)
            ),
        )
        self.cuda = SimpleNamespace(
            Device=lambda n=None: _Device(self, self.current_device() if n is None else n),
            Event=lambda **kind: FakeEvent(self, **kind),
            Stream=_Streams(self),
            get_current_stream=lambda: FakeStream(self, self.current_stream()),
            MemoryPool=lambda: FakeMemoryPool(self),
            UnownedMemory=lambda ptr, size, owner, device_id=0: SimpleNamespace(
                ptr=ptr, owner=owner, device=SimpleNamespace(id=device_id)
            ),
            MemoryPointer=lambda memory, offset: FakePointer(memory.ptr + offset, memory),
            using_allocator=self._using_allocator,
            driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=self.occupancy),
            runtime=runtime,
        )

    def asarray(self, x, blocking=False):
        if isinstance(x, np.ndarray):
            assert x.dtype != np.dtype(ml_dtypes.bfloat16), "goes as bits"
            array, staged = self.empty(x.shape, x.dtype), x.copy()
            self.run(lambda: np.copyto(array.host, staged))
            if blocking:
                self.wait("copy to the device")
            return array
        interface = x.__cuda_array_interface__
        assert interface["typestr"] != "<V2", "CuPy does not know it"
        if interface.get("stream") is not None:
            self.wait("array of another library", interface["stream"])
        owner = getattr(x, "owner", x)
        host = np.asarray(
            SimpleNamespace(__array_interface__=dict(interface, data=interface["data"]), owner=x)
        )
        return FakeArray(host, owner.ordinal)

    def from_dlpack(self, x):
        return FakeArray(x.host, x.ordinal)

    def add(self, x, y, out):
        self.run(lambda: np.add(x.host, y.host, out=out.host))

    def logical_not(self, x, out):
        self.run(lambda: np.logical_not(x.host, out=out.host))

    def asnumpy(self, x):
        assert isinstance(x, FakeArray)
        self.wait("copy to the host")
        return x.host.copy()

    def empty(self, shape, dtype):
        self.refuse_in_capture("memory is allocated")
        if self._allocator is not None:
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            return FakeArray(shape, dtype, self._allocator(nbytes))
        return FakeArray(np.empty(shape, dtype), self.current_device())

    @contextlib.contextmanager
    def _using_allocator(self, allocator):
        before, self._allocator = self._allocator, allocator
        try:
            yield
        finally:
            self._allocator = before

    def full(self, shape, value, dtype):
        array = self.empty(shape, dtype)
        array.fill(value)
        return array

    def zeros(self, shape, dtype):
        array = self.empty(shape, dtype)
        self.run(lambda: array.host.fill(0))
        return array

    def concatenate(self, arrays):
        array = self.empty((sum(len(x) for x in arrays), *arrays[0].shape[1:]), arrays[0].dtype)
        self.run(lambda: np.concatenate([x.host for x in arrays], out=array.host))
        return array

    def ascontiguousarray(self, x):
        assert self.current_device() == x.device.id
        array = self.empty(x.shape, x.dtype)
        self.run(lambda: np.copyto(array.host, x.host))
        return array


class _Streams:
    """Fake cupy.cuda.Stream namespace."""

    def __init__(self, driver):
        self._driver = driver
        self.null, self.ptds = FakeStream(driver, 0), FakeStream(driver, 2)

    def __call__(self, *, non_blocking):
        return FakeStream(self._driver)

    def from_external(self, x):
        return FakeStream(self._driver, x.__cuda_stream__()[1])
