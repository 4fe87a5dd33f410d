"""Attention in NumPy: the definition of correct for the forward pass.

It computes the whole ``(seqlen_q, seqlen_k)`` score matrix, as the formula does. The backward pass is in
``backward.py``; masks and the shared mathematics are in ``core.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.reference.attention.backward import attention_backward, attention_varlen_backward
from gpu_ops.reference.attention.core import (
    DenseOptions,
    Options,
    WeightOptions,
    repeat_heads,
    sequences,
    softmax_rows,
    to_bhsd,
    weigh_values,
)
from gpu_ops.reference.attention.quantized_pages import dequantize
from gpu_ops.reference.options import takes
from gpu_ops.reference.precision import Array, Precision, Steps, steps

__all__ = [
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "attention_varlen_backward",
]


@takes(DenseOptions)
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "bshd",
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """``softmax(s) v``, with the scores ``s`` of ``softmax_scale * q k^T`` and the options.

    Parameters
    ----------
    q : (batch, seqlen_q, nheads, head_dim)
    k : (batch, seqlen_k, nheads_kv, head_dim)
    v : (batch, seqlen_k, nheads_kv, head_dim_v)
        With ``layout="bhsd"`` axes 1 and 2 are swapped, in the output too.
    options : the fields of :class:`DenseOptions`, which describes them; :func:`softmax_rows` has the formula
    return_lse : also return the natural log of each row's softmax denominator.
    out_dtype, lse_dtype : dtypes of the results, if not those below

    Returns
    -------
    out : (batch, seqlen_q, nheads, head_dim_v), dtype of ``q``
    lse : (batch, nheads, seqlen_q), float32 (float64 for float64 inputs), only with ``return_lse``

    A query that sees no key gets ``out`` 0 and ``lse`` -inf (with sinks: the sink's logit).

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops.reference.attention.forward import attention
    >>> q = k = np.zeros((1, 2, 1, 4), np.float32)
    >>> v = np.array([2.0, 4.0], np.float32).reshape(1, 2, 1, 1)
    >>> attention(q, k, v, causal=True).ravel()  # the first query sees one key, the second both
    array([2., 3.], dtype=float32)
    """
    parsed = DenseOptions(**options)
    s = steps(precision, q.dtype)
    out, lse = _forward(q, k, v, parsed, s, layout)
    out = s.store(out, out_dtype)
    return (out, s.store(lse, lse_dtype or np.float32)) if return_lse else out


@dataclass(frozen=True)
class VarlenOptions(WeightOptions):
    """Options of packed sequences: also where their keys and values are."""

    block_table: Array | None = None
    """(batch, max_pages): ``k`` and ``v`` are pages as in :func:`attention_decode`, without ``cu_seqlens_k``."""
    seqused_k: Array | None = None
    """(batch,) keys in use per sequence, its first ones; the rest is never read."""
    k_scale: Array | None = None
    """(num_pages, page_size, nheads_kv) of pages in one byte per element: ``quantized_pages.py``."""
    v_scale: Array | None = None
    max_seqlen_q: int | None = None
    """Longest sequence, which sizes the grids of kernels. It does not change the result."""
    max_seqlen_k: int | None = None


@takes(VarlenOptions)
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Attention within each of several sequences packed end to end.

    Parameters
    ----------
    q : (total_q, nheads, head_dim)
    k : (total_k, nheads_kv, head_dim)
    v : (total_k, nheads_kv, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,)
        Sequence ``b`` is ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``, and likewise for keys and values.
    options : the fields of :class:`VarlenOptions`

    Returns
    -------
    out : (total_q, nheads, head_dim_v)
    lse : (nheads, total_q), only with ``return_lse``
    """
    parsed = VarlenOptions(**options)
    block_table, seqused_k = parsed.block_table, parsed.seqused_k
    s = steps(precision, q.dtype)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.full(q.shape[1::-1], -np.inf)
    paged = block_table is not None
    starts_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k  # of pages, not used
    for b, rows, keys in sequences(cu_seqlens_q, starts_k):
        seqlen = keys.stop - keys.start if seqused_k is None else int(seqused_k[b])
        if paged:
            k_b, v_b = (
                _used(x, b, seqlen, block_table, x_scale)
                for x, x_scale in ((k, parsed.k_scale), (v, parsed.v_scale))
            )
        else:
            k_b, v_b = (x[keys][:seqlen] for x in (k, v))
        result = _forward(q[None, rows], k_b[None], v_b[None], parsed.of_sequence(b), s, sequence=b)
        out[rows], lse[:, rows] = result[0][0], result[1][0]
    out = s.store(out, out_dtype)
    return (out, s.store(lse, lse_dtype or np.float32)) if return_lse else out


@takes(Options)
def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seqused_k: Array,
    block_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    precision: Precision = "rounded",
    **options: Any,
) -> Any:
    """Attention of a few new queries over the used part of a key/value cache.

    Parameters
    ----------
    q : (batch, seqlen_q, nheads, head_dim)
    k_cache, v_cache : (batch, max_seqlen, nheads_kv, head_dim), or with ``block_table`` pages
        (num_pages, page_size, nheads_kv, head_dim). Values may have a different head_dim_v.
    seqused_k : (batch,) keys in use per sequence; the rest is never read.
    block_table : (batch, max_pages) pages of each sequence, in order. Entries past the last used page are ignored.
    k_scale, v_scale : as in :func:`attention_varlen`

    options : the fields of :class:`Options`, with ``seqlen_k = seqused_k[b]``: causal aligns the last query with the
        last used key

    Returns
    -------
    out : (batch, seqlen_q, nheads, head_dim_v)
    lse : (batch, nheads, seqlen_q), only with ``return_lse``
    """
    parsed = Options(**options)
    s = steps(precision, q.dtype)
    batch, seqlen_q, nheads, _ = q.shape
    out = np.zeros((batch, seqlen_q, nheads, v_cache.shape[3]))
    lse = np.full((batch, nheads, seqlen_q), -np.inf)
    for b in range(batch):
        k, v = (
            _used(cache, b, int(seqused_k[b]), block_table, scale)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        result = _forward(q[b, None], k[None], v[None], parsed.of_sequence(b), s)
        out[b], lse[b] = result[0][0], result[1][0]
    out = s.store(out, out_dtype)
    return (out, s.store(lse, lse_dtype or np.float32)) if return_lse else out


def _forward(
    q: Array, k: Array, v: Array, options: Options, s: Steps, layout: str = "bshd", sequence: int = 0
) -> tuple[Array, Array]:
    """``out`` and ``lse`` in float64, before the last rounding."""
    q, k, v = (to_bhsd(x, layout) for x in (q, k, v))
    nheads = q.shape[1]
    with np.errstate(all="ignore"):  # log(0), and NaN or overflow in the inputs, are valid here
        rows = softmax_rows(s.load(q), s.load(repeat_heads(k, nheads)), options, s, sequence)
        out = weigh_values(rows, s.load(repeat_heads(v, nheads)), s)
    return to_bhsd(s.step(out), layout), rows.lse


def _used(cache: Array, b: int, seqlen: int, block_table: Array | None, scale: Array | None) -> Array:
    """The used keys (or values) of sequence ``b``: (seqlen, nheads_kv, head_dim)."""
    if block_table is None:
        return cache[b, :seqlen]
    pages = block_table[b, : -(-seqlen // max(cache.shape[1], 1))]
    rows = cache[pages] if scale is None else dequantize(cache[pages], scale[pages])
    return rows.reshape(-1, *cache.shape[2:])[:seqlen]
