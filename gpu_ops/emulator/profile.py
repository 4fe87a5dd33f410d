"""Profile of a launch: exact counts of instructions, traffic, bank conflicts, tensor-core work, divergence.

The counts come from the PTX and from the addresses of the launch, not from timing. They do not cover registers and
spills (see :mod:`gpu_ops.kernels.compiler.cubin`), L1 hits, or the order in which blocks run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from io import StringIO
from typing import Any

from gpu_ops.emulator.counts import (
    CLASSES,
    SECTOR,
    BufferProfile,
    Counts,
    InstructionProfile,
    LineProfile,
    total,
)
from gpu_ops.emulator.signature import plain_name
from gpu_ops.emulator.syntax import source_text
from gpu_ops.kernels.compiler.progress import several

_LINES = 12  # number of hot lines shown
_SPLITS = 4  # number of warp-splitting lines shown
_WIDTH = 150
_TEXT = 64  # width of a text column in characters


@dataclass(frozen=True, repr=False)
class Profile:
    """Counts of one launch; ``print(profile)`` shows them as tables.

    Attributes
    ----------
    kernel, arch : str
        Entry, and the architecture it was compiled for, such as ``"sm_80"``.
    grid, block : tuple of int
    blocks : int
        Number of blocks that ran, fewer than in the grid for a sampled launch. All counts cover these blocks.
    dynamic_shared_bytes : int
    card : str
        Card that the launch's ``arch`` names, or the card that represents an architecture.
    l2_bytes : int
        Size of the card's L2 cache, for :attr:`dram_bytes`.
    instructions : tuple of InstructionProfile
        In program order; called functions are inlined.
    buffers : tuple of BufferProfile
    multiply_adds : dict
        Multiply-adds of the tensor cores, by type: ``f16``, ``bf16``, ``tf32``, ``s8``, ...
    ptx : str
        Program, for instance to get registers and spills from ptxas.
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
        """Name of the kernel in its source."""
        return plain_name(self.kernel)

    # ---- sums ----------------------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> Counts:
        """Sum over all instructions."""
        return total(self.instructions, Counts)

    def by(self, key: Callable[[InstructionProfile], Any]) -> dict[Any, Counts]:
        """Counts of the instructions that ran, grouped by a property such as ``lambda i: i.form``."""
        groups: dict[Any, list[Counts]] = {}
        for i in self.instructions:
            if i.warps:
                groups.setdefault(key(i), []).append(i)
        return {name: total(group, Counts) for name, group in groups.items()}

    @cached_property
    def opcodes(self) -> dict[str, Counts]:
        """Counts by opcode, most issued first."""
        opcodes = self.by(lambda i: i.form.partition(".")[0])
        return dict(sorted(opcodes.items(), key=lambda item: -item[1].warps))

    @cached_property
    def classes(self) -> dict[str, Counts]:
        """Counts by class of instruction (``gpu_ops.emulator.counts.CLASSES``)."""
        classes = self.by(lambda i: i.kind)
        return {name: classes[name] for name in CLASSES if name in classes}

    def lines(self, *, inlined: bool = False) -> list[LineProfile]:
        """Counts by source line, most costly first; with ``inlined``, lines of called functions count separately."""
        groups: dict[tuple[str, int], list[InstructionProfile]] = {}
        for i in self.instructions:
            if i.warps:
                groups.setdefault(i.places[0] if inlined and i.places else i.place, []).append(i)
        profiles = []
        for (file, line), group in groups.items():
            text = source_text(self.sources, file, line) if file else group[0].ptx
            profiles.append(total(group, LineProfile, file=file, line=line, text=text))
        return sorted(profiles, key=lambda line: -line.cost)

    # ---- memory --------------------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        """Bytes that lanes requested from global memory."""
        return sum(b.bytes_read for b in self.buffers)

    @property
    def bytes_written(self) -> int:
        """Bytes that lanes wrote to global memory."""
        return sum(b.bytes_written for b in self.buffers)

    def moved(self, l2_bytes: int | None = None) -> tuple[int, ...]:
        """Bytes that each buffer moves between the L2 cache and DRAM, by a simple model.

        Of the buffers with sectors that are requested more than once, the smallest stay in the cache, as many as fit
        together; they move each sector once in each direction. The others move every sector of every request, so a
        large input that is read twice counts twice. That is an upper bound: a second pass that follows closely finds
        part of it in the cache. ``l2_bytes=0`` models no cache.
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
        """Sum of :meth:`moved` with the default cache."""
        return sum(self.moved())

    @property
    def least_bytes(self) -> int:
        """DRAM traffic if every sector moved once in each direction."""
        return sum(b.least_bytes for b in self.buffers)

    @property
    def cp_async_bytes(self) -> int:
        """Bytes that ``cp.async`` reads, without those that it fills with zeros."""
        return sum(i.global_bytes for i in self.instructions if i.kind == "cp.async")

    # ---- work ----------------------------------------------------------------------------------------------

    @cached_property
    def operations(self) -> dict[str, int]:
        """Operations of all lanes outside the tensor cores, by type: fp16, bf16, fp32, fp64 (an fma is 2), int."""
        totals: dict[str, int] = {}
        for i in self.instructions:
            name, count = i.operations
            if count and i.lanes:
                totals[name] = totals.get(name, 0) + count * i.lanes
        return totals

    @property
    def barriers(self) -> int:
        """Barriers that warps executed."""
        return self.classes["barrier"].warps if "barrier" in self.classes else 0

    @property
    def divergent_branches(self) -> list[InstructionProfile]:
        """Branches that split warps, worst first."""
        return sorted((i for i in self.instructions if i.divergent), key=lambda i: -i.divergent)

    # ---- output --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Convert the profile to plain dicts, lists and numbers."""

        def counts(found: Counts) -> dict[str, Any]:
            ratios = ("replays", "sectors_per_request", "sectors_per_128_bytes")
            return asdict(found) | {name: getattr(found, name) for name in ratios}

        names = ["kernel", "arch", "blocks", "card", "l2_bytes", "bytes_read", "bytes_written", "dram_bytes"]
        names += ["least_bytes", "cp_async_bytes", "barriers", "operations"]
        return {
            **{name: getattr(self, name) for name in names},
            "grid": list(self.grid),
            "block": list(self.block),
            **counts(self.counts),
            "multiply_adds": dict(self.multiply_adds),
            "buffers": [
                asdict(b) | {"sectors_per_128_bytes": b.sectors_per_128_bytes, "moved": moved}
                for b, moved in zip(self.buffers, self.moved(), strict=True)
            ],
            "classes": {name: counts(group) for name, group in self.classes.items()},
            "opcodes": {name: counts(group) for name, group in self.opcodes.items()},
            "lines": [counts(line) for line in self.lines()],
        }

    def __repr__(self) -> str:
        ran = several(self.counts.warps, "warp instruction")
        return f"<Profile of {self.name}: {ran} of {several(self.blocks, 'block')}>"

    def __rich__(self) -> Any:
        return _render(self)

    def __str__(self) -> str:
        """Return the tables as text without colours."""
        from rich.console import Console

        text = StringIO()
        look: dict[str, Any] = {"force_terminal": False, "color_system": None, "legacy_windows": False}
        Console(file=text, width=_WIDTH, **look).print(_render(self))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _render(profile: Profile) -> Any:
    """Render the tables as a rich object."""
    from rich.console import Group
    from rich.text import Text

    parts = [Text(_title(profile), style="bold"), *(Text("  " + line) for line in _summary(profile))]
    parts += [_buffers(profile), _mix(profile), _hot_lines(profile)]
    return Group(*parts)


def _title(profile: Profile) -> str:
    grid = " x ".join(map(str, profile.grid))
    block = " x ".join(map(str, profile.block))
    of = math.prod(profile.grid)
    ran = "" if profile.blocks == of else f", {profile.blocks} of {of} blocks ran"
    return f"{profile.name}: grid {grid}, block {block}{ran}"


def _size(count: float) -> str:
    """Format a number of bytes, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _summary(profile: Profile) -> list[str]:
    c = profile.counts
    lines = [
        f"global memory: {_size(profile.bytes_read)} read, {_size(profile.bytes_written)} written by lanes; "
        f"{_size(SECTOR * c.sectors)} in sectors, {c.sectors_per_128_bytes:.2f} per 128 B (4 is perfect)",
        f"DRAM: {_size(profile.dram_bytes)} with {_size(profile.l2_bytes)} of L2 ({profile.card}); "
        f"{_size(profile.least_bytes)} if every sector moved once",
    ]
    if c.shared_requests:
        lines.append(
            f"shared memory: {several(c.shared_requests, 'request')}, {_size(c.shared_bytes)}; "
            f"{several(c.waves, 'wave')}, {c.ideal_waves:,} ideal, {several(c.replays, 'bank-conflict replay')}"
        )
    work = [f"{count:,} {name}" for name, count in sorted(profile.operations.items())]
    work += [f"{2 * macs:,} {dtype} in tensor cores" for dtype, macs in sorted(profile.multiply_adds.items())]
    if work:
        lines.append("operations: " + ", ".join(work))
    counted = (
        (profile.cp_async_bytes, f"cp.async: {_size(profile.cp_async_bytes)}"),
        (c.local_bytes, f"local memory: {_size(c.local_bytes)}"),
        (c.atomics, f"atomics: {several(c.atomics, 'lane')}"),
        (profile.barriers, f"barriers: {several(profile.barriers, 'warp')}"),
    )
    other = [text for count, text in counted if count]
    if other:
        lines.append("; ".join(other))
    split = sorted((line for line in profile.lines() if line.divergent), key=lambda line: -line.divergent)
    if split:
        places = ", ".join(f"{line.divergent:,} at {line.where}" for line in split[:_SPLITS])
        lines.append(f"divergence: {several(c.divergent, 'time')} a warp split: {places}")
    return lines


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        text = column in ("most issued", "source")
        table.add_column(column, justify="left" if text or not i else "right", no_wrap=not text)
    return table


def _add(table: Any, *cells: str) -> None:
    from rich.text import Text  # in a str, rich would take brackets as markup

    table.add_row(*map(Text, cells))


def _buffers(profile: Profile) -> Any:
    ratios = ("times read", "sectors/req", "per 128 B")
    table = _table("Buffers", "", "size", "read", "written", "touched", *ratios, "DRAM")
    for b, moved in zip(profile.buffers, profile.moved(), strict=True):
        sizes = map(_size, (b.size, b.bytes_read, b.bytes_written, SECTOR * b.footprint))
        values = (b.times_read, b.sectors_per_request, b.sectors_per_128_bytes)
        _add(table, b.name, *sizes, *(f"{value:.2f}" for value in values), _size(moved))
    return table


def _mix(profile: Profile) -> Any:
    table = _table("Instructions", "class", "warps", "share", "lanes/warp", "most issued")
    issued = max(1, profile.counts.warps)
    forms = profile.by(lambda i: (i.kind, i.form))
    for name, c in profile.classes.items():
        top = sorted(
            ((f.warps, form) for (category, form), f in forms.items() if category == name),
            reverse=True,
        )
        most_issued = ", ".join(f"{form} {warps:,}" for warps, form in top[:3])
        share, lanes = f"{c.warps / issued:.1%}", f"{c.lanes / max(1, c.warps):.1f}"
        _add(table, name, f"{c.warps:,}", share, lanes, _shortened(most_issued))
    return table


def _hot_lines(profile: Profile) -> Any:
    costs = ("sectors", "per 128 B", "replays", "splits")
    table = _table("Lines that cost most", "line", "warps", *costs, "source")
    for line in profile.lines()[:_LINES]:
        _add(table, line.where, f"{line.warps:,}", *_line_costs(line), _shortened(line.text))
    return table


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def _line_costs(line: LineProfile) -> tuple[str, str, str, str]:
    return (
        f"{line.sectors:,}" if line.sectors else "",
        f"{line.sectors_per_128_bytes:.2f}" if line.sectors else "",
        f"{line.replays:,}" if line.replays else "",
        f"{line.divergent:,}" if line.divergent else "",
    )
