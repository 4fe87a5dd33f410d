"""What a PTX file says, as data: a :class:`Module` of functions, variables and instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Address", "Call", "Function", "Immediate", "Instruction", "Label", "Location", "Module", "Name", "Negated",
    "Operand", "Pair", "Variable", "Vector",
]  # fmt: skip


class Location(NamedTuple):
    """A line of the source the PTX was compiled from; ``caller``: where its function was inlined."""

    file: int
    line: int
    caller: Location | None = None


class Name(NamedTuple):
    """A register, a symbol, a label, or the sink ``_``."""

    name: str


class Negated(NamedTuple):
    """``!%p``"""

    name: str


class Immediate(NamedTuple):
    """A literal; its bits depend on the type of the instruction that uses it."""

    text: str


class Address(NamedTuple):
    """``[base+offset]``; an absolute address has no base."""

    base: str
    offset: int


class Vector(NamedTuple):
    """``{a, b, ...}``"""

    parts: tuple[Operand, ...]


class Pair(NamedTuple):
    """``d|p``"""

    first: Operand
    second: Operand


class Call(NamedTuple):
    """The operands of a call: results, callee, arguments."""

    results: tuple[Operand, ...]
    callee: str
    arguments: tuple[Operand, ...]


Operand = Name | Negated | Immediate | Address | Vector | Pair | Call


class Instruction(NamedTuple):
    """One instruction as written."""

    line: int
    location: Location | None
    guard: Name | Negated | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def form(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


class Label(NamedTuple):
    """A place in a body."""

    name: str


@dataclass
class Variable:
    """A variable in a state space: its bytes, or those of ``initial``, zero beyond."""

    name: str
    space: str
    type: str
    align: int
    bytes: int
    initial: list[Operand] = field(default_factory=list)
    extern: bool = False


@dataclass
class Function:
    """An entry or a device function. ``registers`` maps a name to its declared type."""

    name: str
    entry: bool
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)  # brx.idx targets
    declared_only: bool = False


@dataclass
class Module:
    """A parsed PTX file."""

    text: str
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # text of the files that the caller knows

    def source_line(self, line: int) -> str:
        return self.text.splitlines()[line - 1].strip()
