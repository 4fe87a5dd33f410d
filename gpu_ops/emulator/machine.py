"""Runs a program for a batch of blocks: all threads at once, group by group.

The group with the lowest pc runs until it meets the next group and merges with it, so threads that took different
paths reconverge where the paths do. After a backward branch in a loop that polls memory a group *yields*: it runs
again only when no other group can. When no group can run and threads are left, the kernel is at fault.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.emulator import access, control, registers, warp_ops
from gpu_ops.emulator.batch import NONE
from gpu_ops.emulator.errors import PtxError, SanitizerError, UnknownInstruction
from gpu_ops.emulator.instructions import Unknown
from gpu_ops.emulator.program import Program
from gpu_ops.emulator.state import Group, State, Step
from gpu_ops.emulator.syntax import Array, Negated

_REPEATS = 16  # polling rounds that leave every register unchanged: nothing will change any more
_ROUNDS = 1_000_000  # polling rounds in which registers do change, for example a count of attempts
_NO_LIMIT = 1 << 60

_BUILDERS = {**registers.BUILDERS, **access.BUILDERS, **warp_ops.BUILDERS, **control.BUILDERS}


def _steps(m: State) -> list[Step]:
    """The steps of the program; an error names the instruction and its line."""
    made = []
    for pc, instruction in enumerate(m.program.code):
        line, form = f"PTX line {instruction.line}", instruction.form
        text = m.program.module.source_line(instruction.line)
        try:
            step = _BUILDERS.get(instruction.opcode, registers.arithmetic)(m, pc, instruction)
        except Unknown as error:
            raise UnknownInstruction(
                f"{line}: the emulator has no {form}: {text}{m.program.source(pc)}"
            ) from error
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PtxError(f"{line}: these operands make no {form}: {text}") from error
        if instruction.guard is not None:
            guard = m.register(instruction.guard.name)
            if guard is None:
                raise PtxError(f"{line}: no predicate {instruction.guard.name}")
            step.guard, step.negated = guard, isinstance(instruction.guard, Negated)
        made.append(step)
    return made


class Machine(State):
    """Schedules the groups of a batch of blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.steps = _steps(self)

    def run(self, blocks: Array) -> None:
        """Run these blocks (linear ids) to the end."""
        self.begin(blocks)
        self._repeats = self._rounds = 0
        self._seen: list[Array | int | None] = []
        while (group := self._next()) is not None:
            self._advance(group)

    def _next(self) -> Group | None:
        """The group to run: all threads at the lowest pc. Parked and yielded threads run only if no others can."""
        ready = [g for g in self.groups if not g.yielded]
        if not ready and self.failed < len(self.parked):
            self.failed += 1
            group = self.parked.pop(0)
            group.retried = True
            return self._gather(group)
        if not ready and self.groups:
            self._poll_again()
            ready = self.groups
        if not ready:
            if self.parked or self.barriers.any:
                raise self._deadlock("deadlock")
            return None
        group = min(ready, key=lambda g: g.pc)
        self.groups.remove(group)
        return self._gather(group)

    def _poll_again(self) -> None:
        """Only polling groups are left: run them again, unless nothing has changed since the last rounds."""
        seen = [*self.registers, *(part for g in self.groups for part in (g.pc, g.mask))]
        same = len(seen) == len(self._seen) and all(
            a is b or np.array_equal(a, b)  # type: ignore[arg-type]
            for a, b in zip(seen, self._seen, strict=True)
        )
        self._repeats = self._repeats + 1 if same else 0
        self._rounds += 1
        self._seen = seen
        if self._repeats > _REPEATS or self._rounds > _ROUNDS:
            raise self._deadlock("livelock")
        for g in self.groups:
            g.yielded = False

    def _gather(self, group: Group) -> Group:
        """Merge every group at this pc into the group."""
        for waiting in (self.groups, self.parked):
            for other in [g for g in waiting if g.pc == group.pc]:
                waiting.remove(other)
                self.failed = 0
                assert group.mask is not None
                assert other.mask is not None
                group.mask = self.simplify(group.mask | other.mask)
                group.polled |= other.polled
        return group

    def _advance(self, group: Group) -> None:
        """Run a group until it reaches the pc of another one, or until none of its threads are left."""
        steps, values, profiler = self.steps, self.registers, self.profiler
        limit = min((g.pc for g in self.groups), default=_NO_LIMIT)
        alone = self._alone()
        while True:
            step = steps[group.pc]
            # When no other group is left, registers of ended threads may be overwritten; no mask is less work.
            active = None if alone and step.everyone else group.mask
            self.clock += 1
            if step.guard >= 0:
                p = values[step.guard]
                if step.negated:
                    p = ~p
                if p.size == 1:
                    if not p[0]:
                        active = NONE
                else:
                    active = p if active is None else active & p
                    n = np.count_nonzero(active)
                    active = NONE if n == 0 else None if n == self.threads else active
            if profiler is not None:
                profiler.executed(self.threads, group.pc, group.mask, active)
            if active is NONE:
                group.pc += 1
            elif step.plain:
                step.run(active)
                group.pc += 1
            else:
                before = len(self.groups)
                following = step.run(group, active)
                if following is None:
                    return
                if group.retried:
                    group.retried, self.failed = False, 0
                if following <= group.pc and group.polled:
                    group.yielded, group.polled = True, False
                group.pc = following
                alone = self._alone()
                if len(self.groups) != before:
                    limit = min((g.pc for g in self.groups), default=_NO_LIMIT)
            if group.pc >= limit or group.yielded:
                break
        self.groups.append(group)

    def _alone(self) -> bool:
        return not (self.groups or self.parked or self.barriers.any)

    def _deadlock(self, kind: str) -> SanitizerError:
        """The fault when no thread can continue: where the threads are, and what they wait for."""
        waiting = [(g.pc, g.mask, "a warp instruction whose other lanes never come") for g in self.parked]
        waiting += [(g.pc, g.mask, "polling memory that nobody changes") for g in self.groups]
        waiting += self.barriers.standing()
        lines = [
            f"none of the {int(self.alive.sum())} threads that kernel {self.program.name} has left can go on"
        ]
        for pc, mask, why in waiting:
            lanes = np.flatnonzero(self.full(mask))
            who = f"{len(lanes)} threads, first {self.thread(int(lanes[0]))}"
            lines.append(f"{who}: {why}\n    at {self.program.where(pc)}")
        if kind == "deadlock" and any(isinstance(self.steps[g.pc].run, control.Barrier) for g in self.parked):
            kind = "barrier divergence"
        return SanitizerError(kind, "\n  ".join(lines))
