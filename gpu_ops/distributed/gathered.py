"""Attention over packed documents divided among ranks: every rank gathers the keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import give
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.sequence import (
    ContextOptions,
    Shards,
    by_distance,
    read_results,
    read_shards,
    selected_slopes,
)
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.ops.attention.varlen import attention_varlen, attention_varlen_backward

__all__ = ["gathered_attention_varlen", "gathered_attention_varlen_backward"]

Array = npt.NDArray[Any]


def gathered_attention_varlen(
    comm: Comm,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    *,
    return_lse: bool = False,
    **options: Unpack[ContextOptions],
) -> Any:
    """Attention over packed documents of which each rank holds an equal run of tokens.

    The result is that of :func:`gpu_ops.attention_varlen`. Documents may begin and end anywhere. Each rank gathers
    all keys and values, and attends with its own queries.

    Parameters
    ----------
    comm : Comm
        p ranks; all of them make the call.
    q : array (total / p, nheads, head_dim)
        Tokens from rank * total / p on. float16, bfloat16, float32 or float64, in host memory.
    k : array (total / p, nheads_kv, head_dim)
    v : array (total / p, nheads_kv, head_dim_v)
    cu_seqlens : int32 array (documents + 1,)
        Document d is tokens ``cu_seqlens[d]`` to ``cu_seqlens[d + 1]`` of all ranks' tokens; equal on all ranks.
    return_lse : bool
        Also return the log of the softmax denominator, for :func:`gathered_attention_varlen_backward`.
    causal, window_size, softmax_scale, softcap, alibi_slopes
        As in :func:`gpu_ops.attention_varlen`. A window or ALiBi requires causal=True.

    Returns
    -------
    out : array (total / p, nheads, head_dim_v)
    lse : array (nheads, total / p), float32 (float64 for float64), only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is sent.

    Notes
    -----
    Sends k and v (p - 1) times, and holds k and v of all tokens. Source: Llama 3, section 3.3.2, 2024.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8))
    >>> cu = np.array([0, 3, 10], np.int32)
    >>> out = distributed.gathered_attention_varlen(distributed.world(), q, k, v, cu, causal=True)
    >>> np.allclose(out, gpu_ops.attention_varlen(q, k, v, cu, cu, causal=True))
    True
    """
    op = "gathered_attention_varlen"
    return_lse = checks.flag(op, "return_lse", return_lse)
    shards, spans = _read(op, comm, (q, k, v), cu_seqlens, options)
    shards.begin(op, comm, options)
    keys, values = (comm.all_gather(x)[spans.keys] for x in (shards.k, shards.v))
    lengths = spans.cu_seqlens_q, spans.cu_seqlens_k
    results = attention_varlen(shards.q, keys, values, *lengths, return_lse=True, **spans.options)
    out, lse = (give(x, shards.library) for x in results)
    return (out, lse) if return_lse else out


def gathered_attention_varlen_backward(
    comm: Comm,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens: Any,
    **options: Unpack[ContextOptions],
) -> tuple[Any, Any, Any]:
    """Gradients of :func:`gathered_attention_varlen` with respect to this rank's q, k and v.

    Parameters
    ----------
    comm, q, k, v, cu_seqlens, and every option
        As passed to :func:`gathered_attention_varlen`.
    dout : array like out, q's dtype or float32
    out, lse : arrays
        As returned by ``gathered_attention_varlen(..., return_lse=True)``.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is sent.

    Notes
    -----
    Gathers k and v again. The gradients of keys and values are summed over ranks in float32, in rank order; for N
    bytes of gradients a rank sends N (p - 1) / p.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed
    >>> comm, cu = distributed.world(), np.array([0, 3, 10], np.int32)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8))
    >>> out, lse = distributed.gathered_attention_varlen(comm, q, k, v, cu, return_lse=True)
    >>> grads = distributed.gathered_attention_varlen_backward(comm, np.ones_like(out), q, k, v, out, lse, cu)
    >>> round(float(grads[2][..., 0, 0].sum()), 6)  # each of the 10 queries hands out a weight of 1
    10.0
    """
    op = "gathered_attention_varlen_backward"
    shards, spans = _read(op, comm, (q, k, v), cu_seqlens, options)
    lse_shape = shards.q.shape[1], shards.q.shape[0]
    dout, out, lse = read_results(op, comm, shards, (dout, out, lse), lse_shape, shards.wide)
    shards.begin(op, comm, options)
    keys, values = (comm.all_gather(x) for x in (shards.k, shards.v))
    dq, dk, dv = (np.zeros(x.shape, shards.wide) for x in (shards.q, keys, values))
    attention_varlen_backward(
        *(dout, shards.q, keys[spans.keys], values[spans.keys], out, lse),
        *(spans.cu_seqlens_q, spans.cu_seqlens_k),
        grads=(dq, dk[spans.keys], dv[spans.keys]),
        **spans.options,
    )
    return shards.grads(dq, comm.reduce_scatter(dk), comm.reduce_scatter(dv))


@dataclass(frozen=True)
class _Spans:
    """Keys that a rank's queries see: ``keys`` selects them of all tokens; document offsets for queries and keys.

    ``options`` has the ALiBi slopes of these documents.
    """

    keys: slice
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    options: dict[str, Any]


def _read(
    op: str, comm: Comm, arrays: tuple[Any, Any, Any], cu_seqlens: Any, options: ContextOptions
) -> tuple[Shards, _Spans]:
    """Check all arguments except results."""
    checks.instance(op, "comm", comm, Comm)
    starts = comm.movable(op, cu_seqlens, "cu_seqlens")[0]
    if starts.dtype != np.int32 or starts.ndim != 1 or not starts.size:
        raise ShapeError(
            f"{op}: cu_seqlens is {starts.dtype} {starts.shape}, expected int32 (documents + 1,)"
        )
    shards = read_shards(op, comm, arrays, options, documents=starts.size - 1)
    length = shards.q.shape[0]
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] != length * comm.size:
        raise ShapeError(
            f"{op}: cu_seqlens must start at 0, never fall and end at {length * comm.size}, the tokens of all ranks"
        )
    if by_distance(options) and not options.get("causal", False):
        raise OptionError(f"{op}: window_size and alibi_slopes want causal=True here")
    return shards, _spans(op, comm, starts, length, options)


def _spans(op: str, comm: Comm, starts: Array, length: int, options: ContextOptions) -> _Spans:
    """Spans of this rank's ``length`` queries.

    The keys of the first document begin before the queries. With a causal mask the keys end at the last query;
    without, the keys of the last document continue beyond it.
    """
    first = comm.rank * length
    begins, ends = (np.clip(x, first, first + length) for x in (starts[:-1], starts[1:]))
    live = begins < ends
    key_begins = starts[:-1][live]
    key_ends = ends[live] if options.get("causal", False) else starts[1:][live]
    local = selected_slopes(op, comm, options, lambda slopes: slopes[live] if slopes.ndim == 2 else slopes)
    keys = slice(int(key_begins[0]), int(key_ends[-1])) if live.any() else slice(0, 0)
    return _Spans(keys, _from_zero(ends[live] - begins[live]), _from_zero(key_ends - key_begins), local)


def _from_zero(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
