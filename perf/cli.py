"""The command line that ``python -m perf`` and every ``perf/bench_<op>.py`` share."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gpu_ops.cli.parser import positive
from gpu_ops.cli.terminal import make_console, run_command, waiting
from gpu_ops.kernels.compiler.progress import visible
from perf import comm, emulate, limits, machine, pictures, plan, report, roofline, runs
from perf.case import DTYPES, Case, RunOptions
from perf.harness import HURRIED, Effort, Result, run_case
from perf.memory import Probe
from perf.stats import Limits
from perf.tour import compile_ahead, cost, last_words, time_left

HURRY_AFTER = (
    100  # seconds of measuring after which the tour measures less, so that it stays under three minutes
)
TOUR = (
    "a few Llama-3-8B shapes: a tour of the main cases, about two minutes on 2 cores; "
    "with --all, --op, --dtype, --seqlen or --first every case of what they choose"
)
HERE = Path(__file__).resolve().parent


def bench_names() -> list[str]:
    """Every op with a ``bench_<op>.py`` in this folder: the file is the registration."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def bench(op: str) -> ModuleType:
    return importlib.import_module(f"perf.bench_{op}")


def parser(prog: str, *, one_op: bool) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=prog,
        description="Times gpu_ops against the plain NumPy formula, torch and this machine's limits.",
        epilog="Exit code: 0 fine, 1 error out of tolerance, failed case or regression, 2 wrong usage. "
        "For layouts of training on many GPUs: python -m perf --plan --help",
    )
    add = p.add_argument
    if one_op:
        add("--quick", action="store_true", help="a few Llama-3-8B shapes")
    else:
        add("--quick", action="store_true", help=TOUR)
        add("--all", action="store_true", help="with --quick: every case, about ten minutes on 2 cores")
    devices = ("cpu", "cuda", "emulator")
    counts = "emulator: no times; counts what the GPU kernels do, without a GPU"
    add("--device", choices=devices, default="cpu", help=counts)
    add("--dtype", nargs="+", choices=tuple(DTYPES), default=(), help="default: the bench's own")
    lengths = "sequence lengths; tokens for row-wise ops"
    add("--seqlen", nargs="+", type=positive, default=(), metavar="N", help=lengths)
    if not one_op:
        collectives = "default: all but comm, which times messages between ranks"
        add("--op", nargs="+", choices=(*bench_names(), "comm"), default=(), help=collectives)
        add("--ranks", type=positive, default=2, metavar="N", help="for comm (%(default)s)")
    add("--grid", default="", metavar="NAME", help="attention: options, or for GPUs field, gqa, decode")
    bounds = "attention: upper bounds from data sheets; measures nothing, needs no GPU"
    add("--roofline", action="store_true", help=bounds)
    add("--first", type=positive, metavar="N", help="only the first N cases of each op")
    add("--list", action="store_true", help="print the cases and measure nothing")
    add("--save", metavar="DIR", help="write the results as a CSV file into this folder")
    add("--compare", metavar="OLD.csv", help="flag regressions against a saved run")
    regression = "a case regressed when new / old is above this (%(default)s)"
    add("--threshold", type=float, default=runs.THRESHOLD, help=regression)
    svg = "also draw SVG pictures (needs matplotlib), into a folder beside the CSV file or perf-pictures"
    add("--plot", action="store_true", help=svg)
    add("--no-torch", action="store_true", help="leave torch out even where it is installed")
    add(
        "--no-memory", action="store_true", help="skip the memory measurement, which runs in a worker process"
    )
    return p


def main(ops: Sequence[str] | None = None, argv: Sequence[str] | None = None) -> int:
    """Run the named ops, or those of ``--op``; or the planner. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if ops is None and any(word.partition("=")[0] == "--plan" for word in arguments):
        return plan.main(arguments)
    p = parser("python -m perf" if ops is None else f"python perf/bench_{ops[0]}.py", one_op=ops is not None)
    args = p.parse_args(arguments)
    if ops is None and "comm" in args.op:
        return run_comm(p, args)
    names = list(ops or args.op or bench_names())
    old = check(p, args, names)
    if args.grid:
        names = [name for name in names if args.grid in getattr(bench(name), "GRIDS", ())]
    emulated = args.device == "emulator"
    seqlens = unique(args.seqlen) or ((emulate.SEQLEN,) if emulated else ())
    tour = args.quick and ops is None and not (args.all or args.op or args.dtype or args.seqlen or args.first)
    config = RunOptions(
        args.device, args.quick, tour, unique(args.dtype), seqlens, not args.no_torch, args.grid
    )
    chosen = {name: cases for name in names if (cases := selected(name, config, args.first))}
    if args.list:
        print("\n".join(case.key for cases in chosen.values() for case in cases))
        return 0
    console = make_console()
    if args.roofline:
        return roofline.run(config.dtypes, unique(args.seqlen), console)
    if args.device == "cuda" and machine.gpu() is None:
        p.error("--device cuda: no usable NVIDIA GPU found (NVML does not answer)")
    # Until the end of the run, children included: gpu_ops may move NumPy arrays to a GPU otherwise.
    with mock.patch.dict(os.environ, GPU_OPS_DEVICE=config.device):
        if emulated:
            return emulate.run(chosen, console)
        run, code = measure(args, config, chosen, console)
    if old is not None:
        comparison = runs.compare(old, run, threshold=args.threshold, ops=set(names))
        report.print_comparison(console, comparison)
        code = max(code, comparison.exit_code)
    return code


def measure(
    args: argparse.Namespace, config: RunOptions, chosen: Mapping[str, list[Case]], console: Console
) -> tuple[runs.Run, int]:
    """Measure the cases; print, save and draw the results. Returns them with the exit code."""
    start = time.perf_counter()
    with waiting(console, "measuring the limits of this machine"):
        facts = machine.describe(config.device)
        bounds = limits.measure(
            device=config.device, threads=facts["threads"], quick=config.quick, use_torch=config.use_torch
        )
    report.print_header(console, facts, bounds)
    run = runs.new_run([], facts, bounds, config, 0.0)

    def keep(done: Sequence[Result]) -> None:
        """Save after every case, so that an interrupted run keeps its measurements."""
        run.rows, run.facts["seconds"] = [result.row() for result in done], time.perf_counter() - start
        if args.save:
            runs.save(run, args.save)

    if config.tour and config.device == "cpu":
        compile_ahead(
            [case for cases in chosen.values() for case in cases], config, facts["threads"], console
        )
    results = run_all(chosen, config, bounds, console, memory=not args.no_memory, keep=keep)
    code = conclude(console, results)
    for line in last_words(results, facts, time.perf_counter() - start, config):
        console.print(
            line, style="red" if code and "tolerance" in line else None, markup=False, highlight=False
        )
    folder = Path("perf-pictures")
    if args.save:
        saved = runs.save(run, args.save)
        console.print(f"saved {saved}")
        folder = saved.with_suffix("")
    if args.plot:
        for path in pictures.draw(pictures.Machine([run]), folder):
            console.print(f"drew {path}")
    return run, code


def run_comm(p: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run ``comm``. Messages between ranks have no cases, so options that choose or compare cases are refused."""
    if args.op != ["comm"]:
        p.error("--op comm starts processes of its own: run it alone")
    if args.device != "cpu" or args.dtype or args.seqlen or args.compare or args.first or args.list:
        p.error("--op comm takes --ranks, --quick, --save and --plot only")
    refuse_plot(p, args)
    return comm.run(args.ranks, make_console(), quick=args.quick, save=args.save or "", plot=args.plot)


def refuse_plot(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib: pip install matplotlib (the `plot` extra)")


def check(p: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> runs.Run | None:
    """Refuse incompatible options before anything is measured. Returns the run of ``--compare``."""
    refuse_plot(p, args)
    if args.device == "emulator" and (args.save or args.compare or args.plot):
        p.error("--device emulator measures no times that --save, --compare or --plot could keep")
    grids = {name: getattr(bench(name), "GRIDS", ()) for name in names} if args.grid else {}
    if args.grid and not any(args.grid in offered for offered in grids.values()):
        known = [f"{name}: {', '.join(offered)}" for name, offered in grids.items() if offered]
        p.error(f"--grid {args.grid}: unknown; there are {'; '.join(known) or 'none for this op'}")
    if args.roofline and ("attention" not in names or "float64" in args.dtype):
        p.error("--roofline: attention only, and not float64, which has no tensor cores")
    try:
        return runs.load(args.compare) if args.compare else None
    except (OSError, ValueError) as error:
        p.error(f"--compare: {error}")


def selected(name: str, config: RunOptions, first: int | None = None) -> list[Case]:
    """Cases of a bench that run: all, the first ones, or those of the tour."""
    module = bench(name)
    cases: list[Case] = module.cases(config)[:first]
    if not config.tour:
        return cases
    return [case for case in cases if (case.name, case.dtype) in getattr(module, "TOUR", ())]


def run_all(
    chosen: Mapping[str, Sequence[Case]],
    config: RunOptions,
    found: Limits,
    console: Console,
    *,
    memory: bool = True,
    keep: Callable[[Sequence[Result]], None] = lambda done: None,
) -> list[Result]:
    """Measure the cases of each op, and print its table as soon as it is complete.

    Progress is a bar on a terminal and a line per case elsewhere. ``keep`` gets all results so far after each case.
    """
    results: list[Result] = []
    explained: set[str] = set()
    effort: Effort | None = None
    start = time.perf_counter()
    total = sum(cost(case) for cases in chosen.values() for case in cases)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Probe() as probe:
        for number, (name, cases) in enumerate(chosen.items(), 1):
            done: list[Result] = []
            bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
            with bar:
                task = bar.add_task("", total=len(cases))
                for count, case in enumerate(cases, 1):
                    finished = sum(cost(result.case) for result in (*results, *done))
                    left = time_left(time.perf_counter() - start, finished, total)
                    position = f"op {number}/{len(chosen)}{left}"
                    if bar.disable and count == 1:
                        console.print(f"{position}: {name}", highlight=False)
                        console.file.flush()
                    if config.tour and effort is None and time.perf_counter() - start > HURRY_AFTER:
                        effort = HURRIED
                        text = f"{HURRY_AFTER} s are over on this busy machine: fewer repetitions from here"
                        console.print(text, style="yellow")
                    words = f"{case.op} {count} of {len(cases)}: {case.name} {case.shape} {case.dtype}"
                    bar.update(task, description=f"{position}: {case.op} {case.name}")
                    stage = functools.partial(show_stage, bar, words)
                    done.append(run_case(case, config, found, probe if memory else None, effort, stage))
                    if bar.disable:
                        line = f"{words}: {report.line(done[-1])}"
                        console.print(line, style="dim", markup=False, highlight=False)
                        console.file.flush()
                    keep([*results, *done])
                    bar.advance(task)
            if done:
                report.print_results(console, name, done, explained)
                console.file.flush()
            results += done
    return results


def show_stage(bar: Progress, words: str, doing: str) -> AbstractContextManager[None]:
    """Print a line on stderr for a stage longer than a second, where stderr is not a terminal."""
    return visible(f"{words}: {doing}") if bar.disable else nullcontext()


def conclude(console: Console, results: Sequence[Result]) -> int:
    """Print the cases left out or failed. Returns the exit code: 1 if a case failed or an error is too large."""
    single = [r for r in results if r.case.op == "attention" and r.case.dtype == "float32" and r.error]
    if single:
        mean = max(r.error.mean for r in single if r.error)
        console.print(f"float32 attention: mean absolute error {mean:.2e} at worst (the tests require below 1e-05)")
    failed = [r for r in results if not r.passed]
    missing = {f"{name}: {why.splitlines()[0]}": r for r in results for name, why in r.left_out.items()}
    for text, result in missing.items():  # each reason once, with the last case that it applies to
        console.print(f"left out {text} ({result.case.key})", style="yellow", markup=False)
    for result in failed:
        reason = result.failure or (
            f"error out of tolerance, {result.error.worst}" if result.error else "no error taken"
        )
        console.print(f"FAILED {result.case.key}: {reason}", style="red", markup=False)
    return 1 if failed or not results else 0


def run_as_script(op: str) -> None:
    """Entry point of ``python perf/bench_<op>.py``."""
    run_command(lambda: main([op]))


def unique(values: Sequence[Any]) -> tuple[Any, ...]:
    """Cases in their order without duplicates: a case's key is its identity."""
    return tuple(dict.fromkeys(values))
