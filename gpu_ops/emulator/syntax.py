"""Data classes of PTX: types, and a :class:`Module` of functions, variables and instructions.

A register holds bits: an unsigned array, or ``bool`` for a predicate. An instruction views them in the type it names.
bfloat16, tf32, float8 and the packed types stay bits, because NumPy has no arithmetic for them; the instructions that
compute with them unpack them.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.emulator.errors import PtxError

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {
    np.bool_: "pred",
    np.int8: "s8",
    np.int16: "s16",
    np.int32: "s32",
    np.int64: "s64",
    np.uint8: "b8 u8",
    np.uint16: "b16 u16 bf16 e4m3x2 e5m2x2",
    np.uint32: "b32 u32 tf32 f16x2 bf16x2 u16x2 s16x2",
    np.uint64: "b64 u64 f32x2",
    np.float16: "f16",
    np.float32: "f32",
    np.float64: "f64",
}

#: NumPy dtype in which an instruction sees an operand of a PTX type.
DTYPE: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype) for dtype, names in _DTYPES.items() for name in names.split()
}

#: Width of each type in bits; a predicate has one.
BITS: dict[str, int] = {name: 1 if name == "pred" else 8 * dtype.itemsize for name, dtype in DTYPE.items()}


def register_dtype(ptx_type: str) -> np.dtype[Any]:
    """Dtype that holds a register declared with this type: unsigned, at least 16 bits."""
    if ptx_type == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"u{max(2, DTYPE[ptx_type].itemsize)}")


# ---- operands and instructions -----------------------------------------------------------------------------


class Location(NamedTuple):
    """Source line; ``caller`` is the line at which its function was inlined."""

    file: int
    line: int
    caller: Location | None = None


class Name(NamedTuple):
    """Name of a register, a symbol, a label, or the sink ``_``."""

    name: str


class Negated(NamedTuple):
    """Negated predicate, ``!%p``."""

    name: str


class Immediate(NamedTuple):
    """Literal. Its bits depend on the type of the instruction that uses it."""

    text: str


class Address(NamedTuple):
    """Address ``[base+offset]``; the base of an absolute address is empty."""

    base: str
    offset: int


class Vector(NamedTuple):
    """Vector operand ``{a, b, ...}``."""

    parts: tuple[Operand, ...]


class Pair(NamedTuple):
    """Pair of destinations ``d|p``."""

    first: Operand
    second: Operand


class CallOperands(NamedTuple):
    """Operands of a call: results, callee, arguments."""

    results: tuple[Operand, ...]
    callee: str
    arguments: tuple[Operand, ...]


Operand = Name | Negated | Immediate | Address | Vector | Pair | CallOperands


class Instruction(NamedTuple):
    """One instruction as the text has it."""

    line: int
    location: Location | None
    guard: Name | Negated | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def form(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    def error(self, what: str) -> PtxError:
        return PtxError(f"PTX line {self.line}: {what}")


class Label(NamedTuple):
    """Label in a function body."""

    name: str


@dataclass
class Variable:
    """Variable in a state space. It starts with the bytes of ``initial``, followed by zeros."""

    name: str
    space: str
    type: str
    align: int
    bytes: int
    initial: list[Operand] = field(default_factory=list)
    extern: bool = False


@dataclass
class Function:
    """Entry or device function. ``registers`` maps a name to its declared type."""

    name: str
    entry: bool
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)  # brx.idx targets
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # .maxntid: (128, 1, 1)
    declared_only: bool = False


@dataclass
class Module:
    """Parsed PTX file."""

    text: str
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # text of files that are not on disk

    def source_line(self, line: int) -> str:
        return self.text.splitlines()[line - 1].strip()


def source_text(sources: Mapping[str, str], file: str, line: int) -> str:
    """Line of a source file without its indentation, from ``sources`` or from disk; empty if there is none."""
    if file in sources:
        lines = sources[file].splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return linecache.getline(file, line).strip()
