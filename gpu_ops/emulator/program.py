"""Links an entry of a module into one flat program: calls inlined, labels resolved, variables laid out.

A device function is cloned at each call, and its parameters are bound to the caller's ``.param`` variables, which
become per-thread memory. The machine therefore needs no stack and no scopes: a call disappears and a return is a
branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpu_ops.emulator.aot import LOCAL_BASE, SHARED_BASE
from gpu_ops.emulator.errors import EmulatorError, PtxError
from gpu_ops.emulator.syntax import (
    DTYPE,
    Address,
    Array,
    Call,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Name,
    Negated,
    Operand,
    Pair,
    Variable,
    Vector,
)

_Rename = Callable[[str], str]

_DEPTH = 64  # nested calls; deeper is taken for recursion


@dataclass
class Program:
    """What the machine runs: ``code[pc]``, and the address of every variable."""

    name: str
    module: Module
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    parameters: list[Variable] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # name -> window offset
    local: dict[str, int] = field(default_factory=dict)
    globals: list[Variable] = field(default_factory=list)
    shared_bytes: int = 0  # the static part, padded to the alignment of the dynamic part
    local_bytes: int = 0
    idle: list[Any] = field(default_factory=list, repr=False)  # machines of past launches, for reuse

    @property
    def title(self) -> str:
        return plain_name(self.name)

    def where(self, pc: int) -> str:
        """``PTX line 120: ld.global.f32 ... (rmsnorm.cu:35)``, for messages."""
        instruction = self.code[pc]
        text = f"PTX line {instruction.line}: {self.module.source_line(instruction.line)}"
        return f"{text}{self.source(pc)}"

    def source(self, pc: int) -> str:
        """`` (reduce.cuh:12, inlined at kernel.cu:35)``, or nothing without line information."""
        places = [f"{file}:{line}" for file, line in self.places(pc)]
        return f" ({', inlined at '.join(places)})" if places else ""

    def places(self, pc: int) -> Iterator[tuple[str, int]]:
        """(file, line) of an instruction, then of the line at which its function was inlined, and so on."""
        location = self.code[pc].location
        while location is not None and location.file in self.module.files:
            yield self.module.files[location.file], location.line
            location = location.caller


def plain_name(name: str) -> str:
    """A kernel's name as in its source: Numba mangles it with its module and types."""
    plain, rest = name, name.removeprefix("_ZN" if name.startswith("_ZN") else "_Z")
    while rest != name and (found := re.match(r"\d+", rest)):
        end = found.end() + int(found.group())
        plain, rest = rest[found.end() : end], rest[end:]
    return plain


def link(module: Module, name: str) -> Program:
    """The program of an entry; the :class:`EmulatorError` for an unknown name lists the entries."""
    entry = module.functions.get(name)
    if entry is None or not entry.entry:
        entries = [f.name for f in module.functions.values() if f.entry]
        raise EmulatorError(f"no kernel named {name!r}; the module has: {', '.join(entries) or 'none'}")
    linker = _Linker(module, Program(name, module))
    linker.program.parameters = entry.parameters
    linker.inline(entry, "", {}, 0)
    linker.lay_out()
    return linker.program


class _Linker:
    def __init__(self, module: Module, program: Program) -> None:
        self.module = module
        self.program = program
        self.clones = 0
        self.variables: list[Variable] = []

    def inline(self, function: Function, prefix: str, bound: dict[str, str], depth: int) -> None:
        if depth > _DEPTH:
            raise PtxError(f"{function.name} calls itself: recursion is not supported")
        program = self.program
        labels = {s.name for s in function.body if isinstance(s, Label)}
        own = {v.name for v in function.variables}
        mine = labels | own | function.registers.keys()

        def rename(name: str) -> str:
            return prefix + name if name in mine else bound.get(name, name)

        for name, ptx_type in function.registers.items():
            program.registers[prefix + name] = ptx_type
        for parameter in (*function.parameters, *function.results):
            if parameter.space == "reg":  # hand-written PTX may pass registers
                raise PtxError(f"{function.name} takes registers; pass .param variables")
        for name, targets in function.tables.items():
            program.tables[prefix + name] = [rename(t) for t in targets]
        for variable in function.variables:
            self.variables.append(replace(variable, name=rename(variable.name)))
        end = f"{prefix}end of {function.name}"
        for statement in function.body:
            if isinstance(statement, Label):
                program.labels[rename(statement.name)] = len(program.code)
            elif statement.opcode == "call":
                self.call(statement, rename, depth)
            else:
                operands = tuple(_rename(o, rename) for o in statement.operands)
                placed = statement._replace(operands=operands)
                if statement.guard is not None:
                    guard = statement.guard._replace(name=rename(statement.guard.name))
                    placed = placed._replace(guard=guard)
                if statement.opcode == "ret" and not function.entry:
                    placed = placed._replace(opcode="bra", modifiers=(), operands=(Name(end),))
                program.code.append(placed)
        program.labels[end] = len(program.code)
        if function.entry:  # falling off the end returns
            line = program.code[-1].line if program.code else 1
            program.code.append(Instruction(line, None, None, "ret", (), ()))

    def call(self, statement: Instruction, rename: _Rename, depth: int) -> None:
        call = statement.operands[0]
        assert isinstance(call, Call)
        function = self.module.functions.get(call.callee)
        if function is None or function.declared_only:
            self.program.code.append(
                statement._replace(opcode="trap", modifiers=(), operands=(Name(call.callee),))
            )
            return
        if statement.guard is not None:
            raise statement.error("a predicated call is not supported")
        self.clones += 1
        formal = (*function.results, *function.parameters)
        actual = (*call.results, *call.arguments)
        if len(formal) != len(actual) or not all(isinstance(a, Name) for a in actual):
            raise statement.error(f"{call.callee} wants {len(formal)} .param variables")
        bound = {f.name: rename(a.name) for f, a in zip(formal, actual, strict=True) if isinstance(a, Name)}
        self.inline(function, f"{self.clones}:", bound, depth + 1)

    def lay_out(self) -> None:
        """Static variables in order, then dynamic shared memory; all its symbols name one address."""
        program = self.program
        shared, local, dynamic = SHARED_BASE, LOCAL_BASE, []
        for variable in (*self.module.variables.values(), *self.variables):
            if variable.space == "shared":
                if variable.extern:
                    dynamic.append(variable)
                    continue
                shared = _round_up(shared, variable.align)
                program.shared[variable.name] = shared
                shared += variable.bytes
            elif variable.space in ("local", "param"):
                local = _round_up(local, variable.align)
                program.local[variable.name] = local
                local += variable.bytes
            else:
                program.globals.append(variable)
        if dynamic:
            shared = _round_up(shared, max(16, *(v.align for v in dynamic)))
            program.shared.update((v.name, shared) for v in dynamic)
        program.shared_bytes = shared - SHARED_BASE
        program.local_bytes = local - LOCAL_BASE


def _round_up(n: int, multiple: int) -> int:
    return -(-n // max(1, multiple)) * max(1, multiple)


def _rename(operand: Operand, rename: _Rename) -> Operand:
    match operand:
        case Name(name):
            return Name(rename(name))
        case Negated(name):
            return Negated(rename(name))
        case Address(base, offset):
            return Address(rename(base), offset)
        case Vector(parts):
            return Vector(tuple(_rename(p, rename) for p in parts))
        case Pair(first, second):
            return Pair(_rename(first, rename), _rename(second, rename))
    return operand


def immediate(operand: Immediate, ptx_type: str) -> Array:
    """A literal as an array of one element; PTX truncates a literal that is too wide."""
    text, dtype = operand.text, DTYPE[ptx_type]
    body = text.lstrip("-").rstrip("U")
    if body[:2].lower() in ("0f", "0d"):
        bits = np.array([int(body[2:], 16)], np.uint32 if body[1] in "fF" else np.uint64)
        value: Array = bits.view(np.float32 if body[1] in "fF" else np.float64)
        if dtype.kind != "f":
            return bits.astype(dtype)  # a float literal in a .b32 move
        return np.negative(value).astype(dtype) if text[0] == "-" else value.astype(dtype)
    if "." in body:
        return np.array([float(text)], dtype)
    number = int(body, 0) * (-1 if text[0] == "-" else 1)
    if dtype == np.bool_:
        return np.array([number != 0])
    if dtype.kind == "f":
        return np.array([number], dtype)
    width = 8 * dtype.itemsize
    return np.array([number & ((1 << width) - 1)], np.dtype(f"u{dtype.itemsize}")).view(dtype)


def initial_bytes(variable: Variable, addresses: dict[str, int]) -> Iterator[int]:
    """The bytes with which a global or constant variable starts."""
    for part in variable.initial:
        if isinstance(part, Immediate):
            yield from immediate(part, variable.type).tobytes()
        else:
            base = part.name if isinstance(part, Name) else part.base  # type: ignore[union-attr]
            offset = 0 if isinstance(part, Name) else part.offset  # type: ignore[union-attr]
            yield from (addresses[base] + offset).to_bytes(DTYPE[variable.type].itemsize, "little")
