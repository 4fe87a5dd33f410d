"""Sampling: the next token of each row of logits, by integer weights, so that all backends draw the same one.

A token's weight is floor(2**bits * exp2(x)) with x = (z - max(z)) * (log2(e) / temperature). Every operation is
rounded to float32 (float64 for float64), none is fused with another, and exp2 is a polynomial: the integers are the
same everywhere. Their sums are exact in any order, so the tokens that top_p keeps, and the drawn token, depend on
nothing else. ``bits`` is chosen so that the weights of a row add up to less than 2**63.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.reference.philox import SAMPLE_DOMAIN, philox4x32
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["adjusted_logits", "kept_tokens", "random_number", "sample", "token_weights", "weight_bits"]

# exp2 on [-1/2, 1/2], the highest power first: 2.5e-9 and 4.2e-18 from it
_EXP2 = {
    "float32": (
        0.00015461444698564868, 0.001340042817761575, 0.009618056678524655, 0.05550327226670302,
        0.24022650922288757, 0.6931472067028326, 1.0,
    ),
    "float64": (
        4.45562673806549e-10, 7.074192559576437e-09, 1.0178058437521037e-07, 1.321543255347277e-06,
        1.5252733838008908e-05, 0.00015403530463664982, 0.001333355814641074, 0.00961812910758734,
        0.055504108664821604, 0.24022650695910158, 0.6931471805599453, 1.0,
    ),
}  # fmt: skip
_LEAST = -64.0  # lower exponents count as this, for which weights have no bits


def weight_bits(vocab: int) -> int:
    return 63 - vocab.bit_length()


def adjusted_logits(
    logits: Array,
    bias: Array | None,
    counts: Array | None,
    repetition_penalty: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
) -> Array:
    """Logits after penalties and bias, in float32 (float64 for float64), without -0."""
    dtype: Any = np.float64 if logits.dtype == np.float64 else np.float32
    z: Array = logits.astype(dtype)
    if counts is not None:
        repetition, frequency, presence = (
            np.asarray(x, np.float32).astype(dtype)[..., None]
            for x in (repetition_penalty, frequency_penalty, presence_penalty)
        )
        z = np.where(counts == 0, z, np.where(z < 0, z * repetition, z / repetition))
        z = np.where(counts > 0, z - frequency * counts.astype(dtype) - presence, z)
    if bias is not None:
        z = z + bias
    return np.asarray(z + dtype(0))


def token_weights(z: Array, temperature: Any) -> Array:
    """uint64 weights of a row (vocab,), 2**weight_bits(vocab) for its maximum, which is finite."""
    dtype: Any = z.dtype.type
    scale = np.minimum(dtype(math.log2(math.e)) / dtype(temperature), np.finfo(dtype).max)
    x = np.maximum((z - z.max()) * scale, dtype(_LEAST))
    whole = np.rint(x)
    p = np.zeros_like(x)
    for coefficient in _EXP2[z.dtype.name]:
        p = p * (x - whole) + dtype(coefficient)
    exponents = whole.astype(np.int32) + weight_bits(len(z))
    return np.asarray(np.ldexp(p, exponents).astype(np.uint64))


def kept_tokens(z: Array, weights: Array, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Tokens of a row that top_k, then top_p, then min_p keep: bool (vocab,)."""
    order = np.argsort(-z, kind="stable")[: top_k or len(z)]
    if top_p < 1:
        reached = np.cumsum(weights[order])
        need = max(math.ceil(float(top_p) * float(reached[-1])), 1)
        order = order[: np.searchsorted(reached, np.uint64(need)) + 1]
    kept = np.zeros(len(z), bool)
    kept[order] = True
    least = math.ceil(float(min_p) * 2.0 ** weight_bits(len(z)))
    return np.asarray(kept & (weights >= np.uint64(least)))


def random_number(seed: int, step: int, row: int = 0) -> int:
    """Return 64 random bits of a row: the first words for the counter (step, low and high half, row, a constant)."""
    seed, step = seed % (1 << 64), step % (1 << 64)
    counter = (step & 0xFFFFFFFF, step >> 32, row, SAMPLE_DOMAIN)
    low, high, *_ = (int(word) for word in philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)))
    return low | high << 32


def sample(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any,
    step: Any = 0,
    bias: Array | None = None,
    counts: Array | None = None,
    repetition_penalty: Any = 1.0,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
    return_logprob: bool = False,
    precision: Precision = "rounded",
) -> Any:
    """Token of each row, -1 if there is none; with ``return_logprob`` also its log-probability by the logits.

    ``precision`` applies to the log-probability; tokens have one definition.
    """
    rows, row_seeds = logits.shape[:-1], np.ndim(seed) > 0 or isinstance(seed, np.ndarray)
    with np.errstate(all="ignore"):
        z = adjusted_logits(
            logits, bias, counts, repetition_penalty, frequency_penalty, presence_penalty
        ).reshape(math.prod(rows), logits.shape[-1])
        as_rows = (
            np.broadcast_to(x, rows).reshape(-1) for x in (temperature, top_k, top_p, min_p, seed, step)
        )
        options = zip(z, *as_rows, strict=True)
        tokens = [
            _row(row, 0 if row_seeds else r, *row_options) for r, (row, *row_options) in enumerate(options)
        ]
    result = np.array(tokens, np.int32).reshape(rows)
    return (result, _logprob(logits, result, precision)) if return_logprob else result


def _row(
    z: Array, row: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, step: Any
) -> int:
    t, p, least = (np.float32(x) for x in (temperature, top_p, min_p))
    allowed = 0 <= t < np.inf and top_k >= 0 and 0 <= p <= 1 and 0 <= least <= 1
    if not allowed or not z.size or not np.isfinite(z.max()):  # NaN and +inf are their own maximum
        return -1
    if t == 0:
        return int(z.argmax())
    weights = token_weights(z, t)
    weights[~kept_tokens(z, weights, top_k=int(top_k), top_p=float(p), min_p=float(least))] = 0
    reached = np.cumsum(weights)
    at = random_number(int(seed), int(step), row) * int(reached[-1]) >> 64
    return int(np.searchsorted(reached, np.uint64(at), "right"))


def _logprob(logits: Array, tokens: Array, precision: Precision) -> Array:
    s = steps(precision, logits.dtype)
    x = s.load(logits)
    with np.errstate(all="ignore"):
        top = x.max(axis=-1, initial=-np.inf)
        lse = s.step(np.log(s.step(s.step(np.exp(s.step(x - top[..., None]))).sum(axis=-1))))
        at = np.take_along_axis(x, np.maximum(tokens, 0)[..., None], -1)[..., 0] if x.shape[-1] else top
        return s.store(np.where(tokens < 0, np.nan, s.step(s.step(at - top) - lse)), np.float32)
