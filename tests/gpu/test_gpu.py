"""Tests on a real GPU: arrays of CuPy, torch and Numba themselves, streams, graphs, and agreement with the emulator.

Tests that need no GPU are in test_cuda_arrays.py and in the test file of each op.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gpu_ops
from gpu_ops import training
from gpu_ops.core import device as devices
from gpu_ops.core.device import cuda_missing, current_device
from gpu_ops.errors import DeviceError, DTypeError, ShapeError
from tests.support.compare import random
from tests.support.cuda_cases import BFLOAT16, to_cupy, to_numpy

pytestmark = pytest.mark.gpu

ROWS, COLS = 37, 1000


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13]'")


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch", reason="needs torch with CUDA")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@pytest.fixture(params=["raw", "numba"])
def name(request):
    return request.param


@pytest.fixture(params=[np.float16, BFLOAT16, np.float32], ids=["float16", "bfloat16", "float32"])
def operands(request, rng):
    """Arrays x, residual and weight."""
    dtype = np.dtype(request.param)
    return random(rng, (ROWS, COLS), dtype), random(rng, (ROWS, COLS), dtype), random(rng, (COLS,), dtype)


def ulps(a, b):
    """Largest distance in units in the last place, and the share of equal elements."""
    bits = {2: np.int16, 4: np.int32}[a.dtype.itemsize]
    a, b = (x.view(bits).astype(np.int64) for x in (a, b))
    low = np.iinfo(bits).min
    a, b = (np.where(x < 0, low - x, x) for x in (a, b))  # so that neighbours differ by one
    return int(np.abs(a - b).max()), float((a == b).mean())


@pytest.fixture
def like_the_gpu(cupy, monkeypatch):
    """Let the emulator simulate this GPU, so that both get the same kernels and the same grid."""
    gpu = current_device("cuda").limits
    monkeypatch.setenv("GPU_OPS_ARCH", gpu.arch)

    class Emulator(devices.EmulatorDevice):
        def __init__(self):
            super().__init__()
            self.limits = replace(self.limits, sms=gpu.sms, smem_per_block_optin=gpu.smem_per_block_optin)

    monkeypatch.setattr(devices, "EmulatorDevice", Emulator)


# Both run the same program, and IEEE arithmetic determines the results. The one approximation is rsqrt.approx in
# the forward CUDA C++ kernel: within two units on a GPU, rounded correctly by the emulator.
@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_the_emulator_and_the_gpu_agree_to_the_last_bits(
    like_the_gpu, operands, name, casting, record_property
):
    x, residual, weight = operands
    options = {"casting": casting, "backend": name}
    gpu, emulated = (
        gpu_ops.rmsnorm(x, weight, residual=residual, return_rstd=True, device=device, **options)
        for device in ("cuda", "emulator")
    )
    s, rstd = emulated[1:]
    gpu += gpu_ops.rmsnorm_backward(residual, s, weight, rstd, device="cuda", **options)
    emulated += gpu_ops.rmsnorm_backward(residual, s, weight, rstd, device="emulator", **options)
    allowed = dict.fromkeys(("y", "s", "rstd", "dx", "dweight"), 0)
    if name == "raw":
        allowed |= {"rstd": 2, "y": 2 if x.dtype.itemsize == 2 else 5}
    for (what, limit), a, b in zip(allowed.items(), gpu, emulated, strict=True):
        distance, equal = ulps(a, b)
        record_property(what, f"{distance} units at most, {100 * equal:.2f} % equal")
        assert distance <= limit, f"{what}: {distance} units apart, {100 * equal:.2f} % equal"


def test_cupy_arrays(cupy, operands, name):
    x, residual, weight = operands
    expected = gpu_ops.rmsnorm(x, weight, residual=residual, return_rstd=True, device="cuda", backend=name)
    actual = gpu_ops.rmsnorm(
        to_cupy(x), to_cupy(weight), residual=to_cupy(residual), return_rstd=True, backend=name
    )
    for g, w in zip(actual, expected, strict=True):
        assert isinstance(g, cupy.ndarray)
        assert to_numpy(g).tobytes() == w.tobytes()
    out = to_cupy(np.zeros_like(x))
    assert gpu_ops.rmsnorm(to_cupy(x), to_cupy(weight), out=out, backend=name) is out
    assert to_numpy(out).tobytes() == gpu_ops.rmsnorm(x, weight, device="cuda", backend=name).tobytes()
    joined = to_cupy(np.concatenate([x, residual], axis=1))
    strided = gpu_ops.rmsnorm(joined[:, :COLS], to_cupy(weight), backend=name)
    assert to_numpy(strided).tobytes() == to_numpy(out).tobytes()


def test_mistakes_with_cupy_arrays(cupy):
    x, weight = cupy.ones((4, 64), np.float32), cupy.ones(64, np.float32)
    with pytest.raises(ShapeError, match="out shares memory with x"):
        gpu_ops.rmsnorm(x[1:], weight, out=x[:-1])
    with pytest.raises(DeviceError, match="weight is in host memory"):
        gpu_ops.rmsnorm(x, np.ones(64, np.float32))
    with pytest.raises(DTypeError, match="weight is float64"):
        gpu_ops.rmsnorm(x, weight.astype(np.float64))


def test_the_call_runs_on_cupys_current_stream(cupy, name):
    x, weight = cupy.ones((512, 4096), np.float32), cupy.ones(4096, np.float32)
    gpu_ops.rmsnorm(x, weight, backend=name)  # compiled and loaded
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cupy.zeros_like(x)
        for _ in range(50):  # long enough that another stream would read the array before it is written
            x2 = gpu_ops.rmsnorm(x, weight, out=y, backend=name)
        total = x2.sum()
    stream.synchronize()
    np.testing.assert_allclose(float(total), x.size, rtol=1e-5)


def test_a_call_with_out_can_be_captured_in_a_graph(cupy):
    x, weight = cupy.ones((64, 512), np.float32), cupy.ones(512, np.float32)
    y = cupy.zeros_like(x)
    workspace = cupy.empty(gpu_ops.workspace_size("rmsnorm", x, weight, out=y), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu_ops.rmsnorm(x, weight, out=y, workspace=workspace)
        stream.synchronize()
        stream.begin_capture()
        gpu_ops.rmsnorm(x, weight, out=y, workspace=workspace)
        graph = stream.end_capture()
        y.fill(0)
        x *= 3
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_allclose(cupy.asnumpy(y), 1, rtol=1e-5)


def test_torch_tensors(torch, operands, name):
    x, _, weight = operands

    def tensor(a):
        if a.dtype == BFLOAT16:
            return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(a.copy()).cuda()

    def bits(t):
        return t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32).cpu().numpy().tobytes()

    expected = gpu_ops.rmsnorm(x, weight, device="cuda", backend=name)
    actual = gpu_ops.rmsnorm(tensor(x), tensor(weight), backend=name)
    assert isinstance(actual, torch.Tensor)
    assert actual.is_cuda
    assert bits(actual) == expected.tobytes()
    out = torch.zeros_like(tensor(x))
    assert gpu_ops.rmsnorm(tensor(x), tensor(weight), out=out, backend=name) is out
    assert bits(out) == expected.tobytes()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = gpu_ops.rmsnorm(tensor(x), tensor(weight), backend=name)
        assert bits(y) == expected.tobytes()
    leaf = tensor(x).requires_grad_()
    with pytest.raises(DTypeError, match=r"x\.detach\(\)"):
        gpu_ops.rmsnorm(leaf, tensor(weight))


def test_numba_arrays(cupy, rng):
    from numba import cuda

    x, weight = random(rng, (ROWS, COLS), np.float32), random(rng, (COLS,), np.float32)
    out = cuda.to_device(np.zeros_like(x))
    y = gpu_ops.rmsnorm(cuda.to_device(x), cuda.to_device(weight))
    assert cuda.is_cuda_array(y)
    assert not isinstance(y, cupy.ndarray)
    assert gpu_ops.rmsnorm(cuda.to_device(x), cuda.to_device(weight), out=out) is out
    assert y.copy_to_host().tobytes() == out.copy_to_host().tobytes()
    assert out.copy_to_host().tobytes() == gpu_ops.rmsnorm(x, weight, device="cuda").tobytes()


def test_the_device_says_what_it_is(cupy):
    assert cuda_missing() is None
    device = current_device("cuda").limits
    assert device.arch == f"sm_{cupy.cuda.Device().compute_capability}"
    assert device.sms > 0
    assert device.smem_per_block_optin >= 64 * 1024
    x = cupy.ones((4, 64), np.float32)
    assert device.arch in str(gpu_ops.explain("rmsnorm", x, x[0]))


@pytest.mark.parametrize("dtype", [np.bool_, BFLOAT16, np.float32, np.float64], ids=str)
def test_states_are_saved_from_the_gpu_and_loaded_to_it(dtype, cupy, tmp_path, rng):
    host = {"w": (rng.random((5, 7)) * 3).astype(dtype), "t": (rng.random((4, 6)) * 3).astype(dtype).T}
    host["zero"] = host["w"][0, 0].reshape(())
    training.save_state(tmp_path / "s", {name: to_cupy(x) for name, x in host.items()})
    like = {name: to_cupy(np.zeros_like(x)) for name, x in host.items()}
    for loaded, _ in (
        training.load_state(tmp_path / "s", device="cuda"),
        training.load_state(tmp_path / "s", like=like),
    ):
        for name, x in host.items():
            assert isinstance(loaded[name], cupy.ndarray)
            np.testing.assert_array_equal(to_numpy(loaded[name]), x)
