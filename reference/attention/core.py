"""The mathematics of attention on ``(batch, nheads, seqlen, head_dim)`` arrays in float64, with masks and dropout.

The public forward and backward functions both start from :func:`softmax_rows`. Keys that a query does not see
contribute nothing, whatever they hold: a NaN behind a mask stays behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.philox import philox4x32
from gpu_ops.reference.precision import Array, Steps

__all__ = [
    "BlockMaskLike",
    "DenseOptions",
    "Options",
    "SoftmaxRows",
    "WeightOptions",
    "alibi_bias",
    "distance",
    "dropout_mask",
    "expand_block_mask",
    "matmul_visible",
    "repeat_heads",
    "rounded_dropout",
    "sequences",
    "softmax_rows",
    "sum_groups",
    "to_bhsd",
    "visible_keys",
    "weigh_values",
]


@dataclass(frozen=True)
class Options:
    """Options of all attention functions, which decide the scores."""

    causal: bool = False
    """Query ``i`` sees keys up to ``i + offset``; offset is seqlen_k - seqlen_q (bottom-right aligned) by default."""
    window_size: tuple[int, int] = (-1, -1)
    """(left, right): keys visible around that diagonal; -1 is unlimited."""
    softmax_scale: float | None = None
    """Factor on ``q k^T``; ``head_dim ** -0.5`` when None."""
    softcap: float = 0.0
    """If > 0, scores become ``softcap * tanh(score / softcap)``."""
    sinks: Array | None = None
    """(nheads,) one logit per head, which counts in the denominator only."""
    alibi_slopes: Array | None = None
    """(nheads,) or (batch, nheads): adds ``-slope * |i + offset - j|``."""

    def scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def of_sequence(self, b: int) -> Options:
        """Options of sequence ``b``: ALiBi slopes may be (batch, nheads)."""
        slopes = self.alibi_slopes
        return self if slopes is None or slopes.ndim == 1 else replace(self, alibi_slopes=slopes[b])


@dataclass(frozen=True)
class WeightOptions(Options):
    """Options of training: also those of the weights after the softmax."""

    dropout_p: float = 0.0
    """Probability that a weight is 0; others are divided by 1 - dropout_p; see :func:`dropout_mask`."""
    seed: Any = None
    """Seed that decides which weights dropout keeps: an integer from 0 to 2**64 - 1."""


@dataclass(frozen=True)
class DenseOptions(WeightOptions):
    """Options of sequences of equal length: also arrays indexed by query and key."""

    bias: Array | None = None
    """Broadcastable to (batch, nheads, seqlen_q, seqlen_k), added; -inf masks."""
    block_mask: BlockMaskLike | None = None
    """Object with ``visible``, ``block_q``, ``block_k``; False blocks are not seen."""
    q_start: int | None = None
    """Position of the first query; with ``k_start``, of the first key, ``offset = q_start - k_start`` (None: 0)."""
    k_start: int | None = None

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        """Query ``i`` is aligned with key ``i + offset``."""
        if self.q_start is None and self.k_start is None:
            return seqlen_k - seqlen_q
        return (self.q_start or 0) - (self.k_start or 0)


@dataclass(frozen=True)
class SoftmaxRows:
    """One softmax row per query; all fields are float64, ``visible`` is bool."""

    probs: Array  # (batch, nheads, seqlen_q, seqlen_k); 0 where not visible
    kept: Array | float  # factors of probs: with dropout 0 or 1 / (1 - dropout_p), else 1.0
    sink_probs: Array  # (batch, nheads, seqlen_q); the sink's share, 0 without sinks
    lse: Array  # (batch, nheads, seqlen_q)
    visible: Array  # (batch, nheads, seqlen_q, seqlen_k)
    seen: Array  # (batch, nheads, seqlen_q, seqlen_k); visible, and the score is above -inf
    slope: Array | float  # d score / d (softmax_scale * q.k): with softcap 1 - tanh(s / softcap)**2, else 1.0


def sequences(cu_seqlens_q: Array, cu_seqlens_k: Array) -> Iterator[tuple[int, slice, slice]]:
    """Index of each packed sequence, its rows of q and its rows of k and v."""
    for b in range(len(cu_seqlens_q) - 1):
        q_begin, q_end, k_begin, k_end = map(int, (*cu_seqlens_q[b : b + 2], *cu_seqlens_k[b : b + 2]))
        yield b, slice(q_begin, q_end), slice(k_begin, k_end)


def to_bhsd(x: Array, layout: str) -> Array:
    """Swap the axes seqlen and heads of a "bshd" array. Its own inverse."""
    return x.swapaxes(1, 2) if layout == "bshd" else x


def repeat_heads(x: Array, nheads: int) -> Array:
    """GQA / MQA: query head ``h`` reads key head ``h // (nheads // nheads_kv)``."""
    return np.repeat(x, nheads // x.shape[1], axis=1)


def sum_groups(x: Array, nheads_kv: int) -> Array:
    """Adjoint of :func:`repeat_heads`."""
    batch, nheads, seqlen, head_dim = x.shape
    return np.asarray(x.reshape(batch, nheads_kv, nheads // nheads_kv, seqlen, head_dim).sum(axis=2))


def matmul_visible(weights: Array, values: Array, visible: Array, steps: Steps) -> Array:
    """``weights @ values``, where a row of ``values`` counts only for the rows that see it.

    ``weights`` is 0 where not visible, which is enough for finite values. Since ``0 * NaN`` is not 0, rows of
    ``values`` with a NaN or an infinity are added one by one, under the mask.
    """
    finite = np.asarray(np.isfinite(values).all(axis=-1, keepdims=True))
    result = steps.matmul(weights, np.where(finite, values, 0.0))
    for j in np.flatnonzero(~finite.all(axis=(0, 1))):
        term = weights[..., j, None] * np.where(finite, 0.0, values)[..., j, None, :]
        result = result + np.where(visible[..., j, None], term, 0.0)
    return result


def weigh_values(rows: SoftmaxRows, values: Array, steps: Steps) -> Array:
    """``probs @ values``, after dropout. A non-finite value counts wherever it is seen, however small its
    weight is: weights are positive, and 0 only by rounding, which times infinity would be NaN.
    """
    finite = np.isfinite(values)
    result = steps.matmul(steps.step(rows.probs * rows.kept), np.where(finite, values, 0.0))
    for j in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        term = np.where(finite, 0.0, values)[..., None, j, :]
        result = result + np.where(rows.seen[..., j, None], term, 0.0)
    return result


def softmax_rows(q: Array, k: Array, options: Options, steps: Steps, sequence: int = 0) -> SoftmaxRows:
    """Scores, masks and softmax. ``k`` has as many heads as ``q``; ``sequence``: the number of the first sequence.

    ``s = softcap(softmax_scale * q.k) + ALiBi + bias``, masked entries -inf; then
    ``lse = ln(sum exp(s) + exp(sink))`` and ``probs = exp(s - lse)``.
    """
    step = steps.step
    shape = (*q.shape[:3], k.shape[2])
    dense = options if isinstance(options, DenseOptions) else DenseOptions()
    bias = None if dense.bias is None else steps.load(dense.bias)
    seqlen_q, seqlen_k = shape[2:]
    offset = dense.offset(seqlen_q, seqlen_k)
    visible = visible_keys(
        shape,
        causal=options.causal,
        window_size=options.window_size,
        offset=offset,
        bias=bias,
        block_mask=dense.block_mask,
    )

    scores = step(step(steps.matmul(q, k.swapaxes(-1, -2))) * options.scale(q.shape[-1]))
    slope: Array | float = 1.0
    if options.softcap > 0:
        tanh = step(np.tanh(step(scores / options.softcap)))
        scores = step(options.softcap * tanh)
        slope = step(1.0 - tanh * tanh)
    if options.alibi_slopes is not None:
        scores = step(scores + step(alibi_bias(steps.load(options.alibi_slopes), seqlen_q, seqlen_k, offset)))
    if bias is not None:
        scores = step(scores + bias)
    scores = np.where(visible, scores, -np.inf)

    # The sink is one more logit per row: a column without a value.
    sinks = np.full(shape[1], -np.inf) if options.sinks is None else steps.load(options.sinks)
    sink = sinks[None, :, None]
    row_max = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
    row_max = step(np.where(row_max == -np.inf, 0.0, row_max))  # nothing visible: avoid -inf - -inf
    numerator = step(np.exp(step(scores - row_max[..., None])))
    sink_numerator = step(np.exp(step(sink - row_max)))
    row_sum = step(numerator.sum(axis=-1) + sink_numerator)
    divisor = np.where(row_sum == 0.0, 1.0, row_sum)
    return SoftmaxRows(
        probs=np.where(visible, step(numerator / divisor[..., None]), 0.0),
        kept=_kept(shape, options, sequence),
        sink_probs=step(sink_numerator / divisor),
        lse=step(row_max + step(np.log(row_sum))),
        visible=visible,
        seen=scores != -np.inf,
        slope=slope,
    )


def _kept(shape: tuple[int, int, int, int], options: Options, sequence: int) -> Array | float:
    """Factors of dropout. It acts after the softmax: ``lse`` and ``probs`` do not depend on it."""
    if not isinstance(options, WeightOptions) or options.dropout_p == 0:
        return 1.0
    dense = options if isinstance(options, DenseOptions) else DenseOptions()
    starts = {"q_start": dense.q_start or 0, "k_start": dense.k_start or 0}
    kept = dropout_mask(shape, options.dropout_p, options.seed, first_sequence=sequence, **starts)
    return np.asarray(kept / (1.0 - rounded_dropout(options.dropout_p)))


# Dropout of attention weights: which weights are kept. All backends drop the same ones.
#
# The weight of query i and key j of head h in sequence b (its number in the batch) has 16 random bits, one of
# the eight halves of the words that Philox 4x32-10 returns for
#
#     counter   (row group, key group, h, b)        row group = i // 16 * 8 + i % 8:   queries i, i + 8
#     key       the seed, low and high half         key group = j // 32 * 8 + j % 8:   keys j, j + 8, j + 16, j + 24
#
#     word      j // 8 % 4
#     half      i // 8 % 2, 0 is the low one
#
# so that a thread that holds an accumulator of mma.sync, of queries by keys or of keys by queries, uses all of them.

_STEPS = 1 << 16


def rounded_dropout(dropout_p: float) -> float:
    """``dropout_p`` rounded to 16 bits: a multiple of 2**-16, at most 1 - 2**-15."""
    return min(round(dropout_p * _STEPS), _STEPS - 2) / _STEPS


def dropout_mask(
    shape: tuple[int, int, int, int],
    dropout_p: float,
    seed: Any,
    *,
    first_sequence: int = 0,
    q_start: int = 0,
    k_start: int = 0,
) -> npt.NDArray[np.bool_]:
    """The weights that attention keeps: bool of ``shape`` (batch, nheads, seqlen_q, seqlen_k).

    Parameters
    ----------
    dropout_p, seed : as given to :func:`attention`
    first_sequence : number of the first sequence; sequence ``b`` of ``attention_varlen`` has the mask of shape
        (1, nheads, its seqlen_q, its seqlen_k) with ``first_sequence=b``
    q_start, k_start : positions of the first query and key

    Examples
    --------
    >>> from gpu_ops.reference.attention.core import dropout_mask
    >>> float(dropout_mask((1, 2, 64, 64), 0.25, seed=7).mean().round(2))
    0.75
    """
    batch, nheads, seqlen_q, seqlen_k = shape
    queries, keys = q_start + np.arange(seqlen_q), k_start + np.arange(seqlen_k)
    row_groups, row_group = np.unique(queries // 16 * 8 + queries % 8, return_inverse=True)
    key_groups, key_group = np.unique(keys // 32 * 8 + keys % 8, return_inverse=True)
    heads, sequences = (
        np.arange(nheads)[:, None, None],
        first_sequence + np.arange(batch)[:, None, None, None],
    )
    number = int(np.asarray(seed).reshape(())) % (1 << 64)
    counter = (row_groups[:, None], key_groups, heads, sequences)
    words = philox4x32(counter, (number & 0xFFFFFFFF, number >> 32))
    word = words[:, :, row_group[:, None], key_group, keys // 8 % 4]
    half = word >> (queries // 8 % 2 * 16).astype(np.uint32)[:, None] & np.uint32(0xFFFF)
    return np.asarray(half >= round(rounded_dropout(dropout_p) * _STEPS))


# Visibility of keys to queries, and the ALiBi term of scores.
#
# Query ``i`` is aligned with key ``i + offset``, and all position rules count from there. By default the
# diagonal is bottom-right aligned, the last query with the last key: ``offset = seqlen_k - seqlen_q``.


class BlockMaskLike(Protocol):
    """Attributes that a block mask must provide (``gpu_ops.BlockMask`` does)."""

    @property
    def visible(self) -> Any: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...


def distance(seqlen_q: int, seqlen_k: int, offset: int) -> Array:
    """Distance of key ``j`` to the left of query ``i``: ``i + offset - j``."""
    query = np.arange(seqlen_q)[:, None] + offset
    return query - np.arange(seqlen_k)[None, :]


def expand_block_mask(block_mask: BlockMaskLike, seqlen_q: int, seqlen_k: int) -> Array:
    """The dense form ``(..., seqlen_q, seqlen_k)``; blocks count from query 0 and key 0."""
    visible = np.asarray(block_mask.visible, dtype=bool)
    blocks = (-(-seqlen_q // block_mask.block_q), -(-seqlen_k // block_mask.block_k))
    visible = np.broadcast_to(visible, (*visible.shape[:-2], *blocks))
    block_of_query = np.arange(seqlen_q) // block_mask.block_q
    block_of_key = np.arange(seqlen_k) // block_mask.block_k
    return visible[..., block_of_query[:, None], block_of_key[None, :]]


def visible_keys(
    shape: tuple[int, int, int, int],
    *,
    causal: bool,
    window_size: tuple[int, int],
    offset: int,
    bias: Array | None,
    block_mask: BlockMaskLike | None,
) -> Array:
    """Bool ``(batch, nheads, seqlen_q, seqlen_k)``: the intersection of all masks, including -inf in ``bias``."""
    seqlen_q, seqlen_k = shape[2:]
    left, right = window_size
    d = distance(seqlen_q, seqlen_k, offset)
    visible = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if causal:
        visible &= d >= 0
    if left >= 0:
        visible &= d <= left
    if right >= 0:
        visible &= d >= -right
    visible = np.broadcast_to(visible, shape)
    if bias is not None:
        visible = visible & (bias != -np.inf)
    if block_mask is not None:
        visible = visible & expand_block_mask(block_mask, seqlen_q, seqlen_k)
    return visible


def alibi_bias(slopes: Array, seqlen_q: int, seqlen_k: int, offset: int) -> Array:
    """``-slope * |i + offset - j|`` as ``(batch or 1, nheads, seqlen_q, seqlen_k)``.

    Press, Smith and Lewis, "Train Short, Test Long" (2022), with the distance taken on both sides.
    """
    per_batch = slopes if slopes.ndim == 2 else slopes[None]
    return -per_batch[:, :, None, None] * np.abs(distance(seqlen_q, seqlen_k, offset))
