"""Addresses of arrays in structs and tables of pointers, as other packages' kernels take them; ``symbols=``."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator import Buffer, EmulatorError, SanitizerError, launch, pointer, profile
from gpu_ops.kernels.compiler.jit import compile_text

pytest.importorskip("cuda.bindings.nvrtc")


def table(arrays):
    return np.array([pointer(a) for a in arrays], np.uint64)


def test_a_structure_with_an_array_in_it(rng):
    """Reduce a strided array whose shape and strides are passed with its pointer."""
    source = r"""
    template <class T, int N> struct CArray {
      T* data; long long size; long long shape[N], strides[N];
      __device__ T& at(long long i) const {
        long long offset = 0;
        for (int d = N - 1; d >= 0; d--) { offset += i % shape[d] * strides[d]; i /= shape[d]; }
        return *(T*)((char*)data + offset);
      }
    };
    extern "C" __global__ void sums(const CArray<double, 3> in, CArray<double, 1> out, int block) {
      extern __shared__ double s[];
      int t = threadIdx.x, n = in.size / out.size;
      for (int row = blockIdx.x; row < out.size; row += gridDim.x) {
        double total = 0;
        for (int j = t; j < n; j += block) total += in.at((long long)row * n + j);
        s[t] = total;
        for (int o = block / 2; o; o /= 2) { __syncthreads(); if (t < o) s[t] += s[t + o]; }
        if (t == 0) out.at(row) = s[0];
        __syncthreads();
      }
    }
    """
    x, y = rng.standard_normal((5, 9, 7))[:, ::-2, 1:6], np.zeros(5)

    def carray(a):
        fields = [("data", "u8"), ("size", "i8"), ("shape", "i8", a.ndim), ("strides", "i8", a.ndim)]
        return np.array((pointer(a), a.size, a.shape, a.strides), fields)[()]

    launch(source, "sums", 3, 32, (carray(x), carray(y), 32), shared=256)
    np.testing.assert_allclose(y, x.sum((1, 2)))
    wrong = carray(x)
    wrong["strides"][0] += 8 * 7
    with pytest.raises(
        SanitizerError, match=r"out of bounds: .* of the float64 array \(5, 5, 5\) of pointer\(\)"
    ):
        launch(source, "sums", 3, 32, (wrong, carray(y), 32), shared=256)


def test_products_of_a_batch_of_matrices(rng):
    source = r"""
    extern "C" __global__ void gemm(const float* const* a, const float* const* b, float** c, int m, int n, int k) {
      int row = threadIdx.y, col = threadIdx.x;
      const float *x = a[blockIdx.x], *y = b[blockIdx.x];
      float total = 0;
      for (int i = 0; i < k; i++) total += x[row * k + i] * y[i * n + col];
      if (row < m && col < n) c[blockIdx.x][row * n + col] = total;
    }
    """
    a, b = rng.standard_normal((4, 3, 6), np.float32), rng.standard_normal((4, 6, 5), np.float32)
    c = [np.full((3, 5), np.nan, np.float32) for _ in a]
    launch(source, "gemm", 4, (5, 3), (table(a), table(b), table(c), 3, 5, 6))
    np.testing.assert_allclose(np.array(c), a @ b, rtol=1e-5, atol=1e-6)
    c[2] = np.zeros((3, 4), np.float32)
    named = [Buffer(x, f"c{i}") for i, x in enumerate(c)]
    with pytest.raises(
        SanitizerError, match=r"out of bounds: 4-byte write past the end of `c2`: element 12 of 12"
    ):
        launch(source, "gemm", 4, (5, 3), (table(a), table(b), table(named), 3, 5, 6))


MULTI_TENSOR = r"""
template <int N> struct Lists { void* addresses[N][36]; int sizes[36]; unsigned char tensor[320]; int chunk[320]; };
__global__ void axpby(int size, Lists<3> lists, float a, float b) {
  int tensor = lists.tensor[blockIdx.x], first = lists.chunk[blockIdx.x] * size;
  float *x = (float*)lists.addresses[0][tensor], *y = (float*)lists.addresses[1][tensor];
  float* out = (float*)lists.addresses[2][tensor];
  for (int i = first + threadIdx.x; i < lists.sizes[tensor] && i < first + size; i += blockDim.x)
    out[i] = a * x[i] + b * y[i];
}
"""


def lists(tensors, chunk):
    metadata = np.zeros((), [("a", "u8", (3, 36)), ("n", "i4", 36), ("t", "u1", 320), ("c", "i4", 320)])
    metadata["a"][:, : len(tensors)] = [[pointer(a) for a in row] for row in zip(*tensors, strict=True)]
    metadata["n"][: len(tensors)] = [t[0].size for t in tensors]
    places = [(i, c) for i, t in enumerate(tensors) for c in range(-(-t[0].size // chunk))]
    metadata["t"][: len(places)], metadata["c"][: len(places)] = zip(*places, strict=True)
    return metadata[()], len(places)


def test_many_tensors_in_one_launch(rng):
    tensors = [[*rng.standard_normal((2, n), np.float32), np.zeros(n, np.float32)] for n in (5, 130, 64, 1)]
    metadata, blocks = lists(tensors, 64)
    launch(MULTI_TENSOR, "axpby", blocks, 32, (64, metadata, 2.0, -1.0))
    for x, y, out in tensors:
        np.testing.assert_allclose(out, 2 * x - y, rtol=1e-6)


def test_copies_of_pages():
    source = r"""
    #include <cuda_bf16.h>
    extern "C" __global__ void copy_blocks(long long* keys, long long* values, const long long* pairs, int size) {
      int layer = blockIdx.x, pair = blockIdx.y;
      for (long long* caches : {keys, values}) {
        __nv_bfloat16* cache = reinterpret_cast<__nv_bfloat16*>(caches[layer]);
        long long from = pairs[2 * pair] * size, to = pairs[2 * pair + 1] * size;
        for (int i = threadIdx.x; i < size; i += blockDim.x) cache[to + i] = cache[from + i];
      }
    }
    """
    source = source.replace("for (long long* caches : {keys, values})", "for (int kv = 0; kv < 2; kv++)")
    source = source.replace("caches[layer]", "(kv ? values : keys)[layer]")
    caches = np.arange(2 * 3 * 8 * 40).reshape(2, 3, 8, 40).astype(ml_dtypes.bfloat16)
    expected = caches.copy()
    pairs = np.array([[0, 5], [3, 6], [3, 7]])
    expected[:, :, pairs[:, 1]] = expected[:, :, pairs[:, 0]]
    keys, values = (table(c).view(np.int64) for c in caches)
    launch(source, "copy_blocks", (3, 3), 32, (keys, values, pairs, 40))
    np.testing.assert_array_equal(caches, expected)
    pairs[1, 1] = 24  # beyond the last layer's pages
    with pytest.raises(
        SanitizerError, match=r"write past the end of .*bfloat16 array \(8, 40\) of pointer\(\)"
    ):
        launch(source, "copy_blocks", (3, 3), 32, (keys, values, pairs, 40), sample=[2, 5, 8])


FIRST = """struct S { const float* x; };
extern "C" __global__ void k(S s, float* y) { y[threadIdx.x] = s.x[threadIdx.x]; }
"""


def first(x, y, *, at=0, threads=4, **options):
    launch(FIRST, "k", 1, threads, (np.uint64(x + at).tobytes(), y), **options)


def test_faults_name_the_array():
    x, y = Buffer(np.arange(4, dtype=np.float32), "x"), np.zeros(8, np.float32)
    with pytest.raises(
        SanitizerError, match=r"misaligned: 4-byte read of `x`: element 0 of 4 \(byte 2 of 16\)"
    ):
        first(pointer(x), y, at=2)
    with pytest.raises(SanitizerError, match=r"out of bounds: .* before the start of `x`: element -1 of 4"):
        first(pointer(x), y, at=-4)
    with pytest.raises(SanitizerError, match=r"out of bounds: .* past the end of `x`: element 4 of 4"):
        first(pointer(x), y, threads=5, sanitize=False)
    first(pointer(x), y)
    np.testing.assert_array_equal(y[:4], x.array)
    fresh = Buffer(x.array, written=False)
    with pytest.raises(SanitizerError, match=r"uninitialised read: .*`x`"):
        first(pointer(fresh), y)
    poisoned = Buffer(x.array, "x", poison=np.arange(4) == 2)
    with pytest.raises(SanitizerError, match=r"poisoned read: .*`x`: element 2 of 4"):
        first(pointer(poisoned), y)
    x.array.flags.writeable = False
    with pytest.raises(SanitizerError, match=r"write to a read-only argument: .*`x`"):
        launch("__global__ void k(float* x) { x[0] = 1; }", "k", 1, 1, (pointer(x.array),))


def test_a_pointer_to_what_is_gone_is_a_fault():
    y = np.zeros(4, np.float32)
    x = np.ones(4, np.float32)
    at = pointer(x[1:][:2])  # the view is freed, its memory stays
    gc.disable()  # no object that a launch leaves behind keeps an array alive, not even after a fault
    try:
        first(at, y, threads=2)
        with pytest.raises(SanitizerError, match="past the end"):
            first(at, y)
        del x
        with pytest.raises(
            SanitizerError, match=r"out of bounds: .* of pointer\(\): its memory has been freed"
        ):
            first(at, y, threads=2)
    finally:
        gc.enable()


def test_an_array_that_is_an_argument_as_well():
    """Both addresses are the same, so that a write through one is visible through the other."""
    source = """
    struct S { float* x; };
    extern "C" __global__ void k(S s, float* x, int* same) {
      int t = threadIdx.x;
      s.x[t] = 3;
      x[32 + t] = s.x[t];
      *same = s.x == x;
    }
    """
    x, same = np.zeros(64, np.float32), np.zeros(1, np.int32)
    args = np.uint64(pointer(x)).tobytes(), Buffer(x, "x", written=False), same
    result = profile(source, "k", 1, 32, args)
    assert same[0] == 1
    assert (x == 3).all()
    assert [b.name for b in result.buffers] == ["x", "same"]
    pages = np.zeros((4, 8), np.float32)
    assert [pointer(page) - pointer(pages) for page in pages] == [0, 32, 64, 96]
    assert pointer(pages) == pointer(pages)
    assert pointer(pages[::-1]) == pointer(pages[3])
    assert pointer(pages[:0]) == 0


def test_a_table_is_not_the_array():
    source = 'extern "C" __global__ void k(float* const* rows, float* y) { y[threadIdx.x] = rows[0][threadIdx.x]; }'
    with pytest.raises(
        EmulatorError,
        match=r"'rows' of k is float\* const\*, .*argument 0 is an array of float32.*pointer\(x\)",
    ):
        launch(source, "k", 1, 4, (np.zeros(4, np.float32), np.zeros(4, np.float32)))


@pytest.mark.parametrize(
    "wrong", [3, None, [1.0], np.float32(1), np.array(["a"]), np.array([None]), np.zeros(2, ">f4"), Buffer(3)]
)
def test_what_has_no_address(wrong):
    with pytest.raises(EmulatorError, match="NumPy array"):
        pointer(wrong)


# ``symbols=``: the host sets and reads ``__constant__`` and ``__device__`` variables.

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
