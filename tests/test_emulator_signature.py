"""What the emulator knows of a kernel's parameters: names and types from CUDA C++ text and from mangled names."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator import Buffer, EmulatorError, SanitizerError, launch
from gpu_ops.emulator.signature import signature, variable
from gpu_ops.kernels.compiler.numba_ptx import compile_numba

SOURCE = r"""
// __global__ void k(double* commented)
template <int N> __device__ float g(float x);
extern "C" __global__ void __launch_bounds__(128)
k(const float* __restrict__ x, float4 *y, unsigned long long int n, const half z[], T* t, float** pp,
  /* a comment, */ const __grid_constant__ Pair<int, float> pair, void* v, std::uint32_t* u, char* bytes) {}
"""


def test_a_declaration_in_cuda():
    found = signature("k", SOURCE)
    assert [p.name for p in found] == ["x", "y", "n", "z", "t", "pp", "pair", "v", "u", "bytes"]
    assert [p.type for p in found][:4] == ["const float*", "float4*", "unsigned long long int", "const half*"]
    assert [(p.element, p.scalar) for p in found] == [
        *((4, 4), (16, 4), (0, 0), (2, 2), (0, 0), (0, 0), (0, 0), (1, 1), (4, 4), (1, 1))
    ]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "__global__ void other(float* x) {}",
        "__global__ void k(float* x) {}\n__global__ void k(int* x) {}",
    ],
)
def test_what_is_not_known_stays_open(source):
    assert signature("k", source) == ()


def test_a_definition_counts_more_than_a_declaration():
    (found,) = signature("k", "__global__ void k(float*);\n__global__ void k(float* x) {}")
    assert (found.name, found.type) == ("x", "float*")


@pytest.mark.parametrize(
    ("name", "types", "sizes"),
    [
        ("_Z1kPKfPfi", ["float*", "float*", "int"], [4, 4, 0]),
        ("_Z1kPfS_P6__halfS1_", ["float*", "float*", "__half*", "__half*"], [4, 4, 2, 2]),
        ("_Z3addPdPK6float4yb", ["double*", "float4*", "unsigned long long", "bool"], [8, 16, 0, 0]),
        ("_Z1kPPf", ["float**"], [0]),
        ("_Z1kv", [], []),
        ("_Z1kIfEvPT_", [], []),  # a template: not understood
        ("plain", [], []),
    ],
)
def test_mangled_names(name, types, sizes):
    found = signature(name)
    assert [p.type for p in found] == types
    assert [p.element for p in found] == sizes


def test_declarations_of_variables():
    text = "__device__ __constant__ float c[3 * N]; __device__ int n; "
    text += "__constant__ int z = 0; __constant__ double d[] {1};"
    found = {name: variable(name, text) for name in "cnzdq"}
    assert {name: p and (p.type, p.element) for name, p in found.items()} == {
        "c": ("__constant__ float", 4),
        "n": ("int", 4),
        "z": ("int =", 4),
        "d": ("double =", 8),
        "q": None,
    }


KERNEL = """
struct Pair { float a, b; };
extern "C" __global__ void k(const float* x, float2* out, const __half* h, Pair* pairs, unsigned char* bytes, int n) {
  int i = threadIdx.x;
  if (i <= n) out[i] = make_float2(x[i], pairs[0].b);
}
"""


def arguments(**other):
    given = dict(x=np.ones(8, np.float32), out=np.zeros(8, np.complex64), h=np.zeros(4, np.float16))
    given |= dict(pairs=np.zeros((4, 2), np.float32), bytes=np.zeros(4, np.int64), n=7)
    return [*(given | other).values()]


@pytest.mark.parametrize(
    "fits",
    [
        *({}, {"out": np.zeros((8, 2), np.float32)}, {"h": np.zeros(4, np.uint16)}),
        *({"h": np.zeros(4, ml_dtypes.bfloat16)}, {"x": np.zeros(8, np.int32)}, {"pairs": np.zeros(4)}),
    ],
)
def test_arrays_whose_elements_have_the_size(fits):
    pytest.importorskip("cuda.bindings.nvrtc")
    source = f"#include <cuda_fp16.h>\n{KERNEL}"
    launch(source, "k", 1, 8, arguments(**fits))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"x": np.ones(8)},
            "parameter 'x' of k is const float.*4 bytes.*argument 0 is an array of float64, with 8",
        ),
        (
            {"out": np.zeros(8, np.complex128)},
            "parameter 'out' of k is float2.*argument 1 is an array of complex128",
        ),
        (
            {"h": np.zeros(4, np.float32)},
            "parameter 'h' of k is const __half.*argument 2 is an array of float32",
        ),
    ],
)
def test_an_array_of_other_elements_is_refused_by_name(wrong, message):
    pytest.importorskip("cuda.bindings.nvrtc")
    args = arguments(**wrong)
    with pytest.raises(EmulatorError, match=message):
        launch(f"#include <cuda_fp16.h>\n{KERNEL}", "k", 1, 8, args)
    assert not args[1].any()


def test_a_numba_kernel():
    pytest.importorskip("numba_cuda")

    def scale(x, y, factor):
        y[0] = x[0] * factor

    ptx = compile_numba(scale, "void(float32[::1], float32[:, :], int64)", "scale", "sm_80")
    name = ptx.partition(".entry ")[2].partition("(")[0]
    y = np.zeros((2, 2), np.float32)
    with pytest.raises(
        EmulatorError, match=r"parameter 'x' of scale is an array of float, .* argument 0 is .*float64"
    ):
        launch(ptx, name, 1, 1, (np.ones(4), y, 2))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("n + 1", "write past the end of `out`: element 8 of 8 (byte 64 of 64)"),
        ("n - 8", "write before the start of `out`: element -1 of 8 (byte -8 of 64)"),
    ],
)
def test_a_fault_names_the_parameter_the_element_and_the_line(index, says):
    pytest.importorskip("cuda.bindings.nvrtc")
    source = KERNEL.replace("__half", "short").replace("out[i]", f"out[{index}]")
    with pytest.raises(SanitizerError, match="out of bounds") as caught:
        launch(source, "k", 1, 8, arguments())
    message = str(caught.value)
    assert says in message
    assert f"(kernel.cu:5)\n      kernel.cu line 5: if (i <= n) out[{index}] = make_float2" in message


def test_an_element_of_a_matrix_has_its_indices():
    pytest.importorskip("cuda.bindings.nvrtc")
    source = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[21]; }'
    x = Buffer(np.zeros((4, 8), np.float32), poison=np.arange(32).reshape(4, 8) == 21)
    with pytest.raises(SanitizerError, match=r"of `x`: element \(2, 5\) of \(4, 8\) \(byte 84 of 128\)"):
        launch(source, "k", 1, 8, (x, np.zeros(8, np.float32)))


def test_a_null_pointer_is_named():
    pytest.importorskip("cuda.bindings.nvrtc")
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }'
    with pytest.raises(SanitizerError, match="write at address 0x0: a null pointer"):
        launch(source, "k", 1, 8, (0,))
