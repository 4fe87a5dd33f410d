"""The address space of a launch: global allocations, shared memory per block, local memory per thread.

========  ==================================  ====================================================
space     device address                      host memory
========  ==================================  ====================================================
global    a multiple of 64 GiB each           the caller's own array, used in place
shared    offset from 0x400; generic + 2^56   ``(blocks, bytes)``, made for each batch of blocks
local     offset from 0x100; generic + 2^57   ``(threads, bytes)``, likewise
========  ==================================  ====================================================

Global allocations lie far apart, so an address that misses its allocation is a fault, even one that wrapped at 2^31.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops.emulator import aot
from gpu_ops.emulator.aot import LOCAL_BASE, SHARED_BASE
from gpu_ops.emulator.program import Program, initial_bytes
from gpu_ops.emulator.shadow import OUTSIDE, POISONED, UNWRITTEN
from gpu_ops.emulator.syntax import Array, Variable

GENERIC, GLOBAL, SHARED, LOCAL = range(4)
SPACES = {"global": GLOBAL, "const": GLOBAL, "shared": SHARED, "local": LOCAL}

_SPACING = 1 << 36


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array argument with a name and the state of its contents.

    Parameters
    ----------
    array : numpy.ndarray
    name : str
        Shown in messages.
    written : bool
        False for an array without contents: reading a byte before the kernel has written it is a fault.
    poison : bool array, optional
        Broadcast to the array. True marks padding that must not be read.
    """

    array: Array
    name: str = ""
    written: bool = True
    poison: Array | None = None


@dataclass(frozen=True)
class Access:
    """A memory instruction, as the sanitizer and the profiler see it."""

    pc: int
    space: int
    size: int  # bytes per lane
    read: bool
    write: bool
    element: int = 0  # bytes; each element of a load must have been written. 0: not checked
    atomic: bool = False
    asynchronous: bool = False
    constant: bool = False  # ld.global.nc: the data must not change during the launch


@dataclass(frozen=True)
class Place:
    """The addresses of one access: lanes, device addresses, host pointers, owners."""

    lanes: Array
    address: Array
    host: Array
    owner: Array


@dataclass(eq=False)
class Allocation:
    """A range of global memory: one argument, several that overlap, or a variable of the module."""

    name: str
    start: int
    bytes: int
    host: int
    keep: Any  # keeps the host memory alive
    writable: bool = True
    shadow: Array | None = None

    @property
    def end(self) -> int:
        return self.start + self.bytes


@dataclass(eq=False)
class _Range:
    """The host bytes of one argument, or of several that overlap."""

    low: int
    high: int
    buffers: list[Buffer] = field(default_factory=list)


class Memory:
    """Everything that a launch can address."""

    def __init__(self, program: Program, buffers: Sequence[Buffer], *, shadowed: bool) -> None:
        self.program = program
        self.shadowed = shadowed
        self.allocations: list[Allocation] = []
        self.symbols: dict[str, int] = {}
        for span in _merge(buffers):
            self._allocate_arguments(span)
        for variable in program.globals:
            data = np.zeros(max(1, variable.bytes), np.uint8)
            self.symbols[variable.name] = self._allocate(
                variable.name, data.ctypes.data, data.size, data
            ).start
            self._variable_bytes(variable, data)
        self._tabulate()
        self.windows = np.zeros(7, np.int64)
        self.shared = self.local = np.zeros((0, 0), np.uint8)

    def _tabulate(self) -> None:
        """Make the lookup tables. For stores a read-only allocation is empty, so no access pays for the check."""
        rows = [
            [a.start, a.end, a.host, 0 if a.shadow is None else a.shadow.ctypes.data]
            for a in self.allocations
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 4)
        self._store_table = self.table.copy()
        for row, allocation in zip(self._store_table, self.allocations, strict=True):
            if not allocation.writable:
                row[1] = allocation.start

    def _variable_bytes(self, variable: Variable, data: Array) -> None:
        initial = bytes(initial_bytes(variable, self.symbols))
        data[: len(initial)] = np.frombuffer(initial, np.uint8)

    def _allocate(self, name: str, host: int, size: int, keep: Any, skew: int = 0) -> Allocation:
        previous = self.allocations[-1].end if self.allocations else 0
        start = (previous // _SPACING + 1) * _SPACING + skew
        allocation = Allocation(name, start, size, host, keep)
        self.allocations.append(allocation)
        return allocation

    def _allocate_arguments(self, span: _Range) -> None:
        first = span.buffers[0].array
        # A new device array is aligned to 256 bytes; a view keeps its distance from the start of its owner.
        skew = (span.low - _owner(first)) % 256
        name = " / ".join(dict.fromkeys(b.name for b in span.buffers if b.name))
        keep = [b.array for b in span.buffers]
        allocation = self._allocate(name, span.low, span.high - span.low, keep, skew)
        allocation.writable = any(array.flags.writeable for array in keep)
        if self.shadowed:
            allocation.shadow = _shadow(span)

    def pointer(self, array: Array) -> int:
        """The device address of an argument's first element; 0 for an empty one."""
        if array.size == 0:
            return 0
        at = array.__array_interface__["data"][0]
        for a in self.allocations:
            if a.host <= at < a.host + a.bytes:
                return a.start + int(at) - a.host
        raise LookupError("not an argument of this launch")

    def constant(self, name: str, data: Array) -> int:
        """Allocate bytes that the host made (the kernel's parameters). Call it before the first access."""
        allocation = self._allocate(name, data.ctypes.data, data.size, data)
        self._tabulate()
        return allocation.start

    def begin(self, blocks: int, threads: int, dynamic_shared: int) -> None:
        """Allocate shared and local memory for a batch of blocks of ``threads`` threads, padding lanes included."""
        shared = self.program.shared_bytes + dynamic_shared
        local = self.program.local_bytes
        # 0xCD, so that memory that was never written does not pass for zero.
        self.shared = np.full((blocks, -(-shared // 16) * 16), 0xCD, np.uint8)
        self.local = np.full((blocks * threads, -(-local // 16) * 16), 0xCD, np.uint8)
        self.windows[:4] = self.shared.ctypes.data, SHARED_BASE + shared, self.shared.shape[1], threads
        self.windows[4:] = self.local.ctypes.data, LOCAL_BASE + local, self.local.shape[1]

    def resolve(
        self, space: int, lanes: Array, address: Array, size: int, *, write: bool
    ) -> tuple[Array, Array, int, int]:
        """(host pointers, owners, fault kind or 0, position of the first fault) for each lane."""
        host, owner = np.empty(len(lanes), np.int64), np.empty(len(lanes), np.int32)
        table = self._store_table if write else self.table
        kind, position = aot.resolve(space, lanes, address, size, table, self.windows, host, owner)
        return host, owner, kind, position

    def read_only(self, space: int, address: int, size: int) -> bool:
        """Whether these bytes, which no store may reach, can be loaded."""
        lane, at = np.zeros(1, np.int32), np.array([address], np.uint64)
        return not self.resolve(space, lane, at, size, write=False)[2]

    def describe(self, space: int, address: int) -> str:
        """The allocation that an address is in or next to, for messages."""
        if space == GENERIC and address >= aot.LOCAL_WINDOW:
            return f"local offset {address - aot.LOCAL_WINDOW - LOCAL_BASE}"
        if space == GENERIC and address >= aot.SHARED_WINDOW:
            space, address = SHARED, address - aot.SHARED_WINDOW
        if space == SHARED:
            return f"shared offset {address - SHARED_BASE} of {int(self.windows[1]) - SHARED_BASE} bytes"
        if space == LOCAL:
            return f"local offset {address - LOCAL_BASE} of {int(self.windows[5]) - LOCAL_BASE} bytes"
        near = min(
            self.allocations,
            key=lambda a: max(a.start - address, address - a.end + 1, 0),
            default=None,
        )
        if near is None:
            return f"global address {address:#x}; the kernel has no buffers"
        offset = address - near.start
        where = f"{near.name or 'a buffer'} ({near.bytes} bytes)"
        if offset < 0:
            return f"{-offset} bytes before {where}"
        past = offset - near.bytes
        return f"{past} bytes past the end of {where}" if past >= 0 else f"byte {offset} of {where}"


def _owner(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _merge(buffers: Sequence[Buffer]) -> list[_Range]:
    """Arguments as disjoint ranges of host memory; views that overlap share a range."""
    spans: list[_Range] = []
    for buffer in sorted((b for b in buffers if b.array.size), key=lambda b: _bounds(b.array)):
        low, high = _bounds(buffer.array)
        if spans and low < spans[-1].high:
            spans[-1].high = max(high, spans[-1].high)
            spans[-1].buffers.append(buffer)
        else:
            spans.append(_Range(low, high, [buffer]))
    return spans


def _shadow(span: _Range) -> Array:
    """One byte of state per byte. Bytes of no argument, such as gaps between strided rows, are outside."""
    size = span.high - span.low
    only = span.buffers[0] if len(span.buffers) == 1 and span.buffers[0].array.flags.forc else None
    if only is not None and only.written and only.poison is None:
        return np.zeros(size, np.uint8)  # the pages stay untouched, so a huge input is free
    shadow = np.full(size, OUTSIDE, np.uint8)
    # Results first: a result that shares memory with an input (`out=x`) has contents from the start.
    for buffer in sorted(span.buffers, key=lambda b: b.written):
        array = buffer.array
        at = array.__array_interface__["data"][0] - span.low
        cells = np.lib.stride_tricks.as_strided(
            shadow[at:], (*array.shape, array.itemsize), (*array.strides, 1), writeable=True
        )
        cells[...] = 0 if buffer.written else UNWRITTEN
        if buffer.poison is not None:
            cells[np.broadcast_to(buffer.poison, array.shape)] |= POISONED
    return shadow
