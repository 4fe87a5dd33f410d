"""Access of steps to registers, and the steps of instructions that use only registers: arithmetic and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.emulator import aot
from gpu_ops.emulator.batch import Mask

# Importing a family registers its forms.
from gpu_ops.emulator.instructions import Unknown, convert, floating, integer, logic, lookup  # noqa: F401
from gpu_ops.emulator.program import immediate
from gpu_ops.emulator.state import ReadyStep, State
from gpu_ops.emulator.syntax import (
    BITS,
    DTYPE,
    Address,
    Array,
    Immediate,
    Instruction,
    Name,
    Negated,
    Operand,
    Pair,
    Vector,
)

Reader = Callable[[], Array]
Writer = Callable[[Array, Mask], None]

#: Function that makes the step of the instruction at a pc.
Builder = Callable[[State, int, Instruction], ReadyStep]

_CLOCKS = {"%clock": np.uint32, "%clock64": np.uint64, "%globaltimer": np.uint64}
_CLOCKS |= {"%clock_hi": np.uint32, "%globaltimer_lo": np.uint32, "%globaltimer_hi": np.uint32}


def reader(m: State, instruction: Instruction, operand: Operand, ptx_type: str) -> Reader:
    """Function that returns the operand viewed as ``ptx_type``: one value per thread, or one for all."""
    dtype = DTYPE[ptx_type]
    registers = m.registers
    match operand:
        case Immediate():
            value = immediate(operand, ptx_type)
            return lambda: value
        case Negated(name):
            i = _register(m, instruction, name)
            return lambda: ~registers[i]
        case Name(name) if (index := m.register(name)) is not None:
            i, held = index, m.dtypes[index]
            if held == dtype:
                return lambda: registers[i]
            if held.itemsize == dtype.itemsize:
                return lambda: registers[i].view(dtype)
            if held.itemsize > dtype.itemsize:  # the low bits
                bits = np.dtype(f"u{dtype.itemsize}")
                return lambda: registers[i].astype(bits).view(dtype)
            widened = np.dtype(f"{dtype.kind if dtype.kind in 'iu' else 'u'}{held.itemsize}")
            return lambda: registers[i].view(widened).astype(dtype)
        case Name(name) if name in _CLOCKS:
            high = name.endswith("_hi")
            return lambda: np.array([m.clock >> 32 if high else m.clock], _CLOCKS[name]).astype(dtype)
        case Name() | Address():
            value_of = _symbol(m, instruction, operand)
            return lambda: value_of().astype(dtype)
        case Vector(parts):  # packed; the first part holds the low bits
            width = BITS[ptx_type] // len(parts)
            readers = [reader(m, instruction, p, f"b{width}") for p in parts]

            def packed() -> Array:
                total = readers[0]().astype(np.uint64)
                for k, part in enumerate(readers[1:], 1):
                    total = total | part().astype(np.uint64) << np.uint64(k * width)
                return total.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)

            return packed
    raise instruction.error(f"cannot read {operand} in {instruction.form}")


def writer(m: State, instruction: Instruction, operand: Operand, ptx_type: str) -> Writer:
    """Function that stores a result of ``ptx_type`` for the threads of a mask."""
    if isinstance(operand, Vector):  # unpacked: the first part takes the low bits
        width = BITS[ptx_type] // len(operand.parts)
        dtype = np.dtype(f"u{width // 8}")
        writers = [writer(m, instruction, p, f"b{width}") for p in operand.parts]

        def unpack(value: Array, mask: Mask) -> None:
            bits = value.view(np.dtype(f"u{value.dtype.itemsize}"))
            for k, part in enumerate(writers):
                part((bits >> bits.dtype.type(k * width)).astype(dtype), mask)

        return unpack
    if not isinstance(operand, Name):
        raise instruction.error(f"cannot write {operand} in {instruction.form}")
    if operand.name == "_":
        return lambda value, mask: None
    i = _register(m, instruction, operand.name)
    registers, held = m.registers, m.dtypes[i]
    dtype = DTYPE[ptx_type]
    # A narrower result is sign- or zero-extended; a wider one is truncated.
    fill = np.dtype(f"{dtype.kind if dtype.kind in 'iu' else 'u'}{held.itemsize}")
    same = dtype == held
    viewed = dtype.itemsize == held.itemsize

    def write(value: Array, mask: Mask) -> None:
        if not same:
            if viewed:
                value = value.view(held)
            elif dtype.kind == "f":
                value = value.view(np.dtype(f"u{dtype.itemsize}")).astype(held)
            else:
                value = value.astype(fill).view(held)
        registers[i] = value if mask is None else np.where(mask, value, registers[i])

    return write


def destinations(operand: Operand) -> list[Operand]:
    """Destinations of an operand: ``d``, or both of ``d|p``."""
    return [operand.first, operand.second] if isinstance(operand, Pair) else [operand]


def parts(operand: Operand) -> tuple[Operand, ...]:
    """Elements of a vector ``{a, b, ...}``, or the operand itself."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def address(m: State, instruction: Instruction, operand: Operand) -> Reader:
    """Reader of an address ``[base+offset]`` as uint64: one per thread, or one for all."""
    if not isinstance(operand, Address):
        raise instruction.error(f"{instruction.form} wants an address, not {operand}")
    base, offset = operand
    if base and m.register(base) is not None:
        i = _register(m, instruction, base)
        registers = m.registers
        is_64bit = m.dtypes[i].itemsize == 8
        step = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if offset == 0:
            return (lambda: registers[i]) if is_64bit else (lambda: registers[i].astype(np.uint64))
        if is_64bit:
            return lambda: registers[i] + step
        narrow = np.uint32(offset & 0xFFFFFFFF)
        return lambda: (registers[i] + narrow).astype(np.uint64)
    if base:
        return _symbol(m, instruction, operand)
    value = np.array([offset], np.uint64)
    return lambda: value


def _symbol(m: State, instruction: Instruction, operand: Name | Address) -> Reader:
    """Reader of the address of a variable or parameter, in the window of its space."""
    name, offset = (operand.name, 0) if isinstance(operand, Name) else operand
    program = m.program
    for table in (program.shared, program.local):
        if name in table:
            value = np.array([table[name] + offset], np.uint64)
            return lambda: value
    if name in program.functions and isinstance(operand, Name):
        function = np.array([program.functions[name]], np.uint64)
        return lambda: function
    if name not in (v.name for v in (*program.globals, *program.parameters)):
        raise instruction.error(f"{name} is neither a register nor a variable")
    return lambda: np.array([m.memory.symbols[name] + offset], np.uint64)  # each launch allocates again


def _register(m: State, instruction: Instruction, name: str) -> int:
    i = m.register(name)
    if i is None:
        raise instruction.error(f"{name} is not a register")
    return i


# ---- arithmetic and moves ----------------------------------------------------------------------------------


def _plain(run: Callable[[Mask], Any]) -> ReadyStep:
    return ReadyStep(run, everyone=True)


def _nothing(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    for operand in instruction.operands:
        if isinstance(operand, Address):
            address(m, instruction, operand)
    return _plain(lambda mask: None)


def _createpolicy(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step that makes a cache policy: 64 opaque bits."""
    target, *sources = instruction.operands
    policy(m, instruction, target)
    for source in sources:
        if isinstance(source, Address):
            address(m, instruction, source)
        elif "cvt" in instruction.modifiers:
            policy(m, instruction, source)
        else:
            reader(m, instruction, source, "f32" if "fractional" in instruction.modifiers else "u32")
    write, value = writer(m, instruction, target, "b64"), np.zeros(1, np.uint64)
    return _plain(lambda mask: write(value, mask))


def policy(m: State, instruction: Instruction, operand: Operand) -> None:
    """Check the operand of a cache policy: a 64-bit register or an integer. It does not change any value."""
    if (
        isinstance(operand, Immediate)
        and "." not in operand.text
        and operand.text[:2].lower() not in ("0f", "0d")
    ):
        return
    i = m.register(operand.name) if isinstance(operand, Name) else None
    if i is None or m.dtypes[i].itemsize != 8:
        raise instruction.error(
            f"{instruction.form} wants a 64-bit register with a cache policy, or an integer"
        )


def without_policy(m: State, instruction: Instruction) -> list[Operand]:
    """Operands of a memory instruction without the cache policy that ``.L2::cache_hint`` adds."""
    operands = list(instruction.operands)
    if "L2::cache_hint" in instruction.modifiers:
        policy(m, instruction, operands.pop())
    return operands


def arithmetic(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of an instruction that is a pure function of its operands."""
    if not instruction.operands:
        raise Unknown(instruction.form)
    target, *sources = instruction.operands
    three = instruction.opcode in ("min", "max") and len(sources) == 3  # sm_100 has a separate form
    op = lookup(instruction.opcode + "3" * three, instruction.modifiers)
    reads, writes = list(op.reads), list(op.writes)
    carry_in, carry_out = reads[-1:] == ["cc"], writes[-1:] == ["cc"]
    if len(sources) != len(reads) - carry_in:
        wanted = len(reads) - carry_in
        raise instruction.error(f"{instruction.form} wants {wanted} sources, got {len(sources)}")
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


def _mov(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of ``mov``: copies, packs or unpacks bits, or reads a special register or the address of a variable."""
    (ptx_type,) = instruction.modifiers
    if ptx_type not in DTYPE:
        raise Unknown(instruction.form)
    target, source = instruction.operands
    read, write = reader(m, instruction, source, ptx_type), writer(m, instruction, target, ptx_type)
    return _plain(lambda mask: write(read(), mask))


_WINDOWS = {"shared": aot.SHARED_WINDOW, "local": aot.LOCAL_WINDOW}


def _cvta(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    """Step of ``cvta``: converts an address of a state space to a generic one; with ``.to``, back."""
    *words, ptx_type = instruction.modifiers
    window = np.uint64(_WINDOWS.get(words[-1].partition("::")[0], 0))
    target, source = instruction.operands
    read, write = reader(m, instruction, source, ptx_type), writer(m, instruction, target, ptx_type)
    if not window:
        return _plain(lambda mask: write(read(), mask))
    if words[0] == "to":
        return _plain(lambda mask: write(read() - window, mask))
    return _plain(lambda mask: write(read() + window, mask))


def _isspacep(m: State, pc: int, instruction: Instruction) -> ReadyStep:
    space = instruction.modifiers[0].partition("::")[0]
    target, source = instruction.operands
    read, write = reader(m, instruction, source, "u64"), writer(m, instruction, target, "pred")
    low = _WINDOWS.get(space, 0)
    high = low + aot.WINDOW_BYTES if low else aot.SHARED_WINDOW

    def run(mask: Mask) -> None:
        a = read()
        write((a >= np.uint64(low)) & (a < np.uint64(high)), mask)

    return _plain(run)


_IGNORED = (
    "discard",
    "applypriority",
    "prefetch",
    "prefetchu",
    "membar",
    "fence",
    "griddepcontrol",
    "setmaxnreg",
)
BUILDERS: dict[str, Builder] = {
    "mov": _mov,
    "cvta": _cvta,
    "isspacep": _isspacep,
    "createpolicy": _createpolicy,
    **dict.fromkeys(_IGNORED, _nothing),
}
