"""Time of each collective against the size of its array, with a copy in memory (``python -m perf --op comm``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.pictures.style import MARGIN, Canvas, colour, legend_height

HEIGHT, LEFT, BELOW = 3.6, 0.62, 0.55  # inches: of the axes, and what their labels take
COLOURS = {
    "all_reduce": "ours",
    "reduce_scatter": "torch",
    "all_gather": "torch_cudnn",
    "all_to_all": "torch_flash",
    "broadcast": "torch_efficient",
    "shift": "numba",
    "memcpy": "naive",
}


def words(value: float, units: Sequence[str], step: int) -> str:
    """Whole number with its unit; each unit is ``step`` times the previous one."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:.0f} {unit}"
        value /= step
    return f"{value:.0f} {units[-1]}"


def draw(found: Mapping[str, Any], subtitle: str) -> Canvas:
    """Draw ``found``, in the form that ``perf.comm.run`` saves."""
    times = {name: {int(n): t for n, t in line.items()} for name, line in found["times"].items()}
    fits = found["fits"]
    legend = [
        (
            COLOURS[name],
            f"{name}: {fits[name]['alpha'] * 1e6:.3g} us + bytes / {fits[name]['beta'] / 1e9:.3g} GB/s",
        )
        for name in times
    ]
    above = legend_height(legend) + 0.12
    caption = ("points: median of the slowest rank; lines: the fit in the legend",)
    canvas = Canvas(above + HEIGHT + BELOW, "Collectives: time against size", subtitle, caption)
    canvas.legend(legend, marker="o")
    axes = canvas.axes(MARGIN + LEFT, canvas.top + above, canvas.width - 2 * MARGIN - LEFT, HEIGHT)
    for name, line in times.items():
        shade, fit = colour(COLOURS[name]), fits[name]
        axes.plot(list(line), list(line.values()), linestyle="none", marker="o", markersize=4, color=shade)
        curve = [fit["alpha"] + n / fit["beta"] for n in line]
        axes.plot(list(line), curve, color=shade, linewidth=2.2 if name == "all_reduce" else 1.3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({n for line in times.values() for n in line})
    axes.set_xticks(sizes, [words(n / 1024, ("KiB", "MiB"), 1024) for n in sizes])
    low, high = axes.get_ylim()
    decades = [10.0**n for n in range(-9, 3) if low <= 10.0**n <= high]
    axes.set_yticks(decades, [words(t * 1e9, ("ns", "us", "ms", "s"), 1000) for t in decades])
    axes.minorticks_off()
    axes.set_xlabel("array of one rank")
    axes.set_ylabel("time")
    axes.grid(axis="y", color=colour("grid"), linewidth=0.8)
    axes.spines["left"].set_visible(False)
    return canvas
