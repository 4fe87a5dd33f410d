"""The measuring tools themselves; test_perf_benches.py runs the benches."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest

from perf import accuracy, case, cli, compare, harness, limits, machine, memory, report, stats
from perf.case import Case, Config

FAST = harness.Effort(rounds=2, slice_seconds=0.0, slow_seconds=0.0, pause=0.0)
LIMITS = limits.Limits(copy=20e9, read=30e9, matmul=100e9)


def square_case(dtype: str = "float32", **changes) -> Case:
    """y = x * x: a complete case without any op of gpu_ops."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": case.normal(rng, (64, 32), case.DTYPES[dtype])}

    def reference(x: dict[str, np.ndarray], precision: str) -> np.ndarray:
        square = x["x"].astype(np.float64) ** 2
        return square if precision == "float64" else square.astype(x["x"].dtype)

    fields = {
        "op": "square",
        "name": "forward",
        "shape": "64 x 32",
        "dtype": dtype,
        "flops": 64 * 32,
        "bytes": 2 * 64 * 32 * case.DTYPES[dtype].itemsize,
        "make": make,
        "make_small": make,
        "ours": lambda x: lambda: x["x"] * x["x"],
        "naive": lambda x: lambda: x["x"] ** 2,
        "reference": reference,
    }
    return Case(**{**fields, **changes})


# --- statistics and counting ---


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
    assert case.attention_pairs(seqlen_q, seqlen_k, causal) == visible


def test_attention_flops_follow_the_convention():
    full = case.attention_flops(2, 3, 8, 8, 16, causal=False)
    assert full == 4 * 2 * 3 * 8 * 8 * 16
    assert case.attention_flops(2, 3, 8, 8, 16, causal=True) == full * (8 * 9 / 2) / 64
    assert case.attention_flops(2, 3, 8, 8, 16, causal=False, backward=True) == 2.5 * full


def test_the_roofline_takes_the_slower_of_both_limits():
    assert LIMITS.seconds(flops=1e9, traffic=20.0, kind="copy") == (0.01, "matmul")
    assert LIMITS.seconds(flops=1.0, traffic=20e9, kind="copy") == (1.0, "copy")
    assert LIMITS.seconds(flops=1.0, traffic=30e9, kind="read") == (1.0, "read")


@pytest.mark.parametrize(
    ("text", "count"), [("48K", 48 << 10), ("2M", 2 << 20), ("1G", 1 << 30), ("512", 512)]
)
def test_cache_sizes_parse(text, count):
    assert machine.parse_size(text) == count


# --- inputs ---


def test_inputs_are_never_zeros_and_repeat_exactly():
    one, two = (case.normal(np.random.default_rng(3), (5000, 1000), np.dtype(np.float32)) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert one.std() == pytest.approx(1.0, abs=0.01)
    assert (one[-1] != 0).mean() > 0.99  # past the block that large arrays repeat


def test_a_process_that_makes_the_inputs_again_gets_the_same():
    one, two = (case.make_inputs(square_case(), Config()) for _ in range(2))
    np.testing.assert_array_equal(one["x"], two["x"])


def test_memory_bound_cases_rotate_past_the_cache_and_others_do_not():
    bound = square_case(bytes=1e6, flops=1e6)
    assert harness.copies_needed(bound, 1e6, cold_bytes=10_000_000) == 10
    assert harness.copies_needed(bound, 4e6, cold_bytes=10_000_000) == 3
    assert harness.copies_needed(bound, 1.0, cold_bytes=10_000_000) == harness.MAX_SETS
    assert harness.copies_needed(square_case(bytes=1e6, flops=1e9), 1e6, cold_bytes=10_000_000) == 1


# --- timing ---


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
    assert timings["ours"].fastest == 1.0  # the compiling call is in no other figure
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


def test_a_timing_is_a_time():
    assert 0.01 <= harness.timed(lambda: time.sleep(0.01)) < 1.0


# --- accuracy ---


def test_a_right_result_passes_and_the_json_holds_it():
    result = harness.run_case(square_case(), Config(use_torch=False), LIMITS, effort=FAST)
    assert result.passed, result.failure
    assert set(result.timings) == {"ours", "naive"}
    data = json.loads(json.dumps(result.to_json()))
    assert data["key"] == "square | forward | 64 x 32 | float32"
    assert data["times_naive"] == pytest.approx(
        data["timings"]["naive"]["median"] / data["timings"]["ours"]["median"]
    )
    assert data["error"]["ok"] is True


@pytest.mark.parametrize("wrong", [0.5, np.nan, np.inf])
def test_a_wrong_element_fails_and_is_named(wrong):
    def ours(x):
        y = x["x"] * x["x"]
        y[3, 4] = y[3, 4] + 1 if wrong == 0.5 else wrong
        return lambda: y

    result = harness.run_case(square_case(ours=ours), Config(use_torch=False), LIMITS, effort=FAST)
    assert not result.passed
    assert "(3, 4)" in result.error.worst
    console = report.make_console()
    assert cli.conclude(console, [result], 1.0) == 1


def test_float32_attention_is_also_held_to_its_mean_error():
    x = np.ones((4, 4), np.float32)
    loose = [np.full((4, 4), 1.5)]  # a naive error so large that the tolerance would let 2e-5 pass

    def error(off: float, op: str) -> accuracy.Error:
        return accuracy.compare([x], [np.full((4, 4), 1.0 + off)], loose, case=square_case(op=op), sampled="")

    assert error(5e-6, "attention").ok
    assert not error(2e-5, "attention").ok
    assert error(2e-5, "square").ok


def test_a_case_that_raises_is_reported_and_fails_the_run():
    def ours(x):
        raise RuntimeError("no kernel for this")

    result = harness.run_case(square_case(ours=ours), Config(use_torch=False), LIMITS, effort=FAST)
    assert not result.passed
    assert "no kernel for this" in result.failure
    assert "failed" in report.row(result)[3]


def test_no_case_at_all_is_a_failure():
    assert cli.conclude(report.make_console(), [], 0.0) == 1


# --- saving and comparing ---


def saved_run(tmp_path, factor: float = 1.0, **machine_facts) -> dict:
    result = harness.run_case(square_case(), Config(use_torch=False), LIMITS, effort=FAST)
    facts = {"cpu": "x", "threads": 2, "device": "cpu", "commit": "abc", "versions": {}, **machine_facts}
    data = report.to_json([result], facts, LIMITS, Config(), 1.0)
    times = data["cases"][0]["timings"]["ours"]
    times.update(median=factor * 1e-3, p20=factor * 0.95e-3, p80=factor * 1.05e-3, fastest=factor * 0.9e-3)
    return compare.load(report.save(data, tmp_path))


def test_json_round_trip(tmp_path):
    run = saved_run(tmp_path)
    assert run["schema"] == 1
    assert run["limits"] == {**LIMITS.to_json()}
    assert Config.from_json(run["config"]) == Config()


def test_a_planted_regression_is_flagged(tmp_path):
    found = compare.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=1.5))
    assert found.exit_code == 1
    assert found.regressions[0].ratio == pytest.approx(1.5)
    assert "1.50x" in found.summary()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.05])
def test_no_regression_is_no_regression(tmp_path, factor):
    found = compare.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=factor))
    assert found.exit_code == 0
    assert "no regression" in found.summary()


def test_a_slow_median_within_the_old_spread_is_noise_unless_no_call_was_fast(tmp_path):
    old, new = saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=1.2)
    old["cases"][0]["timings"]["ours"]["p80"] = 2e-3
    assert compare.compare(old, new).exit_code == 1
    new["cases"][0]["timings"]["ours"]["fastest"] = 0.9e-3
    assert compare.compare(old, new).exit_code == 0


def test_a_vanished_case_is_flagged_unless_less_was_asked_for(tmp_path):
    old, new = saved_run(tmp_path / "a"), saved_run(tmp_path / "b")
    old["cases"].append({**old["cases"][0], "key": "gone"})
    assert compare.compare(old, new).missing == ["gone"]
    assert compare.compare(old, new).exit_code == 1
    new["config"]["seqlens"] = [64]
    assert compare.compare(old, new).exit_code == 0


def test_another_machine_is_a_warning(tmp_path):
    found = compare.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", cpu="y"))
    assert any("cpu differs: x then, y now" in warning for warning in found.warnings)


def test_other_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no saved run"):
        compare.load(path)


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install matplotlib")
    path = report.plot(saved_run(tmp_path), tmp_path / "speed.png")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- memory ---


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
    config = Config(seqlens=(64,), dtypes=("float32",), use_torch=False)
    found = next(c for c in cli.bench("rmsnorm").cases(config) if c.name == "forward")
    with memory.Probe() as probe:
        with pytest.raises(RuntimeError, match=r"KeyError: 'rmsnorm \| forward \| 64 x 32"):
            probe.growth(square_case(op="rmsnorm"), config, "ours")
        growth = probe.growth(found, config, "naive")
    result = 64 * 4096 * 4
    assert growth.results == result
    assert result <= growth.peak < 8 * result + (4 << 20)


# --- machine and limits ---


def test_machine_facts_are_there_and_serialise():
    facts = machine.describe()
    assert facts["cores"] >= 1
    assert facts["threads"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert "numpy" in facts["versions"]
    assert machine.label(facts)
    json.dumps(facts)


def test_limits_are_positive_and_copy_counts_both_directions():
    copy, read = limits.bandwidths(32 << 20, threads=2, repetitions=2)
    assert copy > 1e8
    assert read > 1e8
    assert limits.numpy_matmul(256, 2) > 1e8
