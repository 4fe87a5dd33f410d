"""Mistakes: each raises the right type of error with a helpful message, before anything is written."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    GpuOpsError,
    OptionError,
    ShapeError,
)
from tests.support.bad_input_cases import CASES, Of, On, ones
from tests.support.calls import OPS, OUT, call
from tests.support.laws import filled, given_out, outcome, outs_like, refused


@pytest.mark.parametrize(
    ("op", "error", "message", "changes"),
    [pytest.param(op, e, m, c, id=f"{op}: {what}") for op, what, e, m, c in CASES],
)
def test_mistake(op, error, message, changes):
    case = call(op)
    made = {n: c.change(case.arrays[n]) if isinstance(c, On) else c for n, c in changes.items()}
    made = {n: c.view(case.arrays[c.name]) if isinstance(c, Of) else c for n, c in made.items()}
    keyword, _ = OUT.get(case.op, (None, 0))
    if keyword and keyword not in made:
        made |= given_out(case, outs_like(case, outcome(case), filled))
    refused(case.having(**made), error, message)


def test_there_are_enough_cases_and_every_op_has_some():
    assert len(CASES) >= 60
    assert {op.split()[0] for op, *_ in CASES} == set(OPS)


def test_errors_are_also_the_standard_ones():
    for error, standard in (
        (ShapeError, ValueError),
        (DTypeError, TypeError),
        (OptionError, ValueError),
        (DeviceError, RuntimeError),
        (FormatError, ValueError),
    ):
        assert issubclass(error, standard)
        assert issubclass(error, GpuOpsError)


def test_explain_refuses_what_the_op_refuses():
    with pytest.raises(ShapeError, match="expected exactly"):
        gpu_ops.explain("rmsnorm", ones(3, 16), ones(15))
    with pytest.raises(OptionError, match=r"op='rmsnrom' is unknown.*mean 'rmsnorm'"):
        gpu_ops.explain("rmsnrom", ones(3, 16), ones(16))
    with pytest.raises(OptionError, match="op=<function dot"):
        gpu_ops.explain(np.dot, ones(3, 16), ones(16))


def test_environment_defaults_are_checked_too(monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "nmba")
    refused(call("rmsnorm").having(out=ones(3, 16)), OptionError, "did you mean 'numba'")
