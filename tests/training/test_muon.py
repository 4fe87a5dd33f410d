"""Muon against NumPy in float64, and the singular values of its updates."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.training.muon import muon_step, orthogonalized
from tests.support.compilers import needs_nvrtc

F32 = np.dtype(np.float32)


def newton_schulz(x, iterations=5):
    """Polynomial of the singular values, by an SVD."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / (np.linalg.norm(s) + 1e-7)
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=needs_nvrtc)])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32), (1, 8)], ids=str)
def test_orthogonalized(device, shape, rng):
    x = rng.standard_normal(shape).astype(F32)
    actual = orthogonalized(x, device=device)
    assert actual.dtype == F32
    np.testing.assert_allclose(actual, newton_schulz(x), atol=2e-5)
    values = np.linalg.svd(actual, compute_uv=False)
    strong = np.linalg.svd(x, compute_uv=False) > 0.05 * np.linalg.norm(x)
    assert ((values[strong] > 0.65) & (values[strong] < 1.25)).all()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 12), (12, 48)], ids=str)
def test_steps(nesterov, shape, rng):
    param, momentum = rng.standard_normal(shape).astype(F32), np.zeros(shape, F32)
    p, m = param.astype(np.float64), np.zeros(shape)
    for _ in range(4):
        grad = rng.standard_normal(shape).astype(F32)
        muon_step(param, grad, momentum, lr=0.02, beta=0.9, nesterov=nesterov, weight_decay=0.1)
        m = 0.9 * m + 0.1 * grad
        update = 0.9 * m + 0.1 * grad if nesterov else m
        p = p - 0.02 * 0.1 * p - 0.02 * max(1, shape[0] / shape[1]) ** 0.5 * newton_schulz(update)
    np.testing.assert_allclose(param, p, atol=2e-5)
    np.testing.assert_allclose(momentum, m, atol=1e-6)


def test_zeros_and_large_numbers_make_no_nan():
    assert not orthogonalized(np.zeros((3, 5), F32)).any()
    assert orthogonalized(np.zeros((0, 5), F32)).shape == (0, 5)
    actual = orthogonalized(np.full((4, 4), 1e30, F32))
    assert np.isfinite(actual).all()
    assert actual.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"param": np.zeros((2, 3))}, DTypeError, "muon_step: param must be a float32 array, got float64"),
        ({"grad": [1.0]}, DTypeError, "grad must be a float32 array, got list"),
        ({"grad": np.zeros((3, 2), F32)}, ShapeError, r"grad has shape \(3, 2\)"),
        ({"momentum": np.zeros(6, F32)}, ShapeError, r"momentum has shape \(6,\)"),
        ({"lr": -1}, OptionError, "lr must be finite and >= 0"),
        ({"nesterov": 1}, OptionError, "nesterov must be True or False"),
        ({"beta": 1.0}, OptionError, "beta must be less than 1, got 1"),
        ({"iterations": -1}, OptionError, "iterations must lie in"),
    ],
)
def test_mistakes_write_nothing(change, error, message):
    arguments = {name: np.ones((2, 3), F32) for name in ("param", "grad", "momentum")} | {"lr": 0.1} | change
    before = [np.asarray(x).copy() for x in arguments.values()]
    with pytest.raises(error, match=message):
        muon_step(**arguments)
    assert all((np.asarray(x) == y).all() for x, y in zip(arguments.values(), before, strict=True))


def test_arrays_that_cannot_be_updated_are_refused():
    """Arrays are refused before anything is written."""
    grad = np.eye(2, dtype=np.float32)
    param, momentum = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    frozen = param.copy()
    frozen.flags.writeable = False
    twice = np.lib.stride_tricks.as_strided(np.zeros(2, np.float32), (2, 2), (0, 4))
    for arrays, words in (
        ((frozen, grad, momentum), "param is read-only"),
        ((param, grad, param), "param shares memory"),
        ((param, momentum, momentum), "momentum shares memory"),
        ((param, grad, twice), "momentum shares memory with itself"),
    ):
        with pytest.raises(ShapeError, match=words):
            muon_step(*arrays, lr=0.1)
    assert (param == 1).all()
    assert not momentum.any()
