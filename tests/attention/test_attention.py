"""attention on every backend against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from gpu_ops.errors import DeviceError
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import (
    DTYPES,
    HEAD_DIMS,
    KERNEL_FACTORS,
    SHAPES,
    SHAPES_SLOW,
    expected,
    make,
    pairwise,
    row_id,
)

DEVICES = ("cpu", "emulator", "cuda")


# Masks as the host prepares them, shared by the Numba twins and the CUDA C++ kernels.
SHARED = (
    "test_everything_masked",
    "test_windows_wider_than_any_sequence",
    "test_a_sink_of_minus_infinity_is_none",
    "test_no_keys_but_a_sink",
)


def quick_on_emulator(raw):
    """Run each behaviour once; test_attention_pairwise crosses the options."""
    return {
        "test_shapes": {
            "dtype": ["bfloat16"],
            "mask": ["causal"],
            "seqlens": [(1, 1), (113, 203), (239, 1)] if raw else [(113, 203)],
        },
        "test_head_dims": {
            "dtype": ["bfloat16"],
            "head_dims": [(59, 59), *[(1, 1), (80, 80), (64, 512)] * raw],
        },
        "test_random_windows": {"seed": [0, 1] * raw},
        "test_tiny_and_negative_scales": {"softmax_scale": [1e-30, -0.7] * raw},
        "test_float64_is_float64": {"mask": ["band"]},
        "test_rows_that_see_nothing": {"dtype": ["bfloat16"] * raw, "sinks": [True]},
        "test_hidden_blocks_may_hold_anything": {"bad": [np.nan] * raw},
        "test_keys_behind_a_mask_may_hold_anything": {"mask": ["causal"], "bad": [np.nan] * raw},
        "test_keys_behind_a_bias_may_hold_anything": {"bad": [np.inf] * raw},
        "test_bias_broadcasts": {"shape": [(), (113, 1), (4, 1, 203)] * raw},
        "test_a_visible_nan_is_not_lost": {"dtype": ["bfloat16"] * raw, "softcap": [0.0]},
        "test_a_cap_far_above_the_scores_costs_no_digits": {"dtype": ["bfloat16", "float32"] * raw},
        **({} if raw else {"test_masks_and_options": {"settings": MASKED[4:5]}}),
        **dict.fromkeys(("test_options", "test_against_torch", "test_large_scores_do_not_overflow"), None),
        **({} if raw else dict.fromkeys(SHARED, None)),
    }


FAST_DTYPES = ("float32", "bfloat16", "float16")


def check(backend, **settings):
    e = expected(**settings)
    p = e.problem
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    assert out.dtype == p.q.dtype
    assert out.shape == p.dout.shape
    assert lse.dtype == (np.float64 if p.q.dtype == np.float64 else np.float32)
    e.check("out", out)
    e.check("lse", lse)


@pytest.mark.parametrize("dtype", FAST_DTYPES)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("seqlens", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_shapes(seqlens, mask, dtype, backend):
    big = max(seqlens) > 220
    heads, batch = ((2, 1), 1) if big else ((4, 2), 2)
    check(backend, seqlens=seqlens, mask=mask, dtype=dtype, heads=heads, batch=batch, head_dims=(64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "causal", "wide_left"])
@pytest.mark.parametrize("seqlens", SHAPES_SLOW, ids=lambda s: f"{s[0]}x{s[1]}")
def test_long_shapes(seqlens, mask, backend):
    check(backend, seqlens=seqlens, mask=mask, dtype="float32", heads=(1, 1), batch=1, head_dims=(64, 64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=lambda d: f"{d[0]}-{d[1]}")
def test_head_dims(head_dims, dtype, backend):
    # The rule compares largest errors: a thin head needs more rows to have a typical one.
    batch = 1 if head_dims[0] >= 32 else 8
    settings = {"dtype": dtype, "seqlens": (113, 141), "mask": "causal", "heads": (2, 1), "batch": batch}
    limit = 256 if dtype == "float32" else 512
    if backend["backend"] == "raw" and (max(head_dims) > limit or any(d % 8 for d in head_dims)):
        with pytest.raises(
            DeviceError, match=f"raw: head_dim .*: {dtype} wants multiples of 8 up to {limit}"
        ):
            check(backend, head_dims=head_dims, **settings)
        return
    check(backend, head_dims=head_dims, **settings)


@pytest.mark.parametrize("row", pairwise(KERNEL_FACTORS), ids=row_id)
def test_options(row, backend):
    # The rule compares largest errors: a single query per head needs more sequences to have a typical one.
    check(backend, **row, batch=12 if row["seqlens"][0] == 1 else 2)


MASKED = [
    {"mask": "causal", "seqlens": (203, 203)},
    {"mask": "causal", "seqlens": (113, 203), "softcap": 1.5},
    {"mask": "causal", "seqlens": (203, 113), "sinks": True},
    {"mask": "wide_band", "seqlens": (203, 203)},
    {"mask": "wide_left", "seqlens": (113, 203), "alibi": "batch_heads", "layout": "bhsd"},
    {"mask": "left", "seqlens": (203, 113), "softmax_scale": -0.7},
    {"mask": "wide_right", "seqlens": (203, 203), "bias": "full"},
    {"mask": "full", "seqlens": (113, 203), "bias": "masks", "sinks": True},
    {"mask": "full", "seqlens": (203, 203), "block_mask": "each", "blocks": (64, 64)},
    {"mask": "causal", "seqlens": (203, 203), "block_mask": "shared", "blocks": (5, 7)},
]


@pytest.mark.parametrize("settings", MASKED, ids=row_id)
def test_masks_and_options(settings, backend):
    """On the emulator the rows of test_options are slow; these run by default."""
    check(backend, dtype="bfloat16", head_dims=(32, 32), heads=(2, 1), batch=1, **settings)


@pytest.mark.parametrize("dtype", ["float64"])  # a parameter: CUDA C++ kernels have none
@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_float64_is_float64(mask, dtype, backend):
    check(
        backend,
        mask=mask,
        dtype=dtype,
        seqlens=(70, 133),
        head_dims=(40, 24),
        heads=(4, 2),
        softcap=3.0,
        sinks=True,
        alibi="heads",
        bias="full",
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_windows(seed, backend):
    rng = np.random.default_rng(seed)
    seqlens = tuple(int(n) for n in rng.integers(1, 300, 2))
    window = tuple(int(n) for n in rng.integers(-1, 150, 2))
    check(
        backend,
        seqlens=seqlens,
        window_size=window,
        causal=bool(rng.integers(2)),
        heads=(2, 1),
        head_dims=(32, 32),
        dtype="float32",
        seed=seed,
    )


def test_windows_wider_than_any_sequence(backend):
    check(backend, seqlens=(33, 65), window_size=(10**12, 10**12), dtype="float32")


@pytest.mark.parametrize("side", [2**63 - 1, 2**70])
def test_windows_beyond_all_numbers_of_64_bits(side, rng):
    q, k, v = (rng.standard_normal((1, 33, 2, 16)).astype(np.float32) for _ in range(3))
    want, used = gpu_ops.attention(q, k, v), np.array([33], np.int32)
    for window in ((-1, side), (side, -1), (side, side)):
        np.testing.assert_array_equal(gpu_ops.attention(q, k, v, window_size=window), want)
        decoded = gpu_ops.attention_decode(q[:, -1:], k, v, seqused_k=used, window_size=window)
        np.testing.assert_array_equal(decoded, gpu_ops.attention_decode(q[:, -1:], k, v, seqused_k=used))


@pytest.mark.parametrize("dtype", FAST_DTYPES)
def test_large_scores_do_not_overflow(dtype, backend):
    e = expected(mask="causal", seqlens=(65, 65), head_dims=(32, 32), softmax_scale=12.0, dtype=dtype)
    assert e.exact["lse"].max() > 100  # exp(lse) has no float32
    check(backend, mask="causal", seqlens=(65, 65), head_dims=(32, 32), softmax_scale=12.0, dtype=dtype)


@pytest.mark.parametrize("softmax_scale", [1e-30, -0.7])
def test_tiny_and_negative_scales(softmax_scale, backend):
    check(backend, seqlens=(65, 70), head_dims=(32, 32), softmax_scale=softmax_scale, dtype="float32")


# ---- rows that see nothing, empty inputs, poison -----------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype, sinks, backend):
    p = make(mask="causal", seqlens=(150, 40), head_dims=(16, 16), sinks=sinks, dtype=dtype)
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    assert (out[:, :110] == 0).all()
    assert (out[:, 110:] != 0).any(axis=-1).all()
    alone = p.options["sinks"].astype(lse.dtype)[None, :, None] if sinks else np.float32(-np.inf)
    np.testing.assert_allclose(lse[..., :110], np.broadcast_to(alone, (2, 4, 110)), rtol=1e-6)


def test_everything_masked(backend):
    p = make(seqlens=(70, 70), dtype="float32")
    masks = {
        "bias": np.full((1, 1, 1, 70), -np.inf, np.float32),
        "block_mask": BlockMask(np.zeros((2, 2), bool), 40, 64),
    }
    for name, mask in masks.items():
        out, lse = gpu_ops.attention(*p.arrays, **{name: mask}, return_lse=True, **backend)
        assert (out == 0).all()
        assert (lse == -np.inf).all()


def test_no_keys_but_a_sink(backend):
    p = make(seqlens=(3, 0), sinks=True, dtype="float32")
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(p.options["sinks"][None, :, None], lse.shape), rtol=1e-6)


def test_a_sink_of_minus_infinity_is_none(backend):
    p = make(mask="causal", seqlens=(70, 30), head_dims=(16, 16), dtype="float32")
    plain, plain_lse = gpu_ops.attention(*p.arrays, causal=True, return_lse=True, **backend)
    sinks = np.full(4, -np.inf, np.float32)
    out, lse = gpu_ops.attention(*p.arrays, causal=True, sinks=sinks, return_lse=True, **backend)
    np.testing.assert_allclose(out, plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, plain_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_blocks_may_hold_anything(bad, backend):
    p = make(seqlens=(100, 300), head_dims=(32, 32), heads=(4, 2), dtype="float32")
    visible = np.ones((2, 4, 4, 5), bool)
    visible[..., 1] = visible[0, :, :, 3] = False
    mask = BlockMask(visible, 32, 64)
    before = gpu_ops.attention(*p.arrays, block_mask=mask, **backend)
    for x in (p.k, p.v):
        x[:, 64:128] = x[0, 192:256] = bad
    np.testing.assert_array_equal(gpu_ops.attention(*p.arrays, block_mask=mask, **backend), before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("mask", ["causal", "left", "wide_band", "right"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_behind_a_mask_may_hold_anything(dtype, mask, bad, backend):
    p = make(mask=mask, seqlens=(130, 170), head_dims=(32, 32), dtype=dtype, heads=(1, 1), batch=1)
    before, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **backend)
    for key in (169, 150, 0):
        hidden = ~_visible(p)[:, key]
        k, v = p.k.copy(), p.v.copy()
        k[:, key] = v[:, key] = bad
        after, lse_after = gpu_ops.attention(p.q, k, v, **p.options, return_lse=True, **backend)
        np.testing.assert_allclose(after[:, hidden], before[:, hidden], rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse_after[..., hidden], lse[..., hidden], rtol=0, atol=1e-6)
        assert not np.isfinite(after[:, ~hidden].astype(np.float32)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_behind_a_bias_may_hold_anything(bad, backend):
    p = make(seqlens=(20, 140), head_dims=(32, 32), dtype="float32")
    bias = np.zeros((20, 140), np.float32)
    bias[:, 100] = bias[:10, 50] = -np.inf
    before = gpu_ops.attention(*p.arrays, bias=bias, **backend)
    p.k[:, 100] = p.v[:, 100] = bad
    np.testing.assert_allclose(gpu_ops.attention(*p.arrays, bias=bias, **backend), before, rtol=0, atol=1e-6)
    p.k[:, 50] = p.v[:, 50] = bad
    after = gpu_ops.attention(*p.arrays, bias=bias, **backend)
    np.testing.assert_allclose(after[:, :10], before[:, :10], rtol=0, atol=1e-6)
    assert not np.isfinite(after[:, 10:]).any()


@pytest.mark.parametrize("shape", [(), (1,), (203,), (113, 1), (4, 1, 203), (2, 1, 113, 203)], ids=str)
def test_bias_broadcasts(shape, backend):
    p = make(seqlens=(113, 203), head_dims=(32, 32), heads=(4, 2), dtype="float32", mask="causal")
    bias = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    full = np.ascontiguousarray(np.broadcast_to(bias, (2, 4, 113, 203)))
    out = gpu_ops.attention(*p.arrays, causal=True, bias=bias, **backend)
    np.testing.assert_array_equal(gpu_ops.attention(*p.arrays, causal=True, bias=full, **backend), out)


def _visible(p):
    from gpu_ops.reference.attention.core import visible_keys

    options = {"causal": False, "window_size": (-1, -1), "bias": None, "block_mask": None} | p.options
    seqlens = p.q.shape[1], p.k.shape[1]
    return visible_keys((1, 1, *seqlens), **options, offset=seqlens[1] - seqlens[0])[0, 0]


@pytest.mark.parametrize("softcap", [50.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cap_far_above_the_scores_costs_no_digits(dtype, softcap, backend):
    e = expected(seqlens=(20, 20), head_dims=(64, 64), dtype=dtype, softcap=softcap)
    e.check("out", gpu_ops.attention(*e.problem.arrays, **e.problem.options, **backend))


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_visible_nan_is_not_lost(which, dtype, softcap, backend):
    p = make(mask="causal", seqlens=(70, 70), head_dims=(16, 16), dtype=dtype, softcap=softcap)
    getattr(p, which)[0, 30, 1, 3] = np.nan
    out = gpu_ops.attention(*p.arrays, **p.options, **backend)
    exact = reference.attention(*p.arrays, **p.options)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
    assert np.isnan(out).sum() == {"q": 16, "k": 40 * 16, "v": 40}[which]


# ---- torch -------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seqlens", [(128, 128), (100, 260)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_against_torch(mask, seqlens, dtype, backend):
    torch = pytest.importorskip("torch", reason="pip install torch to compare with its attention")
    p = make(mask=mask, seqlens=seqlens, heads=(4, 2), head_dims=(64, 64), dtype=dtype)
    as_torch = getattr(torch, dtype)
    q, k, v = (
        torch.from_numpy(x.astype(np.float32)).to(as_torch).transpose(1, 2).contiguous() for x in p.arrays
    )
    here = torch.arange(seqlens[0])[:, None] + (seqlens[1] - seqlens[0])
    visible = torch.arange(seqlens[1])[None] <= here if mask == "causal" else None
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    theirs = theirs.transpose(1, 2)

    ours = gpu_ops.attention(*p.arrays, **p.options, **backend)
    atol = 5e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(ours.astype(np.float32), theirs.float().numpy(), rtol=0, atol=atol)

    inputs = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # torch in, torch out, strided
    ours_torch = gpu_ops.attention(*inputs, **p.options, **backend)
    assert isinstance(ours_torch, torch.Tensor)
    assert ours_torch.dtype == as_torch
    np.testing.assert_array_equal(ours_torch.float().numpy(), ours.astype(np.float32))
