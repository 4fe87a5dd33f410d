"""eps of norms may be 0 or tiny: a row of zeros gives 0, and other rows do not change; sums that overflow float32."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.norm import layernorm, rmsnorm
from tests.support.calls import DTYPES, call
from tests.support.compare import random
from tests.support.laws import law_call, outcome

DEVICES = ("cpu", "emulator", "cuda")
OPS = ("rmsnorm sum", "rmsnorm llama", "layernorm sum", "rmsnorm_quant_int8 sum", "rope_append_kv pages")
each_name = pytest.mark.parametrize("name", OPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)


def quick_on_emulator(raw):
    """Run CUDA C++ once per op, and Numba, which compiles for seconds, once."""
    few = {"dtype": [DTYPES[1]], "eps": [0.0]} if raw else {"dtype": [DTYPES[0]], "eps": [0.0]}
    return {"*": few if raw else {**few, "name": OPS[:1], "op": ["layernorm"]}}


def with_zeros(name, dtype):
    """Call whose second row, or sequence, is zeros; the bias of layernorm too."""
    problem = law_call(name, dtype, rows=3, cols=40, width=40)
    for key in ("x", "residual", "q", "k"):
        if key in problem.inputs:
            problem.inputs[key][(1, ...)] = 0
    if "bias" in problem.inputs:
        problem.inputs["bias"][...] = 0
    return problem


@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-300, 1e-80, 2.0**-149, 1e-40])
@each_name
@each_dtype
def test_a_row_of_zeros_gives_zeros(name, dtype, eps, backend):
    problem = with_zeros(name, dtype)
    results = outcome(problem, eps=eps, **backend)
    expected = outcome(with_zeros(name, dtype), eps=1e-30 if dtype != np.float16 else eps, **backend)
    for f, w in zip(results, expected, strict=True):
        assert not np.isnan(f.astype(np.float64)).any()
        is_statistic = f.ndim < problem.arrays[next(iter(problem.arrays))].ndim
        if not is_statistic:  # 1e-30 changes no bit of the other rows
            np.testing.assert_array_equal(f, w)
    assert (results[0][1] == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-300])
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
@each_dtype
def test_the_gradient_of_a_row_of_zeros(op, dtype, eps, backend):
    """rstd is finite, so that a gradient of 0, as padding has it, stays 0."""
    x = law_call(op, dtype, rows=3, cols=40).arrays["x"]
    x[1] = 0
    weight = np.ones(40, dtype)
    statistics = {"return_rstd": True} if op == "rmsnorm" else {"return_stats": True}
    _, *saved = getattr(gpu_ops, op)(x, weight, eps=eps, **statistics, **backend)
    assert all(np.isfinite(f).all() for f in saved)
    dy = np.ones_like(x)
    dy[1] = 0
    dx, *_ = getattr(gpu_ops, f"{op}_backward")(dy, x, weight, *saved, **backend)
    assert (dx[1] == 0).all()
    assert np.isfinite(dx.astype(np.float64)).all()


@pytest.mark.parametrize("precision", ["rounded", "float64", "naive"])
def test_the_definition_itself(precision):
    x, weight = np.zeros((2, 4), np.float32), np.ones(4, np.float32)
    assert (rmsnorm.rmsnorm(x, weight, eps=0.0, precision=precision) == 0).all()
    assert (layernorm.layernorm(x, weight, eps=0.0, precision=precision) == 0).all()


@pytest.mark.parametrize("name", OPS)
def test_eps_is_a_number_from_0_on(name):
    for wrong in (-1e-300, float("nan"), float("inf"), np.float32(-1), "0", None):
        with pytest.raises(gpu_ops.errors.OptionError, match=r"eps must be"):
            call(name).having(eps=wrong)()


# Backward of norms on the CPU where a sum of products overflows float32, and dx does not.


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_sum_that_overflows_is_taken_in_float64(norm, rows, rng):
    x = random(rng, (rows, 999), np.float32)
    dy, weight = np.copysign(np.float32(1e38), x), np.ones(999, np.float32)
    dy[1:2] /= 1e38  # a row among others that overflow
    options = {"return_rstd": True} if norm == "rmsnorm" else {"return_stats": True}
    backward = getattr(gpu_ops, norm + "_backward")
    _, *statistics = getattr(gpu_ops, norm)(x, weight, **options)
    with np.errstate(over="ignore"):  # dweight may
        assert np.isinf(np.sum(dy[0] * x[0] * statistics[-1][0], dtype=np.float32))
        dx, *_ = backward(dy, x, weight, *statistics)
        expected, *_ = backward(dy, x, weight, *statistics, backend="reference")
    scale = np.abs(dy).max(axis=1, keepdims=True)
    np.testing.assert_allclose(dx / scale, expected / scale, atol=1e-6)
