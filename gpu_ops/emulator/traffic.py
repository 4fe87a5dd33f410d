"""What accesses cost the memory system, counted lane by lane, compiled: sectors of global, waves of shared memory.

A *request* is one instruction of one warp. Global memory moves in sectors of 32 bytes: a request costs the distinct
sectors its lanes touch. Shared memory has 32 banks of one 4-byte word each: lanes that read the same word share it,
and a request takes a *wave* for each distinct word of its busiest bank. Wider accesses go in phases of fewer lanes,
those that fill the banks once: 32 lanes for up to 4 bytes each, 16 for 8, 8 for 16 (so each 8 rows of ldmatrix).
Atomics are counted like other accesses; that lanes which meet at an address take turns is not.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.emulator.ahead import loop
from gpu_ops.emulator.compiled import peek, poke

__all__ = [
    "BYTES", "GLOBAL_COLUMNS", "IDEAL", "LANES", "PHASES", "READ", "REQUESTS", "SECTOR", "SECTORS", "SHARED_COLUMNS",
    "WAVES", "WRITTEN", "count_global", "count_shared",
]  # fmt: skip

SECTOR = 32  # bytes

# Columns of count_global, a row per allocation.
REQUESTS, LANES, BYTES, SECTORS, _STAMP = range(5)
GLOBAL_COLUMNS = 5
# Elements of count_shared; the first three mean the same.
WAVES, PHASES, IDEAL = 3, 4, 5
SHARED_COLUMNS = 6

READ, WRITTEN = 1, 2  # bits of a sector's mark


@loop("void(int32[::1], uint64[::1], int32[::1], int64, int64[:,::1], int64[::1], uint8, int64[:,::1])")
def count_global(lanes, address, owner, size, table, marks, mark, counts):  # type: ignore[no-untyped-def]
    """Add the accesses of one instruction to ``counts``, and ``mark`` to each sector they touch.

    ``marks``: per allocation the host pointer of a byte per sector, or 0 if it is not watched. Accesses are aligned
    to their size, so a lane touches one sector.
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
        if sector <= highest:  # else it is new: lanes mostly go upward
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
def count_shared(lanes, address, owner, size, counts):  # type: ignore[no-untyped-def]
    """Add the accesses of one instruction to shared memory to ``counts``.

    IDEAL: the waves if every one moved 128 bytes; PHASES: the waves if no lanes of a phase met in a bank.
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
