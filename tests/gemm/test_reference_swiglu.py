"""The references of SwiGLU and the MLP against their definitions: differences for gradients, known points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_ops.reference.gemm import swiglu as ref_swiglu
from tests.support.differences import check_gradients

Array = npt.NDArray[Any]


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@pytest.mark.parametrize("activation", ACTIVATIONS)
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
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
