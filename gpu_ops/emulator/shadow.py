"""Shadow memory of the sanitizer, and compiled checks of accesses against it.

Global memory has a byte of flags per byte (:mod:`.memory` makes them). Shared memory has a row of state per
*granule*, the smallest access of the program: the last writer, the last reader, and when. Time in a block is its
*epoch*, the number of barriers passed. Inside an epoch each warp has its own epoch, counted by ``__syncwarp``.

Two accesses to one granule by different threads race if nothing orders them: they are in the same block epoch, and
not in one warp with a later warp epoch. Atomics do not race with each other. Each row keeps one write and one read.
An access that the next one replaces is either ordered before it, or recorded by a flag and as the *other* thread.
"""

from __future__ import annotations

from numba.core import types

from gpu_ops.emulator.aot import loop, peek, poke

# Columns of a granule's row: the last write, the last read, a pending asynchronous copy.
W_FLAGS, W_EPOCH, W_THREAD, W_WARP_EPOCH, W_PC, W_OTHER, W_PLAIN = range(7)
R_FLAGS, R_EPOCH, R_THREAD, R_WARP_EPOCH, R_PC, R_OTHER = range(7, 13)
PENDING, PENDING_PC = 13, 14  # PENDING: the thread + 1
_THREAD_BITS = 10  # W_OTHER, W_PLAIN and R_OTHER pack a pc above a thread: see `unpacked`
COLUMNS = 16  # a cache line of int32

MULTI_LANE, MULTI_WARP = 1, 2  # in addition to the access kept: other lanes in its warp epoch, other warps
WRITTEN, ATOMIC = 4, 8
PLAIN_BEFORE = 16  # the warp wrote without an atomic, in an earlier warp epoch

UNDEFINED = 32  # the written value is uninitialised
VOID = 2  # the same for a byte of local memory; 1 is written, 0 is not

UNINITIALISED, RACE_WRITE, RACE_READ, PENDING_READ, PENDING_WRITE = range(
    1, 6
)  # RACE_: with an earlier access

# Shadow bits of a byte of global memory; a byte with 0 may be read and written.
OUTSIDE, UNWRITTEN, POISONED, STORED = (
    1,
    2,
    4,
    8,
)  # STORED: written by this launch, so ld.global.nc must not read it
EACH_BYTE = 0x0101010101010101  # times a bit: the bit in every byte of a word


def unpacked(packed: int) -> tuple[int, int]:
    """Unpack (thread, pc) from a column."""
    return packed & (1 << _THREAD_BITS) - 1, packed >> _THREAD_BITS


@loop(
    "UniTuple(int64,4)(int64[::1], int32[::1], int64[:,::1], int64, int64, boolean, boolean, boolean, uint64[::1])"
)
def check_global(host, owner, table, size, wrong, reads, writes, tracked, missing):  # type: ignore[no-untyped-def]
    """Check accesses and mark stored bytes; return (shadow bits of the first bad byte or 0, position, byte, absent).

    ``wrong``: the bits that a read must not find, repeated in each byte of a word. A ``tracked`` load may find
    unwritten bytes: ``missing`` gets a bit for each of them, by position, and ``absent`` is their number.
    """
    word, octet, absent = types.uint64(0), types.uint8(0), 0
    for i in range(len(host)):
        row = owner[i]
        if row < 0 or table[row, 3] == 0:
            continue
        at = host[i] - table[row, 2] + table[row, 3]
        step = 8 if size >= 8 else 1
        for b in range(0, size, step):
            bits = peek(at + b, word) if step == 8 else types.uint64(peek(at + b, octet))
            bad = bits & (types.uint64(wrong) if reads else types.uint64(OUTSIDE * EACH_BYTE))
            if bad != 0:
                for k in range(step):
                    if (bad >> types.uint64(8 * k)) & types.uint64(255) != 0:
                        return types.int64((bad >> types.uint64(8 * k)) & types.uint64(255)), i, b + k, absent
            if tracked and bits & types.uint64(UNWRITTEN * EACH_BYTE) != 0:
                for k in range(step):
                    if (bits >> types.uint64(8 * k)) & types.uint64(UNWRITTEN) != 0:
                        missing[i] |= types.uint64(1) << types.uint64(b + k)
                        absent += 1
            if writes:
                bits = (bits & ~types.uint64(UNWRITTEN * EACH_BYTE)) | types.uint64(STORED * EACH_BYTE)
                if step == 8:
                    poke(at + b, bits)
                else:
                    poke(at + b, types.uint8(bits))
    return 0, 0, 0, absent


@loop("int64(int64[::1], int32[::1], int64, int64, uint8[:,::1], int64, boolean, boolean, uint64[::1])")
def check_local(host, lanes, base, stride, written, size, reads, padded, missing):  # type: ignore[no-untyped-def]
    """Mark the bytes of local memory that a thread writes, or find those that it reads unwritten.

    Returns the number of missing bytes; ``missing`` gets a bit for each, by position. Bytes of 0 do not count if
    they may be padding.
    """
    absent = 0
    for i in range(len(host)):
        offset = host[i] - base - lanes[i] * stride
        for b in range(size):
            if not reads:
                written[lanes[i], offset + b] = 1
            elif written[lanes[i], offset + b] == VOID or (written[lanes[i], offset + b] == 0 and not padded):
                missing[i] |= types.uint64(1) << types.uint64(b)
                absent += 1
    return absent


@loop(
    "UniTuple(int64,4)(int64[::1], int32[::1], int64, int64[::1], int64, int32[:,::1], int32[::1], int32[::1], "
    "int64, boolean, boolean, boolean, boolean, boolean, uint64[::1])"
)
def check_shared(  # type: ignore[no-untyped-def]
    host,
    lanes,
    size,
    windows,
    granule,
    state,
    epochs,
    warp_epochs,
    pc,
    reads,
    writes,
    atomic,
    pends,
    tracked,
    missing,
):
    """Check accesses to shared memory in lane order; return (kind or 0, position, row of the state, absent).

    ``pends``: the write of an asynchronous copy, which is pending until its thread waits for it. ``tracked``,
    ``missing`` and ``absent`` are as for :func:`check_global`.
    """
    absent = 0
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
                return (PENDING_WRITE if writes and not reads else PENDING_READ), i, g, absent
            if reads and (s[W_FLAGS] == 0 or s[W_FLAGS] & UNDEFINED != 0):
                if not tracked:
                    return UNINITIALISED, i, g, absent
                ones = (types.uint64(1) << types.uint64(granule)) - types.uint64(1)
                missing[i] |= ones << types.uint64((g - first) * granule)
                absent += granule
            same_epoch = s[W_EPOCH] == epoch
            same_warp = s[W_THREAD] // 32 == thread // 32
            if same_epoch:
                flags = s[W_FLAGS]
                several = flags & MULTI_LANE != 0 or s[W_THREAD] != thread
                other_warp = flags & MULTI_WARP != 0 or not same_warp
                if atomic and flags & ATOMIC != 0:
                    if other_warp and flags & PLAIN_BEFORE != 0:
                        return RACE_WRITE, i, g, absent
                elif other_warp or (s[W_WARP_EPOCH] == warp_epoch and several):
                    return RACE_WRITE, i, g, absent
            if writes:
                if s[R_EPOCH] == epoch:
                    several = s[R_FLAGS] & MULTI_LANE != 0 or s[R_THREAD] != thread
                    other_warp = s[R_FLAGS] & MULTI_WARP != 0 or s[R_THREAD] // 32 != thread // 32
                    if other_warp or (s[R_WARP_EPOCH] == warp_epoch and several):
                        return RACE_READ, i, g, absent
                if pends:
                    s[PENDING], s[PENDING_PC] = thread + 1, pc
                elif not (atomic and same_epoch):
                    s[W_FLAGS] = WRITTEN | ATOMIC if atomic else WRITTEN
                    s[W_EPOCH], s[W_THREAD], s[W_WARP_EPOCH], s[W_PC] = epoch, thread, warp_epoch, pc
                elif (
                    s[W_FLAGS] & ATOMIC == 0
                ):  # by this warp: a plain write conflicts with more than an atomic does
                    if s[W_WARP_EPOCH] < warp_epoch:
                        s[W_PLAIN] = s[W_PC] << _THREAD_BITS | s[W_THREAD]
                        s[W_FLAGS] = WRITTEN | ATOMIC | PLAIN_BEFORE
                        s[W_THREAD], s[W_WARP_EPOCH], s[W_PC] = thread, warp_epoch, pc
                elif not same_warp:
                    s[W_FLAGS] |= MULTI_WARP
                    s[W_OTHER] = pc << _THREAD_BITS | thread
                elif s[W_WARP_EPOCH] < warp_epoch:
                    s[W_THREAD], s[W_WARP_EPOCH], s[W_PC] = thread, warp_epoch, pc
                    s[W_FLAGS] &= ~MULTI_LANE
                elif s[W_THREAD] != thread:
                    if s[W_FLAGS] & MULTI_WARP == 0:
                        s[W_OTHER] = pc << _THREAD_BITS | thread
                    s[W_FLAGS] |= MULTI_LANE
            if reads and not atomic:
                if s[R_EPOCH] != epoch:
                    s[R_EPOCH], s[R_FLAGS] = epoch, 0
                    s[R_THREAD], s[R_WARP_EPOCH], s[R_PC] = thread, warp_epoch, pc
                elif s[R_THREAD] // 32 != thread // 32:
                    s[R_FLAGS] |= MULTI_WARP
                    s[R_OTHER] = pc << _THREAD_BITS | thread
                elif s[R_WARP_EPOCH] < warp_epoch:
                    s[R_THREAD], s[R_WARP_EPOCH], s[R_PC] = thread, warp_epoch, pc
                    s[R_FLAGS] &= ~MULTI_LANE
                elif s[R_THREAD] != thread:
                    if s[R_FLAGS] & MULTI_WARP == 0:
                        s[R_OTHER] = pc << _THREAD_BITS | thread
                    s[R_FLAGS] |= MULTI_LANE
    return 0, 0, 0, absent


@loop("void(int64[::1], int32[::1], uint64[::1], int64[::1], int64, int32[:,::1])")
def void_shared(host, lanes, bits, windows, granule, state):  # type: ignore[no-untyped-def]
    """Mark bytes of shared memory, a bit of ``bits`` each, as written with no value."""
    per_block = windows[2] // granule
    for i in range(len(host)):
        block = lanes[i] // windows[3]
        first = block * per_block + (host[i] - windows[0] - block * windows[2]) // granule
        for b in range(64):
            if (bits[i] >> types.uint64(b)) & types.uint64(1) != 0:
                state[first + b // granule, W_FLAGS] |= UNDEFINED


@loop("void(int64[::1], int32[::1], int64, int64[::1], int64, int32[:,::1], int32[::1], int32[::1])")
def finish_copies(host, lanes, size, windows, granule, state, epochs, warp_epochs):  # type: ignore[no-untyped-def]
    """Turn asynchronous copies that their threads have waited for into ordinary writes."""
    per_block = windows[2] // granule
    for i in range(len(host)):
        lane = lanes[i]
        block = lane // windows[3]
        first = block * per_block + (host[i] - windows[0] - block * windows[2]) // granule
        for g in range(first, first + size // granule):
            s = state[g]
            if s[PENDING] != 0:
                s[W_FLAGS] = WRITTEN
                s[W_EPOCH], s[W_THREAD] = epochs[block], s[PENDING] - 1
                s[W_WARP_EPOCH], s[W_PC] = warp_epochs[lane // 32], s[PENDING_PC]
                s[PENDING] = 0
