"""Ranks with a GPU each: CuPy arrays travel by NCCL, through nccl4py, and arrays in host memory by MPI.

MPI also carries the ids that set up NCCL's communicators, the comparison of calls (GPU_OPS_COMM_CHECK) and the
barrier.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpu_ops.core.device import cuda_missing
from gpu_ops.distributed.engine import StreamTransfer, Transfer
from gpu_ops.distributed.mpi import Mpi
from gpu_ops.distributed.transport import (
    DONE,
    Array,
    CudaTransport,
    Transport,
    as_bytes,
    nothing,
)
from gpu_ops.errors import CommError, DeviceError, MissingPackageError
from gpu_ops.kernels.compiler.toolkit import install_command

__all__ = ["Nccl", "nccl_missing"]

_SUMS = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)  # no 16-bit integers
_ID_BYTES = 128  # of NCCL's unique id


def nccl_missing() -> str | None:
    """Reason why CUDA arrays cannot travel by NCCL here; None if they can."""
    if importlib.util.find_spec("nccl") is None:
        return f"nccl4py is not installed: {install_command('nccl12')}; for CUDA 13, nccl13"
    return cuda_missing()


class Nccl(Mpi):
    """Ranks of an MPI communicator with a GPU each, made by :func:`world` and :meth:`split`.

    The first call with CUDA arrays makes NCCL's communicator on their device: all ranks of the group take part in
    that call, and it must not be captured in a CUDA graph. Make calls of one group on one stream, or on several
    streams that the caller orders.
    """

    _takes_cuda = True
    _by_nccl: NcclTransport | None = None

    def use_own_device(self) -> None:
        """Make a GPU current that no other rank of this machine uses, if the machine has enough GPUs."""
        import cupy

        here = self.hosts[: self.rank].count(self.hosts[self.rank])
        cupy.cuda.Device(here % cupy.cuda.runtime.getDeviceCount()).use()

    def _cuda_transport(self, ordinal: int) -> Transport:
        if self.size == 1:
            return super()._cuda_transport(ordinal)
        if self._by_nccl is None:
            self._by_nccl = NcclTransport(self, ordinal)
        if self._by_nccl.ordinal != ordinal:
            raise DeviceError(
                f"{self!r} sends arrays of CUDA device {self._by_nccl.ordinal}, got one on device {ordinal}; a rank "
                "has one device: copy the array there"
            )
        return self._by_nccl

    def _share_id(self, core: ModuleType) -> Any:
        """Make NCCL's unique id on rank 0 and broadcast it by MPI."""
        words = np.zeros(_ID_BYTES, np.uint8)
        if self.rank == 0:
            words[:] = np.frombuffer(bytes(core.get_unique_id()), np.uint8)
        self._finish(self._broadcast(words, 0), f"the first call of {self.name!r} with CUDA arrays")
        return core.UniqueId.from_bytes(words.tobytes())


class NcclTransport(CudaTransport):
    """Transport of CuPy arrays, on one device per rank. A communicator's NCCL calls are ordered by one stream."""

    sums = frozenset(_SUMS)

    def __init__(self, comm: Nccl, ordinal: int) -> None:
        super().__init__(ordinal)
        self._comm = comm
        try:
            import nccl.core

            nccl.core.get_version()  # loads the library
        except (ImportError, RuntimeError) as error:  # RuntimeError: no libnccl
            raise MissingPackageError(
                f"{comm!r}: CUDA arrays travel by NCCL, and nccl4py does not load ({error}); "
                f"{install_command('nccl12')}; for CUDA 13, nccl13"
            ) from error
        self._core: Any = nccl.core
        self._nccl: Any = None
        self._side: Any = None
        self._last: Any = None  # event at the end of the side stream's work, until a stream has waited for it
        self._kept: deque[tuple[Any, tuple[Array, ...]]] = (
            deque()
        )  # NCCL reads and writes these until the event

    def all_reduce(self, x: Array, result: Array, op: str, call: str) -> Transfer:
        def work(nccl: Any, stream: int) -> None:
            nccl.allreduce(x, result, self._op(op), stream=stream)

        return self._enqueue(work, x, result, beside=False)

    def all_gather(self, x: Array, stacked: Array, *, beside: bool) -> Transfer:
        def work(nccl: Any, stream: int) -> None:
            nccl.allgather(as_bytes(x), as_bytes(stacked), stream=stream)

        return self._enqueue(work, x, stacked, beside=beside)

    def reduce_scatter(
        self, pieces: Array, result: Array, op: str, *, beside: bool
    ) -> tuple[Transfer, Callable[[], None]]:
        def work(nccl: Any, stream: int) -> None:
            nccl.reduce_scatter(pieces, result, self._op(op), stream=stream)

        return self._enqueue(work, pieces, result, beside=beside), nothing

    def all_to_all(self, pieces: Array, stacked: Array) -> Transfer:
        def work(nccl: Any, stream: int) -> None:
            with self._core.group():
                for rank in range(self._comm.size):
                    nccl.send(as_bytes(pieces[rank]), rank, stream=stream)
                    nccl.recv(as_bytes(stacked[rank]), rank, stream=stream)

        stacked = stacked.reshape(pieces.shape)
        return self._enqueue(work, pieces, stacked, beside=False)

    def broadcast(self, result: Array, root: int) -> Transfer:
        def work(nccl: Any, stream: int) -> None:
            nccl.broadcast(as_bytes(result), as_bytes(result), root, stream=stream)

        return self._enqueue(work, result, beside=False)

    def shift(self, xs: Sequence[Array], found: Sequence[Array], to: int, source: int) -> Transfer:
        pairs = [pair for pair in zip(xs, found, strict=True) if pair[0].size]

        def work(nccl: Any, stream: int) -> None:
            with self._core.group():
                for x, y in pairs:
                    nccl.send(as_bytes(x), to, stream=stream)
                    nccl.recv(as_bytes(y), source, stream=stream)

        return self._enqueue(work, *(x for pair in pairs for x in pair), beside=True)

    def _op(self, op: str) -> Any:
        return self._core.SUM if op == "sum" else self._core.MAX

    def _enqueue(self, work: Callable[[Any, int], None], *arrays: Array, beside: bool) -> Transfer:
        """Enqueue a call on CuPy's current stream, or on the group's side stream after the current stream's work."""
        if not sum(x.size for x in arrays):
            return DONE
        cuda = self._cupy.cuda
        with self._errors(), self._on_device():
            nccl, current = self._communicator(), cuda.get_current_stream()
            if not beside:
                if self._last is not None:
                    current.wait_event(self._last)
                    self._last = None
                work(nccl, current.ptr)
                return DONE
            if self._side is None:
                self._side = cuda.Stream(non_blocking=True)
            if not current.is_capturing():
                while self._kept and self._kept[0][0].done:
                    self._kept.popleft()
            begin, end = (cuda.Event(disable_timing=True) for _ in range(2))
            begin.record(current)
            self._side.wait_event(begin)
            work(nccl, self._side.ptr)
            end.record(self._side)
            self._last = end
            self._kept.append((end, arrays))
            return _Beside(self, end)

    def join(self, end: Any) -> None:
        """Make the current stream wait for the side stream's work up to this event."""
        with self._on_device():
            self._cupy.cuda.get_current_stream().wait_event(end)
        if self._last is end:
            self._last = None

    def _communicator(self) -> Any:
        if self._nccl is None:
            comm = self._comm
            self._nccl = self._core.Communicator.init(comm.size, comm.rank, comm._share_id(self._core))
        return self._nccl

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise NCCL's errors as CommError."""
        from nccl.bindings.nccl import NCCLError

        try:
            yield
        except (NCCLError, self._core.NcclInvalid) as error:
            raise CommError(
                f"NCCL: {error}. Two ranks on one GPU are one cause, ranks that pass other shapes another: "
                "GPU_OPS_COMM_CHECK=1 names them"
            ) from error


class _Beside(StreamTransfer):
    """Work on the group's side stream up to an event."""

    def __init__(self, transport: NcclTransport, end: Any) -> None:
        self._transport, self._end = transport, end

    def done(self) -> bool:
        return bool(self._end.done)

    def join(self) -> None:
        self._transport.join(self._end)
