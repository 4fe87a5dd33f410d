"""Address space of a launch: global allocations, shared memory per block, local memory per thread.

========  ==================================  ====================================================
space     device address                      host memory
========  ==================================  ====================================================
global    a multiple of 64 GiB each           the caller's own array, used in place
shared    offset from 0x400; generic + 2^56   ``(blocks, bytes)``, made for each batch of blocks
local     offset from 0x100; generic + 2^57   ``(threads, bytes)``, likewise
========  ==================================  ====================================================

Global allocations are far apart, so an address that misses its allocation is a fault, even one that wrapped at 2^31.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpu_ops.emulator import aot
from gpu_ops.emulator.aot import LOCAL_BASE, SHARED_BASE
from gpu_ops.emulator.buffers import Buffer, Pinned, gone, is_unset
from gpu_ops.emulator.program import PtxProgram, initial_bytes
from gpu_ops.emulator.shadow import OUTSIDE, POISONED, UNWRITTEN
from gpu_ops.emulator.signature import plain_name
from gpu_ops.emulator.syntax import Array, Variable

GENERIC, GLOBAL, SHARED, LOCAL = range(4)
SPACES = {"global": GLOBAL, "const": GLOBAL, "shared": SHARED, "local": LOCAL}

SCRATCH = -3  # owner of an invalid access if faults are collected; -1 is shared, -2 local

_SPACING = 1 << 36
_NULL = 1 << 32  # an address below is a null pointer with an offset


EACH, SOME, NO = range(3)  # written bytes that a read requires: each, at least one, none


@dataclass(frozen=True)
class Access:
    """Memory instruction, as the sanitizer and the profiler see it."""

    pc: int
    space: int
    size: int  # bytes per lane
    read: bool
    write: bool
    initialised: int = EACH
    padded: bool = False  # unwritten local memory is no fault: it may be padding
    tracked: bool = False  # the step records uninitialised bytes: see undefined.py
    atomic: bool = False
    asynchronous: bool = False
    constant: bool = False  # ld.global.nc: the data must not change during the launch


@dataclass(frozen=True)
class LaneAddresses:
    """Addresses of one access: lanes, device addresses, host pointers, owners."""

    lanes: Array
    address: Array
    host: Array
    owner: Array

    def moved(self, offset: int) -> LaneAddresses:
        """Addresses that are ``offset`` bytes higher."""
        if offset == 0:
            return self
        return LaneAddresses(self.lanes, self.address + np.uint64(offset), self.host + offset, self.owner)

    def of(self, at: Array | slice) -> LaneAddresses:
        """Addresses of some of the lanes, by position."""
        address = self.address if len(self.address) == 1 else self.address[at]
        return LaneAddresses(self.lanes[at], address, self.host[at], self.owner[at])

    def after(self, position: int) -> LaneAddresses:
        return self.of(slice(position + 1, None))


@dataclass(eq=False)
class Allocation:
    """Range of global memory: one argument, several that overlap, or a variable of the module.

    ``role``: "argument", "pinned" for an array that has an address only by ``pointer()``, or a variable's space.
    """

    name: str
    role: str
    start: int
    bytes: int
    host: int
    keep: Any  # keeps the host memory alive
    writable: bool = True
    shadow: Array | None = None
    arrays: list[Array] = field(default_factory=list)  # arrays in the range
    unset: bool = False  # a __constant__ variable without a value

    @property
    def end(self) -> int:
        return self.start + self.bytes

    def describe(self, offset: int) -> str:
        """Text for an offset, such as ``past the end of `out`: element 1024 of 1024 (byte 4096 of 4096)``."""
        name = f"`{self.name}`" if self.name.isidentifier() else self.name or "a buffer"
        where = f"byte {offset} of {self.bytes}"
        array = self.arrays[0] if self.arrays else None
        plain = {(a.itemsize, a.nbytes if a.flags.c_contiguous else 0) for a in self.arrays}
        if array is not None and array.itemsize > 1 and plain == {(array.itemsize, self.bytes)}:
            index = offset // array.itemsize
            if array.ndim > 1 and 0 <= index < array.size:
                at = tuple(int(i) for i in np.unravel_index(index, array.shape))
                where = f"element {at} of {array.shape} ({where})"
            else:
                where = f"element {index} of {array.size} ({where})"
        if self.unset:
            where += f", a __constant__ variable without a value: pass symbols={{{self.name!r}: array}}"
        if offset < 0:
            return f"before the start of {name}: {where}"
        return f"past the end of {name}: {where}" if offset >= self.bytes else f"of {name}: {where}"


@dataclass(eq=False)
class _Range:
    """Host bytes of one argument, or of several that overlap."""

    low: int
    high: int
    buffers: list[Buffer] = field(default_factory=list)


class Memory:
    """Memory that a launch can address. ``symbols``: the arrays that replace global variables, by name."""

    def __init__(
        self,
        program: PtxProgram,
        buffers: Sequence[Buffer],
        *,
        shadowed: bool,
        symbols: Mapping[str, Array] | None = None,
    ) -> None:
        self.program = program
        self.shadowed = shadowed
        self.allocations: list[Allocation] = []  # by address
        self._end = 0  # end of the allocations at assigned addresses
        self.symbols = dict(program.functions)
        self.grid_barrier = 0
        for span in _merge(buffers):
            self._allocate_arguments(span)
        fresh = [(v, self._allocate_variable(v, (symbols or {}).get(v.name))) for v in program.globals]
        for variable, data in fresh:  # an initial value may be the address of a later variable
            initial = bytes(initial_bytes(variable, self.symbols))
            data[: len(initial)] = np.frombuffer(initial, np.uint8)
        self._tabulate()
        self.windows = np.zeros(7, np.int64)
        self._scratch = np.zeros(64, np.uint8)
        self.shared = self.local = np.zeros((0, 0), np.uint8)

    def _allocate_variable(self, variable: Variable, given: Array | None) -> Array:
        """Allocate a variable; return the bytes for its initial value, which are a dummy for the caller's memory."""
        data = np.zeros(max(1, variable.bytes), np.uint8) if given is None else given
        host = int(data.__array_interface__["data"][0])
        allocation = self._allocate(plain_name(variable.name), variable.space, host, data.nbytes, data)
        self.symbols[variable.name] = allocation.start
        if given is not None:
            allocation.arrays, allocation.writable = [given], given.flags.writeable
            return np.zeros(variable.bytes, np.uint8)
        if self.shadowed and is_unset(self.program, variable):
            allocation.unset = True
            allocation.shadow = np.full(data.size, UNWRITTEN, np.uint8)
        return data

    def _tabulate(self) -> None:
        """Make the lookup tables. For stores a read-only allocation is empty, so the check costs nothing."""
        rows = [
            [a.start, a.end, a.host, 0 if a.shadow is None else a.shadow.ctypes.data]
            for a in self.allocations
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 4)
        self._store_table = self.table.copy()
        for row, allocation in zip(self._store_table, self.allocations, strict=True):
            if not allocation.writable:
                row[1] = allocation.start

    def _allocate(
        self, name: str, role: str, host: int, size: int, keep: Any, skew: int = 0, start: int = 0
    ) -> Allocation:
        if not start:
            start = (self._end // _SPACING + 1) * _SPACING + skew
            self._end = start + size
        allocation = Allocation(name, role, start, size, host, keep)
        insort(self.allocations, allocation, key=lambda a: a.start)
        return allocation

    def _allocate_arguments(self, span: _Range) -> None:
        first = span.buffers[0].array
        # A new device array is aligned to 256 bytes; a view keeps its distance from the start of its owner.
        skew = (span.low - _owner(first)) % 256
        names = [b.name for b in span.buffers if not isinstance(b, Pinned)]
        role = "argument" if names else "pinned"
        names = names or [max(span.buffers, key=lambda b: b.array.nbytes).name]
        name = " / ".join(dict.fromkeys(n for n in names if n))
        keep = [b.array for b in span.buffers]
        start = 0
        for b in span.buffers:
            if isinstance(b, Pinned):
                start = b.device - int(b.array.__array_interface__["data"][0]) + span.low
        allocation = self._allocate(name, role, span.low, span.high - span.low, keep, skew, start)
        allocation.arrays = keep
        allocation.writable = any(array.flags.writeable for array in keep)
        if self.shadowed:
            allocation.shadow = _shadow(span)

    def pointer(self, array: Array) -> int:
        """Device address of an argument's first element; 0 for an empty one."""
        if array.size == 0:
            return 0
        at = array.__array_interface__["data"][0]
        for a in self.allocations:
            if a.host <= at < a.host + a.bytes:
                return a.start + int(at) - a.host
        raise LookupError("not an argument of this launch")

    def constant(self, name: str, data: Array) -> int:
        """Allocate bytes from the host (the kernel's parameters). Call it before the first access."""
        allocation = self._allocate(name, "const", data.ctypes.data, data.size, data)
        self._tabulate()
        return allocation.start

    def begin(self, blocks: int, threads: int, dynamic_shared: int) -> None:
        """Allocate shared and local memory for a batch of blocks of ``threads`` threads, including padding lanes."""
        shared = self.program.shared_bytes + dynamic_shared
        local = self.program.local_bytes
        # 0xCD, so that unwritten memory is not mistaken for zeros.
        self.shared = np.full((blocks, -(-shared // 16) * 16), 0xCD, np.uint8)
        self.local = np.full((blocks * threads, -(-local // 16) * 16), 0xCD, np.uint8)
        self.windows[:4] = self.shared.ctypes.data, SHARED_BASE + shared, self.shared.shape[1], threads
        self.windows[4:] = self.local.ctypes.data, LOCAL_BASE + local, self.local.shape[1]

    def resolve(self, access: Access, lanes: Array, address: Array) -> tuple[LaneAddresses, int, int]:
        """Resolve addresses; return (place of each lane's access, fault kind or 0, position of the first fault)."""
        place = LaneAddresses(lanes, address, np.empty(len(lanes), np.int64), np.empty(len(lanes), np.int32))
        table = self._store_table if access.write else self.table
        fault, position = aot.resolve(
            access.space, lanes, address, access.size, table, self.windows, place.host, place.owner
        )
        return place, fault, position

    def resume(self, access: Access, place: LaneAddresses, position: int) -> tuple[int, int]:
        """Continue after a fault that is not raised: give that lane scratch memory, and find the next fault."""
        self._scratch[:] = 0
        place.host[position], place.owner[position] = self._scratch.ctypes.data, SCRATCH
        first = position + 1
        rest = place.address if len(place.address) == 1 else place.address[first:]
        table = self._store_table if access.write else self.table
        lanes, host, owner = place.lanes[first:], place.host[first:], place.owner[first:]
        fault, at = aot.resolve(access.space, lanes, rest, access.size, table, self.windows, host, owner)
        return fault, first + at

    def read_only(self, access: Access, address: int) -> bool:
        """Whether these bytes, which cannot be stored to, can be loaded."""
        lane, at = np.zeros(1, np.int32), np.array([address], np.uint64)
        return not self.resolve(replace(access, write=False), lane, at)[1]

    def describe(self, space: int, address: int) -> str:
        """Description of an address for messages: the allocation in or next to which it is, and the element."""
        if space == GENERIC and address >= aot.LOCAL_WINDOW:
            return f"at local offset {address - aot.LOCAL_WINDOW - LOCAL_BASE}"
        if space == GENERIC and address >= aot.SHARED_WINDOW:
            space, address = SHARED, address - aot.SHARED_WINDOW
        if space == SHARED:
            return f"at shared offset {address - SHARED_BASE} of {int(self.windows[1]) - SHARED_BASE} bytes"
        if space == LOCAL:
            return f"at local offset {address - LOCAL_BASE} of {int(self.windows[5]) - LOCAL_BASE} bytes"
        if 0 <= address < _NULL or not self.allocations:
            return f"at address {address:#x}: a null pointer"
        if text := gone(address):
            return text
        near = min(self.allocations, key=lambda a: max(a.start - address, address - a.end + 1, 0))
        return near.describe(address - near.start)


def _owner(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _merge(buffers: Sequence[Buffer]) -> list[_Range]:
    """Merge arguments into disjoint ranges of host memory; views that overlap share a range."""
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
    """Make a byte of state per byte. Bytes of no argument, such as gaps between strided rows, are outside."""
    size = span.high - span.low
    only = span.buffers[0] if len(span.buffers) == 1 and span.buffers[0].array.flags.forc else None
    if only is not None and only.written and only.poison is None:
        return np.zeros(size, np.uint8)  # the pages stay untouched, so a huge input costs nothing
    shadow = np.full(size, OUTSIDE, np.uint8)
    # An argument takes precedence over an array passed to pointer().
    # Results come first: a result that shares memory with an input (`out=x`) has contents from the start.
    for buffer in sorted(span.buffers, key=lambda b: (not isinstance(b, Pinned), b.written)):
        array = buffer.array
        at = array.__array_interface__["data"][0] - span.low
        cells = np.lib.stride_tricks.as_strided(
            shadow[at:], (*array.shape, array.itemsize), (*array.strides, 1), writeable=True
        )
        cells[...] = 0 if buffer.written else UNWRITTEN
        if buffer.poison is not None:
            cells[np.broadcast_to(buffer.poison, array.shape)] |= POISONED
    return shadow
