"""Detection of endless loops: a limit for a batch of blocks, and the loop that it is in at the limit."""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time

import numpy as np

from gpu_ops.emulator.state import Group, State
from gpu_ops.emulator.syntax import Array

_EVERY = 1000  # instructions between two checks of the clock
_LAPS = 2000  # instructions after the limit, to see which loops the batch is in


@dataclass(frozen=True)
class Limit:
    """Limits of a batch: instructions, and seconds of this thread's CPU time."""

    instructions: int
    seconds: float


class Watch:
    """Watch of backward branches, once the clock of the machine has reached ``look_at``."""

    def __init__(self, limit: Limit, clock: int) -> None:
        self.limit = limit
        self.last = clock + limit.instructions
        self.until = thread_time() + limit.seconds
        self.look_at = min(clock + _EVERY, self.last)
        self.exceeded = ""
        self.loops: set[tuple[int, int]] = set()  # the first and last pc

    def backward(self, m: State, group: Group, first: int) -> None:
        """Record that a group branches back to ``first``."""
        if not self.exceeded:
            if m.clock > self.last:
                self.exceeded = f"{self.limit.instructions} instructions (max_instructions)"
            elif thread_time() > self.until:
                self.exceeded = f"{self.limit.seconds:g} seconds of CPU time (max_seconds)"
            else:
                self.look_at = min(m.clock + _EVERY, self.last + 1)
                return
            self.look_at, self.last = m.clock, m.clock + _LAPS
        self.loops.add((first, group.pc))
        if m.clock > self.last:
            lane = int(np.flatnonzero(m.full(group.mask))[0])
            raise m.fault("endless loop", group.pc, lane, self._text(m, group))

    def _text(self, m: State, group: Group) -> str:
        first, last = max(
            (loop for loop in self.loops if loop[0] <= group.pc <= loop[1]),
            key=lambda loop: loop[1] - loop[0],
        )
        code, program = m.program.code, m.program
        lanes = m.full(group.mask).copy()
        for other in (*m.groups, *m.parked):
            if first <= other.pc <= last:
                lanes |= m.full(other.mask)
        lanes |= m.barriers.waiting & (m.barriers.pc >= first) & (m.barriers.pc <= last)
        labels = [name for name, pc in program.labels.items() if pc == first and ":" not in name]
        label = f" from label {labels[0]}" if labels else ""
        where = f"PTX lines {code[first].line} to {code[last].line}{label}"
        return (
            f"stopped after {self.exceeded}, in the loop of {last - first + 1} instructions at {where}, "
            f"with {_threads(m, lanes)}; it begins at {program.where(first)}"
        )


def _threads(m: State, lanes: Array) -> str:
    at = np.flatnonzero(lanes & m.alive)
    return f"{len(at)} thread{'s' * (len(at) > 1)}, first {m.thread(int(at[0]))}"
