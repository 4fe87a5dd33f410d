"""The command line that ``python -m perf`` and every ``perf/bench_<op>.py`` share."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gpu_ops
from gpu_ops.core.dispatch import has_cuda_kernels
from perf import compare, emulate, limits, machine, report, roofline
from perf.case import DTYPES, Case, Config
from perf.harness import HURRIED, Effort, Result, run_case
from perf.memory import Probe

HURRY_AFTER = 100  # seconds after which --quick measures less, so that it stays under three minutes
HERE = Path(__file__).resolve().parent


def bench_names() -> list[str]:
    """Every op with a ``bench_<op>.py`` in this folder: the file is the registration."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def bench(op: str) -> ModuleType:
    return importlib.import_module(f"perf.bench_{op}")


def cases(op: str, config: Config) -> list[Case]:
    """The cases of an op's bench; on CUDA those of ops that have kernels there."""
    found: list[Case] = list(bench(op).cases(config))
    stems = {name.partition("_")[0] for name in gpu_ops.__all__ if has_cuda_kernels(name)}
    return [case for case in found if config.device != "cuda" or case.op in stems]


def parser(prog: str, *, one_op: bool) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=prog,
        description="Times gpu_ops against the plain NumPy formula, torch and this machine's limits.",
        epilog="Exit code: 0 fine, 1 error out of tolerance, failed case or regression, 2 wrong usage.",
    )
    p.add_argument(
        "--quick", action="store_true", help="Llama-3-8B shapes, few of them; under three minutes on 2 cores"
    )
    p.add_argument(
        "--device",
        choices=("cpu", "cuda", "emulator"),
        default="cpu",
        help="emulator: no times but counts of what the GPU kernels do, without a GPU",
    )
    p.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=(), help="default: the bench's own")
    p.add_argument(
        "--seqlen",
        nargs="+",
        type=_positive,
        default=(),
        metavar="N",
        help="sequence lengths, tokens for row-wise ops",
    )
    if not one_op:
        p.add_argument("--op", nargs="+", choices=bench_names(), default=(), help="default: all")
    p.add_argument("--grid", default="", metavar="NAME", help="attention: field, gqa or decode, for GPUs")
    p.add_argument(
        "--roofline",
        action="store_true",
        help="attention: upper bounds from the cards' data sheets; measures nothing and needs no GPU",
    )
    p.add_argument("--list", action="store_true", help="print the cases and measure nothing")
    p.add_argument("--save", metavar="DIR", help="write the results as JSON into this folder")
    p.add_argument("--compare", metavar="OLD.json", help="flag regressions against a saved run")
    p.add_argument(
        "--threshold",
        type=float,
        default=compare.THRESHOLD,
        help="regression: new / old above this (%(default)s)",
    )
    p.add_argument(
        "--plot", action="store_true", help="also write a PNG (needs matplotlib) beside the JSON or here"
    )
    p.add_argument(
        "--no-torch", action="store_true", help="leave the torch peer out even where torch is installed"
    )
    p.add_argument(
        "--no-memory", action="store_true", help="skip the memory measurement (it runs in a worker process)"
    )
    return p


def main(ops: Sequence[str] | None = None, argv: Sequence[str] | None = None) -> int:
    """Run the named ops, or those of ``--op``. Returns the exit code."""
    p = parser("python -m perf" if ops is None else f"python perf/bench_{ops[0]}.py", one_op=ops is not None)
    args = p.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib: pip install matplotlib (the `plot` extra)")
    old = None
    if args.compare:
        try:
            old = compare.load(args.compare)
        except (OSError, ValueError) as exc:
            p.error(f"--compare: {exc}")
    emulated = args.device == "emulator"
    if emulated and (args.save or args.compare or args.plot):
        p.error("--device emulator measures no times that --save, --compare or --plot could keep")
    seqlens = unique(args.seqlen) or ((emulate.SEQLEN,) if emulated else ())
    names = list(ops or args.op or bench_names())
    if args.grid:
        offered = {name: getattr(bench(name), "GRIDS", ()) for name in names}
        names = [name for name in names if args.grid in offered[name]]
        if not names:
            known = [f"{name}: {', '.join(grids)}" for name, grids in offered.items() if grids]
            p.error(f"--grid {args.grid}: unknown; there are {'; '.join(known) or 'none for this op'}")
    config = Config(args.device, args.quick, unique(args.dtype), seqlens, not args.no_torch, args.grid)
    if args.list:
        print("\n".join(case.key for name in names for case in cases(name, config)))
        return 0
    if args.roofline:
        if "attention" not in names or "float64" in args.dtype:
            p.error("--roofline: of attention only, and tensor cores have no float64 for it")
        return roofline.run(config.dtypes, unique(args.seqlen), report.make_console())
    if args.device == "cuda" and machine.gpu() is None:
        p.error("--device cuda: no usable NVIDIA GPU found (NVML does not answer)")
    os.environ["GPU_OPS_DEVICE"] = config.device  # NumPy arrays may otherwise be sent to a GPU
    console = report.make_console()
    if emulated:
        return emulate.run({name: bench(name).cases(config) for name in names}, console)

    start = time.perf_counter()
    facts = machine.describe(config.device)
    found = limits.measure(
        device=config.device, threads=facts["threads"], quick=config.quick, use_torch=config.use_torch
    )
    report.print_header(console, facts, found, config)
    console.print(f"[dim]{report.CAPTION}[/]")
    results = run_all(names, config, found, console, memory=not args.no_memory)
    data = report.to_json(results, facts, found, config, time.perf_counter() - start)

    code = conclude(console, results, data["seconds"])
    path = Path("perf.png")
    if args.save:
        saved = report.save(data, args.save)
        console.print(f"saved {saved}")
        path = saved.with_suffix(".png")
    if args.plot:
        console.print(f"plotted {report.plot(data, path)}")
    if old is not None:
        comparison = compare.compare(old, data, threshold=args.threshold, ops=set(names))
        report.print_comparison(console, comparison)
        code = max(code, comparison.exit_code)
    return code


def run_all(
    names: Sequence[str],
    config: Config,
    found: limits.Limits,
    console: Console,
    *,
    memory: bool = True,
    effort: Effort | None = None,
) -> list[Result]:
    """Every case of every named op, each op's table printed as soon as it is done."""
    planned: list[tuple[str, list[Case]]] = [(name, cases(name, config)) for name in names]
    results: list[Result] = []
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Probe() as probe, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(some) for _, some in planned))
        for name, planned_cases in planned:
            done = []
            for case in planned_cases:
                if config.quick and effort is None and time.perf_counter() - start > HURRY_AFTER:
                    effort = HURRIED
                    console.print(
                        f"[yellow]{HURRY_AFTER} s are over on this busy machine: fewer repetitions from here[/]"
                    )
                progress.update(task, description=f"{case.op} {case.name} {case.shape} {case.dtype}")
                done.append(run_case(case, config, found, probe if memory else None, effort))
                progress.advance(task)
            results += done
            if done:
                console.print(report.table(name, done))
    return results


def conclude(console: Console, results: Sequence[Result], seconds: float) -> int:
    """The last lines, and the exit code: 1 when a case failed or its error is out of tolerance."""
    single = [r for r in results if r.case.op == "attention" and r.case.dtype == "float32" and r.error]
    if single:
        mean = max(r.error.mean for r in single if r.error)
        console.print(f"float32 attention: mean absolute error {mean:.2e} at worst (promised: below 1e-05)")
    failed = [r for r in results if not r.passed]
    missing = {f"{name}: {why.splitlines()[0]}": r for r in results for name, why in r.left_out.items()}
    for text, result in missing.items():  # each reason once, with the last case that it held for
        console.print(f"left out {text} ({result.case.key})", style="yellow", markup=False)
    for result in failed:
        reason = result.failure or (
            f"error out of tolerance, {result.error.worst}" if result.error else "no error taken"
        )
        console.print(f"FAILED {result.case.key}: {reason}", style="red", markup=False)
    colour = "red" if failed or not results else "green"
    console.print(
        f"[{colour}]{len(results) - len(failed)} of {len(results)} cases within tolerance[/], {seconds:.0f} s"
    )
    return 1 if failed or not results else 0


def run_as_script(op: str) -> None:
    """What ``python perf/bench_<op>.py`` does at its end."""
    raise SystemExit(main([op]))


def unique(values: Sequence[Any]) -> tuple[Any, ...]:
    """In the order given, each once: a case's key is its identity."""
    return tuple(dict.fromkeys(values))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
