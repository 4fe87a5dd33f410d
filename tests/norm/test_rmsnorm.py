"""RMSNorm, forward and backward: one test body over the backends, against the reference in float64."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops.errors import OptionError
from gpu_ops.reference.norm import rmsnorm as ref_rmsnorm
from gpu_ops.reference.norm import rmsnorm as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import check_gradients, random

DEVICES = ("cpu", "emulator", "cuda")
CASTINGS = ["fp32", "llama", "gemma"]
SHAPES = [(1,), (7,), (1, 123), (3, 5, 64), (2, 4095), (1, 8193), (1, 65536), (300, 257)]


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def forward_references(x, weight, **options):
    with np.errstate(over="ignore"):
        return (
            reference.rmsnorm(x, weight, return_rstd=True, precision=p, **options)
            for p in ("float64", "naive")
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_forward_and_backward(backend, dtype, shape, casting, rng):
    x, dy = random(rng, shape, dtype, 2), random(rng, shape, dtype)
    weight = random(rng, shape[-1:], dtype)
    options = {"casting": casting, "weight_offset": 1.0 if casting == "gemma" else 0.0}
    y, rstd = gpu_ops.rmsnorm(x, weight, eps=1e-5, return_rstd=True, **options, **backend)
    (expected, want_rstd), (naive, _) = forward_references(x, weight, eps=1e-5, **options)
    assert (y.dtype, y.shape) == (dtype, shape)
    close(y, expected, naive, dtype, what="y")
    statistics = np.float64 if dtype == np.float64 else np.float32
    assert (rstd.dtype, rstd.shape) == (statistics, shape[:-1])
    np.testing.assert_allclose(rstd, want_rstd, rtol=1e-13 if dtype == np.float64 else 2e-7)

    dx, dweight = gpu_ops.rmsnorm_backward(dy, x, weight, rstd, **options, **backend)
    expected, naive = (
        reference.rmsnorm_backward(dy, x, weight, rstd, precision=p, **options) for p in ("float64", "naive")
    )
    assert (dx.dtype, dx.shape, dweight.dtype) == (dtype, shape, statistics)
    close(dx, expected[0], naive[0], dtype, GRADIENT, what="dx")
    close(dweight, expected[1], naive[1], dtype, GRADIENT, what="dweight")
    if casting != "llama":  # whose products have a rounded factor: elsewhere the sum is float32 throughout
        n = x.astype(np.float64) * np.asarray(rstd, np.float64)[..., None]
        magnitude = np.abs(dy.astype(np.float64) * n).reshape(-1, shape[-1]).sum(axis=0)
        assert (np.abs(dweight - expected[1]) <= 4e-6 * magnitude + 1e-30).all()


@pytest.mark.parametrize("casting", CASTINGS)
def test_residual(backend, dtype, casting, rng):
    x, residual, dy, ds = (random(rng, (9, 321), dtype) for _ in range(4))
    weight = random(rng, (321,), dtype)
    y, s, rstd = gpu_ops.rmsnorm(x, weight, residual=residual, casting=casting, return_rstd=True, **backend)
    (expected, _, _), (naive, _, _) = forward_references(x, weight, residual=residual, casting=casting)
    close(y, expected, naive, dtype, what="y")
    exact = (x.astype(np.float64) + residual.astype(np.float64)).astype(dtype)
    assert s.tobytes() == exact.tobytes()
    # y is the norm of s as stored, not of the wider sum
    alone, rstd_alone = gpu_ops.rmsnorm(s, weight, casting=casting, return_rstd=True, **backend)
    assert y.tobytes() == alone.tobytes()
    assert rstd.tobytes() == rstd_alone.tobytes()

    dx, dweight = gpu_ops.rmsnorm_backward(dy, s, weight, rstd, dresidual=ds, casting=casting, **backend)
    expected, naive = (
        reference.rmsnorm_backward(dy, s, weight, rstd, dresidual=ds, casting=casting, precision=p)
        for p in ("float64", "naive")
    )
    close(dx, expected[0], naive[0], dtype, GRADIENT, what="dx")
    close(dweight, expected[1], naive[1], dtype, GRADIENT, what="dweight")


def test_the_gradient_of_weight_adds_up_over_parts(backend, dtype, rng):
    x, dy, weight = random(rng, (9, 321), dtype), random(rng, (9, 321), dtype), random(rng, (321,), dtype)
    _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, **backend)
    first, second = ((dy[part], x[part], weight, rstd[part]) for part in (slice(0, 4), slice(4, 9)))
    (_, first_grad), (dx, second_grad) = (
        gpu_ops.rmsnorm_backward(*part, **backend) for part in (first, second)
    )
    for out in (None, np.zeros_like(dx)):
        dweight = first_grad.copy()
        results = gpu_ops.rmsnorm_backward(*second, dweight=dweight, out=out, **backend)
        assert results[1] is dweight
        assert out is None or results[0] is out
        assert results[0].tobytes() == dx.tobytes()
        np.testing.assert_array_less(
            np.abs(dweight - (first_grad + second_grad)),
            1e-6 * (np.abs(first_grad) + np.abs(second_grad)).max(),
        )
    with pytest.raises(OptionError, match=r"must be the array dx or a tuple of all results, \(dx\)"):
        gpu_ops.rmsnorm_backward(*second, dweight=first_grad, out=(dx, second_grad), **backend)


def test_results_in_the_order_of_the_contract(backend):
    x, weight = np.ones((2, 3, 4), np.float32), np.ones(4, np.float32)
    assert isinstance(gpu_ops.rmsnorm(x, weight, **backend), np.ndarray)
    y, s = gpu_ops.rmsnorm(x, weight, residual=x, **backend)
    np.testing.assert_allclose(y, 1, rtol=1e-6)
    np.testing.assert_array_equal(s, 2)
    _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, **backend)
    np.testing.assert_allclose(rstd, np.ones((2, 3)), rtol=1e-6)
    y, s, rstd = gpu_ops.rmsnorm(x, weight, residual=x, return_rstd=True, **backend)
    np.testing.assert_array_equal(s, 2)
    np.testing.assert_allclose(rstd, np.full((2, 3), 0.5), rtol=1e-6)


def test_llama_rounds_before_the_weight(backend, rng):
    """Where rstd is a power of two, every step is exact except the roundings of casting="llama"."""
    import ml_dtypes

    x = np.tile(np.array([1.5, -0.5, 1.0, 0.5, -1.0, 1.25], np.float64), (1, 40))
    x = np.concatenate([x, -x], axis=-1)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        xt = x.astype(dtype)
        weight = random(rng, (x.shape[-1],), dtype)
        eps = 4.0 - float(np.mean(np.square(x)))  # makes mean square + eps 4, rstd 1/2
        y, rstd = gpu_ops.rmsnorm(xt, weight, eps=eps, casting="llama", return_rstd=True, **backend)
        assert float(rstd[0]) == 0.5
        offset = gpu_ops.rmsnorm(xt, weight, eps=eps, casting="llama", weight_offset=1.0, **backend)
        assert y.tobytes() == ((xt * xt.dtype.type(0.5)) * weight).tobytes()
        gain = (1.0 + weight.astype(np.float32)).astype(dtype)
        assert offset.tobytes() == ((xt * xt.dtype.type(0.5)) * gain).tobytes()
        fp32 = gpu_ops.rmsnorm(xt, weight, eps=eps, weight_offset=1.0, **backend)
        product = xt.astype(np.float32) * np.float32(0.5) * (1 + weight.astype(np.float32))
        assert fp32.tobytes() == product.astype(dtype).tobytes()
        assert fp32.tobytes() != offset.tobytes()
        options = {"casting": "llama", **backend}
        dx, _ = gpu_ops.rmsnorm_backward(xt, xt, weight, rstd, weight_offset=1.0, **options)
        assert dx.tobytes() == gpu_ops.rmsnorm_backward(xt, xt, gain, rstd, **options)[0].tobytes()


def test_rows_of_zeros(backend, dtype):
    x, weight = np.zeros((3, 65), dtype), np.ones(65, dtype)
    y, rstd = gpu_ops.rmsnorm(x, weight, eps=1e-4, return_rstd=True, **backend)
    np.testing.assert_array_equal(y.astype(np.float64), 0)
    np.testing.assert_allclose(rstd, 100.0, rtol=1e-6)
    dx, dweight = gpu_ops.rmsnorm_backward(np.ones_like(x), x, weight, rstd, **backend)
    np.testing.assert_allclose(dx.astype(np.float64), 100.0, rtol=4e-3)
    np.testing.assert_array_equal(dweight, 0)


def test_squares_that_overflow_the_dtype(backend, dtype, rng):
    large = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38, "float64": 1e150}[dtype.name]
    signs = np.where(rng.standard_normal((4, 999)) < 0, -1.0, 1.0)
    x, weight = (signs * large).astype(dtype), np.ones(999, dtype)
    y, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, **backend)
    # 1 / 3e38 is a subnormal float32 with 22 bits
    np.testing.assert_allclose(y.astype(np.float64), signs, rtol=4e-7 if dtype.itemsize == 4 else 4e-3)
    dx, _ = gpu_ops.rmsnorm_backward(y, x, weight, rstd, **backend)
    assert np.isfinite(dx.astype(np.float64)).all()


def test_small_values_keep_their_digits(backend, dtype, rng):
    small = {"float16": 1e-4, "bfloat16": 1e-18, "float32": 1e-18, "float64": 1e-150}[dtype.name]
    x, weight = random(rng, (4, 500), dtype, small), np.ones(500, dtype)
    eps = {"float16": 1e-12, "bfloat16": 1e-40, "float32": 1e-40, "float64": 1e-305}[dtype.name]
    y = gpu_ops.rmsnorm(x, weight, eps=eps, **backend)
    exact_x = x.astype(np.float64)
    expected = exact_x / np.sqrt(np.mean(np.square(exact_x), axis=-1, keepdims=True) + eps)
    rtol = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-13}[dtype.name]
    np.testing.assert_allclose(
        y.astype(np.float64), expected, rtol=rtol, atol=1e-7 if dtype == np.float16 else 0
    )


def test_nan_and_infinity_stay_in_their_row(backend, dtype, rng):
    x, weight = random(rng, (5, 70), dtype), np.ones(70, dtype)
    clean, clean_rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, **backend)
    x[1, 3], x[3, 60] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        y, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, **backend)
    assert np.isnan(y[1].astype(np.float64)).all()
    assert np.isnan(rstd[1])
    assert rstd[3] == 0
    assert np.isnan(y[3, 60].astype(np.float64))
    np.testing.assert_array_equal(np.delete(y[3], 60).astype(np.float64), 0)
    for r in (0, 2, 4):
        assert y[r].tobytes() == clean[r].tobytes()
        assert rstd[r] == clean_rstd[r]


def test_residual_may_be_x_itself(backend, dtype, rng):
    x, weight = random(rng, (3, 77), dtype), np.ones(77, dtype)
    y, s = gpu_ops.rmsnorm(x, weight, residual=x, **backend)
    expected = gpu_ops.rmsnorm(x, weight, residual=x.copy(), **backend)
    assert (y.tobytes(), s.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())


@pytest.mark.parametrize("shape", [(5000, 70), (1300, 9)], ids=str)
def test_dweight_of_many_rows(shape, rng):
    """The CPU adds up the sums of several tasks, each of several groups of rows."""
    x, dy = random(rng, shape, np.float32), random(rng, shape, np.float32)
    weight = random(rng, shape[1:], np.float32)
    _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True, device="cpu")
    _, dweight = gpu_ops.rmsnorm_backward(dy, x, weight, rstd, device="cpu")
    n = x.astype(np.float64) * rstd.astype(np.float64)[:, None]
    np.testing.assert_allclose(
        dweight, np.sum(dy * n, axis=0), rtol=0, atol=1e-6 * np.abs(dy * n).sum(axis=0).max()
    )


def test_dweight_has_the_same_bits_every_time(rng):
    x, dy = random(rng, (3000, 100), np.float32), random(rng, (3000, 100), np.float32)
    weight = np.ones(100, np.float32)
    _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True)
    first, *others = (gpu_ops.rmsnorm_backward(dy, x, weight, rstd)[1].tobytes() for _ in range(5))
    assert set(others) == {first}


@settings(max_examples=25)
@given(
    exponent=st.integers(-40, 40),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    seed=st.integers(0, 2**31),
)
def test_scale_invariance_as_eps_vanishes(exponent, shape, seed):
    """y(a x) = y(x), exactly for a power of two a; dx is orthogonal to x when the weight is 1."""
    rng = np.random.default_rng(seed)
    x, weight, dy = rng.standard_normal(shape), rng.standard_normal(shape[1]), rng.standard_normal(shape)
    y = gpu_ops.rmsnorm(x, weight, eps=1e-300)
    np.testing.assert_array_equal(gpu_ops.rmsnorm(x * 2.0**exponent, weight, eps=1e-300), y)
    unit = gpu_ops.rmsnorm(x, np.ones(shape[1]), eps=1e-300)
    np.testing.assert_allclose(np.mean(np.square(unit), axis=-1), 1, rtol=1e-12)
    _, rstd = gpu_ops.rmsnorm(x, weight, eps=1e-300, return_rstd=True)
    dx, _ = gpu_ops.rmsnorm_backward(dy, x, weight, rstd)
    magnitude = np.abs(x).max() * np.abs(dy).max() * rstd.max() * np.abs(weight).max() * shape[1]
    np.testing.assert_allclose(np.sum(dx * x, axis=-1), 0, atol=1e-13 * magnitude)


@settings(max_examples=25)
@given(a=st.floats(-4, 4), shape=st.tuples(st.integers(1, 5), st.integers(1, 70)), seed=st.integers(0, 2**31))
def test_gradients_are_linear_in_dy(a, shape, seed):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal(shape), rng.standard_normal(shape[1])
    dy_a, dy_b = rng.standard_normal(shape), rng.standard_normal(shape)
    _, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True)
    both, first, second = (
        gpu_ops.rmsnorm_backward(dy, x, weight, rstd) for dy in (dy_a + a * dy_b, dy_a, dy_b)
    )
    scale = float(rstd.max()) * 10
    for sum_, f, s in zip(both, first, second, strict=True):
        np.testing.assert_allclose(sum_, f + a * s, atol=1e-12 * scale)


@pytest.mark.peers
def test_torch_agrees():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install torch (CPU build) runs this"
    )
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(9, 77, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(77, generator=generator, dtype=torch.float64)
    leaf, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.nn.functional.rms_norm(leaf, (77,), gain, eps=1e-6)
    expected.backward(dy)
    y, rstd = gpu_ops.rmsnorm(x, weight, return_rstd=True)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-12, atol=1e-13)
    dx, dweight = gpu_ops.rmsnorm_backward(dy, x, weight, rstd)
    torch.testing.assert_close(dx, leaf.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(dweight, gain.grad, rtol=1e-11, atol=1e-12)
    y = gpu_ops.rmsnorm(x.bfloat16(), weight.bfloat16())
    assert y.dtype == torch.bfloat16


def test_explain_tells_what_runs():
    plan = str(
        gpu_ops.explain("rmsnorm", np.ones((3, 8), np.float32), np.ones(8, np.float32), casting="llama")
    )
    assert "3 rows of 8 float32, casting llama" in plan
    assert "backend numba" in plan


# Reference of RMSNorm against its definition: differences for gradients, roundings step by step.

Array = npt.NDArray[Any]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16, float32, float64 = np.dtype("float16"), np.dtype("float32"), np.dtype("float64")


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", ["llama", "gemma", "fp32"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 16)])
def test_rmsnorm_backward_is_the_derivative(
    shape: tuple[int, ...], casting: Any, weight_offset: float
) -> None:
    rng = np.random.default_rng(len(shape))
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    weight = rng.standard_normal(shape[-1])
    options: dict[str, Any] = {"weight_offset": weight_offset, "casting": casting}
    _, rstd = ref_rmsnorm.rmsnorm(x, weight, eps=1e-3, return_rstd=True, **options)
    dx, dweight = ref_rmsnorm.rmsnorm_backward(dy, x, weight, rstd, **options)
    assert dx.dtype == dweight.dtype == float64
    check_gradients(
        lambda a, w: [ref_rmsnorm.rmsnorm(a, w, eps=1e-3, **options)], [x, weight], [dy], [dx, dweight], rng
    )


def test_rmsnorm_backward_with_residual_is_the_derivative() -> None:
    rng = np.random.default_rng(1)
    x, residual, dy, ds = (rng.standard_normal((4, 9)) for _ in range(4))
    weight = rng.standard_normal(9)
    _, s, rstd = ref_rmsnorm.rmsnorm(x, weight, residual=residual, return_rstd=True)
    dx, dweight = ref_rmsnorm.rmsnorm_backward(dy, s, weight, rstd, dresidual=ds)
    check_gradients(
        lambda a, r, w: ref_rmsnorm.rmsnorm(a, w, residual=r),
        [x, residual, weight],
        [dy, ds],
        [dx, dx, dweight],
        rng,
    )


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [float16, bfloat16, float32], ids=str)
def test_casting_modes_round_where_they_say(dtype: np.dtype[Any], weight_offset: float) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 48)).astype(dtype)
    weight = (1 + 0.1 * rng.standard_normal(48)).astype(dtype)
    exact_x = x.astype(float64)
    n = exact_x / np.sqrt((exact_x * exact_x).mean(axis=-1, keepdims=True) + 1e-6)
    gain = weight_offset + weight.astype(float64)

    expected = {
        # n, then offset + weight, then their product, each in x's dtype: NumPy multiplies in that dtype
        "llama": n.astype(dtype) * gain.astype(dtype),
        "gemma": (n * gain).astype(dtype),
        "fp32": (n * gain).astype(dtype),
    }
    for casting, want in expected.items():
        actual = ref_rmsnorm.rmsnorm(x, weight, weight_offset=weight_offset, casting=casting)  # type: ignore[arg-type]
        assert isinstance(actual, np.ndarray)
        assert actual.dtype == dtype
        # 1 / sqrt against a division: a last bit of float64 may differ, which no narrower dtype shows here
        assert actual.tobytes() == want.tobytes(), casting
    assert expected["llama"].tobytes() != expected["fp32"].tobytes()


def test_unrounded_casting_modes_agree() -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((5, 8)).astype(float16), rng.standard_normal(8).astype(float16)
    llama, gemma, fp32 = (
        ref_rmsnorm.rmsnorm(x, weight, casting=c, precision="float64")
        for c in ("llama", "gemma", "fp32")  # type: ignore[arg-type]
    )
    assert isinstance(llama, np.ndarray)
    assert llama.dtype == float64
    np.testing.assert_array_equal(llama, gemma)
    np.testing.assert_array_equal(llama, fp32)


def test_rmsnorm_is_of_the_rounded_sum() -> None:
    # 2048 + 1 is not a float16: s must round to 2048, and the norm see 2048
    x, residual = np.full((1, 2), 2048, float16), np.ones((1, 2), float16)
    _, s, rstd = ref_rmsnorm.rmsnorm(x, np.ones(2, float16), residual=residual, return_rstd=True)
    np.testing.assert_array_equal(s.astype(float32), 2048)
    assert rstd[0] == np.float32(1 / math.sqrt(2048.0**2 + 1e-6))


def test_quant_int8_codes_scale_and_rowsum() -> None:
    x = np.array([[3.0, -4.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], float32)
    q, scale, rowsum = ref_rmsnorm.rmsnorm_quant_int8(x, np.ones(4, float32), eps=1e-12)
    # the largest magnitude maps to 127 whatever the norm: codes depend on ratios only
    np.testing.assert_array_equal(q, [[95, -127, 0, 32], [0, 0, 0, 0]])
    np.testing.assert_array_equal(rowsum, [0, 0])
    rms = math.sqrt(26 / 4)
    np.testing.assert_allclose(scale, [4 / rms / 127, 1e-5 / 127], rtol=1e-6)
    assert (q.dtype, scale.dtype, rowsum.dtype) == (np.int8, float32, np.int32)


def test_quant_int8_llama_quantises_the_rounded_product() -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((16, 32)).astype(bfloat16), rng.standard_normal(32).astype(bfloat16)
    y = ref_rmsnorm.rmsnorm(x, weight, casting="llama").astype(float64)  # type: ignore[union-attr]
    absmax = np.abs(y).max(axis=-1, keepdims=True)
    q, scale, rowsum = ref_rmsnorm.rmsnorm_quant_int8(x, weight, casting="llama")
    np.testing.assert_array_equal(q, np.rint(y * (127 / absmax)))
    np.testing.assert_array_equal(scale, (absmax[:, 0] / 127).astype(float32))
    np.testing.assert_array_equal(rowsum, q.astype(np.int64).sum(axis=-1))


def test_an_unknown_casting_is_refused() -> None:
    ones = np.ones((1, 1))
    with pytest.raises(ValueError, match="casting"):
        ref_rmsnorm.rmsnorm(ones, ones[0], casting="none")  # type: ignore[arg-type]
