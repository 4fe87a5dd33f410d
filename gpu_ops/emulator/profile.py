"""What a launch did, counted exactly: instructions, memory traffic, bank conflicts, tensor-core work, divergence.

Counts are of the PTX and of the launch's own addresses; nothing is timed. What they do not say: registers and spills
(ptxas decides those: :mod:`gpu_ops.kernels.cubin`), cache hits in L1, and the order in which blocks run.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import PurePath
from typing import Any, TypeVar

from gpu_ops.emulator.opclass import CLASSES
from gpu_ops.emulator.traffic import SECTOR

__all__ = ["BufferProfile", "Counts", "InstructionProfile", "LineProfile", "Profile", "where"]


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


@dataclass(frozen=True, repr=False)
class Profile:
    """The counts of one launch; ``print(profile)`` shows them as tables.

    Attributes
    ----------
    kernel : str
    grid, block : tuple of int
    blocks : int
        How many ran: fewer than the grid has when the launch was sampled. All counts are of these.
    dynamic_shared_bytes : int
    l2_bytes : int
        The L2 cache that :attr:`dram_bytes` reckons with: of the preset of the architecture compiled for.
    instructions : tuple of InstructionProfile
        In program order; functions that were called are inlined.
    buffers : tuple of BufferProfile
    multiply_adds : dict
        Of the tensor cores, by type: ``f16``, ``bf16``, ``tf32``, ``s8``, ...
    ptx : str
        What ran, for instance to learn registers and spills from ptxas.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    blocks: int
    dynamic_shared_bytes: int
    l2_bytes: int
    instructions: tuple[InstructionProfile, ...]
    buffers: tuple[BufferProfile, ...]
    multiply_adds: Mapping[str, int]
    ptx: str
    sources: Mapping[str, str]  # text of files that are not on disk

    # -- sums -----------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> Counts:
        """Over all instructions."""
        return total(self.instructions, Counts)

    def by(self, key: Callable[[InstructionProfile], Any]) -> dict[Any, Counts]:
        """Counts of the instructions that ran, by any property of theirs, such as ``lambda i: i.form``."""
        groups: dict[Any, list[Counts]] = {}
        for i in self.instructions:
            if i.warps:
                groups.setdefault(key(i), []).append(i)
        return {name: total(group, Counts) for name, group in groups.items()}

    @cached_property
    def opcodes(self) -> dict[str, Counts]:
        """By opcode, most issued first."""
        found = self.by(lambda i: i.form.partition(".")[0])
        return dict(sorted(found.items(), key=lambda item: -item[1].warps))

    @cached_property
    def classes(self) -> dict[str, Counts]:
        """By class of instruction (:data:`~gpu_ops.emulator.opclass.CLASSES`)."""
        found = self.by(lambda i: i.kind)
        return {name: found[name] for name in CLASSES if name in found}

    def lines(self, *, inlined: bool = False) -> list[LineProfile]:
        """By line of the source, most costly first: of the kernel, or ``inlined`` of what it calls as well."""
        groups: dict[tuple[str, int], list[InstructionProfile]] = {}
        for i in self.instructions:
            if i.warps:
                groups.setdefault(i.places[0] if inlined and i.places else i.place, []).append(i)
        found = [
            total(
                group,
                LineProfile,
                file=file,
                line=line,
                text=self._text(file, line) if file else group[0].ptx,
            )
            for (file, line), group in groups.items()
        ]
        return sorted(found, key=lambda line: -line.cost)

    def _text(self, file: str, line: int) -> str:
        if file in self.sources:
            lines = self.sources[file].splitlines()
            return lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return linecache.getline(file, line).strip()

    # -- memory ---------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        """From global memory, as asked for by lanes."""
        return sum(b.bytes_read for b in self.buffers)

    @property
    def bytes_written(self) -> int:
        return sum(b.bytes_written for b in self.buffers)

    def moved(self, l2_bytes: int | None = None) -> tuple[int, ...]:
        """Bytes that each buffer moves between the L2 cache and DRAM, by a simple model.

        Of the buffers with sectors that are asked for more than once, the smallest stay in the cache, as many as fit
        in it together; they move each sector once per direction. The others move every sector of every request.
        So a large input read twice counts twice, which is the upper bound: a second pass that follows closely
        finds some of it in the cache. ``l2_bytes=0`` leaves the cache out.
        """
        left = self.l2_bytes if l2_bytes is None else l2_bytes
        result = [b.most_bytes for b in self.buffers]
        for i in sorted(range(len(result)), key=lambda i: self.buffers[i].footprint):
            b = self.buffers[i]
            if b.most_bytes > b.least_bytes and SECTOR * b.footprint <= left:
                left -= SECTOR * b.footprint
                result[i] = b.least_bytes
        return tuple(result)

    @property
    def dram_bytes(self) -> int:
        """:meth:`moved` by all buffers with the default cache."""
        return sum(self.moved())

    @property
    def least_bytes(self) -> int:
        """DRAM traffic if every sector moved once each way."""
        return sum(b.least_bytes for b in self.buffers)

    @property
    def cp_async_bytes(self) -> int:
        """Read by ``cp.async``; bytes it fills with zeros are not read."""
        return sum(i.global_bytes for i in self.instructions if i.kind == "cp.async")

    # -- work -----------------------------------------------------------------------------------

    @cached_property
    def operations(self) -> dict[str, int]:
        """Of all lanes outside the tensor cores, by type: fp16, bf16, fp32, fp64 (an fma is 2), int."""
        found: dict[str, int] = {}
        for i in self.instructions:
            name, count = i.operations
            if count and i.lanes:
                found[name] = found.get(name, 0) + count * i.lanes
        return found

    @property
    def barriers(self) -> int:
        """Times a warp came to one."""
        return self.classes["barrier"].warps if "barrier" in self.classes else 0

    @property
    def divergent_branches(self) -> list[InstructionProfile]:
        """Branches that split warps, worst first."""
        return sorted((i for i in self.instructions if i.divergent), key=lambda i: -i.divergent)

    # -- output ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers."""

        def counts(found: Counts) -> dict[str, Any]:
            ratios = ("replays", "sectors_per_request", "sectors_per_128_bytes")
            return asdict(found) | {name: getattr(found, name) for name in ratios}

        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "blocks": self.blocks,
            "l2_bytes": self.l2_bytes,
            **counts(self.counts),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "dram_bytes": self.dram_bytes,
            "least_bytes": self.least_bytes,
            "cp_async_bytes": self.cp_async_bytes,
            "barriers": self.barriers,
            "operations": self.operations,
            "multiply_adds": dict(self.multiply_adds),
            "buffers": [
                asdict(b) | {"sectors_per_128_bytes": b.sectors_per_128_bytes, "moved": moved}
                for b, moved in zip(self.buffers, self.moved(), strict=True)
            ],
            "classes": {name: counts(found) for name, found in self.classes.items()},
            "opcodes": {name: counts(found) for name, found in self.opcodes.items()},
            "lines": [counts(line) for line in self.lines()],
        }

    def __repr__(self) -> str:
        return f"<Profile of {self.kernel}: {self.counts.warps} warp instructions of {self.blocks} blocks>"

    def __rich__(self) -> Any:
        from gpu_ops.emulator.profile_tables import render

        return render(self)

    def __str__(self) -> str:
        from gpu_ops.emulator.profile_tables import plain

        return plain(self)
