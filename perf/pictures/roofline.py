"""Rooflines: achieved operations per second against operations per byte, under the measured limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perf.pictures.data import HALF, Machine, bandwidth_text, dtypes, flops_text, kinds
from perf.pictures.style import MARGIN, SMALL, Canvas, beside, colour, nearest, text_width
from perf.runs import Row

HEIGHT, HEAD, FOOT, LEFT = 3.7, 0.34, 0.62, 0.78  # inches of a panel, and around it
INTENSITY = "operations per byte"


def pictures(machine: Machine) -> Iterator[tuple[str, Canvas]]:
    rows = [row for row in machine.rows() if "ours_median" in row and row["flops"]]
    if rows:
        yield "roofline", measured(machine, rows)


def measured(machine: Machine, rows: Sequence[Row]) -> Canvas:
    """One panel per dtype, with the two limits that were measured in the run."""
    shown = dtypes(rows)
    subtitle = (
        "dots: the first case of each kind, with its share of the limit measured in the same run (lines)"
    )
    each = HEAD + HEIGHT + FOOT
    title = f"Roofline: {machine.name}"
    canvas = Canvas(each * len(shown), title, subtitle, (machine.origin,))
    for index, dtype in enumerate(shown):
        top = canvas.top + index * each
        canvas.text(MARGIN, top + HEAD / 2, dtype, weight="bold")
        axes = canvas.axes(LEFT, top + HEAD, canvas.width - LEFT - MARGIN, HEIGHT)
        limits = machine.limits()
        half = dtype in HALF and limits.get("matmul_half") and (machine.on_gpu or dtype == "bfloat16")
        matmul = limits["matmul_half"] if half else limits["matmul"]
        draw_measured(canvas, axes, kinds(rows, dtype), limits["copy"], matmul)
    return canvas


def draw_measured(canvas: Canvas, axes: Any, rows: Sequence[Row], copy: float, matmul: float) -> None:
    points = [(row["flops"] / row["bytes"], row["flops"] / row["ours_median"]) for row in rows]
    left, right = min(x for x, _ in points) / 3, max(*(2 * x for x, _ in points), 3 * matmul / copy)
    low, high = min(y for _, y in points) / 2, matmul * 3
    axes.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(low, high), xlabel=INTENSITY, ylabel="TFLOPS"
    )
    name_ticks(axes)
    roof(axes, copy, matmul, left, right, colour("text"), 1.2)
    size = canvas.inches(axes, [(right, high)])[0]
    line = canvas.inches(axes, [(x, min(matmul, x * copy)) for x in np.geomspace(left, right, 150)])
    (x0, y0), (x1, y1) = line[:2]
    style = {
        "fontsize": SMALL,
        "color": colour("muted"),
        "textcoords": "offset points",
        "rotation_mode": "anchor",
    }
    slope = math.degrees(math.atan2(y1 - y0, x1 - x0))
    start = max(left, low / copy) * 1.3
    axes.annotate(f"copy {bandwidth_text(copy)}", (start, start * copy), (0, 4), rotation=slope, **style)
    axes.annotate(f"matmul {flops_text(matmul)}", (right, matmul), (0, 4), ha="right", **style)
    above = np.array(
        [(x - 0.04, y - 0.03, x + 0.04, y + 0.18) for x, y in line]
    )  # the line and its names stay free
    texts = [f"{row['op']} {row['name'].partition(',')[0]} {row['share_of_limit']:.0%}" for row in rows]
    sizes = [(text_width(text, SMALL - 0.5), 0.12) for text in texts]
    dots = canvas.inches(axes, points)
    for text, dot, box in zip(texts, dots, beside(dots, sizes, (0.03, 0.03, *size), above), strict=True):
        end = nearest(dot, box[None])[0]
        share = np.array([dot, end]) / size
        if math.dist(dot, end) > 0.12:
            axes.plot(*share.T, color=colour("muted"), linewidth=0.6, transform=axes.transAxes, zorder=2)
        middle = (box[1] + box[3]) / 2 / size[1]
        axes.text(box[0] / size[0], middle, text, transform=axes.transAxes, va="center", fontsize=SMALL - 0.5)
    edge = colour("background")
    axes.plot(
        *zip(*points, strict=True), "o", color=colour("ours"), markersize=6, markeredgecolor=edge, zorder=3
    )


def roof(
    axes: Any, bandwidth: float, peak: float, left: float, right: float, line: str, width: float
) -> None:
    ridge = peak / bandwidth
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color=line, linewidth=width, zorder=1)


def name_ticks(axes: Any) -> None:
    """Plain numbers in place of powers of ten, TFLOPS upwards, and light lines."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / 1e12:,.10g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=colour("grid"), linewidth=0.7)
