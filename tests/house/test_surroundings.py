"""Tests run the same in a background job and on a loaded machine, a test process that dies says how, and the default
run takes the cases that choice.py promises."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import choice
from tests.support.choice import chosen_cases, chosen_items
from tests.support.processes import PATIENCE, ROOT

CONFTEST = """
import pytest
from tests.support.surroundings import keep_last_words, restore_signals
restore_signals()
@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    keep_last_words(config)
"""

TESTS = """
import os, signal, subprocess, sys, time, pytest
def test_an_interrupt_arrives():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_child_is_interrupted(number):
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, stderr=-1)
    child.stdout.readline()
    child.send_signal(number)
    child.communicate()
    assert child.returncode == -number
def test_that_crashes():
    os.abort()
def test_that_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""

# a shell's background job, and a program that blocks the signals of the threads it starts
STARTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals (Linux, macOS)")
def test_a_run_in_the_background_whose_processes_die(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_run.py").write_text(TESTS)
    options = ("-q", "-n", "1", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "2 failed, 3 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    crashed, killed = done.stdout.split("crashed while running")[1:3]
    assert "ended by SIGABRT" in crashed
    assert 'test_run.py", line 15 in test_that_crashes' in crashed
    assert "ended by SIGKILL, which the kernel sends when memory runs out" in killed
    assert "test_run.py::test_that_is_killed, after a peak of " in killed


def test_examples_may_take_any_time(monkeypatch):
    """A clock that advances by ten seconds at each read simulates a busy machine."""
    seen = []

    @settings(max_examples=20, database=None)
    @given(st.lists(st.integers()))
    def check(x):
        seen.append(x)

    monkeypatch.setattr(time, "perf_counter", map(float, itertools.count(0, 10)).__next__)
    check()
    assert len(seen) >= 10


DTYPES, SIZES, BACKENDS = ("f16", "bf16", "f32"), ("1", "7", "64", "100"), ("cpu", "raw", "numba")


def test_each_value_is_tried_once():
    values = list(itertools.product(DTYPES, SIZES, BACKENDS))
    chosen = [values[n] for n in chosen_cases(values)]
    for position, names in enumerate((DTYPES, SIZES, BACKENDS)):
        assert {case[position] for case in chosen} == set(names)
    assert len(chosen) == len(SIZES)


def test_a_test_without_parameters_is_chosen():
    assert chosen_cases([()]) == [0]
    assert chosen_cases([("cpu",), ("raw",)]) == [0, 1]


def item(name="test_op", **params):
    """An item as pytest collects it, with one parametrize mark for each parameter."""
    ids = ["-".join(value.values()) if isinstance(value, dict) else str(value) for value in params.values()]
    return SimpleNamespace(
        path="test_file.py",
        cls=None,
        originalname=name,
        nodeid=f"test_file.py::{name}[{'-'.join(ids)}]",
        callspec=SimpleNamespace(params=params, _idlist=ids),
    )


def chosen_params(items):
    chosen = chosen_items(items)
    return [each.callspec.params for each in items if id(each) in chosen]


def test_the_default_run_takes_two_dtypes_where_a_test_has_them():
    chosen = chosen_params([item(dtype=dtype) for dtype in ("float16", "bfloat16", "float32", "float64")])
    assert [case["dtype"] for case in chosen] == ["bfloat16", "float32"]
    assert chosen_params([item(dtype=np.float64)]) == [{"dtype": np.float64}]
    cases = [("float32", "dense"), ("float64", "dense"), ("float64", "exact")]
    chosen = chosen_params([item(dtype=dtype, mode=mode) for dtype, mode in cases])
    assert chosen == [{"dtype": "float32", "mode": "dense"}, {"dtype": "float64", "mode": "exact"}]


def test_listed_tests_are_left_to_the_full_run(monkeypatch):
    listed = {("test_file.py::test_op", "emulator-raw"): set(), ("test_file.py::test_slow_op", ""): {"2]"}}
    monkeypatch.setattr(choice, "full_only", lambda: listed)
    backends = [{"device": "cpu", "backend": "numba"}, {"device": "emulator", "backend": "raw"}]
    assert chosen_params([item(backend=backend) for backend in backends]) == [{"backend": backends[0]}]
    assert chosen_params([item("test_slow_op", size=size) for size in (1, 2, 3)]) == [{"size": 2}]


def test_the_list_of_the_full_run_names_tests():
    for test, backend in choice.full_only():
        path, *_, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
        assert backend in {"", "cpu-numba", "cpu-reference", "emulator-raw", "emulator-numba"}, backend
