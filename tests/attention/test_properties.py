"""Properties of the attention reference that hold for any numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops.reference.attention.forward import (
    attention,
    attention_backward,
    attention_decode,
    attention_varlen,
    attention_varlen_backward,
)
from tests.attention.cases import make


def close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=atol)


# ---- varlen and decode are attention -------------------------------------------------------------


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


# ---- properties ----------------------------------------------------------------------------------


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
