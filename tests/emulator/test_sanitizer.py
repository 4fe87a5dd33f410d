"""Sanitizer: it finds planted bugs, names their line and thread, and reports nothing for the corrected kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpu_ops.emulator import SanitizerError, launch, machine
from gpu_ops.emulator.sanitizer import KINDS
from tests.emulator import bugs as emulator_bugs
from tests.emulator import bugs_order as emulator_bugs_order

pytest.importorskip("cuda.bindings.nvrtc")

BUGS = [*emulator_bugs.BUGS, *emulator_bugs_order.BUGS]
LINE = re.compile(r"kernel\.cu:(\d+)\)")  # the outermost line of a chain of inlined calls


# Faults that the machine finds itself; a gap in a strided array needs the sanitizer.
ALWAYS = {"out of bounds", "misaligned", "write to a read-only argument", "deadlock", "livelock", "trap"}
ALWAYS |= {"endless loop"}
ALSO_ALWAYS, NOT_ALWAYS = {"barriers of one warp in both branches"}, {"gap between rows read"}


def run(bug, form, rng, **options):
    args, expected = bug.args(rng)
    shared = bug.shared[form == "bad"]
    options |= {"sample": bug.sample, "max_instructions": bug.max_instructions}
    launch(bug.source(form), "k", bug.grid, bug.block, args, shared=shared, **options)
    return args, expected


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_good_form_is_clean_and_right(bug, rng):
    args, expected = run(bug, "good", rng)
    for i, value in expected.items():
        actual = args[i].array if hasattr(args[i], "array") else args[i]
        np.testing.assert_array_equal(actual, value)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_bug_is_found_and_named(bug, rng):
    with pytest.raises(SanitizerError) as caught:
        run(bug, "bad", rng)
    message = str(caught.value)
    assert caught.value.kind == bug.kind, message
    assert message.startswith(f"{bug.kind}: ")
    assert "kernel k" in message
    assert bug.thread in message
    for words in (bug.other, *bug.says):
        assert words in message, message
    lines = [int(n) for n in LINE.findall(message)]
    if bug.kind in ("deadlock", "livelock") or "threads, first" in message:
        expected = {bug.line("BUG")} | ({bug.line("OTHER")} if bug.other else set())
        assert expected <= set(lines), message
        return
    assert lines[-1] == bug.line("BUG"), message
    if bug.other:
        assert lines[0] == bug.line("OTHER"), message


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_without_the_sanitizer_only_the_machine_finds_faults(bug, rng):
    actual = None
    try:
        run(bug, "bad", rng, sanitize=False)
    except SanitizerError as error:
        actual = error.kind
    always = (bug.kind in ALWAYS or bug.name in ALSO_ALWAYS) and bug.name not in NOT_ALWAYS
    assert actual == (bug.kind if always else None)


@pytest.mark.filterwarnings("ignore::gpu_ops.emulator.SanitizerNote")
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_first_of_the_collected_faults_is_the_one_that_is_raised(bug):
    errors = []
    for mode in (True, "collect"):
        with pytest.raises(SanitizerError) as caught:
            run(bug, "bad", np.random.default_rng(1), sanitize=mode)
        errors.append(caught.value)
    assert str(errors[1].faults[0]) == str(errors[0])
    assert errors[1].faults[0].kind == errors[1].kind == errors[0].kind == bug.kind


STORE = 'extern "C" __global__ void k(float* y) { y[threadIdx.x + 2] = 7; }'
ADD = 'extern "C" __global__ void k(float* y) { atomicAdd(y, 1.f); }'


@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize(
    ("source", "verb"),
    [(STORE, "write of `y`: element 2"), (ADD, "atomic of `y`: element 0")],
    ids=["store", "atomic"],
)
@pytest.mark.parametrize("memory", ["bytes", "file"])
def test_what_is_read_only_stays_as_it_is(source, verb, memory, sanitize, tmp_path):
    """A write would change an immutable object, or kill the process for a mapped file."""
    data = bytes(256)
    y = np.frombuffer(data, np.float32)
    if memory == "file":
        path = tmp_path / "y"
        path.write_bytes(data)
        y = np.memmap(path, np.float32, "r")
    with pytest.raises(SanitizerError, match=verb) as caught:
        launch(source, "k", 1, 32, (y,), sanitize=sanitize)
    assert caught.value.kind == "write to a read-only argument"
    assert not y.any()


def test_a_read_only_view_of_what_may_be_written():
    """Pass `out=x` where one of the two is a read-only view of writable memory."""
    y = np.zeros(64, np.float32)
    x = y[:]
    x.flags.writeable = False
    source = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }'
    launch(source, "k", 1, 64, (x, y))
    assert (y == 1).all()


def test_polling_that_counts_is_a_livelock_in_the_end(monkeypatch):
    monkeypatch.setattr(machine, "_ROUNDS", 500)
    source = """
extern "C" __global__ void k(volatile int* flag, int* y) {
  int n = 0;
  while (flag[0] == 0) n++;
  y[threadIdx.x] = n;
}
"""
    with pytest.raises(SanitizerError, match="polling memory that nobody changes") as caught:
        launch(source, "k", 1, 32, (np.zeros(1, np.int32), np.zeros(32, np.int32)))
    assert caught.value.kind == "livelock"


def test_a_loop_of_atomics_is_none(monkeypatch):
    """Iterations look alike, but registers change."""
    monkeypatch.setattr(machine, "_REPEATS", 2)
    source = """
extern "C" __global__ void k(int* y, int n) {
  for (int i = 0; i < n; i++) atomicAdd(y, 1);
}
"""
    y = np.zeros(1, np.int32)
    launch(source, "k", 2, 32, (y, 300))
    assert y[0] == 2 * 32 * 300


def test_every_kind_of_fault_is_planted():
    assert {b.kind for b in BUGS} == set(KINDS)
    assert len(BUGS) >= 30
