"""Attention against sequence length: rate and memory, one panel per pass, compared with other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perf.attention_grids import Shape
from perf.pictures.data import Machine, bandwidth_text, bytes_text, contenders, flops_text, working
from perf.pictures.style import MARGIN, SMALL, Canvas, colour, legend_height, spread
from perf.report import short_dtype
from perf.runs import Row

COLUMNS, HEIGHT, HEAD, FOOT = 2, 1.75, 0.36, 0.62  # inches: of a panel, above and below it
LEFT, RIGHT = 0.52, 1.0  # at the sides of a panel: ticks, and the values at the ends of the lines


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    scale: float
    lines: Mapping[str, Sequence[tuple[int, float]]]
    """By contender: (length, value), by length."""

    @property
    def in_memory(self) -> bool:
        return self.unit in ("MiB", "GiB")

    def text(self, value: float) -> str:
        if self.in_memory:
            return bytes_text(value)
        return flops_text(value) if self.unit == "TFLOPS" else bandwidth_text(value)


def pictures(machine: Machine) -> Iterator[tuple[str, Canvas]]:
    """One picture per dtype and heads that were measured at two lengths or more."""
    for (dtype, heads, head_dim, batch), passes in series(machine).items():
        each = f", batch {batch}" if batch else ""
        title = f"Attention in {dtype}, {heads} heads of {head_dim}{each}: {machine.name}"
        parts = ["attention", short_dtype(dtype), f"h{heads.replace('/', 'kv')}", f"d{head_dim}"]
        yield "_".join([*parts, *([f"b{batch}"] if batch else [])]), draw(machine, title, passes)


def series(machine: Machine) -> dict[tuple[str, ...], dict[str, list[Row]]]:
    """Rows of two lengths or more by dtype, heads, head_dim and batch of decoding, then by name, then by length."""
    groups: dict[tuple[str, ...], dict[str, dict[int, Row]]] = {}
    for row in [*machine.rows(), *machine.rows(grid=True)]:
        shape = Shape.parse(row["shape"]) if row["op"] == "attention" else None
        if shape and "ours_median" in row:
            heads = str(shape.nheads) + (f"/{shape.nheads_kv}" if shape.nheads != shape.nheads_kv else "")
            group = (
                row["dtype"],
                heads,
                str(shape.head_dim),
                str(shape.batch) if shape.seqlen_q == 1 else "",
            )
            groups.setdefault(group, {}).setdefault(row["name"], {})[shape.seqlen_k] = row
    several = {
        group: {name: [rows[n] for n in sorted(rows)] for name, rows in passes.items() if len(rows) > 1}
        for group, passes in groups.items()
    }
    return {group: several[group] for group in sorted(several) if several[group]}


def points(rows: Sequence[Row], value: Callable[[Row], float | None]) -> list[tuple[int, float]]:
    """Points (length, value) of the rows that have the value."""
    made = [(Shape.parse(row["shape"]), value(row)) for row in rows]
    return [(shape.seqlen_k, number) for shape, number in made if shape and number is not None]


def rates(passes: Mapping[str, Sequence[Row]]) -> Iterator[Panel]:
    for name, rows in passes.items():
        by_flops = any(row["limited_by"] == "matmul" for row in rows)
        work, unit, scale = ("flops", "TFLOPS", 1e12) if by_flops else ("bytes", "GB/s", 1e9)

        def rate(row: Row, who: str, work: str = work) -> float | None:
            return row[work] / row[f"{who}_median"] if f"{who}_median" in row else None

        lines = {who: points(rows, partial(rate, who=who)) for who in contenders(rows)}
        yield Panel(name, unit, scale, lines)


def memories(passes: Mapping[str, Sequence[Row]]) -> Iterator[Panel]:
    """Peaks beyond inputs and results."""
    for name, rows in passes.items():
        lines = {who: points(rows, partial(working, who=who)) for who in contenders(rows)}
        lines = {who: line for who, line in lines.items() if line}
        if lines:
            largest = max(value for line in lines.values() for _, value in line)
            unit, scale = ("GiB", 2.0**30) if largest >= 2**32 else ("MiB", 2.0**20)
            yield Panel(f"{name}: memory", unit, scale, lines)


def draw(machine: Machine, title: str, passes: Mapping[str, Sequence[Row]]) -> Canvas:
    panels = [*rates(passes), *memories(passes)]
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    each = HEAD + HEIGHT + FOOT
    memory = " · memory: peak beyond inputs and results, lower is better" if panels[-1].in_memory else ""
    legend = [(name, machine.contender(name)) for name in names]
    above = legend_height(legend) + 0.1
    canvas = Canvas(above + rows * each, title, f"rate: higher is faster{memory}", (machine.origin,))
    canvas.legend(legend, marker="o")
    across = (canvas.width - 2 * MARGIN) / columns
    for index, panel in enumerate(panels):
        left, top = MARGIN + index % columns * across, canvas.top + above + index // columns * each
        draw_panel(canvas, panel, left, top, across)
    return canvas


def draw_panel(canvas: Canvas, panel: Panel, left: float, top: float, across: float) -> None:
    canvas.text(left, top + HEAD / 2, panel.title, weight="bold")
    axes = canvas.axes(left + LEFT, top + HEAD, across - LEFT - RIGHT, HEIGHT)
    lengths = sorted({n for line in panel.lines.values() for n, _ in line})
    for name, line in reversed([*panel.lines.items()]):  # ours on top
        values = [value / panel.scale for _, value in line]
        style: dict[str, Any] = {"linewidth": 2.2 if name == "ours" else 1.3, "color": colour(name)}
        axes.plot([n for n, _ in line], values, marker="o", markersize=4, clip_on=False, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("sequence length")
    axes.set_ylabel(panel.unit)
    axes.grid(axis="y", color=colour("grid"), linewidth=0.8)
    axes.spines["left"].set_visible(False)
    ends = {name: line[-1] for name, line in panel.lines.items()}
    limit = axes.get_ylim()[1]
    places = spread([HEIGHT * value / panel.scale / limit for _, value in ends.values()], 0.135, HEIGHT)
    for (name, (_, value)), place in zip(ends.items(), places, strict=True):
        y = top + HEAD + HEIGHT - place
        x = left + across - RIGHT + 0.12
        canvas.mark(x, y, name, "o", 4)
        ours = name == "ours"
        style = {"weight": "bold" if ours else "normal", "name": "text" if ours else "muted"}
        canvas.text(x + 0.07, y, panel.text(value), size=SMALL - 0.5, **style)
