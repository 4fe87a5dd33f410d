"""The emulator runs compiled CUDA C++ as CUDA says: parting and meeting threads, barriers, calls, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_ops.emulator import EmulatorError, launch
from gpu_ops.emulator import run as runner
from gpu_ops.kernels.jit import compile_text
from tests.emulator_kernel_cases import CASES, SHAPES, where_am_i

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = Path(__file__).with_name("emulator_kernels.cu").read_text(encoding="utf-8")
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]


def run(case, arch="sm_80", **options):
    """Run a launch and compare everything it says about its arguments."""
    launch(SOURCE, case.name, case.grid, case.block, case.args, arch=arch, **options)
    for i, expected in case.expected.items():
        np.testing.assert_array_equal(
            case.args[i], np.asarray(expected).astype(case.args[i].dtype), f"argument {i}"
        )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_kernel(name, arch):
    """sm_100 and later are compiled by a newer NVVM, which writes PTX differently."""
    run(CASES[name](), arch)


@pytest.mark.parametrize(("grid", "block"), SHAPES)
def test_shapes_of_grids_and_blocks(grid, block):
    run(where_am_i(grid, block))


@pytest.mark.parametrize(
    "name", ["trip_counts", "named_barriers", "counting_barriers", "atomics", "spin_lock"]
)
def test_batches_make_no_difference(name, monkeypatch):
    monkeypatch.setattr(runner, "_THREADS", 64)  # a block at a time
    run(CASES[name]())


def test_batches_of_a_large_grid(monkeypatch):
    monkeypatch.setattr(runner, "_THREADS", 256)
    run(where_am_i((7, 3), (40,)))


@pytest.mark.parametrize("name", ["nested_ifs", "named_barriers", "generic_pointers", "flags"])
def test_without_the_sanitizer(name):
    run(CASES[name](), sanitize=False)


def test_sample_runs_chosen_blocks_only():
    case = where_am_i((4, 5), (32,))
    launch(SOURCE, case.name, case.grid, case.block, case.args, sample=[17, 3, 17])
    out, expected = case.args[0].reshape(20, -1), case.expected[0].reshape(20, -1)
    np.testing.assert_array_equal(out[[3, 17]], expected[[3, 17]])
    assert not np.delete(out, [3, 17], axis=0).any()
    with pytest.raises(EmulatorError, match="outside the grid of 20"):
        launch(SOURCE, case.name, case.grid, case.block, case.args, sample=[20])


def test_an_empty_grid_does_nothing():
    case = where_am_i((1,), (32,))
    launch(SOURCE, case.name, 0, 32, case.args)
    assert not case.args[0].any()


def test_launches_leave_nothing_behind():
    """Module variables and shared memory are fresh for each launch."""
    for _ in range(2):
        run(CASES["globals"]())


def test_ptx_text_runs_as_its_source_does():
    case = CASES["calls"]()
    launch(compile_text(SOURCE, "sm_80").ptx, case.name, case.grid, case.block, case.args)
    np.testing.assert_array_equal(case.args[1], case.expected[1].astype(np.float32))


@pytest.mark.parametrize(
    ("name", "block", "args", "message"),
    [
        ("nosuch", 1, (), "no kernel named 'nosuch'; the module has: .*nested_ifs"),
        ("twice", 1, (), "no kernel named 'twice'"),
        ("clocks", 1, (), "takes 1 parameters, 0 arguments were given"),
        ("clocks", 1, (np.zeros(4, np.int64), 3), "takes 1 parameters, 2 arguments were given"),
        ("trip_counts", 1, (np.zeros(4), np.zeros(4), 1.0), "argument 2 is 1.0, .* an integer"),
        ("trip_counts", 1, (np.zeros(4), np.zeros(4), np.int64(1)), "argument 2 has 8 bytes .* parameter 4"),
        ("trip_counts", 1, (np.zeros(4), np.zeros(4), 1 << 32), "argument 2 is 4294967296, .* has 4 bytes"),
        ("by_value", 1, (1, b"34", 1, np.zeros(1), 1), "argument 0 is 1, .* has 32 bytes of its own type"),
        ("by_value", 1, (b"12", b"34", 1, np.zeros(1), 1), "argument 0 has 2 bytes .* parameter 32"),
        ("clocks", 1025, (np.zeros(4, np.int64),), "1025.* a block has 1 to 1024"),
        ("clocks", (32, 32, 2), (np.zeros(4, np.int64),), "a block has 1 to 1024"),
        ("clocks", 0, (np.zeros(4, np.int64),), "a block has 1 to 1024"),
    ],
)
def test_a_launch_that_cannot_be(name, block, args, message):
    with pytest.raises(EmulatorError, match=message):
        launch(SOURCE, name, 1, block, args)
