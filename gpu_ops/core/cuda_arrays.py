"""CUDA arrays of any library as CuPy views, and results back in that library. Imported at the first CUDA array.

==================  ========================================  ======================================
library             imported by                               the call runs on
==================  ========================================  ======================================
CuPy                itself                                    CuPy's current stream
torch               DLPack; bfloat16 as 16-bit integers       torch's current stream
Numba, others       ``__cuda_array_interface__``              the stream that the array names, if any
JAX, others         DLPack                                    CuPy's current stream
==================  ========================================  ======================================

No copy is made, and the host does not wait. The first array of a call decides the device, the stream and the
library of the results. That stream waits, on the device, for the streams that other arrays name. Work that the caller
enqueues on it afterwards sees the results. A Numba array names its stream: ``copy_to_host`` runs there, and a kernel
on another stream has to wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import FOREIGN_ERRORS, check_shareable, library_of, remember_torch
from gpu_ops.core.call_key import describes
from gpu_ops.core.device import CudaDevice, cuda_device, cuda_missing
from gpu_ops.errors import DeviceError, DTypeError

__all__ = ["CudaArrays", "give_cuda"]

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
        _remember(cupy)
        self._first = name
        self.library = library_of(x, _LIBRARIES)
        with self._import_errors(name, x):
            self._stream = self._stream_of(x)
            self.ordinal = int(self._import(x, self._stream).device.id)

    @property
    def device(self) -> CudaDevice:
        return cuda_device(self.ordinal)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make the call's device and stream CuPy's current ones."""
        with self._cupy.cuda.Device(self.ordinal), self._stream or contextlib.nullcontext():
            yield

    def view(self, name: str, x: Any) -> Any:
        """A CuPy view of ``x``, which must be on the device of the first array."""
        with self.active(), self._import_errors(name, x):
            view = self._import(x, self._stream)
            self._follow(x)
        if view.device.id != self.ordinal:
            raise DeviceError(
                f"{self.op}: {name} is on CUDA device {view.device.id} but {self._first} on {self.ordinal}; "
                "copy one of them"
            )
        return view

    def contiguous(self, x: Any) -> Any:
        with self.active():
            return self._cupy.ascontiguousarray(x)

    def _import(self, x: Any, stream: Any) -> Any:
        if isinstance(x, self._cupy.ndarray):
            return x
        if hasattr(type(x), "__dlpack_device__"):
            bits, source = False, x
            if library_of(x, _LIBRARIES) == "torch":
                remember_torch()
                bits, source = x.dtype == sys.modules["torch"].bfloat16, x.detach()
            if bits:
                source = source.view(sys.modules["torch"].int16)
            with self._cupy.cuda.Device(x.__dlpack_device__()[1]), stream or contextlib.nullcontext():
                view = self._cupy.from_dlpack(source)
            return view.view(_BFLOAT16) if bits else view
        interface = dict(x.__cuda_array_interface__)
        if interface.get("mask") is not None:
            raise TypeError("it has a mask")
        bits = interface["typestr"][1:] == "V2"  # bfloat16 as NumPy without ml_dtypes sees it
        interface |= {"typestr": "<u2"} if bits else {}
        interface |= {"stream": None}  # else the host would wait for it; _follow does not
        # the view keeps x alive
        view = self._cupy.asarray(SimpleNamespace(owner=x, __cuda_array_interface__=interface))
        return view.view(_BFLOAT16) if bits else view

    def _follow(self, x: Any) -> None:
        """Make the current stream wait, on the device, for the stream that ``x`` names. DLPack already does so."""
        if isinstance(x, self._cupy.ndarray) or hasattr(type(x), "__dlpack_device__"):
            return
        other, cuda = self._stream_of(x), self._cupy.cuda
        if other is None or other.ptr == (self._stream or cuda.get_current_stream()).ptr:
            return
        event = cuda.Event(disable_timing=True)
        event.record(other)
        cuda.get_current_stream().wait_event(event)

    def _stream_of(self, x: Any) -> Any:
        """The stream that the owner of ``x`` uses; None for CuPy's current stream."""
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
        if number == 2:
            return self._cupy.cuda.Stream.ptds
        return self._cupy.cuda.Stream.from_external(_StreamAt(number))

    @contextlib.contextmanager
    def _import_errors(self, name: str, x: Any) -> Iterator[None]:
        try:
            check_shareable(name, x)
            yield
        except MemoryError:
            raise
        except FOREIGN_ERRORS as error:
            raise DTypeError(f"{self.op}: {name} cannot be shared with CuPy: {error}") from error


@dataclass(frozen=True)
class _StreamAt:
    """A stream by its address, in the CUDA stream protocol."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def _remember(cupy: Any) -> None:
    """Give calls with CuPy arrays their own key, from the first array on."""

    @describes(cupy.ndarray)
    def describe(x: Any) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.strides, x.device.id, x.data.ptr % 16


def give_cuda(x: Any, library: str) -> Any:
    """Convert a CuPy array to another library, sharing memory."""
    if library == "torch":
        torch = sys.modules["torch"]
        if x.dtype == _BFLOAT16:
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(x)
    if library == "jax":
        return sys.modules["jax"].numpy.from_dlpack(x)
    from numba import cuda

    # The array names CuPy's current stream, which computes it: work that runs there or waits for it sees the result.
    return cuda.as_cuda_array(x.view(np.uint16) if x.dtype == _BFLOAT16 else x, sync=False)
