"""Gated activations: ``y = act(gate) * up``, and the MLP built from them.

SwiGLU is ``act = silu``; GeGLU is ``act = gelu`` (erf) or ``gelu_tanh``. Source: Shazeer, "GLU
Variants Improve Transformer", arXiv:2002.05202, equations 5 and 6; the tanh form is from Hendrycks
and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2; ``relu2`` from So et al., "Primer",
arXiv:2109.08668.

At infinity the functions take their limits: act(-inf) = -0 (relu2: 0), act'(-inf) = 0, act'(inf) = 1 (relu2: inf).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.precision import Array, Precision, Steps, steps, textbook_product

__all__ = ["Activation", "swiglu", "swiglu_backward", "swiglu_mlp", "swiglu_mlp_backward"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
SATURATED = 1e4  # beyond +-1e4 every derivative here equals its limit, in float64 too

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gate(g: Array, activation: Activation, p: Steps) -> tuple[Array, Array]:
    """(c, dc) with act(g) = g * c(g), where c rises from 0 to 1, and dc its derivative. g must be finite."""
    if activation == "silu":  # c = sigmoid(g)
        with np.errstate(over="ignore"):
            c = p.step(1.0 / p.step(1.0 + p.step(np.exp(-g))))
            complement = p.step(1.0 / p.step(1.0 + p.step(np.exp(g))))  # 1 - c without cancellation
        return c, p.step(c * complement)
    if activation == "gelu":  # c = Phi(g), the normal distribution function
        c = p.step(0.5 * p.step(_erfc(-g / math.sqrt(2.0))))
        return c, p.step(p.step(np.exp(p.step(-0.5 * np.square(g)))) / math.sqrt(2.0 * math.pi))
    if activation == "gelu_tanh":  # c = (1 + tanh z) / 2 = sigmoid(2 z)
        z = p.step(SQRT_2_OVER_PI * p.step(g + p.step(GELU_CUBIC * p.step(g**3))))
        c, dc = _gate(p.step(2.0 * z), "silu", p)
        slope = p.step(2.0 * SQRT_2_OVER_PI * p.step(1.0 + p.step(3.0 * GELU_CUBIC * np.square(g))))
        return c, p.step(dc * slope)
    raise ValueError(f"activation must be 'silu', 'gelu', 'gelu_tanh' or 'relu2', got {activation!r}")


def _activate(g: Array, activation: Activation, p: Steps) -> Array:
    if activation == "relu2":
        return p.step(np.square(np.maximum(g, 0.0)))
    c, _ = _gate(np.clip(g, -SATURATED, SATURATED), activation, p)
    return p.step(np.multiply(g, c, out=np.full_like(g, -0.0), where=g != -np.inf))


def _activate_backward(g: Array, activation: Activation, p: Steps) -> Array:
    """act'(g) = c + g * c'."""
    if activation == "relu2":
        return p.step(2.0 * np.maximum(g, 0.0))
    g = np.clip(g, -SATURATED, SATURATED)
    c, dc = _gate(g, activation, p)
    return p.step(c + p.step(g * dc))


def _products(p: Steps, dtype: npt.DTypeLike, precision: Precision) -> Callable[[Array, Array], Array]:
    """``a @ b``. Textbook code accumulates in float32 (float64 for float64), never in 16 bits."""

    def product(a: Array, b: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return p.step(textbook_product(a, b))

    return product if precision == "naive" and np.dtype(dtype) != np.float64 else operator.matmul


def _split(gate: Array, up: Array | None) -> tuple[Array, Array]:
    """Gate and up. The packed form has gate in the first half of the last axis and up in the second."""
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def swiglu(
    gate: Array,
    up: Array | None = None,
    *,
    activation: Activation = "silu",
    precision: Precision = "rounded",
) -> Array:
    """``act(gate) * up``.

    Parameters
    ----------
    gate : (..., d), or packed (..., 2 * d) with gate in the first half
    up : (..., d), or None if packed
    activation : ``"silu"`` g * sigmoid(g); ``"gelu"`` g * (1 + erf(g / sqrt 2)) / 2; ``"gelu_tanh"``
        g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g**3))) / 2; ``"relu2"`` max(g, 0)**2

    Returns
    -------
    (..., d) in gate's dtype
    """
    p = steps(precision, gate.dtype)
    g, u = _split(gate, up)
    return p.store(_activate(p.load(g), activation, p) * p.load(u))


def swiglu_backward(
    dy: Array,
    gate: Array,
    up: Array | None = None,
    *,
    activation: Activation = "silu",
    precision: Precision = "rounded",
) -> Array | tuple[Array, Array]:
    """``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``.

    Returns
    -------
    dgate, dup, or one packed (..., 2 * d) array if the forward was packed
    """
    p = steps(precision, gate.dtype)
    g, u = _split(gate, up)
    g64, dy64 = p.load(g), p.load(dy)
    dgate = p.step(dy64 * p.load(u)) * _activate_backward(g64, activation, p)
    dup = dy64 * _activate(g64, activation, p)
    if up is None:
        return p.store(np.concatenate([dgate, dup], axis=-1))
    return p.store(dgate), p.store(dup)


def swiglu_mlp(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    activation: Activation = "silu",
    keep: Literal["gate_up"] | None = None,
    precision: Precision = "rounded",
) -> Array | tuple[Array, Array]:
    """``(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T``, the MLP of Llama-like models.

    Parameters
    ----------
    x : (..., hidden)
    w_gate, w_up : (ffn, hidden)
    w_down : (hidden_out, ffn)
    keep : ``"gate_up"`` also returns ``x @ w_gate.T`` and ``x @ w_up.T`` concatenated, for the backward

    Returns
    -------
    (..., hidden_out) in x's dtype; with ``keep`` also (..., 2 * ffn) in x's dtype
    """
    p = steps(precision, x.dtype)
    matmul = _products(p, x.dtype, precision)
    leading = x.shape[:-1]
    x2 = p.load(x).reshape(math.prod(leading), x.shape[-1])
    gate, up = (matmul(x2, p.load(w).T) for w in (w_gate, w_up))
    h = p.step(_activate(gate, activation, p) * up)
    y = p.store(matmul(h, p.load(w_down).T)).reshape(*leading, len(w_down))
    if keep is None:
        return y
    return y, p.store(np.concatenate([gate, up], axis=-1)).reshape(*leading, 2 * len(w_gate))


def swiglu_mlp_backward(
    dy: Array,
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    activation: Activation = "silu",
    gate_up: Array | None = None,
    dw_gate: Array | None = None,
    dw_up: Array | None = None,
    dw_down: Array | None = None,
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """Gradients of :func:`swiglu_mlp`. ``gate_up`` is what it kept; otherwise it is recomputed from x, rounded alike.

    Returns
    -------
    dx like x, then dw_gate, dw_up and dw_down in float32 (float64 for float64), which start from those given
    """
    p = steps(precision, x.dtype)
    matmul = _products(p, x.dtype, precision)
    tokens = math.prod(x.shape[:-1])
    x2, dy2 = p.load(x).reshape(tokens, x.shape[-1]), p.load(dy).reshape(tokens, dy.shape[-1])
    wg, wu, wd = p.load(w_gate), p.load(w_up), p.load(w_down)
    if gate_up is None:
        gate_up = p.store(np.concatenate([matmul(x2, wg.T), matmul(x2, wu.T)], axis=-1))
    gate, up = _split(p.load(gate_up).reshape(tokens, 2 * len(wg)), None)
    act = _activate(gate, activation, p)
    dh = matmul(dy2, wd)
    dgate = p.step(p.step(dh * up) * _activate_backward(gate, activation, p))
    dup = p.step(dh * act)
    dx = p.store((matmul(dgate, wg) + matmul(dup, wu)).reshape(x.shape))
    sums = (
        (p.matmul(dgate.T, x2), dw_gate),
        (p.matmul(dup.T, x2), dw_up),
        (p.matmul(dy2.T, p.step(act * up)), dw_down),
    )
    return dx, *(p.store(w if start is None else p.load(start) + w, np.float32) for w, start in sums)
