"""Command ``gpu-ops warmup``: compiles the CPU kernels ahead of use, one variant per process at a time."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from gpu_ops.cli.terminal import make_console, waiting
from gpu_ops.environment import cache_folder, environment
from gpu_ops.errors import DeviceError
from gpu_ops.kernels.compiler.kernel import short_label
from gpu_ops.kernels.compiler.progress import several

__all__ = ["compile_variant", "end_with_parent", "in_processes", "run", "variants"]


def run(options: argparse.Namespace) -> int:
    """Compile the chosen variants in parallel processes, with a line for each; return 1 if one fails."""
    console, kernels, dtypes = make_console(), options.kernel or [], options.dtype or []
    try:
        with waiting(console, "looking for kernels"):
            listed = variants()
    except DeviceError as error:  # Numba's compiler is turned off
        console.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 1
    labels = [
        label
        for label, parts in listed.items()
        if (not kernels or any(word in label for word in kernels))
        and (not dtypes or any(word in parts for word in dtypes))
    ]
    if not labels:
        console.print("no kernel matches; without --kernel and --dtype all are compiled")
        return 1
    folder = cache_folder()
    if folder is None:
        console.print("[red]no cache folder is writable[/]: set GPU_OPS_CACHE_DIR to one that is")
        return 1
    start = time.perf_counter()
    workers = min(options.jobs or environment().cpu.threads, len(labels))
    console.print(
        f"compiling {several(len(labels), 'kernel')}, {workers} at a time; each takes up to half a minute"
    )
    console.file.flush()
    failed = _compile_all(labels, workers, console)
    seconds = time.perf_counter() - start
    console.print(
        f"{len(labels) - failed} of {several(len(labels), 'kernel')} ready in {seconds:.0f} s: {folder}"
    )
    return 1 if failed else 0


def _compile_all(labels: list[str], workers: int, console: Console) -> int:
    """Print a line for each compiled kernel, and on a terminal a bar; return the number of failures."""
    failed = 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with in_processes(workers, compile_variant, [(label,) for label in labels]) as futures, bar:
        task = bar.add_task("", total=len(labels))
        running = dict(zip(futures, map(short_label, labels), strict=True))
        for count, done in enumerate(as_completed(running), 1):
            error = done.exception()
            failed += error is not None
            came = f"{done.result():.1f} s" if error is None else f"FAILED, {type(error).__name__}: {error}"
            style = None if error is None else "red"
            line = f"{count:{len(str(len(labels)))}} of {len(labels)}  {running[done]}: {came}"
            console.print(line, style=style, markup=False, highlight=False)
            console.file.flush()
            bar.advance(task)
    return failed


def variants() -> dict[str, tuple[str, ...]]:
    """List every kernel variant by its label, with the parts that define it, such as dtypes."""
    return {k.label(v): tuple(map(str, v if isinstance(v, tuple) else (v,))) for k, v in _all_variants()}


def compile_variant(label: str) -> float:
    """Compile one variant into the cache folder, or load it from there; return the seconds it took."""
    from gpu_ops.kernels.compiler import progress

    progress.silent = True  # the warm-up prints a line per kernel
    for kernel, variant in _all_variants():
        if kernel.label(variant) == label:
            start = time.perf_counter()
            kernel[variant]
            return time.perf_counter() - start
    raise LookupError(f"no kernel variant {label}")


@contextmanager
def in_processes(
    jobs: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Iterator[list[Future[Any]]]:
    """Run calls in ``jobs`` processes; yield a future per call. An error or interrupt of the block ends them at once.

    These are processes, not threads: Numba compiles under one lock. They are spawned, to start without our locks.
    """
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent)
    try:
        # they inherit blocked signals: Ctrl-C reaches all processes of a terminal, and this one ends the others
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(function, *arguments) for arguments in calls]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield futures
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """Make this worker end once its parent process has been killed; its queue would otherwise wait for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _all_variants() -> list[tuple[Any, Any]]:
    from gpu_ops.kernels.common.cpu import jit
    from gpu_ops.kernels.compiler.sources import KERNELS

    for path in sorted(KERNELS.glob("*/cpu/*.py")):
        importlib.import_module(f"gpu_ops.kernels.{path.parents[1].name}.cpu.{path.stem}")
    return list(jit.all_variants())
