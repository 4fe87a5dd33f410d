"""Reference of RMSNorm against its definition: differences for gradients, roundings step by step."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops.reference.norm import rmsnorm as ref_rmsnorm
from tests.support.differences import check_gradients

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
