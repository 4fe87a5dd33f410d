"""scripts/gpu_check.sh, as far as it goes without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(*arguments, **environment):
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env={**os.environ, "GPU_OPS_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_dry_run_attempts_every_step_and_lists_what_it_would_run(tmp_path):
    done = run(tmp_path / "out", GPU_OPS_CHECK_DRY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    summary = (out / "summary.txt").read_text()
    for name in ("packages", "machine", "tests", "benchmarks"):
        assert f"ok      {name}" in summary
    tests = (out / "tests.log").read_text()
    assert "test_rmsnorm.py::test_forward_and_backward[" in tests
    assert "cuda-raw" in tests
    assert "test_the_emulator_and_the_gpu_agree" in tests
    assert "cpu-numba" not in tests
    assert "rmsnorm | backward" in (out / "benchmarks.log").read_text()


def test_a_step_that_fails_is_told_and_the_others_still_run(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
    broken.chmod(0o755)
    done = run(tmp_path / "out", GPU_OPS_CHECK_DRY="1", GPU_OPS_PYTHON=str(broken))
    assert done.returncode == 1
    for name in ("packages", "machine", "tests", "benchmarks"):
        assert f"FAILED  {name}, exit code 3" in done.stdout
    assert "no such luck" in done.stdout
    assert run().returncode == 2
