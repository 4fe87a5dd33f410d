"""State of a running batch: registers, groups of threads, barriers. Steps change it; the machine schedules them.

A *group* is the set of threads at one pc. Threads leave their group to wait

- at a barrier, until the threads it is for have arrived;
- at a warp instruction (``shfl.sync``, ``mma.sync``), until the lanes it names arrive: they are *parked*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.emulator.batch import NONE, SPECIAL_REGISTERS, Batch, Mask
from gpu_ops.emulator.errors import Faults
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.profiler import Profiler
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.sanitizer import Sanitizer
from gpu_ops.emulator.syntax import Array, register_dtype

BARRIERS = 16  # ids of a block


@dataclass(slots=True)
class ReadyStep:
    """Instruction that is ready to run.

    A ``plain`` step is ``run(active)``, and the next instruction follows. Any other is ``run(group, active)``,
    which returns the pc at which the group continues, or None if no threads are left in it. A step for
    ``everyone`` only computes, so it may also run for threads that have ended. A step runs only if its guard leaves
    a thread active.
    """

    run: Callable[..., Any]
    plain: bool = True
    everyone: bool = False
    guard: int = -1
    negated: bool = False


@dataclass(slots=True, eq=False)
class Group:
    """Threads at one pc."""

    pc: int
    mask: Mask
    yielded: bool = False
    polled: bool = False  # has read memory that others may change since the last backward branch
    retried: bool = False  # was parked, and has not passed that instruction yet


class State(Batch):
    """State that steps read and change."""

    steps: list[ReadyStep]

    def __init__(self, program: PtxProgram) -> None:
        super().__init__(program)
        self.registers: list[Array] = []
        self.index: dict[str, int] = {}
        self.dtypes: list[np.dtype[Any]] = []
        for name, ptx_type in program.registers.items():
            self._add(name, register_dtype(ptx_type))
        self.specials: dict[str, int] = {}
        self.collectives: dict[
            int, Callable[[], Array]
        ] = {}  # masks that lanes name, by pc of a warp instruction
        self.carry = self._add("carry flag", np.dtype(np.bool_))
        self.undefined: dict[int, Array] = {}  # registers with uninitialised values: see undefined.py
        self.flows: dict[int, Any] = {}
        self.clock = 0
        self.truncating = False  # tensor cores: see instructions/matrix.py
        self._mask_of_lanes: Mask = None
        self._lanes_of_mask = np.zeros(0, np.int32)

    def configure(
        self,
        memory: Memory,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        dynamic_shared: int,
        parameters: tuple[Array, dict[str, int]],
        sanitizer: Sanitizer | None,
        profiler: Profiler | None,
        faults: Faults | None = None,
    ) -> None:
        """Set up a launch. ``parameters``: the bytes of the parameter space, and the offset of each parameter."""
        self.memory = memory
        self.grid, self.block = grid, block
        self.dynamic_shared = dynamic_shared
        self._parameters, self._offsets = parameters
        self.sanitizer, self.profiler, self.faults = sanitizer, profiler, faults

    def release(self) -> None:
        """Drop everything that belongs to the launch."""
        for name in ("memory", "barriers", "alive", "lanes", "groups", "parked"):
            self.__dict__.pop(name, None)
        self.registers.clear()
        self.undefined.clear()
        self._mask_of_lanes, self._lanes_of_mask = None, np.zeros(0, np.int32)
        self.sanitizer = self.profiler = self.faults = None

    def begin(self, blocks: Array) -> None:
        super().begin(blocks)
        self.undefined.clear()
        self.registers[:] = [np.zeros(1, dtype) for dtype in self.dtypes]
        for name, i in self.specials.items():
            self.registers[i] = SPECIAL_REGISTERS[name].value(self).view(self.dtypes[i])
        self.barriers = Barriers(len(blocks), self.padded)
        self.groups = [Group(0, None if self.all_alive else self.alive.copy())]
        self.parked: list[Group] = []
        self.failed = 0  # parked groups that ran again without progress
        self._mask_of_lanes, self._lanes_of_mask = None, self.lanes
        if self.sanitizer is not None:
            self.sanitizer.begin(self)

    # ---- registers and parameters --------------------------------------------------------------------------

    def _add(self, name: str, dtype: np.dtype[Any]) -> int:
        self.index[name] = len(self.dtypes)
        self.dtypes.append(dtype)
        return self.index[name]

    def register(self, name: str) -> int | None:
        """Index of a declared or special register, or None."""
        if name not in self.index and name in SPECIAL_REGISTERS:
            self.specials[name] = self._add(name, SPECIAL_REGISTERS[name].dtype)
        return self.index.get(name)

    def parameter(self, name: str, offset: int, size: int) -> Array:
        """Bytes of the kernel's parameters."""
        at = self._offsets[name] + offset
        return self._parameters[at : at + size]

    # ---- masks ---------------------------------------------------------------------------------------------

    def active_lanes(self, mask: Mask) -> Array:
        """Indices of the threads of a mask."""
        if mask is None:
            return self.lanes
        if mask is not self._mask_of_lanes:
            self._mask_of_lanes = mask
            self._lanes_of_mask = np.flatnonzero(mask).astype(np.int32)
        return self._lanes_of_mask

    def full(self, mask: Mask) -> Array:
        return np.ones(self.threads, np.bool_) if mask is None else mask

    def simplify(self, mask: Array) -> Mask:
        return None if self.all_alive and mask.all() else mask

    # ---- control -------------------------------------------------------------------------------------------

    def leave(self, group: Group, active: Mask) -> Mask:
        """Take the active threads out of the group; return the mask of the rest, or ``NONE``."""
        if active is None:
            return NONE
        rest = ~active if group.mask is None else group.mask & ~active
        return rest if rest.any() else NONE

    def go_on(self, group: Group, rest: Mask) -> int | None:
        """Continue with the rest of a group at the next instruction."""
        if rest is NONE:
            return None
        group.mask = rest
        return group.pc + 1

    def exit(self, group: Group, active: Mask) -> int | None:
        """Run ``exit``, or ``ret`` of the entry."""
        rest = self.leave(group, active)
        self.alive = self.alive & ~self.full(active)
        self.all_alive = False
        self.failed = 0
        for pc, mask in self.barriers.recheck(self):
            self.groups.append(Group(pc, mask))
        return self.go_on(group, rest)

    def split(self, group: Group, active: Mask, target: int) -> int | None:
        """Branch: the active threads go to ``target``, the rest continue."""
        rest = self.leave(group, active)
        if rest is NONE:
            return target
        assert active is not None
        assert rest is not None
        if self.profiler is not None:
            self.profiler.diverged(group.pc, active, rest)
        self.groups.append(Group(target, active, yielded=group.polled and target <= group.pc))
        return self.go_on(group, rest)

    def park(self, group: Group, lanes: Array) -> int | None:
        """Leave these threads at the group's instruction, and continue with the rest."""
        if self.profiler is not None:
            self.profiler.parked(group.pc, group.mask, lanes)
        self.parked.append(Group(group.pc, lanes))
        rest = self.leave(group, lanes)
        if not group.retried or rest is not NONE:
            self.failed = 0
        return self.go_on(group, rest)


class Barriers:
    """Threads that wait at barriers: ``bar.sync``, ``bar.arrive`` and ``bar.red`` on ids 0 to 15.

    A barrier without a count is for all threads of the block that have not ended.
    """

    def __init__(self, blocks: int, padded: int) -> None:
        self.shape = (blocks, padded)
        self.waiting = np.zeros(blocks * padded, np.bool_)
        self.any = False  # whether any thread waits
        self.id = np.zeros(blocks * padded, np.int8)
        self.pc = np.zeros(blocks * padded, np.int32)
        self.arrived = np.zeros((blocks, BARRIERS), np.int32)  # threads, in whole warps
        self.wanted = np.zeros((blocks, BARRIERS), np.int32)  # 0: all
        self.predicate = np.zeros(blocks * padded, np.bool_)  # operand of bar.red

    def arrive(
        self, m: State, pc: int, lanes: Array, barrier: int, count: int, *, wait: bool
    ) -> Iterator[tuple[int, Array]]:
        """Let threads arrive at a barrier; yield (pc, mask) of the threads it releases."""
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

    def recheck(self, m: State) -> Iterator[tuple[int, Array]]:
        """Release the barriers that waited only for threads that have ended."""
        if self.any:
            for barrier in np.unique(self.id[self.waiting]):
                yield from self._release(m, int(barrier))

    def _release(self, m: State, barrier: int) -> Iterator[tuple[int, Array]]:
        at = (self.waiting & (self.id == barrier)).reshape(self.shape)
        wanted = self.wanted[:, barrier]
        everyone = (at == m.alive.reshape(self.shape)).all(axis=1) & at.any(axis=1)
        counted = (wanted > 0) & (self.arrived[:, barrier] >= wanted)
        done = np.where(wanted > 0, counted, everyone)
        if not done.any():
            return
        free = (at & done[:, None]).ravel()
        if m.faults is not None:
            self._note_absent(m, at, done & (wanted == 0))
        self.waiting &= ~free
        self.any = bool(self.waiting.any())
        self.arrived[done, barrier] = 0
        self.wanted[done, barrier] = 0
        places = np.unique(self.pc[free])
        if m.sanitizer is not None:
            if len(places) > 1 and not wanted[done].any():
                self._check_divergence(m, free)
            m.sanitizer.barrier(done)
        for pc in places:
            mask = free & (self.pc == pc)
            m.steps[pc].run.finish(free, mask)
            yield int(pc) + 1, mask

    def _note_absent(self, m: State, at: Array, opens: Array) -> None:
        """Note a barrier that opens without ended threads: so on Volta and later; CUDA C++ does not define it."""
        size = m.block[0] * m.block[1] * m.block[2]
        for block in np.flatnonzero(opens & (at.sum(axis=1) < size)):
            lane = int(block) * self.shape[1] + int(np.flatnonzero(at[block])[0])
            here = int(at[block].sum())
            what = f"a barrier of the block opens for {here} of {size} threads, because the others have ended"
            m.note(int(self.pc[lane]), lane, what)

    def _check_divergence(self, m: State, free: Array) -> None:
        """Raise if threads of one block met at different instructions, which is undefined in CUDA C++."""
        for block, mine in enumerate(free.reshape(self.shape)):
            pc = self.pc.reshape(self.shape)[block]
            pcs = np.unique(pc[mine])
            if len(pcs) > 1:
                first = [block * self.shape[1] + int(np.flatnonzero(mine & (pc == p))[0]) for p in pcs[:2]]
                other = f"{m.thread(first[0])} waits at {m.program.where(int(pcs[0]))}"
                what = f"threads of one block meet at two barriers; {other}"
                m.report("barrier divergence", int(pcs[1]), first[1], what, int(pcs[0]))

    def standing(self) -> Iterator[tuple[int, Array, str]]:
        """Waiting threads as (pc, mask, reason), for messages."""
        for pc in np.unique(self.pc[self.waiting]):
            mask = self.waiting & (self.pc == pc)
            yield int(pc), mask, f"waiting at barrier {int(self.id[mask][0])}"
