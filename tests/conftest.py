"""One test body, every backend: a test that takes ``backend`` runs on each that can run here."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

# A CI run repeats the same examples, so that a failure is the change's; runs by hand explore new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(params=["cpu-numba", "cpu-reference"])
def backend(request):
    """Keyword arguments that select a device and a backend."""
    device, name = request.param.split("-")
    return {"device": device, "backend": name}


@pytest.fixture(params=DTYPES, ids=lambda d: np.dtype(d).name)
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(20)
