"""Barriers of thread blocks: ``bar.sync``, ``bar.arrive`` and ``bar.red`` on ids 0 to 15."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator.types import Array

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine

__all__ = ["Barriers"]

IDS = 16


class Barriers:
    """Who waits where. A barrier without a count is for all threads of the block that have not ended."""

    def __init__(self, blocks: int, padded: int) -> None:
        self.shape = (blocks, padded)
        self.waiting = np.zeros(blocks * padded, np.bool_)
        self.any = False  # whether anybody waits
        self.id = np.zeros(blocks * padded, np.int8)
        self.pc = np.zeros(blocks * padded, np.int32)
        self.arrived = np.zeros((blocks, IDS), np.int32)  # threads, in whole warps
        self.wanted = np.zeros((blocks, IDS), np.int32)  # 0: all
        self.predicate = np.zeros(blocks * padded, np.bool_)  # of bar.red

    def arrive(
        self, m: Machine, pc: int, lanes: Array, barrier: int, count: int, *, wait: bool
    ) -> Iterator[tuple[int, Array]]:
        """Threads come to a barrier; yields (pc, mask) of the threads it lets go on."""
        here = lanes.reshape(self.shape)
        warps = here.reshape(self.shape[0], -1, 32).any(axis=2).sum(axis=1)
        self.arrived[:, barrier] += 32 * warps
        if count:
            self.wanted[warps > 0, barrier] = count
        if wait:
            self.waiting |= lanes
            self.any = True
            self.id[lanes] = barrier
            self.pc[lanes] = pc
        yield from self._release(m, barrier)

    def recheck(self, m: Machine) -> Iterator[tuple[int, Array]]:
        """After threads ended: barriers that waited for them only."""
        if self.any:
            for barrier in np.unique(self.id[self.waiting]):
                yield from self._release(m, int(barrier))

    def _release(self, m: Machine, barrier: int) -> Iterator[tuple[int, Array]]:
        at = (self.waiting & (self.id == barrier)).reshape(self.shape)
        wanted = self.wanted[:, barrier]
        everyone = (at == m.alive.reshape(self.shape)).all(axis=1) & at.any(axis=1)
        counted = (wanted > 0) & (self.arrived[:, barrier] >= wanted)
        done = np.where(wanted > 0, counted, everyone)
        if not done.any():
            return
        free = (at & done[:, None]).ravel()
        self.waiting &= ~free
        self.any = bool(self.waiting.any())
        self.arrived[done, barrier] = 0
        self.wanted[done, barrier] = 0
        places = np.unique(self.pc[free])
        if m.sanitizer is not None:
            if len(places) > 1 and not wanted[done].any():
                self._diverged(m, free, places)
            m.sanitizer.barrier(done)
        for pc in places:
            mask = free & (self.pc == pc)
            m.steps[pc].run.finish(m, free, mask)
            yield int(pc) + 1, mask

    def _diverged(self, m: Machine, free: Array, places: Array) -> None:
        """Threads of one block met at different instructions: in CUDA C++ that is undefined."""
        for block in range(self.shape[0]):
            mine = np.zeros(self.shape, np.bool_)
            mine[block] = free.reshape(self.shape)[block]
            pcs = np.unique(self.pc[mine.ravel()])
            if len(pcs) > 1:
                first = [int(np.flatnonzero(mine.ravel() & (self.pc == pc))[0]) for pc in pcs[:2]]
                other = f"{m.thread(first[0])} waits at {m.program.where(int(pcs[0]))}"
                raise m.fault(
                    "barrier divergence",
                    int(pcs[1]),
                    first[1],
                    f"threads of one block meet at two barriers; {other}",
                )

    def standing(self) -> Iterator[tuple[int, Array, str]]:
        """(pc, mask, what for) of the threads that wait, for messages."""
        for pc in np.unique(self.pc[self.waiting]):
            mask = self.waiting & (self.pc == pc)
            yield int(pc), mask, f"waiting at barrier {int(self.id[mask][0])}"
