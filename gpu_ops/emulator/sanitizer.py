"""Sanitizer for faults that lock-step execution hides: races, uninitialised reads, wrong warp masks.

The machine itself always finds out-of-bounds and misaligned accesses, writes to read-only arguments, deadlocks, and
lanes of one warp that wait at different barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from gpu_ops.emulator import shadow
from gpu_ops.emulator.aot import SHARED_BASE
from gpu_ops.emulator.batch import WARP, Batch
from gpu_ops.emulator.memory import Access, LaneAddresses
from gpu_ops.emulator.program import PtxProgram
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


@dataclass(eq=False)
class Absent:
    """Lanes of a load that read bytes without a value. ``bits`` has a bit for each such byte, by lane."""

    access: Access
    place: LaneAddresses
    bits: Array
    rows: Array  # rows of the state, for shared memory
    stores: Array  # pc of the store of an uninitialised value, or -1

    @classmethod
    def of(cls, s: Sanitizer, access: Access, place: LaneAddresses, bits: Array) -> Absent:
        rows, stores = np.zeros(len(bits), np.int64), np.full(len(bits), -1)
        if len(bits) and place.owner[0] == -1:
            lowest = bits & (~bits + np.uint64(1))
            first, windows = np.log2(lowest.astype(np.float64)), s.m.memory.windows
            block = place.lanes // windows[3]
            offset = place.host + first.astype(np.int64) - windows[0] - block * windows[2]
            rows = block * (windows[2] // s.granule) + offset // s.granule
            void = s.state[rows, shadow.W_FLAGS] & shadow.UNDEFINED != 0
            stores = np.where(void, s.state[rows, shadow.W_PC], -1)
        return cls(access, place, bits, rows, stores)

    def text(self, s: Sanitizer, position: int) -> tuple[str, int]:
        """Text ``4-byte read that touches shared offset 252 (s+252), which no thread has written``, and the store."""
        access, lane = self.access, int(self.place.lanes[position])
        bits, owner = int(self.bits[position]), int(self.place.owner[position])
        byte = (bits & -bits).bit_length() - 1
        if owner >= 0:
            address = self.place.address[0 if len(self.place.address) == 1 else position]
            return s.global_text(access, int(address) + byte, _GLOBAL[UNWRITTEN][1]), -1
        if owner == -1:
            what = s.shared_text(access, int(self.rows[position]))
            store = int(self.stores[position])
            return (
                f"{what}, {'which no thread has written' if store < 0 else 'whose value is uninitialised'}",
                store,
            )
        windows = s.m.memory.windows
        offset = int(self.place.host[position] - windows[4] - lane * windows[6])
        return f"{access.size}-byte read of local offset {offset}, which the thread has not written", -1


class Sanitizer:
    """Checker of every access of one machine, batch by batch."""

    def __init__(self, program: PtxProgram) -> None:
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
        self._missing = np.zeros(m.threads, np.uint64)
        self.absent: list[Absent] = []  # absent bytes of the current load
        self.loads: dict[int, Absent] = {}  # loads that marks of registers refer to, by number
        self.tables = m.memory.windows, self.granule, self.state, self.epochs, self.warp_epochs

    # ---- memory --------------------------------------------------------------------------------------------

    def access(self, access: Access, place: LaneAddresses, values: Array | None = None) -> None:
        """Check an access before it happens. ``values``: those that a store writes, ``[elements, threads]``."""
        owners = place.owner
        if len(owners) == 0:
            return
        low, high = int(owners.min()), int(owners.max())
        if high >= 0:
            self._global(access, place)
        if low < 0:
            if low == high == -1:
                self._shared(access, place, values)
            elif low == high == -2:
                self._local(access, place)
            else:
                self._shared(access, place.of(owners == -1), values)
                self._local(access, place.of(owners == -2))

    def _global(self, access: Access, place: LaneAddresses) -> None:
        wrong = OUTSIDE | POISONED | (STORED if access.constant else 0) | (0 if access.tracked else UNWRITTEN)
        table, wrong = self.m.memory.table, wrong * EACH_BYTE
        while True:
            flags = access.read, access.write, access.tracked, self._missing
            bits, position, byte, absent = shadow.check_global(
                place.host, place.owner, table, access.size, wrong, *flags
            )
            if absent:
                self._keep(access, place)
            if not bits:
                return
            fault, what = next(text for bit, text in _GLOBAL.items() if bits & bit)
            address = int(place.address[0 if len(place.address) == 1 else position]) + byte
            lane = int(place.lanes[position])
            self.m.report(fault, access.pc, lane, partial(self.global_text, access, address, what))
            place = place.after(position)

    def global_text(self, access: Access, address: int, what: str) -> str:
        verb = "read" if access.read else "write"
        return f"{verb} of {what}, {self.m.memory.describe(access.space, address)}"

    def _local(self, access: Access, place: LaneAddresses) -> None:
        base, stride = int(self.m.memory.windows[4]), int(self.m.memory.windows[6])
        flags = access.size, access.read, access.padded, self._missing
        if shadow.check_local(place.host, place.lanes, base, stride, self.written, *flags):
            self._keep(access, place)

    def _shared(self, access: Access, place: LaneAddresses, values: Array | None) -> None:
        flags = access.read, access.write, access.atomic, access.asynchronous, access.tracked, self._missing
        while True:
            lanes, host = place.lanes, place.host
            fault, position, row, absent = shadow.check_shared(
                host, lanes, access.size, *self.tables, access.pc, *flags
            )
            if absent:
                self._keep(access, place)
            if not fault:
                break
            if fault == shadow.RACE_WRITE and values is not None:
                first = _distinct_stores(lanes, host, values)
                values = None
                if len(first) < len(lanes):
                    what = partial(self._alike, lanes, host, first)
                    self.m.note(access.pc, int(lanes[position]), what)
                    place = place.of(first)
                    continue
            self._shared_fault(access, fault, int(lanes[position]), int(row))
            place = place.after(position)
        if access.asynchronous:
            self.copies.append(_Copies(place.lanes, place.host, access.size, self.committed[place.lanes]))

    def _keep(self, access: Access, place: LaneAddresses) -> None:
        """Keep the lanes of a load that read bytes without a value, for its step."""
        at = np.flatnonzero(self._missing[: len(place.lanes)])
        self.absent.append(Absent.of(self, access, place.of(at), self._missing[at]))
        self._missing[at] = 0

    def _alike(self, lanes: Array, host: Array, first: Array) -> str:
        other = np.setdiff1d(np.arange(len(lanes)), first)[0]
        same = (host == host[other]) & (lanes // WARP == lanes[other] // WARP)
        return f"{int(same.sum())} lanes of a warp store the same value to one address of shared memory"

    def shared_text(self, access: Access, row: int) -> str:
        offset = row % (int(self.m.memory.windows[2]) // self.granule) * self.granule
        verb = "atomic" if access.atomic else "read" if access.read else "write"
        name = _variable(self.m.program, offset)
        return f"{access.size}-byte {verb} that touches shared offset {offset}{name}"

    def _shared_fault(self, access: Access, kind: int, lane: int, row: int) -> None:
        m, s = self.m, self.state[row]
        block = row // (int(m.memory.windows[2]) // self.granule)
        what = self.shared_text(access, row)

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

    # ---- order ---------------------------------------------------------------------------------------------

    def barrier(self, blocks: Array) -> None:
        """Record that a barrier opened in these blocks.

        A barrier for part of a block orders the whole block here, which may hide races but never reports a false one.
        """
        self.epochs[blocks] += 1

    def warp_barrier(self, here: Array) -> None:
        self.warp_epochs[here.any(axis=1)] += 1

    def commit(self, lanes: Array) -> None:
        """Record ``cp.async.commit_group``."""
        self.committed[lanes] += 1

    def wait(self, lanes: Array, newest: int) -> None:
        """Record ``cp.async.wait_group newest``; -1 is ``wait_all``."""
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

    # ---- warps ---------------------------------------------------------------------------------------------

    def named(self, pc: int, here: Array, named: Array) -> None:
        """Check that each lane that runs a warp instruction is in its own mask."""
        lane = np.arange(WARP, dtype=np.uint32)
        absent = here & ((named >> lane) & 1 == 0)
        for at in np.flatnonzero(absent).tolist():
            mask = int(named.ravel()[at])
            what = f"lane {at % WARP} is not in its own member mask {mask:#010x}"
            self.m.report("warp mask", pc, at, what)

    def shuffled(self, pc: int, here: Array, named: Array, source: Array, valid: Array) -> None:
        """Check that no lane reads from a lane that does not take part."""
        source = np.broadcast_to(source, here.shape).astype(np.intp)
        source_active = np.take_along_axis(here, source, axis=1)
        member = (named >> source.astype(np.uint32)) & 1 != 0
        wrong = here & valid & ~(source_active & member)
        for at in np.flatnonzero(wrong).tolist():
            of = int(source.ravel()[at])
            why = "has ended or is elsewhere" if not source_active.ravel()[at] else "is not in the mask"
            what = f"lane {at % WARP} shuffles from lane {of}, which {why}"
            self.m.report("warp mask", pc, at, what)


def _distinct_stores(lanes: Array, host: Array, values: Array) -> Array:
    """Positions of distinct lanes: lanes of one warp that store equal bits to one address count once."""
    rows = np.stack([lanes // WARP, host, *values[:, lanes].astype(np.int64)], axis=1)
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


def _granule(program: PtxProgram) -> int:
    """Size of the smallest access that may touch shared memory; every other size is a multiple of it."""
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
    """Pair (thread, pc) of the access in a row of the state that races with an access of ``thread``."""
    first = shadow.W_FLAGS if of_write else shadow.R_FLAGS
    flags, _, kept, _, pc, other = (int(v) for v in state[first : first + 6])
    if atomic and flags & shadow.ATOMIC:  # races with the write before the atomics
        return shadow.unpacked(int(state[shadow.W_PLAIN]))
    known = [(kept, pc)]
    if flags & (shadow.MULTI_LANE | shadow.MULTI_WARP):
        known.append(shadow.unpacked(other))
    return min(known, key=lambda k: (k[0] // WARP == thread // WARP, k[0] == thread))


def _variable(program: PtxProgram, offset: int) -> str:
    """Text of the variable that an offset is in, such as `` (tile+64)``."""
    variables = [(at, name) for name, at in program.shared.items() if at <= offset + SHARED_BASE]
    if not variables:
        return ""
    at, name = max(variables)
    return f" ({plain_name(name)}+{offset + SHARED_BASE - at})"
