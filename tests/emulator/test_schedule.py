"""Random subsets of a warp meet at several places while other lanes poll or end: no lane gets stuck."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import SanitizerError, launch

THREADS = 96

# Each lane runs through its own list of meetings. A meeting has a mask of lanes and one of four places. A lane that
# arrives increments a counter, and must see all lanes counted when the meeting releases it.
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 lists, .param .u64 masks, .param .u64 counts, .param .u64 seen)
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [lists];
    ld.param.u64 %rd2, [masks];
    ld.param.u64 %rd3, [counts];
    ld.param.u64 %rd4, [seen];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd1, %rd1, %rd5;
    add.s64 %rd4, %rd4, %rd5;
NEXT:
    ld.global.u32 %r2, [%rd1];
    setp.eq.s32 %p1, %r2, -1;
    @%p1 exit;
    mul.wide.u32 %rd6, %r2, 4;
    add.s64 %rd7, %rd2, %rd6;
    add.s64 %rd8, %rd3, %rd6;
    ld.global.u32 %r3, [%rd7];
    atom.global.add.u32 %r4, [%rd8], 1;
    and.b32 %r5, %r2, 3;
    brx.idx %r5, places;
    places: .branchtargets A, B, C, D;
D:  bar.warp.sync %r3;
    bra MET;
B:  vote.sync.ballot.b32 %r6, 1, %r3;
    bra MET;
A:  bar.warp.sync %r3;
    bra MET;
C:  match.any.sync.b32 %r6, %r2, %r3;
MET:
    ld.volatile.global.u32 %r7, [%rd8];
    st.global.u32 [%rd4], %r7;
    add.s64 %rd1, %rd1, 384;
    add.s64 %rd4, %rd4, 384;
    bra NEXT;
}
"""


def meetings(rng, number):
    """Meetings of each lane, masks and sizes, in an order in which every meeting can take place."""
    masks, sizes = np.zeros(number, np.uint32), np.zeros(number, np.int64)
    lists = [[] for _ in range(THREADS)]
    last = rng.integers(0, 2 * number, THREADS)  # first meeting at which a lane has ended
    for event in range(number):
        warp = int(rng.integers(0, THREADS // 32))
        lanes = np.flatnonzero(rng.random(32) < rng.choice([0.1, 0.5, 1.0]))
        ended = [lane for lane in lanes if last[32 * warp + lane] <= event]
        coming = [lane for lane in lanes if last[32 * warp + lane] > event]
        named = coming + ended if rng.random() < 0.5 else coming  # the mask may name lanes that have ended
        masks[event] = sum(1 << int(lane) for lane in named)
        sizes[event] = len(coming)
        for lane in coming:
            lists[32 * warp + lane].append(event)
    table = np.full((number + 1, THREADS), -1, np.int32)
    for thread, events in enumerate(lists):
        table[: len(events), thread] = events
    return table, masks, sizes


@pytest.mark.parametrize("seed", range(6))
def test_all_meet_and_nobody_is_stuck(seed):
    rng = np.random.default_rng(seed)
    for _ in range(12):
        table, masks, sizes = meetings(rng, int(rng.integers(4, 20)))
        counts, seen = np.zeros(len(masks), np.int32), np.zeros(table.shape, np.int32)
        launch(PTX, "k", 1, THREADS, (table, masks, counts, seen))
        np.testing.assert_array_equal(counts, sizes)
        np.testing.assert_array_equal(seen, np.where(table < 0, 0, sizes[table]))


def test_a_lane_that_never_comes_is_reported():
    """A mask names lane 3, which never arrives because it waits for a meeting that cannot take place."""
    table = np.full((3, THREADS), -1, np.int32)
    table[0, :3], table[0, 3] = 0, 1
    table[1, 0] = 1
    masks = np.array([0b1111, 0b1001], np.uint32)
    counts, seen = np.zeros(2, np.int32), np.zeros(table.shape, np.int32)
    with pytest.raises(SanitizerError, match=r"none of the 4 threads .* can go on") as caught:
        launch(PTX, "k", 1, THREADS, (table, masks, counts, seen))
    assert caught.value.kind == "deadlock"
    assert (
        "3 threads, first block (0,0,0) thread (0,0,0): a warp instruction whose other lanes never come"
        in str(caught.value)
    )
