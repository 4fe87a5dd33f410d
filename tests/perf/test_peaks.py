"""Compiled loops that measure a CPU's limits: they do their work, and the larger measurement counts."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

pytest.importorskip("numba", reason="the loops are compiled by Numba")

from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16
from gpu_ops.kernels.common.cpu.parallel import launch
from perf import harness, limits, peaks
from perf.case import Case, RunOptions
from perf.stats import Limits


def blocks(count):
    """``count`` different blocks of words, aligned to a vector."""
    words = np.arange(1, (count + 1) * peaks.WORDS + 1, dtype=np.uint64)
    return words[-words.ctypes.data % 64 // 8 :][: count * peaks.WORDS]


@pytest.mark.parametrize("non_temporal", [False, True])
def test_copies_copy(non_temporal):
    source = blocks(2 * 3 + 1)
    target = blocks(2 * 3 + 1)
    target[:] = 0
    tasks = -(-source.size // (peaks.WORDS * peaks.CHUNK))
    launch(peaks.copy, tasks, target, source, non_temporal)
    np.testing.assert_array_equal(target, source)


def test_the_reading_loop_sees_every_vector():
    data, seen = blocks(5), np.zeros(1, np.uint64)
    data[:] = 0
    for i, at in enumerate(range(0, data.size, data.size // (5 * peaks.VECTORS))):
        data[at] = 1 << i
    launch(peaks.read, 1, data, seen)
    assert seen[0] == (1 << 5 * peaks.VECTORS) - 1


def test_peaks_are_the_work_of_their_loops_over_time(monkeypatch):
    def best(call, repetitions):
        call()
        return 0.5 / repetitions

    monkeypatch.setattr(peaks, "best", best)
    measured = peaks.measure(32 << 20, repetitions=2)
    assert measured.multiply_add == peaks.arithmetic(np.dtype(np.float32)).amount / 0.25 > 1e9
    assert (measured.dot_bfloat16 is not None) == DOT_BFLOAT16
    if measured.dot_bfloat16 is not None:
        assert measured.dot_bfloat16 > measured.multiply_add
    assert measured.read == measured.copy == measured.copy_non_temporal == (32 << 20) / 0.25


@pytest.mark.parametrize("ours", [1.0, 9.0])
def test_the_larger_measurement_is_the_limit(ours, monkeypatch):
    monkeypatch.setattr(limits, "bandwidths", lambda *args, **options: (5.0, 6.0))
    monkeypatch.setattr(limits, "numpy_matmul", lambda *args: 7.0)
    monkeypatch.setattr(
        peaks, "measure", lambda *args, **options: peaks.Peaks(ours, 2 * ours, ours, ours - 1, ours)
    )
    measured = limits.measure(quick=True, use_torch=False)
    assert (measured.copy, measured.read, measured.matmul) == (max(ours, 5.0), max(ours, 6.0), max(ours, 7.0))
    assert measured.matmul_half == 2 * ours
    assert asdict(measured).keys() == {
        "copy",
        "read",
        "matmul",
        "matmul_bfloat16",
        "buffer_bytes",
        "matmul_half",
    }


@pytest.mark.parametrize(("flops", "kind", "work"), [(1e9, "matmul", 1e9), (1.0, "copy", 16384.0)])
def test_the_limit_is_timed_in_turns_with_the_case(flops, kind, work, monkeypatch):
    wanted = []

    def pacemaker(*arguments, half):
        wanted.append((arguments[0], half))
        return peaks.Loop(lambda: None, amount=1e6)

    monkeypatch.setattr(peaks, "pacemaker", pacemaker)
    seconds = iter((1.0, 2.0, 3.0, 4.0, 5.0, 6.0))  # clock readings of successive calls

    def timer(call):
        call()
        return next(seconds)

    monkeypatch.setattr(harness, "timer_for", lambda config: timer)
    bounds = Limits(copy=20e9, read=30e9, matmul=100e9)
    case = Case(
        *("square", "forward", "64 x 32", "float32", flops, 16384.0),
        make=lambda rng: {"x": rng.standard_normal((64, 32), np.float32)},
        make_small=lambda rng: {"x": rng.standard_normal((4, 4), np.float32)},
        ours=lambda inputs: lambda: inputs["x"] * inputs["x"],
        reference=lambda inputs, precision: inputs["x"] ** 2,
    )
    effort = harness.Effort(rounds=2, slice_seconds=0.0, slow_seconds=0.0, pause=0.0)
    result = harness.run_case(case, RunOptions(use_torch=False), bounds, effort=effort)
    assert wanted == [(kind, False)]
    assert set(result.timings) == {"ours"}
    # ours takes 1 and 2 s, the limit 3 and 4 s; then one round of both. First calls do not count.
    assert result.timings["ours"].median == (2 + 5) / 2
    assert result.limit.median == (4 + 6) / 2
    assert result.limit_seconds == pytest.approx(work / 1e6 * result.limit.median)
    assert result.share_of_limit == pytest.approx(result.limit_seconds / result.timings["ours"].median)
    assert result.row()["limit_median"] == result.limit.median
