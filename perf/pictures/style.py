"""Colours, text, labels and files of all pictures: an SVG that follows the reader's light or dark theme.

Matplotlib draws in the light colours. ``save`` adds a style sheet that exchanges them if the reader prefers dark.
The background is painted in both themes, so a picture stays readable if page and system disagree. Text stays text,
in the first font of a list that the reader has.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

THEME = {  # name: (light, dark)
    "background": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#dde3e9", "#2b323b"),
    "ours": ("#0072b2", "#4fb0f0"),
    "torch": ("#d05a00", "#f08c3e"),
    "torch_flash": ("#b0508a", "#e094c0"),
    "torch_cudnn": ("#00825e", "#2fc296"),
    "torch_efficient": ("#8a6a00", "#dcb43c"),
    "torch_math": ("#7a5c48", "#b89a86"),
    "numba": ("#4b52c4", "#9da4ff"),
    "cublas": ("#2e7d8c", "#5cc4d4"),
    "naive": ("#7a838d", "#8b949e"),
}
"""After Okabe and Ito, each at a contrast of at least 3 to its background, text at 4.5."""
SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

WIDTH = 8.5  # inches: 816 pixels, and heights are whole pixels too
MARGIN = 0.18
TEXT, SMALL, TITLE = 9.0, 8.0, 12.5  # points
TOP, LINE = 0.8, 0.16  # inches of title and subtitle, and of a line of the caption
LEGEND_LINE, LEGEND_GAP = 0.2, 0.34  # inches: height of a line, width of an entry in addition to its text
DPI = 100.0
Entry = tuple[str, str]
"""Of a legend: the name of its colour, and its text."""
SETTINGS: Any = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "gpu_ops",  # the same file for the same data
    "font.family": "DejaVu Sans",  # wider than the fonts of the list: text that fits in it fits in those
    "font.size": TEXT,
    "text.color": THEME["text"][0],
    "axes.edgecolor": THEME["muted"][0],
    "axes.labelcolor": THEME["muted"][0],
    "axes.labelsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": THEME["muted"][0],
    "ytick.color": THEME["muted"][0],
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


def settings() -> AbstractContextManager[None]:
    """Matplotlib's settings while pictures are drawn and saved."""
    import matplotlib as mpl

    return mpl.rc_context(SETTINGS)


def colour(name: str) -> str:
    """Light colour of a contender or a part; peers without a colour are grey."""
    return THEME.get(name, THEME["naive"])[0]


@cache
def text_width(text: str, size: float = TEXT, *, mono: bool = False, bold: bool = False) -> float:
    """Width of a text in inches."""
    from matplotlib.font_manager import FontProperties

    family, weight = "DejaVu Sans Mono" if mono else "DejaVu Sans", "bold" if bold else "normal"
    font = FontProperties(family=family, size=size, weight=weight)
    width, _, _ = renderer().get_text_width_height_descent(text, font, False)
    return float(width) / DPI


@cache
def renderer() -> Any:
    """Renderer that measures text."""
    from matplotlib.backends import backend_agg

    agg: Any = backend_agg
    return agg.RendererAgg(1, 1, DPI)


def legend_rows(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Rows of a legend with as many entries as fit."""
    rows: list[list[Entry]] = [[]]
    used = 0.0
    for name, text in entries:
        width = LEGEND_GAP + text_width(text, SMALL)
        if rows[-1] and used + width > WIDTH - 2 * MARGIN:
            rows.append([])
            used = 0.0
        rows[-1].append((name, text))
        used += width
    return rows


def legend_height(entries: Sequence[Entry]) -> float:
    return LEGEND_LINE * len(legend_rows(entries))


class Canvas:
    """A figure whose positions are inches from its upper left corner: title, subtitle, axes, caption."""

    def __init__(self, height: float, title: str, subtitle: str, caption: Iterable[str]) -> None:
        from matplotlib.figure import Figure

        lines = list(caption)
        self.title = title
        self.top = TOP
        self.width, self.height = WIDTH, math.ceil((TOP + height + LINE * len(lines) + MARGIN) * 24) / 24
        self.figure = Figure(figsize=(self.width, self.height), facecolor=colour("background"))
        self.text(MARGIN, MARGIN + 0.12, title, size=TITLE, weight="bold")
        self.text(MARGIN, MARGIN + 0.38, subtitle, size=SMALL, name="muted")
        for index, line in enumerate(reversed(lines)):
            self.text(MARGIN, self.height - MARGIN - LINE * index, line, size=SMALL - 0.5, name="muted")

    def text(self, x: float, y: float, text: str, *, name: str = "text", **style: Any) -> None:
        """Draw text centred on the line at ``y``; ``ha`` and ``family`` as in Matplotlib."""
        style = {"va": "center", "color": colour(name), **style}
        style["fontsize"] = style.pop("size", TEXT)
        self.figure.text(x / self.width, 1 - y / self.height, text, **style)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        box = (
            left / self.width,
            1 - (top + height) / self.height,
            width / self.width,
            height / self.height,
        )
        axes = self.figure.add_axes(box, facecolor="none")
        axes.set_axisbelow(True)
        return axes

    def bar_axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Axes with y in inches downwards, no frame, and light lines at the ticks of x."""
        axes = self.axes(left, top, width, height)
        axes.set_ylim(height, 0)
        axes.set_yticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="x", color=colour("grid"), linewidth=0.8)
        return axes

    def inches(self, axes: Any, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Points of the axes' data in inches from its lower left corner."""
        corner = axes.transAxes.transform((0, 0))
        return [tuple((axes.transData.transform(point) - corner) / self.figure.dpi) for point in points]

    def legend(self, entries: Sequence[Entry], marker: str = "s") -> None:
        """Draw the legend below the subtitle."""
        for index, row in enumerate(legend_rows(entries)):
            x, y = MARGIN + 0.06, self.top + LEGEND_LINE * index
            for name, text in row:
                self.mark(x, y, name, marker)
                self.text(x + 0.1, y, text, size=SMALL)
                x += LEGEND_GAP + text_width(text, SMALL)

    def mark(self, x: float, y: float, name: str, marker: str, size: float = 7) -> None:
        from matplotlib.lines import Line2D

        place = ([x / self.width], [1 - y / self.height])
        style: dict[str, Any] = {
            "color": colour(name),
            "markersize": size,
            "markeredgewidth": 0,
            "linestyle": "none",
        }
        self.figure.add_artist(Line2D(*place, marker=marker, **style))

    def save(self, path: Path) -> Path:
        out = StringIO()
        # without these, the file would contain its date and matplotlib's version
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(out, format="svg", facecolor=colour("background"), metadata=metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(themed(out.getvalue(), self.title), encoding="utf-8")
        return path


def themed(svg: str, title: str) -> str:
    """Matplotlib's SVG with a title, font lists and the dark theme."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub("'DejaVu Sans( Mono)?'", lambda font: MONO if font[1] else SANS, body)
    rules = "\n".join(
        f'[style*="{property_name}: {light}"] {{ {property_name}: {dark} !important }}'
        for light, dark in THEME.values()
        for property_name in ("fill", "stroke")
    )
    dark = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}\n}}</style>"
    opening, rest = body.split(">", 1)
    return f'{opening} role="img">\n<title>{escape(title)}</title>\n{dark}{rest}'


def wrapped(text: str) -> list[str]:
    """Lines of a caption."""
    return textwrap.wrap(text, 150)


Point = tuple[float, float]
Boxes = np.ndarray
"""Rows of left, bottom, right, top."""
STEPS = 22  # distances that are tried for a label, 0.08 apart
ROUNDS = 4
PARTS = 15  # boxes that approximate the line from a point to its label


def spread(places: Sequence[float], apart: float, end: float) -> list[float]:
    """Positions near ``places``, at least ``apart`` from each other, from 0 to ``end``."""
    positions = list(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    lowest = 0.0
    for index in order:
        lowest = positions[index] = max(positions[index], lowest)
        lowest += apart
    highest = max(end, apart * (len(places) - 1))
    for index in reversed(order):
        highest = positions[index] = min(positions[index], highest)
        highest -= apart
    return positions


def beside(
    points: Sequence[Point], sizes: Sequence[Point], frame: Sequence[float], obstacles: Boxes
) -> Boxes:
    """Box of each size near its point and inside the frame, where it and the line to it hide least."""
    dots = np.array([(x - 0.06, y - 0.06, x + 0.06, y + 0.06) for x, y in points])
    boxes = np.full((len(points), 4), np.nan)  # overlaps with nothing
    lines = np.full((len(points), PARTS, 4), np.nan)
    for _ in range(ROUNDS):  # from the second round on, each avoids all others
        for index in sorted(range(len(points)), key=points.__getitem__):
            point = points[index]
            places = around(point, sizes[index])
            inside = np.all((places[:, :2] >= frame[:2]) & (places[:, 2:] <= frame[2:]), axis=1)
            places = places[inside] if inside.any() else places
            boxes[index], lines[index] = np.nan, np.nan
            leading = leaders(point, places)
            hidden = 30 * (hits(places, boxes) + hits(places, dots)) + 3 * hits(places, obstacles)
            crossed = hits(leading.reshape(-1, 4), np.concatenate([boxes, np.delete(dots, index, 0)]))
            under = hits(places, lines.reshape(-1, 4)) + crossed.reshape(len(places), PARTS).sum(axis=1)
            far = np.linalg.norm(nearest(point, places) - point, axis=1)
            best = np.argmin(hidden + 2 * under + 3 * far)
            boxes[index], lines[index] = places[best], leading[best]
    return boxes


def around(point: Point, size: Point) -> Boxes:
    """Places for a label at growing distance: right, below and left, then above."""
    (x, y), (width, height) = point, size
    corners = [
        corner
        for away in 0.08 * np.arange(1, STEPS + 1)
        for corner in (
            (x + away, y - height / 2),
            (x + 0.8 * away, y - 0.6 * away - height),
            (x + 0.4 * away, y - 0.9 * away - height),
            (x - width / 2, y - away - height),
            (x - away - width, y - height / 2),
            (x - 0.8 * away - width, y - 0.6 * away - height),
            (x - 0.4 * away - width, y - 0.9 * away - height),
            (x - 0.8 * away - width, y + 0.6 * away),
            (x - width / 2, y + away),
        )
    ]
    return np.concatenate([corners, np.add(corners, size)], axis=1)


def nearest(point: Point, boxes: Boxes) -> np.ndarray:
    """End of the line from a point to each box."""
    ends: np.ndarray = np.clip(point, boxes[:, :2], boxes[:, 2:])
    return ends


def leaders(point: Point, boxes: Boxes) -> np.ndarray:
    """Line from a point to each box, as small boxes."""
    share = np.arange(1, PARTS + 1)[:, None] / (PARTS + 1)
    middles = point + share * (nearest(point, boxes) - point)[:, None]
    return np.concatenate([middles - 0.02, middles + 0.02], axis=2)


def hits(boxes: Boxes, others: Boxes) -> np.ndarray:
    """Number of ``others`` that each box overlaps."""
    a, b = boxes[:, None], others[None]
    count: np.ndarray = np.all((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:]), axis=2).sum(axis=1)
    return count
