"""Linear layer, forward and backward: one test body over the backends, against the reference in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.program import Layout, Limits, Spec, lower
from gpu_ops.reference.gemm import linear as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close
from tests.support.compare import check_gradients, random
from tests.support.compilers import needs_nvrtc

DEVICES = ("cpu", "emulator", "cuda")
# (leading axes, in_features, out_features): one token, few tokens, whole tiles, odd sizes, K divided among blocks
CASES = [
    ((), 1, 1),
    ((5,), 7, 9),
    ((1, 3), 264, 40),
    ((16,), 1024, 24),
    ((2, 32), 64, 128),
    ((77,), 130, 66),
    ((20,), 2056, 16),
]
# (bias, residual)
ADDENDS = [(False, False), (True, False), (False, True), (True, True)]


def quick_on_emulator(raw):
    dtypes = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)] if raw else [np.dtype(np.float16)]
    return {
        "test_forward": {
            "dtype": dtypes,
            "case": [CASES[i] for i in ((1, 3, 5, 6) if raw else (5,))],
            "addends": [ADDENDS[i] for i in ((1, 3) if raw else (3,))],
        },
        "test_backward": {"dtype": dtypes, "case": [CASES[1], CASES[5]]},
        "test_gradients_add_up": {"dtype": dtypes[:1]},
    }


def tensors(rng, case, dtype):
    """dy, x, weight, bias and residual."""
    lead, n, m = case
    x, weight = random(rng, (*lead, n), dtype), random(rng, (m, n), dtype, n**-0.5)
    return random(rng, (*lead, m), dtype), x, weight, random(rng, (m,), dtype), random(rng, (*lead, m), dtype)


@pytest.mark.parametrize("addends", ADDENDS, ids=lambda a: "bias" * a[0] + "residual" * a[1] or "product")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(backend, dtype, case, addends, rng):
    _, x, weight, bias, residual = tensors(rng, case, dtype)
    bias, residual = bias if addends[0] else None, residual if addends[1] else None
    y = gpu_ops.linear(x, weight, bias, residual=residual, **backend)
    expected, naive = (
        reference.linear(x, weight, bias, residual=residual, precision=p) for p in ("float64", "naive")
    )
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    close(y, expected, naive, dtype)
    if residual is not None:
        assert gpu_ops.linear(x, weight, bias, residual=residual, out=residual, **backend) is residual
        np.testing.assert_array_equal(residual, y)


@pytest.mark.parametrize("tokens", [3, 70, 1100])
def test_addends_of_every_tile(tokens, rng):
    """Few tokens, several tiles of out_features, and tokens in two parts, on the CPU."""
    _, x, weight, bias, residual = tensors(rng, ((tokens,), 24, 300), np.float32)
    y = gpu_ops.linear(x, weight, bias, residual=residual, device="cpu", backend="numba")
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + residual + bias
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@needs_nvrtc
def test_addends_of_every_group_of_columns(rng):
    """CUDA C++ kernels add four columns at a time."""
    _, x, weight, bias, residual = tensors(rng, ((20,), 40, 72), np.dtype(ml_dtypes.bfloat16))
    y = gpu_ops.linear(x, weight, bias, residual=residual, device="emulator", backend="raw")
    arrays = [a.astype(np.float64) for a in (x, weight, bias, residual)]
    expected = arrays[0] @ arrays[1].T + arrays[2] + arrays[3]
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2.0**-8, atol=1e-5)


def test_backward_of_more_tokens_than_one_part(rng):
    """dweight and dbias add up over parts of 1024 tokens on the CPU; dx comes from each part."""
    dy, x, weight, *_ = tensors(rng, ((2100,), 24, 40), np.float32)
    actual = gpu_ops.linear_backward(dy, x, weight, has_bias=True, device="cpu", backend="numba")
    dy, x = dy.astype(np.float64), x.astype(np.float64)
    for result, expected in zip(actual, (dy @ weight, dy.T @ x, dy.sum(axis=0)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(backend, dtype, case, rng):
    dy, x, weight, *_ = tensors(rng, case, dtype)
    actual = gpu_ops.linear_backward(dy, x, weight, has_bias=True, **backend)
    expected, naive = (
        reference.linear_backward(dy, x, weight, has_bias=True, precision=p) for p in ("float64", "naive")
    )
    sum_dtype = np.float64 if dtype == np.float64 else np.float32
    assert [g.dtype for g in actual] == [dtype, sum_dtype, sum_dtype]
    for name, g, w, n in zip(("dx", "dweight", "dbias"), actual, expected, naive, strict=True):
        assert g.shape == w.shape
        close(g, w, n, dtype, GRADIENT, what=name)


def test_gradients_add_up(backend, dtype, rng):
    """Gradients of two parts of a batch, added into the same arrays, equal those of the whole in float32."""
    dy, x, weight, *_ = tensors(rng, ((64,), 40, 24), dtype)
    sum_dtype = np.float64 if dtype == np.float64 else np.float32
    dweight, dbias = np.zeros(weight.shape, sum_dtype), np.zeros(24, sum_dtype)
    for rows in (slice(0, 40), slice(40, 64)):
        sums = {"has_bias": True, "dweight": dweight, "dbias": dbias}
        _, *sums_out = gpu_ops.linear_backward(dy[rows], x[rows], weight, **sums, **backend)
        assert sums_out[0] is dweight
        assert sums_out[1] is dbias
    _, expected, want_bias = reference.linear_backward(dy, x, weight, has_bias=True, precision="float64")
    tolerance = {"rtol": 0, "atol": 1e-12 if sum_dtype == np.float64 else 2e-5}
    np.testing.assert_allclose(dweight, expected, **tolerance)
    np.testing.assert_allclose(dbias, want_bias, **tolerance)


def test_a_token_has_the_same_bits_beside_any_others(dtype, rng):
    """On the CPU, the number of features alone decides how a sum over them is divided."""
    x, weight = random(rng, (1100, 1300), dtype), random(rng, (70, 1300), dtype, 1300**-0.5)
    y = gpu_ops.linear(x, weight)
    for rows in (slice(0, 1), slice(7, 12), slice(5, 70), slice(100, 900)):
        assert gpu_ops.linear(x[rows], weight).tobytes() == y[rows].tobytes()


def test_results_in_given_arrays(backend, rng):
    dy, x, weight, *_ = tensors(rng, ((6,), 8, 5), np.float32)
    expected = gpu_ops.linear_backward(dy, x, weight, has_bias=True, **backend)
    outs = tuple(np.full_like(result, 7) for result in expected)
    actual = gpu_ops.linear_backward(dy, x, weight, has_bias=True, out=outs, **backend)
    assert all(got is result for got, result in zip(actual, outs, strict=True))
    for got, result in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(got, result)
    dx, dweight = np.full_like(x, 7), np.zeros_like(weight)
    actual = gpu_ops.linear_backward(dy, x, weight, dweight=dweight, out=dx, **backend)
    assert actual[0] is dx
    assert actual[1] is dweight
    for got, result in zip(actual, expected[:2], strict=True):
        np.testing.assert_array_equal(got, result)


def test_empty_sums_leave_what_is_given(backend):
    dweight = np.ones((3, 4), np.float32)
    x = np.zeros((0, 4), np.float32)
    dx, sum_out = gpu_ops.linear_backward(np.zeros((0, 3), np.float32), x, dweight, **backend)
    assert dx.shape == (0, 4)
    np.testing.assert_array_equal(sum_out, np.zeros((3, 4)))
    weight = dweight.copy()
    gpu_ops.linear_backward(np.zeros((0, 3), np.float32), x, weight, dweight=dweight, **backend)
    np.testing.assert_array_equal(dweight, np.ones((3, 4)))


def test_without_in_features_dbias_is_still_a_sum(backend):
    dy = np.arange(6, dtype=np.float32).reshape(2, 3)
    x, weight = np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32)
    *_, dbias = gpu_ops.linear_backward(dy, x, weight, has_bias=True, **backend)
    np.testing.assert_array_equal(dbias, dy.sum(0))


def test_without_in_features_the_addends_are_left(backend):
    bias, residual = np.arange(3, dtype=np.float32), np.ones((2, 3), np.float32)
    x, weight = np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32)
    y = gpu_ops.linear(x, weight, bias, residual=residual, **backend)
    np.testing.assert_array_equal(y, residual + bias)


def test_the_reference_by_finite_differences(rng):
    dy, x, weight, bias, _ = tensors(rng, ((3,), 4, 2), np.float64)
    dx, dweight, dbias = reference.linear_backward(dy, x, weight, has_bias=True)
    check_gradients(
        lambda *arrays: (reference.linear(*arrays),), (x, weight, bias), (dy,), (dx, dweight, dbias), rng
    )


def test_mistakes(rng):
    dy, x, weight, bias, residual = tensors(rng, ((5,), 8, 6), np.float32)
    for error, message, call in (
        (ShapeError, "expected (..., in_features=8)", lambda: gpu_ops.linear(x[:, :4], weight)),
        (ShapeError, "bias has shape (8,)", lambda: gpu_ops.linear(x, weight, x[0])),
        (ShapeError, "residual has shape (4, 6)", lambda: gpu_ops.linear(x, weight, residual=residual[:4])),
        (DTypeError, "", lambda: gpu_ops.linear(x, weight, bias.astype(np.float64))),
        (
            OptionError,
            "dbias= needs has_bias=True",
            lambda: gpu_ops.linear_backward(dy, x, weight, dbias=bias),
        ),
        (
            DTypeError,
            "dweight is float16, expected exactly float32",
            lambda: gpu_ops.linear_backward(dy, x, weight, dweight=weight.astype(np.float16)),
        ),
        (
            ShapeError,
            "dweight shares memory with weight",
            lambda: gpu_ops.linear_backward(dy, x, weight, dweight=weight),
        ),
    ):
        with pytest.raises(error) as caught:
            call()
        assert message in str(caught.value)


@pytest.mark.parametrize("preset", ["H100 SXM", "A100-80"])
def test_cublas_multiplies_where_it_is_faster(preset):
    """With a residual the cuBLAS sums are float32, and one pass adds and rounds them."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    arrays = {"x": (256, 512), "weight": (384, 512), "residual": (256, 384), "y": (256, 384)}
    spec = Spec("linear", tuple((name, Layout.contiguous(shape, bf16)) for name, shape in arrays.items()))
    program = str(lower(spec, "raw", Limits("sm_90", 132, 232448, preset, preset))[0])
    assert ("cublasGemmEx" in program) == (preset == "H100 SXM")
    assert ("gemm_sum" in program) == (preset == "H100 SXM")
