"""Dropout of attention weights: which weights are kept. All backends drop the same ones.

The weight of query i and key j of head h in sequence b (its number in the batch) has 16 random bits, one of the eight
halves of the words that Philox 4x32-10 returns for

    counter   (row group, key group, h, b)        row group = i // 16 * 8 + i % 8:   queries i, i + 8
    key       the seed, low and high half         key group = j // 32 * 8 + j % 8:   keys j, j + 8, j + 16, j + 24

    word      j // 8 % 4
    half      i // 8 % 2, 0 is the low one

so that a thread that holds an accumulator of mma.sync, of queries by keys or of keys by queries, uses all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.philox import philox4x32

__all__ = ["dropout_mask", "rounded_dropout"]

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
    >>> from gpu_ops.reference.attention.dropout import dropout_mask
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
