"""Embedding: one test body over the backends, against the reference in float64. The laws cover it as well."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.rows import embedding as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import random
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
# Rows and columns: less than a tile, several tiles with a remainder, runs for two merges; with and without vectors.
SHAPES = [((3, 2), 64), ((130,), 7), ((2500,), 8), ((40,), 1100)]


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def indices(rng, shape, end, pattern):
    """Random indices. ``few``: some rows recur often, over many tiles."""
    drawn = {
        "any": lambda: rng.integers(0, end, shape),
        "few": lambda: np.minimum(rng.integers(0, end, shape), end // 3),
        "one": lambda: np.full(shape, end - 1),
    }
    return drawn[pattern]()


def close_sum(actual, expected, naive, dtype):
    close(actual, expected, naive, np.float64 if dtype == np.float64 else np.float32, GRADIENT)


@pytest.mark.parametrize("kind", ["any", "few", "one"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES, ids=str)
def test_forward_and_backward(backend, dtype, rows, cols, kind, rng):
    ids, weight = indices(rng, rows, 50, kind), random(rng, (50, cols), dtype)
    x = gpu_ops.embedding(ids, weight, **backend)
    assert x.dtype == dtype
    assert x.tobytes() == weight[ids].tobytes()
    dx = random(rng, x.shape, dtype)
    wide_dx = dx.astype(np.float64 if dtype == np.float64 else np.float32)
    expected, naive = (
        reference.embedding_backward(wide_dx, ids, 50, precision=p) for p in ("float64", "naive")
    )
    dweight = gpu_ops.embedding_backward(dx, ids.astype(np.int32), 50, **backend)
    assert dweight.dtype == wide_dx.dtype
    close_sum(dweight, expected, naive, dtype)


def test_stripes_of_columns(rng):
    """A task of the CPU adds up a stripe of the columns of all rows."""
    ids, dx = rng.integers(0, 9, 70), random(rng, (70, 700), np.dtype(np.float32))
    expected = np.zeros((9, 700))
    np.add.at(expected, ids, dx)
    dweight = gpu_ops.embedding_backward(dx, ids, 9, device="cpu", backend="numba")
    np.testing.assert_allclose(dweight, expected, rtol=0, atol=1e-5)


def test_scale_and_a_gradient_that_is_there(backend, dtype, rng):
    ids, weight = rng.integers(0, 9, (70,)), random(rng, (9, 24), dtype)
    ids[:40] = 3
    x = gpu_ops.embedding(ids, weight, scale=0.3, **backend)
    close(x, *(reference.embedding(ids, weight, scale=0.3, precision=p) for p in ("float64", "naive")), dtype)
    dx, sum_dtype = random(rng, x.shape, dtype), np.float64 if dtype == np.float64 else np.float32
    before = random(rng, (9, 24), np.dtype(sum_dtype))
    dweight = before.copy()
    assert gpu_ops.embedding_backward(dx, ids, 9, scale=0.3, dweight=dweight, **backend) is dweight
    wide_dx = dx.astype(sum_dtype)
    expected, naive = (
        reference.embedding_backward(wide_dx, ids, 9, scale=0.3, dweight=before, precision=p)
        for p in ("float64", "naive")
    )
    close_sum(dweight, expected, naive, dtype)
    again = before.copy()
    gpu_ops.embedding_backward(dx, ids, 9, scale=0.3, dweight=again, **backend)
    assert again.tobytes() == dweight.tobytes()


@needs_nvrtc
@pytest.mark.parametrize("kernels", ["raw", "numba"])
def test_an_index_on_a_gpu_that_is_outside_the_table(cupy, kernels, rng):
    """The row is NaN, and its gradient is not added: the host does not wait for indices."""
    ids, weight = np.array([2, -1, 5, 2**33, 4] * 20), random(rng, (5, 8), np.dtype(np.float32))
    inside = (ids >= 0) & (ids < 5)
    x = gpu_ops.embedding(FakeArray(ids), FakeArray(weight), backend=kernels).host
    assert np.isnan(x).all(axis=1).tolist() == (~inside).tolist()
    assert (x[inside] == weight[ids[inside]]).all()
    dx = random(rng, (100, 8), np.dtype(np.float32))
    dweight = gpu_ops.embedding_backward(FakeArray(dx), FakeArray(ids), 5, backend=kernels).host
    expected = reference.embedding_backward(dx[inside], ids[inside], 5)
    np.testing.assert_allclose(dweight, expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_may_not_be_added_to(rng):
    dx, ids = random(rng, (3, 4), np.dtype(np.float32)), np.array([0, 1, 0])
    for wrong, error, message in (
        (np.zeros((2, 4)), gpu_ops.errors.DTypeError, "dweight is float64"),
        (np.zeros((3, 4), np.float32), gpu_ops.errors.ShapeError, r"dweight has shape \(3, 4\)"),
        (dx[:2], gpu_ops.errors.ShapeError, "dweight shares memory with dx"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                gpu_ops.embedding_backward(dx, ids, 2, dweight=wrong)


def test_sums_of_bfloat16_are_float32(rng):
    """A sum of a thousand ones is exact: bfloat16 sums stop at 256."""
    dx = np.ones((1000, 3), ml_dtypes.bfloat16)
    assert (gpu_ops.embedding_backward(dx, np.zeros(1000, np.int64), 2) == [[1000] * 3, [0] * 3]).all()


def test_backward_is_the_transpose(rng):
    ids, weight, dx = rng.integers(0, 5, (3, 4)), rng.standard_normal((5, 6)), rng.standard_normal((3, 4, 6))
    dweight = reference.embedding_backward(dx, ids, 5, scale=0.7)
    forward = np.sum(dx * reference.embedding(ids, weight, scale=0.7))
    assert np.sum(dweight * weight) == pytest.approx(forward, rel=1e-12)
