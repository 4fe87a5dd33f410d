"""The sanitizer finds planted bugs, names their line and thread, and is silent about the kernels without them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpu_ops.emulator import SanitizerError, launch
from gpu_ops.emulator.sanitizer import KINDS
from tests import emulator_bugs, emulator_bugs_order

pytest.importorskip("cuda.bindings.nvrtc")

BUGS = [*emulator_bugs.BUGS, *emulator_bugs_order.BUGS]
LINE = re.compile(r"kernel\.cu:(\d+)\)")  # of a chain of inlined calls the outermost


def run(bug, form, rng):
    args, expected = bug.args(rng)
    shared = bug.shared[form == "bad"]
    launch(bug.source(form), "k", bug.grid, bug.block, args, shared=shared, sample=bug.sample)
    return args, expected


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_the_good_form_is_clean_and_right(bug, rng):
    args, expected = run(bug, "good", rng)
    for i, value in expected.items():
        found = args[i].array if hasattr(args[i], "array") else args[i]
        np.testing.assert_array_equal(found, value)


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
        wanted = {bug.line("BUG")} | ({bug.line("OTHER")} if bug.other else set())
        assert wanted <= set(lines), message
        return
    assert lines[-1] == bug.line("BUG"), message
    if bug.other:
        assert lines[0] == bug.line("OTHER"), message


def test_every_kind_of_fault_is_planted():
    assert {b.kind for b in BUGS} == set(KINDS)
    assert len(BUGS) >= 30
