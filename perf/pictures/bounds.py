"""Rooflines of every card from data sheets, with the bound of each op: calculated, not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpu_ops.presets import PRESETS, DevicePreset
from perf.pictures.data import Machine, bandwidth_text, kinds, number
from perf.pictures.roofline import INTENSITY, name_ticks, roof
from perf.pictures.style import MARGIN, SMALL, Canvas, colour, wrapped

COLUMNS, HEIGHT, HEAD, FOOT = 3, 1.3, 0.56, 0.4  # inches: of a panel, above and below it
LEFT = 0.5


def draw(machine: Machine, dtype: str = "bfloat16") -> Canvas:
    """Small multiples: the roofline of every card that has the dtype on tensor cores, with a dot per op."""
    cards = [card for card in PRESETS.values() if not card.generic and getattr(card.peaks, dtype, None)]
    cards.sort(key=lambda card: getattr(card.peaks, dtype))
    rows = kinds([row for row in machine.rows() if row["flops"]], dtype)
    points = sorted(
        (row["flops"] / row["bytes"], f"{row['op']} {row['name'].partition(',')[0]}") for row in rows
    )
    left, right = decades([x for x, _ in points] + [1000])
    each = HEAD + HEIGHT + FOOT
    names = ", ".join(
        f"{index} {name} ({number(x)})".replace(" ", "\N{NO-BREAK SPACE}")
        for index, (x, name) in enumerate(points, 1)
    )
    caption = [
        *wrapped(f"dots from the left, with {INTENSITY}: {names}"),
        f"cases: those of {machine.origin}",
    ]
    count = -(-len(cards) // COLUMNS)
    title = f"Bounds of every card in {dtype}, from data sheets"
    subtitle = "TFLOPS at most: left of the knee memory bandwidth is the limit, right of it the tensor cores"
    canvas = Canvas(each * count, title, subtitle, caption)
    across = (canvas.width - 2 * MARGIN) / COLUMNS
    for index, card in enumerate(cards):
        place = MARGIN + index % COLUMNS * across, canvas.top + index // COLUMNS * each
        axes = canvas.axes(place[0] + LEFT, place[1] + HEAD, across - LEFT - 0.14, HEIGHT)
        canvas.text(place[0], place[1] + 0.2, card.name, weight="bold")
        canvas.text(place[0], place[1] + 0.38, figures(card, dtype), size=SMALL - 0.5, name="muted")
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(1e11, 5e15))
        draw_card(axes, card, cards, dtype, [x for x, _ in points])
    return canvas


def decades(values: Sequence[float]) -> tuple[float, float]:
    """Powers of ten around the values."""
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))


def figures(card: DevicePreset, dtype: str) -> str:
    peak, bandwidth = limits(card, dtype)
    return f"{peak / 1e12:,.0f} TFLOPS, {bandwidth_text(bandwidth)}, knee at {peak / bandwidth:.0f}"


def limits(card: DevicePreset, dtype: str) -> tuple[float, float]:
    return 1e12 * getattr(card.peaks, dtype), 1e9 * card.memory_gbps


def draw_card(
    axes: Any, card: DevicePreset, cards: Sequence[DevicePreset], dtype: str, intensities: Sequence[float]
) -> None:
    """Line of this card over the lines of the others."""
    name_ticks(axes)
    left, right = axes.get_xlim()
    for other in cards:
        peak, bandwidth = limits(other, dtype)
        roof(axes, bandwidth, peak, left, right, colour("grid"), 1.0)
    peak, bandwidth = limits(card, dtype)
    roof(axes, bandwidth, peak, left, right, colour("ours"), 1.6)
    heights = [min(peak, bandwidth * x) for x in intensities]
    edge = colour("background")
    axes.plot(intensities, heights, "o", color=colour("ours"), markersize=5, markeredgecolor=edge, zorder=3)
    axes.tick_params(labelsize=SMALL - 1)
