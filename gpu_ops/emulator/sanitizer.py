"""Finds faults that lock-step execution hides: races, uninitialised reads, wrong warp masks.

The machine itself always finds out-of-bounds and misaligned accesses, writes to read-only arguments, deadlocks, and
lanes of one warp that wait at different barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from gpu_ops.emulator import aot, shadow
from gpu_ops.emulator.aot import SHARED_BASE
from gpu_ops.emulator.batch import WARP, Batch
from gpu_ops.emulator.memory import EACH, NO, SOME, Access, Place
from gpu_ops.emulator.program import Program
from gpu_ops.emulator.shadow import EACH_BYTE, OUTSIDE, POISONED, STORED, UNWRITTEN
from gpu_ops.emulator.signature import plain_name
from gpu_ops.emulator.syntax import BITS, Array

#: Every kind of fault a :class:`~gpu_ops.emulator.errors.SanitizerError` can name.
KINDS = (
    "out of bounds",
    "misaligned",
    "write to a read-only argument",
    "uninitialised read",
    "poisoned read",
    "read-only load of written data",
    "shared-memory race",
    "asynchronous copy not waited for",
    "barrier divergence",
    "deadlock",
    "livelock",
    "endless loop",
    "warp mask",
    "trap",
)

_GLOBAL = {
    OUTSIDE: ("out of bounds", "a byte that belongs to no argument (between the rows of a strided array?)"),
    POISONED: ("poisoned read", "padding that must not be read"),
    UNWRITTEN: ("uninitialised read", "a byte that nothing has written"),
    STORED: ("read-only load of written data", "a byte that this launch has written, by ld.global.nc"),
}


@dataclass(eq=False)
class _Copies:
    """Pending asynchronous copies of one instruction."""

    lanes: Array
    host: Array
    size: int
    group: Array  # per lane: the number of the commit_group that covers the copy


class Sanitizer:
    """Checks every access of one machine, batch by batch."""

    def __init__(self, program: Program) -> None:
        self.granule = _granule(program)

    def begin(self, m: Batch) -> None:
        """Start a batch of blocks."""
        blocks, stride = m.memory.shared.shape
        self.m = m
        self.state = np.zeros((blocks * stride // self.granule, shadow.COLUMNS), np.int32)
        self.epochs = np.ones(blocks, np.int32)
        self.warp_epochs = np.ones(m.threads // WARP, np.int32)
        self.written = np.zeros(m.memory.local.shape, np.uint8)
        self.committed = np.zeros(m.threads, np.int32)
        self.copies: list[_Copies] = []
        self.tables = m.memory.windows, self.granule, self.state, self.epochs, self.warp_epochs

    # -- memory -----------------------------------------------------------------------------------

    def access(self, access: Access, place: Place, values: Array | None = None) -> None:
        """Check an access before it happens. ``values``: what a store writes, ``[elements, threads]``."""
        owners = place.owner
        if len(owners) == 0:
            return
        low, high = int(owners.min()), int(owners.max())
        if high >= 0:
            self._global(access, place)
        if low < 0:
            if low == high == -1:
                self._shared(access, place.lanes, place.host, values)
            elif low == high == -2:
                self._local(access, place.lanes, place.host)
            else:
                mine = owners == -1
                self._shared(access, place.lanes[mine], place.host[mine], values)
                mine = owners == -2
                self._local(access, place.lanes[mine], place.host[mine])

    def _global(self, access: Access, place: Place) -> None:
        wrong = OUTSIDE | POISONED | (STORED if access.constant else 0)
        if access.initialised == EACH:
            wrong |= UNWRITTEN
        elif access.initialised == SOME:
            self._global_copy(access, place)
        table, wrong = self.m.memory.table, wrong * EACH_BYTE
        host, owner, first = place.host, place.owner, 0
        while True:
            bits, position, byte = shadow.check_global(
                host, owner, table, access.size, wrong, access.read, access.write
            )
            if not bits:
                return
            kind, what = next(text for bit, text in _GLOBAL.items() if bits & bit)
            address = int(place.address[0 if len(place.address) == 1 else first + position]) + byte
            lane = int(place.lanes[first + position])
            self.m.report(kind, access.pc, lane, partial(self._global_text, access, address, what))
            first += position + 1
            host, owner = place.host[first:], place.owner[first:]

    def _global_copy(self, access: Access, place: Place) -> None:
        """A copy of which no byte has been written."""
        table = self.m.memory.table[place.owner]
        known = (place.owner >= 0) & (table[:, 3] != 0)
        lanes, host = place.lanes[known], (place.host - table[:, 2] + table[:, 3])[known]
        bits = np.zeros((access.size, self.m.threads), np.uint8)
        aot.gather(host, lanes, bits)
        for i in np.flatnonzero((bits[:, lanes] & UNWRITTEN != 0).all(axis=0)):
            address = int(np.broadcast_to(place.address, place.host.shape)[known][i])
            text = partial(self._global_text, access, address, _GLOBAL[UNWRITTEN][1])
            self.m.report(_GLOBAL[UNWRITTEN][0], access.pc, int(lanes[i]), text)

    def _global_text(self, access: Access, address: int, what: str) -> str:
        verb = "read" if access.read else "write"
        return f"{verb} of {what}, {self.m.memory.describe(access.space, address)}"

    def _local(self, access: Access, lanes: Array, host: Array) -> None:
        if access.read and (not access.element or access.initialised == NO):
            return
        element = access.size if access.initialised == SOME else access.element
        base, stride = int(self.m.memory.windows[4]), int(self.m.memory.windows[6])
        while True:
            position = shadow.check_local(host, lanes, base, stride, self.written, access.size, element)
            if position < 0:
                return
            lane = int(lanes[position])
            offset = int(host[position]) - base - lane * stride
            what = f"{access.size}-byte read of local offset {offset}, which the thread has not written"
            self.m.report("uninitialised read", access.pc, lane, what)
            lanes, host = lanes[position + 1 :], host[position + 1 :]

    def _shared(self, access: Access, lanes: Array, host: Array, values: Array | None) -> None:
        flags = access.read, access.write, access.atomic, access.asynchronous, access.initialised
        while True:
            kind, position, row = shadow.check_shared(
                host, lanes, access.size, *self.tables, access.pc, *flags
            )
            if not kind:
                break
            if kind == shadow.RACE_WRITE and values is not None:
                first = _distinct_stores(lanes, host, values)
                values = None
                if len(first) < len(lanes):
                    what = partial(self._alike, lanes, host, first)
                    self.m.note(access.pc, int(lanes[position]), what)
                    lanes, host = lanes[first], host[first]
                    continue
            self._shared_fault(access, kind, int(lanes[position]), int(row))
            lanes, host = lanes[position + 1 :], host[position + 1 :]
        if access.asynchronous:
            self.copies.append(_Copies(lanes, host, access.size, self.committed[lanes]))

    def _alike(self, lanes: Array, host: Array, first: Array) -> str:
        other = np.setdiff1d(np.arange(len(lanes)), first)[0]
        same = (host == host[other]) & (lanes // WARP == lanes[other] // WARP)
        return f"{int(same.sum())} lanes of a warp store the same value to one address of shared memory"

    def _shared_fault(self, access: Access, kind: int, lane: int, row: int) -> None:
        m, s = self.m, self.state[row]
        per_block = int(m.memory.windows[2]) // self.granule
        block = row // per_block
        offset = (row % per_block) * self.granule
        verb = "atomic" if access.atomic else "read" if access.read else "write"
        name = _variable(m.program, offset)
        what = f"{access.size}-byte {verb} that touches shared offset {offset}{name}"

        def other(thread: int, pc: int, did: str) -> str:
            return f"{did} by {m.thread(block * m.padded + thread)}\n    at {m.program.where(pc)}"

        if kind == shadow.UNINITIALISED:
            m.report("uninitialised read", access.pc, lane, lambda: f"{what}, which no thread has written")
        elif kind in (shadow.PENDING_READ, shadow.PENDING_WRITE):
            thread, pc = int(s[shadow.PENDING]) - 1, int(s[shadow.PENDING_PC])
            pending = f"{what}, where an asynchronous copy is pending"
            text = partial(other, thread, pc, "the copy was issued")
            m.report("asynchronous copy not waited for", access.pc, lane, lambda: f"{pending}; {text()}", pc)
        else:
            wrote = kind == shadow.RACE_WRITE
            thread, pc = _rival(s, wrote, lane % m.padded, access.atomic)
            text = partial(other, thread, pc, "written" if wrote else "read")
            unordered = f"{what}, with no barrier since it was"
            m.report("shared-memory race", access.pc, lane, lambda: f"{unordered} {text()}", pc)

    # -- order ------------------------------------------------------------------------------------

    def barrier(self, blocks: Array) -> None:
        """A barrier opened in these blocks.

        A barrier for part of a block orders the whole block here, which may hide races but never invents one.
        """
        self.epochs[blocks] += 1

    def warp_barrier(self, here: Array) -> None:
        self.warp_epochs[here.any(axis=1)] += 1

    def commit(self, lanes: Array) -> None:
        """``cp.async.commit_group``"""
        self.committed[lanes] += 1

    def wait(self, lanes: Array, newest: int) -> None:
        """``cp.async.wait_group newest``; -1 is ``wait_all``."""
        waits = np.zeros(self.m.threads, np.bool_)
        waits[lanes] = True
        kept = []
        for c in self.copies:
            done = waits[c.lanes]
            if newest >= 0:
                done &= c.group < self.committed[c.lanes] - newest
            if done.any():
                shadow.finish_copies(c.host[done], c.lanes[done], c.size, *self.tables)
            if not done.all():
                rest = ~done
                kept.append(_Copies(c.lanes[rest], c.host[rest], c.size, c.group[rest]))
        self.copies = kept

    # -- warps ------------------------------------------------------------------------------------

    def named(self, pc: int, here: Array, named: Array) -> None:
        """A lane that runs a warp instruction must be in its own mask."""
        lane = np.arange(WARP, dtype=np.uint32)
        absent = here & ((named >> lane) & 1 == 0)
        for at in np.flatnonzero(absent).tolist():
            mask = int(named.ravel()[at])
            what = f"lane {at % WARP} is not in its own member mask {mask:#010x}"
            self.m.report("warp mask", pc, at, what)

    def shuffled(self, pc: int, here: Array, named: Array, source: Array, valid: Array) -> None:
        """A lane must not read from a lane that takes no part."""
        source = np.broadcast_to(source, here.shape).astype(np.intp)
        there = np.take_along_axis(here, source, axis=1)
        member = (named >> source.astype(np.uint32)) & 1 != 0
        wrong = here & valid & ~(there & member)
        for at in np.flatnonzero(wrong).tolist():
            of = int(source.ravel()[at])
            why = "has ended or is elsewhere" if not there.ravel()[at] else "is not in the mask"
            what = f"lane {at % WARP} shuffles from lane {of}, which {why}"
            self.m.report("warp mask", pc, at, what)


def _distinct_stores(lanes: Array, host: Array, values: Array) -> Array:
    """Positions of the lanes that remain if lanes of one warp that store equal bits to one address count once."""
    rows = np.stack([lanes // WARP, host, *values[:, lanes].astype(np.int64)], axis=1)
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


def _granule(program: Program) -> int:
    """The size of the smallest access that may touch shared memory; every other size is a multiple of it."""
    smallest = 16
    for instruction in program.code:
        words = set(instruction.modifiers)
        elsewhere = words & {"global", "const", "local", "param"}
        if instruction.opcode in ("ld", "st", "ldu", "atom", "red") and not elsewhere:
            smallest = min(smallest, BITS[instruction.modifiers[-1]] // 8)
        elif instruction.opcode == "cp":
            smallest = min(smallest, 4)
    return smallest


def _rival(state: Array, of_write: bool, thread: int, atomic: bool) -> tuple[int, int]:
    """(thread, pc) of the access in a row of the state that races with an access of ``thread``."""
    first = shadow.W_FLAGS if of_write else shadow.R_FLAGS
    flags, _, kept, _, pc, other = (int(v) for v in state[first : first + 6])
    if atomic and flags & shadow.ATOMIC:  # it races with the write before them
        return shadow.unpacked(int(state[shadow.W_PLAIN]))
    known = [(kept, pc)]
    if flags & (shadow.MULTI_LANE | shadow.MULTI_WARP):
        known.append(shadow.unpacked(other))
    return min(known, key=lambda k: (k[0] // WARP == thread // WARP, k[0] == thread))


def _variable(program: Program, offset: int) -> str:
    """`` (tile+64)``, the variable that an offset is in."""
    found = [(at, name) for name, at in program.shared.items() if at <= offset + SHARED_BASE]
    if not found:
        return ""
    at, name = max(found)
    return f" ({plain_name(name)}+{offset + SHARED_BASE - at})"
