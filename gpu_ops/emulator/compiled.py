"""The loops over lanes that touch memory, compiled: addresses to host pointers, gather, scatter, copy.

Everything else the emulator does is NumPy; these are scalar work per lane (a search, a branch, a load).

``table`` has a row per allocation, sorted by start: start, end (device addresses), host pointer, host pointer of the
shadow bytes or 0. ``windows``: see :class:`~gpu_ops.emulator.memory.Memory`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from gpu_ops.emulator.ahead import loop

__all__ = ["MISALIGNED", "OUT_OF_BOUNDS", "copy", "gather", "peek", "poke", "resolve", "scatter"]

OUT_OF_BOUNDS, MISALIGNED = 1, 2

# Columns of the windows array: shared (host, limit, bytes per block, threads per block), local (host, limit, stride)

# The first byte of a window. On sm_90 the system owns the first KiB of shared memory; here too on older
# architectures, so that a null pointer into shared memory is always a fault.
SHARED_BASE, LOCAL_BASE = 0x400, 0x100
SHARED_WINDOW, LOCAL_WINDOW, WINDOW_BYTES = 1 << 56, 1 << 57, 1 << 32


@intrinsic  # type: ignore[untyped-decorator]
def peek(typingctx: Any, pointer: Any, like: Any) -> Any:
    """The value of ``like``'s type at a host pointer; any alignment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.inttoptr(arguments[0], context.get_value_type(like).as_pointer())
        value = builder.load(address)
        value.align = 1
        return value

    return like(types.int64, like), codegen


@intrinsic  # type: ignore[untyped-decorator]
def poke(typingctx: Any, pointer: Any, value: Any) -> Any:
    """Store a value at a host pointer; any alignment."""

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
    """Host pointers of ``size`` bytes at each lane's address: (fault kind, position), kind 0 if all are good.

    ``space``: 0 generic, 1 global, 2 shared, 3 local. ``owner``: the allocation's row, -1 shared, -2 local.
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
    """``out[c, lane]`` = element c at the lane's pointer."""
    step = out.itemsize
    like = out.dtype.type(0)
    for c in range(out.shape[0]):
        for i in range(len(lanes)):
            out[c, lanes[i]] = peek(host[i] + c * step, like)


@loop(*(f"void(int64[::1], int32[::1], uint{bits}[:,::1])" for bits in (8, 16, 32, 64)))
def scatter(host, lanes, values):  # type: ignore[no-untyped-def]
    """Store ``values[c, lane]`` at the lane's pointer; in lane order, so that the last lane wins."""
    step = values.itemsize
    for i in range(len(lanes)):
        for c in range(values.shape[0]):
            poke(host[i] + c * step, values[c, lanes[i]])


@loop("void(int64[::1], int64[::1], int64[::1], int64)")
def copy(target, source, valid, size):  # type: ignore[no-untyped-def]
    """``size`` bytes per lane, of which the first ``valid`` come from the source and the rest are zero."""
    like = types.uint8(0)
    for i in range(len(target)):
        for b in range(size):
            poke(target[i] + b, peek(source[i] + b, like) if b < valid[i] else like)
