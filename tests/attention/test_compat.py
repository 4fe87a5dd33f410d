"""``compat.scaled_dot_product_attention`` against torch's documented semantics in float64, and against torch."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.compat import scaled_dot_product_attention
from gpu_ops.core.checks import FLOAT_DTYPES
from gpu_ops.errors import DTypeError, OptionError, ShapeError, UnknownOptionError

SEQLENS = [(5, 7), (7, 5), (6, 6)]
# Axes of query, key and value before the sequence.
LEADING = {
    "no heads": ((), (), ()),
    "heads": ((3,), (3,), (3,)),
    "batch": ((2, 4), (2, 4), (2, 4)),
    "two batches": ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    "shared key": ((2, 4), (1, 4), (2, 4)),
    "shared query": ((1, 4), (2, 4), (2, 4)),
    "single head of key": ((2, 4), (2, 1), (2, 1)),
    "single head of query": ((2, 1), (2, 4), (2, 4)),
    "fewer axes": ((2, 4), (4,), ()),
    "shared in two batches": ((2, 3, 4), (1, 3, 1), (2, 1, 4)),
}
GROUPS = {
    "heads": ((4,), (2,), (2,)),
    "batch": ((2, 6), (2, 3), (2, 3)),
    "two batches": ((2, 3, 4), (2, 3, 2), (2, 3, 2)),
    "shared key": ((2, 4), (1, 2), (2, 2)),
}
MASKS = ("none", "causal", "bool", "float", "keys", "queries", "full", "rows of nothing")


def inputs(leading, seqlens, mask, dtype=np.float64):
    """Query, key and value, and the keywords of a mask."""
    rng = np.random.default_rng(0)
    shapes = zip(leading, (seqlens[0], seqlens[1], seqlens[1]), (8, 8, 5), strict=True)
    q, k, v = (rng.standard_normal((*axes, n, d)).astype(dtype) for axes, n, d in shapes)
    scores = np.broadcast_shapes(*leading) if mask == "full" else ()
    numbers = rng.standard_normal((*scores, *seqlens)).astype(dtype)
    masks = {
        "bool": numbers > 0,
        "float": numbers,
        "keys": numbers[:1] > -1,
        "queries": numbers[:, :1],
        "full": numbers > 0,
        "rows of nothing": (numbers > 0) & (np.arange(seqlens[0])[:, None] % 2 > 0),
    }
    return (q, k, v), {"is_causal": True} if mask == "causal" else {
        "attn_mask": masks[mask]
    } if mask in masks else {}


def documented(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Torch's documentation of the function, in NumPy. Rows that see no key are 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = np.zeros((q.shape[-2], k.shape[-2]))
    if is_causal:
        bias = np.where(np.tril(np.ones_like(bias)), 0, -np.inf)
    if attn_mask is not None:
        bias = np.where(attn_mask, 0, -np.inf) if attn_mask.dtype == bool else attn_mask
    if enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.swapaxes(-2, -1) * scale + bias
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v


def computed(*arrays, **options):
    """Result of NumPy's backend, which compiles nothing: semantics do not depend on kernels."""
    return scaled_dot_product_attention(*arrays, **options, backend="reference")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("leading", LEADING)
def test_documented_semantics(leading, mask):
    for seqlens in SEQLENS:
        arrays, options = inputs(LEADING[leading], seqlens, mask)
        expected = documented(*arrays, **options)
        out = computed(*arrays, **options)
        assert out.shape == expected.shape
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("leading", GROUPS)
def test_groups_of_heads(leading):
    for mask in ("causal", "float"):
        arrays, options = inputs(GROUPS[leading], (5, 7), mask)
        out = computed(*arrays, **options, enable_gqa=True)
        np.testing.assert_allclose(out, documented(*arrays, **options, enable_gqa=True), rtol=0, atol=1e-13)
        with pytest.raises(ShapeError, match="enable_gqa=True"):
            computed(*arrays, **options)


def test_scale():
    arrays, _ = inputs(LEADING["batch"], (5, 7), "none")
    out = computed(*arrays, scale=-0.7)
    np.testing.assert_allclose(out, documented(*arrays, scale=-0.7), rtol=0, atol=1e-13)
    default = computed(*arrays)
    np.testing.assert_array_equal(computed(*arrays, scale=8**-0.5), default)


@pytest.mark.parametrize("mask", ["causal", "bool"])
@pytest.mark.parametrize("kernels", ["cpu numba", "emulator raw", "emulator numba"])
def test_kernels(mask, kernels):
    device, backend = kernels.split()
    (q, k, v), options = inputs(LEADING["shared key"], (7, 5), mask, np.float32)
    v = np.concatenate([v, v[..., :3]], -1)  # raw kernels take multiples of 8
    out = scaled_dot_product_attention(q, k, v, **options, device=device, backend=backend)
    expected = documented(*(x.astype(np.float64) for x in (q, k, v)), **options)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_are_those_of_attention(dtype):
    """With dropout as well, which depends on the seed alone."""
    (q, k, v), options = inputs(LEADING["batch"], (5, 7), "float", FLOAT_DTYPES[dtype])
    mask = options["attn_mask"]
    for bias in (mask, mask.astype(np.float32)):
        out = computed(q, k, v, bias, 0.5, seed=3)
        expected = gpu_ops.attention(
            q, k, v, bias=bias, dropout_p=0.5, seed=3, layout="bhsd", backend="reference"
        )
        assert out.dtype == q.dtype
        np.testing.assert_array_equal(out, expected)
    other = computed(q, k, v, mask, 0.5, seed=4)
    assert (other != out).any()


Q, KV = np.ones((2, 4, 5, 8), np.float32), np.ones((2, 4, 7, 8), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"attn_mask": np.ones((5, 7), bool), "is_causal": True},
            OptionError,
            "is_causal=True excludes attn_mask",
        ),
        (
            {"attn_mask": np.ones((5, 7), np.int32)},
            DTypeError,
            "attn_mask is int32; pass bool .* or float32$",
        ),
        (
            {"attn_mask": np.ones((5, 7), np.float16)},
            DTypeError,
            "attn_mask is float16; pass bool .* or float32$",
        ),
        ({"attn_mask": np.ones((7, 5), bool)}, ShapeError, r"\(7, 5\), not broadcastable to \(2, 4, 5, 7\)"),
        ({"attn_mask": np.ones((3, 1, 5, 7), bool)}, ShapeError, "not broadcastable"),
        ({"attn_mask": np.ones((1, 2, 4, 5, 7), bool)}, ShapeError, "not broadcastable"),
        ({"attn_mask": [[True]]}, DTypeError, r"numpy.asarray\(attn_mask\)"),
        ({"attn_mask": np.ma.masked_array(np.ones((5, 7)))}, DTypeError, "masked array"),
        ({"dropout_p": 0.1}, OptionError, "needs seed="),
        ({"dropout_p": 1.0, "seed": 0}, OptionError, "less than 1"),
        ({"is_causal": "yes"}, OptionError, "is_causal must be True or False"),
        ({"query": np.ones(8, np.float32)}, ShapeError, r"query has shape \(8,\)"),
        ({"value": None}, DTypeError, "value is NoneType, not an array"),
        ({"key": KV[:, :3]}, ShapeError, r"do not broadcast: .*key \(2, 3, 7, 8\).*enable_gqa=True lets"),
        (
            {"key": KV[:, :3], "value": KV[:, :3], "enable_gqa": True},
            ShapeError,
            "positive multiple of nheads_kv=3",
        ),
        ({"value": KV[:, :2], "enable_gqa": True}, ShapeError, "do not broadcast"),
        ({"key": KV.astype(np.float64)}, DTypeError, "float64"),
        ({"mask": None}, UnknownOptionError, "did you mean 'attn_mask'"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**{"query": Q, "key": KV, "value": KV} | options)


def test_an_array_that_no_library_can_reshape():
    class Exchanged:
        def __dlpack__(self, **_):
            return Q.__dlpack__()

        def __dlpack_device__(self):
            return Q.__dlpack_device__()

    with pytest.raises(DTypeError, match="query is Exchanged; pass an array of NumPy, CuPy, torch or JAX"):
        scaled_dot_product_attention(Exchanged(), KV, KV)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("leading", [*LEADING, *(f"groups: {name}" for name in GROUPS)])
def test_against_torch(leading, mask, dtype):
    torch = pytest.importorskip("torch")
    groups = leading.startswith("groups: ")
    axes = GROUPS[leading.removeprefix("groups: ")] if groups else LEADING[leading]
    if mask == "full" and groups:
        pytest.skip("masks of groups have no heads here")
    for seqlens in SEQLENS:
        arrays, options = inputs(axes, seqlens, mask)
        tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
        options = {name: torch.from_numpy(x) if name == "attn_mask" else x for name, x in options.items()}
        if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
            options["attn_mask"] = options["attn_mask"].to(tensors[0].dtype)
        theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, **options, enable_gqa=groups)
        ours = scaled_dot_product_attention(*tensors, **options, enable_gqa=groups)
        assert isinstance(ours, torch.Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        atol = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 2e-2}[dtype]
        np.testing.assert_allclose(ours.double().numpy(), theirs.double().numpy(), rtol=0, atol=atol)


@pytest.mark.peers
def test_errors_where_torch_has_errors():
    torch = pytest.importorskip("torch")
    q, k = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 7, 8)
    wrong = [
        ((q, k, k), {}),
        ((q, k[:, :1].expand(2, 3, 7, 8), k[:, :1].expand(2, 3, 7, 8)), {"enable_gqa": True}),
        ((q, q, q), {"attn_mask": torch.ones(5, 5, dtype=torch.int32)}),
        ((q, q, q), {"attn_mask": torch.ones(5, 5, dtype=torch.float64)}),
        ((q, q, q), {"attn_mask": torch.ones(3, 4, 5, 5)}),
        ((q[0, 0, 0], q, q), {}),
        ((q, q.double(), q), {}),
    ]
    for arrays, options in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            torch.nn.functional.scaled_dot_product_attention(*arrays, **options)
        with pytest.raises(gpu_ops.errors.GpuOpsError):
            scaled_dot_product_attention(*arrays, **options)


@pytest.mark.peers
def test_a_tensor_with_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 3, 8, requires_grad=True)
    with pytest.raises(DTypeError, match=r"call query\.detach\(\)"):
        scaled_dot_product_attention(q, q, q)


@pytest.mark.peers
def test_jax_arrays():
    jax = pytest.importorskip("jax")
    arrays, options = inputs(LEADING["shared in two batches"], (5, 7), "bool", np.float32)
    mask = jax.numpy.asarray(options["attn_mask"])
    out = scaled_dot_product_attention(*map(jax.numpy.asarray, arrays), mask)
    assert isinstance(out, jax.Array)
    expected = documented(*(x.astype(np.float64) for x in arrays), **options)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0, atol=3e-6)
