"""Merging attention over two disjoint sets of keys.

Source: the online softmax of Milakov and Gimelshein, 2018; as in Liu, Zaharia and Abbeel, "Ring Attention", 2023.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["attention_merge"]


def attention_merge(
    out1: Array,
    lse1: Array,
    out2: Array,
    lse2: Array,
    *,
    layout: str = "bshd",
    precision: Precision = "rounded",
) -> tuple[Array, Array]:
    """``out`` and ``lse`` of all keys, from those of two parts: ``lse = ln(e^lse1 + e^lse2)`` and
    ``out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2``, with weights that sum to 1.

    A part with lse -inf saw no key, and its out does not count. Shapes: (batch, seqlen_q, nheads, head_dim_v) and
    (batch, nheads, seqlen_q), and "bhsd" swaps axes 1 and 2 of out; or (total_q, nheads, head_dim_v) and
    (nheads, total_q).
    """
    s = steps(precision, out1.dtype)
    logs = [
        s.load(lse if layout == "bhsd" and lse.ndim == 3 else lse.swapaxes(-1, -2)) for lse in (lse1, lse2)
    ]
    top = np.maximum(*logs)
    with np.errstate(invalid="ignore"):  # inf - inf, and NaN
        shares = [s.step(np.where(lse == top, 1.0, np.exp(lse - top))) for lse in logs]
        total = shares[0] + shares[1]
        lse = top + np.log(total)
        out = np.zeros(out1.shape)
        for log, share, part in zip(logs, shares, (out1, out2), strict=True):
            weight, seen = s.step(share / total)[..., None], log[..., None] != -np.inf
            out = s.step(out + s.step(np.where(seen, weight * s.load(part), 0.0)))
    merged = lse if layout == "bhsd" and lse.ndim == 3 else lse.swapaxes(-1, -2)
    return s.store(out), s.store(merged, np.result_type(lse1, lse2))
