"""Cross-entropy of logits with target classes, over the last axis.

Label smoothing: Szegedy et al., arXiv:1512.00567. z-loss: PaLM, arXiv:2204.02311, section 5. softcap: Gemma 2,
arXiv:2408.00118.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, Steps, steps

__all__ = ["LossOptions", "cross_entropy", "cross_entropy_backward"]


@dataclass(frozen=True)
class LossOptions:
    """Options of the cross-entropy of logits; :func:`cross_entropy` has the formula."""

    ignore_index: int = -100
    """Target of rows that do not count."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """Factor of the square of a row's lse."""
    softcap: float = 0.0
    """If > 0, logits become ``softcap * tanh(logits / softcap)``."""
    class_weight: Array | None = None
    """(vocab,)"""
    reduction: str = "mean"
    """``"mean"``, ``"sum"`` or ``"none"``."""
    denominator: Any = None
    """Divisor of a mean; None: the sum of the weights of the targets that count."""


@takes(LossOptions)
def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    return_lse: bool = False,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """The loss and, with ``return_lse``, the log of each row's softmax denominator; float32 (float64 for float64).

    With u = softcap * tanh(logits / softcap), or logits, and weights w of classes, a row with target y has::

        lse  = log(sum(exp(u)))
        loss = (1 - label_smoothing) * w_y * (lse - u_y) + label_smoothing / vocab * sum(w * (lse - u))
               + z_loss * lse^2

    ``"mean"`` divides the sum over rows by ``denominator``, or by the sum of w_y over the rows that count. A row
    whose target is ``ignore_index`` is not read: its loss is 0, its lse -inf. A mean over no rows is 0.
    """
    o, p = LossOptions(**options), steps(precision, logits.dtype)
    kept = targets != o.ignore_index
    w, w_y = _weights(p, o.class_weight, logits.shape[-1], targets, kept)
    u, _ = _capped(p, logits, o.softcap)
    with np.errstate(invalid="ignore", divide="ignore"):  # inf - inf, log(0)
        row_max, _, row_sum = _exponentials(p, u)
        log_sum = p.step(np.log(row_sum))
        lse = p.step(row_max + log_sum)
        nll = p.step(p.step(row_max - u) + log_sum)  # lse - u without the rounding of lse
        loss = p.step((1.0 - o.label_smoothing) * w_y * _at(nll, targets, kept))
        if o.label_smoothing:
            loss = p.step(loss + o.label_smoothing / max(len(w), 1) * p.step(np.sum(w * nll, axis=-1)))
        if o.z_loss:  # 0 times an lse^2 that overflows would be NaN
            loss = p.step(loss + o.z_loss * p.step(lse[..., 0] * lse[..., 0]))
    rows = np.where(kept, loss, 0.0)
    if o.reduction != "none":
        rows = p.step(np.sum(rows) * _factor(o.reduction, o.denominator, w_y))
    losses = p.store(rows, np.float32)
    return (losses, p.store(np.where(kept, lse[..., 0], -np.inf), np.float32)) if return_lse else losses


@takes(LossOptions)
def cross_entropy_backward(
    dloss: Any,
    logits: Array,
    targets: Array,
    lse: Array,
    *,
    precision: Precision = "rounded",
    **options: Any,
) -> Array:
    """Gradient of :func:`cross_entropy` with respect to logits, from that of the loss; 0 in ignored rows.

    The softmax is that of the logits; ``lse``, which is rounded, enters only the gradient of the z-loss.
    """
    o, p = LossOptions(**options), steps(precision, logits.dtype)
    kept = targets != o.ignore_index
    w, w_y = _weights(p, o.class_weight, logits.shape[-1], targets, kept)
    u, slope = _capped(p, logits, o.softcap)
    with np.errstate(invalid="ignore"):  # inf - inf, 0 / 0
        _, weights, row_sum = _exponentials(p, u)
        share = p.step(weights / row_sum)
        own, others = (1.0 - o.label_smoothing) * w_y[..., None], o.label_smoothing / max(len(w), 1)
        du = p.step(
            share * p.step(own + others * np.sum(w) + 2.0 * o.z_loss * p.load(lse)[..., None]) - others * w
        )
        hit = np.arange(len(w)) == np.where(kept, targets, -1)[..., None]
        dlogits = p.step(p.step(du - own * hit) * slope)
        factor = np.broadcast_to(p.load(dloss) * _factor(o.reduction, o.denominator, w_y), targets.shape)
        return p.store(np.where(kept[..., None], dlogits * factor[..., None], 0.0))


def _weights(
    p: Steps, class_weight: Array | None, vocab: int, targets: Array, kept: Array
) -> tuple[Array, Array]:
    """Weights of each class and of the target of each row; 0 in rows that are ignored."""
    w = np.ones(vocab) if class_weight is None else p.load(class_weight)
    return w, _at(np.broadcast_to(w, (*targets.shape, vocab)), targets, kept)


def _at(x: Array, targets: Array, kept: Array) -> Array:
    """Element of each row at its target; 0 in rows that are ignored."""
    if not x.size:
        return np.zeros(targets.shape)
    selected = np.take_along_axis(x, np.where(kept, targets, 0)[..., None].astype(np.int64), axis=-1)
    return np.where(kept, selected[..., 0], 0.0)


def _exponentials(p: Steps, u: Array) -> tuple[Array, Array, Array]:
    """The maximum of each row (0 if that is -inf), the exponentials relative to it, and their sum."""
    row_max = np.max(u, axis=-1, initial=-np.inf, keepdims=True)
    row_max = np.where(row_max == -np.inf, 0.0, row_max)
    weights = p.step(np.exp(p.step(u - row_max)))
    return row_max, weights, p.step(np.sum(weights, axis=-1, keepdims=True))


def _capped(p: Steps, logits: Array, softcap: float) -> tuple[Array, Any]:
    """The logits that enter the softmax, and their derivatives."""
    z = p.load(logits)
    if not softcap:
        return z, 1.0
    t = p.step(np.tanh(p.step(z / softcap)))
    return p.step(softcap * t), p.step(1.0 - p.step(t * t))


def _factor(reduction: str, denominator: Any, w_y: Array) -> float:
    """Factor of the sum over rows."""
    if reduction != "mean":
        return 1.0
    count = float(np.sum(w_y) if denominator is None else denominator)
    return 1.0 / count if count else 0.0
