"""Scores so large that q.k vanishes: their keys have equal weights, and lse cannot tell how many there are."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from gpu_ops.reference.attention import backward as reference_backward
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, has_gradients, make

DEVICES = ("cpu", "emulator", "cuda")
LARGE = [-1e20, float(np.finfo(np.float32).min), 1e20]
ATOL = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3, "float64": 1e-12}


def quick_on_emulator(raw):
    lowest = float(np.finfo(np.float32).min)
    gradients = {"dtype": ["float32"], "large": [lowest], "sinks": [True]}
    if raw:
        gradients |= {"large": [-1e20, 1e20], "mask": ["causal"], "sinks": [False]}
    return {
        "test_rows_of_one_bias": {"dtype": ["float32"], "large": [lowest], "sinks": [False]},
        "test_gradients_of_rows_of_one_bias": gradients,
        "test_huge_scores": {"dtype": ["bfloat16", "float32"] if raw else ["float32"], "scale": [1e12]},
        "test_gradients_beside_other_options": {
            "option": ["sinks"] * raw,
            "deterministic": [True],
            "lse_dtype": ["float32"],
        },
        "test_gradients_of_one_bias_for_all_queries": {"head_dim": [16, 128] if raw else []},
        "test_gradients_of_equal_keys": {"size": []},
        "test_gradients_of_equal_keys_in_sequences": {} if raw else None,
        "test_parts_of_the_keys_weigh_by_their_number": {"dtype": ["bfloat16"], "large": [lowest] * raw},
        "test_float64_tells_large_biases_apart": {},
        "test_a_bias_of_nan_is_seen": {} if raw else None,  # a separate Numba kernel, seconds to compile
    }


def check(name, actual, exact, dtype):
    atol = ATOL[dtype] * max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=0, atol=atol, err_msg=name)


def biased(dtype, large, mask, sinks, queries=150, keys=260):
    """All keys of one row and most keys of another have the same large bias; half of a third row is masked."""
    p = make(mask=mask, seqlens=(queries, keys), head_dims=(16, 16), heads=(2, 1), dtype=dtype, sinks=sinks)
    bias = np.zeros((queries, keys), np.float64 if dtype == "float64" else np.float32)
    bias[3], bias[queries // 2, 40:] = large, large
    bias[5, ::2] = -np.inf
    return p, p.options | {"bias": bias}, p.options | {"bias": bias.astype(np.float64)}


def check_gradients(p, settings, precise, dtype, backend, lse_dtype=None, **more):
    """Check gradients, those of the options included. ``precise``: settings for the reference, in float64."""
    exact = [x.astype(np.float64) for x in (p.dout, *p.arrays)]
    out, lse = gpu_ops.attention(*p.arrays, **settings, return_lse=True, **backend)
    lse = lse.astype(lse_dtype or lse.dtype)
    *results, extra = gpu_ops.attention_backward(
        p.dout, *p.arrays, out, lse, **settings, return_extra=True, **more, **backend
    )
    *gradients, expected = reference_backward.attention_backward(
        *exact, *(x.astype(np.float64) for x in (out, lse)), **precise, return_extra=True
    )
    for name, actual, right in zip(("dq", "dk", "dv"), results, gradients, strict=True):
        check(name, actual, right, dtype)
    for name, actual in extra.items():
        check(f"d{name}", actual, expected[name], dtype)


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
    check_gradients(*biased(dtype, large, mask, sinks, **size), dtype, backend)


@pytest.mark.parametrize("scale", [1e9, 1e12, -1e20])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores(dtype, queries, scale, backend):
    """Floats of this size differ by more than 2^6: a row is the value of its largest score, where that is unique."""
    p = make(mask="causal", seqlens=(queries, 70), head_dims=(16, 16), heads=(4, 2), dtype=dtype)
    settings = p.options | {"softmax_scale": scale, "return_lse": True}
    exact = [x.astype(np.float64) for x in p.arrays]
    out, lse = gpu_ops.attention(*p.arrays, **settings, **backend)
    expected, expected_lse = reference.attention(*exact, **settings)
    milder = reference.attention(*exact, **settings | {"softmax_scale": scale * 1e-7})
    clear = np.abs(expected - milder[0]) <= 1e-9
    assert clear.mean() > 0.5
    check("out", out[clear], expected[clear], dtype)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


OPTIONS = {
    "alibi": {"alibi_slopes": np.array([0.5, 0.25], np.float32)},
    "softcap": {"softcap": 1.5},
    "block_mask": {"block_mask": BlockMask(np.array([[True, False, True], [False, True, True]]), 10, 50)},
    "window": {"window_size": (60, 3)},
    "dropout": {"dropout_p": 0.25, "seed": 7},
    "sinks": {"sinks": np.array([1e20, -np.inf], np.float32)},
}


@pytest.mark.parametrize("lse_dtype", ["float32", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_beside_other_options(option, deterministic, lse_dtype, backend):
    if not has_gradients(backend):
        pytest.skip(f"attention_backward has no {backend['backend']} kernels")
    if option == "sinks" and backend["backend"] == "numba":
        pytest.skip("Numba's kernels round a sink of 1e20 unlike a score of 1e20")
    p, settings, precise = biased("float32", 1e20, "full", False, queries=20, keys=150)
    settings, precise = settings | OPTIONS[option], precise | OPTIONS[option]
    check_gradients(p, settings, precise, "float32", backend, lse_dtype, deterministic=deterministic)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize(("dtype", "head_dim"), [*((dtype, 16) for dtype in DTYPES), ("bfloat16", 128)])
def test_gradients_of_one_bias_for_all_queries(dtype, head_dim, queries, backend):
    """lse is ambiguous for every row, including the last before the padding of a tile."""
    if not has_gradients(backend):
        pytest.skip(f"attention_backward has no {backend['backend']} kernels")
    p = make(seqlens=(queries, 70), head_dims=(head_dim, head_dim), heads=(2, 2), dtype=dtype)
    bias = np.full((1, 70), 1e20)
    settings = p.options | {"bias": bias.astype(np.float64 if dtype == "float64" else np.float32)}
    check_gradients(p, settings, p.options | {"bias": bias}, dtype, backend, deterministic=True)


def equal_keys(dtype, size, queries, keys):
    """q, k, v, dout and out: each query's products with all keys are `size`, and exact."""
    rng = np.random.default_rng(0)
    q, k = np.zeros((2, queries, 2, 16)), np.zeros((2, keys, 1, 16))
    q[..., 0], k[..., 0] = 1024, size / 1024
    v, dout = rng.standard_normal((2, keys, 1, 16)), rng.standard_normal((2, queries, 2, 16))
    out = np.broadcast_to(v.mean(1, keepdims=True), dout.shape)
    return [x.astype(DTYPES[dtype]) for x in (q, k, v, dout, out)]


@pytest.mark.parametrize("size", [1 << 14, 1 << 20, 3 << 23])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_equal_keys(dtype, size, backend):
    """Gradients without any option: float32 holds 2^24 + log 100 as 2^24."""
    if not has_gradients(backend):
        pytest.skip(f"attention_backward has no {backend['backend']} kernels")
    q, k, v, dout, out = equal_keys(dtype, size, 20, 100)
    lse = np.full((2, 2, 20), size + np.log(100), np.float32)
    _, dk, dv = gpu_ops.attention_backward(dout, q, k, v, out, lse, softmax_scale=1.0, **backend)
    dout, v, out = (x.astype(np.float64) for x in (dout, v, out))
    check("dv", dv, np.broadcast_to(dout.sum((1, 2), keepdims=True) / 100, v.shape), dtype)
    dscores = (np.einsum("bihd,bjd->bjih", dout, v[:, :, 0]) - (dout * out).sum(-1)[:, None]) / 100
    check("dk", dk[..., 0], 1024 * dscores.sum((2, 3))[..., None], dtype)


def test_gradients_of_equal_keys_in_sequences(backend):
    if not has_gradients(backend):
        pytest.skip(f"attention_backward has no {backend['backend']} kernels")
    size, starts = 3 << 23, (np.array([0, 9, 80], np.int32), np.array([0, 70, 130], np.int32))
    q, k, v, dout, _ = (x[0] for x in equal_keys("float32", size, 80, 130))
    out, lse = gpu_ops.attention_varlen(q, k, v, *starts, softmax_scale=1.0, return_lse=True, **backend)
    dv = gpu_ops.attention_varlen_backward(dout, q, k, v, out, lse, *starts, softmax_scale=1.0, **backend)[2]
    for queries, keys in (slice(0, 9), slice(0, 70)), (slice(9, 80), slice(70, 130)):
        mean = dout[queries].astype(np.float64).sum((0, 1)) / (keys.stop - keys.start)
        check("dv", dv[keys], np.broadcast_to(mean, v[keys].shape), "float32")


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_keys_weigh_by_their_number(dtype, large, backend):
    """One query: the keys are split in parts, the last of which is shorter."""
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
