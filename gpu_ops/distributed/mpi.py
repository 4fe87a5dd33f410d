"""Communicators over MPI, by mpi4py: arrays in host memory, on one machine or several."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from mpi4py import MPI  # starts MPI

from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.engine import Transfer
from gpu_ops.distributed.exits import Departures, Need, call_at_exit
from gpu_ops.errors import CommError

__all__ = ["Mpi", "end_job_on_errors", "leave_with_all", "wait_until_read"]

Array = npt.NDArray[Any]

_PATIENCE = 2.0  # seconds that ranks have to answer a roll call; all time out at about the same time
_NOTES = "GPU_OPS_LAUNCH_NOTES"
_WORD = 256  # bytes of an answer
_LEAVING = 2e-3  # seconds between two checks whether the other ranks have ended as well


def _explain(error: Exception) -> str:
    return f"MPI: {error}. Ranks that pass other shapes are one cause: GPU_OPS_COMM_CHECK=1 names them"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise MPI's errors as CommError."""
    try:
        yield
    except MPI.Exception as error:
        raise CommError(_explain(error)) from error


class _Requests:
    """MPI operations in progress, with the bytes that each receives; None for one that is not a receive."""

    def __init__(
        self,
        requests: Sequence[Any],
        expected: Sequence[int | None],
        *buffers: Any,
        needs: Sequence[Need],
    ) -> None:
        self._requests, self._expected, self._buffers = list(requests), expected, buffers
        self.needs = needs
        self._statuses = [MPI.Status() for _ in requests]
        self._ended, self._error = False, ""
        _in_flight.add(self)

    def done(self) -> bool:
        if not self._ended:
            try:
                self._ended = MPI.Request.Testall(self._requests, self._statuses)
            except MPI.Exception as error:
                self._ended, self._error = True, _explain(error)
            if self._ended:
                _in_flight.discard(self)
                self._error = self._error or self._wrong_size()
        if self._error:
            raise CommError(self._error)
        return self._ended

    def _wrong_size(self) -> str:
        for status, expected in zip(self._statuses, self._expected, strict=True):
            actual = expected if expected is None else status.Get_count(MPI.BYTE)
            if actual != expected:
                return (
                    f"rank {status.Get_source()} sent {actual} bytes where {expected} were to come: shape and dtype "
                    "must be equal on both sides"
                )
        return ""


_in_flight: set[_Requests] = set()  # MPI uses their buffers even if nobody waits for them any more


@dataclass
class _World:
    """State shared by all communicators: the roll call, each rank's machine, and the ranks that have left each."""

    mpi: Any
    hosts: Sequence[str]
    departures: list[Departures] = field(default_factory=list)
    left: bool = False  # this rank's program has ended
    ended: bool = False  # all ranks' programs have ended; handlers at exit may still make calls


class Mpi(Comm):
    """Ranks of an MPI communicator, made by :func:`world` and :meth:`split`."""

    def __init__(self, mpi: Any, name: str, timeout: float, world: _World) -> None:
        ranks = mpi.group.Translate_ranks(list(range(mpi.size)), world.mpi.group)
        super().__init__(mpi.rank, ranks, name, timeout)
        self._mpi, self._world = mpi, world
        mpi.Set_errhandler(MPI.ERRORS_RETURN)
        self._departures = Departures(mpi)
        world.departures.append(self._departures)

    @classmethod
    def world(cls, timeout: float) -> Self:
        """Wait for all ranks and return their group. Its messages are separate from those of other users of MPI."""
        all_ranks, here = MPI.COMM_WORLD, MPI.Get_processor_name()
        hosts = [here if rank == all_ranks.rank else "an unknown host" for rank in range(all_ranks.size)]
        first = cls(all_ranks, "world", timeout, _World(all_ranks, hosts))
        first._finish(_Requests([all_ranks.Ibarrier()], [None], needs=()), "world()")
        roll = all_ranks.Dup()
        return cls(all_ranks.Dup(), "world", timeout, _World(roll, roll.allgather(here)))

    @_errors()
    def _split(self, color: int, name: str) -> Self:
        return type(self)(self._mpi.Split(color, self.rank), name, self.timeout, self._world)

    def abort(self, message: str, status: int = 1) -> None:
        self._say(message)
        wait_until_read(1, 2)
        _note("aborted")
        MPI.COMM_WORLD.Abort(status)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._world.hosts[rank] for rank in self.ranks)

    @_errors()
    def _all_to_all(
        self, sent: Array, counts: Sequence[int], found: Array, found_counts: Sequence[int]
    ) -> _Requests:
        gives = [sent, counts, _starts(counts), MPI.BYTE]
        takes = [found, found_counts, _starts(found_counts), MPI.BYTE]
        requests = [self._mpi.Ialltoallv(gives, takes)]
        return _Requests(requests, [None], gives, takes, needs=self._departures.collective())

    @_errors()
    def _all_gather(self, sent: Array, found: Array, counts: Sequence[int]) -> _Requests:
        takes = [found, counts, _starts(counts), MPI.BYTE]
        requests = [self._mpi.Iallgatherv([sent, MPI.BYTE], takes)]
        return _Requests(requests, [None], sent, takes, needs=self._departures.collective())

    @_errors()
    def _broadcast(self, data: Array, root: int) -> _Requests:
        requests = [self._mpi.Ibcast([data, MPI.BYTE], root)]
        return _Requests(requests, [None], data, needs=self._departures.collective())

    @_errors()
    def _point_to_point(
        self, sent: Sequence[tuple[Array, int]], found: Sequence[tuple[Array, int]], channel: int
    ) -> _Requests:
        for earlier in list(_in_flight):  # complete sends whose handles were dropped
            with contextlib.suppress(CommError):  # its own wait() raises it
                earlier.done()
        receives = [self._mpi.Irecv([x, MPI.BYTE], source, channel) for x, source in found]
        sends = [self._mpi.Isend([x, MPI.BYTE], target, channel) for x, target in sent]
        expected = [*(x.nbytes for x, _ in found), *[None] * len(sends)]
        receivers, senders = ([rank for _, rank in pairs] for pairs in (sent, found))
        needs = self._departures.messages(receivers, senders, channel)
        return _Requests([*receives, *sends], expected, sent, found, needs=needs)

    @_errors()
    def _check_members(self, transfer: Transfer, call: str) -> None:
        departed = self._departures.never_begun(transfer.needs) if isinstance(transfer, _Requests) else None
        if departed is not None and not self._world.ended:
            how = "" if departed.status is None else f" by sys.exit, with status {departed.status}"
            self.abort(
                f"waits in {call} for rank {departed.rank} ({self._place(departed.rank)}), whose program has "
                f"ended{how}. That ends the job: a rank ends once all of its calls have been made",
                1 if departed.status is None else departed.status,
            )

    def leave(self, status: int | None) -> None:
        """Tell all ranks that this rank's program ends, and wait until theirs end.

        ``status``: the status passed to sys.exit, exit or quit; None if the program ended in another way. A
        second call does nothing.
        """
        if self._world.left:
            return
        self._world.left = True
        everywhere = self._world.departures
        requests = [request for departures in everywhere for request in departures.leave(status)]
        while not all(departures.all_left() for departures in everywhere):
            time.sleep(_LEAVING)
        MPI.Request.Waitall(requests)
        self._world.ended = True
        _note("left")

    def _roll_call(self, word: str) -> list[str | None]:
        mpi, mine = self._world.mpi, np.zeros(_WORD, np.uint8)
        text = word.encode()[:_WORD]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        answers = np.zeros((mpi.size, _WORD), np.uint8)
        sends = [mpi.Isend([mine, MPI.BYTE], rank) for rank in range(mpi.size)]
        receives = [mpi.Irecv([answers[rank], MPI.BYTE], rank) for rank in range(mpi.size)]
        end = time.monotonic() + min(self.timeout, _PATIENCE)
        while time.monotonic() < end and not MPI.Request.Testall([*sends, *receives]):
            time.sleep(0.01)
        words = [bytes(x).rstrip(b"\0").decode(errors="replace") or None for x in answers]
        return [words[rank] for rank in self.ranks]


def _note(word: str) -> None:
    """Append a word to the file of scripts/launch.sh: mpiexec's status does not say whether all ranks left."""
    with contextlib.suppress(OSError, KeyError):
        file = os.open(os.environ[_NOTES], os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{word}\n".encode())
        os.close(file)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def wait_until_read(*descriptors: int, seconds: float = 1.0) -> None:
    """Wait until all output in these pipes has been read. A launcher stops reading once it knows of an abort; the
    message with the reason would be lost. Descriptors that are no pipes are ignored."""
    end = time.monotonic() + seconds
    for descriptor in descriptors:
        while _unread(descriptor) and time.monotonic() < end:
            time.sleep(0.001)


def _unread(descriptor: int) -> int:
    """Number of unread bytes in a pipe; 0 if it is no pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def end_job_on_errors(comm: Mpi) -> None:
    """End all ranks on an uncaught exception in any thread; they would otherwise wait for this one."""
    before, before_in_threads = sys.excepthook, threading.excepthook

    def in_one_write(show: Callable[[], object]) -> None:
        """Print with one write, so that lines of several ranks do not mix."""
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            show()
        sys.stderr.write(shown.getvalue())
        sys.stderr.flush()

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        in_one_write(lambda: before(kind, error, trace))
        comm.abort(f"{kind.__name__} ends the job")

    def hook_in_threads(arguments: threading.ExceptHookArgs) -> None:
        in_one_write(lambda: before_in_threads(arguments))
        if arguments.exc_type is not SystemExit:
            comm.abort(f"{arguments.exc_type.__name__} in a thread ends the job")

    sys.excepthook, threading.excepthook = hook, hook_in_threads


def leave_with_all(comm: Mpi) -> None:
    """Tell the other ranks when this rank's program ends: a rank that waits for it ends the job.

    The job's status is the one passed to sys.exit, exit or quit, or 1 if the program ended in another way.
    """
    process = os.getpid()

    def leave(status: int | None) -> None:
        if os.getpid() != process:  # in a forked child
            return
        if MPI.Is_finalized():  # by the program, which has waited for all ranks
            _note("left")
        else:
            comm.leave(status)

    call_at_exit(leave)
    _note("here")
