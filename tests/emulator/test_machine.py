"""Compiled CUDA C++ on the emulator behaves as CUDA defines: divergence, barriers, calls, memory, launches."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gpu_ops import emulator
from gpu_ops.emulator import Buffer, EmulatorError, launch, profile
from gpu_ops.emulator import run as runner
from gpu_ops.errors import GpuOpsError, KernelCompileError
from gpu_ops.kernels.compiler.jit import compile_text
from tests.emulator.kernel_cases import CASES, SHAPES, where_am_i
from tests.support.compare import random
from tests.support.compilers import slow

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")


def run(case, arch="sm_80", **options):
    """Run a launch and compare its arguments with the expected contents."""
    launch(SOURCE, case.name, case.grid, case.block, case.args, arch=arch, **options)
    for i, expected in case.expected.items():
        np.testing.assert_array_equal(
            case.args[i], np.asarray(expected).astype(case.args[i].dtype), f"argument {i}"
        )


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", *slow("sm_86", "sm_89", "sm_90", "sm_90a", "sm_120")])
@pytest.mark.parametrize("name", CASES)
def test_kernel(name, arch):
    """Test sm_100 and later too: a newer NVVM compiles them, and generates different PTX."""
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


def test_launches_leave_nothing_behind():
    """Each launch gets new module variables and shared memory."""
    for _ in range(2):
        run(CASES["globals"]())


def test_a_dropped_program_is_freed_at_once(monkeypatch):
    """Machines have reference cycles, and cyclic garbage collection is rare, and slow with many objects."""
    programs, seen, y = runner._Programs(1), [], np.zeros(32, np.float32)
    monkeypatch.setattr(runner, "link_source", programs)
    gc.disable()
    try:
        for i in (1, 1, 2):
            source = f'extern "C" __global__ void k(float* y) {{ y[threadIdx.x] += {i}; }}'
            launch(source, "k", 1, 32, (y,))
            seen += [weakref.ref(x) for each in programs.kept.values() for x in (each, *each.idle)]
        assert [x() is None for x in seen] == [True, True, True, True, False, False]
    finally:
        gc.enable()
    assert (y == 4).all()
    assert seen[:2] == seen[2:4], "a program kept is used again"


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
        (
            "trip_counts",
            1,
            (np.zeros(4, np.int32), np.zeros(4, np.int32), 1.0),
            "argument 2 is 1.0, .* an integer",
        ),
        (
            "trip_counts",
            1,
            (np.zeros(4, np.int32), np.zeros(4, np.int32), np.int64(1)),
            "argument 2 has 8 bytes .* parameter 4",
        ),
        (
            "trip_counts",
            1,
            (np.zeros(4, np.int32), np.zeros(4, np.int32), 1 << 32),
            "argument 2 is 4294967296, .* has 4 bytes",
        ),
        (
            "by_value",
            1,
            (1, b"34", 1, np.zeros(1, np.float32), 1),
            "argument 0 is 1, .* has 32 bytes of its own type",
        ),
        (
            "by_value",
            1,
            (b"12", b"34", 1, np.zeros(1, np.float32), 1),
            "argument 0 has 2 bytes .* parameter 32",
        ),
        ("clocks", 1025, (np.zeros(4, np.int64),), "1025.* a block has 1 to 1024"),
        ("clocks", (32, 32, 2), (np.zeros(4, np.int64),), "a block has 1 to 1024"),
    ],
)
def test_a_launch_that_cannot_be(name, block, args, message):
    with pytest.raises(EmulatorError, match=message):
        launch(SOURCE, name, 1, block, args)


def test_a_kernel_is_found_by_its_name_in_the_source():
    source = """
struct Record { int entry, version; };
namespace a { __global__ void fill(float* y) { Record r; r.entry = 3; r.version = 4; y[threadIdx.x] = r.entry; } }
template <class T> __global__ void scale(T* y, T by) { y[threadIdx.x] *= by; }
template __global__ void scale<float>(float*, float);
template __global__ void scale<int>(int*, int);
"""
    y = np.zeros(8, np.float32)
    launch(source, "fill", 1, 8, (y,))
    launch(source, "_Z5scaleIfEvPT_S0_", 1, 8, (y, 2.0))
    assert y.tolist() == [6] * 8
    with pytest.raises(
        EmulatorError, match=r"2 kernels are named 'scale'; the module has: .*_Z5scaleIfEvPT_S0_"
    ):
        launch(source, "scale", 1, 8, (y, 2.0))
    with pytest.raises(EmulatorError, match=r"parameter 'y' of fill is float.*float64"):
        launch(source, "fill", 1, 8, (np.zeros(8),))


SHARED = r"""
extern "C" __global__ void dynamic(float* y) { extern __shared__ float d[]; d[0] = 7; y[0] = d[0]; }
extern "C" __global__ void both(float* y) {
  extern __shared__ float d[];
  __shared__ volatile float s[256];
  s[0] = d[0] = 7;
  y[0] = s[0] + d[0];
}
"""


@pytest.mark.parametrize(
    ("arch", "kib"), [("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_90a", 227), ("sm_120", 99)]
)
def test_a_block_has_the_shared_memory_of_its_architecture(arch, kib):
    y, limit = np.zeros(1, np.float32), kib * 1024
    launch(SHARED, "dynamic", 1, 1, (y,), shared=limit, arch=arch)
    launch(SHARED, "both", 1, 1, (y,), shared=limit - 1024, arch=arch)
    assert y[0] == 14
    message = f"bytes of dynamic and {{}} of static .* of {arch.rstrip('a')} may have {limit}"
    with pytest.raises(EmulatorError, match=message.format(0)):
        launch(SHARED, "dynamic", 1, 1, (y,), shared=limit + 1, arch=arch)
    with pytest.raises(EmulatorError, match=message.format(1024)):
        launch(SHARED, "both", 1, 1, (y,), shared=limit - 1023, arch=arch)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        (
            (1, 65536),
            1,
            0,
            r"dynamic: a grid of \(1, 65536, 1\) blocks; at most \(2147483647, 65535, 65535\)",
        ),
        ((1, 1, 65536), 1, 0, "a grid of"),
        (1 << 31, 1, 0, "a grid of"),
        (1, (1, 1, 65), 0, r"a block of \(1, 1, 65\) threads; at most \(1024, 1024, 64\)"),
        (0, 1, 0, "grid is 0; pass 1 to 3 ints, each at least 1"),
        ((4, 0), 1, 0, r"grid is \(4, 0\)"),
        (-1, 1, 0, "grid is -1"),
        ("4", 1, 0, "grid is '4'"),
        (1.5, 1, 0, "grid is 1.5"),
        (None, 1, 0, "grid is None"),
        ((1, 1, 1, 2), 1, 0, r"grid is \(1, 1, 1, 2\)"),
        ((), 1, 0, r"grid is \(\)"),
        (1, 0, 0, "block is 0"),
        (1, (32, -1), 0, r"block is \(32, -1\)"),
        (1, 32.0, 0, "block is 32.0"),
        (1, 1, -4, "shared is -4; pass a number of bytes"),
        (1, 1, 4.0, "shared is 4.0"),
    ],
)
def test_what_no_driver_launches(grid, block, shared, message):
    y = np.zeros(1, np.float32)
    with pytest.raises(EmulatorError, match=message):
        launch(SHARED, "dynamic", grid, block, (y,), shared=shared, sample=[0])
    assert y[0] == 0


NUMBERS = r"""
extern "C" __global__ void numbers(double* y, char c, int i, unsigned long long u, float f, double d) {
  y[0] = c; y[1] = i; y[2] = u; y[3] = f; y[4] = d;
}
"""


def test_a_python_number_becomes_what_the_parameter_is():
    y = np.zeros(5)
    launch(NUMBERS, "numbers", 1, 1, (y, -3, True, 1 << 40, 2, 0.1))
    assert y.tolist() == [-3, 1, 1 << 40, 2, 0.1]
    launch(NUMBERS, "numbers", 1, 1, [y, np.int8(4), np.array(5, np.int32), np.uint64(6), np.float32(7), 8])
    assert y.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, [1.0, 2.0], "argument 0 is list; a kernel takes NumPy arrays and Buffers"),
        (0, None, "argument 0 is None; .* 0 is a null pointer"),
        (0, "y", "argument 0 is str"),
        (0, np.str_("y"), "argument 0 is str_"),
        (0, (1, 2), "argument 0 is tuple"),
        (0, 1.5, "argument 0 is 1.5, the kernel's parameter an integer"),
        (0, np.array([None]), "argument 0 is an array of Python objects"),
        (0, Buffer([1.0]), "argument 0 is a Buffer of list"),
        (0, np.array(["y"]), "argument 0 is an array of text"),
        (0, np.zeros(5, ">f8"), "argument 0 is an array of bytes in the other order"),
        (0, np.ma.zeros(5), "argument 0 is a masked array"),
        (
            0,
            Buffer(np.zeros(5), poison=np.zeros(3, bool)),
            r"argument 0: poison has shape \(3,\), the array \(5,\)",
        ),
        (5, 10**400, "argument 5 is an integer that float64 does not hold"),
        (1, 1.5, "argument 1 is 1.5, the kernel's parameter an integer"),
        (2, np.zeros(4), "argument 2 is an array, the kernel's parameter of type u32 no pointer"),
        (2, np.zeros(0), "argument 2 is an array"),
        (2, 1j, "argument 2 is complex"),
        (2, np.float32(1), r"argument 2 is np.float32\(1.0\), the kernel's parameter of type u32"),
        (4, np.int32(1), r"argument 4 is np.int32\(1\), the kernel's parameter of type f32"),
        (5, np.zeros(4), "argument 5 is an array, the kernel's parameter of type f64 no pointer"),
    ],
)
def test_what_is_no_argument(at, wrong, message):
    args = [np.zeros(5), 1, 2, 3, 4, 5]
    args[at] = wrong
    with pytest.raises(EmulatorError, match=message):
        launch(NUMBERS, "numbers", 1, 1, args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": 5}, "include is 5; pass a sequence of folders"),
        ({"tensor_cores": ["exact"]}, "tensor_cores is .*; pass 'exact' or 'truncate'"),
    ],
)
def test_what_is_no_option(options, message):
    with pytest.raises(EmulatorError, match=message):
        launch(NUMBERS, "numbers", 1, 1, [np.zeros(5), 1, 2, 3, 4, 5], **options)


@pytest.mark.parametrize("args", [np.zeros(32), "y", None, 7, Buffer(np.zeros(4))])
def test_arguments_come_as_a_sequence(args):
    with pytest.raises(EmulatorError, match=r"args is \w+; pass a sequence .* such as \(x, y, n\)"):
        launch(NUMBERS, "numbers", 1, 1, args)


@pytest.mark.parametrize("sample", [0, [0.5], ["0"], "0"])
def test_a_sample_is_of_ids(sample):
    with pytest.raises(EmulatorError, match=r"sample is .* pass linear ids of blocks"):
        launch(NUMBERS, "numbers", 1, 1, (np.zeros(5), 1, 2, 3, 4, 5), sample=sample)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (None, "numbers", "source is NoneType; pass CUDA C\\+\\+ or PTX as a str"),
        (b".entry", "numbers", "source is bytes"),
        (["text"], "numbers", "source is list"),
        (NUMBERS, None, "name is NoneType; pass the name of an entry"),
    ],
)
def test_source_and_name_are_text(source, name, message):
    with pytest.raises(EmulatorError, match=message):
        launch(source, name, 1, 1, ())


def test_headers_of_other_folders(tmp_path):
    (tmp_path / "seven.h").write_text("#define SEVEN 7\n")
    source = '#include <seven.h>\nextern "C" __global__ void k(int* y) { y[0] = SEVEN; }'
    with pytest.raises(KernelCompileError, match=r"seven\.h"):
        launch(source, "k", 1, 1, (np.zeros(1, np.int32),))
    for include in ([tmp_path], str(tmp_path), (tmp_path / "other", str(tmp_path))):
        y = np.zeros(1, np.int32)
        launch(source, "k", 1, 1, (y,), include=include)
        assert y[0] == 7
    assert profile(source, "k", 1, 1, (y,), include=[tmp_path]).blocks == 1


def test_the_largest_grid_and_block_of_a_driver():
    y = np.zeros(1, np.float32)
    launch(
        SHARED, "dynamic", (2**31 - 1, 65535, 65535), (1, 1, 64), (y,), shared=4, sample=[0], sanitize=False
    )
    assert y[0] == 7
    launch(SHARED, "dynamic", np.array([1, 2]), np.int64(1), (y,), shared=4)


# Complete flash-attention kernel on tensor cores, written like production kernels.

FLASH_ATTENTION = (Path(__file__).with_name("flash.cu")).read_text(encoding="utf-8")
BF16 = ml_dtypes.bfloat16

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install '.[emulator]'")


def attention(q, k, v, out, source=FLASH_ATTENTION, arch="sm_80"):
    """Run the kernel for ``out = softmax(q k^T / 8) v``, 128 threads per 64 rows of q."""
    scale = np.float32(np.log2(np.e) / 8)
    emulator.launch(source, "flash", len(q) // 64, 128, (q, k, v, out, len(k), scale), arch=arch)


def exact(q, k, v):
    scores = q.astype(np.float64) @ k.astype(np.float64).T / 8
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v.astype(np.float64) / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", *slow("sm_86", "sm_90", "sm_120")])
def test_it_is_attention(rng, arch):
    q, k, v = (random(rng, (n, 64), BF16) for n in (512, 192, 192))
    out = np.empty_like(q)
    attention(q, k, v, emulator.Buffer(out, "out", written=False), arch=arch)
    # P and the result are rounded to bfloat16: two half units of 2^-8, for values below 4.
    np.testing.assert_allclose(out.astype(np.float64), exact(q, k, v), atol=2 * 2**-9 * 4, rtol=0)


# Lines that are easy to forget.
FAULTS = {
    "the barrier before tiles are overwritten": (
        "        __syncthreads();  // everybody is done with the last tiles\n",
        "shared-memory race",
    ),
    "the wait for the tiles": (
        '        copy_tile(s.v, v + start * D);\n        asm volatile("cp.async.wait_group 0;");\n',
        "asynchronous copy not waited for",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_line_is_missing(rng, what):
    line, message = FAULTS[what]
    assert FLASH_ATTENTION.count(line) == 1
    kept = line.splitlines(keepends=True)[0] if "wait" in what else ""
    q, k, v = (random(rng, (128, 64), BF16) for _ in range(3))
    with pytest.raises(GpuOpsError, match=message):
        attention(q, k, v, np.zeros_like(q), FLASH_ATTENTION.replace(line, kept))
