"""Sanitizer: it finds planted bugs, names their line and thread, and reports nothing for the corrected kernels."""

from __future__ import annotations

import itertools
import re
import warnings

import numpy as np
import pytest

import gpu_ops
from gpu_ops.emulator import Buffer, EmulatorError, SanitizerError, SanitizerNote, launch, machine
from gpu_ops.emulator.sanitizer import KINDS
from gpu_ops.kernels.compiler.jit import compile_text
from tests.emulator import bugs, bugs_order

pytest.importorskip("cuda.bindings.nvrtc")

BUGS = [*bugs.BUGS, *bugs_order.BUGS]
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


# ``sanitize="collect"``: all faults of a launch in one error, and notes about accesses that are not faults.

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = r"""
__constant__ float unset;
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ float s[64];
  __shared__ int flag;
  int t = threadIdx.x, i = blockIdx.x * 64 + t;
  float before = x[i - 1];
  s[t] = before;
  float other = s[63 - t];
  __syncthreads();
  if (t < 40) s[0] = t;
  if (t >= 60) flag = n;
  __syncthreads();
  y[i] = other + flag + unset;
  float v = t & 1 ? 0.f : *(const float*)((const char*)x + 2);
  y[i % 8] = __shfl_sync(0xffff, v, 0);
}
"""


def collect(source, block, args, grid=1, **options):
    """Error or None, and texts of the notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            launch(source, "k", grid, block, args, sanitize="collect", **options)
            error = None
        except SanitizerError as found:
            error = found
    assert all(w.category is SanitizerNote for w in caught)
    assert all(w.filename == __file__ for w in caught)
    return error, [str(w.message) for w in caught]


def line_of(text):
    return 1 + next(i for i, line in enumerate(SOURCE.splitlines()) if text in line)


def test_every_fault_is_reported_once():
    x, y = np.zeros(128, np.float32), Buffer(np.zeros(100, np.float32), written=False)
    error, notes = collect(SOURCE, 64, (x, y, 3), grid=2)
    faults = [(f.kind, f.count) for f in error.faults]
    assert faults == [
        ("out of bounds", 1),  # x[-1]
        ("shared-memory race", 128),  # s[63 - t]
        ("shared-memory race", 2 * 39),  # s[0]
        ("out of bounds", 28),  # y[100]
        ("uninitialised read", 100),  # unset, where y has an element that takes it
        ("misaligned", 64),
        ("warp mask", 64),
    ]
    assert error.kind == "out of bounds"
    message = str(error)
    assert message.startswith("7 faults in kernel k\n1. out of bounds: 4-byte read before the start of `x`")
    places = ("x[i - 1]", "s[63 - t]", "s[0] = t", "y[i] =", "y[i] =", "+ 2);", "__shfl_sync")
    for i, (text, fault) in enumerate(zip(places, error.faults, strict=True), 1):
        times = f" ({fault.count} times; the first:)" if fault.count > 1 else ""
        assert f"\n{i}.{times} {fault.kind}: " in f"\n{message}"
        assert f"kernel.cu line {line_of(text)}: " in str(fault), fault
    note = message.rpartition("\nnote: ")[2]
    assert note.startswith("4 lanes of a warp store the same value to one address of shared memory")
    assert f"kernel.cu line {line_of('flag = n')}: " in note
    assert notes == []


def test_a_launch_goes_on_after_a_fault():
    """Results that a fault does not affect are computed; an invalid access reads zeros and writes nothing."""
    source = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }'
    x, y = np.arange(40, dtype=np.float32), np.zeros(50, np.float32)
    error, _ = collect(source, 64, (x, y))
    assert [(f.kind, f.count) for f in error.faults] == [("out of bounds", 24), ("out of bounds", 14)]
    np.testing.assert_array_equal(y, [*(x + 1), *([1] * 10)])


def test_a_fault_that_ends_the_launch_comes_last():
    source = """
extern "C" __global__ void k(float* y) {
  y[threadIdx.x + 1] = 1;
  if (threadIdx.x < 16) __syncthreads();
  else asm volatile("bar.sync 1;");
}
"""
    error, _ = collect(source, 32, (np.zeros(32, np.float32),))
    assert [f.kind for f in error.faults] == ["out of bounds", "barrier divergence"]
    assert "none of the 32 threads" in str(error)


def test_what_traps_ends_its_threads_only():
    source = 'extern "C" __global__ void k(int* y) { assert(threadIdx.x != 5); y[threadIdx.x] = 1; }'
    y = np.zeros(8, np.int32)
    error, _ = collect(source, 8, (y,))
    assert [f.kind for f in error.faults] == ["trap"]
    assert y.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


SAME = r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[4];
  int t = threadIdx.x;
  if (t < 4) s[t] = 0;
  __syncthreads();
  s[t / 16] = x[t];
  __syncthreads();
  y[t] = s[t / 16];
}
"""


def test_lanes_that_store_one_value_do_not_race():
    x, y = np.repeat([7, 8, 9, 10], 16).astype(np.int32), np.zeros(64, np.int32)
    launch(SAME, "k", 1, 64, (x, y))
    np.testing.assert_array_equal(y, x)
    error, notes = collect(SAME, 64, (x, y))
    assert error is None
    assert [n.split("\n")[0] for n in notes] == [
        "note: 16 lanes of a warp store the same value to one address of shared memory"
    ]
    x[20] = 0
    with pytest.raises(SanitizerError, match="shared-memory race: 4-byte write"):
        launch(SAME, "k", 1, 64, (x, y))


def test_lanes_that_store_one_value_race_with_other_warps():
    source = SAME.replace("s[t / 16] = x[t]", "s[0] = 5").replace("s[t / 16]", "s[0]")
    with pytest.raises(SanitizerError, match="shared-memory race: 4-byte write") as caught:
        launch(source, "k", 1, 64, (np.zeros(64, np.int32), np.zeros(64, np.int32)))
    assert "thread (32,0,0)" in str(caught.value)


def test_a_barrier_without_threads_that_ended_is_noted():
    """Since Volta a barrier waits for the threads that have not ended."""
    source = """
extern "C" __global__ void k(float* y) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  y[threadIdx.x] = 1;
}
"""
    y = np.zeros(64, np.float32)
    launch(source, "k", 1, 64, (y,))
    assert y.sum() == 40
    error, notes = collect(source, 64, (y,))
    assert error is None
    (note,) = notes
    assert note.startswith(
        "note: a barrier of the block opens for 40 of 64 threads, because the others have ended"
    )
    assert "kernel.cu line 4: __syncthreads();" in note


def test_modes_and_the_variable(monkeypatch):
    source = (
        'extern "C" __global__ void k(float* y) { y[threadIdx.x] = y[threadIdx.x + 1] + y[threadIdx.x + 2]; }'
    )
    args = (np.zeros(32, np.float32),)
    with pytest.raises(EmulatorError, match="sanitize is 'all'; pass True, False or 'collect'"):
        launch(source, "k", 1, 32, args, sanitize="all")
    for mode, faults in (("collect", 2), ("1", 1), ("0", 1)):
        monkeypatch.setenv("GPU_OPS_SANITIZE", mode)
        with pytest.raises(SanitizerError) as caught:
            launch(source, "k", 1, 32, args)
        assert len(caught.value.faults) == faults


def test_the_variable_for_ops(monkeypatch):
    monkeypatch.setenv("GPU_OPS_SANITIZE", "collect")
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    y = gpu_ops.rmsnorm(x, np.ones(64, np.float32), device="emulator")
    np.testing.assert_allclose(y, x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6), rtol=1e-5)
    assert "GPU_OPS_SANITIZE=collect" in str(
        gpu_ops.explain("rmsnorm", x, np.ones(64, np.float32), device="emulator")
    )


ENDLESS = """
extern "C" __global__ void k(const float* x, float* y, int n) {
  int t = threadIdx.x;
  float a = x[t];
  if (t < 40)
    for (int i = 0; a > -1; i++)
#pragma unroll 1
      for (int j = 0; j < n; j++) a = a * 0.5f + j;
  y[t] = a;
}
"""


@pytest.mark.parametrize(("name", "limit"), [("max_instructions", 20_000), ("max_seconds", 7)])
def test_an_endless_loop_is_named(name, limit, monkeypatch):
    """The clock is the CPU time of this thread, here one second per query."""
    monkeypatch.setattr(machine, "thread_time", itertools.count().__next__)
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(SanitizerError, match=rf"stopped after {limit} .*\({name}\)") as caught:
        launch(ENDLESS, "k", 3, 64, (x, y, 5), **{"max_seconds": 1e9, name: limit})
    assert caught.value.kind == "endless loop"
    match = re.search(
        r"PTX lines (\d+) to (\d+) from label (\S+), with (\d+) threads, first (.*?);", str(caught.value)
    )
    first, last, label, threads, at = match.groups()
    text = compile_text(ENDLESS, "sm_80").ptx.splitlines()
    loop = "\n".join(text[int(first) - 1 : int(last)])
    assert "fma.rn.f32" in loop
    assert "setp.gt.f32" in loop  # of the outer loop
    assert f"\n{label}:" in "\n".join(text[: int(first) - 1])
    assert (int(threads), at) == (3 * 40, "block (0,0,0) thread (0,0,0)")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("max_instructions", n) for n in (0, -1, 1.5, None)),
        *(("max_seconds", s) for s in (0, -1.0, "1", None)),
    ],
)
def test_the_limits_are_numbers(name, given):
    source = 'extern "C" __global__ void k() {}'
    with pytest.raises(EmulatorError, match=rf"{name} is .*; pass a number"):
        launch(source, "k", 1, 32, (), **{name: given})


def test_ops_take_the_time_that_they_need(monkeypatch):
    monkeypatch.setattr(machine, "thread_time", itertools.count(step=10_000).__next__)
    monkeypatch.setattr(machine, "_EVERY", 1)
    x = np.ones((4, 4000), np.float32)
    y = gpu_ops.softmax(x, device="emulator")
    np.testing.assert_allclose(y, x / 4000, rtol=1e-6)
    with pytest.raises(SanitizerError, match="max_seconds"):
        launch(ENDLESS, "k", 1, 64, (np.ones(64, np.float32), np.zeros(64, np.float32), 5))
