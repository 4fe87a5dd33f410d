"""Python functions compiled ahead for given signatures, kept on disk: loops over lanes, and NumPy ufuncs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.kernels.numba_cpu.codegen.numba_pipeline import KernelCompiler
from gpu_ops.kernels.numba_cpu.jit import DiskCache

__all__ = ["loop", "ufunc"]


def loop(*signatures: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function at its first call."""

    def build(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)(function)
        for i, signature in enumerate(signatures):
            dispatcher._cache = _on_disk(function, i)
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return lambda function: _at_first_call(function, build)


def ufunc(*signatures: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function of scalars to a NumPy ufunc at its first call."""

    def build(function: Callable[..., Any]) -> Any:
        cpu_target.target_context.refresh()  # a ufunc's wrapper is compiled even if its function is on disk
        made = numba.vectorize(function)
        for i, signature in enumerate(signatures):
            made._dispatcher.cache = _on_disk(function, i)
            made.add(signature)
        made.disable_compile()
        return made

    return lambda function: _at_first_call(function, build)


def _at_first_call(function: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def compiled() -> Any:
        with visible(f"gpu_ops: compiling the emulator's {function.__name__} for this CPU (once)"):
            return build(function)

    return lambda *arguments: compiled()(*arguments)


def _on_disk(function: Callable[..., Any], i: int) -> DiskCache:
    """The cache of one signature, under a hash of the sources that its code comes from."""
    files = {Path(function.__code__.co_filename), Path(__file__), Path(__file__).with_name("compiled.py")}
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]
    return DiskCache(f"emulator-{function.__name__}-{i}-{digest}")
