"""``python -m gpu_ops`` and its report, with and without devices."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

import gpu_ops
from gpu_ops import __main__ as cli
from gpu_ops import environment as env
from tests.support.processes import python


class FakeNvml:
    """Fake of the part of NVML that is used: one card, or an error."""

    class NVMLError(Exception):
        pass

    def __init__(self, name="NVIDIA GeForce RTX 3090 Ti", capability=(8, 6), fails=None):
        self.name, self.capability, self.fails, self.shut_down = name, capability, fails, False

    def nvmlInit(self):
        if self.fails == "init":
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):
        self.shut_down = True

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12080

    def nvmlSystemGetDriverVersion(self):
        return "570.86"

    def nvmlDeviceGetCount(self):
        if self.fails == "count":
            raise self.NVMLError("Insufficient Permissions")
        return 0 if self.fails == "none" else 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return self.name

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=24 * 2**30)


@pytest.fixture
def nvml(monkeypatch):
    def install(**options):
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: object())
        return fake

    monkeypatch.delenv("GPU_OPS_ARCH", raising=False)
    return install


def test_a_known_card_gets_its_preset(nvml):
    fake = nvml()
    facts = env.environment()
    (card,) = facts.cuda_devices
    assert (card.name, card.compute_capability, card.preset) == (fake.name, (8, 6), "RTX 3090 Ti")
    assert facts.preset == "RTX 3090 Ti"
    assert facts.driver == "570.86 (CUDA 12.8)"
    assert facts.cuda_missing is None
    assert fake.shut_down


def test_an_unknown_card_gets_its_architectures_preset(nvml):
    nvml(name="NVIDIA GeForce RTX 3070 Laptop GPU")
    assert env.environment().preset == "sm_86"


def test_a_card_older_than_any_preset_gets_none(nvml):
    nvml(name="Tesla P100-PCIE-16GB", capability=(6, 0))
    facts = env.environment()
    assert facts.preset is None
    assert "6.0 is older than any preset" in facts.preset_reason


@pytest.mark.parametrize(
    ("fails", "says"),
    [("init", "Driver Not Loaded"), ("count", "Insufficient Permissions"), ("none", "reports no device")],
)
def test_no_device_comes_with_the_reason(nvml, fails, says):
    nvml(fails=fails)
    facts = env.environment()
    assert facts.cuda_devices == ()
    assert says in facts.cuda_missing
    assert "GPU_OPS_ARCH=sm_86" in facts.preset_reason


def test_the_variable_selects_a_preset_and_tells_when_it_is_wrong(nvml, monkeypatch):
    nvml()
    monkeypatch.setenv("GPU_OPS_ARCH", "H200")
    assert env.environment().preset == "H200"
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_1")
    facts = env.environment()
    assert facts.preset is None
    assert "GPU_OPS_ARCH: no preset for" in facts.preset_reason
    assert facts.variables["GPU_OPS_ARCH"] == "sm_1"


def test_a_missing_backend_says_why(monkeypatch):
    monkeypatch.setattr(env, "unavailable", lambda device, backend: f"no {backend} here")
    monkeypatch.setattr(env, "cache_folder", lambda: pytest.fail("Numba is imported"))
    facts = env.environment()
    assert all(row.missing for row in facts.backends)
    assert facts.caches["CPU"] == "nowhere: no numba here"


def test_a_command_that_installs_something_is_shown_once(monkeypatch, capsys):
    missing = {"cpu": None, "cuda": "no CuPy; pip install it", "emulator": "no NVRTC; pip install it"}
    monkeypatch.setattr(env, "unavailable", lambda device, backend: missing[device])
    assert cli.main([]) == 0
    assert capsys.readouterr().out.count("pip install it") == 1


def test_json_is_the_environment():
    out = json.loads(python("-m", "gpu_ops", "--json"))
    assert out["cpu"]["threads"] >= 1
    assert out["versions"]["numpy"]
    assert {"device": "cpu", "backend": "reference", "missing": None} in out["backends"]


def test_tables_show_devices_backends_versions_and_folders():
    printed = python("-m", "gpu_ops")
    for word in ("cpu", "threads", "preset", "numba", "reference", "numpy", "numba_cpu"):
        assert word in printed


def test_version():
    assert python("-m", "gpu_ops", "--version").strip() == f"gpu_ops {gpu_ops.__version__}"


def test_a_card_is_shown(nvml, capsys):
    nvml()
    assert cli.main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "RTX 3090 Ti" in shown
    assert "sm_86" in shown


def test_no_number_of_jobs_below_one(capsys):
    with pytest.raises(SystemExit):
        cli.main(["warmup", "--jobs", "0"])
    assert "at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["warmup", "--jobs", "ten"])
    assert "argument --jobs: must be a whole number of at least 1, got 'ten'" in capsys.readouterr().err
