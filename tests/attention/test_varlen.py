"""attention_varlen and its backward on every backend against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import (
    DTYPES,
    assert_gradient,
    assert_lse,
    cancellation,
    has_gradients,
    pairwise,
    row_id,
)
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    """Run each behaviour once; test_attention_pairwise crosses the options."""
    return {
        "test_options": None,
        "test_lengths": {
            "dtype": ["bfloat16"],
            "lengths": list(LENGTHS) if raw else ["mixed", "long", "none"],
        },
        "test_a_sequence_does_not_depend_on_its_neighbours": {"dtype": ["bfloat16"] * raw},
        "test_equals_attention_per_sequence": {} if raw else None,
    }


# Lengths of (queries, keys) of each sequence.
LENGTHS = {
    "one": [(37, 37)],
    "mixed": [(5, 130), (0, 7), (64, 64), (1, 1), (113, 60), (9, 0), (0, 0), (70, 200)],
    "decode": [(1, 300), (1, 17), (1, 1)],
    "long": [(1, 700), (3, 30), (0, 5), (2, 1100)],  # a GPU divides the keys among blocks
    "none": [(0, 0), (0, 0)],
    "empty_batch": [],
}
FACTORS = {
    "lengths": ("mixed", "one", "decode"),
    "dtype": ("float32", "bfloat16", "float16"),
    "causal": (False, True),
    "window_size": ((-1, -1), (20, 0), (9, 30), (-1, 4)),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "alibi": (None, "heads", "batch_heads"),
    "heads": ((4, 2), (3, 1), (2, 2)),
    "head_dims": ((32, 32), (40, 24)),
    "max_seqlens": (True, False),
}


def make(
    *, lengths="mixed", dtype="float32", sinks=False, alibi=None, heads=(4, 2), head_dims=(32, 32), **options
):
    """(dout, q, k, v), (cu_seqlens_q, cu_seqlens_k), options, max_seqlens."""
    rng = np.random.default_rng(0)
    pairs = np.array(LENGTHS.get(lengths, lengths), np.int32).reshape(-1, 2)
    cu = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in pairs.T]
    (nheads, nheads_kv), (head_dim, head_dim_v) = heads, head_dims
    shapes = [
        *[(cu[0][-1], nheads, head_dim_v), (cu[0][-1], nheads, head_dim)],
        *[(cu[1][-1], nheads_kv, head_dim), (cu[1][-1], nheads_kv, head_dim_v)],
    ]
    arrays = [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]
    if sinks:
        options["sinks"] = rng.standard_normal(nheads).astype(np.float32)
    if alibi:
        shape = (nheads,) if alibi == "heads" else (len(pairs), nheads)
        options["alibi_slopes"] = rng.uniform(0.05, 0.5, shape).astype(np.float32)
    longest = pairs.max(axis=0, initial=0)
    return arrays, cu, options, {"max_seqlen_q": int(longest[0]), "max_seqlen_k": int(longest[1])}


def check(backend, *, max_seqlens=True, **settings):
    (dout, q, k, v), cu, options, longest = make(**settings)
    lengths = longest if max_seqlens else {}
    out, lse = gpu_ops.attention_varlen(q, k, v, *cu, **lengths, **options, return_lse=True, **backend)
    assert out.dtype == q.dtype
    results = [out, lse]
    if has_gradients(backend):
        *grads, extra = gpu_ops.attention_varlen_backward(
            dout, q, k, v, out, lse, *cu, **lengths, **options, return_extra=True, **backend
        )
        results += [*grads, *extra.values()]
        assert set(extra) == {"sinks"} & set(options)
        assert [x.dtype for x in grads] == [q.dtype] * 3

    expected = []
    for precision in ("float64", "naive"):
        o, s = reference.attention_varlen(q, k, v, *cu, **options, return_lse=True, precision=precision)
        *g, e = reference.attention_varlen_backward(
            dout, q, k, v, o, s, *cu, **options, return_extra=True, precision=precision
        )
        expected.append([o, s, *g, *e.values()])

    for name, actual, exact, naive in zip(
        ("out", "lse", "dq", "dk", "dv", "dsinks"), results, *expected, strict=False
    ):
        if q.dtype == np.float64:
            np.testing.assert_allclose(actual, exact, rtol=1e-11, atol=1e-12, err_msg=name)
        elif name == "lse":
            assert_lse(actual, exact, q.dtype, options.get("softcap"))
        elif name == "out":
            assert_close(actual, exact, naive, q.dtype, what=name)
        else:
            scale = abs(options.get("softmax_scale") or q.shape[-1] ** -0.5)
            noise = cancellation(name, dout, expected[0][0], q, k, scale)
            assert_gradient(name, actual, exact, naive, q.dtype, expected[0][1], noise)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=row_id)
def test_options(row, backend):
    check(backend, **row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(lengths, dtype, backend):
    check(backend, lengths=lengths, dtype=dtype, causal=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_does_not_depend_on_its_neighbours(dtype, backend):
    (dout, q, k, v), cu, options, _ = make(dtype=dtype, causal=True)
    out, lse = gpu_ops.attention_varlen(q, k, v, *cu, **options, return_lse=True, **backend)
    has_backward = has_gradients(backend)
    if has_backward:
        grads = gpu_ops.attention_varlen_backward(dout, q, k, v, out, lse, *cu, **options, **backend)
    for b in (2, 4):
        rows, keys = slice(cu[0][b], cu[0][b + 1]), slice(cu[1][b], cu[1][b + 1])
        alone = [np.full_like(x, np.nan) for x in (dout, q, k, v)]  # the neighbours are NaN
        for x, y, where in zip(alone, (dout, q, k, v), (rows, rows, keys, keys), strict=True):
            x[where] = y[where]
        o, s = gpu_ops.attention_varlen(*alone[1:], *cu, **options, return_lse=True, **backend)
        np.testing.assert_array_equal(o[rows], out[rows])
        np.testing.assert_array_equal(s[:, rows], lse[:, rows])
        if not has_backward:
            continue
        g = gpu_ops.attention_varlen_backward(*alone, o, s, *cu, **options, **backend)
        for x, y, where in zip(g, grads, (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(x[where], y[where])


def test_equals_attention_per_sequence(backend):
    (_, q, k, v), cu, options, _ = make(causal=True, softcap=2.0, sinks=True, alibi="batch_heads")
    out, lse = gpu_ops.attention_varlen(q, k, v, *cu, **options, return_lse=True, **backend)
    for b in range(len(cu[0]) - 1):
        rows, keys = slice(cu[0][b], cu[0][b + 1]), slice(cu[1][b], cu[1][b + 1])
        sequence_options = {**options, "alibi_slopes": options["alibi_slopes"][b]}
        o, s = gpu_ops.attention(
            q[None, rows], k[None, keys], v[None, keys], **sequence_options, return_lse=True, **backend
        )
        np.testing.assert_allclose(out[rows], o[0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[:, rows], s[0], rtol=0, atol=2e-6)
