"""Groups of horizontal bars from zero, or of dots on a log axis, with their values: one group per case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perf.pictures.style import MARGIN, SMALL, WIDTH, Canvas, colour, legend_height, text_width

LABELS = 3.2  # inches that the column of names may take
INDENT = 0.12
BAR, OURS, STEP = 0.105, 0.14, 0.145  # of a bar, of ours, from bar to bar
GAP, HEADING, LEAST = 0.14, 0.27, 0.30  # between groups, above an op's groups, of a group
LIMIT, AXIS = 0.2, 0.45  # above and below the bars: the name of the line, the axis


@dataclass(frozen=True)
class Bar:
    contender: str
    length: float
    text: str


@dataclass(frozen=True)
class Group:
    op: str
    name: str
    detail: str
    """The second line of the label, such as the shape."""
    bars: Sequence[Bar]
    note: str = ""
    """In place of bars."""

    @property
    def height(self) -> float:
        return max(LEAST, STEP * len(self.bars))


@dataclass(frozen=True)
class Picture:
    title: str
    subtitle: str
    caption: Sequence[str]
    axis: str
    groups: Sequence[Group]
    contenders: Sequence[tuple[str, str]]
    """(name, label), in the order of the legend."""
    percent: bool = False
    line: tuple[float, str] | None = None
    """A limit across all bars, and its name."""
    dots: bool = False
    """On a log axis, where a bar has no start. A length of 0 is a dot at the left edge."""


def draw(picture: Picture) -> Canvas:
    tops = dict(layout(picture.groups))
    height = max(top + picture.groups[index].height for index, top in tops.items()) + GAP / 2
    above = legend_height(picture.contenders) + LIMIT
    canvas = Canvas(above + height + AXIS, picture.title, picture.subtitle, picture.caption)
    top = canvas.top + above
    canvas.legend(picture.contenders, "o" if picture.dots else "s")
    left = min(LABELS, max(label_width(group) for group in picture.groups))
    width = WIDTH - left - MARGIN
    axes = canvas.bar_axes(left, top, width, height)
    axes.set_xlabel(picture.axis)
    lengths = [(bar.length, text_width(bar.text, SMALL, bold=True) + 0.1) for bar in all_bars(picture)]
    if picture.dots:
        log_axis(axes, lengths, width)
    else:
        ends = [length / (1 - text / width) for length, text in lengths]
        axes.set_xlim(0, max([*ends, 1.03 * picture.line[0] if picture.line else 0.0]) or 1.0)
        linear_axis(axes, picture)
    if picture.line:
        at, name = picture.line
        axes.axvline(at, color=colour("text"), linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        axes.annotate(
            name, (at, 0), (0, 2), textcoords="offset points", ha="center", fontsize=SMALL, annotation_clip=False
        )  # fmt: skip
    for index, start in tops.items():
        draw_labels(canvas, picture.groups, index, top + start)
        draw_marks(axes, picture, picture.groups[index], start)
    return canvas


def all_bars(picture: Picture) -> list[Bar]:
    return [bar for group in picture.groups for bar in group.bars]


def layout(groups: Sequence[Group]) -> Iterator[tuple[int, float]]:
    """Index and top of each group, in inches."""
    y, op = 0.0, None
    for index, group in enumerate(groups):
        y += HEADING if group.op != op else 0.0
        yield index, y
        y, op = y + group.height + GAP, group.op


def label_width(group: Group) -> float:
    name, detail = text_width(group.name, SMALL + 0.5), text_width(group.detail, SMALL - 0.5)
    return MARGIN + INDENT + max(name, detail) + 0.15


def draw_labels(canvas: Canvas, groups: Sequence[Group], index: int, top: float) -> None:
    group = groups[index]
    if index == 0 or groups[index - 1].op != group.op:
        canvas.text(MARGIN, top - HEADING / 2, group.op, weight="bold")
    canvas.text(MARGIN + INDENT, top + 0.075, group.name, size=SMALL + 0.5)
    canvas.text(MARGIN + INDENT, top + 0.225, group.detail, size=SMALL - 0.5, name="muted")


def draw_marks(axes: Any, picture: Picture, group: Group, start: float) -> None:
    box = {"facecolor": colour("background"), "edgecolor": "none", "pad": 0.8}
    left = axes.get_xlim()[0]
    for place, bar in enumerate(group.bars):
        y, ours = start + STEP * (place + 0.5), bar.contender == "ours"
        at = max(bar.length, left)
        if picture.dots:
            axes.plot(at, y, "o", color=colour(bar.contender), markersize=6, clip_on=False, zorder=4)
        else:
            axes.barh(y, bar.length, OURS if ours else BAR, color=colour(bar.contender), zorder=2)
        axes.annotate(
            bar.text, (at, y), (6.5 if picture.dots else 3.5, 0), textcoords="offset points", va="center",
            fontsize=SMALL - 0.5, weight="bold" if ours else "normal", color=colour("text" if ours else "muted"),
            bbox=box, zorder=3,
        )  # fmt: skip
    if group.note:
        axes.text(left, start + 0.075, f" {group.note}", va="center", fontsize=SMALL, color=colour("muted"))


def linear_axis(axes: Any, picture: Picture) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{100 * x:.0f} %" if picture.percent else f"{x:,.4g}")
    )


def log_axis(axes: Any, lengths: Sequence[tuple[float, float]], width: float) -> None:
    """Log axis from the power of ten below the smallest length; the longest text fits on the right."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    positive = [math.log10(length) for length, _ in lengths if length > 0] or [0.0]
    first = math.floor(min(positive)) - any(length <= 0 for length, _ in lengths)
    last = max(first + (math.log10(n) - first) / (1 - text / width) for n, text in lengths if n > 0)
    axes.set(xscale="log", xlim=(10.0**first, 10.0**last))
    axes.xaxis.set_major_locator(LogLocator(10, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"1e{math.log10(x):.0f}"))
