"""Base class of engines: members of a group, the check that all ranks make the same call, waiting and timeouts."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import CommError

__all__ = ["Pending", "StreamTransfer", "Transfer", "TransferEngine"]

Array = npt.NDArray[Any]

_CHECK = "GPU_OPS_COMM_CHECK"
_DIGEST, _RECORD = 16, 256  # bytes of a call's description: its hash, then its words

# MPI moves a large message only within its calls. 256 calls between two sleeps reach 0.8 of a blocking call's speed,
# 16 reach an eighth, and 1 a hundredth (16 MiB, MPICH). The sleeps leave the core to others while a rank is late.
_BURST, _LONGEST_SLEEP = 256, 2e-3


class Transfer(Protocol):
    """Operation of an engine in progress."""

    def done(self) -> bool:
        """Whether the transfer has ended; an engine moves data within this call. CommError if it failed."""
        ...


class StreamTransfer(ABC):
    """Transfer on a CUDA stream, for which no host waits."""

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def join(self) -> None:
        """Make the current stream wait for the transfer."""


class Pending:
    """Transfer in progress. Do not write to the sent arrays until :meth:`wait` has returned."""

    def __init__(
        self, engine: TransferEngine, call: str, transfer: Transfer, results: Callable[[], Any]
    ) -> None:
        self._engine, self._call, self._transfer = engine, call, transfer
        self._results: Callable[[], Any] | None = results
        self._found: Any = None

    def wait(self) -> Any:
        """Wait for the received arrays and return them; every call returns the same ones."""
        if self._results is not None:
            self._engine._finish(self._transfer, self._call)
            self._found, self._results = self._results(), None
        return self._found

    def poll(self) -> bool:
        """Whether the transfer has ended. A call between two computations lets MPI move data."""
        return self._results is None or self._engine._moves(self._transfer, self._call)


class TransferEngine(ABC):
    """Group of ranks that exchange bytes; :class:`Comm` has the operations on arrays."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str, timeout: float) -> None:
        self.rank, self.size, self.name, self.timeout = rank, len(ranks), name, timeout
        self.ranks = tuple(ranks)
        self.bytes_sent: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._checks = os.environ.get(_CHECK) == "1"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}>"

    # Each engine implements these: send and receive bytes, in one-dimensional contiguous arrays; counts by rank.

    @abstractmethod
    def _all_to_all(
        self, sent: Array, counts: Sequence[int], found: Array, found_counts: Sequence[int]
    ) -> Transfer: ...

    @abstractmethod
    def _all_gather(self, sent: Array, found: Array, counts: Sequence[int]) -> Transfer: ...

    @abstractmethod
    def _broadcast(self, data: Array, root: int) -> Transfer: ...

    @abstractmethod
    def _point_to_point(
        self, sent: Sequence[tuple[Array, int]], found: Sequence[tuple[Array, int]], channel: int
    ) -> Transfer:
        """Exchange arrays with the ranks in the pairs; those of one channel and rank arrive in order."""

    @abstractmethod
    def _roll_call(self, word: str) -> list[str | None]:
        """Words of the other ranks that wait after a timeout; None for those that do not answer."""

    @abstractmethod
    def abort(self, message: str, status: int = 1) -> None:
        """Print ``message`` with this rank, and end the processes of all ranks with ``status``."""

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """Machine of each rank."""

    # Common to all engines

    def begin(self, op: str, *facts: Any) -> str:
        """Begin a call that all ranks make; return its name for messages. With the check, ranks compare it first.

        ``facts``: arrays, compared by shape and dtype, and words. A computation that divides its work among ranks
        calls this before it sends anything.
        """
        call = self._described("call", op, *facts)
        if self._checks:
            self._agree(call)
        return call

    def agree(self, op: str, *facts: Any) -> None:
        """Begin a call as :meth:`begin` does, but always compare it: for calls made only once."""
        self._agree(self._described("call", op, *facts))

    def _described(self, kind: str, op: str, *facts: Any) -> str:
        self._calls[kind] += 1
        words = (fact if isinstance(fact, str) else _described_array(fact) for fact in facts)
        return f"{op}({', '.join(words)}), {kind} {self._calls[kind]} of {self.name!r}"

    def _agree(self, call: str) -> None:
        text = call.encode()
        record = np.zeros(_RECORD, np.uint8)
        head = hashlib.sha256(text).digest()[:_DIGEST] + text[: _RECORD - _DIGEST]
        record[: len(head)] = np.frombuffer(head, np.uint8)
        records = np.empty((self.size, _RECORD), np.uint8)
        self._finish(self._all_gather(record, records.reshape(-1), [_RECORD] * self.size), call)
        differs = (records[:, :_DIGEST] != records[0, :_DIGEST]).any(axis=1)
        if differs.any():
            other = int(differs.argmax())
            said = [bytes(records[r, _DIGEST:]).rstrip(b"\0").decode(errors="replace") for r in (0, other)]
            raise CommError(
                f"ranks of {self.name!r} make different calls: rank 0 {said[0]}; rank {other} {said[1]}. All ranks "
                "make the same calls in the same order, with equal shapes, dtypes and options"
            )

    def _finish(self, transfer: Transfer, call: str) -> None:
        """Wait without occupying a core; for a stream's transfer the current stream waits instead."""
        if isinstance(transfer, StreamTransfer):
            transfer.join()
            return
        start = time.monotonic()
        while not self._moves(transfer, call):
            waited = time.monotonic() - start
            if waited > self.timeout:
                self._time_out(call)
            time.sleep(min(_LONGEST_SLEEP, waited / 20))

    def _moves(self, transfer: Transfer, call: str) -> bool:
        """Let the engine move data; return whether the transfer has ended. End the job if it never can."""
        for _ in range(_BURST):
            if transfer.done():
                return True
            os.sched_yield()
        self._check_members(transfer, call)
        return False

    @abstractmethod
    def _check_members(self, transfer: Transfer, call: str) -> None:
        """End the job if this transfer needs an operation of a rank whose program has ended without it."""

    def _time_out(self, call: str) -> None:
        words = self._roll_call(call)
        lines = [f"waited {self.timeout:g} s in {call}"]
        for rank, word in enumerate(words):
            if rank != self.rank:
                who = f"rank {rank} ({self._place(rank)})"
                lines.append(
                    f"  {who} waits in {word}" if word else f"  {who} does not answer: in no call, or ended"
                )
        self.abort("\n".join(lines))

    def _place(self, rank: int) -> str:
        return f"{self.ranks[rank]} of the world, on {self.hosts[rank]}"

    def _say(self, message: str) -> None:
        head = f"gpu_ops.distributed: rank {self.rank} of {self.name!r} ({self._place(self.rank)}): "
        sys.stdout.flush()
        sys.stderr.write(f"{head}{message}\n")
        sys.stderr.flush()


def _described_array(x: Any) -> str:
    where = "" if isinstance(x, np.ndarray) else " on CUDA"
    return f"{x.dtype} {tuple(x.shape)}{where}"
