"""End of this process's program: its status, and departure messages that tell the other ranks of it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mpi4py import MPI

__all__ = ["Departed", "Departures", "Need", "call_at_exit"]


def call_at_exit(leave: Callable[[int | None], object]) -> None:
    """Call ``leave`` when the program ends, once or twice, with the status passed to sys.exit, exit or quit.

    The status is None if the program ends in another way, including by another SystemExit. After a failure (a
    non-zero status) the call comes before Python joins threads, which may never end. Otherwise it comes after that,
    as threads may still make calls.
    """
    status: int | None = None

    def end(code: object) -> None:
        nonlocal status
        status = code & 0xFF if isinstance(code, int) else int(code is not None)
        if status:
            with contextlib.suppress(AttributeError):  # private, but present since Python 3.9
                threading._register_atexit(leave, status)  # type: ignore[attr-defined]

    class ProgramExit(SystemExit):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            # a handler in the program has a frame; the interpreter, which reads the status to end with, has none
            if name == "code" and sys._getframe().f_back is None:
                end(value)
            return value

    def watched(stop: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(stop)
        def call(*arguments: Any, **options: Any) -> NoReturn:
            try:
                stop(*arguments, **options)
            except SystemExit as error:
                if type(error) is SystemExit:
                    raise ProgramExit(*error.args) from None
                raise

        return call

    # python -S has no exit and quit; the program itself may have imported sys.exit by name
    names = [(sys, "exit"), (builtins, "exit"), (builtins, "quit")]
    calls = [getattr(module, name) for module, name in names if hasattr(module, name)]
    for stop in calls:
        replacement = watched(stop)
        for module in (sys, builtins, sys.modules["__main__"]):
            for name in [name for name, value in vars(module).items() if value is stop]:
                setattr(module, name, replacement)
    atexit.register(lambda: leave(status))


# Departure messages: a rank whose program ends tells the others, so that none waits for it.
#
# MPI_Finalize waits for all ranks, even for ranks that wait for the caller. So a rank first sends each member
# of each communicator the number of operations that it has begun there. A rank that waits for an operation with
# a higher number knows that it will never come.

_TAG = 2000  # above the channels of messages
_COLLECTIVE = "collective"


@dataclass(frozen=True)
class Need:
    """Operation ``number`` of a kind, which ``rank`` must begin; None: every member must."""

    rank: int | None
    kind: str
    number: int


@dataclass(frozen=True)
class Departed:
    """A rank whose program has ended, and the operations of each kind that it had begun.

    ``status``: the status passed to sys.exit, exit or quit; None if its program ended in another way.
    """

    rank: int
    status: int | None
    begun: dict[str, int]


class Departures:
    """Operations that this rank has begun on a communicator, and the members that have left."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._collectives = 0
        self._messages: Counter[tuple[int, str]] = Counter()
        self._departed: dict[int, Departed] = {}

    def collective(self) -> list[Need]:
        """Count a collective that begins; return the collectives that it needs from the others."""
        self._collectives += 1
        return [Need(None, _COLLECTIVE, self._collectives)]

    def messages(self, receivers: Sequence[int], senders: Sequence[int], channel: int) -> list[Need]:
        """Count messages to and from other ranks; return the messages that are needed from them."""
        needs = []
        for ranks, direction, other in (
            (receivers, f"sent {channel}", f"received {channel}"),
            (senders, f"received {channel}", f"sent {channel}"),
        ):
            for rank in ranks:
                self._messages[rank, direction] += 1
                needs.append(Need(rank, other, self._messages[rank, direction]))
        return needs

    def leave(self, status: int | None) -> list[Any]:
        """Tell every other member that this rank's program ends; return MPI's requests."""
        requests, messages = [], list(self._messages.items())  # other threads may still count
        for member in range(self._mpi.size):
            if member != self._mpi.rank:
                begun = {direction: count for (rank, direction), count in messages if rank == member}
                words = json.dumps([status, {**begun, _COLLECTIVE: self._collectives}]).encode()
                requests.append(self._mpi.Isend([words, MPI.BYTE], member, _TAG))
        return requests

    def all_left(self) -> bool:
        """Whether all other members have left."""
        self._listen()
        return len(self._departed) == int(self._mpi.size) - 1

    def never_begun(self, needs: Sequence[Need]) -> Departed | None:
        """Member that has left without beginning a needed operation."""
        self._listen()
        for departed in list(self._departed.values()):
            for need in needs:
                if need.rank in (None, departed.rank) and departed.begun.get(need.kind, 0) < need.number:
                    return departed
        return None

    def _listen(self) -> None:
        about = MPI.Status()
        while (message := self._mpi.Improbe(MPI.ANY_SOURCE, _TAG, about)) is not None:
            words = bytearray(about.Get_count(MPI.BYTE))
            message.Recv([words, MPI.BYTE])
            status, begun = json.loads(words)
            self._departed[about.Get_source()] = Departed(about.Get_source(), status, begun)
