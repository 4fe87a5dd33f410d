"""Compilation of the CPU kernels ahead of use: the list of variants, and one variant at a time.

This is a separate module because worker processes import functions by name, and cannot import ``__main__``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["compile_variant", "end_with_parent", "in_processes", "variants"]


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
