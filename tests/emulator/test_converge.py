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
