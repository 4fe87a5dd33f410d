"""Further arrays that attention_backward reads and writes: delta, a float64 lse, float32 dout and gradients."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.reference.attention import forward as reference
from tests.attention.cases import DTYPES, assert_gradient, expected
from tests.support.compilers import needs_nvrtc
from tests.support.fake_cupy import FakeArray

DEVICES = ("cpu", "emulator", "cuda")
NAMES = ("dq", "dk", "dv")
SETTINGS = {
    "mask": "causal",
    "seqlens": (37, 70),
    "batch": 1,
    "heads": (4, 2),
    "head_dims": (32, 24),
    "sinks": True,
}


def quick_on_emulator(raw):
    """Numba kernels compile for seconds."""
    if raw:
        once = {"layout": ["bhsd"], "dtype": ["bfloat16"]}
        return dict.fromkeys(("test_gradients_are_added", "test_delta_takes_the_place_of_out"), once)
    return {
        "test_gradients_are_added": {"deterministic": [False], "dtype": ["bfloat16"]},
        "test_out_in_float32": None,
        "test_dout_in_float32": {"dtype": ["bfloat16"], "with_delta": [False]},
        "test_packed_dout_in_float32": None,
        "test_delta_is_that_of_the_rounded_dout": None,
        "test_packed_sequences": None,
        "test_weights_of_a_row_sum_to_one": None,  # the ring has this too
        "test_delta_takes_the_place_of_out": None,
    }


def wide_of(dtype):
    return np.float64 if dtype == "float64" else np.float32


def given(dtype, layout="bshd"):
    """A problem with its results, and its arguments of the backward: out in the dtype, lse and delta."""
    e = expected(gradients=True, dtype=dtype, layout=layout, **SETTINGS)
    out = e.exact["out"].astype(DTYPES[dtype])
    products = (e.problem.dout.astype(np.float64) * e.exact["out"]).sum(axis=-1)
    delta = products.swapaxes(1, 2) if layout == "bshd" else products
    lse, delta = (np.ascontiguousarray(x, wide_of(dtype)) for x in (e.exact["lse"], delta))
    return e, out, lse, delta


def backward(e, out, lse, backend, **more):
    p = e.problem
    return gpu_ops.attention_backward(p.dout, *p.arrays, out, lse, **p.options, **more, **backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_delta_takes_the_place_of_out(layout, dtype, backend):
    e, _, lse, delta = given(dtype, layout)
    *grads, extra = backward(e, None, lse, backend, delta=delta, return_extra=True)
    for name, x in zip((*NAMES, "dsinks"), (*grads, extra["sinks"]), strict=True):
        e.check(name, x)
    ignored = np.full((3,), np.nan)  # its shape is not checked either
    for x, y in zip(backward(e, ignored, lse, backend, delta=delta, deterministic=True), grads, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol=2e-2, atol=1e-5)
    for x in backward(e, None, lse, backend, delta=np.zeros_like(delta))[:2]:
        assert np.abs(x.astype(np.float64) - grads[0 if x.shape == grads[0].shape else 1]).max() > 0.05


def test_out_in_float32(backend):
    """delta is then that of the values before rounding."""
    e, _, lse, delta = given("float16")
    grads = tuple(np.empty(x.shape, np.float32) for x in e.problem.arrays)
    backward(e, e.exact["out"].astype(np.float32), lse, backend, grads=grads, deterministic=True)
    for name, x, y in zip(NAMES, grads, backward(e, None, lse, backend, delta=delta), strict=True):
        e.check(name, x)
        np.testing.assert_allclose(x, y.astype(np.float32), rtol=2**-10, atol=2e-5)


def wide_dout(e, rng):
    """A float32 dout that no 16-bit dtype holds."""
    return rng.standard_normal(e.problem.dout.shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("with_delta", [False, True])
def test_dout_in_float32(with_delta, dtype, backend, rng):
    """Gradients obey the rule. Kernels round dout first: the same bits as with dout rounded by the caller."""
    e, out, lse, _ = given(dtype)
    p, dout, inner = e.problem, wide_dout(e, rng), {"deterministic": True}
    exact, naive = (
        reference.attention_backward(dout, *p.arrays, out, lse, **p.options, precision=precision)
        for precision in ("float64", "naive")
    )
    if with_delta:
        inner["delta"] = np.einsum("bshd,bshd->bhs", dout, e.exact["out"]).astype(np.float32)
        out = None
    actual, rounded = (
        gpu_ops.attention_backward(x, *p.arrays, out, lse, **p.options, **inner, **backend)
        for x in (dout, dout.astype(DTYPES[dtype]))
    )
    for name, x, y, want, textbook in zip(NAMES, actual, rounded, exact, naive, strict=True):
        assert_gradient(name, x, want, textbook, DTYPES[dtype], lse)
        assert x.dtype == DTYPES[dtype]
        if backend["backend"] != "reference":
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_delta_is_that_of_the_rounded_dout(backend, rng):
    """A row that sees one key has no gradient of scores: delta and dP cancel to float32, not to bfloat16 only."""
    q, k, v = (rng.standard_normal((1, n, 2, 32)).astype(DTYPES["bfloat16"]) for n in (70, 1, 1))
    out, lse = gpu_ops.attention(q, k, v, return_lse=True, **backend)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    dq, dk, _ = gpu_ops.attention_backward(dout, q, k, v, out, lse, **backend)
    assert max(np.abs(x.astype(np.float64)).max() for x in (dq, dk)) < 1e-5


def test_packed_dout_in_float32(backend, rng):
    e = expected(dtype="float16", seqlens=(70, 70), heads=(4, 2), head_dims=(32, 32), batch=1)
    p, cu = e.problem, np.array([0, 30, 30, 70], np.int32)
    q, k, v, dout = (x[0] for x in (*p.arrays, wide_dout(e, rng)))
    out, lse = gpu_ops.attention_varlen(q, k, v, cu, cu, return_lse=True, out_dtype=np.float32, **backend)
    actual, rounded = (
        gpu_ops.attention_varlen_backward(x, q, k, v, out, lse, cu, cu, deterministic=True, **backend)
        for x in (dout, dout.astype(q.dtype))
    )
    exact, naive = (
        reference.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, precision=precision)
        for precision in ("float64", "naive")
    )
    for name, x, y, want, textbook in zip(NAMES, actual, rounded, exact, naive, strict=True):
        assert_gradient(name, x, want, textbook, q.dtype, lse)
        if backend["backend"] != "reference":
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_added(deterministic, dtype, backend, rng):
    """Gradients are added to the contents of strided arrays, in every call; by default they are written."""
    e, out, lse, _ = given(dtype)
    grad_dtype = wide_of(dtype)
    arrays = [
        rng.standard_normal((*x.shape[:-1], x.shape[-1] + 8)).astype(grad_dtype) for x in e.problem.arrays
    ]
    before, grads = [x.copy() for x in arrays], tuple(x[..., : x.shape[-1] - 8] for x in arrays)
    more = {"grads": grads, "deterministic": deterministic}
    for times in (1, 2):
        actual = backward(e, out, lse, backend, **more, accumulate=True)
        for name, x, mine, was in zip(NAMES, actual, grads, before, strict=True):
            assert x is mine
            added = (x.astype(np.float64) - was[..., :-8]) / times
            # a float32 unit of the previous contents
            noise = 4 * float(np.spacing(np.abs(was).max()))
            exact, naive = e.exact[name], e.naive[name]
            assert_gradient(name, added, exact, naive, DTYPES[dtype], e.exact["lse"], noise)
    for x, was in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x[..., -8:], was[..., -8:])
    backward(e, out, lse, backend, **more)
    rounded = backward(e, out, lse, backend, deterministic=deterministic)
    for name, x, y in zip(NAMES, grads, rounded, strict=True):
        e.check(name, x)
        assert dtype != "bfloat16" or (x != y).any(), "rounded to the dtype of the inputs"
        np.testing.assert_allclose(x, y.astype(grad_dtype), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("size", [4000, -16000])
def test_weights_of_a_row_sum_to_one(size, backend, rng):
    """Scores as large as float32 distinguishes: weights relative to a float64 lse are those of the forward."""
    q, k, v = (rng.standard_normal((1, n, 8, 32)).astype(np.float32) for n in (40, 150, 150))
    q[..., 0], k[..., 0] = 64.0, size / 16
    out, lse = gpu_ops.attention(
        q, k, v, softmax_scale=0.25, return_lse=True, lse_dtype=np.float64, **backend
    )
    dout = np.zeros_like(out)
    dout[:, 7] = 1.0
    dv = gpu_ops.attention_backward(dout, q, k, v, out, lse, softmax_scale=0.25, **backend)[2]
    np.testing.assert_allclose(dv.astype(np.float64).sum(axis=1), 1.0, rtol=1e-6)


def test_packed_sequences(backend, rng):
    e = expected(dtype="bfloat16", seqlens=(70, 70), heads=(4, 2), head_dims=(32, 32), batch=1)
    p, cu = e.problem, np.array([0, 30, 30, 70], np.int32)
    q, k, v, dout = (x[0] for x in (*p.arrays, p.dout))
    out, lse = reference.attention_varlen(q, k, v, cu, cu, return_lse=True, precision="float64")
    exact, naive = (
        reference.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, precision=precision)
        for precision in ("float64", "naive")
    )
    delta = (dout.astype(np.float64) * out).sum(axis=-1).T.astype(np.float32)
    grads = tuple(np.ones(x.shape, np.float32) for x in (q, k, v))
    gpu_ops.attention_varlen_backward(
        dout, q, k, v, None, lse, cu, cu, delta=delta, grads=grads, accumulate=True, **backend
    )
    for name, x, want, textbook in zip(NAMES, grads, exact, naive, strict=True):
        assert_gradient(name, x - 1, want, textbook, q.dtype, lse, 1e-6)


def test_what_it_refuses_to_add_to():
    e, out, lse, _ = given("float16")
    p = e.problem
    float16_grads, float32_grads = (
        tuple(np.zeros(x.shape, t) for x in p.arrays) for t in (np.float16, np.float32)
    )
    cases = [
        ({"accumulate": True}, OptionError, r"pass grads=\(dq, dk, dv\) of float32"),
        (
            {"grads": float16_grads, "accumulate": True},
            DTypeError,
            "grads dq is float16, expected exactly float32",
        ),
        (
            {"grads": (float32_grads[0], *float16_grads[1:])},
            DTypeError,
            "grads dq is float32, expected exactly float16",
        ),
        ({"grads": (*float32_grads[:2], lse), "accumulate": True}, ShapeError, "grads dv has shape"),
        (
            {"grads": (float32_grads[0], float32_grads[1], float32_grads[1][..., :24]), "accumulate": True},
            ShapeError,
            "shares memory with",
        ),
    ]
    for _ in range(2):  # also after a valid call
        for more, error, message in cases:
            with pytest.raises(error, match=message):
                backward(e, out, lse, {"device": "cpu"}, **more)
        assert not any(x.any() for x in (*float16_grads, *float32_grads))
        backward(e, out, lse, {"device": "cpu"}, grads=float32_grads, accumulate=True)
        for x in float32_grads:
            x[...] = 0


@needs_nvrtc
def test_a_captured_call_adds_at_every_replay(cupy):
    e, _, lse, delta = given("bfloat16")
    p = e.problem
    arrays = [FakeArray(x) for x in (p.dout, *p.arrays)]
    options = {n: FakeArray(x) if isinstance(x, np.ndarray) else x for n, x in p.options.items()}
    options |= {"delta": FakeArray(delta), "accumulate": True, "deterministic": True}
    grads = tuple(FakeArray(np.zeros(x.shape, np.float32)) for x in p.arrays)
    call = (*arrays, None, FakeArray(lse.astype(np.float64)))
    gpu_ops.attention_backward(*call, grads=grads, **options)
    once = [x.host.copy() for x in grads]
    size = gpu_ops.workspace_size("attention_backward", *call, grads=grads, **options)
    with cupy.capture():
        workspace = FakeArray(np.zeros(size, np.uint8))
        gpu_ops.attention_backward(*call, grads=grads, workspace=workspace, **options)
    before = [x.host.copy() for x in grads]
    for times in (1, 2):
        cupy.replay()
        for x, was, gradient in zip(grads, before, once, strict=True):
            np.testing.assert_allclose(x.host, was + times * gradient, rtol=1e-6, atol=1e-6)


def test_slopes_of_capped_scores_keep_their_digits():
    """At a score of six caps 1 - tanh^2 of float32 has three digits left."""
    x = np.full((1, 1, 1, 8), 3.0, np.float32)
    options = {"softcap": 0.5, "softmax_scale": 0.04, "sinks": np.zeros(1, np.float32)}
    out, lse = gpu_ops.attention(x, x, x, return_lse=True, **options, device="cpu", backend="numba")
    grads = gpu_ops.attention_backward(x, x, x, x, out, lse, **options, device="cpu", backend="numba")
    want = reference.attention_backward(x, x, x, x, out, lse, **options, precision="float64")
    for actual, exact in zip(grads, want, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-5)


def test_weights_beside_a_large_lse():
    """In float64 an lse of 300 is rounded by 3e-14, and again in base 2, where the remainder is added."""
    n, rng = 300, np.random.default_rng(0)
    lse = rng.uniform(200, 400, (n, 1, 1))
    bias = (lse - rng.uniform(0, 2, (n, 1, 1)))[..., None]
    q, k, ones = np.zeros((n, 1, 1, 16)), np.zeros((n, 8, 1, 16)), np.ones((n, 8, 1, 16))
    _, _, dv = gpu_ops.attention_backward(
        ones[:, :1], q, k, ones, ones[:, :1], lse, bias=np.repeat(bias, 8, 3), device="cpu"
    )
    weights = np.exp(bias.astype(np.longdouble) - lse[..., None])[:, 0, 0]
    assert np.abs(dv[:, 0, 0, :1] / weights - 1).max() < 5e-14
