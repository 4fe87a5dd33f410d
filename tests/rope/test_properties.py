"""Properties of rotations: complex multiplication, relative positions, inverse, transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops import RopeScaling, rope, rope_backward

DEVICES = ("cpu", "emulator", "cuda")


def widest(backend):
    """Most accurate dtype that a backend takes, and its distance from 1 to the next number."""
    dtype = np.float32 if backend["backend"] == "raw" else np.float64
    return dtype, float(np.finfo(dtype).eps)


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_complex_multiplication(interleaved, backend, rng):
    dtype, eps = widest(backend)
    q = rng.standard_normal((2, 11, 3, 12)).astype(dtype)
    positions = rng.integers(0, 5000, (2, 11))
    z = q[..., 0:8:2] + 1j * q[..., 1:8:2] if interleaved else q[..., 0:4] + 1j * q[..., 4:8]
    angle = positions[:, :, None, None] / 100.0 ** (np.arange(4) / 4)
    z = z * (np.cos(angle) + 1j * np.sin(angle))
    expected = q.astype(np.float64)
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    expected[..., first], expected[..., second] = z.real, z.imag
    actual = rope(q, positions=positions, theta=100.0, rotary_dim=8, interleaved=interleaved, **backend)
    # angles up to 5000 radians are themselves inexact in float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11 + 3 * eps * np.abs(q).max())
    np.testing.assert_array_equal(actual[..., 8:], q[..., 8:])  # the tail is copied, bit for bit


@pytest.mark.peers
def test_against_torch(backend, rng):
    """Formula of Hugging Face models, in torch float32: cat(-x2, x1) * sin + x * cos."""
    torch = pytest.importorskip("torch", reason="pip install torch (CPU) to compare with it")
    q = rng.standard_normal((2, 33, 4, 64)).astype(np.float32)
    x = torch.from_numpy(q)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = torch.arange(33, dtype=torch.float64)[:, None] * inv_freq
    angles = torch.cat([angles, angles], -1)[:, None]
    expected = x * angles.cos().float() + torch.cat([-x[..., 32:], x[..., :32]], -1) * angles.sin().float()
    np.testing.assert_allclose(rope(q, **backend), expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("position", [10**6, 10**9])
def test_large_positions_lose_nothing_in_float32(position, backend):
    q = np.ones((1, 1, 1, 128), np.float32)
    actual = rope(q, positions=np.array([position]), **backend)[0, 0, 0]
    angle = [math.fmod(position * 10000.0 ** (-i / 64), 2 * math.pi) for i in range(64)]
    expected = [math.cos(a) - math.sin(a) for a in angle] + [math.cos(a) + math.sin(a) for a in angle]
    np.testing.assert_allclose(actual, expected, atol=5e-7)


cases = st.fixed_dictionaries(
    {
        "half": st.integers(1, 9),
        "tail": st.integers(0, 3),
        "interleaved": st.booleans(),
        "theta": st.floats(2.0, 1e6),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def make(case, shape):
    rng = np.random.default_rng(case["seed"])
    options = {k: case[k] for k in ("theta", "interleaved")}
    head_dim = 2 * case["half"] + case["tail"]
    return rng.standard_normal((*shape, head_dim)), {**options, "rotary_dim": 2 * case["half"]}, rng


@pytest.mark.parametrize("name", ["numba", "reference"])
@given(case=cases, shift=st.integers(-1000, 1000))
@settings(max_examples=30)
def test_scores_depend_on_differences_of_positions_only(name, case, shift):
    x, options, rng = make(case, (2, 5, 2))
    positions = rng.integers(0, 1000, (5,))
    q, k = x[:1], x[1:]
    a = rope(q, k, positions=positions, **options, backend=name)
    b = rope(q, k, positions=positions + shift, **options, backend=name)
    scores = [np.einsum("bihd,bjhd->hij", *pair) for pair in (a, b)]
    np.testing.assert_allclose(*scores, atol=1e-10)


@pytest.mark.parametrize("name", ["numba", "reference"])
@given(case=cases)
@settings(max_examples=30)
def test_conjugate_is_the_inverse_and_norms_stay(name, case):
    x, options, rng = make(case, (2, 5, 2))
    options["positions"] = rng.integers(-1000, 1000, (2, 5))
    y = rope(x, **options, backend=name)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), atol=1e-12)
    np.testing.assert_allclose(rope(y, conjugate=True, **options, backend=name), x, atol=1e-12)
    np.testing.assert_allclose(
        rope(rope(x, conjugate=True, **options, backend=name), **options), x, atol=1e-12
    )


@pytest.mark.parametrize("name", ["numba", "reference"])
@pytest.mark.parametrize("scaling", [None, RopeScaling.yarn(8.0, 64)], ids=["none", "yarn"])
@given(case=cases, conjugate=st.booleans())
@settings(max_examples=20)
def test_backward_is_the_transpose(name, scaling, case, conjugate):
    """<rope(x), dy> = <x, rope_backward(dy)>, also with the attention factor of YaRN."""
    x, options, rng = make(case, (2, 5, 2))
    dy = rng.standard_normal(x.shape)
    options |= {"scaling": scaling, "conjugate": conjugate, "backend": name}
    left = np.sum(rope(x, **options) * dy)
    right = np.sum(x * rope_backward(dy, **options))
    assert left == pytest.approx(right, rel=1e-11, abs=1e-11)


def test_backward_by_finite_differences(backend, rng):
    dtype, eps = widest(backend)
    x, dy, direction = (rng.standard_normal((1, 4, 2, 12)).astype(dtype) for _ in range(3))
    options = {"rotary_dim": 8, "scaling": RopeScaling.yarn(4.0, 64), "positions": np.array([9, 2, 5, 70])}

    def loss(step):
        return np.sum(rope(x + dtype(step) * direction, **options, **backend).astype(np.float64) * dy)

    slope = loss(0.5) - loss(-0.5)  # the map is linear: a step of 1 will do
    gradient = rope_backward(dy, **options, **backend).astype(np.float64)
    scale = float(np.abs(x).max() * np.abs(dy).max() * x.size)
    assert np.sum(gradient * direction) == pytest.approx(slope, abs=8 * eps * scale)


def test_with_yarn_the_backward_is_not_the_inverse(backend, rng):
    dtype, eps = widest(backend)
    x = rng.standard_normal((1, 4, 2, 8)).astype(dtype)
    scaling = RopeScaling.yarn(8.0, 64)
    a = scaling.attention_factor_at(4)
    assert a > 1.1
    back = rope_backward(rope(x, scaling=scaling, **backend), scaling=scaling, **backend)
    np.testing.assert_allclose(back, a * a * x, rtol=0, atol=8 * eps * a * a * np.abs(x).max())
