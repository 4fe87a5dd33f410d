"""Wrong arguments above the ops: each call works or raises a typed error, by the one rule of core/declared.py."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.errors import GpuOpsError
from tests.public_calls import parameters, public, run
from tests.public_values import Parts

WRONG = {
    "None": None,
    "word": "no",
    "empty list": [],
    "list": ["no"],
    "array": np.array([1.5, 2.5]),
    "NaN": float("nan"),
    "huge": 1e30,
    "huge integer": 2**70,
    "negative": -1,
    "object": object(),
    "dict": {1: 2},
}


@pytest.mark.parametrize("label", public())
def test_a_valid_call(label, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "reference")
    run(label, Parts(tmp_path))


@pytest.mark.parametrize("label", public())
def test_wrong_arguments_are_typed_errors(label, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_OPS_BACKEND", "reference")
    bare = []
    for name in parameters(label):
        for kind, value in WRONG.items():
            folder = tmp_path / f"{name} {kind}"
            folder.mkdir()
            try:
                run(label, Parts(folder), {name: value})
            except GpuOpsError:
                pass
            except Exception as error:
                bare.append(f"{name}={kind}: {type(error).__name__}: {error}")
    assert not bare, "\n".join(bare)
