"""README of the emulator: its example runs, and it lists every fault and every module."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

from gpu_ops.emulator import run
from gpu_ops.emulator.sanitizer import KINDS

FOLDER = Path(run.__file__).parent
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_is_shown(capsys):
    pytest.importorskip("cuda.bindings.nvrtc")
    (example,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)^```", TEXT, re.M | re.S)
    exec(compile(example, "README.md", "exec"), {})
    # The compiler chooses PTX lines and registers; everything else is fixed.
    printed, shown = (re.sub(r"PTX line .*; ", "", text) for text in (capsys.readouterr().out, shown))
    assert printed == shown
    assert "(kernel.cu:8)" in shown
    assert len(example.splitlines()) <= 22


def test_the_table_has_every_kind_of_fault():
    rows = re.findall(r"^\| ([^|]+?) \|", TEXT.partition("## Faults")[2].partition("## ")[0], re.M)
    assert rows[0] == "kind"
    assert tuple(rows[1:]) == KINDS


def test_the_files_it_names_exist():
    named = set(re.findall(r"`(\w+\.py|\w+/)`", TEXT)) | {"instructions/matrix.py"}
    assert len(named) > 15
    assert [name for name in named if not (FOLDER / name).exists()] == []


def test_every_module_is_named():
    named = set(re.findall(r"`(\w+)\.py`", TEXT))
    modules = {path.stem for path in FOLDER.glob("*.py")}
    assert modules - named == {"__init__"}


def test_the_example_of_launch_runs():
    (example,) = [
        t for t in doctest.DocTestFinder().find(run, globs={"np": np}) if t.name.endswith(".launch")
    ]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(example)
    assert runner.summarize(verbose=False) == (0, len(example.examples))
    assert len(example.examples) >= 5
