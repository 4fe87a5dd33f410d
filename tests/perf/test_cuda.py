"""perf on a fake of CuPy: a clean cache, warm clocks, the right device in NVML."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from perf import machine
from perf.stats import Power


class Array:
    """Array on the device that logs its uses."""

    def __init__(self, log):
        self.log = log

    def fill(self, value):
        self.log.append("write")

    def view(self, dtype):
        return self

    def max(self):
        self.log.append("read")


@pytest.fixture
def log():
    return []


@pytest.fixture
def cuda(cupy, log, monkeypatch):
    """perf.cuda on the fake, whose clock advances by 1 s per query and whose energy by 200 J."""
    now = iter(range(10_000))

    class Event:
        def __init__(self, **kind):
            pass

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

    cupy.uint8, cupy.uint64, cupy.float16 = np.uint8, np.uint64, np.float16
    cupy.cuda.MemoryHook, cupy.cuda.Event = object, Event
    cupy.cuda.get_elapsed_time = lambda start, end: 3.0
    cupy.cuda.Device = lambda: SimpleNamespace(synchronize=lambda: log.append("wait"))
    monkeypatch.delitem(sys.modules, "perf.cuda", raising=False)
    module = importlib.import_module("perf.cuda")
    monkeypatch.setattr(module, "_scratch", lambda: Array(log))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    yield module
    sys.modules.pop("perf.cuda")
    del importlib.import_module("perf").cuda


def test_the_cache_is_left_without_lines_to_write_back(cuda, log):
    assert cuda.timed(lambda: log.append("call")) == 3e-3
    assert log == ["write", "read", "record", "call", "record", "wait"]


def test_a_limit_is_measured_when_the_clocks_are_up(cuda, log, monkeypatch):
    monkeypatch.setattr(cuda, "_WARM_SECONDS", 5)
    assert cuda.best(lambda: log.append("call"), 3) == 3e-3
    assert log.count("call") == 4 + 3


@pytest.fixture
def nvml(monkeypatch):
    """Fake NVML with two devices, the second of which is CuPy's current one."""
    spent = iter(range(0, 10**9, 200_000))
    module = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"device {index}",
        nvmlDeviceGetHandleByPciBusId=lambda bus: f"device at {bus}",
        nvmlDeviceGetTotalEnergyConsumption=lambda device: next(spent),  # mJ
        nvmlDeviceGetClockInfo=lambda device, which: {1: 1500, 2: 9000}[which],
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_nvml_follows_the_current_device(cupy, nvml, monkeypatch):
    cupy.cuda.runtime.deviceGetPCIBusId = lambda ordinal: f"0000:0{ordinal}:00.0"
    with cupy.cuda.Device(1):
        assert machine.nvml_device() == (nvml, "device at 0000:01:00.0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert machine.nvml_device() == (nvml, "device 0")


def test_energy_and_clocks_of_a_call(cuda, nvml, log, monkeypatch):
    monkeypatch.setattr(cuda, "nvml_device", lambda: (nvml, "device"))
    power = cuda.power(lambda: log.append("call"), 4)
    calls = log.count("call") - 1  # the first is not measured
    assert calls == 3 * cuda._BATCH
    assert power == Power(200 / calls, 200 / 5, 1500, 9000)
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", lambda device: 1 / 0)
    assert cuda.power(lambda: None, 4) is None
