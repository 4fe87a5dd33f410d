"""Memory in the emulator's profile: sectors, footprints and bank conflicts, against known or recomputed counts."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops import emulator
from tests.support.profiled import buffer, line_of, named, only, profiled

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")

# -- global memory --------------------------------------------------------------------------------


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


# -- shared memory --------------------------------------------------------------------------------

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
