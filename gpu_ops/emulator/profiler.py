"""Counters of a running machine, from which the :class:`~gpu_ops.emulator.profile.Profile` of a launch is made.

A *request* is one instruction of one warp. Global memory moves in sectors of 32 bytes: a request costs the distinct
sectors that its lanes touch. Shared memory has 32 banks of one 4-byte word each. Lanes that read the same word
share it, and a request takes one *wave* for each distinct word of its busiest bank. Wide accesses run in phases of
the number of lanes that fill the banks once: 32 lanes for up to 4 bytes each, 16 for 8 bytes, 8 for 16 bytes (and
8 rows of ldmatrix). Atomics count like other accesses; serialisation of lanes at one address does not count.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.emulator.aot import loop, peek, poke
from gpu_ops.emulator.batch import NONE, WARP, Mask
from gpu_ops.emulator.counts import SECTOR, BufferProfile, InstructionProfile, classify, operations
from gpu_ops.emulator.memory import GENERIC, GLOBAL, LOCAL, SHARED, Access, LaneAddresses, Memory
from gpu_ops.emulator.profile import Profile
from gpu_ops.emulator.program import PtxProgram
from gpu_ops.emulator.syntax import Array
from gpu_ops.presets import DevicePreset

# Columns of _count_global, one row per allocation.
REQUESTS, LANES, BYTES, SECTORS, _STAMP = range(5)
GLOBAL_COLUMNS = 5
# Elements of _count_shared; the first three are as above.
WAVES, PHASES, IDEAL = 3, 4, 5
SHARED_COLUMNS = 6

READ, WRITTEN = 1, 2  # bits of a sector's mark


@loop("void(int32[::1], uint64[::1], int32[::1], int64, int64[:,::1], int64[::1], uint8, int64[:,::1])")
def _count_global(lanes, address, owner, size, table, marks, mark, counts):  # type: ignore[no-untyped-def]
    """Add the accesses of one instruction to ``counts``, and set ``mark`` in each sector they touch.

    ``marks`` holds, for each allocation, the host pointer of one byte per sector, or 0 if it is not counted.
    Accesses are aligned to their size, so a lane touches one sector.
    """
    seen = np.empty(32, np.int64)
    uniform = len(address) == 1
    warp, distinct, highest = -1, 0, np.int64(-1)
    for row in range(counts.shape[0]):
        counts[row, _STAMP] = -1
    for i in range(len(lanes)):
        row = owner[i]
        if row < 0 or marks[row] == 0:
            continue
        if lanes[i] >> 5 != warp:
            warp = lanes[i] >> 5
            distinct, highest = 0, np.int64(-1)
        if counts[row, _STAMP] != warp:
            counts[row, _STAMP] = warp
            counts[row, REQUESTS] += 1
        counts[row, LANES] += 1
        counts[row, BYTES] += size
        sector = np.int64(address[0] if uniform else address[i]) >> 5
        known = False
        if sector <= highest:  # otherwise the sector is new; addresses mostly rise with the lane
            for k in range(distinct - 1, -1, -1):
                if seen[k] == sector:
                    known = True
                    break
        if known:
            continue
        if sector > highest:
            highest = sector
        seen[distinct] = sector
        distinct += 1
        counts[row, SECTORS] += 1
        at = marks[row] + sector - (table[row, 0] >> 5)
        poke(at, np.uint8(peek(at, mark) | mark))


@loop("void(int32[::1], uint64[::1], int32[::1], int64, int64[::1])")
def _count_shared(lanes, address, owner, size, counts):  # type: ignore[no-untyped-def]
    """Add the shared-memory accesses of one instruction to ``counts``.

    IDEAL: the waves if each moved 128 bytes. PHASES: the waves if no lanes of a phase shared a bank.
    """
    per_phase = 32 if size <= 4 else 128 // size
    words = max(size // 4, 1)
    seen = np.empty((32, 32), np.int64)  # distinct words of a bank
    distinct = np.zeros(32, np.int64)
    uniform = len(address) == 1
    warp, phase, waves, active = -1, -1, 0, 0
    for i in range(len(lanes)):
        if owner[i] != -1:
            continue
        if lanes[i] // per_phase != phase:
            phase = lanes[i] // per_phase
            counts[WAVES] += waves
            counts[PHASES] += 1
            waves = 0
            distinct[:] = 0
        if lanes[i] >> 5 != warp:
            warp = lanes[i] >> 5
            counts[REQUESTS] += 1
            counts[IDEAL] += (active * size + 127) // 128
            active = 0
        active += 1
        counts[LANES] += 1
        counts[BYTES] += size
        first = np.int64(address[0] if uniform else address[i]) >> 2
        for word in range(first, first + words):
            bank = word & 31
            known = False
            for k in range(distinct[bank]):
                if seen[bank, k] == word:
                    known = True
                    break
            if not known:
                seen[bank, distinct[bank]] = word
                distinct[bank] += 1
                if distinct[bank] > waves:
                    waves = distinct[bank]
    counts[WAVES] += waves
    counts[IDEAL] += (active * size + 127) // 128


class Profiler:
    """Counters of one launch, summed over batches of blocks."""

    def __init__(self, program: PtxProgram, memory: Memory) -> None:
        size = len(program.code)
        self._program, self._memory = program, memory
        self._classes = [classify(instruction) for instruction in program.code]
        self._warps, self._lanes = [0] * size, [0] * size
        self._divergent, self._local = [0] * size, [0] * size
        # Keys are (pc, READ | WRITTEN), because an asynchronous copy reads one memory and writes another.
        self._global: dict[tuple[int, int], Array] = {}
        self._shared: dict[int, Array] = {}
        self._macs: dict[str, int] = {}
        self._watch()
        self._mask: Mask = None
        self._mask_counts = (0, 0)

    def _watch(self) -> None:
        """Make a byte per sector of arguments and global variables. Constants have a separate cache."""
        allocations = self._memory.allocations
        self._touched: dict[int, Array] = {}
        for row, a in enumerate(allocations):
            if a.role != "const":
                sectors = (a.end - 1) // SECTOR - a.start // SECTOR + 1
                self._touched[row] = np.zeros(sectors, np.uint8)
        self._marks = np.zeros(len(allocations), np.int64)
        for row, touched in self._touched.items():
            self._marks[row] = touched.ctypes.data

    # ---- hooks ---------------------------------------------------------------------------------------------

    def executed(self, threads: int, pc: int, mask: Mask, active: Mask) -> None:
        """Count an instruction that group ``mask`` issues. ``active``, after the guard, may include ended threads."""
        if mask is None:
            warps, lanes = threads // WARP, threads
        else:
            if mask is not self._mask:
                self._mask, self._mask_counts = mask, (_warps(mask), int(np.count_nonzero(mask)))
            warps, lanes = self._mask_counts
        if active is NONE:
            lanes = 0
        elif active is not None and active is not mask:
            lanes = int(np.count_nonzero(active if mask is None else active & mask))
        self._warps[pc] += warps
        self._lanes[pc] += lanes

    def parked(self, pc: int, mask: Mask, late: Array) -> None:
        """Subtract the threads of a group that wait; they execute the instruction later."""
        everyone = np.ones(len(late), np.bool_) if mask is None else mask
        self._warps[pc] -= _warps(everyone) - _warps(everyone & ~late)
        self._lanes[pc] -= int(np.count_nonzero(late))

    def diverged(self, pc: int, active: Array, rest: Array) -> None:
        """Count a branch that splits the threads of a group."""
        both = active.reshape(-1, WARP).any(axis=1) & rest.reshape(-1, WARP).any(axis=1)
        self._divergent[pc] += int(np.count_nonzero(both))

    def access(self, access: Access, place: LaneAddresses) -> None:
        """Count a memory access."""
        pc, size = access.pc, access.size
        if self._classes[pc] == "constant":  # ld.const, or ld.param in an inlined function
            return
        if access.space in (GLOBAL, GENERIC):
            mark = READ * access.read | WRITTEN * access.write
            counts = self._global.get((pc, mark))
            if counts is None:
                counts = np.zeros((len(self._marks), GLOBAL_COLUMNS), np.int64)
                self._global[pc, mark] = counts
            _count_global(
                place.lanes, place.address, place.owner, size, self._memory.table, self._marks, mark, counts
            )
        if access.space in (SHARED, GENERIC):
            shared_counts = self._shared.get(pc)
            if shared_counts is None:
                shared_counts = self._shared[pc] = np.zeros(SHARED_COLUMNS, np.int64)
            _count_shared(place.lanes, place.address, place.owner, size, shared_counts)
        if access.space in (LOCAL, GENERIC):
            self._local[pc] += size * int(np.count_nonzero(place.owner == -2))

    def multiplied(self, kind: str, macs: int) -> None:
        """Count tensor-core multiply-adds."""
        self._macs[kind] = self._macs.get(kind, 0) + macs

    # ---- the result ----------------------------------------------------------------------------------------

    def profile(
        self,
        card: DevicePreset,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        blocks: int,
        dynamic_shared: int,
    ) -> Profile:
        """Make the profile of the launch."""
        program = self._program
        buffers = [(row, self._buffer(row)) for row in self._touched]
        used = [b for row, b in buffers if self._memory.allocations[row].role == "argument" or b.requests]
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
        no_counts = np.zeros((len(self._marks), GLOBAL_COLUMNS), np.int64)
        profiles = []
        for pc, instruction in enumerate(self._program.code):
            ways = [self._global.get((pc, mark), no_counts) for mark in (1, 2, 3)]
            moved = sum(ways).sum(axis=0)  # type: ignore[union-attr]
            shared = self._shared.get(pc, np.zeros(SHARED_COLUMNS, np.int64))
            atomic = self._classes[pc] == "atomic"
            profiles.append(
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
                    global_requests=int(moved[REQUESTS]),
                    global_bytes=int(moved[BYTES]),
                    sectors=int(moved[SECTORS]),
                    shared_requests=int(shared[REQUESTS]),
                    shared_bytes=int(shared[BYTES]),
                    waves=int(shared[WAVES]),
                    phases=int(shared[PHASES]),
                    ideal_waves=int(shared[IDEAL]),
                    local_bytes=self._local[pc],
                    atomics=int(moved[LANES] + shared[LANES]) if atomic else 0,
                )
            )
        return tuple(profiles)

    def _buffer(self, row: int) -> BufferProfile:
        allocation, touched = self._memory.allocations[row], self._touched[row]
        read, written, atomic = (
            sum((c[row] for (_, m), c in self._global.items() if m == mark), np.zeros(GLOBAL_COLUMNS))
            for mark in (READ, WRITTEN, READ | WRITTEN)
        )
        once, reads, writes = read + written + atomic, read + atomic, written + atomic
        return BufferProfile(
            name=allocation.name,
            size=allocation.bytes,
            requests=int(once[REQUESTS]),
            bytes=int(once[BYTES]),
            sectors=int(once[SECTORS]),
            bytes_read=int(reads[BYTES]),
            bytes_written=int(writes[BYTES]),
            sectors_read=int(reads[SECTORS]),
            sectors_written=int(writes[SECTORS]),
            footprint=int(np.count_nonzero(touched)),
            footprint_read=int(np.count_nonzero(touched & READ)),
            footprint_written=int(np.count_nonzero(touched & WRITTEN)),
            atomics=int(atomic[LANES]),
        )


def _warps(mask: Array) -> int:
    return int(np.count_nonzero(mask.reshape(-1, WARP).any(axis=1)))
