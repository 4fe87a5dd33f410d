"""The attention reference against loops over the definition, finite differences and torch."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops import BlockMask
from gpu_ops.reference.attention.forward import (
    attention,
    attention_backward,
    attention_decode,
    attention_varlen,
    attention_varlen_backward,
)
from tests.attention.cases import DTYPES, FACTORS, AttentionInputs, make, pairwise, row_id

ROWS = pairwise(FACTORS)
EXACT = {"precision": "float64"}


def close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=atol)


def by_loops(p: AttentionInputs) -> tuple[np.ndarray, np.ndarray]:
    """out (bshd) and lse from the definition, one query at a time, in plain Python."""
    o = p.options
    q, k, v = (x if o.get("layout", "bshd") == "bshd" else x.swapaxes(1, 2) for x in p.arrays)
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_kv, head_dim_v = v.shape[1:]
    scale = o.get("softmax_scale") or 1 / math.sqrt(head_dim)
    left, right = o.get("window_size", (-1, -1))
    slopes, bias, blocks = o.get("alibi_slopes"), o.get("bias"), o.get("block_mask")
    if slopes is not None:
        slopes = np.broadcast_to(slopes, (batch, nheads))
    if bias is not None:
        bias = np.broadcast_to(bias, (batch, nheads, seqlen_q, seqlen_k))
    if blocks is not None:
        visible = np.broadcast_to(blocks.visible, (batch, nheads, *blocks.visible.shape[-2:]))

    out = np.zeros((batch, seqlen_q, nheads, head_dim_v))
    lse = np.zeros((batch, nheads, seqlen_q))
    for b, h, i in np.ndindex(batch, nheads, seqlen_q):
        here = i + seqlen_k - seqlen_q  # key at the position of this query
        terms = []  # (logit, value) of each visible key
        for j in range(seqlen_k):
            if o.get("causal") and j > here:
                continue
            if (left >= 0 and j < here - left) or (right >= 0 and j > here + right):
                continue
            if blocks is not None and not visible[b, h, i // blocks.block_q, j // blocks.block_k]:
                continue
            g = h * nheads_kv // nheads
            logit = scale * sum(float(a) * float(c) for a, c in zip(q[b, i, h], k[b, j, g], strict=True))
            if o.get("softcap"):
                logit = o["softcap"] * math.tanh(logit / o["softcap"])
            if slopes is not None:
                logit -= float(slopes[b, h]) * abs(here - j)
            if bias is not None:
                logit += float(bias[b, h, i, j])
            if logit > -math.inf:
                terms.append((logit, v[b, j, g]))
        logits = [logit for logit, _ in terms]
        if "sinks" in o:
            logits.append(float(o["sinks"][h]))
        total = sum(math.exp(logit) for logit in logits)
        lse[b, h, i] = math.log(total) if total else -math.inf
        for logit, value in terms:
            out[b, i, h] += math.exp(logit) / total * value
    return out, lse


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_forward_equals_the_definition_by_loops(row):
    p = make(**row)
    out, lse = attention(*p.arrays, **p.options, return_lse=True, **EXACT)
    expected, expected_lse = by_loops(p)
    close(out if row["layout"] == "bshd" else out.swapaxes(1, 2), expected)
    close(lse, expected_lse)


def differences(loss, x: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Central differences of ``loss()`` in every element of ``x``, in place."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        if not np.isfinite(kept):  # a -inf bias is a mask, not a number to differentiate by
            continue
        x[index] = kept + h
        above = loss()
        x[index] = kept - h
        below = loss()
        x[index] = kept
        gradient[index] = (above - below) / (2 * h)
    return gradient


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_backward_equals_finite_differences(row):
    p = make(**row, batch=1 if row["alibi"] != "batch_heads" else 2, side_dtype="float64")

    def loss() -> float:
        return float((p.dout * attention(*p.arrays, **p.options, **EXACT)).sum())

    out, lse = attention(*p.arrays, **p.options, return_lse=True, **EXACT)
    *grads, extra = attention_backward(p.dout, *p.arrays, out, lse, **p.options, return_extra=True, **EXACT)
    assert set(extra) == {"bias", "sinks"} & set(p.options)
    for x, gradient in zip(p.arrays, grads, strict=True):
        np.testing.assert_allclose(gradient, differences(loss, x), rtol=1e-6, atol=1e-8)
    for name, gradient in extra.items():
        np.testing.assert_allclose(gradient, differences(loss, p.options[name]), rtol=1e-6, atol=1e-8)


def test_varlen_backward_equals_finite_differences():
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 6, 4, 3))
    k, v = rng.standard_normal((2, 7, 2, 3))
    cu_q, cu_k = np.array([0, 2, 2, 6]), np.array([0, 4, 6, 7])  # an empty sequence, and sq > sk
    options = {
        "causal": True,
        "softcap": 2.0,
        "sinks": rng.standard_normal(4),
        "alibi_slopes": rng.uniform(0.1, 0.5, (3, 4)),
    }

    def loss() -> float:
        return float((dout * attention_varlen(q, k, v, cu_q, cu_k, **options, **EXACT)).sum())

    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, **EXACT)
    *grads, extra = attention_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, **options, return_extra=True, **EXACT
    )
    for x, gradient in zip((q, k, v, options["sinks"]), (*grads, extra["sinks"]), strict=True):
        np.testing.assert_allclose(gradient, differences(loss, x), rtol=1e-6, atol=1e-8)


# ---- torch -------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("seqlens", [(8, 8), (5, 9), (9, 5)])
@pytest.mark.parametrize("kind", ["full", "causal", "band", "bias"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_against_torch(seqlens, kind, heads):
    torch = pytest.importorskip("torch", reason="pip install torch to compare with its attention")
    p = make(seqlens=seqlens, heads=heads, head_dims=(8, 8), mask="full" if kind == "bias" else kind)
    if kind == "bias":
        p.options["bias"] = np.random.default_rng(1).standard_normal((2, heads[0], *seqlens))
    seqlen_q, seqlen_k = seqlens
    here = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    keys = torch.arange(seqlen_k)[None, :]
    mask = {
        "full": None,
        "causal": keys <= here,
        "band": (keys >= here - 2) & (keys <= here + 1),
        "bias": torch.from_numpy(p.options["bias"]) if kind == "bias" else None,
    }[kind]

    q, k, v = (torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in p.arrays)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    # torch makes rows without a visible key NaN or an average, by version: compare the other rows.
    seen = np.ones(seqlen_q, bool) if kind in ("full", "bias") else mask.any(dim=1).numpy()
    dout = p.dout * seen[None, :, None, None]
    theirs_seen = theirs.transpose(1, 2)[:, torch.from_numpy(seen)]
    (theirs_seen * torch.from_numpy(dout[:, seen])).sum().backward()

    out, lse = attention(*p.arrays, **p.options, return_lse=True, **EXACT)
    close(out[:, seen], theirs_seen.detach().numpy())
    assert (out[:, ~seen] == 0).all()
    assert (lse[..., ~seen] == -np.inf).all()
    grads = attention_backward(dout, *p.arrays, out, lse, **p.options, **EXACT)
    for ours, x in zip(grads, (q, k, v), strict=True):
        theirs_grad = np.nan_to_num(x.grad.transpose(1, 2).numpy())
        close(ours, theirs_grad)


# ---- edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks):
    p = make(mask="causal", seqlens=(7, 4), sinks=sinks, dtype="float32")
    out, lse = attention(*p.arrays, **p.options, return_lse=True)
    dq, dk, dv, extra = attention_backward(p.dout, *p.arrays, out, lse, **p.options, return_extra=True)
    assert (out[:, :3] == 0).all()
    assert (dq[:, :3] == 0).all()
    expected = p.options["sinks"][None, :, None] if sinks else -np.inf
    np.testing.assert_array_equal(lse[:, :, :3], np.broadcast_to(np.float32(expected), (2, 4, 3)))
    for x in (out, dq, dk, dv, *extra.values()):
        assert np.isfinite(x).all()
        assert (x != 0).any()


@pytest.mark.parametrize(("batch", "seqlens"), [(0, (3, 4)), (2, (0, 4)), (2, (3, 0)), (2, (0, 0))], ids=str)
def test_empty_inputs(batch, seqlens):
    p = make(batch=batch, seqlens=seqlens, heads=(4, 2), mask="causal", dtype="float32")
    out, lse = attention(*p.arrays, **p.options, return_lse=True)
    assert out.shape == p.dout.shape
    assert (out == 0).all()
    assert lse.shape == (batch, 4, seqlens[0])
    assert (lse == -np.inf).all()
    for gradient, x in zip(
        attention_backward(p.dout, *p.arrays, out, lse, **p.options), p.arrays, strict=True
    ):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_a_query_does_not_see_does_not_reach_it(bad, softcap):
    p = make(mask="causal", seqlens=(6, 6), heads=(4, 2), softcap=softcap)
    out, lse = attention(*p.arrays, **p.options, return_lse=True)
    grads = attention_backward(p.dout, *p.arrays, out, lse, **p.options)
    p.k[:, 4:], p.v[:, 4:], p.q[:, 4:], p.dout[:, 4:] = bad, bad, bad, bad
    poisoned, poisoned_lse = attention(*p.arrays, **p.options, return_lse=True)
    np.testing.assert_array_equal(poisoned[:, :4], out[:, :4])
    np.testing.assert_array_equal(poisoned_lse[:, :, :4], lse[:, :, :4])
    assert np.isnan(poisoned[:, 4:]).all()
    dq, dk, dv = attention_backward(p.dout, *p.arrays, poisoned, poisoned_lse, **p.options)
    np.testing.assert_array_equal(dq[:, :4], grads[0][:, :4])
    assert np.isnan(dq[:, 4:]).all()
    for gradient in (dk, dv):  # the last queries see every key, so their NaN reaches all of them
        assert np.isnan(gradient).all()


def test_a_visible_nan_value_reaches_its_rows_only():
    p = make(seqlens=(6, 6), heads=(1, 1), window_size=(1, 0), batch=1)
    out = attention(*p.arrays, **p.options)
    p.v[0, 2, 0, 1] = np.nan
    poisoned = attention(*p.arrays, **p.options)
    assert np.isnan(poisoned[0, [2, 3], 0, 1]).all()
    np.testing.assert_array_equal(np.isnan(poisoned).sum(), 2)
    np.testing.assert_allclose(poisoned[0, [0, 1, 4, 5]], out[0, [0, 1, 4, 5]], rtol=1e-13)


def test_a_nan_query_reaches_the_gradients_of_what_it_sees_only():
    p = make(mask="causal", seqlens=(6, 6), batch=1, heads=(4, 2))
    grads = attention_backward(p.dout, *p.arrays, None, None, **p.options)
    p.q[:, 1] = p.dout[:, 1] = np.nan
    poisoned = attention_backward(p.dout, *p.arrays, None, None, **p.options)
    for gradient, before, touched in zip(poisoned, grads, ([1], [0, 1], [0, 1]), strict=True):
        assert np.isnan(gradient[:, touched]).all()
        others = np.setdiff1d(np.arange(6), touched)
        np.testing.assert_allclose(gradient[:, others], before[:, others], rtol=1e-12, atol=1e-14)


def test_unseen_blocks_and_unused_cache_may_hold_anything():
    p = make(seqlens=(4, 6))
    mask = BlockMask(np.array([[True, False, True]]), 4, 2)
    expected = attention(p.q, p.k, p.v, block_mask=mask)
    grads = attention_backward(p.dout, *p.arrays, None, None, block_mask=mask)
    p.k[:, 2:4] = p.v[:, 2:4] = np.nan
    np.testing.assert_array_equal(attention(p.q, p.k, p.v, block_mask=mask), expected)
    again = attention_backward(p.dout, *p.arrays, None, None, block_mask=mask)
    for gradient, before in zip(again, grads, strict=True):
        np.testing.assert_array_equal(gradient, before)
    for gradient in again[1:]:
        assert (gradient[:, 2:4] == 0).all()


# ---- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_precisions(dtype):
    p = make(mask="causal", seqlens=(33, 40), head_dims=(16, 16), sinks=True, bias="keys", dtype=dtype)
    native, float_dtype = DTYPES[dtype], np.dtype(np.float64 if dtype == "float64" else np.float32)
    results = {}
    for precision in ("float64", "rounded", "naive"):
        out, lse = attention(*p.arrays, **p.options, return_lse=True, precision=precision)
        dq, dk, dv, extra = attention_backward(
            p.dout, *p.arrays, out, lse, **p.options, return_extra=True, precision=precision
        )
        results[precision] = [out, dq, dk, dv, lse, extra["bias"], extra["sinks"]]
    dtypes = [native] * 4 + [float_dtype, np.dtype(np.float32), float_dtype]
    for exact, rounded, naive, expected in zip(*results.values(), dtypes, strict=True):
        assert exact.dtype == np.float64
        assert rounded.dtype == naive.dtype == expected
        np.testing.assert_array_equal(rounded, exact.astype(expected))  # rounded once, at the end
        error = np.abs(naive.astype(np.float64) - exact).max()
        assert error <= 4 * float(
            max(ml_dtypes.finfo(d).eps for d in (native, expected)) * np.abs(exact).max()
        )
        if dtype != "float64":
            assert error > 0


@pytest.mark.parametrize("name", ["exact", None])
def test_an_unknown_precision_is_an_error(name):
    p = make()
    with pytest.raises(ValueError, match="precision must be"):
        attention(*p.arrays, precision=name)


# Properties of the attention reference that hold for any numbers.

# ---- varlen and decode are attention -----------------------------------------------------------------------


def some_options(draw, nheads: int, batch: int) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    slopes = draw(st.sampled_from([None, (nheads,), (batch, nheads)]))
    return {
        "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(st.integers(-1, 4), st.integers(-1, 4))),
        "softcap": draw(st.sampled_from([0.0, 1.0])),
        "sinks": rng.standard_normal(nheads) if draw(st.booleans()) else None,
        "alibi_slopes": None if slopes is None else rng.uniform(0.1, 1.0, slopes),
    }


def of_sequence(options: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = options["alibi_slopes"]
    return {**options, "alibi_slopes": slopes[b] if slopes is not None and slopes.ndim == 2 else slopes}


@settings(max_examples=30, derandomize=True)
@given(st.data())
def test_varlen_equals_one_call_per_sequence(data):
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4))
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in zip(*lengths, strict=True))
    options = some_options(data.draw, nheads=4, batch=len(lengths))
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, cu_q[-1], 4, 3))
    k, v = rng.standard_normal((2, cu_k[-1], 2, 3))
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True)
    *grads, extra = attention_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, **options, return_extra=True
    )
    dsinks = np.zeros(4)
    for b in range(len(lengths)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        sequence = (q[None, rows], k[None, keys], v[None, keys])
        out_b, lse_b = attention(*sequence, **of_sequence(options, b), return_lse=True)
        close(out[rows], out_b[0])
        close(lse[:, rows], lse_b[0])
        *grads_b, extra_b = attention_backward(
            dout[None, rows], *sequence, out_b, lse_b, **of_sequence(options, b), return_extra=True
        )
        for whole, part, where in zip(grads, grads_b, (rows, keys, keys), strict=True):
            close(whole[where], part[0])
        dsinks += extra_b.get("sinks", 0.0)
    if options["sinks"] is not None:
        close(extra["sinks"], dsinks)


@settings(max_examples=30, derandomize=True)
@given(st.data())
def test_decode_equals_the_last_rows_of_attention(data):
    used = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    seqlen_q, page_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    batch, max_seqlen = len(used), 10
    options = some_options(data.draw, nheads=4, batch=batch)
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((batch, 12, 4, 3))
    k_cache, v_cache = rng.standard_normal((2, batch, max_seqlen, 2, 3))
    q = queries[:, -seqlen_q:]
    out, lse = attention_decode(q, k_cache, v_cache, seqused_k=np.array(used), **options, return_lse=True)
    for b, n in enumerate(used):
        # A query row depends only on its distance to the end, so the longer call ends in the same rows.
        full, full_lse = attention(
            queries[b : b + 1],
            k_cache[b : b + 1, :n],
            v_cache[b : b + 1, :n],
            **of_sequence(options, b),
            return_lse=True,
        )
        close(out[b], full[0, -seqlen_q:])
        close(lse[b], full_lse[0, :, -seqlen_q:])

    pages_each = -(-max_seqlen // page_size)
    order = rng.permutation(batch * pages_each).reshape(batch, pages_each)
    padded = pages_each * page_size
    paged = []
    for cache in (k_cache, v_cache):
        pages = np.full((batch * pages_each + 2, page_size, 2, 3), np.nan)
        for b in range(batch):
            whole = np.full((padded, 2, 3), np.nan)
            whole[: used[b]] = cache[b, : used[b]]
            pages[order[b]] = whole.reshape(pages_each, page_size, 2, 3)
        paged.append(pages)
    table = np.where(np.arange(pages_each) < -(-np.array(used) // page_size)[:, None], order, -1)
    again, again_lse = attention_decode(
        q, *paged, seqused_k=np.array(used), block_table=table.astype(np.int32), **options, return_lse=True
    )
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(again_lse, lse)


# ---- properties --------------------------------------------------------------------------------------------


@settings(max_examples=30, derandomize=True)
@given(shift=st.floats(-50, 50), seed=st.integers(0, 999))
def test_a_constant_bias_moves_lse_and_nothing_else(shift, seed):
    p = make(mask="causal", bias="full", seed=seed)
    out, lse = attention(*p.arrays, **p.options, return_lse=True)
    p.options["bias"] = p.options["bias"] + shift
    moved, moved_lse = attention(*p.arrays, **p.options, return_lse=True)
    close(moved, out, atol=1e-11)
    close(moved_lse, lse + shift, atol=1e-11)


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 999), data=st.data())
def test_the_order_of_keys_does_not_matter(seed, data):
    p = make(heads=(4, 2), softcap=2.0, sinks=True, bias="keys", seed=seed)
    order = np.array(data.draw(st.permutations(range(7))))
    out, lse = attention(*p.arrays, **p.options, return_lse=True)
    p.options["bias"] = p.options["bias"][..., order]
    again, again_lse = attention(p.q, p.k[:, order], p.v[:, order], **p.options, return_lse=True)
    close(again, out)
    close(again_lse, lse)


@settings(max_examples=30, derandomize=True)
@given(a=st.floats(-3, 3), b=st.floats(-3, 3), seed=st.integers(0, 999))
def test_gradients_are_linear_in_dout(a, b, seed):
    p = make(mask="causal_left", heads=(4, 2), sinks=True, bias="full", softcap=1.5, seed=seed)
    other = np.random.default_rng(seed + 1).standard_normal(p.dout.shape)

    def gradients(dout: np.ndarray) -> list[np.ndarray]:
        *grads, extra = attention_backward(dout, *p.arrays, None, None, **p.options, return_extra=True)
        return [*grads, *extra.values()]

    together = gradients(a * p.dout + b * other)
    for combined, grad_a, grad_b in zip(together, gradients(p.dout), gradients(other), strict=True):
        close(combined, a * grad_a + b * grad_b, atol=1e-11)


@settings(max_examples=20, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_a_block_mask_equals_the_bias_it_expands_to(seqlen_q, seqlen_k, block_q, block_k):
    p = make(seqlens=(seqlen_q, seqlen_k), block_mask="each", blocks=(block_q, block_k))
    out = attention(*p.arrays, **p.options)
    dense = p.options["block_mask"].expand(seqlen_q, seqlen_k)
    np.testing.assert_array_equal(attention(*p.arrays, bias=np.where(dense, 0.0, -np.inf)), out)
