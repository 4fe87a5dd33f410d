"""Saved runs of perf: the CSV file, and the comparison of two runs."""

from __future__ import annotations

import csv
from dataclasses import asdict

import pytest

from gpu_ops.cli.terminal import make_console
from perf import harness, report, runs
from perf.case import RunOptions
from tests.perf.case import FAST, LIMITS, square_case


def saved_run(tmp_path, factor: float = 1.0, **machine_facts) -> runs.Run:
    result = harness.run_case(square_case(), RunOptions(use_torch=False), LIMITS, effort=FAST)
    facts = {"cpu": "x", "threads": 2, "device": "cpu", "commit": "abc", "versions": {}, **machine_facts}
    times = {"median": 1e-3, "p20": 0.95e-3, "p80": 1.05e-3, "fastest": 0.9e-3}
    row = result.row() | {f"ours_{name}": factor * seconds for name, seconds in times.items()}
    return runs.load(runs.save(runs.new_run([row], facts, LIMITS, RunOptions(), 1.0), tmp_path))


def test_csv_round_trip(tmp_path):
    run = saved_run(tmp_path)
    assert run.facts["schema"] == runs.SCHEMA
    assert run.facts["limits"] == asdict(LIMITS)
    assert RunOptions.from_json(run.facts["config"]) == RunOptions()
    assert run.rows[0]["ours_median"] == 1e-3


def test_a_saved_run_is_a_plain_table_below_its_facts(tmp_path):
    """A reader that only skips lines starting with ``#`` sees a plain table."""
    failed = {"op": "x", "failure": 'RuntimeError: "a", b # c\n# d', "flops": 1.0, "passed": 0}
    run = runs.Run({**saved_run(tmp_path).facts, "created": "2026-01-02T03:04:05Z"}, [failed, {"op": "y"}])
    path = runs.save(run, tmp_path)
    assert path.name == "20260102T030405-abc.csv"
    lines = path.read_text().splitlines(keepends=True)
    head = [line for line in lines[: len(run.facts)] if line.startswith("# ")]
    assert len(head) == len(run.facts)
    assert {line[2:].partition(": ")[0] for line in head} == set(run.facts)
    header, *rows = csv.reader(lines[len(head) :])
    assert header == ["device", "commit", "op", "failure", "flops", "passed"]
    assert rows == [
        ["x, 2 threads", "abc", "x", failed["failure"], "1.0", "0"],
        ["x, 2 threads", "abc", "y", "", "", ""],
    ]
    again = runs.load(path)
    assert again.facts == run.facts
    assert [row.items() >= original.items() for row, original in zip(again.rows, run.rows, strict=True)] == [
        True,
        True,
    ]


def test_a_planted_regression_is_flagged(tmp_path):
    comparison = runs.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=1.5))
    assert comparison.exit_code == 1
    assert comparison.regressions[0].ratio == pytest.approx(1.5)
    assert "1.50x" in comparison.summary()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.05])
def test_no_regression_is_no_regression(tmp_path, factor):
    comparison = runs.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=factor))
    assert comparison.exit_code == 0
    assert "no regression" in comparison.summary()


def test_a_slow_median_within_the_old_spread_is_noise_unless_no_call_was_fast(tmp_path):
    old, new = saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=1.2)
    old.rows[0]["ours_p80"] = 2e-3
    comparison = runs.compare(old, new)
    assert comparison.exit_code == 1
    assert comparison.changes[0].verdict == "REGRESSED: the fastest call too, 1.20x"
    new.rows[0]["ours_fastest"] = 0.9e-3
    comparison = runs.compare(old, new)
    assert comparison.exit_code == 0
    assert comparison.changes[0].verdict == "noise: fastest call 1.00x, new p20 1.140 ms, old p80 2.000 ms"
    old.rows[0]["ours_p80"] = 1.05e-3
    comparison = runs.compare(old, new)
    assert comparison.exit_code == 1
    assert (
        comparison.changes[0].verdict
        == "REGRESSED: the spreads do not meet, new p20 1.140 ms, old p80 1.050 ms"
    )


def test_what_noise_explains_is_not_said_to_be_within_the_threshold(tmp_path, capsys):
    old, new = saved_run(tmp_path / "a"), saved_run(tmp_path / "b", factor=1.26)
    old.rows[0]["ours_p80"] = 2e-3
    new.rows[0]["ours_fastest"] = 0.9e-3
    comparison = runs.compare(old, new)
    assert "0 of 1 case within 1.10x" in comparison.summary()
    assert "1 above it, up to 1.26x" in comparison.summary()
    report.print_comparison(make_console(), comparison)
    shown = capsys.readouterr().out
    assert "1.26" in shown
    assert "noise: fastest call 1.00x" in shown


def test_a_vanished_case_is_flagged_unless_less_was_asked_for(tmp_path):
    old, new = saved_run(tmp_path / "a"), saved_run(tmp_path / "b")
    old.rows.append({**old.rows[0], "key": "gone"})
    assert runs.compare(old, new).missing == ["gone"]
    assert runs.compare(old, new).exit_code == 1
    new.facts["config"]["seqlens"] = [64]
    assert runs.compare(old, new).exit_code == 0


def test_a_run_that_was_not_saved_compares_like_one_that_was(tmp_path):
    old = saved_run(tmp_path)
    old.rows.append({**old.rows[0], "key": "gone"})
    new = runs.new_run(old.rows[:1], old.facts["machine"], LIMITS, RunOptions(), 1.0)
    assert runs.compare(old, new).missing == ["gone"]


def test_another_machine_is_a_warning(tmp_path):
    comparison = runs.compare(saved_run(tmp_path / "a"), saved_run(tmp_path / "b", cpu="y"))
    assert any("cpu differs: x then, y now" in warning for warning in comparison.warnings)


@pytest.mark.parametrize(
    "text", ["", "{}", "a,b\n1,2\n", "# schema: 1\n", "# schema\n", '# schema: 2\n"a"\nb\n']
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="no saved run"):
        runs.load(path)
