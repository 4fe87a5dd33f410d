"""The address space of a launch: global allocations far apart, shared memory per block, local per thread.

========  ==================================  ====================================================
space     device address                      host memory
========  ==================================  ====================================================
global    a multiple of 64 GiB each           the caller's own array, used in place
shared    offset from 0x400; generic + 2^56   ``(blocks, bytes)``, made for each batch of blocks
local     offset from 0x100; generic + 2^57   ``(threads, bytes)``, likewise
========  ==================================  ====================================================

The gaps make any address that misses its allocation a fault, also one that wrapped at 2^31 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_ops.emulator import compiled
from gpu_ops.emulator.compiled import LOCAL_BASE, SHARED_BASE
from gpu_ops.emulator.program import Program, initial_bytes
from gpu_ops.emulator.shadow import OUTSIDE, POISONED, UNWRITTEN
from gpu_ops.emulator.types import Array

__all__ = [
    "GENERIC", "GLOBAL", "LOCAL", "SHARED", "SPACES", "Allocation", "Buffer", "Memory",
]  # fmt: skip

GENERIC, GLOBAL, SHARED, LOCAL = range(4)
SPACES = {"global": GLOBAL, "const": GLOBAL, "shared": SHARED, "local": LOCAL}

_SPACING = 1 << 36


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array argument with more to know about it than its bytes.

    Parameters
    ----------
    array : numpy.ndarray
    name : str
        For messages.
    written : bool
        False: it holds nothing yet, and reading a byte before the kernel wrote it is a fault.
    poison : bool array, optional
        Broadcast to the array: True where an element is padding that must not be read.
    """

    array: Array
    name: str = ""
    written: bool = True
    poison: Array | None = None


@dataclass(eq=False)
class Allocation:
    """A range of global memory: one argument, or several that share memory; or a variable of the module."""

    name: str
    start: int
    bytes: int
    host: int
    keep: Any  # what owns the host memory
    writable: bool = True
    shadow: Array | None = None

    @property
    def end(self) -> int:
        return self.start + self.bytes


@dataclass(eq=False)
class _Range:
    """Host bytes of one or several arguments that overlap."""

    low: int
    high: int
    buffers: list[Buffer] = field(default_factory=list)


class Memory:
    """Everything a launch can address. ``pointer(array)`` is the device address of an argument."""

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
        """What addresses are looked up in. For stores, a read-only allocation has no bytes: no access pays for it."""
        rows = [
            [a.start, a.end, a.host, 0 if a.shadow is None else a.shadow.ctypes.data]
            for a in self.allocations
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 4)
        self._store_table = self.table.copy()
        for row, allocation in zip(self._store_table, self.allocations, strict=True):
            if not allocation.writable:
                row[1] = allocation.start

    def _variable_bytes(self, variable: Any, data: Array) -> None:
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
        # A fresh device array is 256-byte aligned; a view keeps its distance from the start of its owner.
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
        """Place bytes the host made (the kernel's parameters); must precede the first access."""
        allocation = self._allocate(name, data.ctypes.data, data.size, data)
        self._tabulate()
        return allocation.start

    def begin(self, blocks: int, threads: int, dynamic_shared: int) -> None:
        """Fresh shared and local memory for a batch of blocks of ``threads`` (padded) threads."""
        shared = self.program.shared_bytes + dynamic_shared
        local = self.program.local_bytes
        # 0xCD: what was never written should not look like a sensible zero.
        self.shared = np.full((blocks, -(-shared // 16) * 16), 0xCD, np.uint8)
        self.local = np.full((blocks * threads, -(-local // 16) * 16), 0xCD, np.uint8)
        self.windows[:] = (
            self.shared.ctypes.data, SHARED_BASE + shared, self.shared.shape[1], threads,
            self.local.ctypes.data, LOCAL_BASE + local, self.local.shape[1],
        )  # fmt: skip

    def resolve(
        self, space: int, lanes: Array, address: Array, size: int, *, write: bool
    ) -> tuple[Array, Array, int, int]:
        """(host pointers, owners, fault kind or 0, position of the first fault) for each lane."""
        host, owner = np.empty(len(lanes), np.int64), np.empty(len(lanes), np.int32)
        table = self._store_table if write else self.table
        kind, position = compiled.resolve(space, lanes, address, size, table, self.windows, host, owner)
        return host, owner, kind, position

    def read_only(self, space: int, address: int, size: int) -> bool:
        """Whether bytes that no store reaches could be loaded."""
        lane, at = np.zeros(1, np.int32), np.array([address], np.uint64)
        return not self.resolve(space, lane, at, size, write=False)[2]

    def describe(self, space: int, address: int) -> str:
        """Where an address lies, for messages: in or beside which allocation."""
        if space == GENERIC and address >= compiled.LOCAL_WINDOW:
            return f"local offset {address - compiled.LOCAL_WINDOW - LOCAL_BASE}"
        if space == GENERIC and address >= compiled.SHARED_WINDOW:
            space, address = SHARED, address - compiled.SHARED_WINDOW
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
        return (
            f"{offset - near.bytes} bytes past the end of {where}"
            if offset >= near.bytes
            else f"byte {offset} of {where}"
        )


def _owner(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _merge(buffers: Sequence[Buffer]) -> list[_Range]:
    """Arguments as disjoint ranges of host memory: views of one array that overlap share one."""
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
    """A byte of state per byte: what no argument covers, such as the gaps between strided rows, is outside."""
    size = span.high - span.low
    only = span.buffers[0] if len(span.buffers) == 1 and span.buffers[0].array.flags.forc else None
    if only is not None and only.written and only.poison is None:
        return np.zeros(size, np.uint8)  # untouched pages: a huge input costs nothing
    shadow = np.full(size, OUTSIDE, np.uint8)
    # Results first: one that shares memory with an input (`out=x`) holds something from the start.
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
