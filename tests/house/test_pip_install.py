"""Progress of scripts/setup.sh."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import pip_install
from tests.support.processes import PATIENCE, ROOT


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting numba>=0.61\n", "looking up packages"),
        (
            "  Downloading numba-0.68.1-cp311-cp311-manylinux_2_27.whl (3.8 MB)\n",
            "downloading numba (3.8 MB)",
        ),
        ("Using cached ml_dtypes-0.6.0-cp311.whl (5 MB)\n", "downloading ml_dtypes (5 MB)"),
        ("Processing /wheels/nvidia_cuda_nvrtc_cu12-12.9.86-py3.whl\n", "downloading nvidia_cuda_nvrtc_cu12"),
        ("Installing collected packages: numpy, numba\n", "unpacking all of them"),
        ("     ---- 3.8/3.8 MB 8.5 MB/s\n", ""),
    ],
)
def test_stages_of_pip(line, words):
    assert pip_install.stage(line) == words


def test_a_failure_shows_what_pip_printed():
    done = subprocess.run(
        [sys.executable, "scripts/pip_install.py", "--no-index", "/no/such/folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "/no/such/folder" in done.stderr
