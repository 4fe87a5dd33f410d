"""Runs a program for a batch of blocks: all threads at once, group by group.

A *group* is the threads that stand at one pc. The group with the lowest pc runs until it meets the next one and
merges with it: so threads that took different ways come together where the ways do. Threads wait

- at a barrier, until the threads it is for have come (:mod:`.barriers`);
- at a warp instruction (``shfl.sync``, ``mma.sync``), until the lanes it names stand there too: they are *parked*;
- after a backward branch in a loop that polls memory: they *yield*, and run again when nobody else can.

When nobody can run and threads are left, that is a fault of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_ops.emulator.barriers import Barriers
from gpu_ops.emulator.errors import SanitizerError
from gpu_ops.emulator.memory import Memory
from gpu_ops.emulator.program import Program
from gpu_ops.emulator.stuck import stuck
from gpu_ops.emulator.types import Array, register_dtype

if TYPE_CHECKING:
    from gpu_ops.emulator.profiler import Profiler
    from gpu_ops.emulator.sanitizer import Sanitizer

__all__ = ["WARP", "Group", "Machine", "Mask", "Step"]

WARP = 32
_REPEATS = 16  # rounds of polling that leave every register as it was: nothing will change any more
_ROUNDS = 1_000_000  # rounds of polling in which registers do change, by a count of the attempts for example

#: Which threads: a bool per thread, or None for all of them.
Mask = Array | None


@dataclass(slots=True)
class Step:
    """An instruction, ready to run.

    ``plain``: ``run(active)``, and the next one follows. Else ``run(machine, group, active)`` says where the group
    goes on (pc), or None if nothing of it is left here. ``everyone``: it only computes, so that it may run for
    threads that have ended too.
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
    polled: bool = False  # read memory that others may change since the last backward branch
    retried: bool = False  # was parked, and has not got past that instruction yet


class Machine:
    """The state of a batch of blocks and what moves it on."""

    def __init__(self, program: Program) -> None:
        from gpu_ops.emulator.execute import steps
        from gpu_ops.emulator.special import SPECIAL

        self.program: Program = program
        self.registers: list[Array] = []
        self.index: dict[str, int] = {}
        self.dtypes: list[np.dtype[Any]] = []
        for name, ptx_type in program.registers.items():
            self._add(name, register_dtype(ptx_type))
        self._special = SPECIAL
        self.specials: dict[str, int] = {}
        self.carry = self._add("carry flag", np.dtype(np.bool_))
        self.clock = 0
        self._mask_of_lanes: Mask = None
        self._lanes_of_mask = np.zeros(0, np.int32)
        self.steps = steps(self)

    def configure(
        self,
        memory: Memory,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        dynamic_shared: int,
        parameters: tuple[Array, dict[str, int]],
        sanitizer: Sanitizer | None,
        profiler: Profiler | None,
    ) -> None:
        """What a launch sets; ``parameters``: the bytes of the parameter space, and where each begins."""
        self.memory = memory
        self.grid, self.block = grid, block
        self.dynamic_shared: int = dynamic_shared
        self._parameters, self._offsets = parameters
        self.sanitizer, self.profiler = sanitizer, profiler

    def release(self) -> None:
        """Let go of what the launch held."""
        del self.memory, self.barriers, self.alive, self.lanes, self.groups
        self.registers.clear()
        self._mask_of_lanes, self._lanes_of_mask = None, np.zeros(0, np.int32)
        self.sanitizer = self.profiler = None

    def _add(self, name: str, dtype: np.dtype[Any]) -> int:
        self.index[name] = len(self.dtypes)
        self.dtypes.append(dtype)
        return self.index[name]

    def register(self, name: str) -> int | None:
        """The index of a register, declared or special; None if there is none of that name."""
        if name not in self.index and name in self._special:
            self.specials[name] = self._add(name, self._special[name].dtype)
        return self.index.get(name)

    def parameter(self, name: str, offset: int, size: int) -> Array:
        """Bytes of the kernel's parameters."""
        at = self._offsets[name] + offset
        return self._parameters[at : at + size]

    # -- a batch of blocks ----------------------------------------------------------------------

    def run(self, blocks: Array) -> None:
        """Run these blocks (linear ids) to the end."""
        self.begin(blocks)
        while (group := self._next()) is not None:
            self._advance(group)

    def begin(self, blocks: Array) -> None:
        size = self.block[0] * self.block[1] * self.block[2]
        self.padded: int = -(-size // WARP) * WARP  # whole warps; the lanes beyond are never alive
        self.blocks = blocks
        self.threads = len(blocks) * self.padded
        self.lanes = np.arange(self.threads, dtype=np.int32)
        self.alive = self.lanes % self.padded < size
        self.all_alive = size == self.padded
        self.memory.begin(len(blocks), self.padded, self.dynamic_shared)
        self.registers[:] = [np.zeros(1, dtype) for dtype in self.dtypes]
        for name, i in self.specials.items():
            self.registers[i] = self._special[name].value(self).view(self.dtypes[i])
        self.barriers = Barriers(len(blocks), self.padded)
        self.groups = [Group(0, None if self.all_alive else self.alive.copy())]
        self.parked: list[Group] = []
        self._failed = self._repeats = self._rounds = 0
        self._seen: list[Array | int | None] = []
        self._mask_of_lanes, self._lanes_of_mask = None, self.lanes
        if self.sanitizer is not None:
            self.sanitizer.begin(self)

    # -- scheduling -----------------------------------------------------------------------------

    def _next(self) -> Group | None:
        """The group to run: the lowest pc, all of its threads; parked and yielded ones only if need be."""
        ready = [g for g in self.groups if not g.yielded]
        if not ready and self._failed < len(self.parked):
            self._failed += 1
            group = self.parked.pop(0)
            group.retried = True
            return self._gather(group)
        if not ready and self.groups:
            self._poll_again()
            ready = self.groups
        if not ready:
            if self.parked or self.barriers.any:
                raise stuck(self, "deadlock")
            return None
        group = min(ready, key=lambda g: g.pc)
        self.groups.remove(group)
        return self._gather(group)

    def _poll_again(self) -> None:
        """Only pollers are left: let them look again, unless nothing has changed since they last did."""
        seen = [*self.registers, *(part for g in self.groups for part in (g.pc, g.mask))]
        same = len(seen) == len(self._seen) and all(
            a is b or np.array_equal(a, b)  # type: ignore[arg-type]
            for a, b in zip(seen, self._seen, strict=True)
        )
        self._repeats = self._repeats + 1 if same else 0
        self._rounds += 1
        self._seen = seen
        if self._repeats > _REPEATS or self._rounds > _ROUNDS:
            raise stuck(self, "livelock")
        for g in self.groups:
            g.yielded = False

    def _gather(self, group: Group) -> Group:
        """Merge all that stand at the group's pc into it."""
        for waiting in (self.groups, self.parked):
            for other in [g for g in waiting if g.pc == group.pc]:
                waiting.remove(other)
                self._failed = 0
                assert group.mask is not None
                assert other.mask is not None
                group.mask = self.simplify(group.mask | other.mask)
                group.polled |= other.polled
        return group

    def simplify(self, mask: Array) -> Mask:
        return None if self.all_alive and mask.all() else mask

    def _advance(self, group: Group) -> None:
        """Run a group until it stands where another one does, or nothing of it is left."""
        steps, registers, profiler = self.steps, self.registers, self.profiler
        limit = min((g.pc for g in self.groups), default=1 << 60)
        alone = self._alone()
        while True:
            step = steps[group.pc]
            # Where nobody else is left, registers of threads that have ended may be written: no mask, less work.
            active = None if alone and step.everyone else group.mask
            self.clock += 1
            if step.guard >= 0:
                p = registers[step.guard]
                if step.negated:
                    p = ~p
                if p.size == 1:
                    if not p[0]:
                        active = self.none
                else:
                    active = p if active is None else active & p
                    n = np.count_nonzero(active)
                    active = self.none if n == 0 else None if n == self.threads else active
                if active is self.none and step.plain:
                    if profiler is not None:
                        profiler.executed(self, group.pc, group.mask, active)
                    group.pc += 1
                    if group.pc >= limit:
                        break
                    continue
            if profiler is not None:
                profiler.executed(self, group.pc, group.mask, active)
            if step.plain:
                step.run(active)
                group.pc += 1
            else:
                before = len(self.groups)
                following = step.run(self, group, active)
                if following is None:
                    return
                if group.retried:
                    group.retried, self._failed = False, 0
                if following <= group.pc and group.polled:
                    group.yielded, group.polled = True, False
                group.pc = following
                alone = self._alone()
                if len(self.groups) != before:
                    limit = min((g.pc for g in self.groups), default=1 << 60)
                if group.yielded:
                    break
            if group.pc >= limit:
                break
        self.groups.append(group)

    def _alone(self) -> bool:
        return not (self.groups or self.parked or self.barriers.any)

    #: The mask of no thread; compared by identity.
    none: Array = np.zeros(1, np.bool_)

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

    # -- control --------------------------------------------------------------------------------

    def leave(self, group: Group, active: Mask) -> Mask:
        """Take the active threads out of the group: the mask of the rest, or ``none``."""
        if active is None:
            return self.none
        rest = ~active if group.mask is None else group.mask & ~active
        return rest if rest.any() else self.none

    def exit(self, group: Group, active: Mask) -> int | None:
        """``exit``, and ``ret`` of the entry."""
        rest = self.leave(group, active)
        self.alive = self.alive & ~self.full(active)
        self.all_alive = False
        self._failed = 0
        for pc, mask in self.barriers.recheck(self):
            self.groups.append(Group(pc, mask))
        if rest is self.none:
            return None
        group.mask = rest
        return group.pc + 1

    def split(self, group: Group, active: Mask, target: int) -> int | None:
        """A branch: the active threads go to ``target``, the rest go on."""
        if active is self.none:
            return group.pc + 1
        rest = self.leave(group, active)
        if rest is self.none:
            return target
        assert active is not None
        assert rest is not None
        if self.profiler is not None:
            self.profiler.diverged(group.pc, active, rest)
        polled = group.polled and target <= group.pc
        self.groups.append(Group(target, active, yielded=polled))
        group.mask = rest
        return group.pc + 1

    def park(self, group: Group, lanes: Array) -> int | None:
        """Leave these threads at the group's instruction; where the others go on, or None."""
        if self.profiler is not None:
            self.profiler.parked(group.pc, group.mask, lanes)
        self.parked.append(Group(group.pc, lanes))
        rest = self.leave(group, lanes)
        if not group.retried or rest is not self.none:
            self._failed = 0
        if rest is self.none:
            return None
        group.mask = rest
        return group.pc + 1

    # -- faults ---------------------------------------------------------------------------------

    def thread(self, lane: int) -> str:
        """``block (3,0,0) thread (17,0,0)``"""
        b, t = int(self.blocks[lane // self.padded]), lane % self.padded
        gx, gy, _ = self.grid
        x, y, _ = self.block
        return (
            f"block ({b % gx},{b // gx % gy},{b // (gx * gy)}) thread ({t % x},{t // x % y},{t // (x * y)})"
        )

    def fault(self, kind: str, pc: int, lane: int, what: str) -> SanitizerError:
        where = self.program.where(pc)
        return SanitizerError(
            kind, f"{what}\n  kernel {self.program.title}, {self.thread(lane)}\n  at {where}"
        )
