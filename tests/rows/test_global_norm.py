"""Norm of arrays: one test body over the backends, against exact sums. The laws cover one array as well."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.core.op import op_named
from gpu_ops.kernels.common.cpu import parallel
from gpu_ops.reference.rows import global_norm as reference
from tests.rows.cases import emulator_dtypes
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
BLOCK = 16384
# Less than the vector of a thread; less than all lanes, and more; a whole block; a remainder that is not a vector.
SIZES = [(1,), (3, 255), (7, 13, 0, 258), (BLOCK, 5), (BLOCK + 1,), (2 * BLOCK, 2 * BLOCK - 1)]
F16, BF16, F32, F64 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw), "sizes": [SIZES[1], SIZES[2], SIZES[4]]}}


def norm_of(arrays, **options):
    norm, found_inf = gpu_ops.global_norm(arrays, **options)
    assert norm.shape == found_inf.shape == ()
    assert found_inf.dtype == np.float32
    return float(norm), float(found_inf)


def exact(arrays):
    """Root of the sum of squares, computed in integers and rounded once."""
    squares = sum((Fraction(float(v)) ** 2 for x in arrays for v in np.ravel(x)), Fraction(0))
    shift = max(220 - squares.numerator.bit_length() + squares.denominator.bit_length(), 0) // 2 * 2
    return float(Fraction(math.isqrt((squares.numerator << shift) // squares.denominator), 2 ** (shift // 2)))


def test_the_reference_against_integers(rng):
    for scale in (1.0, 1e-200, 1e200):
        x = [scale * rng.standard_normal((3, 7)), scale * rng.standard_normal(5)]
        assert float(reference.global_norm(x)[0]) == pytest.approx(exact(x), rel=4e-16)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_arrays_of_one_dtype(backend, dtype, sizes, rng):
    arrays = [random(rng, (n,), dtype) for n in sizes]
    norm, found_inf = norm_of(arrays, **backend)
    assert norm == pytest.approx(exact(arrays), rel=1e-15 if dtype == F64 else 1e-7)
    assert found_inf == 0
    assert norm_of(tuple(arrays), **backend) == (norm, 0)


def test_arrays_of_several_dtypes_and_shapes(backend, rng):
    arrays = [random(rng, (3, 5, 7), F32), np.full((), 0.3, BF16), random(rng, (40, 3), F16).T]
    norm, found_inf = gpu_ops.global_norm(arrays, **backend)
    assert norm.dtype == F32
    assert float(norm) == pytest.approx(exact(arrays), rel=1e-7)
    if backend["backend"] != "raw":
        norm, found_inf = gpu_ops.global_norm([*arrays, random(rng, (2,), F64)], **backend)
        assert norm.dtype == F64
        assert found_inf.dtype == F32


def test_more_blocks_than_sums():
    """The CPU adds up the norms of blocks in 512 sums."""
    x = np.zeros(520 * BLOCK, BF16)
    x[[0, 7 * BLOCK, 515 * BLOCK]] = 1, 2, 4
    assert norm_of([x], device="cpu", backend="numba") == (np.sqrt(np.float32(21)), 0)


def test_nothing(backend):
    assert norm_of([], **backend) == (0, 0)
    assert norm_of([np.zeros((0, 3), np.float32), np.zeros(0, np.float16)], **backend) == (0, 0)
    assert norm_of(np.zeros(5, np.float32), **backend) == (0, 0)


def test_not_finite(backend, dtype):
    """NaN if any element is NaN, else inf; in either array, in a whole block or in a remainder."""
    for position in (BLOCK - 2, BLOCK + 2):
        for values, expected in (([-np.inf], np.inf), ([np.nan], np.nan), ([np.nan, np.inf], np.nan)):
            x = np.ones(BLOCK + 9, dtype)
            x[position : position + len(values)] = values
            norm, found_inf = norm_of([np.ones(3, dtype), x], **backend)
            np.testing.assert_equal(norm, expected)
            assert found_inf == 1


# Squares of these leave the range of the type they are summed in, alone or together with ones.
@pytest.mark.parametrize("size", [3e38, 1e20, 1e-20, 1e-30, 1e-40])
def test_squares_outside_the_range(backend, size):
    x = np.array([size, -size / 2, 0, size / 3], np.float32)
    for arrays in ([x], [x, np.ones(3, np.float32)], [np.concatenate([x, np.ones(3, np.float32)])]):
        norm, found_inf = norm_of(arrays, **backend)
        expected = exact(arrays)
        if expected < 1e-38:  # a multiple of the smallest number
            assert abs(norm - expected) <= 2.0**-149
        else:
            assert norm == pytest.approx(expected if expected < 3.4e38 else np.inf, rel=1e-7)
        assert found_inf == 0


@pytest.mark.parametrize("size", [1e308, 1e200, 1e-200, 1e-310])
def test_squares_outside_the_range_of_float64(backend, size):
    if backend["backend"] == "raw":
        with pytest.raises(gpu_ops.errors.DeviceError, match="float64 has Numba kernels only"):
            gpu_ops.global_norm(np.ones(3), **backend)
        return
    x = np.array([size, -size / 2, 0, size / 3])
    for arrays in ([x], [x, np.ones(3, np.float32)], [x, np.ones(3)]):
        norm, found_inf = norm_of(arrays, **backend)
        assert norm == pytest.approx(exact(arrays), rel=1e-14)
        assert found_inf == 0


def test_a_bfloat16_of_any_size(backend):
    for size in (3e38, 1e30, 1e-37, 9e-41):
        x = np.full(9, size, ml_dtypes.bfloat16)
        expected = 3 * float(x[0])
        assert norm_of(x, **backend)[0] == pytest.approx(expected if expected < 3.4e38 else np.inf, rel=1e-7)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_same_bits_on_every_backend(dtype, rng):
    """Sums follow the order of indices; with a remainder, a block whose squares overflow, and a block of zeros."""
    x = random(rng, (3 * BLOCK + 77,), dtype)
    x[5:9] = 1e30
    arrays = [x, random(rng, (1000,), dtype), x[1 : BLOCK - 6], np.zeros(BLOCK, dtype)]
    cells = [("cpu", "numba"), ("emulator", "raw"), ("emulator", "numba")]
    norms = {gpu_ops.global_norm(arrays, device=d, backend=b)[0].tobytes() for d, b in cells}
    assert len(norms) == 1


def test_the_same_bits_for_any_number_of_threads(monkeypatch, rng):
    x = random(rng, (40 * BLOCK + 5,), F32)
    norms = set()
    for count in (1, 2, 5):
        monkeypatch.setattr(parallel, "thread_count", lambda count=count: count)
        norms.add(gpu_ops.global_norm(x, device="cpu")[0].tobytes())
    assert len(norms) == 1


def test_an_outlier_among_many(rng):
    """Sums in float32 would lose the other elements: 1e4 squared has an ulp of 8."""
    x = np.tile(random(rng, (1 << 18,), F32), 4)
    x[123456] = 1e4
    expected = math.sqrt(float(np.sum(x.astype(np.longdouble) ** 2)))
    assert norm_of(x, device="cpu")[0] == pytest.approx(expected, rel=1e-7)


@pytest.mark.slow
def test_an_outlier_among_a_hundred_million(rng):
    x = np.resize(random(rng, (1 << 22,), F32), 10**8)
    x[12345678] = 1e4
    expected = math.sqrt(
        math.fsum(float(np.sum(part.astype(np.float64) ** 2)) for part in np.array_split(x, 100))
    )
    assert norm_of(x, device="cpu")[0] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_constant_arrays(dtype):
    """All squares are rounded the same way, which is the largest possible error."""
    for size in np.geomspace(1.0, 2.0, 23):
        x = np.full(BLOCK + 100, size, dtype)
        expected = math.sqrt(x.size) * float(x[0])
        assert norm_of(x, device="cpu")[0] == pytest.approx(expected, rel=1e-7)


def test_later_calls(rng):
    """Call with other arrays of the same shapes, then one whose dtype differs, then fewer arrays."""
    first, second = ([random(rng, (n,), F32) for n in (5, 7)] for _ in range(2))
    known = op_named("test", "global_norm").known
    for arrays in (first, second, [*second[:1], second[1].astype(F64)], second[:1], [second[0][::2]], first):
        before = [x.copy() for x in arrays]
        for _ in range(2):
            assert norm_of(arrays, device="cpu")[0] == pytest.approx(exact(arrays), rel=1e-7)
        assert all((x == y).all() for x, y in zip(arrays, before, strict=True))
    size = len(known)
    norm_of(second, device="cpu")
    assert len(known) == size


def test_results_given(rng):
    arrays = [random(rng, (9,), F32), random(rng, (2, 2), F32)]
    out = np.zeros((), np.float32), np.ones((), np.float32)
    for _ in range(2):
        assert gpu_ops.global_norm(arrays, out=out) is out
        assert float(out[0]) == pytest.approx(exact(arrays), rel=1e-7)
        assert out[1] == 0
    for _ in range(2):
        with pytest.raises(gpu_ops.errors.ShapeError, match=r"out found_inf shares memory with arrays\[0\]"):
            gpu_ops.global_norm(arrays, out=(out[0], arrays[0][2:3].reshape(())))


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_arrays_of_a_gpu(cupy, kernels, rng):
    """Arrays of a GPU in a list, in repeated calls, and captured in a graph that replays with other values."""
    for _ in range(3):
        arrays = [random(rng, (3, 4), F32), random(rng, (BLOCK + 3,), BF16), random(rng, (5,), F32)[1:]]
        device_arrays = [FakeArray(x) for x in arrays]
        norm, found_inf = gpu_ops.global_norm(device_arrays, backend=kernels)
        assert float(norm.host) == pytest.approx(exact(arrays), rel=1e-7)
        assert float(found_inf.host) == 0
    size = gpu_ops.workspace_size("global_norm", device_arrays, backend=kernels)
    workspace = FakeArray(np.zeros(size, np.uint8))
    with cupy.capture():
        gpu_ops.global_norm(device_arrays, out=(norm, found_inf), backend=kernels, workspace=workspace)
    device_arrays[1].host[7] = np.nan
    cupy.replay()
    assert np.isnan(norm.host)
    assert found_inf.host == 1
    with pytest.raises(gpu_ops.errors.DeviceError, match=r"arrays\[1\] is in host memory"):
        gpu_ops.global_norm([FakeArray(arrays[0]), arrays[1]], backend=kernels)


def test_what_explain_says(rng):
    arrays = [random(rng, (40000,), F32), random(rng, (5,), BF16)]
    assert "40005 elements in 2 arrays" in str(gpu_ops.explain("global_norm", arrays, device="cpu"))
    if gpu_ops.core.device.compiler_missing("raw") is None:
        told = str(gpu_ops.explain("global_norm", arrays, device="emulator", backend="raw"))
        assert told.count("global_norm_blocks") == 2
        assert gpu_ops.workspace_size("global_norm", arrays, device="emulator") >= 4 * 8
