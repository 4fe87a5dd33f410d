"""Compilation of Numba ``@cuda`` kernels to PTX with numba-cuda and libNVVM, without driver or GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_ops.errors import KernelCompileError
from gpu_ops.kernels.compiler.numba_import import name_files_without_a_folder
from gpu_ops.kernels.compiler.sources import NUMBA_FOLDER, python_sources
from gpu_ops.kernels.compiler.toolkit import install_hint
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

__all__ = ["compile_numba", "numba_cuda", "numba_key"]


@cache
@uninterrupted
def numba_cuda() -> Any:
    """``numba.cuda`` from numba-cuda, or a typed error. The old one that Numba includes is not used."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise KernelCompileError(
            f"numba-cuda, the compiler of the Numba CUDA kernels, is not installed; {install_hint()}"
        )
    from numba import cuda
    from numba.cuda import dispatcher
    from numba.cuda.core import ir

    name_files_without_a_folder(ir.Loc)
    if not hasattr(np, "row_stack"):  # NumPy 2.5 removed this name of vstack; numba-cuda 0.30 needs it once
        np.row_stack = np.vstack  # noqa: NPY201
        importlib.import_module("numba.cuda.np.arrayobj")
        del np.row_stack  # noqa: NPY201

    # A kernel gets its target as an argument, but the device functions it calls ask the GPU for theirs, even when
    # compiling for another GPU or without one. While this thread compiles, they get the kernel's target.
    ask_driver = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _target.device or ask_driver()
    return cuda


class _Target(threading.local):
    """Device that this thread compiles for, with the attributes that numba-cuda reads."""

    device: SimpleNamespace | None = None


_target = _Target()

# ptxas may contract a product and a sum that do not name their rounding to one fma. ``t = x * scale`` and later
# ``t - max(t)`` would then not be 0 at the maximum, and the emulator would not show it. A kernel that requires an fma
# calls ``cuda.fma``.
_ROUNDED = re.compile(r"(?<![\w.])(add|sub|mul)\.(f64|f32|f16x2|f16|bf16x2|bf16)\b")


def compile_numba(function: Callable[..., None], signature: str, name: str, arch: str) -> str:
    """PTX of one kernel, which contains the entry's mangled name."""
    cuda = numba_cuda()
    from numba.cuda.descriptor import cuda_target

    digits, feature = re.fullmatch(r"sm_(\d+)([af]?)", arch).groups()  # type: ignore[union-attr]  # jit.py checked
    capability = (int(digits[:-1]), int(digits[-1]), *feature)
    _target.device = SimpleNamespace(compute_capability=capability)
    try:
        # One for all compilations. Otherwise each leaves one as garbage, and an interrupt in its finalizer is lost.
        _ = cuda_target.target_context.target_data
        ptx, _ = cuda.compile(
            function, signature, cc=capability, device=False, abi="numba", output="ptx", lineinfo=True
        )
    except Exception as error:  # errors of typing, lowering or NVVM, or a missing library
        missing = "libnvvm" in str(error).lower()
        hint = f"; {install_hint()}" if missing else ""
        raise KernelCompileError(f"cannot compile {name} for {arch}{hint}", str(error)) from error
    finally:
        _target.device = None
    return _ROUNDED.sub(r"\1.rn.\2", str(ptx))


def numba_key(function: Callable[..., None], signature: str) -> str:
    """Hash of all inputs of the PTX: all modules of this backend, the function's references, versions."""
    digest = hashlib.sha256()
    module = Path(function.__code__.co_filename)
    files = [*python_sources(NUMBA_FOLDER), *([module] if module.is_file() else [])]
    for path in files:
        digest.update(f"{path}\0".encode() + path.read_bytes())
    for part in _parts(function, set()):
        digest.update(part.encode() + b"\0")
    packages = [
        p for p in map(_version, ("numba", "numba-cuda", "nvidia-cuda-nvcc-cu12", "nvidia-nvvm")) if p
    ]
    digest.update(repr((signature, packages, _ROUNDED.pattern)).encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    from importlib import metadata  # loads 30 modules, the email package among them

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    """Parts of a kernel, as text that is the same in every process: its code and everything the code refers to."""
    # a device function is a dispatcher around its Python function
    function = getattr(thing, "py_func", thing)
    if inspect.isfunction(function):
        if id(function) in seen:
            return
        seen.add(id(function))
        code = function.__code__
        yield f"{function.__module__}.{function.__qualname__}"
        yield from _parts(code, seen)
        held = zip(code.co_freevars, function.__closure__ or (), strict=True)
        named = {name: cell.cell_contents for name, cell in held}
        named |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, value in named.items():
            yield name
            yield from _parts(value, seen)
    elif inspect.iscode(function):
        yield function.co_code.hex()
        yield from _parts(function.co_consts, seen)
    elif isinstance(function, tuple):
        for item in function:
            yield from _parts(item, seen)
    elif isinstance(function, frozenset):
        yield from sorted(map(repr, function))
    elif isinstance(function, np.ndarray):
        yield f"{function.dtype.str} {function.shape} {function.tobytes().hex()}"
    elif inspect.ismodule(function) or inspect.isclass(function):
        yield function.__name__
    else:
        text = repr(function)
        if re.search(r" at 0x[0-9a-f]+", text):
            raise KernelCompileError(f"a Numba kernel names {text}, which no key of the cache can stand for")
        yield text
