"""Steps of calls that leave the kernel: ``printf``, a failed ``assert``, and calls through pointers."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable

import numpy as np

from gpu_ops.emulator import aot
from gpu_ops.emulator.aot import LOCAL_BASE
from gpu_ops.emulator.batch import Mask
from gpu_ops.emulator.errors import UnknownInstruction
from gpu_ops.emulator.memory import GENERIC, Access
from gpu_ops.emulator.registers import Builder, reader
from gpu_ops.emulator.shadow import VOID
from gpu_ops.emulator.state import Group, ReadyStep, State
from gpu_ops.emulator.syntax import Array, Instruction, Name, Operand

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|z|j|t|L)?([diouxXcfFeEgGaAsp%])")


def _host(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    callee, *operands = instruction.operands
    assert isinstance(callee, Name)
    arguments = [_offset(m, operand) for operand in operands]
    if callee.name == "vprintf":
        return ReadyStep(_printf(m, pc, *arguments))
    message, file, line, function, _ = arguments

    def fail(group: Group, active: Mask) -> int | None:
        lane = int(m.active_lanes(active)[0])

        def what() -> str:
            said, where, who = (_text(m, pc, lane, _word(m, lane, at)) for at in (message, file, function))
            return f"{where}:{_word(m, lane, line, 4)}: {who}: Assertion `{said}` failed"

        m.report("trap", pc, lane, what)
        return m.exit(group, active)

    return ReadyStep(fail, plain=False)


def _printf(m: State, pc: int, result: int, form: int, values: int) -> Callable[[Mask], None]:
    def run(mask: Mask) -> None:
        for lane in m.active_lanes(mask).tolist():
            pieces = _text(m, pc, lane, _word(m, lane, form))
            printed, count = _format(m, pc, lane, pieces, _word(m, lane, values))
            sys.stdout.write(printed)
            m.memory.local[lane, result : result + 4].view(np.int32)[0] = count

    return run


def _format(m: State, pc: int, lane: int, text: str, at: int) -> tuple[str, int]:
    """Replace the conversions of a text; return it and their number. Arguments start at ``at``, each aligned."""
    count, start = 0, at

    def take(code: str) -> float:
        nonlocal at, count
        size = struct.calcsize(code)
        at = start + -(-(at - start) // size) * size
        offset = at - aot.LOCAL_WINDOW - LOCAL_BASE
        if (
            m.sanitizer is not None
            and offset >= 0
            and (m.sanitizer.written[lane, offset : offset + size] == VOID).any()
        ):
            m.report("uninitialised read", pc, lane, "printf of a value that is uninitialised")
        value: float = struct.unpack(f"<{code}", _bytes(m, pc, lane, at, size))[0]
        at, count = at + size, count + 1
        return value

    def convert(found: re.Match[str]) -> str:
        flags, width, precision, length, letter = found.groups()
        if letter == "%":
            return "%"
        width = str(take("i")) if width == "*" else width
        precision = str(take("i")) if precision == "*" else precision
        spec = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
        if letter in "fFeEgG":
            return f"{spec}{letter}" % take("d")
        if letter in "aA":
            return float(take("d")).hex()
        if letter in "sp":
            pointer = int(take("Q"))
            return f"{spec}s" % (_text(m, pc, lane, pointer) if letter == "s" else hex(pointer))
        code = "q" if length in ("l", "ll", "z", "j", "t") else "i"
        value = int(take(code if letter in "dic" else code.upper()))
        if length in ("h", "hh") and letter != "c":
            bits = {"h": 16, "hh": 8}[length]
            value &= (1 << bits) - 1
            if letter in "di" and value >> bits - 1:
                value -= 1 << bits
        if letter == "c":
            return f"{spec}s" % chr(value & 0xFF)
        return f"{spec}{'d' if letter in 'iu' else letter}" % value

    return _CONVERSION.sub(convert, text), count


# ---- memory of one thread ----------------------------------------------------------------------------------


def _offset(m: State, operand: Operand) -> int:
    """Offset of a ``.param`` variable in a thread's local memory."""
    assert isinstance(operand, Name)
    return m.program.local[operand.name] - LOCAL_BASE


def _word(m: State, lane: int, offset: int, size: int = 8) -> int:
    return int.from_bytes(m.memory.local[lane, offset : offset + size].tobytes(), "little")


def _bytes(m: State, pc: int, lane: int, address: int, size: int) -> bytes:
    where = np.uint64(address) + np.arange(size, dtype=np.uint64)
    lanes = np.full(size, lane, np.int32)
    place, fault, _ = m.memory.resolve(Access(pc, GENERIC, 1, read=True, write=False), lanes, where)
    if fault:
        raise m.fault("out of bounds", pc, lane, f"text to print {m.memory.describe(GENERIC, address)}")
    out: Array = np.empty((1, size), np.uint8)
    aot.gather(place.host, np.arange(size, dtype=np.int32), out)
    return out.tobytes()


def _text(m: State, pc: int, lane: int, address: int) -> str:
    """C string at an address."""
    text = bytearray()
    while (byte := _bytes(m, pc, lane, address + len(text), 1)) != b"\0":
        text += byte
    return text.decode(errors="replace")


# ---- calls through pointers --------------------------------------------------------------------------------


def _dispatch(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Jump to the clone of the function that a register points to."""
    pointer, table = instruction.operands
    assert isinstance(table, Name)
    program = m.program
    targets = dict(zip(program.callees[table.name], program.tables[table.name], strict=True))
    read = reader(m, instruction, pointer, "u64")

    def run(group: Group, active: Mask) -> int | None:
        values = np.broadcast_to(read(), m.threads)
        chosen = m.full(active)
        rest = m.leave(group, active)
        for value in np.unique(values[chosen]).tolist():
            mine = chosen & (values == np.uint64(value))
            if value not in targets:
                names = {at: name for name, at in program.functions.items()}
                what = f"call of {names.get(value, f'address {value:#x}')}, which is no function of this type"
                raise m.fault("out of bounds", pc, int(np.flatnonzero(mine)[0]), what)
            if m.profiler is not None:
                m.profiler.diverged(pc, mine, chosen & (values > np.uint64(value)))
            m.groups.append(Group(program.labels[targets[value]], m.simplify(mine)))
        return m.go_on(group, rest)

    return ReadyStep(run, plain=False)


def _refuse(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    (what,) = instruction.operands
    assert isinstance(what, Name)

    def run(group: Group, active: Mask) -> int | None:
        raise UnknownInstruction(f"{what.name}\n  at {m.program.where(pc)}")

    return ReadyStep(run, plain=False)


BUILDERS: dict[str, Builder] = {"host": _host, "dispatch": _dispatch, "refuse": _refuse}
