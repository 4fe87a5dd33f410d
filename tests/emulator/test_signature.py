"""Kernel parameters as the emulator sees them: names and types from CUDA C++ text and from mangled names."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator import Buffer, EmulatorError, SanitizerError, launch
from gpu_ops.emulator.signature import demangle, plain_name, signature, variable
from gpu_ops.kernels.compiler.jit import compile_text
from gpu_ops.kernels.compiler.numba_ptx import compile_numba

SOURCE = r"""
// __global__ void k(double* commented)
template <int N> __device__ float g(float x);
extern "C" __global__ void __launch_bounds__(128)
k(const float* __restrict__ x, float4 *y, unsigned long long int n, const half z[], T* t, float** pp,
  /* a comment, */ const __grid_constant__ Pair<int, float> pair, void* v, std::uint32_t* u, char* bytes) {}
"""


def test_a_declaration_in_cuda():
    parameters = signature("k", SOURCE)
    assert [p.name for p in parameters] == ["x", "y", "n", "z", "t", "pp", "pair", "v", "u", "bytes"]
    assert [p.type for p in parameters][:4] == [
        "const float*",
        "float4*",
        "unsigned long long int",
        "const half*",
    ]
    assert [(p.element, p.scalar) for p in parameters] == [
        *((4, 4), (16, 4), (0, 0), (2, 2), (0, 0), (8, 8), (0, 0), (1, 1), (4, 4), (1, 1))
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


def test_stars_of_template_arguments_are_no_pointers():
    source = (
        "__global__ void k(List<float*, 2 * 3> a, List<int*, 2>* b, List<float, 2>** c, float* const* d) {}"
    )
    assert [(p.element, p.scalar) for p in signature("k", source)] == [(0, 0), (0, 0), (8, 8), (8, 8)]


def test_a_definition_counts_more_than_a_declaration():
    (parameter,) = signature("k", "__global__ void k(float*);\n__global__ void k(float* x) {}")
    assert (parameter.name, parameter.type) == ("x", "float*")


@pytest.mark.parametrize(
    ("name", "types", "sizes"),
    [
        ("_Z1kPKfPfi", ["float*", "float*", "int"], [4, 4, 0]),
        ("_Z1kPfS_P6__halfS1_", ["float*", "float*", "__half*", "__half*"], [4, 4, 2, 2]),
        ("_Z3addPdPK6float4yb", ["double*", "float4*", "unsigned long long", "bool"], [8, 16, 0, 0]),
        ("_Z1kPPf", ["float**"], [8]),
        ("_Z1kv", [], []),
        ("_Z1kIfEvPT_", [], []),  # a template: not understood
        ("plain", [], []),
    ],
)
def test_mangled_names(name, types, sizes):
    parameters = signature(name)
    assert [p.type for p in parameters] == types
    assert [p.element for p in parameters] == sizes


NAMES = r"""
struct P { float a; };
enum E { A, B };
enum class F : int { X };
namespace ns {
struct Q { int i; };
template <class T> struct V { T x; };
__constant__ float w[2];
__global__ void nested(P p, float* y) {
  __shared__ float s[32]; s[threadIdx.x] = p.a; __syncthreads(); *y = s[9] + w[0]; }
__global__ void twice(float* a, double* b, float* c, Q q, Q* r) { *a = *b + *c + q.i + r->i; }
namespace deep { __global__ void far(V<float> v, V<V<int>>* y) { y->x.x = v.x; } }
template <class T, int N, bool B> __global__ void numbers(T* x, P p) { *x = N + B + p.a; }
template __global__ void numbers<float, -3, true>(float*, P);
}
namespace { __global__ void anonymous(P p, float* y) { *y = p.a; } }
static __global__ void hidden(P p, float* y) { *y = p.a; }
__global__ void structure(P p, float* y) { *y = p.a; }
__global__ void enums(E e, F f, float* y) { *y = e + (int)f; }
__global__ void several(float a, P* b, const P* c, P d, const float* e, float* f, unsigned char* g) { *f = a; }
__global__ void qualified(const P* const p, volatile int* v, const P& r, float* y) { *y = p->a + *v + r.a; }
__global__ void function(const float (*x)[4], float* y, float (*g)(float)) { *y = x[1][2]; }
template <class T> __global__ void dependent(T* x, ns::V<T> v, P p) { *x = v.x; }
template __global__ void dependent<ns::Q>(ns::Q*, ns::V<ns::Q>, P);
template <class... A> __global__ void packed(float* y, A... a) { *y = (a + ...); }
template __global__ void packed<int, float>(float*, int, float);
__device__ float half_of(float a) { return a / 2; }
template <float (*G)(float)> __global__ void given(float* y) { *y = G(*y); }
template __global__ void given<half_of>(float*);
template <template <class> class C, E e> __global__ void templates(C<float> c, P p, float* y) { *y = c.x + e; }
template __global__ void templates<ns::V, B>(ns::V<float>, P, float*);
"""
TYPES = {
    "nested": ("P", "float*"),
    "twice": ("float*", "double*", "float*", "ns::Q", "ns::Q*"),
    "far": ("ns::V<float>", "ns::V<ns::V<int>>*"),
    "anonymous": ("P", "float*"),
    "hidden": ("P", "float*"),
    "structure": ("P", "float*"),
    "enums": ("E", "F", "float*"),
    "several": ("float", "P*", "P*", "P", "float*", "float*", "unsigned char*"),
    "qualified": ("P*", "int*", "P*", "float*"),
    "function": ("float[]*", "float*", "a function*"),
    # For templates only the name is read.
    **dict.fromkeys(("numbers", "dependent", "packed", "given", "templates")),
}


def test_names_that_the_compiler_mangles():
    pytest.importorskip("cuda.bindings.nvrtc")
    ptx = compile_text(NAMES, "sm_80").ptx
    names = [demangle(name) for name in re.findall(r"\.entry (\w+)", ptx)]
    assert dict(names) == TYPES
    assert len(names) == len(TYPES)
    variables = {demangle(name).name for name in re.findall(r"\b_Z\w+", ptx)}
    assert variables - TYPES.keys() == {"s", "w"} | ({"half_of"} & variables)
    y = np.zeros(1, np.float32)
    launch(ptx, "structure", 1, 1, (np.float32(3).tobytes(), y))
    assert y[0] == 3
    launch(ptx, "enums", 1, 1, (1, 0, y))
    assert y[0] == 1
    x, half = np.ones(1, np.float32), np.ones(1)
    launch(
        ptx, "twice", 1, 1, (y, half, x, bytes([5, 0, 0, 0]), np.array([7], np.int32))
    )  # S0_ is float*, not double*
    assert y[0] == 14


@pytest.mark.parametrize(
    ("mangled", "plain"),
    [
        ("_ZL5scale", "scale"),
        ("_ZN2nsL5scaleE", "scale"),
        ("_ZZ1kPfE1s_0", "s"),
        ("_ZZN2ns1kIfEEvPT_1PE1s", "s"),
        ("_ZZZ1kPfENKUlvE_clEvE1s", "s"),
        ("_Z", "_Z"),
        ("_Z9shorter", "_Z9shorter"),
        ("_Zebra", "_Zebra"),
        ("_Z1kSsSaIcEPf", "k"),
    ],
)
def test_names_of_variables_and_of_nothing(mangled, plain):
    assert plain_name(mangled) == plain


def test_declarations_of_variables():
    text = "__device__ __constant__ float c[3 * N]; __device__ int n; "
    text += "__constant__ int z = 0; __constant__ double d[] {1};"
    variables = {name: variable(name, text) for name in "cnzdq"}
    assert {name: p and (p.type, p.element) for name, p in variables.items()} == {
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
    defaults = dict(x=np.ones(8, np.float32), out=np.zeros(8, np.complex64), h=np.zeros(4, np.float16))
    defaults |= dict(pairs=np.zeros((4, 2), np.float32), bytes=np.zeros(4, np.int64), n=7)
    return [*(defaults | other).values()]


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
