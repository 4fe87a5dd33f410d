"""Rotary position embedding (Su et al., arXiv 2104.09864).

A token at position p has the angles ``p * inv_freq[i]``, i = 0 .. R/2 - 1. Each pair ``(x1, x2)`` of the first
R = rotary_dim components of a head rotates by its angle:

    y1 = x1 cos - x2 sin
    y2 = x2 cos + x1 sin

Half-split (GPT-NeoX, Llama in Hugging Face) pairs component i with i + R/2; interleaved (GPT-J, Llama's own code)
pairs 2i with 2i + 1. Components from R on are copied. ``conjugate`` rotates the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, steps
from gpu_ops.reference.rope.rope_scaling import Scaling, default_inv_freq

__all__ = ["RotaryOptions", "rope", "rope_angles", "rope_backward", "rotated"]


def rope_angles(
    positions: Array, rotary_dim: int, theta: float, scaling: Scaling | None = None, seqlen: int | None = None
) -> tuple[Array, float]:
    """``positions[..., None] * inv_freq`` in float64, and the factor on cos and sin."""
    if scaling is None:
        inv_freq, attention_factor = default_inv_freq(rotary_dim, theta), 1.0
    else:
        if seqlen is None:
            seqlen = max(int(positions.max()) + 1, 0) if positions.size else 0
        inv_freq = scaling.inv_freq(rotary_dim, theta, seqlen)
        attention_factor = scaling.attention_factor_at(seqlen)
    return positions[..., None].astype(np.float64) * inv_freq, attention_factor


@dataclass(frozen=True)
class RotaryOptions:
    """Options that decide the angles and the pairs that rotate."""

    theta: float | None = None
    """Base of the frequencies; None: that of the scaling, else 10000."""
    rotary_dim: int | None = None
    """Components of a head that rotate; None: the scaling's share of them, else all."""
    interleaved: bool = False
    """Whether pairs are neighbours, and not half of rotary_dim apart."""
    scaling: Scaling | None = None
    seqlen: int | None = None
    """Length that the scaling is for; None: the largest position + 1."""


@takes(RotaryOptions)
def rope(
    q: Array,
    k: Array | None = None,
    *,
    positions: Array | None = None,
    conjugate: bool = False,
    layout: str = "bshd",
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Rotate ``q``. If ``k`` is given, rotate both and return a pair.

    ``q``: (batch, seqlen, nheads, head_dim), with ``layout="bhsd"`` (batch, nheads, seqlen, head_dim), or
    packed (total, nheads, head_dim). ``positions``: (seqlen,), (batch, seqlen) or (1, seqlen); packed:
    (total,). None counts from 0.
    """
    read = RotaryOptions(**options)
    return rotated(q, k, positions, read, conjugate=conjugate, layout=layout, precision=precision)


def rotated(
    q: Array,
    k: Array | None,
    positions: Array | None,
    options: RotaryOptions,
    *,
    conjugate: bool = False,
    layout: str = "bshd",
    precision: Precision = "rounded",
) -> Any:
    """Result of :func:`rope`."""
    theta, rotary_dim, scaling = options.theta, options.rotary_dim, options.scaling
    head_dim = q.shape[-1]
    if theta is None:
        theta = 10000.0 if scaling is None or scaling.theta is None else scaling.theta
    if rotary_dim is None:
        partial = None if scaling is None else scaling.partial_rotary_factor
        rotary_dim = head_dim if partial is None else int(head_dim * partial)
    swap_axes = layout == "bhsd" and q.ndim == 4
    if positions is None:
        positions = np.arange(q.shape[0] if q.ndim == 3 else q.shape[2 if swap_axes else 1])
    angles, attention_factor = rope_angles(np.asarray(positions), rotary_dim, theta, scaling, options.seqlen)
    at = steps(precision, q.dtype)
    # add an axis for the heads; positions without a batch axis broadcast
    cos = at.step(attention_factor * np.cos(angles))[..., None, :]
    sin = at.step(attention_factor * np.sin(angles))[..., None, :]
    if conjugate:
        sin = -sin

    def rotate(x: Array) -> Array:
        x = at.load(x)
        if swap_axes:
            x = x.swapaxes(1, 2)
        y = x.copy()
        half = rotary_dim // 2
        if options.interleaved:
            first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
        else:
            first, second = slice(0, half), slice(half, rotary_dim)
        x1, x2 = x[..., first], x[..., second]
        y[..., first] = at.step(at.step(x1 * cos) - at.step(x2 * sin))
        y[..., second] = at.step(at.step(x2 * cos) + at.step(x1 * sin))
        return at.store(y.swapaxes(1, 2) if swap_axes else y)

    return rotate(q) if k is None else (rotate(q), rotate(k))


@takes(RotaryOptions)
def rope_backward(
    dq: Array,
    dk: Array | None = None,
    *,
    positions: Array | None = None,
    conjugate: bool = False,
    layout: str = "bshd",
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Gradients of ``rope`` called with the same options.

    The map is linear, so its gradient is the transpose: the rotation by the opposite angle with the same factor on
    cos and sin. With an attention factor other than 1 that is not the inverse.
    """
    return rope(
        dq, dk, positions=positions, conjugate=not conjugate, layout=layout, precision=precision, **options
    )
