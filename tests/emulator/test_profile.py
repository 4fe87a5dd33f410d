"""Profile of the emulator: exact counts of instructions and operations; recording and printing."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import emulator
from gpu_ops.emulator import run as emulator_run
from gpu_ops.emulator.counts import Counts
from gpu_ops.kernels.compiler.progress import several
from tests.support.profiled import SOURCE, buffer, line_of, only, profiled

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")


# -- work -----------------------------------------------------------------------------------------


def test_tensor_core_work():
    steps, blocks = 5, 3
    a, b = np.zeros((steps, 4, 32), np.uint32), np.zeros((steps, 2, 32), np.uint32)
    p = profiled("product", blocks, 32, (a, b, np.zeros((blocks, 4, 32), np.float32), steps))
    m, n, k = 16 * blocks, 8, 16 * steps
    assert 2 * p.multiply_adds["f16"] == 2 * m * n * k
    assert p.classes["tensor core"].warps == blocks * steps
    assert "61,440 f16 in tensor cores" in str(p)


def test_operations():
    n, threads = 75, 128
    x, d = np.ones(threads, np.float32), np.ones(threads)
    h, y = np.ones(2 * threads, np.float16), np.zeros(threads, np.float32)
    p = profiled("operations", 2, 64, (x, d, h, y, n))
    floats = {name: count for name, count in p.operations.items() if name != "int"}
    assert floats == {"fp32": 5 * n, "fp64": 2 * n, "fp16": 4 * n}


def test_lines_of_inlined_functions():
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    p = profiled("gather4", 1, 64, (x, y, np.arange(64, dtype=np.int32)))
    inner, outer = ({line.line: line for line in p.lines(inlined=i)} for i in (True, False))
    assert inner[line_of("// gather")].sectors == 3 * 8  # index, x, y
    assert outer[line_of("void gather4(")].sectors == 3 * 8
    assert line_of("// gather") not in outer
    for lines in (inner, outer):
        assert sum(line.warps for line in lines.values()) == p.counts.warps


def test_threads_that_returned_do_not_count():
    n, threads = 75, 128
    x, y = np.ones(threads, np.float32), np.zeros(threads, np.float32)
    p = profiled("operations", 2, 64, (x, np.ones(threads), np.ones(2 * threads, np.float16), y, n))
    fma = only(p, "fma.rn.f32")
    assert (fma.warps, fma.lanes) == (3, n)


@pytest.mark.parametrize(("period", "splits"), [(2, 8), (32, 8), (64, 4), (1, 0)])
def test_divergent_branches(period, splits):
    p = profiled("branches", 2, 128, (np.zeros(256, np.float32), period))
    assert p.counts.divergent == splits
    where = {i.place for i in p.divergent_branches}
    assert where == ({("kernel.cu", line_of("// the branch"))} if splits else set())
    if splits:
        assert f"kernel.cu:{line_of('// the branch')}" in str(p)


def test_asynchronous_copies():
    x, y = np.ones(128, np.float32), np.zeros(128, np.float32)
    p = profiled("copies", 1, 32, (emulator.Buffer(x, "x"), y, 102), shared=512)
    assert p.cp_async_bytes == 4 * 102  # the rest is filled with zeros
    assert buffer(p, "x").footprint == 13
    copy = only(p, "cp.async.cg")
    assert (copy.shared_bytes, copy.waves, copy.replays) == (512, 4, 0)
    assert y.sum() == 102
    assert p.barriers == 1


def test_local_bytes():
    p = profiled("indexed", 1, 32, (np.arange(8, dtype=np.int32), np.zeros(32, np.int32)))
    assert p.counts.local_bytes == 32 * (8 + 1) * 4


# -- what a profile does not depend on --------------------------------------------------------------


def test_batches_do_not_show(monkeypatch, rng):
    index = rng.integers(-1, 300, 6 * 72).astype(np.int32)
    args = (np.zeros(300, np.float32), np.zeros(len(index), np.float32), index)
    rows = np.ones((6, 200), np.float32)

    def profiles():
        first = profiled("gather4", 6, 72, args)
        return first, profiled("two_passes", 6, 96, (rows, np.ones(200, np.float32), rows.copy(), 200))

    whole = profiles()
    monkeypatch.setattr(emulator_run, "_THREADS", 96)  # one block at a time
    for a, b in zip(whole, profiles(), strict=True):
        assert a.to_dict() == b.to_dict()


def test_a_sample_counts_its_blocks(rng):
    index = rng.integers(-1, 300, 6 * 72).astype(np.int32)
    args = (np.zeros(300, np.float32), np.zeros(len(index), np.float32), index)
    whole, *parts = (profiled("gather4", 6, 72, args, sample=s) for s in (None, [0, 3], [1, 2, 4, 5]))
    assert [p.blocks for p in (whole, *parts)] == [6, 2, 4]
    for name in Counts.__dataclass_fields__:
        assert getattr(whole.counts, name) == sum(getattr(p.counts, name) for p in parts)
    assert "2 of 6 blocks ran" in str(parts[0])


def test_the_sanitizer_does_not_show():
    x = np.ones(256, np.float32)
    assert (
        profiled("in_place", 2, 128, (x,), sanitize=False).to_dict()
        == profiled("in_place", 2, 128, (x,)).to_dict()
    )


# -- hand-written PTX -------------------------------------------------------------------------------

PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry guarded(.param .u64 y) {
    .reg .pred %p<3>;
    .reg .b32 %r<5>;
    .reg .b64 %d<4>;
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 10;
    setp.lt.u32 %p2, %r1, 0;
    @%p1 mul.lo.s32 %r2, %r1, 3;
    @%p2 mad.lo.s32 %r2, %r1, 3, 4;
    setp.ge.u32 %p2, %r1, 20;
    @%p2 ret;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 1;
    @%p1 sub.s32 %r3, %r1, 1;
    ret;
}
.visible .entry late() {
    .reg .pred %p<3>;
    .reg .b32 %r<5>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, 0;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 1;
    @%p1 bra ODD;
BOTH:
    shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;
    setp.ge.u32 %p2, %r3, 1;
    ret;
ODD:
    add.u32 %r3, %r3, 1;
    bra BOTH;
}
.visible .entry ways() {
    .reg .b32 %r<5>;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 3;
TARGETS: .branchtargets A, B, A, C;
    brx.idx %r2, TARGETS;
A:
    add.u32 %r3, %r1, 1;
B:
    add.u32 %r3, %r1, 2;
C:
    ret;
}
"""


def test_a_guard_that_is_false_issues_for_no_lane():
    p = emulator.profile(PTX, "guarded", 1, 64, (0,))
    some, none = only(p, "mul.lo"), only(p, "mad.lo")
    assert (some.warps, some.lanes) == (2, 10)
    assert (none.warps, none.lanes) == (2, 0)
    odd = only(p, "sub.s32")  # only lanes that have not returned
    assert (odd.warps, odd.lanes) == (1, 10)


def test_lanes_that_wait_for_others_count_once():
    p = emulator.profile(PTX, "late", 1, 64, ())
    shuffle = only(p, "shfl")
    assert (shuffle.warps, shuffle.lanes) == (2, 64)
    assert p.counts.divergent == 2


def test_a_branch_of_several_ways():
    p = emulator.profile(PTX, "ways", 1, 64, ())
    assert only(p, "brx").divergent == 2 * 3  # four targets split a warp three times
    assert {line.where for line in p.lines()} >= {f"PTX line {only(p, 'brx').ptx_line}"}


# -- recording and printing -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["late", "_ZN6module5inner4lateB2v1B3abcE5ArrayIfLi1EE", "_Z4latePf"])
def test_a_mangled_name_is_read(name):
    p = emulator.profile(PTX.replace("late", name), name, 1, 32, ())
    assert (p.name, p.kernel) == ("late", name)


def test_recording():
    x = np.ones(64, np.float32)
    with emulator.record() as outer:
        profiled("in_place", 1, 64, (x,))  # records its profile separately
        emulator.launch(SOURCE, "in_place", 1, 64, (x,))
        with pytest.raises(emulator.SanitizerError):
            emulator.launch(SOURCE, "in_place", 2, 64, (x,))
        emulator.launch(SOURCE, "in_place", 2, 32, (x,))
    emulator.launch(SOURCE, "in_place", 1, 64, (x,))
    assert [(p.kernel, p.blocks) for p in outer] == [("in_place", 1), ("in_place", 2)]


def test_the_card_whose_cache_it_reckons_with(monkeypatch):
    x = np.ones(64, np.float32)
    p = profiled("in_place", 1, 64, (x,))
    assert (p.card, p.l2_bytes) == ("A30", 24 * 2**20)  # the generic sm_80
    assert "with 24.0 MiB of L2 (A30)" in str(p)
    p = profiled("in_place", 1, 64, (x,), arch="RTX 4090")
    assert (p.arch, p.card, p.l2_bytes) == ("sm_89", "RTX 4090", 72 * 2**20)
    assert p.to_dict()["card"] == "RTX 4090"
    assert profiled("in_place", 1, 64, (x,), arch="sm_90a").arch == "sm_90a"
    old = emulator.profile(PTX.replace("sm_80", "sm_52"), "late", 1, 32, ())
    assert (old.arch, old.card) == ("sm_52", "A30")
    hopper = PTX.replace("sm_80", "sm_90")
    assert emulator.profile(hopper, "late", 1, 32, ()).card == "H100 PCIe"
    assert emulator.profile(hopper, "late", 1, 32, (), arch="H200").card == "H200"
    monkeypatch.setenv("GPU_OPS_ARCH", "H200")
    with emulator.record() as profiles:
        gpu_ops.rmsnorm(x[None], x, device="emulator", backend="raw")
    assert profiles[0].card == "H200"


def test_an_unknown_card_is_refused_with_a_list():
    for wrong in ("junk", "", "sm_8x"):
        with pytest.raises(
            emulator.EmulatorError, match=f"arch is '{wrong}'; pass .* 'sm_90', or one of: .*H200"
        ):
            profiled("in_place", 1, 64, (np.ones(64, np.float32),), arch=wrong)
    with pytest.raises(emulator.EmulatorError, match="arch is int"):
        profiled("in_place", 1, 64, (np.ones(64, np.float32),), arch=90)


def test_a_line_that_splits_warps_in_several_places_is_shown_once():
    p = profiled("branches", 2, 128, (np.zeros(256, np.float32), 2))
    p = replace(p, instructions=p.instructions * 5)
    place = f"kernel.cu:{line_of('// the branch')}"
    assert f"divergence: 40 times a warp split: 40 at {place}\n" in str(p)


def test_one_of_a_thing_is_singular():
    p = profiled("in_place", 1, 32, (np.ones(32, np.float32),))
    assert repr(p).endswith("of 1 block>")
    assert [several(n, "warp") for n in (0, 1, 1000)] == ["0 warps", "1 warp", "1,000 warps"]


def test_output():
    x = np.ones(64, ml_dtypes.bfloat16)
    p = profiled("strided", 1, 32, (x.view(np.float32), emulator.Buffer(np.zeros(32, np.float32), "[y]"), 1))
    text = str(p)
    assert text.startswith("strided: grid 1 x 1 x 1, block 32 x 1 x 1\n")
    assert "[y]" in text
    assert "y[t] = x[t * stride];  // strided load" in text
    assert "4.00 per 128 B" in text
    data = json.loads(json.dumps(p.to_dict()))
    assert data["sectors"] == 8
    assert data["opcodes"]["ld"]["global_requests"] == 1
