"""Two-minute tour: its cases, the parallel compilation of their kernels in advance, and its summary."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gpu_ops.cli.warmup import in_processes
from gpu_ops.kernels.compiler import progress
from gpu_ops.kernels.compiler.progress import several
from perf.case import Case, RunOptions, find_case, make_inputs
from perf.harness import Result
from perf.machine import label
from perf.report import short_dtype


def compile_ahead(cases: Sequence[Case], config: RunOptions, jobs: int, console: Console) -> None:
    """Compile the kernels of all cases into the cache, ``jobs`` at a time. Failures are reported by the cases."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    calls = [(case.op, case.key, config) for case in cases]
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with in_processes(jobs, compile_case, calls) as running, bar:
        task = bar.add_task("compiling kernels", total=len(cases))
        if bar.disable:
            console.print(
                f"compiling the kernels of {several(len(cases), 'case')}, {jobs} at a time ...",
                highlight=False,
            )
            console.file.flush()
        start = last = time.perf_counter()
        for count, _ in enumerate(as_completed(running), 1):
            bar.advance(task)
            now = time.perf_counter()
            if bar.disable and (now - last > 10 or count == len(cases)):
                last = now
                console.print(
                    f"compiled those of {count} of {len(cases)}, {now - start:.0f} s", highlight=False
                )
                console.file.flush()


def compile_case(op: str, key: str, config: RunOptions) -> None:
    """Call a case once, on its small inputs."""
    progress.silent = True  # the parent shows the progress of all
    case = find_case(op, key, config)
    case.ours(make_inputs(case, config, small=True))()


def cost(case: Case) -> float:
    """Relative time to measure a case: 3 GFLOP in NumPy and the reference cost as much as everything else."""
    return 1 + case.flops / 3e9


def time_left(spent: float, done: float, total: float) -> str:
    """Text ``, about 2 min left``; empty before the first case is done."""
    if not done:
        return ""
    seconds = spent / done * (total - done)
    words = f"{seconds / 60:.0f} min" if seconds > 50 else f"{math.ceil(seconds / 10) * 10} s"
    return f", about {words} left"


def last_words(
    results: Sequence[Result], machine: Mapping[str, Any], seconds: float, config: RunOptions
) -> list[str]:
    """Summary with one line each: what ran, how it compares, whether errors are within bounds, where to read more."""
    ops = list(dict.fromkeys(result.case.op for result in results))
    good = [result for result in results if result.passed]
    ran = f"{several(len(results), 'case')} of {several(len(ops), 'op')}"
    within = f"{len(good)} of {several(len(results), 'case')} within tolerance"
    lines = [f"Ran {ran} in {seconds:.0f} s on {label(machine)}."]
    for kinds, limit in (
        (("copy", "read"), "memory bandwidth, where that is the limit"),
        (("matmul",), "arithmetic"),
    ):
        shares = [
            (r.share_of_limit or 0.0, _name(r.case)) for r in results if r.timings and r.limited_by in kinds
        ]
        lines += [_range(shares, f"of this machine's {limit}", "{:.0%}")] if shares else []
    peers = []
    for peer, name in (("naive", "plain NumPy"), ("torch", "torch")):
        ratios = [(ratio, _name(r.case)) for r in results if (ratio := r.times(peer))]
        peers += [_range(ratios, f"as fast as {name}", "{:.1f} times")] if ratios else []
    lines += [" ".join(peers)] if peers else []
    if len(good) == len(results) and good:
        worst = max(good, key=_of_bound)
        lines.append(
            f"{within}: every error against float64 is within its bound; "
            f"the largest is {_of_bound(worst):.0%} of it ({_name(worst.case)})."
        )
    else:
        failed = ", ".join(_name(r.case) for r in results if not r.passed)
        lines.append(f"{within}; not: {failed or 'none ran'}.")
    every = "`scripts/run.sh --all` runs every case. " if config.tour else ""
    lines.append(
        f"{every}Pictures of runs on GPUs and CPUs: perf/pictures; what each column means: perf/README.md."
    )
    return lines


def _of_bound(result: Result) -> float:
    return result.error.share if result.error else 0.0


def _range(figures: Sequence[tuple[float, str]], words: str, form: str) -> str:
    """Median, minimum and maximum, the latter two with their cases."""
    median = statistics.median(figure for figure, _ in figures)
    text = f"The median is {form.format(median)} {words} ({several(len(figures), 'case')}"
    if len(figures) > 1:
        (low, slow), (high, fast) = min(figures), max(figures)
        text += f"; from {form.format(low)}, {slow}, to {form.format(high)}, {fast}"
    return f"{text})."


def _name(case: Case) -> str:
    return f"{case.op} {case.name} {short_dtype(case.dtype)}"
