"""The emulator as a device: its record of each array, its refusals, and the launches that explain() reports."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.core.device import EmulatorDevice, compiler_missing
from gpu_ops.emulator import EmulatorError, SanitizerError
from gpu_ops.errors import OptionError
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel
from gpu_ops.kernels.program import Builder, Launch, Limits
from tests.support.compilers import needs_numba_cuda, needs_nvrtc

SOURCE = """
extern "C" __global__ void copy(const unsigned short* from, unsigned short* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
extern "C" __global__ void fill_shared(int* to, int n) {
    extern __shared__ int row[];
    row[threadIdx.x] = 3;
    __syncthreads();
    if (threadIdx.x < n) to[threadIdx.x] = row[n - 1 - threadIdx.x];
}
extern "C" __global__ void wait_for_next(volatile int* here, int* to) {
    here[blockIdx.x] = 1;
    while (here[(blockIdx.x + 1) % gridDim.x] == 0) {}
    to[blockIdx.x] = 1;
}
"""


@pytest.fixture
def kernels(tmp_path):
    """Kernels of SOURCE by entry."""
    (tmp_path / "small.cu").write_text(SOURCE)
    return lambda entry: CudaKernel("small", entry, folder=tmp_path)


def launch(device, kernel, grid, block, args, shared=0):
    device.link(Launch(kernel, grid, block, tuple(args), shared))({})


def zeros(device, size):
    """Array that kernels may read at once."""
    x = np.zeros(size, np.int32)
    device.name("zeros", x)
    return x


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("GPU_OPS_ARCH", "GPU_OPS_SANITIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_emulator_stands_for_the_card_that_the_environment_names(monkeypatch):
    device = EmulatorDevice()
    limits = device.limits
    assert (limits.arch, limits.smem_per_block_optin) == ("sm_80", 163 * 1024)
    assert "sm_80" in str(device)
    assert "the default; GPU_OPS_ARCH" in str(device)
    monkeypatch.setenv("GPU_OPS_ARCH", "RTX 4090")
    device = EmulatorDevice()
    limits = device.limits
    assert (limits.arch, limits.sms, limits.smem_per_block_optin) == ("sm_89", 128, 99 * 1024)
    assert "from GPU_OPS_ARCH" in str(device)
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_20")
    with pytest.raises(OptionError, match="GPU_OPS_ARCH: no preset"):
        EmulatorDevice()


@needs_nvrtc
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_a_kernel_in_cuda_runs_on_numpy_arrays(kernels, dtype):
    device = EmulatorDevice()
    x = np.arange(100).astype(dtype)
    y = device.empty((100,), dtype, "y")
    launch(device, kernels("copy"), (4,), (32,), [x, y, np.int32(100)])
    assert y.tobytes() == x.tobytes()


@needs_numba_cuda
def test_a_numba_kernel_runs_on_strided_numpy_arrays():
    from numba import cuda

    def double(x, y):
        i = cuda.grid(1)
        if i < x.shape[0]:
            y[i] = x[i] + x[i]

    device = EmulatorDevice()
    kernel = NumbaKernel(double, "void(float32[:], float32[:])", "double")
    x = np.arange(20, dtype=np.float32)[::2]
    y = device.empty((10,), np.float32, "workspace")
    launch(device, kernel, (1,), (32,), [x, y])
    np.testing.assert_array_equal(y, 2 * x)


@needs_nvrtc
def test_workspace_read_before_a_kernel_wrote_it_is_a_fault_by_name(kernels):
    device = EmulatorDevice()
    partial = device.empty((64,), np.float16, "partial")
    out = np.zeros(64, np.float16)
    with pytest.raises(SanitizerError, match="partial"):
        launch(device, kernels("copy"), (2,), (32,), [partial, out, np.int32(64)])
    launch(device, kernels("copy"), (2,), (32,), [out, partial, np.int32(64)])
    launch(device, kernels("copy"), (2,), (32,), [partial, out, np.int32(64)])  # written by now
    assert not out.any()


@needs_nvrtc
def test_a_result_that_is_an_input_holds_something(kernels):
    """With ``out=x`` the array is named twice, and is readable."""
    x = np.ones(32, np.float16)
    for names in (("x", True), ("out", False)), (("out", False), ("x", True)):
        device = EmulatorDevice()
        for name, written in names:
            device.name(name, x, written=written)
        launch(device, kernels("copy"), (1,), (32,), [x, x, np.int32(32)])
    with pytest.raises(SanitizerError, match="past the end of `x`: element 32 of 32"):
        launch(device, kernels("copy"), (2,), (32,), [x, x, np.int32(33)])


@needs_nvrtc
def test_the_sanitizer_can_be_switched_off(kernels, monkeypatch):
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")
    device = EmulatorDevice()
    assert "sanitizer off" in str(device)
    y = np.zeros(32, np.float16)
    launch(
        device, kernels("copy"), (1,), (32,), [device.empty((32,), np.float16, "workspace"), y, np.int32(32)]
    )
    assert (y.view(np.uint16) == 0xFFFF).all()  # elements that were never written are NaN


@needs_nvrtc
def test_what_a_driver_refuses_the_emulator_refuses(kernels, monkeypatch):
    monkeypatch.setenv("GPU_OPS_ARCH", "sm_75")
    device = EmulatorDevice()
    y, kernel = np.zeros(8, np.int32), kernels("fill_shared")
    launch(device, kernel, (1,), (64,), [y, np.int32(8)], shared=64 * 1024)
    assert (y == 3).all()
    with pytest.raises(EmulatorError, match="a block of sm_75 may have 65536"):
        launch(device, kernel, (1,), (64,), [y, np.int32(8)], shared=64 * 1024 + 4)
    with pytest.raises(EmulatorError, match="grid"):
        launch(device, kernel, (1, 65536), (64,), [y, np.int32(8)], shared=256)


@needs_nvrtc
def test_blocks_of_a_cooperative_launch_run_together_or_not_at_all(kernels, monkeypatch):
    """The grid is 32 blocks of a warp on each of the 56 SMs of an A30, more than the emulator groups by default."""
    monkeypatch.setenv("GPU_OPS_SANITIZE", "0")
    device, limit = EmulatorDevice(), 32 * 56
    kernel = replace(kernels("wait_for_next"), cooperative=True)
    y = device.empty((limit,), np.int32, "workspace")
    launch(device, kernel, (limit,), (32,), [zeros(device, limit), y])
    assert (y == 1).all()
    with pytest.raises(
        EmulatorError, match=r"a cooperative grid of .* 32 run at the same time on each of 56 SMs"
    ):
        launch(device, kernel, (limit + 1,), (32,), [y, y])
    with pytest.raises(SanitizerError, match="polling memory that nobody changes"):
        launch(device, kernels("wait_for_next"), (limit,), (32,), [zeros(device, limit), y])


def test_an_empty_grid_launches_nothing(kernels):
    builder = Builder(EmulatorDevice().limits)
    builder.launch(kernels("copy"), (0,), (32,), [np.int32(0)])
    builder.launch(kernels("copy"), (4, 0), (32,), [np.int32(0)])
    assert builder.program().steps == ()


def test_a_builder_tells_what_is_launched_and_allocates_nothing(tmp_path):
    builder = Builder(Limits())
    kernel = CudaKernel("absent", "nothing", (("T", "bf16"),), folder=tmp_path)
    huge = builder.empty((1 << 20, 3, 1 << 14), np.float32)
    assert huge.strides == (3 << 16, 1 << 16, 4)
    assert huge.is_whole
    assert builder.empty((), np.int8).shape == builder.zeros((), np.int8).shape == ()
    builder.launch(kernel, (56, 2, 1), (128,), [huge], shared=1024)
    builder.launch(kernel, (1, 1), (32, 4), [huge])
    program = builder.program()
    assert program.workspace_bytes == (3 << 36) + 2 * 256
    assert [w.zeroed for w in program.workspaces] == [False, False, True]
    assert str(program).splitlines() == [
        "nothing bfloat16: grid 56 x 2, block 128, 1024 bytes of dynamic shared memory",
        "nothing bfloat16: grid 1, block 32 x 4",
    ]


def test_a_missing_compiler_is_told_with_the_remedy(monkeypatch):
    from gpu_ops.errors import KernelCompileError
    from gpu_ops.kernels.compiler import nvrtc

    def absent():
        raise KernelCompileError("NVRTC is not available; pip install '.[emulator]'", "long log")

    compiler_missing.cache_clear()
    try:
        monkeypatch.setattr(nvrtc, "version", absent)
        monkeypatch.setattr("gpu_ops.core.device.importlib.util.find_spec", lambda name: None)
        assert compiler_missing("raw") == "NVRTC is not available; pip install '.[emulator]'"
        assert 'pip install ".[emulator]"' in compiler_missing("numba")
    finally:
        compiler_missing.cache_clear()
