"""SwiGLU and GeGLU: one test body over the backends, against the reference in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu_ops
from gpu_ops.reference.gemm import swiglu as ref_swiglu
from gpu_ops.reference.gemm import swiglu as reference
from gpu_ops.reference.tolerance import GRADIENT
from tests.rows.cases import close, emulator_dtypes
from tests.support.compare import check_gradients, random

DEVICES = ("cpu", "emulator", "cuda")
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu2"]
BOUNDED = ACTIVATIONS[:3]  # whose slopes end at 1
SHAPES = [(7,), (1, 123), (3, 5, 64), (2, 4095), (1, 8193), (1, 65536), (300, 257)]


def quick_on_emulator(raw):
    return {"*": {"dtype": emulator_dtypes(raw)}}


def check_forward(y, gate, up, activation):
    assert isinstance(y, np.ndarray)
    assert y.dtype == gate.dtype
    with np.errstate(over="ignore"):
        expected, naive = (
            reference.swiglu(gate, up, activation=activation, precision=p) for p in ("float64", "naive")
        )
    close(y, expected, naive, gate.dtype, what="y")


def check_backward(got, dy, gate, up, activation):
    with np.errstate(over="ignore"):
        expected, naive = (
            reference.swiglu_backward(dy, gate, up, activation=activation, precision=p)
            for p in ("float64", "naive")
        )
    if up is None:
        got, expected, naive = [got], [expected], [naive]
    for name, g, w, n in zip(("dgate", "dup"), got, expected, naive, strict=False):
        assert g.dtype == gate.dtype
        close(g, w, n, gate.dtype, GRADIENT, what=name)


# erfc of the reference is a Python loop, so gelu takes the smaller sizes
@pytest.mark.parametrize(
    ("activation", "shape"),
    [(a, s) for a in ACTIVATIONS for s in SHAPES if a != "gelu" or math.prod(s) < 50_000],
    ids=str,
)
def test_forward_and_backward(backend, dtype, shape, activation, rng):
    gate, up, dy = random(rng, shape, dtype, 3), random(rng, shape, dtype), random(rng, shape, dtype)
    check_forward(gpu_ops.swiglu(gate, up, activation=activation, **backend), gate, up, activation)
    actual = gpu_ops.swiglu_backward(dy, gate, up, activation=activation, **backend)
    check_backward(actual, dy, gate, up, activation)


def test_single_elements(backend, dtype, rng):
    """Test eight arrays of one element: textbook code may be exact for one of them, and then is no yardstick."""
    gate, up, dy = (random(rng, (8,), dtype) for _ in range(3))
    ones = [slice(i, i + 1) for i in range(8)]
    y = np.concatenate([gpu_ops.swiglu(gate[i], up[i], **backend) for i in ones])
    check_forward(y, gate, up, "silu")
    gradients = zip(*(gpu_ops.swiglu_backward(dy[i], gate[i], up[i], **backend) for i in ones), strict=True)
    check_backward([np.concatenate(g) for g in gradients], dy, gate, up, "silu")


@pytest.mark.parametrize("shape", [(2,), (3, 246), (2, 2, 16386)], ids=str)
def test_packed_equals_split(backend, dtype, shape, rng):
    packed = random(rng, shape, dtype, 2)
    half = shape[-1] // 2
    gate, up = packed[..., :half], packed[..., half:]
    dy = random(rng, gate.shape, dtype)
    y = gpu_ops.swiglu(packed, **backend)
    assert y.tobytes() == gpu_ops.swiglu(gate, up, **backend).tobytes()
    dpacked = gpu_ops.swiglu_backward(dy, packed, **backend)
    assert dpacked.shape == packed.shape
    dgate, dup = gpu_ops.swiglu_backward(dy, gate, up, **backend)
    assert dpacked.tobytes() == np.concatenate([dgate, dup], axis=-1).tobytes()
    check_backward(dpacked, dy, packed, None, "silu")


@pytest.mark.parametrize("activation", BOUNDED)
def test_limits(backend, dtype, activation):
    largest = float(np.finfo(np.float32).max) if dtype != np.float16 else 65504.0
    large = np.array([-np.inf, -largest, -1000.0, 1000.0, largest, np.inf, np.nan], np.float64).astype(dtype)
    with np.errstate(over="ignore"):
        values = np.tile(large, 40)  # long enough for vector code and its remainder
        large = values.astype(np.float64)
    ones = np.ones_like(values)
    y = gpu_ops.swiglu(values, ones, activation=activation, **backend).astype(np.float64)
    np.testing.assert_array_equal(y, np.where(large < 0, -0.0, large))
    assert np.signbit(y[large < 0]).all()
    dgate, dup = gpu_ops.swiglu_backward(ones, values, ones, activation=activation, **backend)
    np.testing.assert_array_equal(dgate.astype(np.float64), np.where(np.isnan(large), np.nan, large > 0))
    np.testing.assert_array_equal(dup.astype(np.float64), y)
    dy = np.full_like(values, min(largest, 1e30))[large == -1000]  # dy * up overflows where act' is 0
    dgate, dup = gpu_ops.swiglu_backward(dy, values[large == -1000], dy, activation=activation, **backend)
    assert not dgate.any()
    assert not dup.any()


def test_relu2_is_exact(backend, dtype, rng):
    limits = [-np.inf, -60000, -0.0, 5e3, np.inf, np.nan]
    values = np.concatenate([np.tile(limits, 40), 4 * rng.standard_normal(200)]).astype(dtype)
    ones = np.ones_like(values)
    with np.errstate(over="ignore"):
        y = gpu_ops.swiglu(values, ones, activation="relu2", **backend)
        dgate, dup = gpu_ops.swiglu_backward(ones, values, ones, activation="relu2", **backend)
    positive = np.maximum(values.astype(np.float64 if dtype == np.float64 else np.float32), 0)
    with np.errstate(over="ignore"):
        for actual, expected in ((y, positive * positive), (dgate, 2 * positive), (dup, positive * positive)):
            np.testing.assert_array_equal(
                actual.astype(np.float64), expected.astype(dtype).astype(np.float64)
            )


@pytest.mark.parametrize("activation", BOUNDED)
def test_accuracy_over_the_whole_range(backend, activation):
    """float32 against float64 on a fine grid: two units in the last place of the largest value below 4."""
    gate = np.linspace(-30, 30, 20_001).astype(np.float32)
    ones = np.ones_like(gate)
    options = {"activation": activation, **backend}
    y = gpu_ops.swiglu(gate, ones, **options).astype(np.float64)
    expected = reference.swiglu(gate, ones, activation=activation, precision="float64")
    assert np.abs(y - expected).max() <= 4 * 2.0**-24 * 30
    assert np.abs(y - expected)[np.abs(gate) < 4].max() <= 2 * 2.0**-22
    dgate, _ = gpu_ops.swiglu_backward(ones, gate, ones, **options)
    expected, _ = reference.swiglu_backward(ones, gate, ones, activation=activation, precision="float64")
    assert np.abs(dgate - expected).max() < 1e-6
    if backend["backend"] == "raw":
        return
    gate = gate.astype(np.float64)
    y = gpu_ops.swiglu(gate, np.ones_like(gate), **options)
    expected = reference.swiglu(gate, np.ones_like(gate), activation=activation)
    np.testing.assert_allclose(y, expected, rtol=1e-13, atol=1e-16)


@settings(max_examples=25)
@given(
    a=st.floats(-4, 4, width=32),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    seed=st.integers(0, 2**31),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_linear_in_up_and_in_dy(a, shape, seed, activation):
    """y(gate, up + a v) = y(gate, up) + a y(gate, v); both gradients are linear in dy too."""
    rng = np.random.default_rng(seed)
    gate, up, v = (rng.standard_normal(shape) for _ in range(3))

    def forward(u):
        return gpu_ops.swiglu(gate, u, activation=activation)

    def backward(dy):
        return np.stack(gpu_ops.swiglu_backward(dy, gate, up, activation=activation))

    for f in (forward, backward):
        np.testing.assert_allclose(f(up + a * v), f(up) + a * f(v), rtol=1e-10, atol=1e-10)


def test_gelu_symmetry(backend, dtype, rng):
    """gelu(g) - gelu(-g) = g holds exactly for both forms of gelu, and for silu."""
    gate = random(rng, (1, 500), dtype)
    ones = np.ones_like(gate)
    for activation in BOUNDED:
        plus, minus = (
            gpu_ops.swiglu(g, ones, activation=activation, **backend).astype(np.float64)
            for g in (gate, -gate)
        )
        resolution = (
            float(np.finfo(np.float64).eps)
            if dtype == np.float64
            else float(np.spacing(np.ones(1, dtype))[0])
        )
        np.testing.assert_allclose(plus - minus, gate.astype(np.float64), atol=8 * resolution)


@pytest.mark.peers
def test_torch_agrees():
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install torch (CPU build) runs this"
    )
    generator = torch.Generator().manual_seed(0)
    gate, up, dy = (torch.randn(9, 77, generator=generator, dtype=torch.float64) for _ in range(3))
    functional = torch.nn.functional
    acts = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
        "relu2": lambda g: functional.relu(g).square(),
    }
    for activation, act in acts.items():
        g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
        (act(g) * u).backward(dy)
        y = gpu_ops.swiglu(gate, up, activation=activation)
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y, act(gate) * up, rtol=1e-12, atol=1e-13)
        dgate, dup = gpu_ops.swiglu_backward(dy, gate, up, activation=activation)
        torch.testing.assert_close(dgate, g.grad, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(dup, u.grad, rtol=1e-12, atol=1e-13)
    y = gpu_ops.swiglu(gate.bfloat16(), up.bfloat16())
    assert y.dtype == torch.bfloat16


def test_explain_tells_what_runs():
    plan = str(gpu_ops.explain("swiglu", np.ones((3, 8), np.float32), activation="gelu"))
    assert "3 rows of 4 float32, gelu" in plan
    assert "backend numba" in plan


# The references of SwiGLU and the MLP against their definitions: differences for gradients, known points.

Array = npt.NDArray[Any]


REFERENCE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@pytest.mark.parametrize("activation", REFERENCE_ACTIVATIONS)
def test_swiglu_backward_is_the_derivative(activation: Any) -> None:
    rng = np.random.default_rng(5)
    gate, up, dy = (scale * rng.standard_normal((4, 11)) for scale in (3, 1, 1))
    dgate, dup = ref_swiglu.swiglu_backward(dy, gate, up, activation=activation)
    check_gradients(
        lambda g, u: [ref_swiglu.swiglu(g, u, activation=activation)], [gate, up], [dy], [dgate, dup], rng
    )
    packed = np.concatenate([gate, up], axis=-1)
    np.testing.assert_array_equal(
        ref_swiglu.swiglu(packed, activation=activation), ref_swiglu.swiglu(gate, up, activation=activation)
    )
    np.testing.assert_array_equal(
        ref_swiglu.swiglu_backward(dy, packed, activation=activation), np.concatenate([dgate, dup], axis=-1)
    )


@pytest.mark.parametrize("activation", REFERENCE_ACTIVATIONS)
def test_swiglu_mlp_backward_is_the_derivative(activation: Any) -> None:
    rng = np.random.default_rng(6)
    x, w_gate, w_up = rng.standard_normal((2, 3, 5)), rng.standard_normal((7, 5)), rng.standard_normal((7, 5))
    w_down, dy = rng.standard_normal((4, 7)), rng.standard_normal((2, 3, 4))
    gradients = ref_swiglu.swiglu_mlp_backward(dy, x, w_gate, w_up, w_down, activation=activation)
    check_gradients(
        lambda *a: [ref_swiglu.swiglu_mlp(*a, activation=activation)],
        [x, w_gate, w_up, w_down],
        [dy],
        gradients,
        rng,
    )


@pytest.mark.parametrize("value", [-3.0, -0.5, 0.0, 0.1, 1.0, 2.7])
def test_activations_at_known_points(value: float) -> None:
    up = np.ones(1)

    def act(name: Any) -> float:
        return float(ref_swiglu.swiglu(np.array([value]), up, activation=name)[0])

    assert act("silu") == pytest.approx(value / (1 + math.exp(-value)), rel=1e-14, abs=1e-300)
    phi = 0.5 * (1 + math.erf(value / math.sqrt(2)))
    assert act("gelu") == pytest.approx(value * phi, rel=1e-13, abs=1e-300)
    inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
    assert act("gelu_tanh") == pytest.approx(0.5 * value * (1 + math.tanh(inner)), rel=1e-13, abs=1e-300)
    assert act("relu2") == (value**2 if value > 0 else 0.0)


def test_an_unknown_activation_is_refused() -> None:
    ones = np.ones((1, 1))
    with pytest.raises(ValueError, match="activation"):
        ref_swiglu.swiglu(ones, ones, activation="relu")  # type: ignore[arg-type]
