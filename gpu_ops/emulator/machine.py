"""Machine that runs a program for a batch of blocks, group by group of threads; steps of branches and barriers.

The group with the lowest pc runs until it reaches the next group and merges with it, so threads that took different
paths reconverge where the paths do. After a backward branch in a loop that polls memory a group *yields*: it runs
again only when no other group can. If no group can run and threads are left, the kernel is at fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time

import numpy as np

from gpu_ops.emulator import access, errors, host, registers, undefined, warp_ops, wmma
from gpu_ops.emulator.batch import NONE, WARP, Mask
from gpu_ops.emulator.errors import SanitizerError, UnknownInstruction
from gpu_ops.emulator.instructions import Unknown
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.registers import Builder, Reader, Writer, reader, writer
from gpu_ops.emulator.state import Group, ReadyStep, State
from gpu_ops.emulator.syntax import Array, Immediate, Instruction, Name, Negated

_REPEATS = 16  # polling rounds without a change of any register, after which none will come
_ROUNDS = 1_000_000  # limit of polling rounds that do change registers, for example a count of attempts
_NO_LIMIT = 1 << 60


# ---- steps of branches, ends and barriers ------------------------------------------------------------------


def _target(m: State, instruction: Instruction, name: str) -> int:
    if name not in m.program.labels:
        raise instruction.error(f"no label {name}")
    return m.program.labels[name]


def _bra(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    (label,) = instruction.operands
    assert isinstance(label, Name)
    target = _target(m, instruction, label.name)
    return ReadyStep(lambda group, active: m.split(group, active, target), plain=False)


def _brx(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of ``brx.idx``: a branch through a table of labels."""
    index, table = instruction.operands
    assert isinstance(table, Name)
    targets = [_target(m, instruction, name) for name in m.program.tables[table.name]]
    read = reader(m, instruction, index, "u32")

    def run(group: Group, active: Mask) -> int | None:
        values = np.broadcast_to(read(), m.threads)
        chosen = m.full(active)
        rest = m.leave(group, active)
        for value in np.unique(values[chosen]):
            mine = chosen & (values == value)
            if value >= len(targets):
                lane = int(np.flatnonzero(mine)[0])
                raise m.fault("out of bounds", pc, lane, f"branch index {value} of {len(targets)}")
            if m.profiler is not None:
                m.profiler.diverged(pc, mine, chosen & (values > value))
            target = targets[value]
            m.groups.append(Group(target, mine, yielded=group.polled and target <= group.pc))
        return m.go_on(group, rest)

    return ReadyStep(run, plain=False)


def _exit(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    return ReadyStep(m.exit, plain=False)


def _trap(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    what = "the kernel executed trap"
    if instruction.operands:
        what = f"call of {instruction.operands[0].name}, which has no body here"  # type: ignore[union-attr]

    def run(group: Group, active: Mask) -> int | None:
        alone = m.program.waits_for_grid and not m.memory.grid_barrier
        hint = "; grid.sync() needs a cooperative launch: pass together=True" if alone else ""
        m.report("trap", pc, int(m.active_lanes(active)[0]), what + hint)
        return m.exit(group, active)

    return ReadyStep(run, plain=False)


def _nanosleep(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    def run(group: Group, active: Mask) -> int | None:
        group.yielded = True
        return group.pc + 1

    return ReadyStep(run, plain=False)


class _Barrier:
    """Step of ``bar.sync a{, b}``, ``bar.arrive a, b`` or ``bar.red.op p, a{, b}, q``; ``barrier`` is the same."""

    def __init__(self, m: State, pc: int, instruction: Instruction) -> None:
        words = [w for w in instruction.modifiers if w not in ("cta", "aligned")]
        self.m, self.mode = m, words[0]
        operands = list(instruction.operands)
        self.write: Writer | None = None
        if self.mode == "red":
            self.op = words[1]
            ptx_type = "u32" if self.op == "popc" else "pred"
            self.write = writer(m, instruction, operands.pop(0), ptx_type)
            self.predicate = reader(m, instruction, operands.pop(), "pred")
        elif self.mode not in ("sync", "arrive"):
            raise Unknown(instruction.form)
        self.id = reader(m, instruction, operands[0], "u32")
        self.count: Reader | None = reader(m, instruction, operands[1], "u32") if len(operands) > 1 else None
        self.simple = self.mode == "sync" and self.count is None and isinstance(operands[0], Immediate)

    def __call__(self, group: Group, active: Mask) -> int | None:
        m = self.m
        if active is None and self.simple:  # all threads of all blocks have arrived
            if m.sanitizer is not None:
                m.sanitizer.barrier(np.ones(len(m.blocks), np.bool_))
            return group.pc + 1
        # A warp arrives at an aligned barrier as a whole: its lanes park until the rest of the warp has arrived.
        here = m.full(active).reshape(-1, WARP)
        alive = m.alive.reshape(-1, WARP)
        late = here & (alive & ~here).any(axis=1, keepdims=True)
        if late.any():
            following = m.park(group, late.ravel())
            here = here & ~late
            if following is None or not here.any():
                return following
        return self._arrive(group, here.ravel())

    def _arrive(self, group: Group, here: Array) -> int | None:
        m = self.m
        ids = np.broadcast_to(self.id(), m.threads)
        counts = np.broadcast_to(self.count(), m.threads) if self.count else np.zeros(m.threads, np.uint32)
        wait = self.mode != "arrive"
        if self.mode == "red":
            m.barriers.predicate[here] = np.broadcast_to(self.predicate(), m.threads)[here]
        rest = m.leave(group, here)
        free = [] if wait else [(group.pc + 1, here)]
        for barrier in np.unique(ids[here]):
            for count in np.unique(counts[here & (ids == barrier)]):
                lanes = here & (ids == barrier) & (counts == count)
                free += m.barriers.arrive(m, group.pc, lanes, int(barrier), int(count), wait=wait)
        for pc, mask in free:
            m.groups.append(Group(pc, m.simplify(mask)))
        return m.go_on(group, rest)

    def finish(self, everyone: Array, mine: Array) -> None:
        """Finish an opened barrier: write the result of ``bar.red`` over everyone to the threads of this step."""
        if self.write is None:
            return
        met = everyone.reshape(len(self.m.blocks), -1)
        p = self.m.barriers.predicate.reshape(met.shape)
        if self.op == "popc":
            value = (p & met).sum(axis=1).astype(np.uint32)
        else:
            value = (p | ~met).all(axis=1) if self.op == "and" else (p & met).any(axis=1)
        self.write(np.repeat(value, met.shape[1]), mine)


def _bar(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    if instruction.modifiers[:1] == ("warp",):
        return warp_ops.syncwarp(m, pc, instruction)
    return ReadyStep(_Barrier(m, pc, instruction), plain=False)


_BUILDERS: dict[str, Builder] = {
    **registers.BUILDERS,
    **access.BUILDERS,
    **warp_ops.BUILDERS,
    **host.BUILDERS,
    **wmma.BUILDERS,
    "bra": _bra,
    "brx": _brx,
    "ret": _exit,
    "exit": _exit,
    "trap": _trap,
    "brkpt": _trap,
    "nanosleep": _nanosleep,
    "bar": _bar,
    "barrier": _bar,
}


# ---- the machine -------------------------------------------------------------------------------------------


def _steps(m: State) -> list[ReadyStep]:
    """Steps of the program; an error names the instruction and its line."""
    made = []
    for pc, instruction in enumerate(m.program.code):
        form, at = instruction.form, f"PTX line {instruction.line}"
        if missing := errors.feature(instruction.opcode, instruction.modifiers):
            raise UnknownInstruction(f"{at}: the emulator does not have {missing}: {m.program.text(pc)}")
        try:
            step = _BUILDERS.get(instruction.opcode, registers.arithmetic)(m, pc, instruction)
        except Unknown as error:
            raise UnknownInstruction(f"{at}: the emulator has no {form}: {m.program.text(pc)}") from error
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise instruction.error(f"these operands make no {form}: {m.program.text(pc)}") from error
        if instruction.guard is not None:
            guard = m.register(instruction.guard.name)
            if guard is None:
                raise instruction.error(f"no predicate {instruction.guard.name}")
            step.guard, step.negated = guard, isinstance(instruction.guard, Negated)
        made.append(step)
    return made


class Machine(State):
    """State of a batch of blocks, with the scheduler of its groups."""

    def __init__(self, program: PtxProgram) -> None:
        super().__init__(program)
        self.steps = _steps(self)
        self.limit = Limit(_NO_LIMIT, _NO_LIMIT)

    def run(self, blocks: Array) -> None:
        """Run these blocks (linear ids) to the end."""
        self.begin(blocks)
        self.watch = Watch(self.limit, self.clock)
        self._repeats = self._rounds = 0
        self._seen: list[Array | int | None] = []
        while (group := self._next()) is not None:
            self._advance(group)

    def _next(self) -> Group | None:
        """Group to run next: all threads at the lowest pc. Parked and yielded threads run only if no others can."""
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
        """Run the polling groups again if only they are left, unless nothing has changed in the last rounds."""
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
        """Merge all groups at the group's pc into it."""
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
        marked = self.undefined
        limit = min((g.pc for g in self.groups), default=_NO_LIMIT)
        alone = self._alone()
        while True:
            step = steps[group.pc]
            if marked:
                undefined.before(self, group)
            # If no other group is left, registers of ended threads may be overwritten; no mask means less work.
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
                if following <= group.pc:
                    if self.clock >= self.watch.look_at:
                        self.watch.backward(self, group, following)
                    if group.polled:
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
        """Fault if no thread can continue: the places of the threads, and the events they wait for."""
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
        if kind == "deadlock" and any(isinstance(self.steps[g.pc].run, _Barrier) for g in self.parked):
            kind = "barrier divergence"
        return SanitizerError(kind, "\n  ".join(lines))


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
