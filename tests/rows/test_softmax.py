"""Softmax: one test body over the backends, against the reference in float64. Laws (test_laws.py) cover it too."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops.reference.rows import softmax as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import naive_ops, random

DEVICES = ("cpu", "emulator", "cuda")
# Rows of one element, in part of a warp, of a block, longer than registers; with and without vectors.
SHAPES = [(7,), (40, 1), (3, 5, 64), (5, 1000), (2, 4099), (1, 8200), (2, 17000)]
# Shapes of x and mask: a mask of columns, of rows, of batches, of every other axis, and more axes than kernels take.
MASKS = [((3, 5, 64), (64,)), ((3, 5, 64), (5, 1)), ((2, 3, 4, 31), (2, 1, 4, 31)), ((2, 3, 4, 31), (1, 3, 1, 31)),
         ((2, 3, 2, 3, 2, 9), (2, 1, 2, 1, 2, 9)), ((4, 17000), (4, 17000)), ((3, 8), ())]  # fmt: skip


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def check(backend, x, dy, **options):
    """Check forward and backward; return y."""
    y = gpu_ops.softmax(x, **options, **backend)
    close(y, *(reference.softmax(x, **options, precision=p) for p in ("float64", "naive")), x.dtype, what="y")
    scale = {"scale": options.get("scale", 1.0)}
    dx = gpu_ops.softmax_backward(dy, y, **scale, **backend)
    expected, naive = (reference.softmax_backward(dy, y, **scale, precision=p) for p in ("float64", "naive"))
    close(dx, expected, naive, x.dtype, GRADIENT, what="dx")
    assert y.dtype == dx.dtype == x.dtype
    return y


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(backend, dtype, shape, rng):
    check(backend, random(rng, shape, dtype, 3), random(rng, shape, dtype))
    check(backend, random(rng, shape, dtype, 100), random(rng, shape, dtype), scale=-0.3)


@pytest.mark.parametrize(("shape", "mask_shape"), MASKS, ids=str)
def test_masks(backend, dtype, shape, mask_shape, rng):
    for mask_dtype in dict.fromkeys((np.dtype(bool), dtype, np.dtype(np.float32))):
        seen = np.asarray(rng.random(mask_shape) < 0.6)
        mask = seen if mask_dtype.kind == "b" else np.where(seen, rng.standard_normal(mask_shape), -np.inf)
        mask = np.asarray(mask, mask_dtype)
        y = check(backend, random(rng, shape, dtype), random(rng, shape, dtype), mask=mask, scale=0.7)
        assert not y[~np.broadcast_to(seen, shape)].any()
        broadcast = gpu_ops.softmax(y, mask=np.broadcast_to(mask, shape).copy(), **backend)
        assert gpu_ops.softmax(y, mask=mask, **backend).tobytes() == broadcast.tobytes(), mask_dtype


@pytest.mark.parametrize("cols", [24, 17001])
def test_hidden_rows_nan_and_infinity(backend, dtype, cols, rng):
    x, mask = random(rng, (6, cols), dtype), np.ones((6, cols), bool)
    mask[0], mask[1, 1:], mask[2, 3], x[2, 3] = False, False, False, np.nan
    x[3], x[4, 5], x[5, 7] = -np.inf, np.nan, np.inf
    check(backend, x[:4], random(rng, (4, cols), dtype), mask=mask[:4])
    y = gpu_ops.softmax(x, mask=mask, **backend)
    assert not y[[0, 3]].any()
    assert (y[1] == np.arange(cols)[::-1] // (cols - 1)).all()
    assert np.isfinite(y[2].astype(np.float32)).all()
    assert np.isnan(y[4:].astype(np.float32)).all()
    added = np.where(mask, 0, -np.inf).astype(np.float32)  # adds to a NaN, where False hides it
    assert np.isnan(gpu_ops.softmax(x, mask=added, **backend)[2].astype(np.float32)).all()


def test_the_largest_numbers_of_long_rows(rng):
    """The CPU takes 64 numbers at a time, and single ones at the end: the maximum is in either part."""
    x, dy = random(rng, (4, 4099), np.dtype(np.float32), 3), random(rng, (4, 4099), np.dtype(np.float32))
    columns = np.array([5, 4000, 4097, 4098])
    x[np.arange(4), columns], x[np.arange(4), columns - 1] = 300, 299
    for options in ({}, {"mask": random(rng, (4, 4099), np.dtype(np.float32)), "scale": 0.7}):
        check({"device": "cpu", "backend": "numba"}, x, dy, **options)


def test_results_of_many_rows_are_streamed(rng):
    x = random(rng, (1100, 4099), np.dtype(ml_dtypes.bfloat16), 2)
    few = np.concatenate([gpu_ops.softmax(x[i : i + 100]) for i in range(0, 1100, 100)])
    assert gpu_ops.softmax(np.tile(x, (3, 1)))[1100:2200].tobytes() == few.tobytes()


@pytest.mark.parametrize("cols", [7, 1000, 4099])
def test_a_float32_row_sums_to_one(cols, rng):
    """The sum and each quotient are rounded once: one unit of error in total, however long the row."""
    pytest.importorskip("numba")
    y = gpu_ops.softmax(random(rng, (2000, cols), np.float32, 3), device="cpu", backend="numba")
    assert np.abs(y.sum(axis=-1, dtype=np.float64) - 1).max() <= 2.0**-23


@settings(max_examples=25)
@given(shift=st.floats(-50, 50), rows=st.integers(1, 4), cols=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_rows_sum_to_one_and_do_not_depend_on_a_shift(shift, rows, cols, seed):
    x = np.random.default_rng(seed).standard_normal((rows, cols))
    for softmax in (reference.softmax, gpu_ops.softmax):
        np.testing.assert_allclose(softmax(x).sum(axis=-1), 1, rtol=1e-13)
        np.testing.assert_allclose(softmax(x + shift), softmax(x), rtol=1e-12)


def test_backward_is_the_derivative(rng):
    x, dy, direction = (rng.standard_normal((4, 9)) for _ in range(3))
    options = {"scale": 0.7, "mask": np.where(rng.random((4, 1, 9)) < 0.7, 0.5, -np.inf)[:, 0]}
    ahead, behind = (reference.softmax(x + step * direction, **options) for step in (1e-5, -1e-5))
    dx = reference.softmax_backward(dy, reference.softmax(x, **options), scale=0.7)
    assert np.sum(dy * (ahead - behind)) / 2e-5 == pytest.approx(np.sum(dx * direction), rel=1e-7)


def test_textbook_code_by_the_reference_backend(rng):
    """``naive_ops`` gives naive_t for bounds of whole models, and restores the backend afterwards."""
    x = random(rng, (3, 40), ml_dtypes.bfloat16)
    naive = reference.softmax(x, precision="naive")
    with naive_ops():
        assert gpu_ops.softmax(x).tobytes() == naive.tobytes()
    rounded = gpu_ops.softmax(x, backend="reference")
    assert rounded.tobytes() == reference.softmax(x).tobytes() != naive.tobytes()
