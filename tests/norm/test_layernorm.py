"""LayerNorm, forward and backward: one test body over the backends, against the reference in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.norm import layernorm as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import random

DEVICES = ("cpu", "emulator", "cuda")
SHAPES = [(7,), (1, 123), (3, 5, 64), (2, 4095), (1, 8193), (1, 32768), (300, 257)]


def quick_on_emulator(raw):
    dtypes = {"dtype": emulator_dtypes(raw)}
    shapes = [*SHAPES[:5], SHAPES[6]] if raw else SHAPES[:4]
    return {"*": dtypes, "test_forward_and_backward": {**dtypes, "shape": shapes}}


def references(function, *arrays, **options):
    with np.errstate(over="ignore", invalid="ignore"):
        return tuple(function(*arrays, precision=p, **options) for p in ("float64", "naive"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(backend, dtype, shape, rng):
    x, dy = random(rng, shape, dtype, 2), random(rng, shape, dtype)
    weight, bias = random(rng, shape[-1:], dtype), random(rng, shape[-1:], dtype)
    y, mean, rstd = gpu_ops.layernorm(x, weight, bias, return_stats=True, **backend)
    expected, naive = references(reference.layernorm, x, weight, bias, return_stats=True)
    assert (y.dtype, y.shape) == (dtype, shape)
    close(y, expected[0], naive[0], dtype, what="y")
    statistics = np.float64 if dtype == np.float64 else np.float32
    tiny = 1e-13 if dtype == np.float64 else 3e-7
    for actual, exact in ((mean, expected[1]), (rstd, expected[2])):
        assert (actual.dtype, actual.shape) == (statistics, shape[:-1])
        np.testing.assert_allclose(actual, exact, rtol=tiny, atol=tiny)

    actual = gpu_ops.layernorm_backward(dy, x, weight, mean, rstd, **backend)
    expected, naive = references(reference.layernorm_backward, dy, x, weight, mean, rstd)
    assert (actual[0].dtype, actual[0].shape) == (dtype, shape)
    assert actual[1].dtype == actual[2].dtype == statistics
    for name, g, w, n in zip(("dx", "dweight", "dbias"), actual, expected, naive, strict=True):
        close(g, w, n, dtype, GRADIENT, what=name)
    magnitude = np.abs(dy.astype(np.float64)).reshape(-1, shape[-1]).sum(axis=0)
    assert (np.abs(actual[2] - expected[2]) <= 4e-6 * magnitude + 1e-30).all()


def test_residual_and_no_bias(backend, dtype, rng):
    x, residual, dy, ds = (random(rng, (9, 321), dtype) for _ in range(4))
    weight = random(rng, (321,), dtype)
    y, s, mean, rstd = gpu_ops.layernorm(x, weight, residual=residual, return_stats=True, **backend)
    exact = (x.astype(np.float64) + residual.astype(np.float64)).astype(dtype)
    assert s.tobytes() == exact.tobytes()
    # y is the norm of s as stored, not of the wider sum; a bias of zeros is no bias
    alone = gpu_ops.layernorm(s, weight, np.zeros_like(weight), return_stats=True, **backend)
    assert [a.tobytes() for a in alone] == [a.tobytes() for a in (y, mean, rstd)]

    dx, dweight, _ = gpu_ops.layernorm_backward(dy, s, weight, mean, rstd, dresidual=ds, **backend)
    expected, naive = references(reference.layernorm_backward, dy, s, weight, mean, rstd, dresidual=ds)
    close(dx, expected[0], naive[0], dtype, GRADIENT, what="dx")
    close(dweight, expected[1], naive[1], dtype, GRADIENT, what="dweight")


@pytest.mark.parametrize("given", [("dweight",), ("dbias",), ("dweight", "dbias")], ids="-".join)
def test_gradients_add_up_over_parts(backend, dtype, given, rng):
    """Gradients are added to the arrays passed; the other one, and dx, do not change."""
    x, dy, weight = random(rng, (9, 321), dtype), random(rng, (9, 321), dtype), random(rng, (321,), dtype)
    _, mean, rstd = gpu_ops.layernorm(x, weight, return_stats=True, **backend)
    parts = slice(0, 4), slice(4, 9)
    first, second = ((dy[part], x[part], weight, mean[part], rstd[part]) for part in parts)
    first_grads, second_grads = (gpu_ops.layernorm_backward(*part, **backend) for part in (first, second))
    sums = {name: first_grads[1 + (name == "dbias")].copy() for name in given}
    out = tuple(
        np.zeros_like(x)
        for x, n in zip(second_grads, ("dx", "dweight", "dbias"), strict=True)
        if n not in given
    )
    results = gpu_ops.layernorm_backward(*second, **sums, out=out, **backend)
    assert results[0] is out[0]
    for i, name in enumerate(("dx", "dweight", "dbias")):
        if name in given:
            assert results[i] is sums[name]
            size = np.abs(first_grads[i]) + np.abs(second_grads[i])
            np.testing.assert_array_less(
                np.abs(results[i] - (first_grads[i] + second_grads[i])), 1e-6 * size.max()
            )
        else:
            assert results[i].tobytes() == second_grads[i].tobytes()


def test_results_in_the_order_of_the_contract(backend):
    x, weight = np.array([[1.0, 3.0, 1.0, 3.0]], np.float32), np.ones(4, np.float32)
    sign = np.array([[-1.0, 1.0, -1.0, 1.0]], np.float32)
    y = gpu_ops.layernorm(x, weight, weight, **backend)
    np.testing.assert_allclose(y, sign + 1, atol=1e-5)
    y, s = gpu_ops.layernorm(x, weight, residual=x, **backend)
    np.testing.assert_array_equal(s, 2 * x)
    y, mean, rstd = gpu_ops.layernorm(x, weight, return_stats=True, **backend)
    assert (mean[0], rstd.shape) == (2.0, (1,))
    y, s, mean, rstd = gpu_ops.layernorm(x, weight, residual=x, return_stats=True, **backend)
    assert mean[0] == 4.0
    np.testing.assert_allclose(rstd, 0.5, rtol=1e-5)


@pytest.mark.parametrize("cols", [96, 1500, 8200, 60000])
def test_a_large_common_offset_costs_no_digits(backend, cols, rng):
    """With mean 1000 and deviation <= 1, mean(x^2) - mean^2 in float32 would keep no digit of the variance."""
    if cols > 8200 and backend == {"device": "emulator", "backend": "numba"}:
        pytest.skip("the twin has one path for all lengths")
    x = (1000 + rng.standard_normal((2, cols)) * [[1.0], [0.01]]).astype(np.float32)
    x[0, cols // 2 :] += 50  # where half of a long row stays on the chip, its mean is not that of the rest
    _, mean, rstd = gpu_ops.layernorm(x, np.ones(cols, np.float32), return_stats=True, eps=1e-12, **backend)
    exact_x = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact_x.mean(axis=-1), rtol=2e-7)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(exact_x.var(axis=-1) + 1e-12), rtol=2e-5)


@pytest.mark.parametrize(("far", "first"), [(0.0, 1), (1e4, 1), (1e4, 64)])
def test_statistics_keep_their_digits_beside_a_larger_mean(far, first, rng):
    """Sums are taken around a mean of the first numbers, and a rounded mean; the error of both is corrected."""
    x = (1e6 + rng.standard_normal((8, 4096))).astype(np.float32)
    x[:, :first] += far
    _, mean, rstd = gpu_ops.layernorm(
        x, np.ones(4096, np.float32), return_stats=True, eps=1e-12, device="cpu"
    )
    exact_x = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact_x.mean(axis=-1), rtol=6e-8)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(exact_x.var(axis=-1) + 1e-12), rtol=2e-7)


@pytest.mark.parametrize("cols", [7, 1000, 9000])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])  # float64 has no wider sums
def test_a_constant_row_is_the_bias(cols, dtype, backend):
    x, bias = np.full((2, cols), 3.3, dtype), np.full(cols, 0.25, dtype)
    y, mean, _ = gpu_ops.layernorm(x, np.ones_like(bias), bias, return_stats=True, **backend)
    np.testing.assert_array_equal(mean, x[:, 0].astype(mean.dtype))
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


def test_constant_rows(backend, dtype):
    x, weight, bias = np.full((3, 65), 7.3, dtype), np.ones(65, dtype), np.full(65, 0.25, dtype)
    y, mean, rstd = gpu_ops.layernorm(x, weight, bias, eps=1e-4, return_stats=True, **backend)
    np.testing.assert_allclose(y.astype(np.float64), 0.25, atol=1e-3)
    np.testing.assert_allclose(mean, x[:, 0].astype(np.float64), rtol=2e-7)
    np.testing.assert_allclose(rstd, 100.0, rtol=1e-6)
    dx, _, dbias = gpu_ops.layernorm_backward(np.ones_like(x), x, weight, mean, rstd, **backend)
    np.testing.assert_allclose(dx.astype(np.float64), 0, atol=1e-3)
    np.testing.assert_array_equal(dbias, 3)


def test_one_column(backend, dtype):
    """y is the bias, whatever x: dx is the rounding error of dy * weight - mean(dy * weight)."""
    x, weight, bias = np.array([3.1], dtype), np.array([1.7], dtype), np.array([0.3], dtype)
    y, mean, rstd = gpu_ops.layernorm(x, weight, bias, eps=1e-2, return_stats=True, **backend)
    assert (y == bias).all()
    dx, dweight, dbias = gpu_ops.layernorm_backward(x, x, weight, mean, rstd, **backend)
    assert abs(float(dx[0])) <= 10 * 5.3 * 2**-24
    assert (dweight[0], dbias[0]) == (0, x[0])


def test_numbers_whose_sums_and_squares_leave_the_range(backend, dtype, rng):
    large = {"float16": 3e4, "bfloat16": 1e38, "float32": 1e38, "float64": 1e150}[dtype.name]
    for center in (0.0, 1.0):
        x = ((np.where(rng.standard_normal((3, 999)) < 0, -0.5, 0.5) + center) * large).astype(dtype)
        y, mean, rstd = gpu_ops.layernorm(x, np.ones(999, dtype), return_stats=True, **backend)
        scaled = x.astype(np.float64) / large
        expected = (scaled - scaled.mean(axis=-1, keepdims=True)) / scaled.std(axis=-1, keepdims=True)
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-6 if dtype.itemsize > 2 else 8e-3)
        np.testing.assert_allclose(mean / large, scaled.mean(axis=-1), rtol=1e-6, atol=1e-7)
        assert (rstd > 0).all()
    small = {"float16": 1e-4, "bfloat16": 1e-18, "float32": 1e-18, "float64": 1e-150}[dtype.name]
    eps = {"float16": 1e-12, "bfloat16": 1e-40, "float32": 1e-40, "float64": 1e-305}[dtype.name]
    x = random(rng, (4, 500), dtype, small)
    scaled = x.astype(np.float64)
    expected = 1 / np.sqrt(scaled.var(axis=-1) + eps)
    _, _, rstd = gpu_ops.layernorm(x, np.ones(500, dtype), eps=eps, return_stats=True, **backend)
    np.testing.assert_allclose(rstd, expected, rtol=2e-6)


def test_nan_and_infinity_stay_in_their_row(backend, dtype, rng):
    x, weight = random(rng, (5, 70), dtype), np.ones(70, dtype)
    clean = gpu_ops.layernorm(x, weight, **backend)
    x[1, 3], x[3, 60] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        y, mean, rstd = gpu_ops.layernorm(x, weight, return_stats=True, **backend)
    for r in (1, 3):
        assert np.isnan(y[r].astype(np.float64)).all()
        assert np.isnan(rstd[r])
        assert not np.isfinite(mean[r])
    for r in (0, 2, 4):
        assert y[r].tobytes() == clean[r].tobytes()


def test_gradients_of_many_rows(rng):
    """The CPU adds up the sums of several tasks, each of several groups of rows."""
    x, dy = random(rng, (5000, 70), np.float32), random(rng, (5000, 70), np.float32)
    weight, bias = random(rng, (2, 70), np.float32)
    _, mean, rstd = gpu_ops.layernorm(x, weight, bias, return_stats=True, device="cpu")
    _, dweight, dbias = gpu_ops.layernorm_backward(dy, x, weight, mean, rstd, device="cpu")
    products = dy * ((x - mean.astype(np.float64)[:, None]) * rstd[:, None])
    np.testing.assert_allclose(
        dweight, products.sum(axis=0), rtol=0, atol=1e-6 * np.abs(products).sum(axis=0).max()
    )
    np.testing.assert_allclose(
        dbias, dy.sum(axis=0, dtype=float), rtol=0, atol=1e-6 * np.abs(dy).sum(axis=0).max()
    )


def test_gradients_are_derivatives(rng):
    x, weight, bias = rng.standard_normal((3, 8)), rng.standard_normal(8), rng.standard_normal(8)
    dy = rng.standard_normal((3, 8))
    _, mean, rstd = gpu_ops.layernorm(x, weight, bias, return_stats=True)
    gradients = gpu_ops.layernorm_backward(dy, x, weight, mean, rstd)
    h = 1e-6
    for array, gradient in zip((x, weight, bias), gradients, strict=True):
        for at in np.ndindex(array.shape):
            kept = array[at]
            array[at] = kept + h
            above = np.sum(dy * gpu_ops.layernorm(x, weight, bias))
            array[at] = kept - h
            below = np.sum(dy * gpu_ops.layernorm(x, weight, bias))
            array[at] = kept
            np.testing.assert_allclose(gradient[at], (above - below) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.peers
def test_torch_agrees():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install torch (CPU build) runs this"
    )
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(9, 77, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(77, generator=generator, dtype=torch.float64) for _ in range(2))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(leaves[0], (77,), *leaves[1:])
    expected.backward(dy)
    y, mean, rstd = gpu_ops.layernorm(x, weight, bias, return_stats=True)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-13)
    for actual, leaf in zip(gpu_ops.layernorm_backward(dy, x, weight, mean, rstd), leaves, strict=True):
        torch.testing.assert_close(actual, leaf.grad, rtol=1e-11, atol=1e-12)
