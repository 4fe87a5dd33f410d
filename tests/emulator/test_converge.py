"""Warp instructions in several arms of a branch: lanes of all arms converge."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import SanitizerError, launch

LANES = np.arange(32)
KERNEL = (
    'extern "C" __global__ void k(const int* x, int* y) { int t = threadIdx.x, v = x[t], r; %s y[t] = r; }'
)
EVERY = "0xffffffffu"


def arms(*calls):
    """Lanes take the arms in turn. Each arm changes v, then makes its call."""
    chain = " else ".join(
        f"if (t % {len(calls)} == {i}) {{ v += {100 * i}; r = {call}; r += {i}; }}"
        for i, call in enumerate(calls)
    )
    return KERNEL % f"r = 0; {chain}"


def run(source, block=32):
    x, y = np.arange(block, dtype=np.int32) * 3, np.zeros(block, np.int32)
    launch(source, "k", 1, block, (x, y))
    return x, y


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("block", [32, 96])
def test_shuffles(n, block):
    x, y = run(arms(*[f"__shfl_xor_sync({EVERY}, v, 1)"] * n), block)
    t = np.arange(block)
    sent = x + 100 * (t % n)
    np.testing.assert_array_equal(y, sent[t ^ 1] + t % n)


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("__reduce_add_sync({every}, v)", lambda v: v.sum()),
        ("(int)__ballot_sync({every}, v & 1)", lambda v: (v % 2 << LANES).sum()),
        ("__any_sync({every}, v == 3)", lambda v: (v == 3).any()),
        ("(int)__match_any_sync({every}, v % 4)", lambda v: ((v % 4)[:, None] == v % 4) @ (1 << LANES)),
    ],
)
def test_other_instructions(call, want):
    x, y = run(arms(*[call.format(every=EVERY)] * 2))
    first = np.asarray(want(x + 100 * (LANES % 2)))
    np.testing.assert_array_equal(y, (first.astype(np.int64) + LANES % 2).astype(np.int32))


def test_a_half_of_the_warp_has_its_own_mask():
    source = KERNEL % (
        "unsigned mine = t < 16 ? 0xffffu : 0xffff0000u; if (t % 2) r = __shfl_xor_sync(mine, v, 1);"
        "else { v = -v; r = __shfl_xor_sync(mine, v, 1); }"
    )
    x, y = run(source)
    sent = np.where(LANES % 2, x, -x)
    np.testing.assert_array_equal(y, sent[LANES ^ 1])


def test_syncwarp_orders_the_arms():
    source = KERNEL % (
        "__shared__ int s[32]; if (t < 16) { s[t] = v; __syncwarp(); r = s[t + 16]; }"
        "else { s[t] = 2 * v; __syncwarp(); r = s[t - 16]; }"
    )
    x, y = run(source)
    np.testing.assert_array_equal(y, np.r_[2 * x[16:], x[:16]])


def test_a_loop_and_an_arm():
    """Lanes of one arm shuffle twice, lanes of the other in a loop of two."""
    call = f"__shfl_xor_sync({EVERY}, v, 16)"
    source = KERNEL % (
        f"if (t < 16) {{ v = {call} + 1; v = {call} + 1; }}"
        f"else {{ for (int i = 0; i < 2; ++i) v = {call} + 10; }} r = v;"
    )
    x, y = run(source)
    np.testing.assert_array_equal(y, x + 11)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"__shfl_xor_sync({EVERY}, v, 16)", f"__shfl_up_sync({EVERY}, v, 16)"),
        (f"__shfl_xor_sync({EVERY}, v, 16)", "__shfl_xor_sync(0x5555aaaau, v, 16)"),
        (f"__reduce_add_sync({EVERY}, v)", f"(__syncwarp({EVERY}), v)"),
    ],
)
def test_different_instructions_do_not_meet(one, other):
    with pytest.raises(SanitizerError) as caught:
        run(arms(one, other))
    assert caught.value.kind in ("deadlock", "warp mask")


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 y)
{
  .reg .pred %%p<4>;
  .reg .b32 %%r<16>;
  .reg .b64 %%rd<4>;
  ld.param.u64 %%rd1, [y];
  mov.u32 %%r1, %%tid.x;
  mul.wide.u32 %%rd2, %%r1, 4;
  add.s64 %%rd1, %%rd1, %%rd2;
  and.b32 %%r2, %%r1, 1;
  add.u32 %%r6, %%r1, 100;
  mov.u32 %%r7, 1;
  setp.eq.u32 %%p1, %%r2, 0;
  @%%p1 bra other;
  shfl.sync.bfly.b32 %s, %%r6, %%r7, 31, -1;
  bra done;
other:
  shfl.sync.bfly.b32 %s, 31, -1;
done:
  @!%%p1 mov.u32 %%r9, %s;
  st.global.u32 [%%rd1], %%r9;
  ret;
}
"""


def test_registers_that_stand_for_each_other():
    """The result is a source in one arm only."""
    y = np.zeros(32, np.int32)
    launch(PTX % ("%r6", "%r9, %r6, %r7", "%r6"), "k", 1, 32, (y,))
    np.testing.assert_array_equal(y, (LANES ^ 1) + 100)


def test_one_register_does_not_stand_for_two():
    """Both sources of one arm are the same register, those of the other are two registers."""
    y = np.zeros(32, np.int32)
    launch(PTX % ("%r9", "%r9, %r7, %r7", "%r9"), "k", 1, 32, (y,))
    np.testing.assert_array_equal(y, np.where(LANES % 2, 1, LANES + 101))


# Random subsets of a warp meet at several places while other lanes poll or end: no lane gets stuck.

THREADS = 96

# Each lane runs through its own list of meetings. A meeting has a mask of lanes and one of four places. A lane that
# arrives increments a counter, and must see all lanes counted when the meeting releases it.
POLLING_PTX = """
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
        launch(POLLING_PTX, "k", 1, THREADS, (table, masks, counts, seen))
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
        launch(POLLING_PTX, "k", 1, THREADS, (table, masks, counts, seen))
    assert caught.value.kind == "deadlock"
    assert (
        "3 threads, first block (0,0,0) thread (0,0,0): a warp instruction whose other lanes never come"
        in str(caught.value)
    )
