"""Branches, ends and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator.errors import PtxError
from gpu_ops.emulator.instructions import Unknown
from gpu_ops.emulator.machine import Group, Step
from gpu_ops.emulator.operands import Reader, Writer, reader, writer
from gpu_ops.emulator.syntax import Immediate, Instruction, Name
from gpu_ops.emulator.types import Array

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine, Mask

__all__ = ["BUILDERS"]


def _target(m: Machine, instruction: Instruction, name: str) -> int:
    if name not in m.program.labels:
        raise PtxError(f"PTX line {instruction.line}: no label {name}")
    return m.program.labels[name]


def _bra(m: Machine, pc: int, instruction: Instruction) -> Step:
    (label,) = instruction.operands
    assert isinstance(label, Name)
    target = _target(m, instruction, label.name)
    return Step(lambda machine, group, active: machine.split(group, active, target), plain=False)


def _brx(m: Machine, pc: int, instruction: Instruction) -> Step:
    """``brx.idx``: a table of labels."""
    index, table = instruction.operands
    assert isinstance(table, Name)
    targets = [_target(m, instruction, name) for name in m.program.tables[table.name]]
    read = reader(m, instruction, index, "u32")

    def run(machine: Machine, group: Group, active: Mask) -> int | None:
        values = np.broadcast_to(read(), machine.threads)
        chosen = machine.full(active)
        rest = machine.leave(group, active)
        for value in np.unique(values[chosen]):
            if value >= len(targets):
                lane = int(np.flatnonzero(chosen & (values == value))[0])
                raise machine.fault("out of bounds", pc, lane, f"branch index {value} of {len(targets)}")
            mine = chosen & (values == value)
            if machine.profiler is not None:
                machine.profiler.diverged(pc, mine, chosen & (values > value))
            target = targets[value]
            machine.groups.append(Group(target, mine, yielded=group.polled and target <= group.pc))
        if rest is machine.none:
            return None
        group.mask = rest
        return group.pc + 1

    return Step(run, plain=False)


def _exit(m: Machine, pc: int, instruction: Instruction) -> Step:
    def run(machine: Machine, group: Group, active: Mask) -> int | None:
        if active is machine.none:
            return group.pc + 1
        return machine.exit(group, active)

    return Step(run, plain=False)


def _trap(m: Machine, pc: int, instruction: Instruction) -> Step:
    what = "the kernel executed trap"
    if instruction.operands:
        what = f"call of {instruction.operands[0].name}, which has no body here"  # type: ignore[union-attr]

    def run(machine: Machine, group: Group, active: Mask) -> int | None:
        if active is machine.none:
            return group.pc + 1
        raise machine.fault("trap", pc, int(machine.active_lanes(active)[0]), what)

    return Step(run, plain=False)


def _nanosleep(m: Machine, pc: int, instruction: Instruction) -> Step:
    def run(machine: Machine, group: Group, active: Mask) -> int | None:
        group.yielded = True
        return group.pc + 1

    return Step(run, plain=False)


class _Barrier:
    """``bar.sync a{, b}``, ``bar.arrive a, b``, ``bar.red.op p, a{, b}, q``; ``barrier`` spells the same."""

    def __init__(self, m: Machine, pc: int, instruction: Instruction) -> None:
        words = [w for w in instruction.modifiers if w not in ("cta", "aligned")]
        self.pc, self.mode = pc, words[0]
        operands = list(instruction.operands)
        self.write: Writer | None = None
        if self.mode == "red":
            self.op = words[1]
            self.type = "u32" if self.op == "popc" else "pred"
            self.write = writer(m, instruction, operands.pop(0), self.type)
            self.predicate = reader(m, instruction, operands.pop(), "pred")
        elif self.mode not in ("sync", "arrive"):
            raise Unknown(instruction.form)
        self.id = reader(m, instruction, operands[0], "u32")
        self.count: Reader | None = reader(m, instruction, operands[1], "u32") if len(operands) > 1 else None
        self.simple = self.mode == "sync" and self.count is None and isinstance(operands[0], Immediate)

    def __call__(self, m: Machine, group: Group, active: Mask) -> int | None:
        if active is m.none:
            return group.pc + 1
        if active is None and self.simple:  # everybody is here
            if m.sanitizer is not None:
                m.sanitizer.barrier(np.ones(len(m.blocks), np.bool_))
            return group.pc + 1
        # A warp comes to an aligned barrier as a whole: lanes whose others are elsewhere wait for them.
        here = m.full(active).reshape(-1, 32)
        alive = m.alive.reshape(-1, 32)
        late = here & (alive & ~here).any(axis=1, keepdims=True)
        if late.any():
            following = m.park(group, late.ravel())
            return following if following is None else self._split_late(m, group, here & ~late)
        return self._arrive(m, group, here.ravel())

    def _split_late(self, m: Machine, group: Group, here: Array) -> int | None:
        """Some warps are complete, others not: the complete ones arrive."""
        return self._arrive(m, group, here.ravel()) if here.any() else group.pc + 1

    def _arrive(self, m: Machine, group: Group, here: Array) -> int | None:
        ids = np.broadcast_to(self.id(), m.threads)
        counts = np.broadcast_to(self.count(), m.threads) if self.count else np.zeros(m.threads, np.uint32)
        wait = self.mode != "arrive"
        if self.mode == "red":
            m.barriers.predicate[here] = np.broadcast_to(self.predicate(), m.threads)[here]
        rest = m.leave(group, here)
        free = [(group.pc + 1, here)] if not wait else []
        for barrier in np.unique(ids[here]):
            for count in np.unique(counts[here & (ids == barrier)]):
                lanes = here & (ids == barrier) & (counts == count)
                free += m.barriers.arrive(m, group.pc, lanes, int(barrier), int(count), wait=wait)
        for pc, mask in free:
            m.groups.append(Group(pc, m.simplify(mask)))
        if rest is m.none:
            return None
        group.mask = rest
        return group.pc + 1

    def finish(self, m: Machine, everyone: Array, mine: Array) -> None:
        """The barrier opened: the result of ``bar.red`` over everyone, for the threads that came here."""
        if self.write is None:
            return
        met = everyone.reshape(len(m.blocks), -1)
        p = m.barriers.predicate.reshape(met.shape)
        if self.op == "popc":
            value = (p & met).sum(axis=1).astype(np.uint32)
        else:
            value = (p | ~met).all(axis=1) if self.op == "and" else (p & met).any(axis=1)
        self.write(np.repeat(value, met.shape[1]), mine)


def _bar(m: Machine, pc: int, instruction: Instruction) -> Step:
    if instruction.modifiers[:1] == ("warp",):
        from gpu_ops.emulator.collective import syncwarp

        return syncwarp(m, pc, instruction)
    return Step(_Barrier(m, pc, instruction), plain=False)


BUILDERS = {
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
