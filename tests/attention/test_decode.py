"""attention_decode on every backend, over contiguous and paged caches, against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DeviceError
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, assert_lse, pairwise, row_id
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    """Run each behaviour once; test_attention_pairwise crosses the options."""
    return {
        "test_options": None,
        "test_dtypes": {"dtype": ["float16", "float64"][not raw :], "page_size": [16]},
        "test_head_dims": {"head_dim": [59, 96] * raw},
        "test_paged_equals_contiguous": {"page_size": [16] * raw},
        "test_rows_that_see_nothing": {"sinks": [True] * raw},
        "test_a_sink_of_minus_infinity_is_none": {"num_splits": [3] * raw},
        "test_empty_inputs": {"page_size": [None, 4] * raw},
        **({} if raw else {"*": None}),  # Numba compiles for seconds, a kernel for most tests
    }


FACTORS = {
    "used": ((700, 1, 0, 333), (1,), (64, 65), (0, 2048)),
    "seqlen_q": (1, 3, 17),
    "dtype": ("float32", "bfloat16", "float16"),
    "page_size": (None, 1, 4, 16, 128),
    "causal": (False, True),
    "window_size": ((-1, -1), (20, 0), (100, 3)),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "alibi": (None, "heads", "batch_heads"),
    "heads": ((4, 1), (8, 2), (3, 3)),
    "head_dims": ((64, 64), (40, 24), (128, 128)),
    "num_splits": (0, 1, 3),
}


def make(
    *,
    used=(700, 1, 0, 333),
    seqlen_q=1,
    dtype="float32",
    page_size=None,
    sinks=False,
    alibi=None,
    heads=(4, 1),
    head_dims=(64, 64),
    **options,
):
    """(q, k_cache, v_cache) and options; unused parts of the cache are NaN."""
    rng = np.random.default_rng(0)
    native = DTYPES[dtype]
    (nheads, nheads_kv), (head_dim, head_dim_v), batch = heads, head_dims, len(used)
    q = rng.standard_normal((batch, seqlen_q, nheads, head_dim)).astype(native)
    options["seqused_k"] = np.array(used, np.int32)
    max_seqlen = max(used, default=0) + 5
    page = page_size or max_seqlen
    pages_each = -(-max_seqlen // page)
    order = rng.permutation(batch * pages_each).reshape(batch, pages_each)
    caches = []
    for d in (head_dim, head_dim_v):
        dense = np.full((batch, pages_each * page, nheads_kv, d), np.nan, native)
        for b, n in enumerate(used):
            dense[b, :n] = rng.standard_normal((n, nheads_kv, d)).astype(native)
        if page_size:
            pages = np.full((batch * pages_each + 3, page, nheads_kv, d), np.nan, native)
            pages[order.ravel()] = dense.reshape(-1, page, nheads_kv, d)
            dense = pages
        caches.append(dense)
    if page_size:
        needed = -(-np.array(used) // page)[:, None]
        options["block_table"] = np.where(np.arange(pages_each) < needed, order, -1).astype(np.int32)
    if sinks:
        options["sinks"] = rng.standard_normal(nheads).astype(np.float32)
    if alibi:
        shape = (nheads,) if alibi == "heads" else (batch, nheads)
        options["alibi_slopes"] = rng.uniform(0.01, 0.2, shape).astype(np.float32)
    return (q, *caches), options


def check(backend, *, num_splits=0, **settings):
    arrays, options = make(**settings)
    q = arrays[0]
    out, lse = gpu_ops.attention_decode(*arrays, **options, num_splits=num_splits, return_lse=True, **backend)
    assert out.dtype == q.dtype
    exact, naive = (
        reference.attention_decode(*arrays, **options, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    if q.dtype == np.float64:
        np.testing.assert_allclose(out, exact[0], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse, exact[1], rtol=1e-11, atol=1e-12)
        return
    assert_close(out, exact[0], naive[0], q.dtype, what="out")
    assert_lse(lse, exact[1], q.dtype, options.get("softcap"))


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=row_id)
def test_options(row, backend):
    check(backend, **row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_dtypes(dtype, page_size, backend):
    check(backend, dtype=dtype, page_size=page_size, causal=True, seqlen_q=2)


@pytest.mark.parametrize("head_dim", [1, 8, 59, 96, 256])
def test_head_dims(head_dim, backend):
    if backend["backend"] == "raw" and head_dim % 8:
        with pytest.raises(
            DeviceError, match=f"raw: head_dim {head_dim}/{head_dim}: float32 wants multiples"
        ):
            check(backend, head_dims=(head_dim, head_dim))
        return
    check(backend, head_dims=(head_dim, head_dim), used=(100, 37), page_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_long_cache(dtype, page_size, backend):
    check(backend, used=(40000, 12345), heads=(32, 8), head_dims=(128, 128), dtype=dtype, page_size=page_size)


def test_one_query_sees_all_with_or_without_causal(backend):
    arrays, options = make()
    out = gpu_ops.attention_decode(*arrays, **options, **backend)
    np.testing.assert_array_equal(gpu_ops.attention_decode(*arrays, **options, causal=True, **backend), out)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_paged_equals_contiguous(page_size, backend):
    settings = {"causal": True, "seqlen_q": 3, "sinks": True, "dtype": "bfloat16"}
    paged, paged_options = make(page_size=page_size, **settings)
    pages, table = paged[1:], paged_options.pop("block_table")
    dense = [np.stack([x[t].reshape(-1, *x.shape[2:]) for t in table]) for x in pages]
    expected = gpu_ops.attention_decode(paged[0], *dense, **paged_options, **backend)
    actual = gpu_ops.attention_decode(*paged, **paged_options, block_table=table, **backend)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks, backend):
    arrays, options = make(used=(0, 2, 90), seqlen_q=4, causal=True, sinks=sinks)
    out, lse = gpu_ops.attention_decode(*arrays, **options, return_lse=True, **backend)
    alone = options["sinks"][:, None] if sinks else np.float32(-np.inf)
    for b, blind in enumerate((4, 2, 0)):
        assert (out[b, :blind] == 0).all()
        np.testing.assert_allclose(lse[b, :, :blind], np.broadcast_to(alone, (4, blind)), rtol=1e-6)
        assert (out[b, blind:] != 0).all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sink_of_minus_infinity_is_none(num_splits, backend):
    arrays, options = make(seqlen_q=2, causal=True)
    plain, plain_lse = gpu_ops.attention_decode(*arrays, **options, return_lse=True, **backend)
    options["sinks"] = np.full(4, -np.inf, np.float32)
    out, lse = gpu_ops.attention_decode(*arrays, **options, num_splits=num_splits, return_lse=True, **backend)
    np.testing.assert_allclose(out, plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, plain_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("used", [(700, 1, 0, 65), (3, 2)], ids=str)
def test_a_key_is_in_a_single_split(used):
    """Sequences of many keys, and of fewer than there are splits, on the CPU."""
    settings = {"used": used, "seqlen_q": 2, "causal": True, "num_splits": 3}
    check({"device": "cpu", "backend": "numba"}, **settings)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(("used", "seqlen_q"), [((), 1), ((5, 9), 0), ((0, 0), 2)], ids=str)
def test_empty_inputs(used, seqlen_q, page_size, backend):
    arrays, options = make(used=used, seqlen_q=seqlen_q, page_size=page_size)
    out, lse = gpu_ops.attention_decode(*arrays, **options, return_lse=True, **backend)
    assert out.shape == (len(used), seqlen_q, 4, 64)
    assert lse.shape == (len(used), 4, seqlen_q)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_pages_without_rows(backend):
    q, pages = np.ones((1, 1, 2, 8), np.float32), np.ones((1, 0, 1, 8), np.float32)
    lengths, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    out = gpu_ops.attention_decode(q, pages, pages, seqused_k=lengths, block_table=table, **backend)
    np.testing.assert_array_equal(out, np.zeros_like(q))


def test_a_used_nan_is_not_lost(backend):
    (q, k, v), options = make()
    v[0, 350, 0, 7] = np.nan
    k[3, 12, 0, 0] = np.nan
    out = gpu_ops.attention_decode(q, k, v, **options, **backend)
    assert np.isnan(out[0, :, :, 7]).all()
    assert np.isnan(out[3]).all()
    assert np.isnan(out).sum() == 4 + 4 * 64
