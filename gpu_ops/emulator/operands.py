"""Operands as closures: how an instruction reads its sources and writes its destinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator.errors import PtxError
from gpu_ops.emulator.program import immediate
from gpu_ops.emulator.syntax import Address, Immediate, Instruction, Name, Negated, Operand, Pair, Vector
from gpu_ops.emulator.types import BITS, DTYPE, Array

if TYPE_CHECKING:
    from gpu_ops.emulator.machine import Machine, Mask

__all__ = ["Reader", "Writer", "address", "destinations", "reader", "writer"]

Reader = Callable[[], Array]
Writer = Callable[[Array, "Mask"], None]

_CLOCKS = {"%clock": np.uint32, "%clock64": np.uint64, "%globaltimer": np.uint64}
_CLOCKS |= {"%clock_hi": np.uint32, "%globaltimer_lo": np.uint32, "%globaltimer_hi": np.uint32}


def reader(m: Machine, instruction: Instruction, operand: Operand, ptx_type: str) -> Reader:
    """A function that gives the operand viewed in ``ptx_type``: one value per thread, or one for all."""
    dtype = DTYPE[ptx_type]
    registers = m.registers
    match operand:
        case Immediate():
            value = immediate(operand, ptx_type)
            return lambda: value
        case Negated(name):
            i = _register(m, instruction, name)
            return lambda: ~registers[i]
        case Name(name) if (found := m.register(name)) is not None:
            i, held = found, m.dtypes[found]
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
        case Vector(parts):  # packed: the first part holds the low bits
            width = BITS[ptx_type] // len(parts)
            readers = [reader(m, instruction, p, f"b{width}") for p in parts]

            def packed() -> Array:
                total = readers[0]().astype(np.uint64)
                for k, part in enumerate(readers[1:], 1):
                    total = total | part().astype(np.uint64) << np.uint64(k * width)
                return total.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)

            return packed
    raise PtxError(f"PTX line {instruction.line}: cannot read {operand} in {instruction.form}")


def writer(m: Machine, instruction: Instruction, operand: Operand, ptx_type: str) -> Writer:
    """A function that stores a result of ``ptx_type`` for the threads of a mask."""
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
        raise PtxError(f"PTX line {instruction.line}: cannot write {operand} in {instruction.form}")
    if operand.name == "_":
        return lambda value, mask: None
    i = _register(m, instruction, operand.name)
    registers, held = m.registers, m.dtypes[i]
    dtype = DTYPE[ptx_type]
    # A narrower result fills a wider register by its sign or with zeros; a wider one is cut.
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
    """``d``, or both of ``d|p``."""
    return [operand.first, operand.second] if isinstance(operand, Pair) else [operand]


def address(m: Machine, instruction: Instruction, operand: Operand) -> Reader:
    """The address ``[base+offset]`` as uint64 per thread, or one for all."""
    if not isinstance(operand, Address):
        raise PtxError(f"PTX line {instruction.line}: {instruction.form} wants an address, not {operand}")
    base, offset = operand
    if base and m.register(base) is not None:
        i = _register(m, instruction, base)
        registers = m.registers
        wide = m.dtypes[i].itemsize == 8
        step = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if offset == 0:
            return (lambda: registers[i]) if wide else (lambda: registers[i].astype(np.uint64))
        if wide:
            return lambda: registers[i] + step
        narrow = np.uint32(offset & 0xFFFFFFFF)
        return lambda: (registers[i] + narrow).astype(np.uint64)
    if base:
        return _symbol(m, instruction, operand)
    value = np.array([offset], np.uint64)
    return lambda: value


def _symbol(m: Machine, instruction: Instruction, operand: Name | Address) -> Reader:
    """The address of a variable or parameter, in the window of its space."""
    name, offset = (operand.name, 0) if isinstance(operand, Name) else operand
    program = m.program
    for table in (program.shared, program.local):
        if name in table:
            value = np.array([table[name] + offset], np.uint64)
            return lambda: value
    if name not in (v.name for v in (*program.globals, *program.parameters)):
        raise PtxError(f"PTX line {instruction.line}: {name} is neither a register nor a variable")
    return lambda: np.array([m.memory.symbols[name] + offset], np.uint64)  # each launch places them anew


def _register(m: Machine, instruction: Instruction, name: str) -> int:
    i = m.register(name)
    if i is None:
        raise PtxError(f"PTX line {instruction.line}: {name} is not a register")
    return i
