"""Backward of norms on the CPU where a sum of products overflows float32, and dx does not."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from tests.support.compare import random


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
