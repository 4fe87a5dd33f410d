"""Sums of weights use the rounded weights of the second product: a mean of equal values is that value, bit for bit.

lse is still the log of the sum of the exact weights.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.attention.forward import attention as reference
from tests.support.calls import DTYPES

DEVICES = ("cpu", "emulator", "cuda")
KEYS = 160  # more than a tile


def quick_on_emulator(raw):
    return {"*": {"dtype": [DTYPES[1], DTYPES[2]][: 1 + raw]} | ({} if raw else {"seen_by": ["window"]})}


def arrays(rng, dtype, size):
    q, k = (size * rng.standard_normal((1, KEYS, 1, 16)).astype(np.float32) for _ in range(2))
    return q.astype(dtype), k.astype(dtype), rng.standard_normal((1, KEYS, 1, 16)).astype(dtype)


def not_float32(dtype, backend):
    if dtype == np.float32 and backend["backend"] == "raw":
        pytest.skip("3 x TF32 gives 22 of the 24 bits of a value")


@pytest.mark.parametrize("size", [1, 200])  # large scores: the maximum times a scale is a rounded number
@pytest.mark.parametrize("seen_by", ["window", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_row_that_sees_one_key_returns_its_value(dtype, seen_by, size, backend, rng):
    not_float32(dtype, backend)
    q, k, v = arrays(rng, dtype, size)
    seen = {"window_size": (0, 0)}
    if seen_by == "bias":
        seen = {"bias": np.where(np.eye(KEYS, dtype=bool), np.float32(1.5), -np.inf).astype(np.float32)}
    np.testing.assert_array_equal(gpu_ops.attention(q, k, v, **seen, **backend), v)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: d.name)
def test_equal_values_while_the_maximum_grows(dtype, backend, rng):
    """Two keys: the one with the higher score is in the last tile, by a difference too small for rescaling."""
    q, k, v = arrays(rng, dtype, 0)
    v[:] = v[:, :1]
    bias = np.full((KEYS, KEYS), -np.inf, np.float32)
    bias[:, -3], bias[:, 4] = 0, np.linspace(0, 5.5, KEYS)
    out, lse = gpu_ops.attention(q, k, v, bias=bias, return_lse=True, **backend)
    if dtype != np.float32:
        np.testing.assert_array_equal(out, v)
    _, exact = reference(q, k, v, bias=bias, return_lse=True, precision="float64")
    np.testing.assert_allclose(lse, exact, rtol=0, atol=2e-6)
