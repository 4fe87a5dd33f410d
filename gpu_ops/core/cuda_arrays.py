"""CUDA arrays of any library as CuPy views, and results back in that library. Imported when one arrives.

==================  ========================================  ======================================
library             comes in by                               the call runs on
==================  ========================================  ======================================
CuPy                itself                                    CuPy's current stream
torch               DLPack; bfloat16 as 16-bit integers       torch's current stream
Numba, others       ``__cuda_array_interface__``              the stream the array names, if any
JAX, others         DLPack                                    CuPy's current stream
==================  ========================================  ======================================

No copy is made. The first array of a call decides the device, the stream and the library of the results; what
comes from elsewhere is waited for as its protocol says. Work that the caller enqueues afterwards on that stream
sees the results.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import check_shareable, library_of
from gpu_ops.core.device import CudaDevice, cuda_device, cuda_missing
from gpu_ops.errors import DeviceError, DTypeError
from gpu_ops.formats.block_mask import BlockMask
from gpu_ops.formats.ternary_matrix import TernaryMatrix

__all__ = ["CudaArrays", "footprint", "through_the_device"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LIBRARIES = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "numba": "numba", "numba_cuda": "numba"}


class CudaArrays:
    """The CUDA arrays of one call of an op."""

    def __init__(self, op: str, name: str, x: Any) -> None:
        missing = cuda_missing()
        if missing:
            raise DeviceError(f"{op}: {name} is on a CUDA device, and there is no usable one: {missing}")
        import cupy

        self.op = op
        self._cupy = cupy
        self._first = name
        self._library = library_of(x, _LIBRARIES)
        with self._import_errors(name, x):
            self._stream = self._stream_of(x)
            self.ordinal = int(self._import(x, self._stream).device.id)

    @property
    def device(self) -> CudaDevice:
        return cuda_device(self.ordinal)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """CuPy's current device and stream are those of the call."""
        with self._cupy.cuda.Device(self.ordinal), self._stream or contextlib.nullcontext():
            yield

    def view(self, name: str, x: Any) -> Any:
        """A CuPy view of ``x``, which must lie on the device of the first array."""
        with self.active(), self._import_errors(name, x):
            view = self._import(x, self._stream)
        if view.device.id != self.ordinal:
            raise DeviceError(
                f"{self.op}: {name} is on CUDA device {view.device.id} but {self._first} on {self.ordinal}; "
                "copy one of them"
            )
        return view

    def contiguous(self, x: Any) -> Any:
        with self.active():
            return self._cupy.ascontiguousarray(x)

    def give(self, x: Any) -> Any:
        """A CuPy array in the library of the first array, sharing memory."""
        if self._library == "torch":
            torch = sys.modules["torch"]
            if x.dtype == _BFLOAT16:
                return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_dlpack(x)
        if self._library == "jax":
            return sys.modules["jax"].numpy.from_dlpack(x)
        if self._library == "numba":
            from numba import cuda

            return cuda.as_cuda_array(x.view(np.uint16) if x.dtype == _BFLOAT16 else x)
        return x

    def _import(self, x: Any, stream: Any) -> Any:
        if isinstance(x, self._cupy.ndarray):
            return x
        if hasattr(type(x), "__dlpack_device__"):
            bits = library_of(x, _LIBRARIES) == "torch" and x.dtype == sys.modules["torch"].bfloat16
            source = x.view(sys.modules["torch"].int16) if bits else x
            with self._cupy.cuda.Device(x.__dlpack_device__()[1]), stream or contextlib.nullcontext():
                view = self._cupy.from_dlpack(source)
            return view.view(_BFLOAT16) if bits else view
        interface = dict(x.__cuda_array_interface__)
        if interface.get("mask") is not None:
            raise TypeError("it has a mask")
        bits = interface["typestr"][1:] == "V2"  # what bfloat16 is to NumPy without ml_dtypes
        as_bits = SimpleNamespace(owner=x, __cuda_array_interface__=interface | {"typestr": "<u2"})
        view = self._cupy.asarray(as_bits if bits else x)  # keeps what it is given alive
        return view.view(_BFLOAT16) if bits else view

    def _stream_of(self, x: Any) -> Any:
        """The stream that the owner of ``x`` works on; None for CuPy's current one."""
        if isinstance(x, self._cupy.ndarray):
            return None
        if library_of(x, _LIBRARIES) == "torch":
            return self._stream_at(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
        if hasattr(type(x), "__dlpack_device__"):
            return None
        number = x.__cuda_array_interface__.get("stream")
        return None if number is None else self._stream_at(int(number))

    def _stream_at(self, number: int) -> Any:
        if number in (0, 1):
            return self._cupy.cuda.Stream.null
        return self._cupy.cuda.Stream.ptds if number == 2 else self._cupy.cuda.ExternalStream(number)

    @contextlib.contextmanager
    def _import_errors(self, name: str, x: Any) -> Iterator[None]:
        try:
            check_shareable(name, x)
            yield
        except (AttributeError, BufferError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise DTypeError(f"{self.op}: {name} cannot be shared with CuPy: {error}") from error


def footprint(x: Any) -> np.ndarray[Any, Any]:
    """A NumPy array at the addresses of a CuPy array: to ask which bytes two of them share, never to read."""

    interface = {
        "shape": x.shape,
        "strides": x.strides,
        "typestr": f"|V{x.itemsize}",
        "data": (x.data.ptr, True),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def through_the_device(op: str, planner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call with NumPy arrays on the current CUDA device: copies there, and the results back."""
    import cupy

    moved: dict[int, Any] = {}
    origin: dict[int, Any] = {}

    def there(x: Any) -> Any:
        if isinstance(x, BlockMask):
            return replace(x, visible=there(x.visible))
        if isinstance(x, (tuple, list)):  # `out` of several
            return tuple(map(there, x))
        if not isinstance(x, np.ndarray):
            return x
        if id(x) not in moved:  # `out=x` stays one array
            copy = cupy.asarray(_bits(x)).view(x.dtype)
            moved[id(x)], origin[id(copy)] = copy, x
        return moved[id(x)]

    def back(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(back, x))
        if isinstance(x, TernaryMatrix):  # its codes stay; who asks for them on the host gets a copy
            return x
        host = cupy.asnumpy(_bits(x)).view(x.dtype)
        if id(x) not in origin:
            return host
        origin[id(x)][...] = host
        return origin[id(x)]

    plan = planner(*map(there, args), **{name: there(x) for name, x in kwargs.items()})
    if plan.choice.copies:  # still: what is left on the host is no NumPy array
        raise DeviceError(
            f"{op}: device='cuda' takes NumPy arrays, which it copies, or arrays on a CUDA device; "
            "copy those of other libraries there first (x.cuda())"
        )
    results = back(plan.run())
    back(plan.writes)
    return results


def _bits(x: Any) -> Any:
    return x.view(np.uint16) if x.dtype == _BFLOAT16 else x
