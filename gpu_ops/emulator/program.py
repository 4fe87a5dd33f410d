"""Linked program: one flat list of instructions, and the address of every variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.emulator.signature import Parameter, plain_name
from gpu_ops.emulator.syntax import (
    DTYPE,
    Address,
    Array,
    Immediate,
    Instruction,
    Module,
    Name,
    Negated,
    Operand,
    Pair,
    Variable,
    Vector,
    source_text,
)


@dataclass
class PtxProgram:
    """Program that the machine runs: ``code[pc]``, and the address of every variable."""

    name: str
    module: Module
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    # addresses of the table of each indirect call
    callees: dict[str, list[int]] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)  # name -> address
    parameters: list[Variable] = field(default_factory=list)
    signature: tuple[Parameter, ...] = ()  # names and types of the parameters, if they are known
    shared: dict[str, int] = field(default_factory=dict)  # name -> window offset
    local: dict[str, int] = field(default_factory=dict)
    globals: list[Variable] = field(default_factory=list)
    shared_bytes: int = 0  # the static part, padded to the alignment of the dynamic part
    local_bytes: int = 0
    idle: list[Any] = field(default_factory=list, repr=False)  # machines of past launches, for reuse

    @property
    def title(self) -> str:
        return plain_name(self.name)

    @cached_property
    def waits_for_grid(self) -> bool:
        """Whether the program uses the grid-wide barrier, which needs a cooperative launch."""
        return any(o == Name("%envreg1") for instruction in self.code for o in instruction.operands)

    @cached_property
    def uses(self) -> dict[str, tuple[int, int]]:
        """Number of times that each register is named, and number of stores that write it."""
        named, stored = Counter[str](), Counter[str]()
        for instruction in self.code:
            if instruction.guard is not None:
                named[instruction.guard.name] += 1
            for operand in instruction.operands:
                named.update(_names(operand))
            if instruction.opcode == "st":
                stored.update(_names(instruction.operands[1]))
        return {name: (n, stored[name]) for name, n in named.items()}

    def where(self, pc: int) -> str:
        """Place for messages, such as ``PTX line 120: ld.global.f32 ... (rmsnorm.cu:35)``, and the line's text."""
        return f"PTX line {self.code[pc].line}: {self.text(pc)}"

    def text(self, pc: int) -> str:
        """Text of an instruction, and its source line."""
        return f"{self.module.source_line(self.code[pc].line)}{self.source(pc)}{self._source_line(pc)}"

    def _source_line(self, pc: int) -> str:
        """Source line on a separate line: the first one in the caller's text, or else on disk."""
        places = list(self.places(pc))
        with_source = [(file, line) for file, line in places if file in self.module.sources]
        for file, line in with_source or places:
            if text := source_text(self.module.sources, file, line):
                return f"\n      {Path(file).name} line {line}: {text}"
        return ""

    def source(self, pc: int) -> str:
        """Text `` (reduce.cuh:12, inlined at kernel.cu:35)``; empty without line information."""
        places = [f"{file}:{line}" for file, line in self.places(pc)]
        return f" ({', inlined at '.join(places)})" if places else ""

    def places(self, pc: int) -> Iterator[tuple[str, int]]:
        """Pairs (file, line) of an instruction, of the line at which its function was inlined, and so on."""
        location = self.code[pc].location
        while location is not None and location.file in self.module.files:
            yield self.module.files[location.file], location.line
            location = location.caller


def _names(operand: Operand) -> Iterator[str]:
    """Names of registers and symbols in an operand."""
    match operand:
        case Name(name) | Negated(name):
            yield name
        case Address(base, _):
            yield base
        case Vector(parts):
            for part in parts:
                yield from _names(part)
        case Pair(first, second):
            yield from _names(first)
            yield from _names(second)


def immediate(operand: Immediate, ptx_type: str) -> Array:
    """Array of one element for a literal; PTX truncates a literal that is too wide."""
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
    """Initial bytes of a global or constant variable."""
    for part in variable.initial:
        if isinstance(part, Immediate):
            yield from immediate(part, variable.type).tobytes()
        else:
            base = part.name if isinstance(part, Name) else part.base  # type: ignore[union-attr]
            offset = 0 if isinstance(part, Name) else part.offset  # type: ignore[union-attr]
            yield from (addresses[base] + offset).to_bytes(DTYPE[variable.type].itemsize, "little")
