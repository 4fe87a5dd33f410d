"""One test body, every backend: a test that takes ``backend`` runs on each that can run here.

A test file of an op with CUDA kernels says ``DEVICES = ("cpu", "emulator", "cuda")``; without, it is ``("cpu",)``.
Its ``quick_on_emulator(raw)``, if it has one, says of tests by name, ``"*"`` for all others, which levels of their
parameters run there by default, None for none; the rest is slow. So is what its ``is_slow(parameters)``, if it has
one, says of a test with a backend. Its ``runs(parameters)``, if it has one, says whether a test applies.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections import Counter
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.core import device as devices
from gpu_ops.core import dispatch
from gpu_ops.core.device import compiler_missing, cuda_missing
from gpu_ops.core.dispatch import BACKENDS
from gpu_ops.core.op import forget_calls
from gpu_ops.environment import VARIABLES
from tests.support.choice import chosen_items
from tests.support.fake_cupy import FakeCupy
from tests.support.processes import ROOT
from tests.support.surroundings import keep_last_words, load_hypothesis_profile, restore_signals

restore_signals()
load_hypothesis_profile()

# After 50000 new objects, not 700: among the million objects of compilers and emulated programs, searches for cyclic
# garbage took a third of the time of the tests that use the emulator.
gc.set_threshold(50_000, 10, 100)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.hookimpl(trylast=True)  # after pytest's own plugins
def pytest_configure(config):
    keep_last_words(config)


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
    """Skip what cannot run here, one test of each file for all; leave out float64 on CUDA C++ kernels."""
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:  # another one in each process of pytest-xdist, which then runs nothing
        raise pytest.UsageError(f"{addresses[0]}: a name with an address; give this parameter an id")
    for item in items:
        if _is_slow(item) or _is_slow_on_emulator(item):
            item.add_marker(pytest.mark.slow)
    dropped = [item for item in items if _is_raw_float64(item) or not _applies(item)]
    _drop(config, items, dropped)
    default = [item for item in items if not item.get_closest_marker("slow")]
    chosen = chosen_items(default)
    for item in default:
        if id(item) not in chosen:
            item.add_marker(pytest.mark.full)
    if cuda_missing():
        _collapse(config, items, "gpu", "needs a CUDA device; scripts/gpu_check.sh runs it")
    if not any(map(find_spec, ("torch", "jax", "transformers"))):
        _collapse(
            config, items, "peers", "compares with torch, JAX or transformers; scripts/test_peers.sh runs it"
        )


def _collapse(config, items, mark, reason):
    """Keep one of a file's tests with this mark: it skips, and says how many there are."""
    first, dropped = {}, []
    counts = Counter()
    for item in items:
        if item.get_closest_marker(mark):
            group = item.path, item.get_closest_marker("slow") is not None
            counts[group] += 1
            if first.setdefault(group, item) is not item:
                dropped.append(item)
    for group, item in first.items():
        item.add_marker(pytest.mark.skip(reason=f"{reason} (1 of {counts[group]} here)"))
    _drop(config, items, dropped)


def _drop(config, items, dropped):
    config.hook.pytest_deselected(items=dropped)
    left_out = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in left_out]


def _is_raw_float64(item):
    given = item.callspec.params if hasattr(item, "callspec") else {}
    backend = given.get("backend")
    float64 = given.get("dtype") in (np.float64, "float64")
    return isinstance(backend, dict) and backend["backend"] == "raw" and float64


def _applies(item):
    rule = getattr(item.module, "runs", None)
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return rule is None or "backend" not in given or rule(given)


def _is_slow(item):
    rule = getattr(item.module, "is_slow", None)
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return rule is not None and "backend" in given and rule(given)


def _is_slow_on_emulator(item):
    rule = getattr(item.module, "quick_on_emulator", None)
    given = item.callspec.params if rule and hasattr(item, "callspec") else {}
    backend = given.get("backend")
    if not isinstance(backend, dict) or backend["device"] != "emulator":
        return False
    levels_of = rule(backend["backend"] == "raw")
    quick = levels_of.get(item.originalname, levels_of.get("*", {}))
    return quick is None or any(given[name] not in levels for name, levels in quick.items() if name in given)


def pytest_collection_finish():
    """Exempt the collected items, which stay until the end, from searches for cyclic garbage."""
    gc.collect()
    gc.freeze()


# Above so much resident memory a process drops the emulator's programs, of 5 to 30 MB each, if it has this many.
MOST_MEMORY, PROGRAMS = 800 << 20, 20
STATM = Path("/proc/self/statm")


def pytest_runtest_teardown(item):
    """In a process above MOST_MEMORY, drop emulated programs each time PROGRAMS of them are kept."""
    emulator_run = sys.modules.get("gpu_ops.emulator.run")
    if emulator_run is None or len(emulator_run.link_source.kept) < PROGRAMS or not STATM.exists():
        return
    if int(STATM.read_text().split()[1]) * mmap.PAGESIZE > MOST_MEMORY:
        emulator_run.link_source.drop()


@pytest.fixture(autouse=True)
def _same_environment():
    """Fail a test that changes variables of gpu_ops for the tests after it, which may run in any order."""
    before = _variables()
    yield
    changed = {name for name, _ in before ^ _variables()}
    assert not changed, f"this test changed {', '.join(sorted(changed))} for the whole process"


def _variables():
    """Not those that torch and JAX set when they are imported."""
    return {(k, v) for k, v in os.environ.items() if k.startswith("GPU_OPS_") or k in VARIABLES}


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


@pytest.fixture
def example(monkeypatch):
    """An example by its name, as a module."""

    def load(name):
        spec = spec_from_file_location(name, ROOT / "scripts" / "examples" / f"{name}.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look themselves up
        spec.loader.exec_module(module)
        return module

    return load
