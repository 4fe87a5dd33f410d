"""Indirect calls: through pointers, to the host (printf, assert), and to a barrier of the grid."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gpu_ops.emulator import EmulatorError, SanitizerError, UnknownInstruction, launch, profile
from gpu_ops.kernels.compiler.numba_ptx import compile_numba, numba_cuda

pytest.importorskip("cuda.bindings.nvrtc")


# ---- through pointers --------------------------------------------------------------------------------------

TABLE = r"""
typedef float (*Function)(float, float);
__device__ __noinline__ float add(float a, float b) { return a + b; }
__device__ __noinline__ float multiply(float a, float b) { return a * b; }
__device__ __noinline__ float largest(float a, float b) {
  float m = a;
  for (int i = 0; i < 3; i++) m = fmaxf(m, b - i);
  return m;
}
__device__ __noinline__ double unary(double a) { return -a; }
__device__ Function table[4] = {add, multiply, largest, nullptr};
__device__ double (*other)(double) = unary;
extern "C" __global__ void k(const int* which, float* y) {
  int t = threadIdx.x;
  float v = table[which[t]](t, 3.f);
  __syncthreads();
  y[t] = v + (t == 0 ? other(1.0) : 0.0);
}
"""


def test_a_table_of_functions():
    which = np.random.default_rng(0).integers(0, 3, 96).astype(np.int32)
    t, y = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    printed = str(profile(TABLE, "k", 1, 96, (which, y)))
    expected = np.choose(which, [t + 3, t * 3, np.maximum(t, 3)])
    expected[0] -= 1
    np.testing.assert_array_equal(y, expected)
    assert "control" in printed


def test_a_pointer_to_no_function():
    which = np.zeros(96, np.int32)
    which[40] = 3
    with pytest.raises(
        SanitizerError, match="call of address 0x0, which is no function of this type"
    ) as caught:
        launch(TABLE, "k", 1, 96, (which, np.zeros(96, np.float32)))
    assert caught.value.kind == "out of bounds"
    assert "thread (40,0,0)" in str(caught.value)
    assert "kernel.cu line 15: float v = table[which[t]](t, 3.f);" in str(caught.value)


SHAPES = r"""
struct Shape {
  __device__ virtual float area() const = 0;
  __device__ virtual float twice() const { return 2 * area(); }
};
struct Square : Shape {
  float a;
  __device__ Square(float a) : a(a) {}
  __device__ float area() const override { return a * a; }
};
struct Disc : Shape {
  float r;
  __device__ Disc(float r) : r(r) {}
  __device__ float area() const override { return 3 * r * r; }
  __device__ float twice() const override { return 6 * r * r + 0.5f; }
};
struct Sum : Shape {
  const Shape *a, *b;
  __device__ float area() const override { return a->area() + b->area(); }
};
extern "C" __global__ void k(int nested, float* y) {
  Square square(threadIdx.x);
  Disc disc(2);
  Sum sum, outer;
  sum.a = &square, sum.b = &disc;
  outer.a = nested ? (const Shape*)&sum : &square, outer.b = &disc;
  const Shape* shapes[4] = {&square, &disc, &sum, &outer};
  y[threadIdx.x] = shapes[threadIdx.x % 4]->twice();
}
"""


def test_virtual_functions():
    t, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch(SHAPES, "k", 1, 64, (0, y))
    both = 2 * (t * t + 12)
    np.testing.assert_array_equal(y, np.choose(np.arange(64) % 4, [2 * t * t, 24.5, both, both]))


def test_recursion_is_refused_where_it_happens():
    """`Sum::area` on a sum calls itself through a pointer: clones of functions have no stack."""
    with pytest.raises(UnknownInstruction, match="calls itself: recursion is not supported") as caught:
        launch(SHAPES, "k", 1, 64, (1, np.zeros(64, np.float32)))
    assert "kernel.cu line 19: __device__ float area() const override { return a->area()" in str(caught.value)
    direct = """
extern "C" __device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
extern "C" __global__ void k(int* y) { y[threadIdx.x] = f(threadIdx.x); }
"""
    with pytest.raises(UnknownInstruction, match=r"f calls itself: recursion .*\n.*\n.*kernel\.cu line 2"):
        launch(direct, "k", 1, 8, (np.zeros(8, np.int32),))


# ---- to the host -------------------------------------------------------------------------------------------


def test_printf(capsys):
    source = r"""
extern "C" __global__ void k(const float* x) {
  if (threadIdx.x > 1) return;
  printf("%3d|%-4u|%+.2f|%s|%c|%lld|%08x|%5.1e|%%|%*d\n", -(int)threadIdx.x, 7u, x[threadIdx.x], "text", 'q',
         1ll << 40, 255, 12345.0, 4, 9);
  printf("done\n");
}
"""
    launch(source, "k", 2, 32, (np.array([0.5, -1.25], np.float32),))
    line = "{:3d}|7   |{:+.2f}|text|q|1099511627776|000000ff|1.2e+04|%|   9\n"
    lines = line.format(0, 0.5) + line.format(-1, -1.25)
    assert capsys.readouterr().out == 2 * lines + 4 * "done\n"


def test_print_of_numba(capsys):
    pytest.importorskip("numba_cuda")
    cuda = numba_cuda()

    def kernel(x):
        i = cuda.threadIdx.x
        if i == 3:
            print("x is", i, x[i])

    ptx = compile_numba(kernel, "void(float64[::1])", "kernel", "sm_80")
    launch(ptx, re.findall(r"\.entry (\w+)", ptx)[0], 1, 8, (np.arange(8) / 2,))
    assert capsys.readouterr().out == "x is 3 1.500000\n"


def test_the_text_of_an_assertion():
    source = """
extern "C" __global__ void k(const int* x, int n) {
  assert(x[threadIdx.x] < n && "too large");
}
"""
    launch(source, "k", 1, 64, (np.arange(64, dtype=np.int32), 64))
    with pytest.raises(SanitizerError) as caught:
        launch(source, "k", 1, 64, (np.arange(64, dtype=np.int32), 50))
    assert caught.value.kind == "trap"
    said = 'kernel.cu:3: void k(const int *, int): Assertion `x[threadIdx.x] < n && "too large"` failed'
    assert said in str(caught.value)
    assert "thread (50,0,0)" in str(caught.value)


# ---- the barrier of a grid ---------------------------------------------------------------------------------

# What <cooperative_groups.h> does, without its headers: %envreg1 and 2 hold the address of the barrier.
GRID = r"""
__device__ void grid_sync() {
  unsigned high, low;
  asm volatile("mov.u32 %0, %%envreg1; mov.u32 %1, %%envreg2;" : "=r"(high), "=r"(low));
  volatile unsigned* arrived = (volatile unsigned*)((unsigned long long)high << 32 | low);
  if (!arrived) __trap();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned old = atomicAdd((unsigned*)arrived, blockIdx.x == 0 ? 0x80000001u - gridDim.x : 1u);
    while (((old ^ *arrived) & 0x80000000u) == 0) {}
  }
  __syncthreads();
}
extern "C" __global__ void k(int* x, int* y) {
  int t = threadIdx.x, b = blockIdx.x;
  for (int round = 1; round < 4; round++) {
    if (t == 0) x[b] = round * b;
    grid_sync();
    y[b * blockDim.x + t] += x[(b + 1) % gridDim.x];
    grid_sync();
  }
}
"""


def test_a_barrier_of_the_grid():
    blocks, threads = 40, 1024  # more than run in one batch otherwise
    y = np.zeros((blocks, threads), np.int32)
    launch(GRID, "k", blocks, threads, (np.zeros(blocks, np.int32), y), together=True)
    np.testing.assert_array_equal(y, np.tile(6 * ((np.arange(blocks) + 1) % blocks), (threads, 1)).T)


def test_a_barrier_of_the_grid_wants_a_cooperative_launch():
    args = np.zeros(4, np.int32), np.zeros(128, np.int32)
    with pytest.raises(
        SanitizerError, match=r"grid\.sync\(\) needs a cooperative launch: pass together=True"
    ):
        launch(GRID, "k", 4, 32, args)
    with pytest.raises(EmulatorError, match="waits for the whole grid, and sample leaves blocks out"):
        launch(GRID, "k", 4, 32, args, together=True, sample=[1, 2])


def test_grid_sync_of_numba():
    pytest.importorskip("numba_cuda")
    cuda = numba_cuda()

    def kernel(x, y):
        grid, block = cuda.cg.this_grid(), cuda.blockIdx.x
        for r in range(3):
            x[block] = r * block
            grid.sync()
            y[cuda.grid(1)] += x[(block + 1) % cuda.gridDim.x]
            grid.sync()

    ptx = compile_numba(kernel, "void(int32[::1], int32[::1])", "kernel", "sm_80")
    name, args = re.findall(r"\.entry (\w+)", ptx)[0], (np.zeros(5, np.int32), np.zeros(160, np.int32))
    launch(ptx, name, 5, 32, args, together=True)
    np.testing.assert_array_equal(args[1], np.repeat(3 * ((np.arange(5) + 1) % 5), 32))
    with pytest.raises(SanitizerError, match=r"grid\.sync\(\) needs a cooperative launch"):
        launch(ptx, name, 5, 32, args)
