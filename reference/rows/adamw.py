"""AdamW: one step of parameters and of their moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpu_ops.reference.options import takes
from gpu_ops.reference.philox import philox4x32
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = [
    "TILE",
    "AdamWOptions",
    "State",
    "adamw_step",
    "dequantize",
    "quantize",
    "random_bits",
    "round_stochastic",
]

TILE = 256  # elements that share 32 counters of Philox, and a scale of 8-bit moments
State = Array | tuple[Array, Array]
"""A moment, or its 8-bit codes and the scale of each tile."""


@dataclass(frozen=True)
class AdamWOptions:
    """Options of a step that decide the new values."""

    step: int
    """Number of this step, from 1."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_mask: Array | None = None
    """Shape of params: the elements that decay. None: all."""
    grad_scale: float = 1.0
    """Factor of grads."""
    rounding: str = "nearest"
    """Rounding of params from float32: ``"nearest"`` or ``"stochastic"``."""
    seed: int = 0
    """Seed of stochastic rounding."""


@takes(AdamWOptions)
def adamw_step(
    params: Array,
    grads: Array,
    m: State,
    v: State,
    *,
    skip: float | None = None,
    master: Array | None = None,
    precision: Precision = "rounded",
    **options: Any,
) -> tuple[State, ...]:
    """Return new params, m and v, and master if there is one; the arguments are unchanged.

    In "naive" precision each operation is rounded to m's dtype: the bits of the kernels. An 8-bit v holds sqrt(v).
    """
    o = AdamWOptions(**options)
    state = (params, m, v) if master is None else (params, m, v, master)
    if skip is not None and skip != 0:
        return tuple(x.copy() if isinstance(x, np.ndarray) else (x[0].copy(), x[1].copy()) for x in state)
    if isinstance(m, tuple) or isinstance(v, tuple):
        moment, root = dequantize(*m), dequantize(*v)
        new, new_m, new_v, *rest = adamw_step(
            params, grads, moment, root * root, master=master, precision=precision, **options
        )
        signed, unsigned = (
            quantize(np.asarray(new_m), np.int8),
            quantize(np.sqrt(np.asarray(new_v)), np.uint8),
        )
        return new, signed, unsigned, *rest
    p = steps(precision, m.dtype)
    r, (beta1, beta2), t = p.step, map(float, o.betas), int(o.step)
    g = r(p.load(grads) * r(float(o.grad_scale)))
    new_m = r(r(r(beta1) * p.load(m)) + r(r(1 - beta1) * g))
    new_v = r(r(r(beta2) * p.load(v)) + r(r(r(1 - beta2) * g) * g))
    size, correction = r(float(o.lr) / (1 - beta1**t)), r(1 / np.sqrt(1 - beta2**t))
    update = r(r(size * new_m) / r(r(r(np.sqrt(new_v)) * correction) + r(o.eps)))
    decay, weights = r(float(o.lr) * o.weight_decay), p.load(params if master is None else master)
    if decay != 0:  # 0 * inf would be NaN
        decayed = r(weights - r(decay * weights))
        weights = decayed if o.decay_mask is None else np.where(o.decay_mask, decayed, weights)
    weights = r(weights - update)
    new = p.store(weights)
    rounded = new
    if params.dtype != m.dtype and precision != "float64":
        rounded = round_stochastic(new, o.seed, t) if o.rounding == "stochastic" else new.astype(params.dtype)
    result = (rounded, p.store(new_m), p.store(new_v))
    return result if master is None else (*result, new)


def dequantize(codes: Array, scale: Array) -> Array:
    """Float32 numbers scale c |c| / most^2, where most is the largest code, with the scale of the element's tile."""
    c = codes.astype(np.float32)
    unit = scale / np.float32(int(np.iinfo(codes.dtype).max) ** 2)
    return np.asarray(c * np.abs(c) * np.repeat(unit, TILE)[: codes.size].reshape(codes.shape))


def quantize(x: Array, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Codes in ``dtype`` and the scale of each tile, its largest magnitude: most sqrt(|x| / scale), to nearest.

    Codes are square roots, so they are dense near 0: 1 of 127 represents 1 / 16129. In uint8 a nonzero value gets no
    code 0: a step divides by it.
    """
    limit = np.float32(np.iinfo(dtype).max)
    line = np.asarray(x, np.float32).ravel()
    tiles = np.zeros((-(-line.size // TILE), TILE), np.float32)
    tiles.reshape(-1)[: line.size] = line
    scale = np.abs(tiles).max(axis=1, initial=0)
    with np.errstate(all="ignore"):
        part = np.where(scale[:, None] > 0, np.abs(tiles) / scale[:, None], 0)
        c = np.rint(np.sqrt(part) * limit)
    c = np.where(c <= limit, c, limit)  # NaN: the scale is, too
    if dtype == np.uint8:
        c = np.where((c == 0) & (tiles != 0), 1, c)
    codes = np.where(tiles < 0, -c, c).astype(dtype).reshape(-1)[: line.size]
    return codes.reshape(np.shape(x)), scale


def round_stochastic(x: Array, seed: int, step: int) -> Array:
    """Round float32 to bfloat16, up or down with the probability that keeps the mean.

    Numbers that bfloat16 holds exactly are unchanged, infinities and NaN too; a finite number stays finite.
    """
    words = x.astype(np.float32).ravel().view(np.uint32)
    down = words >> 16
    up = (words + random_bits(x.size, seed, step)) >> 16
    special = np.isnan(x.ravel())
    keep = (down & 0x7FFF == 0x7F80) | (up & 0x7FFF == 0x7F80) | special
    selected: Array = np.where(keep, down | special * np.uint32(0x40), up)
    return np.asarray(selected.astype(np.uint16).view(ml_dtypes.bfloat16).reshape(x.shape))


def random_bits(size: int, seed: int, step: int) -> Array:
    """16 random bits for each element of a flat array.

    In a tile of 256 elements, element i = 128 half + 4 lane + e has the ``half`` of word ``e`` of the counter
    (32 tile + lane, step).
    """
    counters = np.arange(-(-size // TILE) * (TILE // 8), dtype=np.uint64)
    parts = (counters & 0xFFFFFFFF, counters >> 32, step & 0xFFFFFFFF, step >> 32)
    words = philox4x32(parts, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1, 1, 32, 4)
    halves: Array = np.concatenate((words & 0xFFFF, words >> 16), axis=1)
    return np.asarray(halves.reshape(-1)[:size])
