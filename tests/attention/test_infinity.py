"""Non-finite elements of q, k and v: every backend matches the reference, whatever the tile and the weights.

A value of inf that a query sees makes its column inf, however small its weight; together with -inf, NaN. The other
columns are unaffected. A key whose score is -inf is hidden, a score of inf makes the whole row NaN.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.attention.forward import attention as reference
from gpu_ops.reference.attention.forward import attention_decode as reference_decode
from tests.support.calls import DTYPES

DEVICES = ("cpu", "emulator", "cuda")
INF, NAN = np.inf, np.nan


def quick_on_emulator(raw):
    some = {"dtype": [DTYPES[0], DTYPES[1]] if raw else [DTYPES[1]]}
    return {
        "test_an_infinite_value": {**some, "gap": [2000.0], **({} if raw else {"causal": [True]})},
        "test_infinite_queries_and_keys": {**some, "softcap": [0.0]},
        "test_a_cache_of_infinities": {**some, "num_splits": [3]},
    }


def same(actual, expected, atol):
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    for predicate in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(predicate(actual), predicate(expected), err_msg=predicate.__name__)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=atol)


def problem(dtype, gap, keys):
    """q, k and v of two heads. The score of key 0 is higher than the others by ``gap``."""
    q, k = np.ones((1, 6, 2, 16), dtype), np.zeros((1, keys, 2, 16), dtype)
    v = np.ones((1, keys, 2, 24), dtype)
    k[0, 0] = gap / 4
    v[0, :, 0] = np.arange(keys)[:, None] / 256
    return q, k, v


@pytest.mark.parametrize("gap", [0.0, 200.0, -200.0, 2000.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_an_infinite_value(dtype, causal, gap, backend):
    q, k, v = problem(dtype, gap, 140)
    finite = reference(q, k, v, causal=causal).astype(np.float64)
    v[0, [0, 3, 70], 0, 5] = INF
    v[0, [1, 139], 0, 6] = -INF, INF
    v[0, 90, 1, 7] = -INF
    v[0, 137, 1, 8] = NAN
    v[0, 0, 1, 9] = -INF
    expected = reference(q, k, v, causal=causal)
    out, lse = gpu_ops.attention(q, k, v, causal=causal, return_lse=True, **backend)
    same(out, expected, {2: 1e-2, 4: 1e-6, 8: 1e-12}[dtype.itemsize])
    assert np.isfinite(lse).all()
    rest = np.isfinite(expected.astype(np.float64))
    if gap == 2000:  # the weights of the others are exactly 0
        np.testing.assert_array_equal(out.astype(np.float64)[rest], np.where(rest, finite, 0)[rest])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_infinite_queries_and_keys(dtype, softcap, backend, rng):
    q, k, v = (rng.uniform(0.5, 1.5, (1, 40, 2, 16)).astype(dtype) for _ in range(3))
    k[0, 3, 0, 2] = -INF  # hidden; with softcap, a score like any other
    v[0, 3, 0, 4] = INF  # and so is its value
    k[0, 30, 0, 2] = -INF
    k[0, 25, 1, 1], k[0, 25, 1, 2] = INF, -INF
    q[0, 7, 0, 3] = INF
    q[0, 9, 0, 3] = -INF  # sees nothing
    q[0, 11, 0, 1] = NAN
    options = {"causal": True, "softcap": softcap, "return_lse": True}
    expected = reference(q, k, v, **options)
    actual = gpu_ops.attention(q, k, v, **options, **backend)
    for x, y in zip(actual, expected, strict=True):
        same(x, y, {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_cache_of_infinities(dtype, num_splits, backend):
    """Splits of the keys whose weight is 0 next to another split, and elements past the end of the cache."""
    q, k, v = problem(dtype, 2000.0, 700)
    q = q[:, :1]
    v[0, 690, 0, 5] = INF
    v[0, 300, 1, 7] = -INF
    v[0, 695:] = NAN
    used = np.array([695], np.int32)
    expected = reference_decode(q, k, v, seqused_k=used)
    out = gpu_ops.attention_decode(q, k, v, seqused_k=used, num_splits=num_splits, **backend)
    same(out, expected, {2: 1e-2, 4: 1e-6, 8: 1e-12}[dtype.itemsize])
