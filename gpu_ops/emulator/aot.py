"""Functions compiled ahead of time and cached on disk, and the loops over lanes that access host memory.

The rest of the emulator uses NumPy. These loops do scalar work per lane: a search, a branch, a load.

``table`` has one row per allocation, sorted by start: start, end (device addresses), host pointer, and the host
pointer of the shadow bytes or 0. ``windows`` describes shared and local memory: host pointer, limit, bytes per
block and threads per block of shared memory; host pointer, limit and stride of local memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from gpu_ops.kernels.common.cpu.codegen.numba_pipeline import KernelCompiler
from gpu_ops.kernels.common.cpu.jit import DiskCache, compiling
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted

OUT_OF_BOUNDS, MISALIGNED = 1, 2

# The first byte of a window. On sm_90 the system owns the first KiB of shared memory. The emulator keeps that on
# older architectures too, so that a null pointer into shared memory is always a fault.
SHARED_BASE, LOCAL_BASE = 0x400, 0x100
SHARED_WINDOW, LOCAL_WINDOW, WINDOW_BYTES = 1 << 56, 1 << 57, 1 << 32


def loop(*signatures: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for these signatures at its first call."""

    def build(function: Callable[..., Any], miss: Callable[[], None]) -> Any:
        dispatcher = numba.njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)(function)
        for i, signature in enumerate(signatures):
            dispatcher._cache = _on_disk(function, i, miss)
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return lambda function: _at_first_call(function, build)


def ufunc(*signatures: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a scalar function to a NumPy ufunc at its first call."""

    def build(function: Callable[..., Any], miss: Callable[[], None]) -> Any:
        cpu_target.target_context.refresh()  # the wrapper is compiled even if the function is cached
        made = numba.vectorize(function)
        for i, signature in enumerate(signatures):
            made._dispatcher.cache = _on_disk(function, i, miss)
            made.add(signature)
        made.disable_compile()
        return made

    return lambda function: _at_first_call(function, build)


def _at_first_call(function: Callable[..., Any], build: Callable[..., Any]) -> Callable[..., Any]:
    lock, made = threading.Lock(), list[Any]()

    @uninterrupted
    def compile() -> None:
        with lock, compiling(f"the emulator's {function.__name__}") as miss:
            if not made:
                made.append(build(function, miss))

    def call(*arguments: Any) -> Any:
        if not made:
            compile()
        return made[0](*arguments)

    return call


def _on_disk(function: Callable[..., Any], i: int, miss: Callable[[], None]) -> DiskCache:
    """Disk cache of one signature, keyed by a hash of the sources of its code."""
    files = {Path(function.__code__.co_filename), Path(__file__)}
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]
    return DiskCache(function, f"emulator-{function.__name__}-{i}-{digest}", miss)


@intrinsic  # type: ignore[untyped-decorator]
def peek(typingctx: Any, pointer: Any, like: Any) -> Any:
    """Load a value of ``like``'s type from a host pointer of any alignment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.inttoptr(arguments[0], context.get_value_type(like).as_pointer())
        value = builder.load(address)
        value.align = 1
        return value

    return like(types.int64, like), codegen


@intrinsic  # type: ignore[untyped-decorator]
def poke(typingctx: Any, pointer: Any, value: Any) -> Any:
    """Store a value at a host pointer of any alignment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.inttoptr(arguments[0], context.get_value_type(value).as_pointer())
        store = builder.store(arguments[1], address)
        store.align = 1
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.int64, value), codegen


@loop(
    "UniTuple(int64,2)(int64, int32[::1], uint64[::1], int64, int64[:,::1], int64[::1], int64[::1], int32[::1])"
)
def resolve(space, lanes, address, size, table, windows, host, owner):  # type: ignore[no-untyped-def]
    """Fill in each lane's host pointer and owner; return (fault kind, position), kind 0 if all addresses are valid.

    ``space``: 0 generic, 1 global, 2 shared, 3 local. ``owner``: the allocation's row, -1 for shared, -2 for local.
    """
    last = 0
    rows = table.shape[0]
    uniform = len(address) == 1
    for i in range(len(lanes)):
        a = types.int64(address[0] if uniform else address[i])
        where = space
        if where == 0:
            where = 1
            if a >= SHARED_WINDOW:
                where = 3 if a >= LOCAL_WINDOW else 2
                a -= LOCAL_WINDOW if where == 3 else SHARED_WINDOW
        if a & (size - 1):
            return MISALIGNED, i
        if where == 1:
            if not (last < rows and table[last, 0] <= a and a + size <= table[last, 1]):
                low, high = 0, rows  # the last row that starts at or below a
                while low < high:
                    middle = (low + high) // 2
                    if table[middle, 0] <= a:
                        low = middle + 1
                    else:
                        high = middle
                last = low - 1
                if last < 0 or a + size > table[last, 1]:
                    return OUT_OF_BOUNDS, i
            host[i] = table[last, 2] + (a - table[last, 0])
            owner[i] = last
        elif where == 2:
            if a < SHARED_BASE or a + size > windows[1]:
                return OUT_OF_BOUNDS, i
            host[i] = windows[0] + (lanes[i] // windows[3]) * windows[2] + (a - SHARED_BASE)
            owner[i] = -1
        else:
            if a < LOCAL_BASE or a + size > windows[5]:
                return OUT_OF_BOUNDS, i
            host[i] = windows[4] + lanes[i] * windows[6] + (a - LOCAL_BASE)
            owner[i] = -2
    return 0, 0


@loop(*(f"void(int64[::1], int32[::1], uint{bits}[:,::1])" for bits in (8, 16, 32, 64)))
def gather(host, lanes, out):  # type: ignore[no-untyped-def]
    """Load element c at each lane's pointer into ``out[c, lane]``."""
    step = out.itemsize
    like = out.dtype.type(0)
    for c in range(out.shape[0]):
        for i in range(len(lanes)):
            out[c, lanes[i]] = peek(host[i] + c * step, like)


@loop(*(f"void(int64[::1], int32[::1], uint{bits}[:,::1])" for bits in (8, 16, 32, 64)))
def scatter(host, lanes, values):  # type: ignore[no-untyped-def]
    """Store ``values[c, lane]`` at each lane's pointer, in lane order: the last lane wins."""
    step = values.itemsize
    for i in range(len(lanes)):
        for c in range(values.shape[0]):
            poke(host[i] + c * step, values[c, lanes[i]])


@loop("void(int64[::1], int64[::1], int64[::1], int64)")
def copy(target, source, valid, size):  # type: ignore[no-untyped-def]
    """Copy ``valid`` bytes per lane and fill the rest of its ``size`` bytes with zeros."""
    like = types.uint8(0)
    for i in range(len(target)):
        for b in range(size):
            poke(target[i] + b, peek(source[i] + b, like) if b < valid[i] else like)
