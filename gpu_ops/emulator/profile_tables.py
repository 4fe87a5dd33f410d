"""A profile as tables of rich, and as plain text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from gpu_ops.emulator.counts import LineProfile, several
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.traffic import SECTOR

__all__ = ["plain", "render"]

_LINES = 12  # hot lines that are shown
_SPLITS = 4  # lines that split warps, likewise
_WIDTH = 150
_TEXT = 64  # characters of a column of text


def plain(profile: Profile) -> str:
    """The tables as text without colours."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=_WIDTH, color_system=None, legacy_windows=False).print(render(profile))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def render(profile: Profile) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts = [Text(_title(profile), style="bold"), *(Text("  " + line) for line in _summary(profile))]
    parts += [_buffers(profile), _mix(profile), _hot_lines(profile)]
    return Group(*parts)


def _title(profile: Profile) -> str:
    grid = " x ".join(map(str, profile.grid))
    block = " x ".join(map(str, profile.block))
    of = profile.grid[0] * profile.grid[1] * profile.grid[2]
    ran = "" if profile.blocks == of else f", {profile.blocks} of {of} blocks ran"
    return f"{profile.name}: grid {grid}, block {block}{ran}"


def size(count: float) -> str:
    """``1.5 MiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _summary(profile: Profile) -> list[str]:
    c = profile.counts
    lines = [
        f"global memory: {size(profile.bytes_read)} read, {size(profile.bytes_written)} written by lanes; "
        f"{size(SECTOR * c.sectors)} in sectors, {c.sectors_per_128_bytes:.2f} per 128 B (4 is perfect)",
        f"DRAM: {size(profile.dram_bytes)} with {size(profile.l2_bytes)} of L2 ({profile.card}); "
        f"{size(profile.least_bytes)} if every sector moved once",
    ]
    if c.shared_requests:
        lines.append(
            f"shared memory: {several(c.shared_requests, 'request')}, {size(c.shared_bytes)}; "
            f"{several(c.waves, 'wave')}, {c.ideal_waves:,} ideal, {several(c.replays, 'bank-conflict replay')}"
        )
    work = [f"{count:,} {name}" for name, count in sorted(profile.operations.items())]
    work += [f"{2 * macs:,} {kind} in tensor cores" for kind, macs in sorted(profile.multiply_adds.items())]
    if work:
        lines.append("operations: " + ", ".join(work))
    counted = (
        (profile.cp_async_bytes, f"cp.async: {size(profile.cp_async_bytes)}"),
        (c.local_bytes, f"local memory: {size(c.local_bytes)}"),
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
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _add(table: Any, *cells: str) -> None:
    from rich.text import Text  # a str would be markup, which eats what stands in brackets

    table.add_row(*map(Text, cells))


def _buffers(profile: Profile) -> Any:
    table = _table(
        "Buffers", "", "size", "read", "written", "touched", "times read", "sectors/req", "per 128 B", "DRAM"
    )
    for b, moved in zip(profile.buffers, profile.moved(), strict=True):
        _add(
            table,
            b.name, size(b.size), size(b.bytes_read), size(b.bytes_written), size(SECTOR * b.footprint),
            f"{b.times_read:.2f}", f"{b.sectors_per_request:.2f}", f"{b.sectors_per_128_bytes:.2f}", size(moved),
        )  # fmt: skip
    return table


def _mix(profile: Profile) -> Any:
    table = _table("Instructions", "class", "warps", "share", "lanes/warp", "most issued")
    issued = max(1, profile.counts.warps)
    forms = profile.by(lambda i: (i.kind, i.form))
    for name, c in profile.classes.items():
        top = sorted(((f.warps, form) for (kind, form), f in forms.items() if kind == name), reverse=True)
        most = ", ".join(f"{form} {warps:,}" for warps, form in top[:3])
        _add(
            table,
            name,
            f"{c.warps:,}",
            f"{c.warps / issued:.1%}",
            f"{c.lanes / max(1, c.warps):.1f}",
            _shortened(most),
        )
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def _hot_lines(profile: Profile) -> Any:
    table = _table(
        "Lines that cost most", "line", "warps", "sectors", "per 128 B", "replays", "splits", "source"
    )
    for line in profile.lines()[:_LINES]:
        _add(table, line.where, f"{line.warps:,}", *_line_costs(line), _shortened(line.text))
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
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
