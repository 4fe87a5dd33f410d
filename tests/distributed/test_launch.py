"""Arguments that a launch passes to CuPy, recorded by a fake; no GPU is needed."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_ops.errors import DeviceError
from gpu_ops.kernels.compiler import jit, launch, nvrtc
from gpu_ops.kernels.program import Builder, Limits
from tests.support.compilers import needs_nvrtc, scale, scale_tree
from tests.support.processes import PATIENCE


class Recorder:
    """Fake of the part of CuPy that a launch uses: loads cubins, counts attribute queries, and records launches."""

    def __init__(self):
        self.device, self.capability = 0, "90"
        self.loaded, self.leave, self.launches, self.cooperative, self.asked = [], [], [], [], []
        recorder = self

        class Kernel:
            kernel = SimpleNamespace(ptr=7)

            def __setattr__(self, name, value):
                assert name == "max_dynamic_shared_size_bytes"
                recorder.leave.append((recorder.device, value))

            def __call__(self, grid, block, args, shared_mem):
                recorder.launches.append((grid, block, args, shared_mem))

        class RawModule:
            def __init__(self, path, enable_cooperative_groups):
                self.image = Path(path).read_bytes()
                recorder.cooperative.append(enable_cooperative_groups)

            def get_function(self, name):
                recorder.loaded.append((recorder.device, name, self.image))
                return Kernel()

        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.device),
            Device=lambda: SimpleNamespace(
                compute_capability=self.capability, attributes={"MultiProcessorCount": 10}
            ),
            driver=SimpleNamespace(
                occupancyMaxActiveBlocksPerMultiprocessor=lambda *of: self.asked.append(of) or 2
            ),
        )


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_OPS_CACHE_DIR", str(tmp_path / "cache"))
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    jit.forget()
    yield recorder
    jit.forget()


@pytest.fixture
def kernel(tmp_path):
    return scale(scale_tree(tmp_path / "cuda"))


ARRAY = np.zeros(4, np.float32)


def run(kernel, grid, block, args, *, shared=0):
    launcher = jit.load(kernel)
    launcher(grid, block, launcher.arguments(args), shared)


@needs_nvrtc
def test_the_cubin_of_the_device_is_loaded_once(cupy, kernel):
    for _ in range(2):
        run(kernel, (2, 3), (32,), (ARRAY, ARRAY, 4))
    cupy.device, cupy.capability = 1, "86"
    run(kernel, (1,), (32,), (ARRAY, ARRAY, 4))
    expected = [
        (d, "scale", jit.compile_kernel(kernel, arch).cubin) for d, arch in ((0, "sm_90a"), (1, "sm_86"))
    ]
    assert cupy.loaded == expected
    grid, block, args, shared = cupy.launches[0]
    assert (grid, block, shared) == ((2, 3), (32,), 0)
    assert args[0] is ARRAY
    assert args[2] == 4
    assert args[2].dtype == np.int32  # the parameter's size


@needs_nvrtc
def test_a_kernel_whose_blocks_wait_for_each_other_is_launched_cooperatively(cupy, kernel):
    for each in (kernel, replace(kernel, cooperative=True)):
        run(each, (2,), (32,), (ARRAY, ARRAY, 4))
    assert cupy.cooperative == [False, True]
    assert len(cupy.launches) == 2


@needs_nvrtc
def test_a_cooperative_grid_that_does_not_fit_is_refused(cupy, kernel):
    """CuPy would launch 20 blocks, and they would wait for the others forever."""
    team = replace(kernel, cooperative=True)
    for blocks in (20, 20, 10):
        run(team, (blocks,), (32,), (ARRAY, ARRAY, 4))
    for grid in ((21,), (3, 7)):
        with pytest.raises(
            DeviceError, match=r"scale: its 21 blocks wait for each other, .* runs 20 of them"
        ):
            run(team, grid, (32,), (ARRAY, ARRAY, 4))
    assert cupy.asked == [(7, 32, 0)]  # once
    assert len(cupy.launches) == 3
    run(kernel, (21,), (32,), (ARRAY, ARRAY, 4))


@needs_nvrtc
def test_leave_for_shared_memory_only_grows(cupy, kernel):
    for shared in (0, 1000, 60_000, 1000, 60_000, 90_000, 0):
        run(kernel, (1,), (32,), (ARRAY, ARRAY, 4), shared=shared)
    assert cupy.leave == [(0, 1000), (0, 60_000), (0, 90_000)]
    cupy.device = 1  # each device has its own
    run(kernel, (1,), (32,), (ARRAY, ARRAY, 4), shared=2000)
    assert cupy.leave[3:] == [(1, 2000)]
    assert [shared for *_, shared in cupy.launches] == [0, 1000, 60_000, 1000, 60_000, 90_000, 0, 2000]


@needs_nvrtc
def test_threads_raise_the_leave_together(cupy, kernel):
    sizes = [1000 * i for i in range(1, 33)]
    threads = [
        threading.Thread(target=run, args=(kernel, (1,), (32,), (ARRAY, ARRAY, 4)), kwargs={"shared": size})
        for size in sizes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    raised = [size for _, size in cupy.leave]
    assert raised == sorted(raised)
    assert raised[-1] == max(sizes)
    assert len(cupy.launches) == len(sizes)
    assert len(cupy.loaded) == 1


def test_an_empty_grid_launches_nothing(kernel):
    """CuPy would round an empty grid up to one block."""
    builder = Builder(Limits())
    builder.launch(kernel, (4, 0), (32,), (4,))
    assert builder.program().steps == ()


@needs_nvrtc
def test_wrong_arguments_do_not_reach_the_gpu(cupy, kernel):
    with pytest.raises(TypeError, match="takes 3 arguments, 2 given"):
        run(kernel, (1,), (32,), (ARRAY, 4))
    with pytest.raises(TypeError, match="4 bytes was given"):
        run(kernel, (1,), (32,), (ARRAY, ARRAY, np.int64(4)))
    assert cupy.launches == []


@pytest.mark.parametrize(
    ("value", "size", "want"),
    [
        (3, 4, np.int32(3)),
        (-1, 8, np.int64(-1)),
        (2**31, 4, np.uint32(2**31)),
        (True, 1, np.int8(1)),
        (0.1, 4, np.float32(0.1)),
        (0.1, 8, np.float64(0.1)),
        (np.float32(2), 4, np.float32(2)),
    ],
)
def test_numbers_take_the_parameters_size(value, size, want):
    parameter = launch.for_parameter(value, size)
    assert parameter == want
    assert parameter.dtype == want.dtype


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match=r"4 bytes was given .*8 bytes"):
        launch.for_parameter(np.float64(1), 4)
    with pytest.raises(OverflowError):
        launch.for_parameter(2**32, 4)
    assert launch.for_parameter(ARRAY, 8) is ARRAY


@needs_nvrtc
@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_75"), ((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")],
)
def test_architecture_of_a_device(capability, arch):
    """The architecture includes instructions specific to it."""
    assert nvrtc.nearest_arch(capability) == arch
    jit.compile_text('extern "C" __global__ void k() {}', arch)


@needs_nvrtc
def test_device_newer_than_the_compiler():
    known = nvrtc.nearest_arch((12, 9))  # the newest of its generation that the compiler knows
    assert known.startswith("sm_12")
    assert known[-1].isdigit()
    jit.compile_text('extern "C" __global__ void k() {}', known)
    with pytest.raises(jit.KernelCompileError, match=r"does not know compute capability 99\.0"):
        nvrtc.nearest_arch((99, 0))
