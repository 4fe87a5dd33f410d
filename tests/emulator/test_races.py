"""Race detector against brute force: random programs, and an oracle that keeps every access and vector clocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from gpu_ops.emulator import SanitizerError, launch

THREADS, LOCATIONS = 96, 3
NONE, READ, WRITE, ATOMIC = range(4)
BLOCK_BARRIER, WARP_BARRIER = 256, 512  # bits of a word in addition to kind and location

# In each step a thread reads its word and executes the barriers in it, then the access. Locations are initialised
# first.
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 words, .param .u32 steps)
{
    .reg .pred %p<8>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 s[12];
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [steps];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd1, %rd1, %rd2;
    setp.lt.u32 %p1, %r2, 3;
    mov.u32 %r3, s;
    shl.b32 %r4, %r2, 2;
    add.s32 %r4, %r3, %r4;
    @%p1 st.shared.u32 [%r4], 0;
    bar.sync 0;
LOOP:
    ld.global.u32 %r5, [%rd1];
    and.b32 %r6, %r5, 256;
    setp.ne.u32 %p2, %r6, 0;
    @%p2 bar.sync 0;
    and.b32 %r6, %r5, 512;
    setp.ne.u32 %p2, %r6, 0;
    @%p2 bar.warp.sync 0xffffffff;
    and.b32 %r7, %r5, 48;
    shr.u32 %r7, %r7, 2;
    add.s32 %r7, %r3, %r7;
    and.b32 %r8, %r5, 15;
    setp.eq.u32 %p3, %r8, 1;
    setp.eq.u32 %p4, %r8, 2;
    setp.eq.u32 %p5, %r8, 3;
    @%p3 ld.shared.u32 %r9, [%r7];   // READ
    @%p4 st.shared.u32 [%r7], %r2;   // WRITE
    @%p5 atom.shared.add.u32 %r9, [%r7], 1;   // ATOMIC
    add.s64 %rd1, %rd1, 384;
    sub.s32 %r1, %r1, 1;
    setp.ne.u32 %p6, %r1, 0;
    @%p6 bra LOOP;
    ret;
}
"""
KIND_OF_LINE = {
    number: access
    for number, line in enumerate(PTX.splitlines(), 1)
    for access, word in ((READ, "READ"), (WRITE, "WRITE"), (ATOMIC, "ATOMIC"))
    if f"// {word}" in line
}


@dataclass(frozen=True)
class Past:
    thread: int
    kind: int
    clock: int


def conflict(a, b):
    return WRITE in (a, b) or {a, b} == {READ, ATOMIC}


def first_race(words):
    """First access in execution order that races: (thread, kind, accesses that it races with), or None."""
    known = np.zeros((THREADS, THREADS), np.int64)  # each thread's view of the others' clocks
    known[np.diag_indices(THREADS)] = 1
    past = [[] for _ in range(LOCATIONS)]

    def join(threads):
        known[threads] = known[threads].max(axis=0)
        known[threads, threads] += 1

    for step in words:
        if step[0] & BLOCK_BARRIER:
            join(np.arange(THREADS))
        for first in range(0, THREADS, 32):
            if step[first] & WARP_BARRIER:
                join(np.arange(first, first + 32))
        for access in (READ, WRITE, ATOMIC):
            for t in np.flatnonzero(step & 15 == access):
                before = past[step[t] >> 4 & 3]
                racing = [p for p in before if conflict(p.kind, access) and known[t, p.thread] < p.clock]
                if racing:
                    return int(t), access, {(p.thread, p.kind) for p in racing}
                before.append(Past(int(t), access, known[t, t]))
    return None


def random_program(rng):
    """Program of few threads and locations, with enough barriers that about half of the programs have no race."""
    steps = int(rng.integers(2, 9))
    words = np.zeros((steps, THREADS), np.int32)
    barriers, writers = rng.choice([0.2, 0.5, 0.8]), rng.choice([0.1, 0.3, 0.5])
    for step in words:
        if rng.random() < barriers:
            step |= BLOCK_BARRIER
        for first in range(0, THREADS, 32):
            if rng.random() < barriers:
                step[first : first + 32] |= WARP_BARRIER
        active = rng.choice([0, 1, 2, 31, 32, 33, 64, 65, 95], rng.integers(0, 4), replace=False)
        kinds = rng.choice([READ, WRITE, ATOMIC], active.size, p=[0.8 - writers, writers, 0.2])
        step[active] |= kinds | rng.integers(0, LOCATIONS, active.size) << 4
    return words


def report(words):
    """Report of the sanitizer in the form of ``first_race``, with a single other access."""
    error = None
    try:
        launch(PTX, "k", 1, THREADS, (words, len(words)))
    except SanitizerError as raised:
        error = raised
    if error is None:
        return None
    assert error.kind == "shared-memory race"
    other, thread = map(int, re.findall(r"thread \((\d+),0,0\)", str(error)))
    other_line, line = map(int, re.findall(r"PTX line (\d+)", str(error)))
    return thread, KIND_OF_LINE[line], (other, KIND_OF_LINE[other_line])


@pytest.mark.parametrize("seed", range(8))
def test_no_false_alarm_and_none_missed(seed):
    rng = np.random.default_rng(seed)
    racy = 0
    for _ in range(150):
        words = random_program(rng)
        expected, actual = first_race(words), report(words)
        assert (actual is None) == (expected is None), (words.tolist(), expected, actual)
        if expected is not None:
            racy += 1
            assert actual[:2] == expected[:2]
            assert actual[2] in expected[2], (words.tolist(), expected, actual)
    assert 30 <= racy <= 120  # programs with and without races


def program(*steps):
    """Words of a program. Steps are ``{thread: (kind, location)}``, or the bit of a barrier."""
    words = np.zeros((len(steps), THREADS), np.int32)
    for word, step in zip(words, steps, strict=True):
        if isinstance(step, int):
            word |= step
            continue
        for thread, (access, location) in step.items():
            word[thread] = access | location << 4
    return words


CASES = {
    "an atomic does not hide the plain write before it": (
        program({0: (WRITE, 0)}, {0: (ATOMIC, 0)}, {40: (ATOMIC, 0)}),
        (40, ATOMIC, (0, WRITE)),
    ),
    "nor after a warp barrier": (
        program({0: (WRITE, 0)}, WARP_BARRIER, {1: (ATOMIC, 0)}, {40: (ATOMIC, 0)}),
        (40, ATOMIC, (0, WRITE)),
    ),
    "a write after both names the atomic": (
        program({2: (WRITE, 0)}, WARP_BARRIER, {1: (ATOMIC, 0)}, {0: (WRITE, 0)}),
        (0, WRITE, (1, ATOMIC)),
    ),
    "the last of several atomics does not hide the others": (
        program({0: (ATOMIC, 0), 40: (ATOMIC, 0)}, {40: (READ, 0)}),
        (40, READ, (0, ATOMIC)),
    ),
    "a reader of another warp is not forgotten": (
        program({0: (READ, 0), 40: (READ, 0)}, WARP_BARRIER, {1: (WRITE, 0)}),
        (1, WRITE, (40, READ)),
    ),
    "a warp barrier orders the warp": (program({0: (WRITE, 0)}, WARP_BARRIER, {1: (WRITE, 0)}), None),
    "but not other warps": (
        program({0: (WRITE, 0)}, WARP_BARRIER, {40: (READ, 0)}),
        (40, READ, (0, WRITE)),
    ),
    "a block barrier orders all": (program({0: (WRITE, 0)}, BLOCK_BARRIER, {95: (WRITE, 0)}), None),
    "atomics of all": (program({t: (ATOMIC, 0) for t in range(96)}), None),
}


@pytest.mark.parametrize("name", CASES)
def test_chosen_programs(name):
    words, expected = CASES[name]
    assert report(words) == expected
    race = first_race(words)
    assert race is None if expected is None else race[:2] == expected[:2] and expected[2] in race[2]
