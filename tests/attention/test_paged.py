"""attention_varlen over pages, and over the used part of packed keys, against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.ops.attention.lengths import Lengths
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, assert_lse, pairwise, row_id
from tests.support.compare import assert_close

DEVICES = ("cpu", "emulator", "cuda")


def quick_on_emulator(raw):
    """Each behaviour once; test_attention_pairwise crosses the options."""
    return {
        "test_options": None,
        "test_page_sizes": {"page_size": [7, 128] if raw else [16]},
        "test_used_keys": {},
        "test_chunks_equal_one_call": {} if raw else None,
        "test_rows_that_see_nothing": {"sinks": [True] * raw},
        "test_empty": {"page_size": [4] * raw},
    }


# Lengths of (queries, keys): whole prompts, chunks of longer ones, one new token, nothing.
MIXED = ((5, 130), (0, 7), (70, 70), (1, 1), (30, 12), (9, 0), (0, 0), (1, 200))
FACTORS = {
    "lengths": (MIXED, ((1, 300), (1, 17), (2, 2)), ((90, 200),)),
    "page_size": (16, 1, 7, 64, 256, None),
    "dtype": ("float32", "bfloat16", "float16"),
    "causal": (True, False),
    "window_size": ((-1, -1), (20, 0), (9, 30)),
    "softcap": (0.0, 2.0),
    "sinks": (False, True),
    "alibi": (None, "heads", "batch_heads"),
    "heads": ((4, 2), (3, 1), (2, 2)),
    "head_dims": ((32, 32), (40, 24)),
}


def make(
    *,
    lengths=MIXED,
    page_size=16,
    dtype="float32",
    sinks=False,
    alibi=None,
    heads=(4, 2),
    head_dims=(32, 32),
    **options,
):
    """Arrays and options; unused elements are NaN, and -1 in the table. Without pages, 3 spare keys per sequence."""
    rng = np.random.default_rng(0)
    native, (nheads, nheads_kv), (head_dim, head_dim_v) = DTYPES[dtype], heads, head_dims
    queries, used = np.array(lengths, np.int32).reshape(-1, 2).T
    batch, cu_q = len(used), starts(queries)
    q = rng.standard_normal((cu_q[-1], nheads, head_dim)).astype(native)
    size = page_size or 1
    each = -(-(max(used, default=0) + 3) // size)
    places = rng.permutation(batch * each + 2)[: batch * each].reshape(batch, each)
    cu_k = starts(used + 3)
    caches = []
    for dim in (head_dim, head_dim_v):
        shape = (batch * each + 2, size) if page_size else (cu_k[-1],)
        cache = np.full((*shape, nheads_kv, dim), np.nan, native)
        for b, n in enumerate(used):
            keys = rng.standard_normal((n, nheads_kv, dim)).astype(native)
            j = np.arange(n)
            at = (places[b, j // size], j % size) if page_size else cu_k[b] + j
            cache[at] = keys
        caches.append(cache)
    options["seqused_k"] = used.copy()
    if page_size:
        needed = np.arange(each) < -(-used[:, None] // size)
        options["block_table"] = np.where(needed, places, -1).astype(np.int32)
    if sinks:
        options["sinks"] = rng.standard_normal(nheads).astype(np.float32)
    if alibi:
        shape = (nheads,) if alibi == "heads" else (batch, nheads)
        options["alibi_slopes"] = rng.uniform(0.01, 0.2, shape).astype(np.float32)
    return (q, *caches, cu_q, *(() if page_size else (cu_k,))), options


def starts(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def check(backend, **settings):
    arrays, options = make(**settings)
    out, lse = gpu_ops.attention_varlen(*arrays, **options, return_lse=True, **backend)
    exact, naive = (
        reference.attention_varlen(*arrays, **options, return_lse=True, precision=precision)
        for precision in ("float64", "naive")
    )
    assert out.dtype == arrays[0].dtype
    assert not np.isnan(exact[0]).any()
    assert_close(out, exact[0], naive[0], out.dtype, what="out")
    assert_lse(lse, exact[1], out.dtype, options.get("softcap"))


@pytest.mark.parametrize("page_size", [16, None])
def test_the_reference_is_attention_of_the_gathered_keys(page_size):
    (q, k, v, *cu), options = make(page_size=page_size, causal=True, sinks=True, alibi="batch_heads")
    exact = {"return_lse": True, "precision": "float64"}
    out, lse = reference.attention_varlen(q, k, v, *cu, **options, **exact)
    table, slopes = options.pop("block_table", None), options.pop("alibi_slopes")
    for b, n in enumerate(options.pop("seqused_k").tolist()):
        rows = slice(cu[0][b], cu[0][b + 1])
        if page_size:
            keys, values = (np.array([x[table[b, j // 16], j % 16] for j in range(n)]) for x in (k, v))
            keys, values = keys.reshape(n, *k.shape[2:]), values.reshape(n, *v.shape[2:])
        else:
            keys, values = (x[cu[1][b] : cu[1][b] + n] for x in (k, v))
        sequence_options = {"causal": True, "sinks": options["sinks"], "alibi_slopes": slopes[b]}
        o, s = reference.attention(q[None, rows], keys[None], values[None], **sequence_options, **exact)
        np.testing.assert_array_equal(out[rows], o[0])
        np.testing.assert_array_equal(lse[:, rows], s[0])


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=row_id)
def test_options(row, backend):
    check(backend, **row)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 128, 256])
def test_page_sizes(page_size, backend):
    check(backend, page_size=page_size, dtype="bfloat16", causal=True)


def test_used_keys(backend):
    check(backend, page_size=None, causal=True, lengths=MIXED[:5])


def test_chunks_equal_one_call(backend):
    """A prompt in three chunks, each after the keys of the previous ones, batched with a sequence that decodes."""
    (q, k, v, _), options = make(lengths=((75, 75), (3, 43)), page_size=32, causal=True, softcap=3.0)
    prompt, tokens = q[:75], q[75:]
    whole = gpu_ops.attention_varlen(prompt, k, v, starts([75]), **of_sequence(0, options, 75), **backend)
    chunks = []
    for i, (begin, end) in enumerate(((0, 20), (20, 64), (64, 75))):
        both = np.concatenate([prompt[begin:end], tokens[i : i + 1]])
        options["seqused_k"] = np.array([end, 41 + i], np.int32)
        out = gpu_ops.attention_varlen(both, k, v, starts([end - begin, 1]), **options, **backend)
        chunks.append(out[:-1])
        alone = of_sequence(1, options, 41 + i)
        expected = reference.attention_decode(tokens[None, i : i + 1], k, v, **alone)
        np.testing.assert_allclose(out[-1], expected[0, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.concatenate(chunks), whole, rtol=0, atol=2e-6)


def of_sequence(b, options, used):
    table = options["block_table"][b : b + 1]
    return {**options, "block_table": table, "seqused_k": np.array([used], np.int32)}


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks, backend):
    (q, *arrays), options = make(lengths=((4, 0), (4, 2), (4, 90)), causal=True, sinks=sinks)
    out, lse = gpu_ops.attention_varlen(q, *arrays, **options, return_lse=True, **backend)
    blind = np.arange(12) < 6
    alone = options["sinks"][:, None] if sinks else np.float32(-np.inf)
    np.testing.assert_allclose(lse[:, blind], np.broadcast_to(alone, (4, 6)), rtol=1e-6)
    assert (out[blind] == 0).all()
    assert (out[~blind] != 0).all()


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("lengths", [(), ((0, 9), (0, 0)), ((2, 0), (0, 3))], ids=str)
def test_empty(lengths, page_size, backend):
    arrays, options = make(lengths=lengths, page_size=page_size)
    out, lse = gpu_ops.attention_varlen(*arrays, **options, return_lse=True, **backend)
    assert out.shape == (len(arrays[0]), 4, 32)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# ---- plans -------------------------------------------------------------------------------------------------


def plan(page_size, lengths=MIXED, device="emulator", **settings):
    arrays, options = make(page_size=page_size, lengths=lengths, dtype="bfloat16", **settings)
    return str(gpu_ops.explain("attention_varlen", *arrays, **options, device=device))


def test_a_tile_within_a_page_looks_it_up_once():
    pytest.importorskip("cuda.core")
    assert " paged2 " in plan(128)
    assert " paged " in plan(24)
    assert "pages of 24" in plan(24)


def test_long_sequences_pack_the_heads_of_a_group_over_pages():
    """Sequences of one query in the batch read their keys once per group, not once per head."""
    pytest.importorskip("cuda.core")
    assert " pack_gqa " in plan(16, ((700, 800), (1, 900)))


def test_short_sequences_on_the_cpu_take_the_decode_kernel():
    """Tiles would take many times as long; so the results are those of attention_decode, bit for bit."""
    assert "sequences of up to 8 queries: decode kernel" in plan(16, device="cpu")
    lengths = ((1, 200), (70, 70), (9, 130), (1, 1))
    (q, k, v, cu), options = make(lengths=lengths, causal=True, sinks=True, alibi="batch_heads")
    cpu = {"device": "cpu", "backend": "numba"}
    out, lse = gpu_ops.attention_varlen(q, k, v, cu, **options, return_lse=True, **cpu)
    short = {name: x[[0, 3]] for name, x in options.items() if name not in ("causal", "sinks")}
    rows = [0, -1]
    some = {**options, **short}
    expected, expected_lse = gpu_ops.attention_decode(q[rows][:, None], k, v, **some, return_lse=True, **cpu)
    np.testing.assert_array_equal(out[rows], expected[:, 0])
    np.testing.assert_allclose(lse[:, rows], expected_lse[..., 0].T, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_pairs(causal):
    queries, keys = np.array([(q, k) for q in range(5) for k in range(6)]).T
    pairs = Lengths(queries, keys, (4, 5), None).pairs(causal)
    assert pairs == sum(
        j <= i + k - q or not causal
        for q, k in zip(queries, keys, strict=True)
        for i in range(q)
        for j in range(k)
    )
