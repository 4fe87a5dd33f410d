"""Counts of a profile: classes of instructions, counts per instruction, per source line and per buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, TypeVar

from gpu_ops.emulator.instructions import FLOAT
from gpu_ops.emulator.syntax import Instruction

SECTOR = 32  # bytes of global memory that move together

# Classes of the instruction mix in display order, with their opcodes. The type or the state space of an instruction
# decides the classes without opcodes.
_OPCODES = {
    "tensor core": "mma wgmma wmma",
    "float": "",
    "special": "ex2 lg2 sin cos tanh rsqrt rcp sqrt",
    "integer": "",
    "convert": "cvt",
    "move": "mov cvta selp prmt isspacep",
    "global": "",
    "shared": "ldmatrix stmatrix",
    "local": "",
    "constant": "",
    "generic": "",
    "atomic": "atom red",
    "cp.async": "cp",
    "warp": "shfl vote match redux elect activemask movmatrix",
    "barrier": "bar barrier mbarrier",
    "control": "bra brx ret exit trap brkpt nanosleep dispatch refuse host",
    "other": "membar fence prefetch prefetchu discard griddepcontrol setmaxnreg",
}
CLASSES = tuple(_OPCODES)
_CLASS_OF = {opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_SPACES = {"global": "global", "shared": "shared", "local": "local", "param": "constant", "const": "constant"}

_FLOPS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "fma": 2, "mad": 2}
_INTEGER_OPERATIONS = {"mad": 2, "mad24": 2, "madc": 2, "dp4a": 8, "dp2a": 4}
_FLOAT_NAMES = {"f32": "fp32", "f64": "fp64", "f16": "fp16", "bf16": "bf16"}


def classify(instruction: Instruction) -> str:
    """Class of an instruction, one of :data:`CLASSES`."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "ldu", "st"):
        spaces = (_SPACES.get(word.partition("::")[0]) for word in modifiers)
        return next((space for space in spaces if space), "generic")
    if opcode in _CLASS_OF:
        return _CLASS_OF[opcode]
    return "float" if modifiers and modifiers[-1] in FLOAT else "integer"


def operations(instruction: Instruction) -> tuple[str, int]:
    """Type (fp16, bf16, fp32, fp64, int or "") and number of operations per lane.

    A fused multiply-add counts as two operations and a special function as one; comparisons, selections and moves
    count as none. Every arithmetic, bit and logic instruction on integers counts, including address arithmetic.
    Packed types count twice.
    """
    opcode, instruction_class = instruction.opcode, classify(instruction)
    if instruction_class in ("float", "special"):
        ptx_type = instruction.modifiers[-1]
        packed = ptx_type.endswith("x2")
        count = 1 if instruction_class == "special" else _FLOPS.get(opcode, 0)
        return _FLOAT_NAMES[ptx_type.removesuffix("x2")] if count else "", count * (1 + packed)
    if instruction_class == "integer" and opcode not in ("setp", "set"):
        return "int", _INTEGER_OPERATIONS.get(opcode, 1)
    return "", 0


@dataclass(frozen=True)
class Counts:
    """Counts of one instruction, or the sum over a source line, an opcode or the launch.

    A request is one instruction of one warp. For shared memory, ``waves`` is the number of waves that the requests
    take, ``phases`` the number without bank conflicts, and ``ideal_waves`` the number if each wave moved 128 bytes.
    """

    warps: int = 0  # issued
    lanes: int = 0  # those whose guard was true
    divergent: int = 0  # times a branch split a warp
    global_requests: int = 0
    global_bytes: int = 0  # requested by lanes; likewise below
    sectors: int = 0  # of 32 bytes, distinct per request
    shared_requests: int = 0
    shared_bytes: int = 0
    waves: int = 0
    phases: int = 0
    ideal_waves: int = 0
    local_bytes: int = 0
    atomics: int = 0  # lanes

    @property
    def replays(self) -> int:
        """Waves that bank conflicts cost."""
        return self.waves - self.phases

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.global_requests if self.global_requests else 0.0

    @property
    def sectors_per_128_bytes(self) -> float:
        """Sectors per 128 requested bytes; 4 is ideal. Less: lanes share bytes. More: unrequested bytes move."""
        return 128 * self.sectors / self.global_bytes if self.global_bytes else 0.0


def where(file: str, line: int) -> str:
    """Name of a line, such as ``rmsnorm.cu:35`` or ``PTX line 120``."""
    return f"{PurePath(file).name}:{line}" if file else f"PTX line {line}"


_NAMES = tuple(field.name for field in fields(Counts))
_C = TypeVar("_C", bound=Counts)


def total(parts: Iterable[Counts], kind: type[_C], **given: Any) -> _C:
    """Sum of counts, as an instance of ``kind`` whose other fields are ``given``."""
    rows = [[getattr(part, name) for name in _NAMES] for part in parts]
    return kind(**given, **dict(zip(_NAMES, map(sum, zip(*rows, strict=True)), strict=False)))


@dataclass(frozen=True, kw_only=True)
class InstructionProfile(Counts):
    """One instruction of the program."""

    pc: int
    ptx_line: int
    ptx: str
    form: str  # "ld.global.v4.u32"
    kind: str  # one of CLASSES
    places: tuple[tuple[str, int], ...]  # (file, line), innermost of inlined functions first; () if unknown
    operations: tuple[str, int]  # per lane, such as ("fp32", 2)

    @property
    def place(self) -> tuple[str, int]:
        """Place (file, line) in the kernel itself; ("", PTX line) without line information."""
        return self.places[-1] if self.places else ("", self.ptx_line)


@dataclass(frozen=True, kw_only=True)
class LineProfile(Counts):
    """One line of the source, or of the PTX if there is no line information."""

    file: str
    line: int
    text: str

    @property
    def cost(self) -> int:
        """Issue slots plus sectors plus waves: a rough measure to rank lines, not a time."""
        return self.warps + self.sectors + self.waves

    @property
    def where(self) -> str:
        """Name of the line, such as ``rmsnorm.cu:35``."""
        return where(self.file, self.line)


@dataclass(frozen=True)
class BufferProfile:
    """Traffic of one array argument (arguments that share memory count as one), or of a global variable."""

    name: str
    size: int  # bytes
    requests: int
    bytes: int  # requested by lanes; an atomic counts once here, and below as a read and a write
    sectors: int
    bytes_read: int
    bytes_written: int
    sectors_read: int
    sectors_written: int
    footprint: int  # distinct sectors; likewise below
    footprint_read: int
    footprint_written: int
    atomics: int  # lanes

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def sectors_per_128_bytes(self) -> float:
        """See :attr:`Counts.sectors_per_128_bytes`."""
        return 128 * self.sectors / self.bytes if self.bytes else 0.0

    @property
    def times_read(self) -> float:
        """Average number of reads of a sector: 2 for a kernel that makes two passes over its input."""
        return self.sectors_read / self.footprint_read if self.footprint_read else 0.0

    @property
    def least_bytes(self) -> int:
        """Traffic if every sector moved once in each direction."""
        return SECTOR * (self.footprint_read + self.footprint_written)

    @property
    def most_bytes(self) -> int:
        """Traffic if every request moved its sectors."""
        return SECTOR * (self.sectors_read + self.sectors_written)
