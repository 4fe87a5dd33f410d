"""Attention over a sequence divided among ranks: keys and values move around the ring, queries stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import cast, give
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.sequence import (
    ContextOptions,
    Piece,
    Shards,
    check_layout,
    pieces,
    read_results,
    read_shards,
)
from gpu_ops.distributed.transport import array_module
from gpu_ops.ops.attention.dense import attention, attention_backward
from gpu_ops.ops.attention.merge import attention_merge
from gpu_ops.ops.attention.options import visible_pairs

__all__ = ["ring_attention", "ring_attention_backward"]

Array = npt.NDArray[Any]


def ring_attention(
    comm: Comm,
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "zigzag",
    return_lse: bool = False,
    out_dtype: Any = None,
    **options: Unpack[ContextOptions],
) -> Any:
    """Attention over a sequence of which each rank holds an equal part.

    The result is that of :func:`gpu_ops.attention`. Each rank attends to the keys it holds, sends them to the next
    rank and receives those of the previous one, p - 1 times. The results over parts of the keys are merged in
    float32 (:func:`gpu_ops.attention_merge`).

    Parameters
    ----------
    comm : Comm
        p ranks; all of them make the call.
    q : array (batch, seqlen / p, nheads, head_dim)
        Rows at the positions of :func:`sequence_positions`. float16, bfloat16, float32 or float64, in host memory;
        or CuPy arrays, if the communicator takes them.
    k : array (batch, seqlen / p, nheads_kv, head_dim)
    v : array (batch, seqlen / p, nheads_kv, head_dim_v)
    layout : {"zigzag", "contiguous", "striped"}
        See :func:`sequence_positions`. striped takes neither window_size nor alibi_slopes.
    return_lse : bool
        Also return the log of the softmax denominator, in float64: :func:`ring_attention_backward` needs its digits.
    out_dtype : dtype, default q's
        np.float32 returns the merged sums without rounding.
    causal, window_size, softmax_scale, softcap, alibi_slopes
        As in :func:`gpu_ops.attention`, for the whole sequence; equal on all ranks.

    Returns
    -------
    out : array (batch, seqlen / p, nheads, head_dim_v)
    lse : float64 array (batch, nheads, seqlen / p), only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is sent.

    Notes
    -----
    Sends k and v (p - 1) times. They travel while the rank computes if MPI makes progress by itself (by a network
    card, or by a thread: MPICH_ASYNC_PROGRESS=1 if a core is free); otherwise between the blocks. Parts are merged
    in a fixed order: the same bits in every run. Source: Liu, Zaharia and Abbeel, "Ring Attention", 2023.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> from gpu_ops import distributed
    >>> comm = distributed.world()
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8))
    >>> mine = distributed.sequence_positions(comm, 64)
    >>> out = distributed.ring_attention(comm, q[:, mine], k[:, mine], v[:, mine], causal=True)
    >>> np.allclose(out, gpu_ops.attention(q, k, v, causal=True)[:, mine])
    True
    """
    op = "ring_attention"
    return_lse = checks.flag(op, "return_lse", return_lse)
    shards = read_shards(op, comm, (q, k, v), options)
    ring = _Ring(op, comm, shards, layout, options)
    dtype = checks.result_dtype(op, "out_dtype", out_dtype, shards.q.dtype, shards.wide)
    batch, length, nheads, _ = shards.q.shape
    module = array_module(shards.q)
    out = module.zeros((batch, length, nheads, shards.v.shape[-1]), shards.wide)
    lse = module.full((batch, nheads, length), -np.inf, np.float64)
    lse_options: dict[str, Any] = {"return_lse": True, "out_dtype": shards.wide, "lse_dtype": np.float64}
    keys, values = shards.k, shards.v
    for step in range(comm.size):
        moving = comm.shift(keys, values) if step + 1 < comm.size else None
        for rows, columns, places in ring.blocks((comm.rank - step) % comm.size):
            mine = out[:, rows], lse[:, :, rows]
            part = attention(shards.q[:, rows], keys[:, columns], values[:, columns], **lse_options, **places)
            attention_merge(*mine, *part, out=mine)
            if moving is not None:
                moving.poll()
        if moving is not None:
            keys, values = moving.wait()
    result = give(cast(out, dtype), shards.library)
    return (result, give(lse, shards.library)) if return_lse else result


def ring_attention_backward(
    comm: Comm,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    layout: str = "zigzag",
    **options: Unpack[ContextOptions],
) -> tuple[Any, Any, Any]:
    """Gradients of :func:`ring_attention` with respect to this rank's q, k and v.

    Keys and values go around the ring once more. The sums of their gradients travel with them in float32, for p
    hops; the last hop returns them to their rank.

    Parameters
    ----------
    comm, q, k, v, layout, and every option
        As passed to :func:`ring_attention`.
    dout : array like out, q's dtype or float32
    out, lse : arrays
        As returned by ``ring_attention(..., return_lse=True)``; out in q's dtype or float32.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is sent.

    Notes
    -----
    Sends k and v (p - 1) times, and their gradients in float32 (float64 for float64) p times. With lse in float64
    it is exact however large the scores are.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed
    >>> comm = distributed.world()
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> out, lse = distributed.ring_attention(comm, q, k, v, return_lse=True)
    >>> dq, dk, dv = distributed.ring_attention_backward(comm, np.ones_like(out), q, k, v, out, lse)
    >>> round(float(dv[..., 0, 0].sum()), 6)  # each of the 16 queries hands out a weight of 1
    16.0
    """
    op = "ring_attention_backward"
    shards = read_shards(op, comm, (q, k, v), options)
    batch, length, nheads, _ = shards.q.shape
    lse_shape = batch, nheads, length
    dout, out, lse = read_results(op, comm, shards, (dout, out, lse), lse_shape, np.dtype(np.float64))
    module = array_module(shards.q)
    dout = cast(dout, shards.q.dtype)
    products = cast(dout, shards.wide) * cast(out, shards.wide)
    delta = module.ascontiguousarray(products.sum(axis=-1).transpose((0, 2, 1)))
    ring = _Ring(op, comm, shards, layout, options)
    to_q: Array = module.zeros(shards.q.shape, shards.wide)
    keys, values = shards.k, shards.v
    sums = None
    for step in range(comm.size):
        moving = comm.shift(keys, values) if step + 1 < comm.size else None
        parts = [module.zeros(x.shape, shards.wide) for x in (keys, values)]
        for rows, columns, places in ring.blocks((comm.rank - step) % comm.size):
            attention_backward(
                *(dout[:, rows], shards.q[:, rows], keys[:, columns], values[:, columns]),
                *(None, lse[:, :, rows]),
                delta=delta[:, :, rows],
                grads=(to_q[:, rows], *(part[:, columns] for part in parts)),
                accumulate=True,
                **places,
            )
            for transfer in (moving, sums):
                if transfer is not None:
                    transfer.poll()
        if sums is not None:  # of the ranks that had these keys before
            for part, before in zip(parts, sums.wait(), strict=True):
                part += before
        sums = comm.shift(*parts)
        if moving is not None:
            keys, values = moving.wait()
    assert sums is not None
    return shards.grads(to_q, *sums.wait())


class _Ring:
    """Blocks of one call."""

    def __init__(self, op: str, comm: Comm, shards: Shards, layout: str, options: Mapping[str, Any]) -> None:
        length = shards.q.shape[1]
        self.layout, self.options = check_layout(op, layout, options, length), options
        self.size, self.length = comm.size, length
        self.rows = pieces(comm.rank, comm.size, length, self.layout)
        shards.begin(op, comm, options, f"layout={self.layout!r}")

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """Rows of this rank, rows of the keys of ``source`` that they see, and options of the attention call."""
        for mine in self.rows:
            for theirs in pieces(source, self.size, self.length, self.layout):
                places = {**self.options, **self._starts(mine, theirs)}
                lengths = [piece.rows.stop - piece.rows.start for piece in (mine, theirs)]
                if visible_pairs((lengths[0], lengths[1]), **places):
                    yield mine.rows, theirs.rows, places

    def _starts(self, mine: Piece, theirs: Piece) -> dict[str, int]:
        if self.layout != "striped":
            return {"q_start": mine.start, "k_start": theirs.start}
        # token i of rank r sees token j of rank s where j p + s <= i p + r: j <= i, and where s > r j < i
        return {"q_start": 0, "k_start": int(theirs.start > mine.start)}
