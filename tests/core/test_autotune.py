"""autotune(): the choice that wins, its storage, and cases where it is not used.

CuPy is a fake (fake_cupy.py), kernels are recorded and not run, and a stopwatch returns the times that a test sets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_ops
from gpu_ops.core import device as devices
from gpu_ops.core.op import forget_calls
from gpu_ops.errors import DeviceError, KernelCompileError, OptionError
from gpu_ops.kernels.attention import config as attention_config
from gpu_ops.kernels.attention.config import DeviceLimits, ForwardProblem, select_config
from gpu_ops.kernels.common import tuning
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray
from tests.support.processes import PATIENCE

pytestmark = needs_nvrtc

MODULE = sys.modules["gpu_ops.core.autotune"]
A30 = DeviceLimits(56, 163 * 1024)  # the card that FakeCupy simulates
SHAPE = (1, 256, 8, 64)
PROBLEM = ForwardProblem(2, 1, 8, 8, 256, 256, 64, 64)


def arrays(shape=SHAPE):
    return [FakeArray(np.zeros(shape, np.float16)) for _ in range(3)]


def restart():
    """Simulate a new process."""
    tuning.forget()
    forget_calls()


@pytest.fixture
def gpu(cupy, monkeypatch, tmp_path):
    """Fake GPU. ``kernels``: launched kernels. ``times``: seconds by BLOCK_N of the kernel, 1 for others."""
    state = SimpleNamespace(kernels=[], times={}, folder=tmp_path / "cache")

    def load(kernel):
        def launch(grid, block, args, shared):
            state.kernels.append((dict(kernel.defines), grid))

        launch.arguments = list
        return launch

    def stopwatch(run):
        run()
        seconds = state.times.get(state.kernels[-1][0]["BLOCK_N"], 1.0)
        if isinstance(seconds, Exception):
            raise seconds
        return seconds

    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(state.folder))
    monkeypatch.setattr("gpu_ops.kernels.compiler.jit.load", load)
    monkeypatch.setattr(MODULE, "Stopwatch", lambda: stopwatch)
    restart()
    yield state
    restart()


def launched(gpu, shape=SHAPE, **options):
    """Tile of a call: BLOCK_M, BLOCK_N and the grid."""
    gpu.kernels.clear()
    gpu_ops.attention(*arrays(shape), **options)
    ((defines, grid),) = gpu.kernels
    return defines["BLOCK_M"], defines["BLOCK_N"], grid


def stored(gpu):
    (path,) = (gpu.folder / "tuning").glob("*.json")
    return path


def test_the_fastest_wins_and_is_used_from_then_on(gpu):
    model = launched(gpu)
    assert model[1] != 16
    gpu.times = {16: 0.5}
    report = gpu_ops.autotune("attention", *arrays())
    assert set(report.seconds) == set(attention_config.candidates(PROBLEM, A30))
    assert report.winner == min(report.seconds, key=report.seconds.get)
    assert " x 16 on " in report.winner
    assert report.model == attention_config.label(select_config(PROBLEM, A30))
    assert launched(gpu)[1] == 16
    text = str(report)
    assert "500000.0 us  winner" in text
    assert "1000000.0 us  model" in text
    assert str(stored(gpu)) in text
    assert "NVIDIA A30" in text
    plan = str(gpu_ops.explain("attention", *arrays()))
    assert f"tuned: {report.winner}, the fastest" in plan
    assert "x16 warps" in plan


def test_what_measuring_cannot_tell_apart_the_model_decides(gpu):
    before = launched(gpu)
    gpu.times = {16: 0.995}
    report = gpu_ops.autotune(gpu_ops.attention, *arrays())
    assert report.op == "attention"
    assert report.winner == report.model
    assert launched(gpu) == before


def test_later_processes_use_it(gpu):
    gpu.times = {16: 0.5}
    report = gpu_ops.autotune("attention", *arrays())
    restart()
    assert launched(gpu)[1] == 16
    entry = json.loads(stored(gpu).read_text())
    assert (entry["winner"], entry["card"], entry["kernel"]) == (report.winner, "NVIDIA A30", "attention")
    assert entry["problems"] == report.bucket
    assert entry["microseconds"][report.winner] == 5e5


def test_its_file_is_read_once(gpu, monkeypatch):
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    restart()
    reads, read = [], tuning._read
    monkeypatch.setattr(tuning, "_read", lambda *of: reads.append(of) or read(*of))
    for length in (256, 256, 200, 130):
        assert launched(gpu, (1, length, 8, 64))[1] == 16
    assert len(reads) == 1


def test_it_holds_for_like_problems_only(gpu):
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    block_m, block_n, grid = launched(gpu, (1, 140, 5, 64))
    assert block_n == 16
    assert grid == (-(-140 // block_m), 5, 1)
    for shape in ((1, 257, 8, 64), (1, 128, 8, 64), (2, 256, 8, 64), (1, 256, 4, 64), (1, 256, 8, 96)):
        assert launched(gpu, shape)[1] != 16, shape
    assert launched(gpu, causal=True)[1] != 16
    plan = str(gpu_ops.explain("attention", *arrays(), causal=True))
    assert "tuned" not in plan


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "null", "{}", '{"winner": 3}', "\x00\xff", '{"card": "another"}']
)
def test_a_corrupt_file_is_ignored_and_written_again(gpu, content):
    before = launched(gpu)
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    good = stored(gpu).read_bytes()
    stored(gpu).write_bytes(content.encode("latin-1"))
    restart()
    if content in ("{}", '{"winner": 3}', '{"card": "another"}'):  # other JSON: no warning
        assert launched(gpu) == before
    else:
        with pytest.warns(UserWarning, match="ignoring the measured choice"):
            assert launched(gpu) == before
        assert launched(gpu) == before  # and warns once
    gpu_ops.autotune("attention", *arrays())
    assert stored(gpu).read_bytes() == good
    assert launched(gpu)[1] == 16


def test_an_unwritable_cache_keeps_it_for_this_process(gpu, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "file"))
    gpu.times = {16: 0.5}
    with pytest.warns(UserWarning, match="the kernel cache is not used"):
        report = gpu_ops.autotune("attention", *arrays())
    assert report.path is None
    assert "nowhere: no cache folder is writable" in str(report)
    assert launched(gpu)[1] == 16


def test_a_full_disk_keeps_it_for_this_process(gpu, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(tuning, "write_whole", full)
    gpu.times = {16: 0.5}
    with pytest.warns(UserWarning, match=r"is not kept: No space left"):
        assert gpu_ops.autotune("attention", *arrays()).path is None
    assert launched(gpu)[1] == 16


def test_other_sources_or_another_compiler_make_it_stale(gpu, monkeypatch):
    before = launched(gpu)
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    monkeypatch.setattr(tuning, "source_key", lambda *stems: "edited")
    restart()
    assert launched(gpu) == before


def test_a_winner_that_the_kernel_has_lost_is_not_used(gpu):
    before = launched(gpu)
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    entry = json.loads(stored(gpu).read_text())
    stored(gpu).write_text(json.dumps(entry | {"winner": "256 x 256 on 4 x 1 warps"}))
    restart()
    assert launched(gpu) == before


def test_another_card_measures_anew(gpu, monkeypatch):
    before = launched(gpu)
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    device = devices.cuda_device(0)
    monkeypatch.setattr(device, "limits", replace(device.limits, card="NVIDIA A100"))
    forget_calls()
    assert launched(gpu) == before


def test_the_emulator_takes_what_no_measurement_decided(gpu):
    gpu.times = {16: 0.5}
    gpu_ops.autotune("attention", *arrays())
    q, k, v = np.zeros((3, *SHAPE), np.float16)
    plan = str(gpu_ops.explain("attention", q, k, v, device="emulator"))
    assert "x16 warps" not in plan
    assert "tuned" not in plan


def test_a_candidate_that_cannot_run_is_told_and_left_out(gpu):
    gpu.times = {16: KernelCompileError("it does not compile", "long log"), 32: MemoryError("no room")}
    report = gpu_ops.autotune("attention", *arrays())
    assert {why for why in report.failed.values()} == {"it does not compile", "no room"}
    assert report.winner in report.seconds
    assert "failed: it does not compile" in str(report)


def test_a_candidate_that_fails_later_is_told_and_left_out(gpu):
    fastest = iter([0.5] * 9 + [RuntimeError("it was here")] * 99)
    gpu.times = SimpleNamespace(get=lambda block_n, default: next(fastest) if block_n == 16 else default)
    report = gpu_ops.autotune("attention", *arrays())
    assert set(report.failed.values()) == {"it was here"}
    assert report.winner in report.seconds.keys() - report.failed.keys()


def test_a_candidate_that_the_driver_refuses_is_left_out(gpu):
    gpu.times = {64: RuntimeError("too many resources requested")}
    report = gpu_ops.autotune("attention", *arrays())
    assert set(report.failed.values()) == {"too many resources requested"}
    assert launched(gpu)[1] != 64


def test_if_no_candidate_runs_the_first_failure_is_told(gpu):
    gpu.times = dict.fromkeys((16, 32, 64, 128), RuntimeError("too many resources requested"))
    with pytest.raises(
        DeviceError, match=r"no way to run attention works here.*too many resources requested"
    ):
        gpu_ops.autotune("attention", *arrays())
    assert not gpu.folder.exists()


def test_decoding_may_divide_its_keys_otherwise(gpu, monkeypatch):
    q = FakeArray(np.zeros((1, 1, 8, 64), np.float16))
    k = FakeArray(np.zeros((1, 8192, 2, 64), np.float16))
    used = FakeArray(np.full(1, 8192, np.int32))

    def grid():
        gpu.kernels.clear()
        gpu_ops.attention_decode(q, k, k, seqused_k=used)
        return gpu.kernels[0][1]

    def by_grid(run):
        run()
        blocks = gpu.kernels[-2][1][0] if "SPLIT" not in gpu.kernels[-1][0] else 1
        return 1.0 / blocks

    before = grid()
    monkeypatch.setattr(MODULE, "Stopwatch", lambda: by_grid)
    report = gpu_ops.autotune("attention_decode", q, k, k, seqused_k=used)
    assert report.winner.endswith("divided x 2")
    assert grid()[0] >= 2 * before[0]
    restart()
    assert grid()[0] >= 2 * before[0]


def test_two_processes_at_once(tmp_path):
    """Each writes the same file 300 times; readers meanwhile see a complete file of either."""
    code = (
        "import sys; from gpu_ops.kernels.common import tuning\n"
        "from gpu_ops.kernels.attention.config import SPACE\n"
        "from gpu_ops.kernels.attention.config import DeviceLimits, ForwardProblem\n"
        "problem = ForwardProblem(2, 1, 8, 8, 256, 256, 64, 64)\n"
        "choice = tuning.TuningChoice(SPACE, problem, DeviceLimits(56, 2**17), 'card', None)\n"
        "tuning.source_key = lambda *stems: 'sources'\n"
        "for i in range(300):\n"
        "    path = tuning.keep(choice, sys.argv[1] * 1000, {})\n"
        "    tuning.forget()\n"
        "    found = tuning._read(SPACE, 'card', choice.bucket)\n"
        "    assert found in ('a' * 1000, 'b' * 1000), found\n"
        "assert len(list(path.parent.iterdir())) <= 2, 'temporary files stay behind'\n"
    )
    environment = {**os.environ, "GPU_OPS_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen([*command, name], env=environment, stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    assert [(p.communicate(timeout=PATIENCE)[1], p.returncode) for p in running] == [("", 0), ("", 0)]
    (path,) = (tmp_path / "tuning").iterdir()
    assert json.loads(path.read_text())["winner"] in ("a" * 1000, "b" * 1000)


def test_there_must_be_something_to_measure(gpu):
    q, k, v = np.zeros((3, *SHAPE), np.float16)
    with pytest.raises(DeviceError, match=r"in host memory.*cupy.asarray"):
        gpu_ops.autotune("attention", q, k, v)
    with pytest.raises(DeviceError, match="in host memory"):
        gpu_ops.autotune(gpu_ops.attention, q, k, v, device="cuda")
    with pytest.raises(DeviceError, match=r"the emulator, which counts .* has no times"):
        gpu_ops.autotune("attention", q, k, v, device="emulator")
    x = FakeArray(np.zeros((4, 64), np.float32))
    for on in (x, np.zeros((4, 64), np.float32)):
        with pytest.raises(OptionError, match=r"rmsnorm has nothing to choose: .*; attention, .* have"):
            gpu_ops.autotune("rmsnorm", on, on[0])
    with pytest.raises(OptionError, match=r"autotune.*op.*'atention'"):
        gpu_ops.autotune("atention", q, k, v)
    with pytest.raises(gpu_ops.errors.ShapeError):
        gpu_ops.autotune("attention", *arrays()[:2], FakeArray(np.zeros((1, 2, 8, 64), np.float16)))
    assert not gpu.kernels


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch, rng):
    """With the real stopwatch the winner is used, and gives the same result."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path))
    restart()
    q, k, v = (cupy.asarray(rng.standard_normal((2, 512, 8, 64)).astype(np.float16)) for _ in range(3))
    before = gpu_ops.attention(q, k, v, causal=True)
    report = gpu_ops.autotune("attention", q, k, v, causal=True)
    assert report.path.is_file()
    assert report.seconds[report.winner] <= 1.01 * min(report.seconds.values())
    assert all(1e-7 < seconds < 1 for seconds in report.seconds.values())
    assert report.winner in str(gpu_ops.explain("attention", q, k, v, causal=True))
    after = gpu_ops.attention(q, k, v, causal=True)
    np.testing.assert_allclose(cupy.asnumpy(after), cupy.asnumpy(before), rtol=0, atol=2e-3)
    restart()
