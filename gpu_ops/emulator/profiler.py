"""Counts while the machine runs: the hooks that make a :class:`~gpu_ops.emulator.profile.Profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpu_ops.emulator import traffic
from gpu_ops.emulator.counts import BufferProfile, InstructionProfile
from gpu_ops.emulator.memory import GENERIC, GLOBAL, LOCAL, SHARED, Memory
from gpu_ops.emulator.opclass import classify, operations
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.program import Program
from gpu_ops.emulator.types import Array
from gpu_ops.presets import DevicePreset

if TYPE_CHECKING:
    from gpu_ops.emulator.access import Access, Place
    from gpu_ops.emulator.machine import Machine, Mask

__all__ = ["Profiler"]

_WARP = 32


class Profiler:
    """The counters of one launch; batches of blocks add up."""

    def __init__(self, program: Program, memory: Memory) -> None:
        size = len(program.code)
        self._program, self._memory = program, memory
        self._classes = [classify(instruction) for instruction in program.code]
        self._warps, self._lanes = [0] * size, [0] * size
        self._divergent, self._local = [0] * size, [0] * size
        # By (pc, READ | WRITTEN): an asynchronous copy reads one memory and writes the other.
        self._global: dict[tuple[int, int], Array] = {}
        self._shared: dict[int, Array] = {}
        self._macs: dict[str, int] = {}
        self._watch()
        self._mask: Mask = None
        self._mask_counts = (0, 0)

    def _watch(self) -> None:
        """A byte per sector of arguments and global variables; constants come from a cache of their own."""
        allocations, variables = self._memory.allocations, self._program.globals
        # the last are the kernel's parameters
        self._arguments = arguments = len(allocations) - len(variables) - 1
        self._touched: dict[int, Array] = {}
        for row, a in enumerate(allocations[:-1]):
            if row < arguments or variables[row - arguments].space != "const":
                sectors = (a.end - 1) // traffic.SECTOR - a.start // traffic.SECTOR + 1
                self._touched[row] = np.zeros(sectors, np.uint8)
        self._marks = np.zeros(len(allocations), np.int64)
        for row, touched in self._touched.items():
            self._marks[row] = touched.ctypes.data

    # -- hooks ----------------------------------------------------------------------------------

    def executed(self, machine: Machine, pc: int, mask: Mask, active: Mask) -> None:
        """A group ``mask`` issues an instruction; the guard left ``active``, perhaps with ended threads."""
        if mask is None:
            warps, lanes = machine.threads // _WARP, machine.threads
        else:
            if mask is not self._mask:
                self._mask, self._mask_counts = mask, (_warps(mask), int(np.count_nonzero(mask)))
            warps, lanes = self._mask_counts
        if active is machine.none:
            lanes = 0
        elif active is not None and active is not mask:
            lanes = int(np.count_nonzero(active if mask is None else active & mask))
        self._warps[pc] += warps
        self._lanes[pc] += lanes

    def parked(self, pc: int, mask: Mask, late: Array) -> None:
        """Of a group that was counted, these threads wait, and will come again."""
        everyone = np.ones(len(late), np.bool_) if mask is None else mask
        self._warps[pc] -= _warps(everyone) - _warps(everyone & ~late)
        self._lanes[pc] -= int(np.count_nonzero(late))

    def diverged(self, pc: int, active: Array, rest: Array) -> None:
        """A branch parts the threads of a group."""
        both = active.reshape(-1, _WARP).any(axis=1) & rest.reshape(-1, _WARP).any(axis=1)
        self._divergent[pc] += int(np.count_nonzero(both))

    def access(self, access: Access, place: Place) -> None:
        pc, size = access.pc, access.size
        if self._classes[pc] == "constant":  # ld.const; ld.param of a function that was inlined
            return
        if access.space in (GLOBAL, GENERIC):
            mark = traffic.READ * access.read | traffic.WRITTEN * access.write
            counts = self._global.get((pc, mark))
            if counts is None:
                counts = np.zeros((len(self._marks), traffic.GLOBAL_COLUMNS), np.int64)
                self._global[pc, mark] = counts
            traffic.count_global(
                place.lanes, place.address, place.owner, size, self._memory.table, self._marks, mark, counts
            )
        if access.space in (SHARED, GENERIC):
            found = self._shared.get(pc)
            if found is None:
                found = self._shared[pc] = np.zeros(traffic.SHARED_COLUMNS, np.int64)
            traffic.count_shared(place.lanes, place.address, place.owner, size, found)
        if access.space in (LOCAL, GENERIC):
            self._local[pc] += size * int(np.count_nonzero(place.owner == -2))

    def multiplied(self, kind: str, macs: int) -> None:
        """Tensor-core multiply-adds."""
        self._macs[kind] = self._macs.get(kind, 0) + macs

    # -- the result -----------------------------------------------------------------------------

    def profile(
        self,
        card: DevicePreset,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks: int,
        dynamic_shared: int,
    ) -> Profile:
        program = self._program
        buffers = [(row, self._buffer(row)) for row in self._touched]
        used = [b for row, b in buffers if row < self._arguments or b.requests]
        return Profile(
            kernel=program.name,
            arch=program.module.target,
            grid=grid,
            block=block,
            blocks=blocks,
            dynamic_shared_bytes=dynamic_shared,
            card=card.like or card.name,
            l2_bytes=card.l2_bytes,
            instructions=self._instructions(),
            buffers=tuple(sorted(used, key=lambda b: (-b.most_bytes, b.name))),
            multiply_adds=self._macs,
            ptx=program.module.text,
            sources=program.module.sources,
        )

    def _instructions(self) -> tuple[InstructionProfile, ...]:
        text = self._program.module.text.splitlines()
        nothing = np.zeros((len(self._marks), traffic.GLOBAL_COLUMNS), np.int64)
        found = []
        for pc, instruction in enumerate(self._program.code):
            ways = [self._global.get((pc, mark), nothing) for mark in (1, 2, 3)]
            moved = sum(ways).sum(axis=0)  # type: ignore[union-attr]
            shared = self._shared.get(pc, np.zeros(traffic.SHARED_COLUMNS, np.int64))
            atomic = self._classes[pc] == "atomic"
            found.append(
                InstructionProfile(
                    pc=pc,
                    ptx_line=instruction.line,
                    ptx=text[instruction.line - 1].strip(),
                    form=instruction.form,
                    kind=self._classes[pc],
                    places=tuple(self._program.places(pc)),
                    operations=operations(instruction),
                    warps=self._warps[pc],
                    lanes=self._lanes[pc],
                    divergent=self._divergent[pc],
                    global_requests=int(moved[traffic.REQUESTS]),
                    global_bytes=int(moved[traffic.BYTES]),
                    sectors=int(moved[traffic.SECTORS]),
                    shared_requests=int(shared[traffic.REQUESTS]),
                    shared_bytes=int(shared[traffic.BYTES]),
                    waves=int(shared[traffic.WAVES]),
                    phases=int(shared[traffic.PHASES]),
                    ideal_waves=int(shared[traffic.IDEAL]),
                    local_bytes=self._local[pc],
                    atomics=int(moved[traffic.LANES] + shared[traffic.LANES]) if atomic else 0,
                )
            )
        return tuple(found)

    def _buffer(self, row: int) -> BufferProfile:
        allocation, touched = self._memory.allocations[row], self._touched[row]
        read, written, atomic = (
            sum((c[row] for (_, m), c in self._global.items() if m == mark), np.zeros(traffic.GLOBAL_COLUMNS))
            for mark in (traffic.READ, traffic.WRITTEN, traffic.READ | traffic.WRITTEN)
        )
        once, reads, writes = read + written + atomic, read + atomic, written + atomic
        return BufferProfile(
            name=allocation.name,
            size=allocation.bytes,
            requests=int(once[traffic.REQUESTS]),
            bytes=int(once[traffic.BYTES]),
            sectors=int(once[traffic.SECTORS]),
            bytes_read=int(reads[traffic.BYTES]),
            bytes_written=int(writes[traffic.BYTES]),
            sectors_read=int(reads[traffic.SECTORS]),
            sectors_written=int(writes[traffic.SECTORS]),
            footprint=int(np.count_nonzero(touched)),
            footprint_read=int(np.count_nonzero(touched & traffic.READ)),
            footprint_written=int(np.count_nonzero(touched & traffic.WRITTEN)),
            atomics=int(atomic[traffic.LANES]),
        )


def _warps(mask: Array) -> int:
    return int(np.count_nonzero(mask.reshape(-1, _WARP).any(axis=1)))
