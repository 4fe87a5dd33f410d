"""Results as a terminal table, as JSON and as a plot."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perf.case import Config
from perf.compare import Comparison
from perf.harness import Result
from perf.limits import Limits
from perf.machine import label
from perf.stats import Timing

CAPTION = (
    "time: median (p20-p80) · limit: share of the roofline, on a CPU measured in turns with the case: M matmul, "
    "C copy, R read bandwidth · memory: peak beyond inputs and results, ours / naive · x naive, x torch: their "
    "time over ours · error: largest / tolerance (mean)"
)
PEERS = ("naive", "torch")
"""Contenders that always have a column; others, on CUDA, where one was timed."""


def make_console() -> Console:
    """Wide enough for the table when the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 170))


def print_header(console: Console, machine: dict[str, Any], limits: Limits, config: Config) -> None:
    console.print(f"[bold]{escape(label(machine))}[/] · commit {machine['commit']} · " + _versions(machine))
    half = f", bfloat16 in torch {rate(limits.matmul_bfloat16)}" if limits.matmul_bfloat16 else ""
    half += f", 16-bit matmul {rate(limits.matmul_half)}" if limits.matmul_half else ""
    console.print(
        f"limits of this run: copy {limits.copy / 1e9:.1f} GB/s, read {limits.read / 1e9:.1f} GB/s, "
        f"float32 matmul {rate(limits.matmul)}{half}"
    )
    load = (machine.get("load_average") or [0.0])[0]
    if load > 0.5 * machine["cores"]:
        console.print(
            f"[yellow]the machine was busy when this started: load {load:.1f} on {machine['cores']} cores. "
            "Do not quote figures of this run.[/]"
        )


def table(op: str, results: Sequence[Result]) -> Table:
    grid = Table(title=op, title_justify="left", title_style="bold", pad_edge=False)
    grid.add_column("case", no_wrap=True)
    grid.add_column("shape", no_wrap=True)
    grid.add_column("dtype", no_wrap=True)
    timed = dict.fromkeys(name for r in results for name in r.timings if name != "ours")
    peers = [*PEERS, *(name for name in timed if name not in PEERS)]
    for name in ("time", "rate", "limit", "memory", *(f"x {peer}" for peer in peers), "error"):
        grid.add_column(name, justify="right", no_wrap=name != "error")
    for result in results:
        grid.add_row(*row(result, peers))
    return grid


def row(result: Result, peers: Sequence[str] = PEERS) -> list[str]:
    case = result.case
    head = [case.name, case.shape, short_dtype(case.dtype)]
    if "ours" not in result.timings:
        return [
            *head,
            "[red]failed[/]",
            "",
            "",
            "",
            *("" for _ in peers),
            escape(result.failure.splitlines()[0]),
        ]
    ours = result.timings["ours"]
    share = result.share_of_limit or 0.0
    amount = rate(case.flops / ours.median) if case.in_flops else f"{case.bytes / ours.median / 1e9:.1f} GB/s"
    memory = " / ".join(
        size(result.memory[n].working) if n in result.memory else "-" for n in ("ours", "naive")
    )
    return [
        *head,
        spread(ours),
        amount,
        f"{100 * share:.0f} % {result.limited_by[0].upper()}",
        memory,
        *(times(result.times(peer)) for peer in peers),
        error_text(result),
    ]


def error_text(result: Result) -> str:
    error = result.error
    if error is None:
        return f"[red]{escape(result.failure.splitlines()[0])}[/]" if result.failure else "-"
    text = f"{error.largest:.1e} / {error.tolerance:.1e} ({error.mean:.0e})"
    if not error.ok:
        return f"[red]{text} FAILED, {escape(error.worst)}[/]"
    return (
        f"{text}, [red]{escape(result.failure.splitlines()[0])}[/]" if result.failure else f"[green]{text}[/]"
    )


def times(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return text if value >= 1 else f"[red]{value:.2f}[/]"


def spread(timing: Timing) -> str:
    unit, scale = ("s", 1.0) if timing.median >= 1 else ("ms", 1e3) if timing.median >= 1e-3 else ("us", 1e6)
    median, low, high = (scale * t for t in (timing.median, timing.p20, timing.p80))
    return f"{median:.3g} {unit} ({low:.3g}-{high:.3g})"


def rate(per_second: float | None) -> str:
    if not per_second:
        return "-"
    return f"{per_second / 1e12:.2f} TFLOPS"


def size(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def short_dtype(name: str) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(name, name)


def print_comparison(console: Console, found: Comparison) -> None:
    for warning in found.warnings:
        console.print(f"[yellow]{escape(warning)}[/]")
    grid = Table(title="against the old run", title_justify="left", pad_edge=False)
    for name in ("case", "old", "new", "new / old"):
        grid.add_column(name, justify="left" if name == "case" else "right")
    for change in sorted(found.changes, key=lambda change: -change.ratio):
        colour = "red" if change.regressed else "green" if change.ratio < 1 / found.threshold else "default"
        old, new = (f"{1e3 * t:.3f} ms" for t in (change.old, change.new))
        grid.add_row(escape(change.key), old, new, f"[{colour}]{change.ratio:.2f}[/]")
    if found.changes:
        console.print(grid)
    console.print(f"[{'red' if found.exit_code else 'green'}]{escape(found.summary())}[/]")


def to_json(
    results: Sequence[Result], machine: dict[str, Any], limits: Limits, config: Config, seconds: float
) -> dict[str, Any]:
    return {
        "schema": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": seconds,
        "machine": machine,
        "limits": limits.to_json(),
        "config": config.to_json(),
        "cases": [result.to_json() for result in results],
    }


def save(data: dict[str, Any], folder: str | Path) -> Path:
    """``<folder>/<date>-<commit>[-quick].json``; returns the path."""
    stamp = str(data["created"]).replace(":", "").replace("-", "").removesuffix("Z")
    quick = "-quick" if data["config"]["quick"] else ""
    path = Path(folder) / f"{stamp}-{str(data['machine']['commit']).replace('+', '-')}{quick}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def plot(data: dict[str, Any], path: str | Path) -> Path:
    """One panel per op: how many times faster than naive and torch each case is (log scale)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(case["op"] for case in data["cases"]))
    rows = [[case for case in data["cases"] if case["op"] == op] for op in ops]
    figure, axes = pyplot.subplots(
        len(ops), 1, squeeze=False, figsize=(9, 1.2 + sum(0.35 * len(r) + 0.8 for r in rows)),
        height_ratios=[len(r) + 1 for r in rows],
    )  # fmt: skip
    for axis, op, cases in zip(axes[:, 0], ops, rows, strict=True):
        names = [f"{case['name']} {case['shape']} {short_dtype(case['dtype'])}" for case in cases]
        for shift, (who, colour) in ((-0.2, ("naive", "tab:grey")), (0.2, ("torch", "tab:orange"))):
            values = [case[f"times_{who}"] or float("nan") for case in cases]
            axis.barh([i + shift for i in range(len(cases))], values, height=0.38, label=who, color=colour)
        axis.set(
            yticks=range(len(cases)), yticklabels=names, title=op, xscale="log", xlabel="times faster than"
        )
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return Path(path)


def _versions(machine: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
