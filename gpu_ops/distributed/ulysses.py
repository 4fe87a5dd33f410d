"""Attention over a sequence divided among ranks: each rank takes some heads of the whole sequence."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import give
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.sequence import ContextOptions, option_words, read_shards, selected_slopes
from gpu_ops.errors import ShapeError
from gpu_ops.ops.attention.dense import attention, attention_backward

__all__ = ["UlyssesSaved", "ulysses_attention", "ulysses_attention_backward"]

Array = npt.NDArray[Any]

_HEADS, _TOKENS = 2, 1  # axes


class UlyssesSaved(NamedTuple):
    """Heads of the whole sequence on this rank, for the backward: (batch, seqlen, heads / p, head_dim), and lse."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


def ulysses_attention(
    comm: Comm,
    q: Any,
    k: Any,
    v: Any,
    *,
    return_saved: bool = False,
    **options: Unpack[ContextOptions],
) -> Any:
    """Attention over a sequence of which each rank holds an equal run of tokens.

    The result is that of :func:`gpu_ops.attention`. An all-to-all gives each rank nheads / p heads of the whole
    sequence, and another returns the results: the same kernel per head as on one rank, and the same bits.

    Parameters
    ----------
    comm : Comm
        p ranks, which divide nheads and nheads_kv evenly; all of them make the call.
    q : array (batch, seqlen / p, nheads, head_dim)
        Tokens from rank * seqlen / p on. float16, bfloat16, float32 or float64, in host memory.
    k : array (batch, seqlen / p, nheads_kv, head_dim)
    v : array (batch, seqlen / p, nheads_kv, head_dim_v)
    return_saved : bool
        Also return the arrays that :func:`ulysses_attention_backward` needs.
    causal, window_size, softmax_scale, softcap, alibi_slopes
        As in :func:`gpu_ops.attention`; pass slopes of all heads.

    Returns
    -------
    out : array (batch, seqlen / p, nheads, head_dim_v)
    saved : UlyssesSaved, only with ``return_saved``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is sent.

    Notes
    -----
    Sends (p - 1) / p of q, k, v and out. Source: Jacobs et al., "DeepSpeed Ulysses", 2023.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8))
    >>> out = distributed.ulysses_attention(distributed.world(), q, k, v, causal=True)
    >>> np.array_equal(out, gpu_ops.attention(q, k, v, causal=True))
    True
    """
    op = "ulysses_attention"
    return_saved = checks.flag(op, "return_saved", return_saved)
    shards = read_shards(op, comm, (q, k, v), options)
    for name, x in (("nheads", shards.q), ("nheads_kv", shards.k)):
        if x.shape[_HEADS] % comm.size:
            raise ShapeError(
                f"{op}: {name}={x.shape[_HEADS]} is not divided evenly by {comm.size} ranks; use ring_attention"
            )
    shards.begin(op, comm, options)
    of_q, of_k, of_v = (comm.all_to_all(x, _HEADS, _TOKENS) for x in (shards.q, shards.k, shards.v))
    out, lse = attention(of_q, of_k, of_v, return_lse=True, **_own_heads(op, comm, options))
    result = give(comm.all_to_all(out, _TOKENS, _HEADS), shards.library)
    return (result, UlyssesSaved(of_q, of_k, of_v, out, lse)) if return_saved else result


def ulysses_attention_backward(
    comm: Comm, dout: Any, saved: UlyssesSaved, **options: Unpack[ContextOptions]
) -> tuple[Any, Any, Any]:
    """Gradients of :func:`ulysses_attention` with respect to this rank's q, k and v, with the bits of one rank.

    Parameters
    ----------
    comm, and every option
        As passed to :func:`ulysses_attention`.
    dout : array like out, q's dtype or float32
    saved : UlyssesSaved
        As returned by ``ulysses_attention(..., return_saved=True)``.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError

    Notes
    -----
    Sends (p - 1) / p of dout, dq, dk and dv.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed
    >>> comm = distributed.world()
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> out, saved = distributed.ulysses_attention(comm, q, k, v, return_saved=True)
    >>> dq, dk, dv = distributed.ulysses_attention_backward(comm, np.ones_like(out), saved)
    >>> dk.shape
    (1, 16, 2, 8)
    """
    op = "ulysses_attention_backward"
    checks.instance(op, "saved", saved, UlyssesSaved)
    head_options = _own_heads(op, comm, options)
    read_shards(op, comm, saved[:3], head_options)
    view, library = comm.movable(op, dout, "dout")
    batch, seqlen, heads, _ = saved.q.shape
    expected = (batch, seqlen // comm.size, heads * comm.size, saved.out.shape[-1])
    sum_dtype = checks.computing_dtype(saved.q.dtype.name)
    checks.exactly(op, "dout", view, expected, sum_dtype if view.dtype == sum_dtype else saved.q.dtype)
    comm.begin(op, view, option_words(options))
    dout_heads = comm.all_to_all(view, _HEADS, _TOKENS)
    grads = attention_backward(dout_heads, *saved, **head_options)
    dq, dk, dv = (give(comm.all_to_all(x, _TOKENS, _HEADS), library) for x in grads)
    return dq, dk, dv


def _own_heads(op: str, comm: Comm, options: ContextOptions) -> dict[str, Any]:
    checks.instance(op, "comm", comm, Comm)

    def of_heads(slopes: Array) -> Array:
        each = slopes.shape[-1] // comm.size if slopes.ndim else 0
        return slopes[..., comm.rank * each : (comm.rank + 1) * each]

    return selected_slopes(op, comm, options, of_heads)
