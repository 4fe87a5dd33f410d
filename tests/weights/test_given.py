"""Ternary matmul of int8 activations with scales: exact sums on every backend."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops import TernaryMatrix, rmsnorm_quant_int8, ternary_matmul
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.reference.weights.ternary_formats import FORMATS
from tests.support.call_maker import SIZES
from tests.support.compare import random
from tests.support.compilers import slow

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    """Run one problem for each code path: one token, a few, and many; groups."""
    few = {"size": {(1, 67, 65), (3, 5, 256), (20, 17, 320)}}
    return {
        "test_sums_are_exact": few if raw else {"size": {(3, 5, 256)}},
        "test_nan_and_zero": {"m": {2}},
        "test_after_the_norm_it_is_the_float_call": {"m": {5}} if raw else None,
    }


def codes(rng, m, k):
    """Random codes, including -128, which rmsnorm_quant_int8 does not produce."""
    return rng.integers(-128, 128, (m, k)).astype(np.int8)


def trits(rng, n, k):
    return rng.integers(-1, 2, (n, k)).astype(np.int8)


def wanted(q, t, scale, x_scale):
    """Product in float64. ``scale`` (N,) or (N, groups), ``x_scale`` (tokens,)."""
    n, k = t.shape
    scales = np.broadcast_to(np.repeat(scale.reshape(n, -1), k // scale.reshape(n, -1).shape[1], 1), t.shape)
    return (q.astype(np.float64) @ (t * scales.astype(np.float64)).T) * x_scale.astype(np.float64)[:, None]


# tokens, N, K: one, some and many tokens; K not a multiple of a vector, a multiple, and more than one step
EVERY = [(1, 67, 65), (1, 9, 2100), (3, 5, 256), (4, 33, 1000), (17, 31, 63), (20, 17, 320), (130, 40, 257)]


@pytest.mark.parametrize("size", EVERY)
def test_sums_are_exact(size, backend, rng):
    """Power-of-two scales need no rounding. Test every format that takes any shape."""
    m, n, k = size
    q, t, x_scale = codes(rng, m, k), trits(rng, n, k), 2.0 ** rng.integers(-3, 4, m).astype(np.float32)
    formats = [name for name, f in FORMATS.items() if f.pads]
    scale = 2.0 ** rng.integers(-2, 3, n).astype(np.float32)
    w = TernaryMatrix.from_trits(t, scale, format=formats[m % len(formats)])
    y = ternary_matmul(q, w, x_scale=x_scale, **backend)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, wanted(q, t, scale, x_scale))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        y = ternary_matmul(q, w, x_scale=x_scale / 64, out_dtype=dtype, **backend)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, wanted(q, t, scale, x_scale / 64).astype(np.float32).astype(dtype))


@pytest.mark.parametrize("m", [1, 20])
def test_scales_per_group(m, backend, rng):
    q, t, x_scale = codes(rng, m, 256), trits(rng, 9, 256), np.ones(m, np.float32)
    scale = 2.0 ** rng.integers(-2, 3, (9, 4)).astype(np.float32)
    y = ternary_matmul(q, TernaryMatrix.from_trits(t, scale), x_scale=x_scale, **backend)
    np.testing.assert_array_equal(y, wanted(q, t, scale, x_scale))


def test_shapes_of_x_scale(backend, rng):
    """x_scale is per token, with or without a last axis of one, or one for all; a token may be a vector."""
    q, w = codes(rng, 6, 64).reshape(2, 3, 64), TernaryMatrix.from_trits(trits(rng, 8, 64))
    x_scale = rng.uniform(0.1, 2, (2, 3)).astype(np.float32)
    y = ternary_matmul(q, w, x_scale=x_scale, **backend)
    assert y.shape == (2, 3, 8)
    np.testing.assert_array_equal(ternary_matmul(q, w, x_scale=x_scale[..., None], **backend), y)
    np.testing.assert_array_equal(ternary_matmul(q[1, 2], w, x_scale=x_scale[1, 2, None], **backend), y[1, 2])
    scalar = np.array(0.25, np.float32)
    every = ternary_matmul(q, w, x_scale=np.full((2, 3), scalar), **backend)
    np.testing.assert_array_equal(ternary_matmul(q, w, x_scale=scalar, **backend), every)


@pytest.mark.parametrize("m", [2, 40])
def test_nan_and_zero(m, backend, rng):
    """A NaN scale affects only its token; a zero scale gives zeros."""
    q, x_scale = codes(rng, m, 100), np.ones(m, np.float32)
    x_scale[0], x_scale[1] = np.nan, 0
    y = ternary_matmul(q, TernaryMatrix.from_trits(trits(rng, 9, 100)), x_scale=x_scale, **backend)
    assert np.isnan(y[0]).all()
    assert (y[1] == 0).all()
    assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("m", [1, 5, *slow(700)])
def test_after_the_norm_it_is_the_float_call(m, backend, rng):
    """rmsnorm_quant_int8 rounds to int8 what the float call rounds internally; the sum is the same."""
    x, weight = random(rng, (m, SIZES["K"]), np.float32), random(rng, (SIZES["K"],), np.float32)
    w = TernaryMatrix.from_trits(trits(rng, 40, SIZES["K"]), np.float32(0.37))
    q, scale, _ = rmsnorm_quant_int8(x, weight, **backend)
    y = ternary_matmul(q, w, x_scale=scale, **backend)
    expected = ternary_matmul(gpu_ops.rmsnorm(x, weight, **backend), w, **backend)
    # a code whose exact value is close to a half may differ by one step; then y differs by a step of its row
    off = np.abs(y - expected).max(axis=1)
    assert (off <= 2.1 * 0.37 * scale).all()
    assert np.linalg.norm(y - expected) <= 1e-2 * np.linalg.norm(expected)


def test_float64_stays_float64(rng):
    q, t = codes(rng, 3, 50), trits(rng, 7, 50)
    w, x_scale = TernaryMatrix.from_trits(t), rng.uniform(0.1, 2, 3)
    y = ternary_matmul(q, w, x_scale=x_scale)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, wanted(q, t, np.ones(7), x_scale))
    assert ternary_matmul(q, w, x_scale=x_scale, out_dtype=np.float32).dtype == np.float32
    with pytest.raises(DeviceError, match="raw: float64 has Numba kernels only"):
        ternary_matmul(q, w, x_scale=x_scale, device="emulator", backend="raw")


def test_sums_beyond_int32():
    k = 8_600_000
    w = TernaryMatrix.from_trits(np.ones((1, k), np.int8))
    for value in (-128, 127):
        x = np.full((1, k), value, np.int8)
        y = ternary_matmul(x, w, x_scale=np.ones(1), device="cpu", backend="numba")
        assert y[0, 0] == value * float(k)


def test_more_tokens_than_one_pass_holds(rng, monkeypatch):
    monkeypatch.setattr("gpu_ops.kernels.weights.cpu.ternary.SCRATCH_BYTES", 1 << 16)
    x, t, x_scale = codes(rng, 300, 320), trits(rng, 7, 320), rng.uniform(0.1, 2, 300)
    w = TernaryMatrix.from_trits(t)
    y = ternary_matmul(x, w, x_scale=x_scale, device="cpu", backend="numba")
    np.testing.assert_array_equal(y, wanted(x, t, np.ones(7), x_scale))


W = TernaryMatrix.from_trits(np.ones((3, 8), np.int8))
Q, ONES = np.ones((2, 8), np.int8), np.ones(2, np.float32)


def test_explain_says_what_runs():
    text = str(gpu_ops.explain("ternary_matmul", Q, W, x_scale=ONES))
    assert "2 tokens x (3 x 8) w2, int8 to float32" in text
    assert "int8 activations" in text


BAD = {
    "no scale": ((Q, W), {}, OptionError, "x is int8, so x_scale is needed"),
    "a scale for floats": ((Q.astype("f4"), W), {"x_scale": ONES}, OptionError, "x is float32 and quantised"),
    "a scale for trits": ((W, W), {"x_scale": ONES}, OptionError, "a TernaryMatrix, which has its own"),
    "native": ((Q, W), {"x_scale": ONES, "activations": "native"}, OptionError, "this x is int8"),
    "too many scales": ((Q, W), {"x_scale": np.ones(3, "f4")}, ShapeError, r"one per token of x, \(2,\)"),
    "one of an axis": ((Q, W), {"x_scale": np.ones(1, "f4")}, ShapeError, "one for all"),
    "scales in a row": ((Q, W), {"x_scale": np.ones((1, 2), "f4")}, ShapeError, "one per token"),
    "half scales": ((Q, W), {"x_scale": ONES.astype("f2")}, DTypeError, "expected float32 or float64"),
    "integer scales": ((Q, W), {"x_scale": ONES.astype(int)}, DTypeError, "x_scale is int64"),
    "a number": ((Q, W), {"x_scale": 0.5}, DTypeError, "x_scale is float, not an array"),
    "unsigned": ((Q.astype(np.uint8), W), {"x_scale": ONES}, DTypeError, "x is uint8"),
    "integer result": ((Q, W), {"x_scale": ONES, "out_dtype": int}, DTypeError, "out_dtype must be float32"),
    "another result": (
        (Q.astype("f4"), W),
        {"out_dtype": "f2"},
        DTypeError,
        "out_dtype must be float32 here",
    ),
    "of trits": ((W, W), {"out_dtype": "f8"}, DTypeError, "out_dtype must be float32 here"),
    "int8 result": ((Q, W), {"x_scale": ONES, "out": np.empty((2, 3), np.int8)}, DTypeError, "out"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(name):
    arrays, options, error, text = BAD[name]
    for _ in range(2):
        with pytest.raises(error, match=text):
            ternary_matmul(*arrays, **options)


def test_out_may_not_lie_on_the_scales():
    memory = np.zeros(8, np.float32)
    x_scale, out = memory[:2], memory[1:7].reshape(2, 3)
    with pytest.raises(ShapeError, match="out shares memory with x_scale"):
        ternary_matmul(Q, W, x_scale=x_scale, out=out)
    assert not memory.any()
