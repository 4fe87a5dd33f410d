"""Instructions to :class:`Step` closures: arithmetic here, the other families in their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_ops.emulator import compiled
from gpu_ops.emulator.errors import PtxError, UnknownInstruction
from gpu_ops.emulator.instructions import Unknown, lookup
from gpu_ops.emulator.operands import destinations, reader, writer
from gpu_ops.emulator.syntax import Instruction, Negated
from gpu_ops.emulator.types import DTYPE

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine, Mask, Step

__all__ = ["Builder", "steps"]

#: Makes the step of an instruction.
Builder = Callable[["Machine", int, Instruction], "Step"]


def steps(m: Machine) -> list[Step]:
    """The program's instructions, ready to run; an unknown one is an error that names it and its line."""
    from gpu_ops.emulator import access, collective, control

    builders: dict[str, Builder] = {
        "mov": _mov,
        "cvta": _cvta,
        "isspacep": _isspacep,
        "discard": _nothing,
        "prefetch": _nothing,
        "prefetchu": _nothing,
        "membar": _nothing,
        "fence": _nothing,
        "griddepcontrol": _nothing,
        "setmaxnreg": _nothing,
        **access.BUILDERS,
        **collective.BUILDERS,
        **control.BUILDERS,
    }
    made = []
    for pc, instruction in enumerate(m.program.code):
        try:
            step = builders.get(instruction.opcode, _arithmetic)(m, pc, instruction)
        except Unknown as error:
            raise UnknownInstruction(
                f"PTX line {instruction.line}: the emulator has no {instruction.form}: "
                f"{m.program.module.source_line(instruction.line)}{m.program.source(pc)}"
            ) from error
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PtxError(
                f"PTX line {instruction.line}: these operands make no {instruction.form}: "
                f"{m.program.module.source_line(instruction.line)}"
            ) from error
        if instruction.guard is not None:
            guard = m.register(instruction.guard.name)
            if guard is None:
                raise PtxError(f"PTX line {instruction.line}: no predicate {instruction.guard.name}")
            step.guard, step.negated = guard, isinstance(instruction.guard, Negated)
        made.append(step)
    return made


def _plain(run: Callable[[Mask], Any]) -> Step:
    from gpu_ops.emulator.machine import Step

    return Step(run, everyone=True)


def _nothing(m: Machine, pc: int, instruction: Instruction) -> Step:
    return _plain(lambda mask: None)


def _arithmetic(m: Machine, pc: int, instruction: Instruction) -> Step:
    if not instruction.operands:
        raise Unknown(instruction.form)
    target, *sources = instruction.operands
    three = instruction.opcode in ("min", "max") and len(sources) == 3  # sm_100: a form of its own
    op = lookup(instruction.opcode + "3" * three, instruction.modifiers)
    reads, writes = list(op.reads), list(op.writes)
    carry_in, carry_out = reads[-1:] == ["cc"], writes[-1:] == ["cc"]
    if len(sources) != len(reads) - carry_in:
        raise PtxError(
            f"PTX line {instruction.line}: {instruction.form} wants {len(reads) - carry_in} sources, "
            f"got {len(sources)}"
        )
    readers = [reader(m, instruction, s, t) for s, t in zip(sources, reads, strict=False)]
    writers = [
        writer(m, instruction, d, t) for d, t in zip(destinations(target), writes, strict=False) if t != "cc"
    ]
    registers, carry, function = m.registers, m.carry, op.run
    if len(writes) == 1 and not carry_in:
        write = writers[0]
        if len(readers) == 1:
            (a,) = readers
            return _plain(lambda mask: write(function(a()), mask))
        if len(readers) == 2:
            a, b = readers
            return _plain(lambda mask: write(function(a(), b()), mask))
        if len(readers) == 3:
            a, b, c = readers
            return _plain(lambda mask: write(function(a(), b(), c()), mask))

    def run(mask: Mask) -> None:
        values = [read() for read in readers]
        if carry_in:
            values.append(registers[carry])
        results = function(*values)
        results = results if isinstance(results, tuple) else (results,)
        for write, result in zip(writers, results, strict=False):
            write(result, mask)
        if carry_out:
            registers[carry] = results[-1] if mask is None else np.where(mask, results[-1], registers[carry])

    return _plain(run)


def _mov(m: Machine, pc: int, instruction: Instruction) -> Step:
    """``mov``: a copy, a pack or an unpack of bits, the address of a variable, a special register."""
    (ptx_type,) = instruction.modifiers
    if ptx_type not in DTYPE:
        raise Unknown(instruction.form)
    target, source = instruction.operands
    read, write = reader(m, instruction, source, ptx_type), writer(m, instruction, target, ptx_type)
    return _plain(lambda mask: write(read(), mask))


_WINDOWS = {"shared": compiled.SHARED_WINDOW, "local": compiled.LOCAL_WINDOW}


def _cvta(m: Machine, pc: int, instruction: Instruction) -> Step:
    """An address of a state space to a generic one, or back with ``.to``."""
    *words, ptx_type = instruction.modifiers
    back = words[0] == "to"
    space = words[-1].partition("::")[0]
    window = np.uint64(_WINDOWS.get(space, 0))
    target, source = instruction.operands
    read, write = reader(m, instruction, source, ptx_type), writer(m, instruction, target, ptx_type)
    if not window:
        return _plain(lambda mask: write(read(), mask))
    if back:
        return _plain(lambda mask: write(read() - window, mask))
    return _plain(lambda mask: write(read() + window, mask))


def _isspacep(m: Machine, pc: int, instruction: Instruction) -> Step:
    space = instruction.modifiers[0].partition("::")[0]
    target, source = instruction.operands
    read, write = reader(m, instruction, source, "u64"), writer(m, instruction, target, "pred")
    low = {"shared": compiled.SHARED_WINDOW, "local": compiled.LOCAL_WINDOW}.get(space, 0)
    high = low + compiled.WINDOW_BYTES if low else compiled.SHARED_WINDOW

    def run(mask: Mask) -> None:
        a = read()
        write((a >= np.uint64(low)) & (a < np.uint64(high)), mask)

    return _plain(run)
