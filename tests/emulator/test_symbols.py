"""``symbols=``: the host sets and reads ``__constant__`` and ``__device__`` variables."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.emulator import EmulatorError, SanitizerError, launch
from gpu_ops.kernels.compiler.jit import compile_text

pytest.importorskip("cuda.bindings.nvrtc")

SOURCE = r"""
__constant__ float weights[3];
__constant__ int shift = 0;
namespace limits { __constant__ double top; }
__device__ unsigned int calls;
__device__ float4 last[2] = {{1, 2, 3, 4}};
extern "C" __global__ void k(float* y) {
  y[threadIdx.x] = fminf(weights[threadIdx.x % 3] + shift, limits::top);
  if (threadIdx.x < 2) last[threadIdx.x].w += 1;
  atomicAdd(&calls, 1u);
}
extern "C" __global__ void other(float* y) {
  y[threadIdx.x] = calls;
}
"""
WEIGHTS = np.array([1, 2, 30], np.float32)


def run(symbols, name="k", source=SOURCE, **options):
    y = np.zeros(6, np.float32)
    launch(source, name, 1, 6, (y,), symbols=symbols, **options)
    return y.tolist()


def test_constants_are_set_by_array_or_number():
    for top in (10.0, np.float64(10), np.array([10.0]), 10):
        assert run({"weights": WEIGHTS, "top": top}) == [1, 2, 10, 1, 2, 10]
    shifted = run({"weights": WEIGHTS, "top": 40.0, "shift": 5})
    assert shifted == [6, 7, 35, 6, 7, 35]


def test_device_variables_are_read_back_and_live_on_in_their_arrays():
    calls, last = np.zeros(1, np.uint32), np.zeros((2, 4), np.float32)
    symbols = {"weights": WEIGHTS, "top": 10.0, "calls": calls, "last": last}
    run(symbols)
    run(symbols)
    assert calls[0] == 12
    assert last.tolist() == [[0, 0, 0, 2], [0, 0, 0, 2]]
    assert run({"calls": calls}, "other") == [12] * 6  # another kernel of the module
    assert run(None, "other") == [0] * 6  # without an array a variable starts anew


@pytest.mark.parametrize("text", ["source", "ptx"])
def test_a_constant_without_a_value_is_a_fault(text):
    source = SOURCE if text == "source" else compile_text(SOURCE, "sm_80").ptx
    known = {"top": 10.0} if text == "source" else {"top": 10.0, "shift": 0}  # PTX does not show `= 0`
    with pytest.raises(SanitizerError, match=r"of `weights`: .* without a value: pass symbols=") as caught:
        run(known, source=source)
    assert caught.value.kind == "uninitialised read"
    assert run(known, source=source, sanitize=False) == [0] * 6


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        (
            {"weight": WEIGHTS},
            "no __constant__ or __device__ variable; the module has: weights, shift, calls, last, top",
        ),
        ({"weights": WEIGHTS[:2]}, r"has 8 bytes \(2 elements of float32\), the variable has 12 bytes"),
        ({"top": np.zeros(2, np.float32)}, "float32.*, the variable has 8 bytes of type double"),
        ({"weights": np.zeros((3, 2), np.float32)[:, 0]}, "must be a C-contiguous array"),
        ({"weights": [1, 2, 3]}, "is list; pass a NumPy array or a number"),
        ([("weights", WEIGHTS)], "symbols is list; pass a dict"),
    ],
)
def test_symbols_that_do_not_fit(symbols, message):
    with pytest.raises(EmulatorError, match=message):
        run(symbols)


def test_an_array_that_may_not_be_written():
    calls = np.zeros(1, np.uint32)
    calls.flags.writeable = False
    with pytest.raises(SanitizerError, match="of `calls`") as caught:
        run({"weights": WEIGHTS, "top": 10.0, "calls": calls})
    assert caught.value.kind == "write to a read-only argument"


INSIDE = r"""
__device__ float a[4] = {1, 2, 3, 4};
__device__ float* third = a + 2;
__device__ const char* text[2] = {"abc", "def" + 1};
extern "C" __global__ void inside(float* y) { y[0] = *third; y[1] = text[1][1]; third = a; }
"""


def test_a_variable_points_inside_another():
    y = np.zeros(2, np.float32)
    launch(INSIDE, "inside", 1, 1, (y,))
    np.testing.assert_array_equal(y, [3, ord("f")])
