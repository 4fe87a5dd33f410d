"""What a launch did, counted exactly: instructions, memory traffic, bank conflicts, tensor-core work, divergence.

Counts are of the PTX and of the launch's own addresses; nothing is timed. What they do not say: registers and spills
(ptxas decides those: :mod:`gpu_ops.kernels.compiler.cubin`), cache hits in L1, and the order in which blocks run.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gpu_ops.emulator.counts import BufferProfile, Counts, InstructionProfile, LineProfile, several, total
from gpu_ops.emulator.opclass import CLASSES
from gpu_ops.emulator.program import plain_name
from gpu_ops.emulator.traffic import SECTOR

__all__ = ["Profile"]


@dataclass(frozen=True, repr=False)
class Profile:
    """The counts of one launch; ``print(profile)`` shows them as tables.

    Attributes
    ----------
    kernel, arch : str
        The entry; the architecture compiled for, such as ``"sm_80"``.
    grid, block : tuple of int
    blocks : int
        How many ran: fewer than the grid has when the launch was sampled. All counts are of these.
    dynamic_shared_bytes : int
    card : str
    l2_bytes : int
        The card whose L2 cache :attr:`dram_bytes` reckons with: the one that ``arch`` of the launch names, or the one
        that stands for an architecture.
    instructions : tuple of InstructionProfile
        In program order; functions that were called are inlined.
    buffers : tuple of BufferProfile
    multiply_adds : dict
        Of the tensor cores, by type: ``f16``, ``bf16``, ``tf32``, ``s8``, ...
    ptx : str
        What ran, for instance to learn registers and spills from ptxas.
    """

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    blocks: int
    dynamic_shared_bytes: int
    card: str
    l2_bytes: int
    instructions: tuple[InstructionProfile, ...]
    buffers: tuple[BufferProfile, ...]
    multiply_adds: Mapping[str, int]
    ptx: str
    sources: Mapping[str, str]  # text of files that are not on disk

    @property
    def name(self) -> str:
        """The kernel's name as its source has it: Numba mangles it with its module and types."""
        return plain_name(self.kernel)

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
            "arch": self.arch,
            "grid": list(self.grid),
            "block": list(self.block),
            "blocks": self.blocks,
            "card": self.card,
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
        ran = several(self.counts.warps, "warp instruction")
        return f"<Profile of {self.name}: {ran} of {several(self.blocks, 'block')}>"

    def __rich__(self) -> Any:
        from gpu_ops.emulator.profile_tables import render

        return render(self)

    def __str__(self) -> str:
        from gpu_ops.emulator.profile_tables import plain

        return plain(self)
