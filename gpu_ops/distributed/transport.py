"""Transport of arrays between ranks: the part of a collective that depends on the memory of the arrays.

:class:`Comm` checks arguments and lays arrays out; a transport moves contiguous ones. :class:`HostTransport` moves
NumPy arrays as bytes through an engine, :class:`CudaCopies` CuPy arrays of a group of one rank; ``NcclTransport``
moves CuPy arrays between GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import as_bits
from gpu_ops.core.device import cuda_missing
from gpu_ops.distributed.engine import Transfer, TransferEngine
from gpu_ops.errors import DeviceError, DTypeError

__all__ = [
    "DONE",
    "CudaCopies",
    "CudaTransport",
    "HostTransport",
    "Transport",
    "array_module",
    "as_bytes",
    "cupy_view",
    "nothing",
]

Array = npt.NDArray[Any]  # also a CuPy array, which has the same attributes

_OPS: dict[str, Any] = {"sum": np.add, "max": np.maximum}
_RING = 0  # the engine's channel of shifts; messages have others


def array_module(x: Any) -> Any:
    """Module of the array's type, ``numpy`` or ``cupy``."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def cupy_view(op: str, name: str, x: Any) -> Array:
    """Check that a CUDA array is CuPy's, on a usable device, and return it."""
    missing = cuda_missing()
    if missing:
        raise DeviceError(f"{op}: {name} is on a CUDA device, and there is no usable one: {missing}")
    import cupy

    if not isinstance(x, cupy.ndarray):
        raise DTypeError(
            f"{op}: {name} is a CUDA array of type {type(x).__name__}; pass a CuPy array: cupy.from_dlpack({name})"
        )
    array: Array = x
    return array


class _Done:
    def done(self) -> bool:
        return True


DONE = _Done()
"""Transfer that has ended, or whose order the current stream keeps."""


class Transport(ABC):
    """Base class that moves arrays contiguous in C order; ``result`` and ``found`` receive the results.

    ``pieces`` and ``stacked`` hold one part for each rank, in rank order, along their first axis. ``beside``: the
    caller continues with other work before it waits for the transfer.
    """

    sums: ClassVar[frozenset[str] | None] = None
    """Names of the dtypes that the transport adds up; None: all."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array: ...

    @abstractmethod
    def contiguous(self, x: Array) -> Array:
        """Return ``x``, or a copy in C order."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None: ...

    @abstractmethod
    def all_reduce(self, x: Array, result: Array, op: str, call: str) -> Transfer: ...

    @abstractmethod
    def all_gather(self, x: Array, stacked: Array, *, beside: bool) -> Transfer: ...

    @abstractmethod
    def reduce_scatter(
        self, pieces: Array, result: Array, op: str, *, beside: bool
    ) -> tuple[Transfer, Callable[[], None]]:
        """Start a transfer; return it, and a function that fills the result after it."""

    @abstractmethod
    def all_to_all(self, pieces: Array, stacked: Array) -> Transfer: ...

    @abstractmethod
    def broadcast(self, result: Array, root: int) -> Transfer: ...

    @abstractmethod
    def shift(self, xs: Sequence[Array], found: Sequence[Array], to: int, source: int) -> Transfer: ...


class HostTransport(Transport):
    """Transport of NumPy arrays, as bytes through an engine. It computes sums itself, in rank order."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return np.empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def all_reduce(self, x: Array, result: Array, op: str, call: str) -> Transfer:
        engine = self._engine
        bounds = [x.size * r // engine.size for r in range(engine.size + 1)]
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        transfer, parts = self._send_parts(x, lengths)
        engine._finish(transfer, call)
        counts = [n * x.itemsize for n in lengths]
        return engine._all_gather(as_bytes(_combined(parts, op)), as_bytes(result), counts)

    def all_gather(self, x: Array, stacked: Array, *, beside: bool) -> Transfer:
        return self._engine._all_gather(as_bytes(x), as_bytes(stacked), [x.nbytes] * self._engine.size)

    def reduce_scatter(
        self, pieces: Array, result: Array, op: str, *, beside: bool
    ) -> tuple[Transfer, Callable[[], None]]:
        transfer, parts = self._send_parts(pieces, [result.size] * self._engine.size)
        return transfer, lambda: self.copy(result, _combined(parts, op).reshape(result.shape))

    def all_to_all(self, pieces: Array, stacked: Array) -> Transfer:
        counts = [pieces.nbytes // self._engine.size] * self._engine.size
        return self._engine._all_to_all(as_bytes(pieces), counts, as_bytes(stacked), counts)

    def broadcast(self, result: Array, root: int) -> Transfer:
        return self._engine._broadcast(as_bytes(result), root)

    def shift(self, xs: Sequence[Array], found: Sequence[Array], to: int, source: int) -> Transfer:
        return self._engine._point_to_point(
            [(as_bytes(x), to) for x in xs], [(as_bytes(x), source) for x in found], _RING
        )

    def _send_parts(self, x: Array, lengths: Sequence[int]) -> tuple[Transfer, Array]:
        """Send each rank its part of ``x``, of these lengths; return the array that receives this rank's parts."""
        size, n = self._engine.size, lengths[self._engine.rank]
        parts = np.empty((size, n), x.dtype)
        counts = [length * x.itemsize for length in lengths]
        received = [n * x.itemsize] * size
        return self._engine._all_to_all(as_bytes(x), counts, as_bytes(parts), received), parts


class CudaTransport(Transport):
    """Transport of CuPy arrays on one device, in the order of CuPy's current stream."""

    def __init__(self, ordinal: int) -> None:
        import cupy

        self._cupy, self.ordinal = cupy, ordinal

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.ordinal):
            yield

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        with self._on_device():
            result: Array = self._cupy.empty(shape, np.dtype(dtype))
            return result

    def contiguous(self, x: Array) -> Array:
        with self._on_device():
            result: Array = (
                x if x.flags.c_contiguous else self._cupy.ascontiguousarray(as_bits(x)).view(x.dtype)
            )
            return result

    def copy(self, target: Array, source: Array) -> None:
        if target.size:
            with self._on_device():
                as_bits(target)[...] = as_bits(source)


class CudaCopies(CudaTransport):
    """Transport of a group of one rank: results are copies."""

    def all_reduce(self, x: Array, result: Array, op: str, call: str) -> Transfer:
        return self._copied(x, result)

    def all_gather(self, x: Array, stacked: Array, *, beside: bool) -> Transfer:
        return self._copied(x, stacked)

    def reduce_scatter(
        self, pieces: Array, result: Array, op: str, *, beside: bool
    ) -> tuple[Transfer, Callable[[], None]]:
        return self._copied(pieces, result), nothing

    def all_to_all(self, pieces: Array, stacked: Array) -> Transfer:
        return self._copied(pieces, stacked)

    def broadcast(self, result: Array, root: int) -> Transfer:
        return DONE

    def shift(self, xs: Sequence[Array], found: Sequence[Array], to: int, source: int) -> Transfer:
        for x, y in zip(xs, found, strict=True):
            self._copied(x, y)
        return DONE

    def _copied(self, x: Array, result: Array) -> Transfer:
        self.copy(result, x.reshape(result.shape))
        return DONE


def nothing() -> None:
    """Do nothing: the transfer itself has computed the sum."""


def _combined(parts: Array, op: str) -> Array:
    """Add the parts of all ranks, in rank order."""
    sum_dtype = np.dtype(np.float32) if parts.dtype.name in ("float16", "bfloat16") else parts.dtype
    total: Array = parts[0].astype(sum_dtype)
    combine = _OPS[op]
    for part in parts[1:]:
        with np.errstate(all="ignore"):  # inf - inf: NaN, as on every device
            combine(total, part.astype(sum_dtype, copy=False), out=total)
    with np.errstate(all="ignore"):
        return total.astype(parts.dtype, copy=False)


def as_bytes(x: Array) -> Array:
    """View of the bytes of a contiguous array."""
    return x.reshape(-1).view(np.uint8)
