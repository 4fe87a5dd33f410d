"""Communicators: exchange of arrays between ranks, the same for every engine.

This module has validation, layouts and counts; a :class:`Transport` moves the arrays, by an engine
(:class:`SingleProcess`, ``Mpi``) or by NCCL.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import check_writable, give, host_view, on_cuda, overlap, same_memory
from gpu_ops.distributed.engine import Pending, Transfer, TransferEngine
from gpu_ops.distributed.transport import DONE, CudaCopies, HostTransport, Transport, as_bytes, cupy_view
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.kernels.compiler.toolkit import install_command
from gpu_ops.kernels.recording import refuse_recording

__all__ = ["Comm", "SingleProcess"]

Array = npt.NDArray[Any]


class Comm(TransferEngine):
    """A group of ranks that exchange arrays: all of them make the same calls in the same order.

    Arrays are NumPy's, or others in host memory that support DLPack, of any dtype without objects, with any strides.
    Results are new contiguous arrays of the same library. All ranks pass equal shapes and dtypes. Sums are computed
    in rank order, in float32 for 16-bit floats and otherwise in x's dtype: every rank gets the same bits, under any
    MPI, and they equal those of one rank that adds in this order.

    ``Nccl`` and ``SingleProcess`` take CuPy arrays as well, in every operation but send and recv. These run on CuPy's
    current stream, without a wait on the host. Transfers that ``start_...`` and shift begin run on a stream of the
    group, after the work queued on the current stream; ``wait()`` makes the current stream wait for them. NCCL
    chooses its own order of additions; every rank gets the same bits.

    Attributes
    ----------
    rank, size : int
        This process, from 0 to size - 1.
    name : str
        "world", or the name that :meth:`split` and :class:`Mesh` gave.
    ranks : tuple of int
        The members' ranks in the world.
    bytes_sent : Counter
        Bytes that this rank sent, by operation. For N bytes and p ranks: 2 N (p - 1) / p for all_reduce, N (p - 1)
        for all_gather and at the root of broadcast, N (p - 1) / p for reduce_scatter and all_to_all, N for shift
        and send. The check below is not counted.
    timeout : float
        Seconds that a call waits for other ranks before it ends the job.

    Notes
    -----
    With ``GPU_OPS_COMM_CHECK=1`` ranks first compare their calls: different shapes, dtypes or options raise a
    CommError that names a rank. Without the check, such calls end in an MPI error, a wrong result or a timeout.
    A call that waits longer than ``timeout`` prints where the other ranks wait and which ranks do not answer, then
    ends the job.
    """

    # Collectives

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None) -> Any:
        """Sum or maximum of all ranks' ``x``, element by element, on every rank.

        ``out``: receives the result; may be ``x``.
        """
        view, library, by = self._reducible("all_reduce", x, op)
        result, target = self._result("all_reduce", view, view.shape, out, in_place=True)
        call = self.begin("all_reduce", view, f"op={op!r}")
        self._finish(by.all_reduce(by.contiguous(view), result, op, call), call)
        mine = view.size * (self.rank + 1) // self.size - view.size * self.rank // self.size
        self.bytes_sent["all_reduce"] += (view.size + mine * (self.size - 2)) * view.itemsize
        return _delivered(by, result, target, out, library)

    def all_gather(self, x: Any, axis: int = 0, *, out: Any = None) -> Any:
        """Concatenation of all ranks' ``x`` along ``axis``, in rank order, on every rank."""
        return self._gathering(x, axis, out, beside=False).wait()

    def start_all_gather(self, x: Any, axis: int = 0, *, out: Any = None) -> Pending:
        """Start :meth:`all_gather`; ``wait()`` returns the result. Do not read ``out`` before that."""
        return self._gathering(x, axis, out, beside=True)

    def _gathering(self, x: Any, axis: int, out: Any, *, beside: bool) -> Pending:
        view, library = self.movable("all_gather", x)
        axis, by = _axis("all_gather", "axis", axis, view), self._transport(view)
        shape = (*view.shape[:axis], self.size * view.shape[axis], *view.shape[axis + 1 :])
        result, target = self._result("all_gather", view, shape, out, direct=axis == 0)
        call = self.begin("all_gather", view, f"axis={axis}")
        # whole arrays, one after the other: this is the result itself if the axis is the first
        stacked = result if axis == 0 else by.empty((self.size, *view.shape), view.dtype)
        transfer = by.all_gather(by.contiguous(view), stacked, beside=beside)
        self.bytes_sent["all_gather"] += view.nbytes * (self.size - 1)

        def found() -> Any:
            if axis:
                by.copy(_side_by_side(result, axis, self.size), stacked)
            return _delivered(by, result, target, out, library)

        return Pending(self, call, transfer, found)

    def reduce_scatter(self, x: Any, axis: int = 0, *, op: str = "sum", out: Any = None) -> Any:
        """Sum or maximum of all ranks' ``x``; this rank gets piece number ``rank`` of it along ``axis``."""
        return self._scattering(x, axis, op, out, beside=False).wait()

    def start_reduce_scatter(self, x: Any, axis: int = 0, *, op: str = "sum", out: Any = None) -> Pending:
        """Start :meth:`reduce_scatter`; ``wait()`` adds the received pieces and returns the sum."""
        return self._scattering(x, axis, op, out, beside=True)

    def _scattering(self, x: Any, axis: int, op: str, out: Any, *, beside: bool) -> Pending:
        view, library, by = self._reducible("reduce_scatter", x, op)
        axis = _axis("reduce_scatter", "axis", axis, view)
        self._divides("reduce_scatter", "axis", axis, view)
        shape = (*view.shape[:axis], view.shape[axis] // self.size, *view.shape[axis + 1 :])
        result, target = self._result("reduce_scatter", view, shape, out)
        call = self.begin("reduce_scatter", view, f"axis={axis}, op={op!r}")
        pieces = by.contiguous(_side_by_side(view, axis, self.size))
        transfer, fill = by.reduce_scatter(pieces, result, op, beside=beside)
        self.bytes_sent["reduce_scatter"] += view.nbytes - result.nbytes

        def found() -> Any:
            fill()
            return _delivered(by, result, target, out, library)

        return Pending(self, call, transfer, found)

    def all_to_all(self, x: Any, split: int, concat: int, *, out: Any = None) -> Any:
        """Send piece r of ``x`` along ``split`` to rank r; join received pieces along ``concat``, in rank order."""
        view, library = self.movable("all_to_all", x)
        split, concat = (
            _axis("all_to_all", name, axis, view) for name, axis in (("split", split), ("concat", concat))
        )
        self._divides("all_to_all", "split", split, view)
        piece = [n // self.size if i == split else n for i, n in enumerate(view.shape)]
        shape = tuple(n * self.size if i == concat else n for i, n in enumerate(piece))
        result, target = self._result("all_to_all", view, shape, out, direct=concat == 0)
        call, by = self.begin("all_to_all", view, f"split={split}, concat={concat}"), self._transport(view)
        pieces = by.contiguous(_side_by_side(view, split, self.size))
        stacked = result if concat == 0 else by.empty((self.size, *piece), view.dtype)
        self._finish(by.all_to_all(pieces, stacked), call)
        self.bytes_sent["all_to_all"] += view.nbytes - view.nbytes // self.size
        if concat:
            by.copy(_side_by_side(result, concat, self.size), stacked)
        return _delivered(by, result, target, out, library)

    def broadcast(self, x: Any, root: int = 0, *, out: Any = None) -> Any:
        """Copy ``x`` of rank ``root`` to every rank; on the others only shape and dtype of ``x`` matter."""
        view, library = self.movable("broadcast", x)
        root = self._member("broadcast", "root", root)
        result, target = self._result("broadcast", view, view.shape, out, in_place=True)
        call, by = self.begin("broadcast", view, f"root={root}"), self._transport(view)
        if self.rank == root:
            by.copy(result, view)
        self._finish(by.broadcast(result, root), call)
        self.bytes_sent["broadcast"] += view.nbytes * (self.size - 1) if self.rank == root else 0
        return _delivered(by, result, target, out, library)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        call = self.begin("barrier")
        flags = np.empty(self.size, np.uint8)
        self._finish(self._all_gather(np.zeros(1, np.uint8), flags, [1] * self.size), call)

    def split(self, color: int, *, name: str = "split") -> Comm:
        """Make a communicator of the ranks that pass the same ``color``, in the order of their ranks."""
        color = checks.integer("split", "color", color, low=0, high=2**31 - 1)
        self.begin("split", f"name={name!r}")
        self.barrier()  # MPI makes communicators in a blocking call, which has no timeout
        return self._split(color, name)

    # From rank to rank

    def shift(self, *xs: Any, by: int = 1) -> Pending:
        """Send arrays to rank + ``by`` and receive those of rank - ``by``, in a ring.

        Returns at once; ``wait()`` on the result returns the received arrays, as a tuple.
        """
        views = [self.movable("shift", x) for x in xs]
        by = checks.integer("shift", "by", by)
        if len({isinstance(view, np.ndarray) for view, _ in views}) > 1:
            raise DeviceError(
                "shift: some arrays are in host memory and some on a CUDA device; shift them apart"
            )
        call = self.begin("shift", *(view for view, _ in views), f"by={by}")
        target, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        transport = self._transport(views[0][0]) if views else self._host
        arrays = [transport.empty(view.shape, view.dtype) for view, _ in views]
        transfer = transport.shift([transport.contiguous(view) for view, _ in views], arrays, target, source)
        if target != self.rank:
            self.bytes_sent["shift"] += sum(view.nbytes for view, _ in views)
        libraries = [library for _, library in views]
        return Pending(
            self, call, transfer, lambda: tuple(give(x, of) for x, of in zip(arrays, libraries, strict=True))
        )

    def send(self, x: Any, to: int, *, tag: int = 0) -> Pending:
        """Send an array to a rank that calls :meth:`recv`. Returns at once; ``wait()`` returns once ``x`` may be
        written.

        Arrays with the same ``tag``, 0 to 999, arrive in order. They must be in host memory: NCCL has no tags.
        """
        view, _ = self.movable("send", x)
        if not isinstance(view, np.ndarray):
            raise DeviceError("send: x is on a CUDA device; NCCL has no tags: use shift, or send x.get()")
        to, channel = self._other("send", "to", to), self._channel("send", tag)
        call = self._described("message", "send", view, f"to={to}, tag={tag}")
        transfer = self._point_to_point([(as_bytes(np.ascontiguousarray(view)), to)], [], channel)
        self.bytes_sent["send"] += view.nbytes
        return Pending(self, call, transfer, lambda: None)

    def recv(self, shape: Sequence[int], dtype: npt.DTypeLike, source: int, *, tag: int = 0) -> Pending:
        """Receive a NumPy array that ``source`` sends with this tag. Returns at once; ``wait()`` returns the array.

        A message with another number of bytes raises a CommError.
        """
        source, channel = self._other("recv", "source", source), self._channel("recv", tag)
        result = np.empty(tuple(shape), dtype)
        call = self._described("message", "recv", result, f"source={source}, tag={tag}")
        transfer = self._point_to_point([], [(as_bytes(result), source)], channel)
        return Pending(self, call, transfer, lambda: result)

    # Shared parts

    @abstractmethod
    def _split(self, color: int, name: str) -> Comm: ...

    @cached_property
    def _host(self) -> Transport:
        return HostTransport(self)

    def _transport(self, view: Array) -> Transport:
        return self._host if isinstance(view, np.ndarray) else self._cuda_transport(view.device.id)

    _takes_cuda: ClassVar[bool] = False
    """Whether this group can send CuPy arrays."""

    def _cuda_transport(self, ordinal: int) -> Transport:
        """Transport for CuPy arrays of this device; this one is for a group of one rank."""
        return CudaCopies(ordinal)

    def movable(self, op: str, x: Any, name: str = "x") -> tuple[Array, str | None]:
        """Return a NumPy or CuPy view of an argument that can be sent, and the library of the array."""
        refuse_recording(f"{op} with other ranks")
        if on_cuda(x):
            if not self._takes_cuda:
                raise DeviceError(
                    f"{op}: {name} is on a CUDA device; {type(self).__name__} sends arrays in host memory: pass "
                    f"{name}.get(), or install NCCL on every rank: {install_command('nccl12')}; for CUDA 13, nccl13"
                )
            return cupy_view(op, name, x), None
        view, library = host_view(op, name, np.asarray(x) if isinstance(x, np.generic) else x)
        if view.dtype.hasobject:
            raise DTypeError(f"{op}: {name} is {view.dtype}: Python objects cannot be sent")
        return view, library

    def _reducible(self, name: str, x: Any, op: str) -> tuple[Array, str | None, Transport]:
        checks.one_of(name, "op", op, _OPS)
        view, library = self.movable(name, x)
        checks.native(name, "x", view)
        if view.dtype.kind not in "iu" and view.dtype not in checks.FLOAT_DTYPES.values():
            raise DTypeError(
                f"{name}: x is {view.dtype}; allowed: integers, {', '.join(checks.FLOAT_DTYPES)}"
            )
        transport = self._transport(view)
        if transport.sums is not None and view.dtype.name not in transport.sums:
            known = ", ".join(sorted(transport.sums))
            raise DTypeError(f"{name}: x is {view.dtype}, which NCCL does not add up; allowed: {known}")
        return view, library, transport

    def _result(
        self,
        op: str,
        view: Array,
        shape: tuple[int, ...],
        out: Any,
        *,
        direct: bool = True,
        in_place: bool = False,
    ) -> tuple[Array, Array | None]:
        """Contiguous array to fill, and the caller's array if that is a different one.

        ``direct``: the caller's array may itself be filled; ``in_place``: even if it is x.
        """
        empty = self._transport(view).empty
        if out is None:
            return empty(shape, view.dtype), None
        target, _ = self.movable(op, out, "out")
        if isinstance(target, np.ndarray) != isinstance(view, np.ndarray):
            raise DeviceError(f"{op}: x and out are not both in host memory, nor both on a CUDA device")
        checks.exactly(op, "out", target, shape)
        check_writable(op, "out", out, target, view.dtype, "")
        shared = overlap(view, target)
        if shared and not (view.shape == target.shape and same_memory(view, target)):
            raise ShapeError(f"{op}: out shares memory with x; pass x itself or an array of its own")
        if direct and target.flags.c_contiguous and (in_place or not shared):
            return target, None
        return empty(shape, view.dtype), target

    def _divides(self, op: str, name: str, axis: int, view: Array) -> None:
        if view.shape[axis] % self.size:
            raise ShapeError(
                f"{op}: {name} {axis} of x has length {view.shape[axis]}, which {self.size} ranks do not divide "
                f"evenly; pad it to {-(-view.shape[axis] // self.size) * self.size}"
            )

    def _member(self, op: str, name: str, rank: int) -> int:
        return checks.integer(op, name, rank, low=0, high=self.size - 1)

    def _channel(self, op: str, tag: int) -> int:
        return _MESSAGES + checks.integer(op, "tag", tag, low=0, high=999)

    def _other(self, op: str, name: str, rank: int) -> int:
        if self._member(op, name, rank) == self.rank:
            raise OptionError(f"{op}: {name}={rank} is this rank itself")
        return rank


_OPS = ("sum", "max")
_MESSAGES = (
    1  # first channel of messages, one per tag; shifts use channel 0, so a recv never gets their arrays
)


def _side_by_side(x: Array, axis: int, size: int) -> Array:
    """View (size, ...) of the pieces along an axis."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    order = (axis, *(i for i in range(len(shape)) if i != axis))
    return x.reshape(shape).transpose(order)


def _axis(op: str, name: str, axis: int, view: Array) -> int:
    if not view.ndim:
        raise ShapeError(f"{op}: x has no axes; pass an array with one: x.reshape(1)")
    return checks.integer(op, name, axis, low=-view.ndim, high=view.ndim - 1) % view.ndim


def _delivered(by: Transport, result: Array, target: Array | None, out: Any, library: str | None) -> Any:
    """Result for the caller, in ``out`` if that was passed."""
    if target is not None:
        by.copy(target, result)
    return give(result, library) if out is None else out


class SingleProcess(Comm):
    """Group of one rank, which sends nothing: results are copies."""

    _takes_cuda = True

    def __init__(self, name: str = "world", timeout: float = 600.0) -> None:
        super().__init__(0, [0], name, timeout)

    def _split(self, color: int, name: str) -> SingleProcess:
        return SingleProcess(name, self.timeout)

    def abort(self, message: str, status: int = 1) -> None:
        """Print ``message`` and raise SystemExit."""
        self._say(message)
        raise SystemExit(status)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (platform.node(),)

    def _all_to_all(
        self, sent: Array, counts: Sequence[int], found: Array, found_counts: Sequence[int]
    ) -> Transfer:
        np.copyto(found, sent)
        return DONE

    def _all_gather(self, sent: Array, found: Array, counts: Sequence[int]) -> Transfer:
        np.copyto(found, sent)
        return DONE

    def _broadcast(self, data: Array, root: int) -> Transfer:
        return DONE

    def _point_to_point(
        self, sent: Sequence[tuple[Array, int]], found: Sequence[tuple[Array, int]], channel: int
    ) -> Transfer:
        for (source, _), (target, _) in zip(sent, found, strict=True):
            np.copyto(target, source)
        return DONE

    def _check_members(self, transfer: Transfer, call: str) -> None:
        """Do nothing: there are no other members."""

    def _roll_call(self, word: str) -> list[str | None]:
        return [word]
