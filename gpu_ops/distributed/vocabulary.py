"""Embedding table and output layer of which each rank holds some rows, and the cross-entropy of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.call import Call
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.stream import Stream
from gpu_ops.errors import ShapeError
from gpu_ops.models.weights import Table
from gpu_ops.ops.gemm.linear import linear, linear_backward
from gpu_ops.ops.indices import check_indices, read_indices
from gpu_ops.ops.loss.cross_entropy import LossOptions
from gpu_ops.ops.rows.embedding import embedding, embedding_backward

__all__ = ["VocabularyRows", "rows_of_rank"]

Array = npt.NDArray[Any]

_LOSS = "VocabularyRows.loss"
_DEFAULTS: dict[str, Any] = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": 0.0,
    "class_weight": None,
    "reduction": "mean",
    "denominator": None,
}
# size of a chunk's logits, and its minimum rows, as in linear_cross_entropy
_CHUNK_BYTES, _CHUNK_ROWS = (
    16 << 20,
    64,
)


def rows_of_rank(vocab: int, comm: Comm, rank: int) -> slice:
    """Rows that a rank holds: equal numbers, or one more on some ranks."""
    return slice(vocab * rank // comm.size, vocab * (rank + 1) // comm.size)


class VocabularyRows(Table):
    """Table (vocab, hidden) of which each rank holds a run of rows.

    In :class:`gpu_ops.models.Llama` it replaces ``embed`` and ``lm_head``.

    Parameters
    ----------
    comm : Comm
        p ranks.
    part : array (rows, hidden)
        Rows ``vocab * rank // p`` to ``vocab * (rank + 1) // p``, in host memory.
    vocab : int
        Number of rows of the whole table, at least p.
    sequence_parallel : bool
        Divide the residual stream: each rank has an equal run of the tokens.

    Notes
    -----
    For N bytes of hidden states, an embedding sends 2 N (p - 1) / p, and the gradient of a loss sends the same. The
    loss sends 6 (p - 1) / p numbers per token, float32 (float64 for float64): a maximum, a sum of exponentials and
    the target's logit, each over all ranks. Label smoothing adds a sum.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed
    >>> table = distributed.VocabularyRows(distributed.world(), np.log([[1.0], [3.0], [4.0]]), 3)
    >>> table.embed(np.array([2, 0])).round(4)
    array([[1.3863],
           [0.    ]])
    >>> loss, dh = table.loss(np.ones((1, 1)), np.array([1]), grads=True, only="dx")
    >>> round(float(loss), 4)  # log(8 / 3)
    0.9808
    """

    def __init__(self, comm: Comm, part: Any, vocab: int, *, sequence_parallel: bool = False) -> None:
        op = "VocabularyRows"
        checks.instance(op, "comm", comm, Comm)
        self.vocab = checks.integer(op, "vocab", vocab, low=comm.size)
        self.divides_tokens = checks.flag(op, "sequence_parallel", sequence_parallel)
        self.stream, self.rows = Stream(comm, sequence_parallel), rows_of_rank(vocab, comm, comm.rank)
        self.part = comm.movable(op, part)[0]
        if self.part.ndim != 2 or len(self.part) != self.rows.stop - self.rows.start:
            raise ShapeError(
                f"{op}: part has shape {self.part.shape}, expected ({self.rows.stop - self.rows.start}, hidden): "
                f"rows {self.rows.start} to {self.rows.stop} of {vocab}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.part.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weight."""
        return self.part.dtype

    def embed(self, ids: Any, *, scale: float = 1.0) -> Any:
        """Embed ids by the whole table, with the bits of :func:`gpu_ops.embedding`."""
        owned, here = self._own(ids)
        x = embedding(here, self.part, scale=scale)
        x[~owned] = 0
        return self.stream.summed(x)

    def embed_backward(self, dx: Any, ids: Any, *, dweight: Any, scale: float = 1.0) -> None:
        """Add the gradient of this rank's rows to ``dweight``."""
        owned, here = self._own(ids)
        dx = self.stream.whole(self.stream.comm.movable("embed_backward", dx, "dx")[0])
        if dx.shape != (*owned.shape, self.part.shape[-1]):
            expected = (*owned.shape, self.part.shape[-1])
            raise ShapeError(f"embed_backward: dx has shape {dx.shape}, expected {expected}: one row per id")
        embedding_backward(dx[owned], here[owned], len(self.part), scale=scale, dweight=dweight)

    def logits(self, h: Any) -> Any:
        """Compute all logits (..., vocab), on every rank."""
        comm = self.stream.comm
        local = linear(self.stream.whole(h), self.part)
        widest = -(-self.vocab // comm.size)
        padded = np.zeros((1, *local.shape[:-1], widest), local.dtype)
        padded[0, ..., : local.shape[-1]] = local
        parts = zip(
            comm.all_gather(padded),
            (rows_of_rank(self.vocab, comm, r) for r in range(comm.size)),
            strict=True,
        )
        return np.concatenate([part[..., : rows.stop - rows.start] for part, rows in parts], axis=-1)

    def loss(
        self,
        h: Any,
        targets: Any,
        *,
        chunk: int = 0,
        grads: bool = False,
        only: str | None = None,
        dloss: Any = 1.0,
        dweight: Any = None,
        **options: Any,
    ) -> Any:
        """Loss of :func:`gpu_ops.linear_cross_entropy` for the whole table, with its options.

        Returns
        -------
        loss : array () or like targets, the same on every rank
        dh : array like h, only with ``grads``
        dweight : array like the part, only with ``grads``, not with ``only="dx"``
        """
        h = self.stream.whole(h)
        op = _Loss.read(self, h, targets, options)
        x = h.reshape(-1, h.shape[-1])
        adds = checks.flag(_LOSS, "grads", grads) and only is None
        if only is not None:
            checks.one_of(_LOSS, "only", only, ("dx",))
        if adds and dweight is None:
            dweight = np.zeros(self.part.shape, op.wide)
        checks.scalar(_LOSS, "dloss", dloss, op.wide.name)
        each = np.asarray(dloss, op.wide)
        checks.exactly(
            _LOSS, "dloss", each, h.shape[:-1] if op.given.reduction == "none" and each.ndim else ()
        )
        each = np.broadcast_to(each.reshape(-1) * op.factor, op.targets.shape)
        losses, dx = np.empty(len(x), op.wide), np.empty(x.shape, x.dtype) if grads else None
        weight = self.part.astype(op.wide, copy=False)
        step = checks.integer(_LOSS, "chunk", chunk, low=0)
        if not step:  # the same on every rank
            row_bytes = -(-self.vocab // self.stream.comm.size) * op.wide.itemsize
            step = max(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes)
        for rows in (slice(start, start + step) for start in range(0, len(x), step)):
            losses[rows], dz = op.of_rows(linear(x[rows].astype(op.wide, copy=False), weight), rows, each)
            if dx is None:
                continue
            dz = dz.astype(x.dtype, copy=False)
            if adds:
                dx[rows] = linear_backward(dz, x[rows], self.part, dweight=dweight)[0]
            else:
                dx[rows] = linear_backward(dz, x[rows], self.part, only="dx")
        value = losses.reshape(h.shape[:-1])
        if op.given.reduction != "none":
            value = np.asarray(np.sum(losses, dtype=np.float64) * op.factor, op.wide)
        if dx is None:
            return value
        results = value, self.stream.summed(dx.reshape(h.shape))
        return (*results, dweight) if adds else results

    def _own(self, ids: Any) -> tuple[Array, Array]:
        """Mask of the rows that this rank has, and their indices in its part; 0 for the others."""
        view = read_indices(Call("VocabularyRows.embed"), "ids", self.stream.comm.movable("embed", ids)[0])
        check_indices("VocabularyRows.embed", "ids", self.vocab)({"ids": view}, "")
        owned = (view >= self.rows.start) & (view < self.rows.stop)
        return owned, np.where(owned, view - self.rows.start, 0).astype(view.dtype)


@dataclass(frozen=True)
class _Loss:
    """Cross-entropy of logits of which this rank has some columns. Symbols as in :func:`gpu_ops.cross_entropy`."""

    comm: Comm
    columns: slice
    wide: np.dtype[Any]
    given: LossOptions
    targets: Array
    kept: Array
    w: Any
    """Weights of this rank's classes."""
    w_y: Array
    w_sum: float
    others: float
    """label_smoothing / vocab"""
    factor: float
    """Factor of the sum of the rows' losses."""

    @classmethod
    def read(cls, table: VocabularyRows, h: Any, targets: Any, options: dict[str, Any]) -> _Loss:
        for name in options:
            checks.one_of(_LOSS, "option", name, _DEFAULTS)
        call, loss_options = Call(_LOSS), LossOptions(**(_DEFAULTS | options))
        sum_dtype, vocab = checks.computing_dtype(call.read("x", h).dtype.name), table.vocab
        loss_options.read(call, targets, h.shape[:-1], vocab, "x")
        check_values = loss_options.check_values(call, vocab, "x")
        if check_values is not None:
            check_values(dict(call.views), "")
        flat = call.views["targets"].reshape(-1)
        kept, weight = flat != loss_options.ignore_index, call.views.get("class_weight")
        w: Any = 1.0
        w_y, w_sum = np.ones(len(flat), sum_dtype), float(vocab)
        if weight is not None:
            w, w_y, w_sum = (
                weight[table.rows],
                weight[np.where(kept, flat, 0)],
                float(np.sum(weight, dtype="f8")),
            )
        factor = 1.0
        if loss_options.reduction == "mean":
            count = call.views.get("denominator", loss_options.denominator)
            count = np.sum(w_y[kept], dtype=np.float64) if count is None else count
            factor = 1.0 / float(count) if count else 0.0
        rows = flat, kept, w, w_y, w_sum, float(loss_options.label_smoothing) / vocab, factor
        return cls(table.stream.comm, table.rows, sum_dtype, loss_options, *rows)

    def of_rows(self, z: Array, rows: slice, dloss: Array) -> tuple[Array, Array]:
        """Losses of these rows, and the gradient of ``z``, their logits for this rank's classes."""
        targets, kept, w, w_y = self.targets[rows], self.kept[rows], self.w, self.w_y[rows]
        here = np.flatnonzero(kept & (targets >= self.columns.start) & (targets < self.columns.stop))
        at = targets[here] - self.columns.start
        target_share, others = 1 - float(self.given.label_smoothing), self.others
        z_loss, softcap = float(self.given.z_loss), float(self.given.softcap)
        slope: Any = 1.0
        if softcap:
            t = np.tanh(z / softcap)
            z, slope = softcap * t, 1 - t * t
        with np.errstate(all="ignore"):  # -inf and NaN as in cross_entropy
            top = self.comm.all_reduce(z.max(axis=-1), "max")
            base = np.where(top == -np.inf, 0, top)[:, None]
            p = np.exp(z - base)
            sums = np.zeros((3 if others else 2, len(z)), self.wide)
            sums[0] = p.sum(axis=-1)
            sums[1, here] = z[here, at] - top[here]
            if others:
                sums[2] = (w * (base - z)).sum(axis=-1)
            sums = self.comm.all_reduce(sums)
            log_sum = np.log(sums[0])
            lse = top + log_sum
            # differences first: a loss near 0 keeps its digits, as does one of large logits
            loss = target_share * w_y * (log_sum - sums[1]) + z_loss * lse * lse
            if others:
                loss += others * (sums[2] + self.w_sum * log_sum)
            p *= ((target_share * w_y + others * self.w_sum + 2 * z_loss * lse) / sums[0])[:, None]
            p -= others * w
            p[here, at] -= target_share * w_y[here]
            p *= slope * dloss[rows][:, None]
        p[~kept] = 0
        return np.where(kept, loss, 0), p
