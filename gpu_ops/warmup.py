"""Compiling the CPU kernels ahead: which there are, and one at a time.

A module of its own because worker processes import what they run by name, and cannot import ``__main__``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import threading
import time
from typing import Any

__all__ = ["compile_variant", "end_with_parent", "variants"]


def variants() -> dict[str, tuple[str, ...]]:
    """Every kernel variant by its label, with the parts that make the variant (dtypes and the like)."""
    return {k.label(v): tuple(map(str, v if isinstance(v, tuple) else (v,))) for k, v in _all_variants()}


def compile_variant(label: str) -> float:
    """Compile one variant into the cache folder, or load it from there; the seconds it took."""
    from gpu_ops.kernels.compiler import progress

    progress.silent = True  # the warm-up prints a line per kernel
    for kernel, variant in _all_variants():
        if kernel.label(variant) == label:
            start = time.perf_counter()
            kernel[variant]
            return time.perf_counter() - start
    raise LookupError(f"no kernel variant {label}")


def end_with_parent() -> None:
    """Make this worker end once the process that started it has been killed; its queue would wait for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _all_variants() -> list[tuple[Any, Any]]:
    from gpu_ops.kernels import numba_cpu
    from gpu_ops.kernels.numba_cpu import jit

    for module in pkgutil.iter_modules(numba_cpu.__path__):
        importlib.import_module(f"{numba_cpu.__name__}.{module.name}")
    return list(jit.all_variants())
