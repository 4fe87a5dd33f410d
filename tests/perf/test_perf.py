"""Tests of the measuring tools; test_benches.py runs the benches."""

from __future__ import annotations

import functools
import json
import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from gpu_ops.cli.terminal import make_console
from perf import build, case, cli, harness, limits, machine, memory, report, runs, stats
from perf.attention_grids import Shape
from perf.case import RunOptions
from tests.perf.case import FAST, LIMITS, square_case

# ---- statistics and counting -------------------------------------------------------------------------------


def test_summarise_gives_median_and_percentiles():
    timing = stats.summarise([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], first=9.0, sets=3)
    assert (timing.median, timing.p20, timing.p80) == (3.5, 2.0, 5.0)
    assert (timing.fastest, timing.calls, timing.first, timing.sets) == (1.0, 6, 9.0, 3)


def test_summarise_refuses_nothing():
    with pytest.raises(ValueError, match="no samples"):
        stats.summarise([])


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1), (0, 4), (4, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_pairs_by_brute_force(seqlen_q, seqlen_k, causal):
    visible = sum(
        not causal or j <= i + seqlen_k - seqlen_q for i in range(seqlen_q) for j in range(seqlen_k)
    )
    assert Shape(1, seqlen_q, seqlen_k, 1, 1, 8).pairs(causal=causal) == visible


def test_attention_flops_follow_the_convention():
    shape = Shape(2, 8, 8, 3, 3, 16)
    full = shape.flops(causal=False)
    assert full == 4 * 2 * 3 * 8 * 8 * 16
    assert shape.flops(causal=True) == full * (8 * 9 / 2) / 64
    assert shape.flops(causal=False, backward=True) == 2.5 * full


def test_the_roofline_takes_the_slower_of_both_limits():
    assert LIMITS.seconds(flops=1e9, traffic=20.0, kind="copy") == (0.01, "matmul")
    assert LIMITS.seconds(flops=1.0, traffic=20e9, kind="copy") == (1.0, "copy")
    assert LIMITS.seconds(flops=1.0, traffic=30e9, kind="read") == (1.0, "read")


@pytest.mark.parametrize(
    ("text", "count"), [("48K", 48 << 10), ("2M", 2 << 20), ("1G", 1 << 30), ("512", 512)]
)
def test_cache_sizes_parse(text, count):
    assert machine.parse_size(text) == count


# ---- inputs ------------------------------------------------------------------------------------------------


def test_inputs_are_never_zeros_and_repeat_exactly():
    first, second = (
        build.normal(np.random.default_rng(3), (5000, 1000), np.dtype(np.float32)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert first.std() == pytest.approx(1.0, abs=0.01)
    assert (first[-1] != 0).mean() > 0.99  # beyond the block that large arrays repeat


def test_a_process_that_makes_the_inputs_again_gets_the_same():
    first, second = (case.make_inputs(square_case(), RunOptions()) for _ in range(2))
    np.testing.assert_array_equal(first["x"], second["x"])


def test_memory_bound_cases_rotate_past_the_cache_and_others_do_not():
    bound = square_case(bytes=1e6, flops=1e6)
    assert harness.copies_needed(bound, 1e6, cold_bytes=10_000_000) == 10
    assert harness.copies_needed(bound, 4e6, cold_bytes=10_000_000) == 3
    assert harness.copies_needed(bound, 1.0, cold_bytes=10_000_000) == harness.MAX_SETS
    assert harness.copies_needed(square_case(bytes=1e6, flops=1e9), 1e6, cold_bytes=10_000_000) == 1


# ---- timing ------------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_the_first_call_is_kept_apart():
    order = []

    def contender(name: str, seconds: float) -> harness.Contender:
        return harness.Contender(name, [lambda: order.append((name, seconds))])

    def clock(call) -> float:
        call()
        name, seconds = order[-1]
        return 50.0 if sum(n == name for n, _ in order) == 1 else seconds

    effort = harness.Effort(rounds=4, slice_seconds=2.0, slow_seconds=1e9, pause=0.0)
    timings = harness.interleave([contender("ours", 1.0), contender("naive", 3.0)], effort, clock)
    assert {name: t.median for name, t in timings.items()} == {"ours": 1.0, "naive": 3.0}
    assert timings["ours"].first == 50.0
    assert timings["ours"].fastest == 1.0  # the call that compiles is in no other figure
    assert (timings["ours"].calls, timings["naive"].calls) == (8, 4)
    switches = sum(a != b for a, b in zip([n for n, _ in order], [n for n, _ in order][1:], strict=False))
    assert switches >= 4


def test_a_slow_contender_takes_part_in_fewer_rounds():
    slow = harness.Contender("naive", [lambda: None])
    effort = harness.Effort(rounds=7, slice_seconds=0.1, slow_seconds=3.0, pause=0.0)
    assert harness.interleave([slow], effort, lambda call: 1.0)["naive"].calls == 3
    assert harness.interleave([slow], effort, lambda call: 60.0)["naive"].calls == 2


def test_calls_rotate_over_the_copies():
    seen = []
    contender = harness.Contender("ours", [lambda i=i: seen.append(i) for i in range(3)], position=1)
    for _ in range(5):
        contender.next()()
    assert seen == [1, 2, 0, 1, 2]


def test_a_timing_is_the_time_of_the_call(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 0.25

    assert harness.timed(call) == 0.25


# ---- accuracy ----------------------------------------------------------------------------------------------


def test_a_right_result_passes_and_the_row_holds_it():
    result = harness.run_case(square_case(), RunOptions(use_torch=False), LIMITS, effort=FAST)
    assert result.passed, result.failure
    assert set(result.timings) == {"ours", "naive"}
    row = result.row()
    assert row["key"] == "square | forward | 64 x 32 | float32"
    assert row["times_naive"] == pytest.approx(row["naive_median"] / row["ours_median"])
    assert row["error_ok"] == 1


@pytest.mark.parametrize("wrong", [0.5, np.nan, np.inf])
def test_a_wrong_element_fails_and_is_named(wrong):
    def ours(x):
        y = x["x"] * x["x"]
        y[3, 4] = y[3, 4] + 1 if wrong == 0.5 else wrong
        return lambda: y

    result = harness.run_case(square_case(ours=ours), RunOptions(use_torch=False), LIMITS, effort=FAST)
    assert not result.passed
    assert "(3, 4)" in result.error.worst
    console = make_console()
    assert cli.conclude(console, [result]) == 1


def test_float32_attention_is_also_held_to_its_mean_error():
    x = np.ones((4, 4), np.float32)
    loose = [np.full((4, 4), 1.5)]  # a naive error so large that the tolerance would let 2e-5 pass

    def error(off: float, op: str) -> harness.Error:
        return harness.compare([x], [np.full((4, 4), 1.0 + off)], loose, case=square_case(op=op), sampled="")

    assert error(5e-6, "attention").ok
    assert not error(2e-5, "attention").ok
    assert error(2e-5, "square").ok


def test_a_case_that_raises_is_reported_and_fails_the_run():
    def ours(x):
        raise RuntimeError("no kernel for this")

    result = harness.run_case(square_case(ours=ours), RunOptions(use_torch=False), LIMITS, effort=FAST)
    assert not result.passed
    assert "no kernel for this" in result.failure
    assert "failed" in report.cells(result)["time"]
    assert "FAILED" in report.cells(result)["error"]


def test_a_line_per_case_before_the_table(monkeypatch, capsys):
    cases = [square_case(name=name) for name in ("forward", "backward")]
    monkeypatch.setattr(
        cli, "bench", lambda op: type("bench", (), {"cases": staticmethod(lambda config: cases)})
    )
    run = functools.partial(harness.run_case, effort=FAST)
    monkeypatch.setattr(
        cli, "run_case", lambda case, config, found, probe, effort, stage: run(case, config, found)
    )
    console = make_console()
    cli.run_all({"square": cases}, RunOptions(use_torch=False), LIMITS, console, memory=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == "op 1/1: square"
    assert re.match(r"square 1 of 2: forward 64 x 32 float32: .* us .*% of the limit; measured in", lines[0])
    assert lines[1].startswith("square 2 of 2: backward")
    assert lines[2].startswith("time: median")
    assert lines[3] == "square" + " " * (len(lines[3]) - 6)


def test_a_run_that_is_cut_off_keeps_what_it_has_measured(monkeypatch, tmp_path):
    cases = [square_case(name=name) for name in ("forward", "backward", "later")]
    monkeypatch.setattr(
        cli, "bench", lambda op: type("bench", (), {"cases": staticmethod(lambda config: cases)})
    )
    monkeypatch.setattr(cli.limits, "measure", lambda **_: LIMITS)

    def run_case(case, config, found, probe, effort, stage):
        if case.name == "later":
            raise KeyboardInterrupt
        return harness.run_case(case, config, found, effort=FAST)

    monkeypatch.setattr(cli, "run_case", run_case)
    command = ["--no-torch", "--no-memory", "--save", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        cli.main(["square"], command)
    (path,) = tmp_path.iterdir()
    assert [row["name"] for row in runs.load(path).rows] == ["forward", "backward"]
    assert cli.main(["square"], [*command[:-1], str(tmp_path / "first"), "--first", "1"]) == 0
    (path,) = (tmp_path / "first").iterdir()
    assert [row["name"] for row in runs.load(path).rows] == ["forward"]


def test_a_case_says_what_it_does():
    said = []

    def stage(doing):
        said.append(doing)
        return nullcontext()

    harness.run_case(square_case(), RunOptions(use_torch=False), LIMITS, effort=FAST, stage=stage)
    assert said == [
        "making inputs, preparing contenders",
        "timing ours, naive, limit",
        "checking the result against the reference",
    ]


def test_no_case_at_all_is_a_failure():
    assert cli.conclude(make_console(), []) == 1


# ---- memory ------------------------------------------------------------------------------------------------


def test_the_probe_sees_a_planted_allocation():
    size = 100 << 20

    def call() -> int:
        array = np.ones(size, dtype=np.uint8)
        return int(array[-1])

    peak, value = memory.peak_growth(call)
    assert value == 1
    assert 0.95 * size < peak < 1.15 * size


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs; run on Linux")
def test_the_probe_forgets_earlier_peaks():
    memory.peak_growth(lambda: np.ones(100 << 20, dtype=np.uint8).sum())
    peak, _ = memory.peak_growth(lambda: None)
    assert peak < 10 << 20


def test_working_memory_leaves_the_results_out():
    assert memory.Growth(peak=100, results=30).working == 70
    assert memory.Growth(peak=20, results=30).working == 0


def test_the_worker_measures_a_case_and_survives_a_failure():
    config = RunOptions(seqlens=(64,), dtypes=("float32",), use_torch=False)
    forward = next(c for c in cli.bench("rmsnorm").cases(config) if c.name == "forward")
    with memory.Probe() as probe:
        with pytest.raises(RuntimeError, match=r"KeyError: 'rmsnorm \| forward \| 64 x 32"):
            probe.growth(square_case(op="rmsnorm"), config, "ours")
        growth = probe.growth(forward, config, "naive")
    result = 64 * 4096 * 4
    assert growth.results == result
    assert result <= growth.peak < 8 * result + (4 << 20)


# ---- machine and limits ------------------------------------------------------------------------------------


def test_machine_facts_are_there_and_serialise():
    facts = machine.describe()
    assert facts["cores"] >= 1
    assert facts["threads"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert "numpy" in facts["versions"]
    assert machine.label(facts)
    json.dumps(facts)


def test_limits_are_work_over_time_and_copy_counts_both_directions(monkeypatch):
    def best(call, repetitions: int) -> float:
        call()
        return 0.5 / repetitions

    monkeypatch.setattr(limits, "best", best)
    copy, read = limits.bandwidths(32 << 20, threads=2, repetitions=2)
    assert read == (32 << 20) / 0.25
    assert copy == 2 * (16 << 20) / 0.25
    assert limits.numpy_matmul(256, 2) == 2 * 256**3 / 0.25


def test_the_best_repetition_counts(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(stats.time, "perf_counter", lambda: next(clock))
    calls = []
    assert stats.best(lambda: calls.append(None), 3) == 2.0
    assert len(calls) == 4, "the first call is not timed"
