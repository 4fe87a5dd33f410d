"""One test body, every backend: a test that takes ``backend`` runs on each that can run here.

A test file of an op with CUDA kernels says ``DEVICES = ("cpu", "emulator", "cuda")``; without, it is ``("cpu",)``.
Its ``quick_on_emulator(raw)``, if it has one, says of tests by name, ``"*"`` for all others, which levels of their
parameters run there by default, None for none; the rest is slow. Its ``runs(parameters)``, if it has one, says
whether a test applies.
"""

from __future__ import annotations

import os
import sys

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FakeCupy
from hypothesis import settings

from gpu_ops.core import device as devices
from gpu_ops.core import dispatch
from gpu_ops.core.device import compiler_missing, cuda_missing
from gpu_ops.core.dispatch import BACKENDS
from gpu_ops.core.op import forget_calls

# A CI run repeats the same examples, so that a failure is the change's; runs by hand explore new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.hookimpl(
    trylast=True
)  # the backend varies fastest: a problem's reference is computed once for all of them
def pytest_generate_tests(metafunc):
    """``backend``: keyword arguments that select a device and a backend."""
    if "backend" in metafunc.fixturenames:
        devices = getattr(metafunc.module, "DEVICES", ("cpu",))
        cells = [(device, name) for device in devices for name in BACKENDS[device]]
        metafunc.parametrize("backend", [_cell(*cell) for cell in cells])


def _cell(device, name):
    missing = compiler_missing(name) if device == "emulator" else None
    marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.skip(reason=missing)] if missing else []
    return pytest.param({"device": device, "backend": name}, id=f"{device}-{name}", marks=marks)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(config, items):
    """Tests marked ``gpu`` skip without one. CUDA C++ kernels take no float64: those tests are left out."""
    for item in items:
        if _is_slow_on_emulator(item):
            item.add_marker(pytest.mark.slow)
    dropped = [item for item in items if _is_raw_float64(item) or not _applies(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left_out = set(map(id, dropped))
        items[:] = [item for item in items if id(item) not in left_out]
    if cuda_missing():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; scripts/gpu_check.sh runs it"))


def _is_raw_float64(item):
    given = item.callspec.params if hasattr(item, "callspec") else {}
    backend = given.get("backend")
    float64 = given.get("dtype") in (np.float64, "float64")
    return isinstance(backend, dict) and backend["backend"] == "raw" and float64


def _applies(item):
    rule = getattr(item.module, "runs", None)
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return rule is None or "backend" not in given or rule(given)


def _is_slow_on_emulator(item):
    rule = getattr(item.module, "quick_on_emulator", None)
    given = item.callspec.params if rule and hasattr(item, "callspec") else {}
    backend = given.get("backend")
    if not isinstance(backend, dict) or backend["device"] != "emulator":
        return False
    levels_of = rule(backend["backend"] == "raw")
    quick = levels_of.get(item.originalname, levels_of.get("*", {}))
    return quick is None or any(given[name] not in levels for name, levels in quick.items() if name in given)


@pytest.fixture(params=DTYPES, ids=lambda d: np.dtype(d).name)
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture
def cupy(monkeypatch):
    """Two CUDA devices in host memory: kernels that are launched on them run on the emulator."""
    fake = FakeCupy(devices=2)
    caches = (devices.cuda_missing, devices.cuda_device, dispatch.unavailable)
    for cached in caches:
        cached.cache_clear()
    forget_calls()
    for name in ("GPU_OPS_DEVICE", "GPU_OPS_BACKEND", "GPU_OPS_ARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr("gpu_ops.kernels.compiler.jit.load", fake.load)
    yield fake
    for cached in caches:
        cached.cache_clear()
    forget_calls()
