"""Misaligned arrays in host memory give the right results on every device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.calls import DTYPES
from tests.support.laws import NAMES, assert_same, law_call, outcome, runs, unaligned  # noqa: F401

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    return {"*": {"dtype": [DTYPES[1]], "name": ("rope", "rmsnorm", "softmax")}} if raw else {"*": None}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_misaligned_inputs(name, dtype, backend):
    """The first call and a later one are right, also after a call with aligned arrays. No input is written to."""
    case = law_call(name, dtype)
    moved = case.having(**{key: unaligned(x) for key, x in case.inputs.items()})
    # sums of BLAS depend on alignment, on some CPUs
    blas = case.op.startswith(("linear", "swiglu_mlp")) and backend["backend"] == "reference"
    expected = outcome(case, **backend)
    for _ in range(2):
        assert_same(outcome(moved, **backend), expected, ulps=16 if blas else 0)
    for key, x in moved.inputs.items():
        assert x.itemsize == 1 or not x.flags.aligned
        np.testing.assert_array_equal(x, case.inputs[key])
