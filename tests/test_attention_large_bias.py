"""Scores beside which q.k is nothing: their keys weigh the same, and lse cannot say how many they are."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference import attention as reference
from gpu_ops.reference import attention_backward as reference_backward
from tests.attention_cases import DTYPES, has_gradients, make

DEVICES = ("cpu", "emulator", "cuda")
LARGE = [-1e20, float(np.finfo(np.float32).min), 1e20]
ATOL = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3, "float64": 1e-12}


def quick_on_emulator(raw):
    lowest = float(np.finfo(np.float32).min)
    return {
        "test_rows_of_one_bias": {"dtype": ["float32"], "large": [lowest], "sinks": [False]},
        "test_gradients_of_rows_of_one_bias": {"dtype": ["float32"], "large": [lowest], "sinks": [True]},
        "test_parts_of_the_keys_weigh_by_their_number": {"dtype": ["bfloat16"], "large": [lowest] * raw},
        "test_float64_tells_large_biases_apart": {},
        "test_a_bias_of_nan_is_seen": {} if raw else None,  # a Numba kernel of its own, seconds to compile
    }


def check(name, actual, exact, dtype):
    atol = ATOL[dtype] * max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=0, atol=atol, err_msg=name)


def biased(dtype, large, mask, sinks, queries=150, keys=260):
    """All keys of one row have the same large bias, most keys of another too; half of a third are masked."""
    p = make(mask=mask, seqlens=(queries, keys), head_dims=(16, 16), heads=(2, 1), dtype=dtype, sinks=sinks)
    bias = np.zeros((queries, keys), np.float64 if dtype == "float64" else np.float32)
    bias[3], bias[queries // 2, 40:] = large, large
    bias[5, ::2] = -np.inf
    return p, p.options | {"bias": bias}, p.options | {"bias": bias.astype(np.float64)}


CASES = pytest.mark.parametrize(("mask", "sinks"), [("full", False), ("causal", False), ("causal", True)])


@CASES
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_bias(dtype, large, mask, sinks, backend):
    size = {"queries": 20, "keys": 150} if backend["device"] == "emulator" else {}
    p, settings, precise = biased(dtype, large, mask, sinks, **size)
    out = gpu_ops.attention(*p.arrays, **settings, **backend)
    check("out", out, reference.attention(*(x.astype(np.float64) for x in p.arrays), **precise), dtype)


@CASES
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rows_of_one_bias(dtype, large, mask, sinks, backend):
    if not has_gradients(backend):
        pytest.skip(f"attention_backward has no {backend['backend']} kernels")
    size = {"queries": 20, "keys": 150} if backend["device"] == "emulator" else {}
    p, settings, precise = biased(dtype, large, mask, sinks, **size)
    exact = [x.astype(np.float64) for x in (p.dout, *p.arrays)]
    out, lse = gpu_ops.attention(*p.arrays, **settings, return_lse=True, **backend)
    *results, extra = gpu_ops.attention_backward(
        p.dout, *p.arrays, out, lse, **settings, return_extra=True, **backend
    )
    *gradients, more = reference_backward.attention_backward(
        *exact, *(x.astype(np.float64) for x in (out, lse)), **precise, return_extra=True
    )
    names = ("dq", "dk", "dv", "dbias")
    for name, actual, wanted in zip(
        names, (*results, extra["bias"]), (*gradients, more["bias"]), strict=True
    ):
        check(name, actual, wanted, dtype)


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_keys_weigh_by_their_number(dtype, large, backend):
    """One query: the keys go in parts, the last of which is shorter."""
    keys = 1000
    p = make(seqlens=(1, keys), head_dims=(16, 16), heads=(1, 1), batch=1, dtype=dtype)
    bias = np.full((1, keys), large, np.float64 if dtype == "float64" else np.float32)
    out = gpu_ops.attention(*p.arrays, bias=bias, **backend)
    check("out", out, p.v.astype(np.float64).mean(1, keepdims=True), dtype)


@pytest.mark.parametrize("dtype", ["float64"])
def test_float64_tells_large_biases_apart(dtype, backend):
    p = make(seqlens=(2, 3), head_dims=(8, 8), heads=(1, 1), batch=1, dtype=dtype)
    bias = np.array([[-1e39, -3e38, -1e39], [-1e300, -1e301, -1e307]])
    out = gpu_ops.attention(*p.arrays, bias=bias, **backend)
    np.testing.assert_array_equal(out[0], p.v[0, [1, 0]])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bias_of_nan_is_seen(dtype, backend):
    p = make(seqlens=(2, 3), head_dims=(8, 8), heads=(1, 1), batch=1, dtype=dtype)
    bias = np.zeros((2, 3), dtype)
    bias[1, 2] = np.nan
    out = gpu_ops.attention(*p.arrays, bias=bias, **backend)
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1]).all()


def test_a_bias_does_not_make_a_score_of_what_overflows():
    """float32 holds q.k of -1e40 as -inf, a mask; the reference has float64."""
    q, k, v = (np.full((1, 5, 1, 8), x, np.float32) for x in (1e20, -1e20, 1))
    bias = np.zeros((5, 5), np.float32)
    np.testing.assert_array_equal(gpu_ops.attention(q, k, v, device="cpu"), 0)
    np.testing.assert_array_equal(gpu_ops.attention(q, k, v, bias=bias, device="cpu"), 0)
