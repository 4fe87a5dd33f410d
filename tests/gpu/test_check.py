"""Parts of scripts/gpu_check.sh that run without a GPU, and its report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_ops.core.autotune import Tuning
from perf import gpu_report, runs, tune
from perf.attention_grids import Shape
from perf.case import RunOptions
from tests.perf.case import LIMITS
from tests.support.processes import PATIENCE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
FILES = "tests/norm/test_rmsnorm.py tests/gpu/test_gpu.py"

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(*arguments, **environment):
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "GPU_OPS_PYTHON": sys.executable, "GPU_OPS_CHECK_TESTS": FILES, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def stand_in(tmp_path, text):
    """Fake Python that only runs the given lines."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_bash
def test_a_dry_run_attempts_every_step_and_lists_what_it_would_run(tmp_path):
    out = tmp_path / "out"
    done = run(out, GPU_OPS_CHECK_DRY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (out / "summary.txt").read_text()
    names = ["packages", "machine", "device", "first_tests", "first_benchmarks", "attention", "tune"]
    names += [
        "attention_decode",
        "attention_field",
        "attention_options",
        "benchmarks",
        "benchmarks_full",
        "tests",
    ]
    told = [line.split()[1].rstrip(",") for line in summary.splitlines() if line.startswith("ok ")]
    assert [name for name in told if name != "report"] == names, "the most telling first"
    assert told.count("report") == 4
    log = {name: (out / f"{name}.log").read_text() for name in names}
    for name in ("first_tests", "tests"):
        assert "test_rmsnorm.py::test_forward_and_backward[" in log[name]
        assert "cuda-raw" in log[name]
        assert "test_the_emulator_and_the_gpu_agree" in log[name]
        assert "cpu-numba" not in log[name]
    assert "rmsnorm | backward" in log["benchmarks"]
    assert "rmsnorm | backward" not in log["first_benchmarks"]
    assert "attention |" not in log["benchmarks_full"]
    assert "attention | " in log["tune"]
    assert (out / "report.md").read_text().startswith("# GPU check: nothing measured yet")


@needs_bash
def test_a_step_that_fails_is_told_and_the_others_still_run(tmp_path):
    broken = stand_in(tmp_path, "echo no such luck\nexit 3")
    done = run(tmp_path / "out", GPU_OPS_CHECK_DRY="1", GPU_OPS_PYTHON=broken)
    assert done.returncode == 1
    for name in ("packages", "machine", "first_tests", "attention", "tune", "benchmarks", "tests"):
        assert f"FAILED  {name}, exit code 3" in done.stdout
    assert "no such luck" in done.stdout
    for wrong in ((), (tmp_path, "--part"), (tmp_path, "--part", "5/4"), (tmp_path, "1/4")):
        assert run(*wrong).returncode == 2


@needs_bash
def test_a_part_that_takes_too_long_is_cut_off_and_told(tmp_path):
    slow = stand_in(tmp_path, 'case "$*" in *"-m pytest"*) echo begun; exec sleep 100;; esac')
    settings = {"GPU_OPS_PYTHON": slow, "GPU_OPS_CHECK_SECONDS": "2"}
    done = run(tmp_path / "out", "--part", "1/4", "--part", "2/4", **settings)
    assert done.returncode == 0, done.stdout
    assert re.search("CUT OFF first_tests after [123] s", done.stdout)
    assert "CUT OFF first_benchmarks: no time was left" in done.stdout
    assert "ok      attention," in done.stdout, "the next part has time of its own"
    assert (tmp_path / "out" / "first_tests.log").read_text() == "begun\n"


def test_results_of_tests_are_kept_as_they_come(tmp_path):
    (tmp_path / "test_gpu.py").write_text(
        "import os\n"
        "def test_a(record_property): record_property('y', '1 unit at most')\n"
        "def test_b(): assert False, 'wrong'\n"
        "def test_c(): os._exit(9)\n"  # as a crash, or a kill
    )
    log = tmp_path / "tests.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.report_log",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    root = str(SCRIPT.parents[1])
    environment = {**os.environ, "GPU_OPS_TEST_LOG": str(log), "PYTHONPATH": root}
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 9
    first, second = map(json.loads, log.read_text().splitlines())
    assert (first["outcome"], first["properties"]) == ("passed", {"y": "1 unit at most"})
    assert (second["outcome"], "wrong" in second["message"]) == ("failed", True)


def test_what_autotune_finds_is_kept_problem_by_problem(tmp_path, monkeypatch):
    def autotune(op, q, k, v, **options):
        if op == "attention":
            raise RuntimeError("out of order")
        assert (q.shape, k.shape, options["seqused_k"].tolist()) == ((2, 1, 4, 8), (2, 16, 2, 8), [16, 16])
        return Tuning(op, "", "", "", {"A": 1.0}, {}, "A", "A", None)

    monkeypatch.setattr("gpu_ops.autotune", autotune)
    monkeypatch.setattr(tune, "to_device", lambda arrays: arrays)
    sizes = Shape(2, 1, 16, 4, 2, 8)
    monkeypatch.setattr(
        tune, "PROBLEMS", [(op, sizes, "float32", {}) for op in ("attention", "attention_decode")]
    )
    path = tmp_path / "tune.jsonl"
    assert tune.main(["--save", str(path)]) == 1
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["error"] == "RuntimeError: out of order"
    assert (second["winner"], second["seconds"]) == ("A", {"A": 1.0})


MACHINE = {
    "gpu": {"name": "NVIDIA H100 80GB HBM3", "driver": "580"},
    "commit": "abc",
    "versions": {"numpy": "2"},
}


def row(op, name, shape, dtype, microseconds, **more):
    cells = {
        "op": op,
        "name": name,
        "shape": shape,
        "dtype": dtype,
        "flops": 1e6,
        "bytes": 3.35e9,
        "passed": 1,
    }
    cells |= {"key": " | ".join((op, name, shape, dtype)), "share_of_limit": 0.8, "limited_by": "copy"}
    return cells | {"ours_median": 1e-6 * microseconds, "limit_seconds": 0.8e-6 * microseconds} | more


@pytest.fixture
def folder(tmp_path):
    rows = [
        row("rmsnorm", "forward", "2048 x 4096", "bfloat16", 1250, ours_joules=0.3, ours_sm_mhz=1700.0),
        row("softmax", "forward", "2048 x 4096", "float32", 9000),
        row("attention", "forward causal", "B1 S4096 H32/8 D128", "bfloat16", 600),
    ]
    (run,) = [runs.new_run(rows[:2], MACHINE, LIMITS, RunOptions(device="cuda"), 1.0)]
    runs.save(runs.Run({**run.facts, "created": "2026-01-01T00:00:00Z"}, rows), tmp_path / "perf")
    later = [row("softmax", "forward", "2048 x 4096", "float32", 4000)]
    runs.save(runs.Run({**run.facts, "created": "2026-01-01T00:08:00Z"}, later), tmp_path / "perf")
    tests = [
        {"test": "t.py::a", "outcome": "passed", "properties": {"dx": "0 units"}, "message": ""},
        {"test": "t.py::b", "outcome": "failed", "properties": {}, "message": "E  wrong\nt.py:3: Error"},
    ]
    lines = [*map(json.dumps, tests), '{"test": "cut o']
    (tmp_path / "tests_first.jsonl").write_text("\n".join(lines))
    tuned = {"name": "attention", "winner": "A", "model": "B", "seconds": {"A": 1.0, "B": 1.25}}
    (tmp_path / "tune.jsonl").write_text(json.dumps(tuned) + "\n")
    (tmp_path / "summary.txt").write_text("ok      tests, 3 s\n")
    return tmp_path


def test_the_report_says_what_was_found(folder, capsys):
    assert gpu_report.main([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert text == capsys.readouterr().out
    assert text.startswith("# GPU check: NVIDIA H100 80GB HBM3\n")
    assert "Prediction: the preset H100 SXM." in text
    assert "ok      tests, 3 s" in text
    assert "1 failed, 1 passed." in text
    assert "t.py:3: Error" in text
    assert "| a | dx | 0 units |" in text
    # 3.35e9 bytes at 3350 GB/s are a millisecond
    assert "| rmsnorm , forward , 2048 x 4096 , bfloat16 | 1250.0 | 80% C | 80% | 300 mJ | 1700 |  |" in text
    worst, *others = text.partition("largest disagreements")[2].partition("---|\n")[2].splitlines()[:3]
    assert worst == "| softmax , forward , 2048 x 4096 , float32 | 1000.0 | 4000.0 | 4.00 |", (
        "the later run counts"
    )
    assert others[0].startswith("| attention , forward causal")
    assert "autotune agrees with the table for 0 of 1 problems." in text
    assert "| attention | A | B | 1.25 |" in text
    drawn = find_spec("matplotlib") is not None
    assert (folder / "pictures" / "speed_float32.svg").is_file() == drawn
    assert ("![speed_float32](pictures/speed_float32.svg)" in text) == drawn


def test_the_report_does_without_what_is_not_there_yet(tmp_path, capsys):
    assert gpu_report.main([str(tmp_path)]) == 0
    assert "Nothing was measured yet." in capsys.readouterr().out
    assert gpu_report.main([str(tmp_path / "none")]) == 2
    assert gpu_report.main([]) == 2
