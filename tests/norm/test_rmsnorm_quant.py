"""RMSNorm to int8: codes, scales and row sums on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops.errors import ShapeError
from gpu_ops.reference.norm import rmsnorm as reference
from tests.rows.cases import emulator_dtypes
from tests.support.compare import random

DEVICES = ("cpu", "emulator", "cuda")
CASTINGS = ["fp32", "llama", "gemma"]
SHAPES = [(1,), (7,), (1, 123), (3, 5, 64), (2, 4095), (1, 8193), (1, 65536), (300, 257)]


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def check(q, scale, rowsum, x, weight, **options):
    """Check codes where the real number is clearly closer to one integer than to another."""
    dtype = x.dtype
    y = reference.rmsnorm(x, weight, precision="float64", **options)
    y = y[0] if isinstance(y, tuple) else y
    absmax = np.maximum(np.abs(y).max(axis=-1), 1e-5)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[
        dtype.name
    ]
    # llama rounds three times to the dtype of x; the other modes compute in float32 whatever the dtype
    llama = options.get("casting") == "llama" or "residual" in options
    relative = 4 * (rounding if llama else min(rounding, 2.0**-24))
    statistics = np.float64 if dtype == np.float64 else np.float32
    assert (q.dtype, scale.dtype, rowsum.dtype) == (np.int8, statistics, np.int32)
    assert (q.shape, scale.shape, rowsum.shape) == (x.shape, x.shape[:-1], x.shape[:-1])
    np.testing.assert_allclose(scale, absmax / 127, rtol=relative + 1e-15)
    real = y * (127 / absmax)[..., None]
    assert (np.abs(q - real) <= 0.5 + 127 * 2 * relative + 1e-12).all()
    assert (np.abs(q.astype(int)).max(axis=-1) == 127).all()
    np.testing.assert_array_equal(rowsum, q.sum(axis=-1, dtype=np.int64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_codes_scale_rowsum(backend, dtype, shape, casting, rng):
    x, weight = random(rng, shape, dtype, 2), random(rng, shape[-1:], dtype)
    options = {"eps": 1e-5, "casting": casting, "weight_offset": 1.0 if casting == "gemma" else 0.0}
    check(*gpu_ops.rmsnorm_quant_int8(x, weight, **options, **backend), x, weight, **options)


@pytest.mark.parametrize("casting", CASTINGS)
def test_residual(backend, dtype, casting, rng):
    x, residual = random(rng, (9, 321), dtype), random(rng, (9, 321), dtype)
    weight = random(rng, (321,), dtype)
    options = {"residual": residual, "casting": casting}
    q, scale, rowsum, s = gpu_ops.rmsnorm_quant_int8(x, weight, **options, **backend)
    assert s.tobytes() == (x.astype(np.float64) + residual.astype(np.float64)).astype(dtype).tobytes()
    check(q, scale, rowsum, x, weight, **options)
    alone = gpu_ops.rmsnorm_quant_int8(s, weight, casting=casting, **backend)
    assert [a.tobytes() for a in alone] == [q.tobytes(), scale.tobytes(), rowsum.tobytes()]


def test_llama_is_the_norm_and_then_the_quantisation(backend, rng):
    """y of casting="llama" is a tensor of the model, so fusion must not change any code."""
    for dtype in (np.float16, np.float32):
        x, weight = random(rng, (40, 200), dtype), random(rng, (200,), dtype)
        y = gpu_ops.rmsnorm(x, weight, casting="llama", **backend).astype(np.float64)
        q, scale, _ = gpu_ops.rmsnorm_quant_int8(x, weight, casting="llama", **backend)
        absmax = np.abs(y).max(axis=-1)
        np.testing.assert_allclose(scale, absmax / 127, rtol=3e-7)
        assert (np.abs(q - y * (127 / absmax)[:, None]) <= 0.5 + 1e-4).all()


def test_halves_round_to_even(backend, dtype):
    # rows of +-1 have rms 1 when eps vanishes and the largest weight is 127, so the codes are the weights
    weight = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5] * 9, dtype)
    x = np.array([[1.0] * 54, [-1.0] * 54], dtype)
    q, scale, rowsum = gpu_ops.rmsnorm_quant_int8(x, weight, eps=1e-30, **backend)
    expected = np.array([127, 0, 2, 2, 0, -2] * 9)
    np.testing.assert_array_equal(q, [expected, -expected])
    np.testing.assert_array_equal(scale, 1)
    np.testing.assert_array_equal(rowsum, [expected.sum(), -expected.sum()])


def test_zeros_nan_and_infinity(backend, dtype, rng):
    x, weight = random(rng, (5, 70), dtype), np.ones(70, dtype)
    clean = gpu_ops.rmsnorm_quant_int8(x, weight, **backend)
    x[1], x[2, 3], x[3, 60] = 0, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        q, scale, rowsum = gpu_ops.rmsnorm_quant_int8(x, weight, **backend)
    for r in (1, 2, 3):
        np.testing.assert_array_equal(q[r], 0)
        assert rowsum[r] == 0
    np.testing.assert_allclose(scale[1], 1e-5 / 127, rtol=1e-6)
    assert np.isnan(scale[2:4]).all()
    for r in (0, 4):
        assert all(a[r].tobytes() == b[r].tobytes() for a, b in zip((q, scale, rowsum), clean, strict=True))
    weight[5] = np.inf
    with np.errstate(invalid="ignore"):
        q, scale, _ = gpu_ops.rmsnorm_quant_int8(x[:1], weight, **backend)
    np.testing.assert_array_equal(q, 0)
    assert np.isposinf(scale[0])


@settings(max_examples=25)
@given(
    exponent=st.integers(-40, 40),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    seed=st.integers(0, 2**31),
)
def test_codes_ignore_the_scale_of_x_and_of_the_weight(exponent, shape, seed):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal(shape), rng.standard_normal(shape[1]) + 2.0
    q, scale, rowsum = gpu_ops.rmsnorm_quant_int8(x, weight, eps=1e-300)
    again = gpu_ops.rmsnorm_quant_int8(x * 2.0**exponent, weight, eps=1e-300)
    assert [a.tobytes() for a in again] == [q.tobytes(), scale.tobytes(), rowsum.tobytes()]
    larger = gpu_ops.rmsnorm_quant_int8(x, weight * 8.0, eps=1e-300)
    if (scale > 1e-5).all():  # above the floor of absmax
        np.testing.assert_array_equal(larger[0], q)
        np.testing.assert_array_equal(larger[1], scale * 8)
    flipped = gpu_ops.rmsnorm_quant_int8(-x, weight, eps=1e-300)
    np.testing.assert_array_equal(flipped[0], -q)
    np.testing.assert_array_equal(flipped[2], -rowsum)


def test_rows_whose_sums_of_codes_an_int32_cannot_hold(backend):
    """Long rows are refused before they are read: untouched zeros take no memory."""
    x = np.zeros((1, (2**31 - 1) // 127 + 1), np.float16)
    with pytest.raises(
        ShapeError, match="16909321 elements; at most 16909320, whose codes add up to an int32"
    ):
        gpu_ops.rmsnorm_quant_int8(x, x[0], **backend)


def test_the_longest_row_of_largest_codes():
    x = np.ones((1, (2**31 - 1) // 127), np.float16)
    q, _, rowsum = gpu_ops.rmsnorm_quant_int8(x, x[0])
    assert (q == 127).all()
    assert rowsum[0] == 2**31 - 8
