"""Ternary arguments that are columns of wider arrays: rows are strided, though each is contiguous."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_ops
from gpu_ops.reference.weights import ternary as reference

DEVICES = ("cpu", "emulator", "cuda")


def runs(case):
    """Whether a case runs: on the CPU packing has NumPy only."""
    return "format" not in case or case["backend"] != {"device": "cpu", "backend": "numba"}


def apart(x, step):
    """Copy of ``x`` in a column of an array of other numbers."""
    padded = np.full((x.shape[0], step * x.shape[1] + 3), 121, x.dtype)
    padded[:, : step * x.shape[1] : step] = x
    return padded[:, : step * x.shape[1] : step]


@pytest.mark.parametrize("format", ["base3", "i2_s"])
def test_one_column_of_a_wider_array(format, backend, rng):
    shape = {"base3": (5, 3), "i2_s": (128, 1)}[format]
    t = rng.integers(-1, 2, shape).astype(np.int8)
    packed = gpu_ops.ternary_pack(t, format, backend="reference")
    np.testing.assert_array_equal(gpu_ops.ternary_pack(apart(t, 1), format, **backend), packed)
    lies = apart(packed.reshape(-1, 1), 1)
    np.testing.assert_array_equal(gpu_ops.ternary_unpack(lies, shape, format, **backend), t)


@pytest.mark.parametrize("groups", [1, 2])
def test_scales_of_groups_that_lie_apart(groups, backend, rng):
    t, x = rng.integers(-1, 2, (9, 128)).astype(np.int8), rng.standard_normal((3, 128), dtype=np.float32)
    scale = rng.standard_normal((9, groups), dtype=np.float32)
    for lies in (apart(scale, 1), apart(scale, 2), scale[::-1], np.broadcast_to(scale[:1], scale.shape)):
        w = gpu_ops.TernaryMatrix.from_trits(t, lies)
        exact = reference.ternary_matmul(x, t, np.ascontiguousarray(lies), activations="int8")
        np.testing.assert_allclose(gpu_ops.ternary_matmul(x, w, **backend), exact, rtol=1e-5, atol=1e-5)
        dy = rng.standard_normal((3, 9), dtype=np.float32)
        dx, _ = gpu_ops.ternary_matmul_backward(dy, x, w, **backend)
        dense = t * np.repeat(lies.astype(np.float64), 128 // groups, axis=1)
        np.testing.assert_allclose(dx, dy @ dense, rtol=0, atol=2e-5)
