"""attention_backward on every backend against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops import BlockMask
from gpu_ops.errors import DeviceError
from tests.attention.cases import (
    DTYPES,
    HEAD_DIMS,
    KERNEL_FACTORS,
    SHAPES,
    SHAPES_SLOW,
    expected,
    has_gradients,
    make,
    pairwise,
    row_id,
)

DEVICES = ("cpu", "emulator", "cuda")
REFERENCE = {"device": "cpu", "backend": "reference"}


def runs(case):
    return has_gradients(case["backend"])


def quick_on_emulator(raw):
    """Run each behaviour once, on small problems. Numba kernels compile for seconds: all options once, in float64."""
    return {
        "test_small_shapes": {} if raw else {"dtype": ["bfloat16"]},
        "test_shapes": {"dtype": ["bfloat16"], "mask": ["causal"], "seqlens": [(1, 1), (113, 203)] * raw},
        "test_head_dims": {"dtype": ["bfloat16"], "head_dims": [(80, 80), (192, 128)] * raw},
        "test_masks_and_options": {} if raw else None,
        "test_float64_is_float64": {"mask": ["band"]},
        "test_bias_gradients_sum_over_broadcast_axes": {
            "shape": [(), *[(4, 1, 203), (2, 1, 113, 203)] * raw]
        },
        "test_rows_that_see_nothing": {"dtype": ["bfloat16" if raw else "float32"], "sinks": [raw]},
        "test_hidden_blocks_may_hold_anything": {"bad": [np.nan] * raw},
        "test_what_a_mask_hides_may_hold_anything": {"dtype": ["bfloat16" if raw else "float32"]},
        "test_a_visible_nan_is_not_lost": {"dtype": ["float16" if raw else "float32"]},
        **dict.fromkeys(("test_options", "test_against_torch", "test_without_return_extra_only_three"), None),
        **(
            {}
            if raw
            else dict.fromkeys(("test_everything_masked", "test_a_sink_of_minus_infinity_is_none"), None)
        ),
    }


def small(backend, *sizes):
    """Sequence lengths, smaller on the emulator."""
    return tuple(-(-n // 3) for n in sizes) if backend["device"] == "emulator" else sizes


def gradients(p, backend, **more):
    """Run forward, then backward, on the backend; on the emulator the forward is that of the reference."""
    forward = REFERENCE if backend["device"] == "emulator" else backend
    skip_what_raw_refuses("attention", *p.arrays, **p.options, return_lse=True, **forward)
    out, lse = gpu_ops.attention(*p.arrays, **p.options, return_lse=True, **forward)
    inputs = (p.dout, *p.arrays, out, lse)
    skip_what_raw_refuses("attention_backward", *inputs, **p.options, **more, **backend)
    return gpu_ops.attention_backward(*inputs, **p.options, **more, **backend)


def skip_what_raw_refuses(op, *args, **kwargs):
    if kwargs["backend"] != "raw":
        return
    try:
        gpu_ops.explain(op, *args, **kwargs)
    except DeviceError as error:
        pytest.skip(str(error))


def check(backend, **settings):
    e = expected(gradients=True, **settings)
    p = e.problem
    dq, dk, dv, extra = gradients(p, backend, return_extra=True)
    for gradient, x in zip((dq, dk, dv), p.arrays, strict=True):
        assert gradient.dtype == x.dtype
        assert gradient.shape == x.shape
    assert set(extra) == {"bias", "sinks"} & set(p.options)
    results = {"dq": dq, "dk": dk, "dv": dv} | {f"d{name}": x for name, x in extra.items()}
    for name, gradient in results.items():
        if name in ("dq", "dk") and settings["seqlens"][1] == 1:
            # One key: P = 1 and dP - delta is exactly 0, also in textbook code. Summed in another order
            # the difference is a rounding of dP.
            np.testing.assert_allclose(gradient.astype(np.float64), e.exact[name], rtol=0, atol=3e-5)
        else:
            e.check(name, gradient)
    if "bias" in extra:
        assert extra["bias"].dtype == p.options["bias"].dtype
    if "sinks" in extra:
        assert extra["sinks"].dtype == lse_dtype(p)


def lse_dtype(p):
    return np.float64 if p.q.dtype == np.float64 else np.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 17), (17, 33), (33, 17), (70, 70), (70, 33)], ids=str)
def test_small_shapes(seqlens, dtype, backend):
    batch = 12 if seqlens[0] == 1 else 2
    check(backend, seqlens=seqlens, mask="causal", dtype=dtype, heads=(6, 2), head_dims=(32, 32), batch=batch)


OPTIONS = [
    {
        "seqlens": (33, 70), "mask": "wide_band", "softcap": 1.5, "sinks": True, "alibi": "batch_heads",
        "bias": "masks", "block_mask": "each", "blocks": (16, 32), "layout": "bhsd", "head_dims": (40, 24),
    },
    {"seqlens": (70, 33), "mask": "causal", "softcap": 1.5, "sinks": True},
    {"seqlens": (33, 70), "mask": "band", "alibi": "heads", "softmax_scale": -0.7},
    {"seqlens": (70, 70), "bias": "full", "block_mask": "shared", "blocks": (5, 7)},
    {"seqlens": (70, 17), "bias": "keys", "sinks": True, "heads": (3, 1)},
]  # fmt: skip


@pytest.mark.parametrize("settings", OPTIONS, ids=row_id)
def test_masks_and_options(settings, backend):
    """On the emulator the rows of test_options are slow; with CUDA C++ kernels these run by default."""
    check(backend, **{"dtype": "bfloat16", "head_dims": (32, 32), "heads": (4, 2)} | settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
    check(
        backend,
        head_dims=head_dims,
        dtype=dtype,
        seqlens=small(backend, 113, 141),
        mask="causal",
        heads=(2, 1),
        batch=batch,
    )


@pytest.mark.parametrize("row", pairwise(KERNEL_FACTORS, seed=1), ids=row_id)
def test_options(row, backend):
    check(backend, **row, batch=12 if row["seqlens"][0] == 1 else 2)


@pytest.mark.parametrize("dtype", ["float64"])  # a parameter: CUDA C++ kernels have none
@pytest.mark.parametrize("mask", ["full", "causal", "band"])
def test_float64_is_float64(mask, dtype, backend):
    check(
        backend,
        mask=mask,
        dtype=dtype,
        seqlens=small(backend, 70, 133),
        head_dims=(40, 24),
        heads=(4, 2),
        softcap=3.0,
        sinks=True,
        alibi="heads",
        bias="full",
        block_mask="each",
        blocks=(16, 32),
        layout="bhsd",
    )


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (203,), (113, 1), (1, 1, 1, 1), (4, 1, 203), (2, 1, 113, 203), (1, 4, 1, 1), (2, 4, 113, 203)],
    ids=str,
)
def test_bias_gradients_sum_over_broadcast_axes(shape, backend):
    queries, keys = small(backend, 113, 203)
    shape = tuple({113: queries, 203: keys}.get(n, n) for n in shape)
    p = make(seqlens=(queries, keys), head_dims=(16, 16), heads=(4, 2), dtype="float32", mask="causal")
    p.options["bias"] = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    full = np.ascontiguousarray(np.broadcast_to(p.options["bias"], (2, 4, queries, keys)))
    *_, extra = gradients(p, backend, return_extra=True)
    p.options["bias"] = full
    *_, extra_full = gradients(p, backend, return_extra=True)
    summed = extra_full["bias"].astype(np.float64)
    lead = summed.sum(axis=tuple(range(4 - len(shape))))
    summed = lead.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
    assert extra["bias"].shape == shape
    np.testing.assert_allclose(extra["bias"], summed.reshape(shape), rtol=2e-5, atol=2e-5)


def test_without_return_extra_only_three(backend):
    p = make(sinks=True, bias="full", dtype="float32")
    assert len(gradients(p, backend)) == 3


def test_deterministic_gives_the_same_bits(backend):
    seqlens = small(backend, 200, 300)
    p = make(mask="causal", seqlens=seqlens, head_dims=(32, 32), heads=(4, 1), dtype="bfloat16")
    first = gradients(p, backend, deterministic=True)
    for _ in range(3):
        for x, y in zip(gradients(p, backend, deterministic=True), first, strict=True):
            np.testing.assert_array_equal(x, y)


# ---- rows that see nothing, empty inputs, poison -----------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype, sinks, backend):
    queries, keys = small(backend, 150, 40)
    blind = queries - keys
    p = make(mask="causal", seqlens=(queries, keys), head_dims=(16, 16), sinks=sinks, dtype=dtype)
    dq, dk, dv = gradients(p, backend)
    assert (dq[:, :blind] == 0).all()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()
    p.dout[:, :blind] = 1000  # these rows contribute no gradient either
    for x, y in zip(gradients(p, backend), (dq, dk, dv), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_sink_of_minus_infinity_is_none(backend):
    p = make(mask="causal", seqlens=(70, 30), head_dims=(16, 16), dtype="float32")
    plain = gradients(p, backend)
    p.options["sinks"] = np.full(4, -np.inf, np.float32)
    *grads, extra = gradients(p, backend, return_extra=True)
    for x, y in zip(grads, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
    assert (extra["sinks"] == 0).all()


def test_everything_masked(backend):
    p = make(seqlens=(70, 70), dtype="float32")
    p.options["block_mask"] = BlockMask(np.zeros((2, 2), bool), 40, 64)
    for gradient in gradients(p, backend):
        assert (gradient == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_blocks_may_hold_anything(bad, backend):
    p = make(seqlens=(100, 300), head_dims=(32, 32), heads=(4, 2), dtype="float32")
    visible = np.ones((2, 4, 4, 5), bool)
    visible[..., 1] = visible[0, :, :, 3] = False
    p.options["block_mask"] = BlockMask(visible, 32, 64)
    before = gradients(p, backend, deterministic=True)
    for x in (p.k, p.v):
        x[:, 64:128] = x[0, 192:256] = bad
    after = gradients(p, backend, deterministic=True)
    for x, y in zip(after, before, strict=True):
        np.testing.assert_array_equal(x, y)
    for gradient in after[1:]:
        assert (gradient[:, 64:128] == 0).all()
        assert (gradient[0, 192:256] == 0).all()


# With a NaN in the tile, products of the CPU are rounded differently.
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_what_a_mask_hides_may_hold_anything(dtype, atol, backend):
    """Queries 0 to 29 see no key, 33 to 53 see key 3: NaN there reaches keys 0 to 23, and no others."""
    p = make(seqlens=(70, 40), head_dims=(16, 16), heads=(2, 1), batch=1, dtype=dtype, window_size=(20, 0))
    before = [x.astype(np.float32) for x in gradients(p, backend)]
    for x, hidden in ((p.q, slice(30)), (p.dout, slice(30)), (p.k, 3), (p.v, 3)):
        x[:, hidden] = np.nan
    dq, dk, dv = (x.astype(np.float32) for x in gradients(p, backend))
    for rows in (slice(33), slice(54, None)):
        np.testing.assert_allclose(dq[:, rows], before[0][:, rows], rtol=0, atol=atol)
    assert np.isnan(dq[:, 33:54]).all()
    for x, y in ((dk, before[1]), (dv, before[2])):
        np.testing.assert_allclose(x[:, 24:], y[:, 24:], rtol=0, atol=atol)
        assert np.isnan(x[:, :24]).all()


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_visible_nan_is_not_lost(which, dtype, backend):
    p = make(mask="causal", seqlens=(70, 70), head_dims=(16, 16), heads=(1, 1), batch=1, dtype=dtype)
    getattr(p, which)[0, 30, 0, 3] = np.nan
    dq, dk, dv = gradients(p, backend)
    if which in ("q", "dout"):  # one query: its dq, and gradients of the keys it sees
        assert np.isnan(dq[0, 30]).all()
        assert np.isnan(dk[0, :31]).all()
        assert np.isnan(dv[0, :31, 0, 3]).all()
        assert np.isfinite(dq[0, np.arange(70) != 30]).all()
        assert np.isfinite(dk[0, 31:]).all()
        assert np.isfinite(dv[0, 31:]).all()
    else:  # one key: every query that sees it, and through those every key they see
        assert np.isnan(dq[0, 30:]).all()
        assert np.isnan(dk).all()
        assert np.isfinite(dq[0, :30]).all()


# ---- layouts of arrays -------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_against_torch(mask, dtype, backend):
    torch = pytest.importorskip("torch", reason="pip install torch to compare with its attention")
    seqlens = (100, 160)
    p = make(mask=mask, seqlens=seqlens, heads=(4, 2), head_dims=(64, 64), dtype=dtype)
    q, k, v, dout = (
        torch.from_numpy(x.astype(np.float32)).transpose(1, 2).requires_grad_() for x in (*p.arrays, p.dout)
    )
    here = torch.arange(seqlens[0])[:, None] + (seqlens[1] - seqlens[0])
    visible = torch.arange(seqlens[1])[None] <= here if mask == "causal" else None
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    theirs.backward(dout.detach())
    atol = 2e-5 if dtype == "float32" else 3e-2
    for ours, x in zip(gradients(p, backend), (q, k, v), strict=True):
        expected_gradient = x.grad.transpose(1, 2).numpy()
        np.testing.assert_allclose(ours.astype(np.float32), expected_gradient, rtol=2e-2, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_one_head_leaves_others_alone(dtype, rng):
    """Heads do not leak into each other through the scratch memory they share."""
    heads, queries, keys = 16, 20, 40
    bias = rng.standard_normal((1, heads, queries, keys)).astype(dtype)
    bias[:, ::2] = np.nan
    q, k, v, dout = (
        rng.standard_normal((1, n, heads, 32)).astype(dtype) for n in (queries, keys, keys, queries)
    )
    out, lse = gpu_ops.attention(q, k, v, bias=bias, return_lse=True, device="cpu")
    gradients = gpu_ops.attention_backward(dout, q, k, v, out, lse, bias=bias, device="cpu")
    for x in (out, *gradients):
        assert np.isnan(x[:, :, ::2].astype(np.float32)).all()
        assert np.isfinite(x[:, :, 1::2].astype(np.float32)).all()
