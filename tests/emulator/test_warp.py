"""shfl, vote, match, redux and elect against loops over the lanes of each warp."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator.instructions.warp_ops import (
    UNDEFINED,
    activemask,
    elect,
    match,
    redux,
    shfl,
    shfl_sources,
    vote,
)

MODES = ("up", "down", "bfly", "idx")
FULL = np.uint32(0xFFFFFFFF)


def bits(rng, warps):
    return rng.integers(0, 2**32, (warps, 32), np.uint32)


def everywhere(warps, value=FULL):
    return np.full((warps, 32), value, np.uint32)


def all_active(warps):
    return np.ones((warps, 32), np.bool_)


def frozen(*arrays):
    for array in arrays:
        array.flags.writeable = False
    return arrays


def cuda_source(mode, lane, argument, width):
    """Lane that __shfl_*_sync(..., argument, width) reads, or None if the lane keeps its own value."""
    first, place = lane // width * width, lane % width
    if mode == "up":
        return lane - argument if place >= argument else None
    if mode == "down":
        return lane + argument if place + argument < width else None
    if mode == "bfly":
        source = lane ^ argument
        return source if source // width <= lane // width else None
    return first + argument % width


def ptx_source(mode, lane, b, c):
    """Pseudocode of the PTX document for one lane: (source, in range)."""
    bval, cval, mask = b & 0x1F, c & 0x1F, c >> 8 & 0x1F
    low = lane & mask
    high = (lane & mask) | (cval & ~mask)
    if mode == "up":
        source, valid = lane - bval, lane - bval >= high
    elif mode == "down":
        source, valid = lane + bval, lane + bval <= high
    elif mode == "bfly":
        source, valid = lane ^ bval, lane ^ bval <= high
    else:
        source = low | (bval & ~mask)
        valid = source <= high
    return (source if valid else lane), valid


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [2, 4, 8, 16, 32])
def test_shfl_as_cuda_defines_it(mode, width, rng):
    a = bits(rng, 3)
    c = (32 - width) << 8 | (0 if mode == "up" else 0x1F)
    for argument in range(32):
        d, p = shfl(mode, *frozen(a, everywhere(3, argument), everywhere(3, c), everywhere(3), all_active(3)))
        assert (d.dtype, p.dtype) == (np.uint32, np.bool_)
        for lane in range(32):
            source = cuda_source(mode, lane, argument, width)
            np.testing.assert_array_equal(d[:, lane], a[:, lane if source is None else source])
            np.testing.assert_array_equal(p[:, lane], source is not None)


@pytest.mark.parametrize("mode", MODES)
def test_shfl_with_different_operands_in_every_lane(mode, rng):
    a, b, c = bits(rng, 40), bits(rng, 40), bits(rng, 40)
    d, p = shfl(mode, *frozen(a, b, c, everywhere(40), all_active(40)))
    source, valid = shfl_sources(mode, b, c)
    for w, lane in np.ndindex(a.shape):
        expected, in_range = ptx_source(mode, lane, int(b[w, lane]), int(c[w, lane]))
        assert (source[w, lane], valid[w, lane]) == (expected, in_range)
        assert (d[w, lane], p[w, lane]) == (a[w, expected], in_range)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uniform", [True, False])
def test_shfl_from_a_lane_that_takes_no_part_is_undefined(mode, uniform, rng):
    """A lane takes no part if it does not execute or is not in the mask of the reading lane."""
    a, active = bits(rng, 6), rng.random((6, 32)) < 0.7
    members = rng.choice(bits(rng, 1)[0, :3], (6, 32)) | np.uint32(1) << np.arange(32, dtype=np.uint32)
    b = everywhere(6, 5) if uniform else bits(rng, 6)
    c = everywhere(6, 0 if mode == "up" else 0x1F)
    d, p = shfl(mode, *frozen(a, b, c, members, active))
    seen = 0
    for w, lane in zip(*np.nonzero(active), strict=True):
        source, in_range = ptx_source(mode, int(lane), int(b[w, lane]), int(c[w, lane]))
        participates = active[w, source] and members[w, lane] >> np.uint32(source) & np.uint32(1)
        assert d[w, lane] == (a[w, source] if participates else UNDEFINED)
        assert p[w, lane] == in_range
        seen += not participates
    assert seen > 10


def test_undefined_is_a_nan():
    assert np.isnan(UNDEFINED.view(np.float32))


def partitions(rng, warps):
    """Masks that split each warp into one to four groups, and lanes that execute (some have exited)."""
    groups = rng.integers(0, rng.integers(1, 5, (warps, 1)), (warps, 32))
    members = np.zeros((warps, 32), np.uint32)
    for w, lane in np.ndindex(warps, 32):
        members[w, lane] = sum(1 << other for other in range(32) if groups[w, other] == groups[w, lane])
    return members, rng.random((warps, 32)) < 0.8


def cases(rng):
    """(members, active): one mask for all, with or without executing lanes outside it; several masks in a warp."""
    lanes = np.arange(32, dtype=np.uint32)
    yield everywhere(4), all_active(4)
    yield everywhere(4), rng.random((4, 32)) < 0.5
    yield everywhere(4, 0x00FF0F0F), all_active(4)
    yield everywhere(4, 0x00FF0F0F), np.broadcast_to(0x00FF0F0F >> lanes & 1 == 1, (4, 32)).copy()
    yield np.broadcast_to(np.where(lanes < 16, 0xFFFF, 0xFFFF0000), (4, 32)).astype(np.uint32), all_active(4)
    yield np.broadcast_to(np.uint32(1) << lanes, (2, 32)).copy(), all_active(2)
    yield partitions(rng, 20)


def group_of(w, lane, members, active):
    """Lanes in the group of this lane: those that execute with the same mask."""
    return [
        i for i in range(32) if active[w, i] and members[w, i] == members[w, lane] and members[w, i] >> i & 1
    ]


def participants(rng):
    """Masks, executing lanes, and (warp, lane, group) of those that execute and are in their own mask."""
    for members, active in cases(rng):
        frozen(members, active)
        lanes = [
            (w, lane, group_of(w, lane, members, active))
            for w, lane in zip(*np.nonzero(active), strict=True)
            if members[w, lane] >> np.uint32(lane) & 1
        ]
        yield members, active, lanes


def mask(lanes):
    return sum(1 << lane for lane in lanes)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_vote(share, rng):
    for members, active, lanes in participants(rng):
        predicate = rng.random(active.shape) < share
        frozen(predicate)
        ballot, some, every, uniform = (
            vote(mode, predicate, members, active) for mode in ("ballot", "any", "all", "uni")
        )
        assert ballot.dtype == np.uint32
        assert some.dtype == every.dtype == uniform.dtype == np.bool_
        assert ballot.shape == some.shape == every.shape == uniform.shape == active.shape
        for w, lane, group in lanes:
            true = [i for i in group if predicate[w, i]]
            assert ballot[w, lane] == mask(true)
            assert some[w, lane] == bool(true)
            assert every[w, lane] == (true == group)
            assert uniform[w, lane] == (true in ([], group))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("different", [1, 2, 5])
def test_match(dtype, different, rng):
    for members, active, lanes in participants(rng):
        value = rng.integers(0, 2**32, different, np.uint64)[rng.integers(0, different, active.shape)]
        value = (value << np.uint64(8 * (np.dtype(dtype).itemsize - 4))).astype(dtype)
        some, _ = match("any", value, members, active)
        every, all_equal = match("all", value, members, active)
        assert some.dtype == every.dtype == np.uint32
        assert all_equal.dtype == np.bool_
        for w, lane, group in lanes:
            same = [i for i in group if value[w, i] == value[w, lane]]
            assert some[w, lane] == mask(same)
            assert every[w, lane] == (mask(group) if same == group else 0)
            assert all_equal[w, lane] == (same == group)


def fold(op, values):
    result = values[0]
    for value in values[1:]:
        result = {
            "add": result + value,
            "min": min(result, value),
            "max": max(result, value),
            "and": result & value,
            "or": result | value,
            "xor": result ^ value,
        }[op]
    return result


@pytest.mark.parametrize(
    ("op", "ptx_type"),
    [
        *((op, ptx_type) for op in ("add", "min", "max") for ptx_type in ("u32", "s32")),
        *((op, "b32") for op in ("and", "or", "xor")),
    ],
)
def test_redux(op, ptx_type, rng):
    for members, active, lanes in participants(rng):
        value = bits(rng, len(active))
        actual = redux(op, ptx_type, value, members, active)
        typed = value.view(np.int32) if ptx_type == "s32" else value
        assert actual.dtype == typed.dtype
        for w, lane, group in lanes:
            expected = fold(op, [int(typed[w, i]) for i in group])
            assert int(actual[w, lane]) % 2**32 == expected % 2**32


def test_elect_and_activemask(rng):
    for members, active, lanes in participants(rng):
        leader, is_leader = elect(members, active)
        together = activemask(active)
        assert leader.dtype == together.dtype == np.uint32
        for w, lane, group in lanes:
            assert leader[w, lane] == group[0]
            assert is_leader[w, lane] == (lane == group[0])
            assert together[w, lane] == mask(np.flatnonzero(active[w]))


def test_many_warps(rng):
    """A batch of many warps gives the same results as each warp alone."""
    a, members, active = bits(rng, 2048), everywhere(2048), all_active(2048)
    d, p = shfl("bfly", a, everywhere(2048, 16), everywhere(2048, 0x1F), members, active)
    np.testing.assert_array_equal(d, np.roll(a, 16, axis=1))
    assert p.all()
    total = redux("add", "u32", a, members, active)
    np.testing.assert_array_equal(total[:, 7], a.sum(axis=1) % 2**32)
