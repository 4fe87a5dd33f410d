"""Compilation of CPU kernels: once per variant, kept on disk. The first compilation of a process is announced.

A :class:`Kernel` is a Python function plus the signature of each *variant* (usually a dtype). Indexing
compiles on first use: ``rmsnorm_forward["float32"]`` is a callable that releases the GIL.

The disk cache is our own because Numba's key is the kernel's own file alone (an edited helper would
keep serving stale machine code) and its index file lets two racing processes name the same data
file. Here one file holds one compiled variant, in a folder named by a hash of every source file of
this package, the compiler versions and the CPU (see :mod:`gpu_ops.kernels.compiler.cache` for the files).
"""

from __future__ import annotations

import gc
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.entry import entry_of
from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    VERSIONS,
    Cache,
    global_compiler_lock,
    intrinsic,
    njit,
    overload,
    rtsys,
    target,
    types,
)
from gpu_ops.kernels.common.cpu.codegen.numba_pipeline import (
    DeviceCompiler,
    EntryCompiler,
    InnerCompiler,
    NoinlineCompiler,
    njit_once,
    reduce,
    restore,
)
from gpu_ops.kernels.common.cpu.codegen.target import request_amx
from gpu_ops.kernels.compiler.cache import (
    CPU,
    alone,
    cache_folder,
    cpu_sources,
    ignore_entry,
    publish,
    read_entry,
)
from gpu_ops.kernels.compiler.kernel import short_label
from gpu_ops.kernels.compiler.progress import compilation, warn
from gpu_ops.kernels.compiler.uninterrupted import hold_in_forks, uninterrupted

# Reductions vectorise only when additions may be reordered; NaN and inf keep their meaning.
REASSOC = frozenset({"reassoc", "contract", "arcp", "nsz"})
CONTRACT = frozenset({"contract"})

_WITHIN = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# A loop over a row as a separate function, whose sums may be reordered: within a kernel LLVM at times makes scalar
# code of the same loop.
inner = njit(fastmath=set(REASSOC), pipeline_class=InnerCompiler, **_WITHIN)

# A loop as a separate function, with operations rounded as written and none fused: the bits of other devices.
as_written = njit(pipeline_class=InnerCompiler, **_WITHIN)


def _device_options(refcount: bool, **options: Any) -> dict[str, Any]:
    # separate fastmath: Numba would pass on that of whichever kernel is compiled first
    defaults = {"pipeline_class": DeviceCompiler, "fastmath": set(CONTRACT), "_nrt": refcount}
    return {**defaults, **_WITHIN, **options}


def device_function(function: Any = None, *, refcount: bool = False) -> Any:
    """Decorate a function that only compiled code calls. It is compiled as a part of each kernel that calls it.

    ``refcount``: it makes arrays, or returns some to a caller that counts references. Otherwise arrays are borrowed:
    counting references (atomic, 11 arrays per call) took a third of the time of decoding.
    """
    decorate = njit_once(**_device_options(refcount))
    return decorate if function is None else decorate(function)


# A device function that is never inlined: for long loops that several places call, each of which would get a copy.
noinline_function = njit_once(**_device_options(False, pipeline_class=NoinlineCompiler))


# A device function rounded as written. Unlike `as_written` it borrows arrays: it must not return an argument's.
exact = njit_once(**_device_options(False, fastmath=set()))


def generic(function: Any = None, *, refcount: bool = False) -> Any:
    """Decorate a function of argument types that returns the implementation for them: a device function of this name.

    ``refcount`` as for :func:`device_function`.
    """

    def decorate(choose: Callable[..., Any]) -> Any:
        @wraps(choose)
        def stub(*arguments: Any) -> Any:
            raise TypeError(f"{choose.__name__} is for compiled code only")

        overload(stub, jit_options=_device_options(refcount))(choose)
        return stub

    return decorate if function is None else decorate(function)


def constant(of: Callable[[types.Type], int | bool]) -> Any:
    """Decorate a function of an argument's type. Its result is a number in compiled code, without a call."""

    def value(typingctx, x):
        number = of(x)
        number_type = types.boolean if isinstance(number, bool) else types.int64
        return number_type(x), lambda context, builder, sig, args: context.get_constant(number_type, number)

    value.__doc__ = of.__doc__
    return intrinsic(value)


hold_in_forks(global_compiler_lock)  # a fork waits until no thread compiles, other users of Numba included

KERNELS: list[Kernel] = []

_NUMBA_TYPE = {
    "float16": types.int16,  # bits: see dtype.py
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
}
FLOATS = tuple(_NUMBA_TYPE)


def scalar(dtype: str) -> types.Type:
    """Numba type of elements of ``dtype`` in a kernel's arguments."""
    return _NUMBA_TYPE.get(dtype) or getattr(types, dtype)


def compute(dtype: str) -> types.Type:
    """Type that a kernel computes in, also that of lse, rstd and others: float64 for float64, else float32."""
    return types.float64 if dtype == "float64" else types.float32


def read(dtype: str, ndim: int) -> types.Array:
    """Type of an input of any strides (the kernels' rule: unit stride on the last axis)."""
    return types.Array(scalar(dtype), ndim, "A", readonly=True, aligned=True)


def write(dtype: str, ndim: int) -> types.Array:
    """Type of an output or a scratch array, with the same rule."""
    return types.Array(scalar(dtype), ndim, "A", readonly=False, aligned=True)


def kernel(
    signature: Callable[..., tuple[types.Type, ...]],
    variants: tuple[Any, ...] = FLOATS,
    fastmath: frozenset[str] = CONTRACT,
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a kernel ``f(state, n_tasks, *arguments)``; ``signature(variant)`` types the arguments."""

    def wrap(function: Callable[..., None]) -> Kernel:
        return Kernel(function, signature, variants, fastmath)

    return wrap


class Kernel:
    """A CPU kernel and its compiled variants."""

    def __init__(
        self,
        function: Callable[..., None],
        signature: Callable[..., tuple[types.Type, ...]],
        variants: tuple[Any, ...],
        fastmath: frozenset[str],
    ) -> None:
        self.name = function.__name__
        self.variants = variants
        self._function = function
        self._signature = signature
        self._fastmath = fastmath
        self._compiled: dict[Any, Callable[..., None]] = {}
        self._lock = threading.Lock()
        KERNELS.append(self)

    def __getitem__(self, variant: Any) -> Callable[..., None]:
        """Kernel compiled for ``variant``: a dtype or its name, or a tuple of them."""
        compiled = self._compiled.get(variant)
        return compiled if compiled is not None else self._compile(variant)

    def label(self, variant: Any) -> str:
        parts = variant if isinstance(variant, tuple) else (variant,)
        return "-".join([self.name, *map(str, parts)])

    @uninterrupted  # an interrupt would leave Numba's data structures half filled
    def _compile(self, variant: Any) -> Callable[..., None]:
        parts = variant if isinstance(variant, tuple) else (variant,)
        names = tuple(part.name if isinstance(part, np.dtype) else part for part in parts)
        with self._lock:
            if names not in self._compiled:
                label, function_ = self.label(names), self._function
                function = FunctionType(
                    function_.__code__, function_.__globals__, label, None, function_.__closure__
                )
                function.__qualname__ = label  # names its machine code too
                dispatcher = njit(
                    nogil=True,
                    error_model="numpy",
                    no_cfunc_wrapper=True,
                    fastmath=set(self._fastmath),
                    pipeline_class=EntryCompiler,
                )(function)
                with compiling(short_label(label)) as miss, alone(*_parts(), f"{label}.nbc", wait=miss):
                    dispatcher._cache = DiskCache(function, label, miss)
                    # under the lock, which a fork takes too: no child keeps the thresholds
                    with global_compiler_lock, _garbage_in_batches():
                        dispatcher.compile(
                            types.void(types.int64[::1], types.int64, *self._signature(*names))
                        )
                dispatcher.disable_compile()
                dispatcher.entry = entry_of(dispatcher)
                self._compiled[names] = dispatcher
            self._compiled[variant] = self._compiled[names]  # the next look-up uses the same key
            return self._compiled[names]


def compiling(label: str) -> AbstractContextManager[Callable[[], None]]:
    """Announce a CPU kernel's compilation, if :class:`DiskCache` finds that there is one."""
    return compilation(label, "this CPU", kept=cache_dir(quiet=True) is not None)


@contextmanager
def _garbage_in_batches() -> Iterator[None]:
    """Collect cyclic garbage after every 50000 new objects, instead of 700: a compiler makes a million.

    That halves the time of collections. Without any, one of 0.2 s would follow, in which no other thread runs.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 5, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def all_variants() -> Iterator[tuple[Kernel, Any]]:
    """Every (kernel, variant) of the imported modules, for a warm-up."""
    for k in KERNELS:
        for variant in k.variants:
            yield k, variant


class DiskCache(Cache):
    """One compiled variant in one file: see :mod:`.codegen.numba_pipeline`.

    ``miss`` is called before Numba compiles it.
    """

    def __init__(self, function: Callable[..., Any], label: str, miss: Callable[[], None]) -> None:
        self._function, self._label, self._miss = function, label, miss

    @property
    def cache_path(self) -> str:
        return str(cache_dir(quiet=True) or "")

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        kept = self._load(sig, target_context)
        if kept is None:
            self._miss()
        return kept

    def _load(self, sig: Any, target_context: Any) -> Any:
        entry = read_entry(*_parts(), f"{self._label}.nbc")
        if entry is None:
            return None
        # machine code allocates; the rest of the compiler need not be initialised
        rtsys.initialize(target_context)
        try:
            return restore(self._function, sig, target_context, entry)
        except Exception as error:  # complete, but not our format
            ignore_entry(f"{self._label}.nbc", repr(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            entry = reduce(data)
        except ValueError as error:
            warn(f"gpu_ops: kernel {self._label} not cached: {error}", stacklevel=2)
        else:
            publish(entry, *_parts(), f"{self._label}.nbc")


def cache_dir(quiet: bool = False) -> Path | None:
    """The folder of this build's kernels; None (with one warning) when no folder is writable."""
    return cache_folder(*_parts(), quiet=quiet)


def _parts() -> tuple[str, str]:
    return CPU, build_id()


@cache
def build_id() -> str:
    """Hashes of the inputs of machine code: our sources, a dash, then the compilers and the CPU."""
    build = repr((*VERSIONS, sys.version, target(), request_amx()))
    return f"{cpu_sources()}-{hashlib.sha256(build.encode()).hexdigest()[:16]}"
