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
from tests.support.programs import SOURCE, buffer, line_of, named, only, profiled

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")


# ---- work --------------------------------------------------------------------------------------------------


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


# ---- what a profile does not depend on ---------------------------------------------------------------------


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


# ---- hand-written PTX --------------------------------------------------------------------------------------

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


# ---- recording and printing --------------------------------------------------------------------------------


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


# Memory in the emulator's profile: sectors, footprints and bank conflicts, against known or recomputed counts.

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

# ---- global memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "offset", "sectors"), [(1, 0, 4), (1, 1, 5), (2, 0, 8), (8, 0, 32), (0, 0, 1)]
)
def test_sectors_of_a_load_of_floats(stride, offset, sectors):
    x, y = np.ones(1 + 64 * max(1, stride), np.float32)[offset:], np.zeros(64, np.float32)
    p = profiled("strided", 2, 32, (*named(x, y), stride))
    assert buffer(p, "x").sectors_per_request == sectors
    assert buffer(p, "x").sectors_per_128_bytes == sectors
    assert buffer(p, "y").sectors_per_request == 4
    assert (p.bytes_read, p.bytes_written) == (256, 256)
    line = next(line for line in p.lines() if line.line == line_of("// strided load"))
    assert line.text == "y[t] = x[t * stride];  // strided load"
    assert line.global_requests == 4
    assert line.sectors == 2 * (sectors + 4)


@pytest.mark.parametrize(
    ("name", "dtype", "width", "sectors"),
    [
        ("gather2", np.int16, 1, 2),
        ("gather4", np.float32, 1, 4),
        ("gather8", np.float32, 2, 8),
        ("gather16", np.float32, 4, 16),
    ],
)
def test_wide_loads_are_as_good(name, dtype, width, sectors):
    x, y = np.ones((64, width), dtype), np.zeros((64, width), dtype)
    p = profiled(name, 1, 64, (*named(x, y), np.arange(64, dtype=np.int32)))
    for b in (buffer(p, "x"), buffer(p, "y")):
        assert b.sectors_per_request == sectors
        assert b.sectors_per_128_bytes == 4


@pytest.mark.parametrize(("name", "size"), [("gather2", 2), ("gather4", 4), ("gather8", 8), ("gather16", 16)])
@pytest.mark.parametrize("spread", [16, 400])
def test_sectors_of_random_addresses(rng, name, size, spread):
    blocks, block = 3, 72  # the last warp of a block is partial
    index = rng.integers(-1, spread, blocks * block).astype(np.int32)  # -1: this lane does nothing
    word = np.dtype(f"u{min(size, 4)}")
    whole = np.zeros(spread * size + 16, np.uint8).view(word)
    x, y = whole[16 // word.itemsize :], np.zeros(len(index) * size, np.uint8).view(word)
    p = profiled(name, blocks, block, (*named(x, y), index))

    requests, sectors, lanes, touched = 0, 0, 0, set()
    for b in range(blocks):
        for first in range(0, block, 32):
            warp = index[b * block + first : b * block + min(first + 32, block)]
            here = {(16 + int(i) * size) // 32 for i in warp if i >= 0}
            requests += bool(here)
            sectors += len(here)
            lanes += sum(i >= 0 for i in warp)
            touched |= here
    traffic = buffer(p, "x")
    assert (traffic.requests, traffic.sectors, traffic.bytes) == (requests, sectors, lanes * size)
    assert (traffic.footprint, traffic.footprint_read, traffic.footprint_written) == (
        len(touched),
        len(touched),
        0,
    )
    assert buffer(p, "y").footprint_written == buffer(p, "y").footprint


def test_partial_warp():
    x, y = np.ones(40, np.float32), np.zeros(40, np.float32)
    p = profiled("strided", 1, 40, (*named(x, y), 1))
    load = only(p, "ld.global")
    assert (load.warps, load.lanes, load.global_requests, load.sectors) == (2, 40, 2, 5)


def test_a_second_pass_shows():
    rows, columns = 64, 512
    x, y = np.ones((2, rows, columns), np.float32)
    w = np.ones(columns, np.float32)
    args = (*named(x.copy(), y.copy()), columns)
    p = profiled("two_passes", rows, 128, (args[0], emulator.Buffer(w, "w"), *args[1:]))
    assert buffer(p, "x").times_read == 2
    assert buffer(p, "w").times_read == rows
    matrix = 4 * rows * columns
    assert p.least_bytes == 2 * matrix + w.nbytes
    assert p.dram_bytes == p.least_bytes  # all of it fits in the cache
    moved = dict(zip((b.name for b in p.buffers), p.moved(w.nbytes), strict=True))
    assert moved == {"x": 2 * matrix, "w": w.nbytes, "y": matrix}  # only the weight stays
    assert sum(p.moved(0)) == 4 * matrix  # as much of w as of x
    lines = {line.line: line for line in p.lines()}
    assert lines[line_of("// first pass")].sectors == matrix // 32
    assert lines[line_of("// second")].sectors == 3 * matrix // 32


def test_what_moves_once_takes_no_room_in_the_cache():
    x, y = np.ones((64, 4), np.float32), np.ones((128, 4), np.float32)
    p = profiled("gather16", 1, 128, (*named(x, y), np.arange(128, dtype=np.int32) % 64))
    moved = dict(zip((b.name for b in p.buffers), p.moved(x.nbytes), strict=True))
    assert moved == {"x": x.nbytes, "y": y.nbytes, "i": 4 * 128}
    assert sum(p.moved(x.nbytes - 1)) == sum(moved.values()) + x.nbytes


def test_in_place():
    x = np.ones(256, np.float32)
    p = profiled("in_place", 2, 128, (x,))
    (b,) = p.buffers
    assert (b.bytes_read, b.bytes_written, b.bytes) == (1024, 1024, 2048)
    assert (b.footprint, b.footprint_read, b.footprint_written) == (32, 32, 32)
    assert p.dram_bytes == sum(p.moved(0)) == 2048


def test_sectors_of_atomics():
    x, counts = np.zeros(64, np.int32), np.zeros(8, np.int32)
    x[5] = 7
    p = profiled("histogram", 1, 64, (x, emulator.Buffer(counts, "counts")))
    b = buffer(p, "counts")
    assert (b.atomics, b.requests, b.sectors, b.bytes) == (64, 2, 2, 256)
    assert (b.sectors_read, b.sectors_written, b.footprint) == (2, 2, 1)
    assert p.counts.atomics == 64
    assert p.classes["atomic"].warps == 2


def test_variables_of_the_module():
    p = profiled("variables", 1, 32, (np.zeros(32, np.float32),))
    assert sorted(b.name for b in p.buffers) == ["calls", "y"]  # constants have a separate cache
    assert buffer(p, "calls").times_read == 1


# ---- shared memory -----------------------------------------------------------------------------------------

WIDTHS = {"shared1": 1, "shared4": 4, "shared8": 8, "shared16": 16}


def shared_load(name, index, count=2048):
    """Profile of a load from shared memory of element index[t] by thread t."""
    size = WIDTHS[name]
    word = np.dtype(f"u{min(size, 4)}")
    x, y = (np.zeros(n * size, np.uint8).view(word) for n in (count, len(index)))
    p = profiled(name, 1, len(index), (x, y, np.asarray(index, np.int32), count), shared=count * size)
    return only(p, "ld.shared")


lane = np.arange(32)


@pytest.mark.parametrize(
    ("name", "index", "waves", "replays", "ideal"),
    [
        ("shared4", lane, 1, 0, 1),
        ("shared4", lane * 32, 32, 31, 1),  # a column of a tile of 32
        ("shared4", lane * 33, 1, 0, 1),  # of a padded one
        ("shared4", lane * 2, 2, 1, 1),
        ("shared4", lane * 0, 1, 0, 1),  # broadcast
        ("shared4", lane // 2 * 32, 16, 15, 1),  # pairs of lanes share words
        ("shared1", lane, 1, 0, 1),  # four lanes in a word
        ("shared8", lane, 2, 0, 2),
        ("shared8", lane * 0, 2, 0, 2),
        ("shared16", lane, 4, 0, 4),
        ("shared16", lane * 8, 32, 28, 4),  # rows of 128 bytes
        ("shared16", lane * 9, 4, 0, 4),  # of 144
        ("shared16", lane * 8 + lane % 8, 4, 0, 4),  # swizzled
    ],
)
def test_bank_conflicts(name, index, waves, replays, ideal):
    traffic = shared_load(name, index)
    assert (traffic.shared_requests, traffic.waves, traffic.replays, traffic.ideal_waves) == (
        1,
        waves,
        replays,
        ideal,
    )
    assert traffic.shared_bytes == 32 * WIDTHS[name]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("spread", [24, 2048])
def test_waves_of_random_addresses(rng, name, spread):
    size = WIDTHS[name]
    index = rng.integers(-1, spread, 200)
    traffic = shared_load(name, index)

    in_phase = {1: 32, 4: 32, 8: 16, 16: 8}[size]
    waves = phases = ideal = 0
    for first in range(0, 200, 32):
        warp = index[first : first + 32]
        for start in range(0, len(warp), in_phase):
            words = {
                (int(i) * size + byte) // 4
                for i in warp[start : start + in_phase]
                if i >= 0
                for byte in range(size)
            }
            phases += bool(words)
            waves += max(sum(word % 32 == bank for word in words) for bank in range(32))
        ideal += -(-int((warp >= 0).sum()) * size // 128)
    assert (traffic.waves, traffic.phases, traffic.ideal_waves) == (waves, phases, ideal)


@pytest.mark.parametrize(("pitch", "swizzled", "waves"), [(128, False, 32), (144, False, 4), (128, True, 4)])
def test_matrix_rows(pitch, swizzled, waves):
    p = profiled(
        "matrix_rows", 1, 32, (np.zeros(32, np.uint32), pitch, int(swizzled)), shared=32 * pitch + 128
    )
    load = only(p, "ldmatrix")
    assert (load.waves, load.phases, load.ideal_waves) == (waves, 4, 4)
    assert load.kind == "shared"
