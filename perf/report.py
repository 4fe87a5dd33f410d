"""Results as a terminal table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu_ops.terminal import print_table
from perf.compare import Comparison
from perf.harness import Result
from perf.limits import Limits
from perf.machine import label
from perf.stats import Power, Timing

CAPTION = (
    "time: median (p20-p80) · limit: share of the roofline, on a CPU measured in turns with the case: M matmul, "
    "C copy, R read bandwidth · memory: peak beyond inputs and results, ours / naive, of models ours / torch · "
    "energy: of a call, on a GPU, and the mean clock · x naive, x torch: their time over ours · "
    "error: largest / tolerance (mean)"
)
PEERS = ("naive", "torch")
"""Contenders that always have a column. Others have one where they were timed."""


def make_table(title: str, labels: Sequence[str], figures: Sequence[str]) -> Table:
    """Labels are left-aligned and may wrap between words, figures right-aligned."""
    grid = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in labels:
        grid.add_column(name)
    for name in figures:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def print_header(console: Console, machine: Mapping[str, Any], limits: Limits) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(f"[bold]{escape(label(machine))}[/] · commit {machine['commit']} · {versions}")
    half = f", bfloat16 in torch {tflops(limits.matmul_bfloat16)}" if limits.matmul_bfloat16 else ""
    half += f", 16-bit matmul {tflops(limits.matmul_half)}" if limits.matmul_half else ""
    console.print(
        f"limits of this run: copy {limits.copy / 1e9:.1f} GB/s, read {limits.read / 1e9:.1f} GB/s, "
        f"float32 matmul {tflops(limits.matmul)}{half}"
    )
    load = (machine.get("load_average") or [0.0])[0]
    if load > 0.5 * machine["cores"]:
        console.print(
            f"[yellow]the machine was busy when this started: load {load:.1f} on {machine['cores']} cores. "
            "Do not quote figures of this run.[/]"
        )
    console.print(f"[dim]{CAPTION}[/]")


def table(op: str, results: Sequence[Result]) -> Table:
    timed = (name for result in results for name in result.timings if name != "ours")
    peers = tuple(dict.fromkeys((*PEERS, *timed)))
    energy = ("energy",) if any(result.power for result in results) else ()
    figures = ("time", "rate", "limit", "memory", *energy, *(f"x {peer}" for peer in peers), "error")
    grid = make_table(op, ("case", "shape", "dtype"), figures)
    for result in results:
        grid.add_row(*cells(result, peers, energy=bool(energy)))
    return grid


def cells(result: Result, peers: Sequence[str] = PEERS, *, energy: bool = False) -> list[str]:
    case, ours = result.case, result.timings.get("ours")
    head = [case.name, case.shape, short_dtype(case.dtype)]
    if ours is None:
        return [*head, "[red]failed[/]", *[""] * (3 + energy + len(peers)), error_text(result)]
    rate = tflops(case.flops / ours.median) if case.in_flops else f"{case.bytes / ours.median / 1e9:.1f} GB/s"
    if case.tokens:
        rate = f"{case.tokens / ours.median:.4g} tokens/s"
    memory = (result.memory.get(name) for name in ("ours", "torch" if case.tokens else "naive"))
    return [
        *head,
        spread(ours),
        rate,
        f"{result.share_of_limit:.0%} {result.limited_by[0].upper()}",
        " / ".join(size(growth.working) if growth else "-" for growth in memory),
        *([power_text(result.power)] if energy else []),
        *(times(result.times(peer)) for peer in peers),
        error_text(result),
    ]


def line(result: Result) -> str:
    """One case in a few words, for as long as its table is not complete."""
    ours = result.timings.get("ours")
    if ours is None:
        return f"FAILED: {result.failure.splitlines()[0]}"
    outside = "" if result.passed else ", FAILED: see below"
    share = "" if result.share_of_limit is None else f", {result.share_of_limit:.0%} of the limit"
    return f"{spread(ours)}{share}{outside}; measured in {result.seconds:.0f} s"


def error_text(result: Result) -> str:
    parts = []
    if error := result.error:
        text = f"{error.largest:.1e} / {error.tolerance:.1e} ({error.mean:.0e})"
        wrong = f"[red]{text} FAILED, {escape(error.worst)}[/]"
        parts.append(f"[green]{text}[/]" if error.ok else wrong)
    if result.failure:
        parts.append(f"[red]{escape(result.failure.splitlines()[0])}[/]")
    return ", ".join(parts) or "-"


def times(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if value >= 1 else f"[red]{value:.2f}[/]"


def spread(timing: Timing) -> str:
    unit, scale = ("s", 1.0) if timing.median >= 1 else ("ms", 1e3) if timing.median >= 1e-3 else ("us", 1e6)
    median, low, high = (scale * t for t in (timing.median, timing.p20, timing.p80))
    return f"{median:.3g} {unit} ({low:.3g}-{high:.3g})"


def power_text(power: Power | None) -> str:
    return "-" if power is None else f"{1e3 * power.joules:.3g} mJ, {power.sm_mhz:.0f} MHz"


def tflops(per_second: float) -> str:
    return f"{per_second / 1e12:.2f} TFLOPS"


def size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def short_dtype(name: str) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(name, name)


def print_comparison(console: Console, found: Comparison) -> None:
    for warning in found.warnings:
        console.print(f"[yellow]{escape(warning)}[/]")
    grid = make_table("against the old run", ("case",), ("old", "new", "new / old"))
    grid.add_column("verdict")
    for change in sorted(found.changes, key=lambda change: -change.ratio):
        word = change.verdict.partition(":")[0]
        colour = {"REGRESSED": "red", "noise": "yellow", "faster": "green"}.get(word, "default")
        old, new = (f"{1e3 * t:.3f} ms" for t in (change.old, change.new))
        grid.add_row(escape(change.key), old, new, f"{change.ratio:.2f}", f"[{colour}]{change.verdict}[/]")
    if found.changes:
        print_table(console, grid)
    console.print(f"[{'red' if found.exit_code else 'green'}]{escape(found.summary())}[/]")
