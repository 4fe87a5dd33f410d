"""What is counted: per instruction, per source line, per buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, TypeVar

from gpu_ops.emulator.traffic import SECTOR

__all__ = ["BufferProfile", "Counts", "InstructionProfile", "LineProfile", "several", "total", "where"]


@dataclass(frozen=True)
class Counts:
    """What is counted for each instruction, and added up over a source line, an opcode or the launch.

    A request is one instruction of one warp. Of shared memory: ``waves`` is what the requests take, ``phases`` what
    they would take without bank conflicts, ``ideal_waves`` if each wave moved 128 bytes.
    """

    warps: int = 0  # issued
    lanes: int = 0  # of them, those whose guard was true
    divergent: int = 0  # times a branch sent the lanes of a warp two ways
    global_requests: int = 0
    global_bytes: int = 0  # asked for by lanes, here and below
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
        """4 is perfect; below: lanes read the same bytes; above: bytes move that no lane asked for."""
        return 128 * self.sectors / self.global_bytes if self.global_bytes else 0.0


def where(file: str, line: int) -> str:
    """``rmsnorm.cu:35``, ``PTX line 120``"""
    return f"{PurePath(file).name}:{line}" if file else f"PTX line {line}"


def several(count: int, what: str) -> str:
    """``1 block``, ``1,024 blocks``"""
    return f"{count:,} {what}" + "s" * (count != 1)


_NAMES = tuple(field.name for field in fields(Counts))
_C = TypeVar("_C", bound=Counts)


def total(parts: Iterable[Counts], kind: type[_C], **given: Any) -> _C:
    """The sum of counts, as a class of counts with what identifies it."""
    rows = [[getattr(part, name) for name in _NAMES] for part in parts]
    return kind(**given, **dict(zip(_NAMES, map(sum, zip(*rows, strict=True)), strict=False)))


@dataclass(frozen=True, kw_only=True)
class InstructionProfile(Counts):
    """One instruction of the program."""

    pc: int
    ptx_line: int
    ptx: str
    form: str  # "ld.global.v4.u32"
    kind: str  # one of opclass.CLASSES
    places: tuple[tuple[str, int], ...]  # (file, line), innermost of inlined functions first; () if unknown
    operations: tuple[str, int]  # of a lane: ("fp32", 2)

    @property
    def place(self) -> tuple[str, int]:
        """(file, line) in the kernel itself; of the PTX, with the file "", where there is no line information."""
        return self.places[-1] if self.places else ("", self.ptx_line)


@dataclass(frozen=True, kw_only=True)
class LineProfile(Counts):
    """One line of the source, or of the PTX where there is no line information."""

    file: str
    line: int
    text: str

    @property
    def cost(self) -> int:
        """Issue slots, sectors and waves: a rough order of lines, not a time."""
        return self.warps + self.sectors + self.waves

    @property
    def where(self) -> str:
        """``rmsnorm.cu:35``"""
        return where(self.file, self.line)


@dataclass(frozen=True)
class BufferProfile:
    """Traffic of one array argument (arguments that share memory are one), or of a global variable."""

    name: str
    size: int  # bytes
    requests: int
    bytes: int  # asked for by lanes; an atomic counts once here, and below as read and as written
    sectors: int
    bytes_read: int
    bytes_written: int
    sectors_read: int
    sectors_written: int
    footprint: int  # distinct sectors, here and below
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
        """How often each sector that is read at all was asked for: 2 for a kernel of two passes over its input."""
        return self.sectors_read / self.footprint_read if self.footprint_read else 0.0

    @property
    def least_bytes(self) -> int:
        """Traffic if every sector moved once each way."""
        return SECTOR * (self.footprint_read + self.footprint_written)

    @property
    def most_bytes(self) -> int:
        """Traffic if every request moved its sectors."""
        return SECTOR * (self.sectors_read + self.sectors_written)
