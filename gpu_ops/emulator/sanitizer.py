"""Watches a run for faults that lock-step execution would hide: races, reads of what nobody wrote, wrong masks.

Accesses out of bounds or misaligned, writes to read-only arguments, barrier divergence and deadlock are found by the
machine itself, always.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator import shadow
from gpu_ops.emulator.compiled import SHARED_BASE
from gpu_ops.emulator.errors import SanitizerError
from gpu_ops.emulator.program import Program
from gpu_ops.emulator.shadow import EACH_BYTE, OUTSIDE, POISONED, STORED, UNWRITTEN
from gpu_ops.emulator.types import BITS, Array

if TYPE_CHECKING:
    from gpu_ops.emulator.access import Access, Place
    from gpu_ops.emulator.machine import Machine

__all__ = ["KINDS", "Sanitizer"]

#: Every kind of fault a :class:`~gpu_ops.emulator.errors.SanitizerError` may name.
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
    "warp mask",
    "trap",
)

_GLOBAL = {
    OUTSIDE: ("out of bounds", "a byte that belongs to no argument (between the rows of a strided array?)"),
    POISONED: ("poisoned read", "padding that must not be read"),
    UNWRITTEN: ("uninitialised read", "a byte of a result that nobody has written"),
    STORED: ("read-only load of written data", "a byte that this launch has written, by ld.global.nc"),
}


@dataclass(eq=False)
class _Copies:
    """Asynchronous copies of one instruction that nobody has waited for yet."""

    lanes: Array
    host: Array
    size: int
    group: Array  # per lane: the number of its commit_group that closes it


class Sanitizer:
    """Checks every access of one machine, batch by batch."""

    def __init__(self, program: Program) -> None:
        self.granule = _granule(program)

    def begin(self, m: Machine) -> None:
        blocks, stride = m.memory.shared.shape
        self.m = m
        self.state = np.zeros((blocks * stride // self.granule, shadow.COLUMNS), np.int32)
        self.epochs = np.ones(blocks, np.int32)
        self.warp_epochs = np.ones(m.threads // 32, np.int32)
        self.written = np.zeros(m.memory.local.shape, np.uint8)
        self.committed = np.zeros(m.threads, np.int32)
        self.copies: list[_Copies] = []

    # -- memory -----------------------------------------------------------------------------------

    def access(self, access: Access, place: Place) -> None:
        """An access that is about to happen."""
        owners = place.owner
        if len(owners) == 0:
            return
        low, high = int(owners.min()), int(owners.max())
        if high >= 0:
            self._global(access, place)
        if low < 0:
            for owner, check in ((-1, self._shared), (-2, self._local)):
                if low == high == owner:
                    check(access, place.lanes, place.host)
                elif low <= owner:
                    mine = owners == owner
                    check(access, place.lanes[mine], place.host[mine])

    def _global(self, access: Access, place: Place) -> None:
        wrong = OUTSIDE | POISONED | UNWRITTEN | (STORED if access.constant else 0)
        bits, position, byte = shadow.check_global(
            place.host, place.owner, self.m.memory.table, access.size,
            wrong * EACH_BYTE, access.read, access.write,
        )  # fmt: skip
        if bits:
            kind, what = next(text for bit, text in _GLOBAL.items() if bits & bit)
            address = int(place.address[0 if len(place.address) == 1 else position]) + byte
            verb = "read" if access.read else "write"
            where = self.m.memory.describe(access.space, address)
            raise self.m.fault(kind, access.pc, int(place.lanes[position]), f"{verb} of {what}: {where}")

    def _local(self, access: Access, lanes: Array, host: Array) -> None:
        if access.read and not access.element:
            return
        base, stride = int(self.m.memory.windows[4]), int(self.m.memory.windows[6])
        position = shadow.check_local(host, lanes, base, stride, self.written, access.size, access.element)
        if position >= 0:
            lane = int(lanes[position])
            offset = int(host[position]) - base - lane * stride
            what = f"{access.size}-byte read of local offset {offset}, which the thread has not written"
            raise self.m.fault("uninitialised read", access.pc, lane, what)

    def _shared(self, access: Access, lanes: Array, host: Array) -> None:
        m = self.m
        kind, position, row = shadow.check_shared(
            host, lanes, m.memory.windows, access.size, self.granule, self.state, self.epochs,
            self.warp_epochs, access.pc, access.read, access.write, access.atomic, access.asynchronous,
        )  # fmt: skip
        if kind:
            raise self._shared_fault(access, kind, int(lanes[position]), int(row))
        if access.asynchronous:
            self.copies.append(_Copies(lanes, host, access.size, self.committed[lanes]))

    def _shared_fault(self, access: Access, kind: int, lane: int, row: int) -> SanitizerError:
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
            return m.fault("uninitialised read", access.pc, lane, f"{what}, which no thread has written")
        if kind in (shadow.PENDING_READ, shadow.PENDING_WRITE):
            copy = other(int(s[shadow.PENDING]) - 1, int(s[shadow.PENDING_PC]), "the copy was issued")
            what = f"{what}, where an asynchronous copy is still on its way; {copy}"
            return m.fault("asynchronous copy not waited for", access.pc, lane, what)
        wrote = kind == shadow.RACE_WRITE
        last = other(*_rival(s, wrote, lane % m.padded, access.atomic), "written" if wrote else "read")
        return m.fault("shared-memory race", access.pc, lane, f"{what}, with no barrier since it was {last}")

    # -- order ------------------------------------------------------------------------------------

    def barrier(self, blocks: Array) -> None:
        """A barrier opened in these blocks. One for part of a block orders all of it here: races between its
        threads and the others may be missed, none is invented."""
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
                shadow.finish_copies(
                    c.host[done], c.lanes[done], self.m.memory.windows, c.size, self.granule, self.state,
                    self.epochs, self.warp_epochs,
                )  # fmt: skip
            if not done.all():
                rest = ~done
                kept.append(_Copies(c.lanes[rest], c.host[rest], c.size, c.group[rest]))
        self.copies = kept

    # -- warps ------------------------------------------------------------------------------------

    def named(self, pc: int, here: Array, named: Array) -> None:
        """Lanes that run a warp instruction must be in their own mask."""
        lane = np.arange(32, dtype=np.uint32)
        absent = here & ((named >> lane) & 1 == 0)
        if absent.any():
            at = int(np.flatnonzero(absent.ravel())[0])
            mask = int(named.ravel()[at])
            raise self.m.fault(
                "warp mask", pc, at, f"lane {at % 32} is not in its own member mask {mask:#010x}"
            )

    def shuffled(self, pc: int, here: Array, named: Array, source: Array, valid: Array) -> None:
        """A lane must not read from one that takes no part."""
        source = np.broadcast_to(source, here.shape).astype(np.intp)
        there = np.take_along_axis(here, source, axis=1)
        member = (named >> source.astype(np.uint32)) & 1 != 0
        wrong = here & valid & ~(there & member)
        if wrong.any():
            at = int(np.flatnonzero(wrong.ravel())[0])
            of = int(source.ravel()[at])
            why = "has ended or is elsewhere" if not there.ravel()[at] else "is not in the mask"
            raise self.m.fault("warp mask", pc, at, f"lane {at % 32} shuffles from lane {of}, which {why}")


def _granule(program: Program) -> int:
    """The smallest access that may touch shared memory: alignment makes every other a multiple of it."""
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
    """(thread, pc) of the access in a row of the state that races with one of ``thread``."""
    first = shadow.W_FLAGS if of_write else shadow.R_FLAGS
    flags, _, kept, _, pc, other = (int(v) for v in state[first : first + 6])
    if atomic and flags & shadow.ATOMIC:  # not with the atomics, but with what was there before them
        return shadow.unpacked(int(state[shadow.W_PLAIN]))
    known = [(kept, pc)]
    if flags & (shadow.MULTI_LANE | shadow.MULTI_WARP):
        known.append(shadow.unpacked(other))
    return min(known, key=lambda k: (k[0] // 32 == thread // 32, k[0] == thread))


def _variable(program: Program, offset: int) -> str:
    """`` (tile+64)``: which variable an offset is in."""
    found = [(at, name) for name, at in program.shared.items() if at <= offset + SHARED_BASE]
    if not found:
        return ""
    at, name = max(found)
    return f" ({_plain(name)}+{offset + SHARED_BASE - at})"


def _plain(name: str) -> str:
    """The variable of a function as the source names it: ``s`` for ``_ZZ10block_sumsE1s``."""
    for length, rest in re.findall(r"E(?=(\d+)(\w+)$)", name):
        if len(rest) == int(length):
            return str(rest)
    return name
