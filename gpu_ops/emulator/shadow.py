"""State of every byte the sanitizer watches, and the compiled checks of accesses against it.

Global memory has a byte of bits per byte (:mod:`.memory` makes them). Shared memory has a row of state per
*granule*, the smallest access of the program: who wrote it last, who read it last, when. Time in a block is its
*epoch*, the barriers passed; inside an epoch a warp has its own, counted by ``__syncwarp``.

Two accesses of one granule by different threads race when nothing orders them: same block epoch, and not the same
warp in a later warp epoch. Keeping one write and one read is enough: a read that would be forgotten is either
ordered before the one kept, or remembered in ``R_FLAGS``.
"""

from __future__ import annotations

from numba.core import types

from gpu_ops.emulator.compiled import loop, peek, poke

__all__ = [
    "COLUMNS", "PENDING_READ", "PENDING_WRITE", "RACE", "UNINITIALISED", "check_global", "check_local",
    "check_shared", "finish_copies",
]  # fmt: skip

# Columns of a granule's row.
WRITTEN, W_EPOCH, W_THREAD, W_WARP_EPOCH, W_ATOMIC, W_PC = range(6)
R_EPOCH, R_THREAD, R_WARP_EPOCH, R_FLAGS, R_PC = range(6, 11)
PENDING, PENDING_PC = 11, 12  # thread + 1 of an asynchronous copy on its way here
COLUMNS = 16  # a cache line of int32

MULTI_LANE, MULTI_WARP = 1, 2  # R_FLAGS: more readers than the one kept

UNINITIALISED, RACE, PENDING_READ, PENDING_WRITE = 1, 2, 3, 4

# Shadow bits of global memory, as in memory.py, repeated in all bytes of a word.
_FILL = 0x0101010101010101
_WRITE_BITS = 1 * _FILL  # outside
_CLEARED = 2 * _FILL  # unwritten
_STORED = 8 * _FILL  # by this launch


@loop("UniTuple(int64,3)(int64[::1], int32[::1], int64[:,::1], int64, int64, boolean, boolean)")
def check_global(host, owner, table, size, wrong, reads, writes):  # type: ignore[no-untyped-def]
    """(shadow bits of the first wrong byte or 0, position, byte) of accesses; stores leave their mark.

    ``wrong``: the bits that a read must not find, in each byte of a word.
    """
    word, octet = types.uint64(0), types.uint8(0)
    for i in range(len(host)):
        row = owner[i]
        if row < 0 or table[row, 3] == 0:
            continue
        at = host[i] - table[row, 2] + table[row, 3]
        step = 8 if size >= 8 else 1
        for b in range(0, size, step):
            bits = peek(at + b, word) if step == 8 else types.uint64(peek(at + b, octet))
            bad = bits & (types.uint64(wrong) if reads else types.uint64(_WRITE_BITS))
            if bad != 0:
                for k in range(step):
                    if (bad >> types.uint64(8 * k)) & types.uint64(255) != 0:
                        return types.int64((bad >> types.uint64(8 * k)) & types.uint64(255)), i, b + k
            if writes:
                bits = (bits & ~types.uint64(_CLEARED)) | types.uint64(_STORED)
                if step == 8:
                    poke(at + b, bits)
                else:
                    poke(at + b, types.uint8(bits))
    return 0, 0, 0


@loop("int64(int64[::1], int32[::1], int64, int64, uint8[:,::1], int64, boolean)")
def check_local(host, lanes, base, stride, written, size, reads):  # type: ignore[no-untyped-def]
    """Position of the first read of a local byte that its thread has not written, or -1."""
    for i in range(len(host)):
        offset = host[i] - base - lanes[i] * stride
        for b in range(size):
            if reads and written[lanes[i], offset + b] == 0:
                return i
            if not reads:
                written[lanes[i], offset + b] = 1
    return -1


@loop(
    "UniTuple(int64,3)(int64[::1], int32[::1], int64[::1], int64, int64, int32[:,::1], int32[::1], int32[::1], "
    "int64, boolean, boolean, boolean, boolean)"
)
def check_shared(  # type: ignore[no-untyped-def]
    host, lanes, windows, size, granule, state, epochs, warp_epochs, pc, reads, writes, atomic, pends
):
    """(kind or 0, position, row of the state) of accesses to shared memory, in lane order.

    ``pends``: the write of an asynchronous copy, which stays on its way until its thread waits.
    """
    per_block = windows[2] // granule
    for i in range(len(host)):
        lane = lanes[i]
        block = lane // windows[3]
        thread = types.int32(lane % windows[3])
        epoch, warp_epoch = epochs[block], warp_epochs[lane // 32]
        first = block * per_block + (host[i] - windows[0] - block * windows[2]) // granule
        for g in range(first, first + size // granule):
            s = state[g]
            if s[PENDING] != 0:
                return (PENDING_WRITE if writes and not reads else PENDING_READ), i, g
            if reads and s[WRITTEN] == 0:
                return UNINITIALISED, i, g
            if s[W_EPOCH] == epoch and s[W_THREAD] != thread and not (atomic and s[W_ATOMIC] != 0):
                same_warp = s[W_THREAD] // 32 == thread // 32
                if not (same_warp and s[W_WARP_EPOCH] < warp_epoch):
                    return RACE, i, g
            if writes:
                if s[R_EPOCH] == epoch:
                    other = s[R_THREAD] // 32 != thread // 32
                    now = s[R_WARP_EPOCH] == warp_epoch
                    several = (s[R_FLAGS] & MULTI_LANE) != 0 or s[R_THREAD] != thread
                    if (s[R_FLAGS] & MULTI_WARP) != 0 or other or (now and several):
                        return RACE, i, g
                if pends:
                    s[PENDING], s[PENDING_PC] = thread + 1, pc
                else:
                    s[WRITTEN] = 1
                    s[W_EPOCH], s[W_THREAD], s[W_WARP_EPOCH], s[W_PC] = epoch, thread, warp_epoch, pc
                    s[W_ATOMIC] = 1 if atomic else 0
            if reads and not atomic:
                if s[R_EPOCH] != epoch:
                    s[R_EPOCH], s[R_FLAGS] = epoch, 0
                    s[R_THREAD], s[R_WARP_EPOCH], s[R_PC] = thread, warp_epoch, pc
                elif s[R_THREAD] // 32 != thread // 32:
                    s[R_FLAGS] |= MULTI_WARP
                elif s[R_WARP_EPOCH] < warp_epoch:
                    s[R_THREAD], s[R_WARP_EPOCH], s[R_PC] = thread, warp_epoch, pc
                    s[R_FLAGS] &= ~MULTI_LANE
                elif s[R_THREAD] != thread:
                    s[R_FLAGS] |= MULTI_LANE
    return 0, 0, 0


@loop("void(int64[::1], int32[::1], int64[::1], int64, int64, int32[:,::1], int32[::1], int32[::1])")
def finish_copies(host, lanes, windows, size, granule, state, epochs, warp_epochs):  # type: ignore[no-untyped-def]
    """Asynchronous copies their threads have waited for: from now on a write of theirs like any other."""
    per_block = windows[2] // granule
    for i in range(len(host)):
        lane = lanes[i]
        block = lane // windows[3]
        first = block * per_block + (host[i] - windows[0] - block * windows[2]) // granule
        for g in range(first, first + size // granule):
            s = state[g]
            if s[PENDING] != 0:
                s[WRITTEN] = 1
                s[W_EPOCH], s[W_THREAD] = epochs[block], s[PENDING] - 1
                s[W_WARP_EPOCH], s[W_PC], s[W_ATOMIC] = warp_epochs[lane // 32], s[PENDING_PC], 0
                s[PENDING] = 0
