"""Results as a table with as many columns as fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from gpu_ops.cli.terminal import UNLIMITED_WIDTH, fixed_console, print_table
from gpu_ops.kernels.compiler.progress import several
from perf.harness import Result
from perf.machine import label
from perf.runs import Comparison
from perf.stats import Limits, Power, Timing

PEERS = ("naive", "torch")
"""Contenders that always have a column. Others have one where they were timed."""
DROPPED = ("mean error", "tolerance", "p20-p80", "empty peers", "memory")
"""What a table leaves out, in this order, until it fits the terminal."""


def make_table(title: str, labels: Sequence[str], figures: Sequence[str]) -> Table:
    """Table whose labels are left-aligned and may wrap between words, and whose figures are right-aligned."""
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
            f"[yellow]the machine was busy when this started: load {load:.1f} on "
            f"{several(machine['cores'], 'core')}. Do not quote figures of this run.[/]"
        )


def print_legend(console: Console, grid: Table, dropped: Sequence[str], explained: set[str]) -> None:
    """Print what the columns of a table mean, but for the texts in ``explained``, to which it adds them."""
    error = "as a share of its tolerance" if "tolerance" in dropped else "/ tolerance"
    meanings = {
        "time": "median" + ("" if "p20-p80" in dropped else " (p20-p80)"),
        "limit": "share of the roofline, on a CPU measured in turns with the case: M matmul, C copy, R read",
        "memory": "peak beyond inputs and results, ours / naive, of models ours / torch",
        "energy": "of a call, on a GPU, and the mean clock",
        "error": f"largest {error}" + ("" if "mean error" in dropped else " (mean)"),
    }
    names = [str(column.header) for column in grid.columns]
    meanings |= {name: "its time over ours" for name in names if name.startswith("x ")}
    texts = [f"{name}: {meanings[name]}" for name in names if name in meanings]
    if new := [text for text in texts if text not in explained]:
        console.print(" · ".join(new), style="dim", markup=False, highlight=False)
    explained.update(new)


def print_results(
    console: Console, op: str, results: Sequence[Result], explained: set[str] | None = None
) -> None:
    """Print the table of an op, after the meaning of its columns that are not in ``explained`` yet.

    Case, shape and dtype are one column, which is never cut: if no more figures can be dropped, the case has its own
    line and its figures follow on the next.
    """
    explained = set() if explained is None else explained
    for count in range(len(DROPPED) + 1):
        grid = table(op, results, DROPPED[:count])
        if width(grid) <= console.width:
            print_legend(console, grid, DROPPED[:count], explained)
            console.print(grid)
            console.print()
            return
    figures = fixed_console(max(console.width, width(grid)), console.file, no_color=console.no_color)
    grid = table("", results, DROPPED, labelled=False)
    print_legend(console, grid, DROPPED, explained)
    with figures.capture() as capture:
        figures.print(grid)
    header, *rows = capture.get().splitlines()
    console.print(f"[bold]{op}[/]")
    print(f"  {header}", file=console.file)
    for result, row in zip(results, rows, strict=True):
        console.print(label_of(result), markup=False, highlight=False, style="cyan")
        print(f"  {row}", file=console.file)
    console.print()


def width(grid: Table) -> int:
    """Number of columns that a table takes without wrapping."""
    probe = fixed_console(UNLIMITED_WIDTH)
    return Measurement.get(probe, probe.options, grid).maximum


def table(op: str, results: Sequence[Result], dropped: Sequence[str] = (), *, labelled: bool = True) -> Table:
    """Table of an op's results without the figures named in ``dropped``."""
    timed = (name for result in results for name in result.timings if name != "ours")
    peers = tuple(dict.fromkeys((*PEERS, *timed)))
    if "empty peers" in dropped:
        peers = tuple(name for name in peers if any(name in result.timings for result in results))
    rows = [cells(result, peers, dropped) for result in results]
    names = [name for name in rows[0] if name != "energy" or any(result.power for result in results)]
    look: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "dim"}
    grid = Table(title=op or None, title_justify="left", title_style="bold", **look)
    if labelled:
        grid.add_column("case", no_wrap=True)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for result, row in zip(results, rows, strict=True):
        grid.add_row(*([escape(label_of(result))] if labelled else []), *(row[name] for name in names))
    return grid


def label_of(result: Result) -> str:
    """Case, shape and dtype."""
    return f"{result.case.name}  {result.case.shape}  {short_dtype(result.case.dtype)}"


def cells(result: Result, peers: Sequence[str] = PEERS, dropped: Sequence[str] = ()) -> dict[str, str]:
    """Figures of a result by the name of their column."""
    case, ours = result.case, result.timings.get("ours")
    figures = dict.fromkeys(
        ("time", "rate", "limit", "memory", "energy", *(f"x {name}" for name in peers)), ""
    )
    if ours is None:
        figures["time"] = "[red]failed[/]"
    else:
        rate = (
            tflops(case.flops / ours.median)
            if case.in_flops
            else f"{case.bytes / ours.median / 1e9:.1f} GB/s"
        )
        memory = (result.memory.get(name) for name in ("ours", "torch" if case.tokens else "naive"))
        figures |= {
            "time": median(ours) if "p20-p80" in dropped else spread(ours),
            "rate": f"{case.tokens / ours.median:.4g} tokens/s" if case.tokens else rate,
            "limit": f"{result.share_of_limit:.0%} {result.limited_by[0].upper()}",
            "memory": " / ".join(size(growth.working) if growth else "-" for growth in memory),
            "energy": power_text(result.power),
            **{f"x {name}": times(result.times(name)) for name in peers},
        }
    if "memory" in dropped:
        del figures["memory"]
    return figures | {"error": error_text(result, dropped)}


def line(result: Result) -> str:
    """One case in a few words, shown until its table is complete."""
    ours = result.timings.get("ours")
    if ours is None:
        return f"FAILED: {result.failure.splitlines()[0]}"
    outside = "" if result.passed else ", FAILED: see below"
    share = "" if result.share_of_limit is None else f", {result.share_of_limit:.0%} of the limit"
    return f"{spread(ours)}{share}{outside}; measured in {result.seconds:.0f} s"


def error_text(result: Result, dropped: Sequence[str] = ()) -> str:
    """Error, and whether it is within its tolerance; :func:`perf.cli.conclude` prints the reason for a failure."""
    error = result.error
    if error is None:
        return "[red]FAILED[/]" if result.failure else "-"
    text = f"{error.share:.0%}" if "tolerance" in dropped else f"{error.largest:.1e} / {error.tolerance:.1e}"
    text += "" if "mean error" in dropped else f" ({error.mean:.0e})"
    return f"[green]{text}[/]" if error.ok and not result.failure else f"[red]{text} FAILED[/]"


def times(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if value >= 1 else f"[red]{value:.2f}[/]"


def median(timing: Timing) -> str:
    unit, scale = _unit(timing)
    return f"{scale * timing.median:.3g} {unit}"


def spread(timing: Timing) -> str:
    """Median with the 20th and the 80th percentile."""
    scale = _unit(timing)[1]
    return f"{median(timing)} ({scale * timing.p20:.3g}-{scale * timing.p80:.3g})"


def _unit(timing: Timing) -> tuple[str, float]:
    return ("s", 1.0) if timing.median >= 1 else ("ms", 1e3) if timing.median >= 1e-3 else ("us", 1e6)


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
