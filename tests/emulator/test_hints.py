"""Cache hints and policies change no values; their operands are checked."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import PtxError, launch
from gpu_ops.emulator.parser import parse

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 sums)
{
  .reg .pred %p;
  .reg .b16 %h;
  .reg .b32 %t, %s, %n;
  .reg .f32 %f<8>;
  .reg .b64 %x, %y, %sums, %at, %policy, %other;
  .shared .align 16 .b8 tile[512];
  ld.param.u64 %x, [x];
  ld.param.u64 %y, [y];
  ld.param.u64 %sums, [sums];
  mov.u32 %t, %tid.x;
  mul.wide.u32 %at, %t, 16;
  add.u64 %x, %x, %at;
  add.u64 %y, %y, %at;
  shl.b32 %n, %t, 4;
  mov.u32 %s, tile;
  add.u32 %s, %s, %n;
  @@
  st.global.v4.f32 [%y], {%f0, %f1, %f2, %f3};
  ret;
}
"""
POLICIES = """
createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;
createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %policy, 0.5;
createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %policy, [%x], 64, 128;
createpolicy.cvt.L2.b64 %other, %policy;
createpolicy.cvt.L2.b64 %other, 0x123;
"""
LOADS = [
    "ld.global.L2::cache_hint.v4.f32 {%f0, %f1, %f2, %f3}, [%x], %policy;",
    "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.f32 {%f0, %f1, %f2, %f3}, [%x], %policy;",
    "ld.global.L1::evict_last.L2::evict_first.L2::256B.v4.f32 {%f0, %f1, %f2, %f3}, [%x];",
    """cp.async.cg.shared.global.L2::cache_hint.L2::128B [%s], [%x], 16, %policy;
       cp.async.wait_all;
       ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%s];""",
    """mov.u32 %n, 16;
       cp.async.ca.shared.global.L2::cache_hint [%s], [%x], 16, %n, %policy;
       cp.async.wait_all;
       ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%s];""",
    """prefetch.global.L2 [%x]; prefetch.global.L2::evict_last [%x+64]; prefetch.L1 [%x]; prefetchu.L1 [%x];
       applypriority.global.L2::evict_normal [%x], 128;
       discard.global.L2 [%y], 128;
       ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%x];
       st.global.L1::no_allocate.L2::cache_hint.v4.f32 [%y], {%f0, %f1, %f2, %f3}, %policy;
       red.global.add.L2::cache_hint.f32 [%sums], %f0, %policy;
       atom.global.add.L2::cache_hint.f32 %f4, [%sums+4], %f1, %policy;""",
]


@pytest.mark.parametrize("code", LOADS, ids=lambda code: code.partition(" ")[0])
@pytest.mark.parametrize("policy", ["", "0x123", "-5"])
def test_hints_change_no_value(code, policy):
    x, y, sums = np.arange(128, dtype=np.float32), np.zeros(128, np.float32), np.zeros(2, np.float32)
    code = POLICIES + code
    if policy:
        code = code.replace(", %policy;", f", {policy};")
    launch(PTX.replace("@@", code), "k", 1, 32, (x, y, sums))
    np.testing.assert_array_equal(y, x)
    if "red.global.add" in code:
        np.testing.assert_array_equal(sums, x.reshape(-1, 4).sum(0)[:2])


@pytest.mark.parametrize(
    "code", [code for code in LOADS if "cache_hint" in code], ids=lambda c: c.partition(" ")[0]
)
@pytest.mark.parametrize("policy", ["%n", "%f7", "0.5", "[%x]", ""])
def test_a_policy_is_a_register_of_64_bits_or_an_integer(code, policy):
    wrong = code.replace(", %policy;", f", {policy};" if policy else ";")
    assert parse(PTX.replace("@@", wrong))
    args = np.zeros(128, np.float32), np.zeros(128, np.float32), np.zeros(2, np.float32)
    with pytest.raises(
        PtxError, match=r"PTX line \d+: .*(64-bit register with a cache policy|these operands)"
    ):
        launch(PTX.replace("@@", wrong), "k", 1, 32, args)


@pytest.mark.parametrize(
    "code",
    [
        "createpolicy.fractional.L2::evict_first.b64 %n, 1.0;",
        "createpolicy.range.global.L2::evict_last.b64 %policy, [%unknown], 64, 128;",
        "createpolicy.cvt.L2.b64 %policy, %n;",
        "createpolicy.cvt.L2.b64 %n, 0x123;",
        "createpolicy.cvt.L2.b64 %policy, 1.5;",
        "prefetch.global.L2 [%unknown];",
    ],
)
def test_operands_of_policies_are_checked(code):
    with pytest.raises(PtxError, match=r"PTX line \d+"):
        launch(
            PTX.replace("@@", code), "k", 1, 32, (np.zeros(128, np.float32),) * 2 + (np.zeros(2, np.float32),)
        )
