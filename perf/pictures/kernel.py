"""Cost of each source line of a kernel, counted by the emulator: no GPU, no times."""

from __future__ import annotations

import linecache
import os

import ml_dtypes
import numpy as np

import gpu_ops
from gpu_ops import emulator
from gpu_ops.emulator import Profile
from gpu_ops.emulator.counts import InstructionProfile, LineProfile, total
from perf.machine import commit
from perf.pictures.style import MARGIN, SMALL, Canvas, colour

LINES, STEP, AXIS, LEGEND = 20, 0.21, 0.42, 0.36  # lines shown; inches
PLACE, SOURCE, LONGEST = 1.75, 3.85, 60  # inches of file and line, inches and characters of the source
PARTS = (
    ("ours", "warps", "instructions issued, per warp"),
    ("torch", "sectors", "sectors of 32 bytes of global memory"),
    ("torch_flash", "waves", "waves of shared memory"),
)
SHAPE = (1, 256, 1, 64)


def profile() -> Profile:
    """Profile of attention's forward pass. Raises ``KernelCompileError`` without the ``emulator`` extra."""
    os.environ.setdefault("GPU_OPS_SANITIZE", "0")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPE).astype(ml_dtypes.bfloat16) for _ in range(3))
    with emulator.record() as profiles:
        gpu_ops.attention(q, k, v, causal=True, device="emulator", backend="raw")
    return profiles[0]


def draw(found: Profile) -> Canvas:
    """One bar per source line, most costly first, divided into parts."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    costs = lines(found)
    whole, shown = sum(line.cost for line in costs), costs[:LINES]
    batch, seqlen, nheads, head_dim = SHAPE
    problem = f"causal, bfloat16, batch {batch}, sequence length {seqlen}, {nheads} head of {head_dim}"
    caption = (
        f"counted by gpu_ops.emulator from the PTX for {found.arch}, nothing is timed · commit {commit()}"
    )
    height = STEP * len(shown)
    canvas = Canvas(
        LEGEND + height + AXIS,
        f"Cost by source line: {found.name}",
        f"{problem} · the {len(shown)} most costly lines, with their share of the kernel's cost",
        (caption,),
    )
    canvas.legend([(name, text) for name, _, text in PARTS])
    top, left = canvas.top + LEGEND, MARGIN + PLACE + SOURCE
    width = canvas.width - left - MARGIN
    axes = canvas.bar_axes(left, top, width, height)
    axes.set_xlim(0, shown[0].cost / (1 - 0.5 / width))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("cost: sum of the three counts")
    for index, line in enumerate(shown):
        y, end = STEP * (index + 0.5), 0
        canvas.text(MARGIN, top + y, line.where, size=SMALL - 1, name="muted", family="DejaVu Sans Mono")
        canvas.text(MARGIN + PLACE, top + y, shortened(line.text), size=SMALL - 1, family="DejaVu Sans Mono")
        for name, attribute, _ in PARTS:
            count = getattr(line, attribute)
            axes.barh(y, count, 0.13, left=end, color=colour(name), zorder=2)
            end += count
        axes.annotate(
            f"{line.cost / whole:.1%}", (end, y), (3.5, 0), textcoords="offset points", va="center",
            fontsize=SMALL - 0.5, weight="bold",
        )  # fmt: skip
    return canvas


def lines(found: Profile) -> list[LineProfile]:
    """Lines, most costly first. A line of an inlined function counts itself; a PTX wrapper counts at its call."""
    groups: dict[tuple[str, int], list[InstructionProfile]] = {}
    for i in found.instructions:
        place = next((place for place in i.places if not place[0].endswith("ptx.cuh")), None)
        if i.warps and place and place[1]:
            groups.setdefault(place, []).append(i)
    made = [
        total(group, LineProfile, file=file, line=line, text=linecache.getline(file, line).strip())
        for (file, line), group in groups.items()
    ]
    return sorted(made, key=lambda line: -line.cost)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
