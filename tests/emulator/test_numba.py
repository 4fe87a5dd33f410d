"""Numba CUDA kernels run on the emulator with NumPy arrays as arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpu_ops.emulator import EmulatorError, SanitizerError, launch, ptx_of
from gpu_ops.kernels.compiler.jit import NumbaKernel, compile_kernel

pytest.importorskip("numba_cuda")

from numba import cuda, float32, int32

THREADS = 64


def reverse_blocks(x, y):
    """Reverse each block through shared memory; the last block is not full."""
    s = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] = x[i] if i < x.size else 0
    cuda.syncthreads()
    if i < x.size:
        y[i] = s[THREADS - 1 - t]


def racy_reverse(x, y):
    s = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    y[t] = s[THREADS - 1 - t]


def past_the_end(x, y):
    i = cuda.grid(1)
    y[i] = x[i + 1]


def histograms(x, y):
    """Count in a local array per thread."""
    count = cuda.local.array(8, int32)
    i = cuda.grid(1)
    if i < x.shape[0]:
        for k in range(8):
            count[k] = 0
        for j in range(x.shape[1]):
            count[x[i, j]] += 1
        for k in range(8):
            y[i, k] = count[k]


def transpose(x, y):
    i, j = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        y[j, i] = x[i, j]


def sums(x, total, biggest, count):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(total, 0, x[i])
        cuda.atomic.max(biggest, 0, x[i])
        cuda.atomic.inc(count, 0, 1000)


def warp_sums(x, y):
    i = cuda.grid(1)
    v = x[i]
    for offset in (16, 8, 4, 2, 1):
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, offset)
    if cuda.laneid == 0:
        y[i // 32] = v


@cuda.jit(device=True)
def softplus(v):
    return math.log(1.0 + math.exp(v))


def functions(x, y):
    """Evaluate six functions in float64, one of them a device function."""
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
        y[0, i] = math.exp(v)
        y[1, i] = math.sin(v)
        y[2, i] = math.pow(abs(v), 1.7)
        y[3, i] = math.tanh(v)
        y[4, i] = math.erf(v)
        y[5, i] = softplus(v)


def run(function, signature, grid, block, args, **options):
    compiled = compile_kernel(NumbaKernel(function, signature, function.__name__), "sm_80")
    launch(compiled.ptx, compiled.entry, grid, block, args, **options)


def test_shared_memory(rng):
    x = rng.standard_normal(250).astype(np.float32)
    y = np.zeros_like(x)
    run(reverse_blocks, "void(float32[::1], float32[::1])", 4, THREADS, (x, y))
    padded = np.append(x, np.zeros(6, np.float32)).reshape(4, THREADS)
    np.testing.assert_array_equal(y, padded[:, ::-1].ravel()[:250])


def test_local_memory(rng):
    x = rng.integers(0, 8, (50, 20)).astype(np.int32)
    y = np.zeros((50, 8), np.int32)
    run(histograms, "void(int32[:,::1], int32[:,::1])", 2, 32, (x, y))
    np.testing.assert_array_equal(y, [np.bincount(row, minlength=8) for row in x])


def test_strided_arrays(rng):
    """A view is read by its strides, and its gaps are not accessed."""
    x = rng.standard_normal((2 * 19, 3 * 11))[::-2, 1::3]
    y = np.zeros((11, 19), order="F")
    run(transpose, "void(float64[:,:], float64[:,:])", (3, 2), (8, 8), (x, y))
    np.testing.assert_array_equal(y, x.T)


def test_atomics(rng):
    x = rng.integers(-1000, 1000, 300).astype(np.float32)
    total, biggest, count = np.zeros(1, np.float32), np.full(1, -2000, np.float32), np.zeros(1, np.uint32)
    run(
        sums, "void(float32[::1], float32[::1], float32[::1], uint32[::1])", 5, 64, (x, total, biggest, count)
    )
    assert (total[0], biggest[0], count[0]) == (x.sum(), x.max(), 300)


def test_shuffles(rng):
    x = rng.integers(0, 1000, 128).astype(np.int32)
    y = np.zeros(4, np.int32)
    run(warp_sums, "void(int32[::1], int32[::1])", 2, 64, (x, y))
    np.testing.assert_array_equal(y, x.reshape(4, 32).sum(axis=1))


def test_float64_functions(rng):
    """Functions are as accurate as the libraries: a few units in the last place."""
    x = np.append(rng.uniform(-8, 8, 90), [0.0, -0.0, 1e-300, 700.0, -700.0, 1e5])
    y = np.zeros((6, x.size))
    run(functions, "void(float64[::1], float64[:,::1])", 2, 64, (x, y))
    with np.errstate(over="ignore"):
        expected = [
            np.exp(x),
            np.sin(x),
            np.abs(x) ** 1.7,
            np.tanh(x),
            [math.erf(v) for v in x],
            np.log(1 + np.exp(x)),
        ]
    np.testing.assert_allclose(y, expected, rtol=1e-15, atol=1e-15)


def test_a_race_is_found_in_the_python_source(rng):
    x = rng.standard_normal(THREADS).astype(np.float32)
    with pytest.raises(SanitizerError, match=r"written by block .* thread \(63,0,0\)") as caught:
        run(racy_reverse, "void(float32[::1], float32[::1])", 1, THREADS, (x, np.zeros_like(x)))
    assert caught.value.kind == "shared-memory race"
    first = racy_reverse.__code__.co_firstlineno
    assert f"test_numba.py:{first + 3}" in str(caught.value)
    assert f"test_numba.py:{first + 4}" in str(caught.value)


def test_an_index_past_the_end_is_found():
    x = np.zeros(64, np.float32)
    with pytest.raises(SanitizerError, match="read past the end of `x`: element 64 of 64") as caught:
        run(past_the_end, "void(float32[::1], float32[::1])", 1, 64, (x, np.zeros_like(x)))
    assert caught.value.kind == "out of bounds"
    assert "thread (63,0,0)" in str(caught.value)


def test_wrong_number_of_arguments():
    with pytest.raises(EmulatorError, match="takes 2 arguments, 1 were given"):
        run(past_the_end, "void(float32[::1], float32[::1])", 1, 64, (np.zeros(4, np.float32),))


@cuda.jit(device=True)
def doubled(v):
    return 2 * v


@cuda.jit
def with_a_function_and_the_grid(x, y):
    i = cuda.grid(1)
    y[i] = doubled(x[i])
    cuda.cg.this_grid().sync()
    x[i] = y[(i + 1) % x.size]


def test_ptx_of_needs_no_driver():
    ptx = ptx_of(with_a_function_and_the_grid, "void(float32[::1], float32[::1])")
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch(ptx, "with_a_function_and_the_grid", 2, 32, (x, y), together=True)
    np.testing.assert_array_equal(x, np.roll(2 * np.arange(64), -1))


def scaled(x, n, y, f, b):
    i = cuda.grid(1)
    if i < n and b:
        y[i] = x[i, 0] * f


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0], "takes 5 arguments, 1 were given"),
        ([0, 2, 1, 3, 4], "argument 1 is an array of 1 axes, the kernel's parameter a number"),
        ([2, 1, 0, 3, 4], "argument 0 is an array of 1 axes, the kernel's parameter an array of 2 axes"),
    ],
)
def test_arguments_that_have_as_many_fields(order, message):
    ptx = ptx_of(scaled, "void(float32[:,:], int32, float32[::1], float64, boolean)")
    args = (np.ones((8, 2), np.float32), 8, np.zeros(8, np.float32), 2.5, True)
    launch(ptx, "scaled", 1, 32, args)
    assert (args[2] == 2.5).all()
    with pytest.raises(EmulatorError, match=message):
        launch(ptx, "scaled", 1, 32, [args[i] for i in order])
