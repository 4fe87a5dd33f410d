"""Steps of branches, ends and barriers."""

from __future__ import annotations

import numpy as np

from gpu_ops.emulator.batch import WARP, Mask
from gpu_ops.emulator.errors import PtxError
from gpu_ops.emulator.instructions import Unknown
from gpu_ops.emulator.registers import Builder, Reader, Writer, reader, writer
from gpu_ops.emulator.state import Group, State, Step
from gpu_ops.emulator.syntax import Array, Immediate, Instruction, Name
from gpu_ops.emulator.warp_ops import syncwarp


def _target(m: State, instruction: Instruction, name: str) -> int:
    if name not in m.program.labels:
        raise PtxError(f"PTX line {instruction.line}: no label {name}")
    return m.program.labels[name]


def _bra(m: State, pc: int, instruction: Instruction) -> Step:
    (label,) = instruction.operands
    assert isinstance(label, Name)
    target = _target(m, instruction, label.name)
    return Step(lambda group, active: m.split(group, active, target), plain=False)


def _brx(m: State, pc: int, instruction: Instruction) -> Step:
    """``brx.idx``: a branch through a table of labels."""
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

    return Step(run, plain=False)


def _exit(m: State, pc: int, instruction: Instruction) -> Step:
    return Step(m.exit, plain=False)


def _trap(m: State, pc: int, instruction: Instruction) -> Step:
    what = "the kernel executed trap"
    if instruction.operands:
        what = f"call of {instruction.operands[0].name}, which has no body here"  # type: ignore[union-attr]

    def run(group: Group, active: Mask) -> int | None:
        raise m.fault("trap", pc, int(m.active_lanes(active)[0]), what)

    return Step(run, plain=False)


def _nanosleep(m: State, pc: int, instruction: Instruction) -> Step:
    def run(group: Group, active: Mask) -> int | None:
        group.yielded = True
        return group.pc + 1

    return Step(run, plain=False)


class Barrier:
    """``bar.sync a{, b}``, ``bar.arrive a, b``, ``bar.red.op p, a{, b}, q``; ``barrier`` is the same."""

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
        if active is None and self.simple:  # all threads of all blocks are here
            if m.sanitizer is not None:
                m.sanitizer.barrier(np.ones(len(m.blocks), np.bool_))
            return group.pc + 1
        # A warp arrives at an aligned barrier as a whole: its lanes park until the rest of the warp is here.
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
        """The barrier opened: write the result of ``bar.red`` over everyone to the threads that came here."""
        if self.write is None:
            return
        met = everyone.reshape(len(self.m.blocks), -1)
        p = self.m.barriers.predicate.reshape(met.shape)
        if self.op == "popc":
            value = (p & met).sum(axis=1).astype(np.uint32)
        else:
            value = (p | ~met).all(axis=1) if self.op == "and" else (p & met).any(axis=1)
        self.write(np.repeat(value, met.shape[1]), mine)


def _bar(m: State, pc: int, instruction: Instruction) -> Step:
    if instruction.modifiers[:1] == ("warp",):
        return syncwarp(m, pc, instruction)
    return Step(Barrier(m, pc, instruction), plain=False)


BUILDERS: dict[str, Builder] = {
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
