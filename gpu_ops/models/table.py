"""Embedding tables and output layers: arrays (vocab, hidden), or a :class:`Table` that several processes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gpu_ops.ops.gemm.linear import linear
from gpu_ops.ops.loss.linear_cross_entropy import linear_cross_entropy
from gpu_ops.ops.rows.embedding import embedding, embedding_backward

__all__ = ["Table", "embed", "embed_backward", "head_logits", "head_loss"]


class Table(ABC):
    """Base class of tables with their own methods, which the functions of this module call."""

    divides_tokens: bool
    """Whether ``embed`` returns only some of the tokens."""

    @abstractmethod
    def embed(self, ids: Any, *, scale: float = 1.0) -> Any: ...

    @abstractmethod
    def embed_backward(self, dx: Any, ids: Any, *, dweight: Any, scale: float = 1.0) -> None: ...

    @abstractmethod
    def logits(self, h: Any) -> Any: ...

    @abstractmethod
    def loss(self, h: Any, targets: Any, **options: Any) -> Any: ...


def embed(ids: Any, table: Any, *, scale: float = 1.0) -> Any:
    """:func:`gpu_ops.embedding` of a table."""
    return table.embed(ids, scale=scale) if isinstance(table, Table) else embedding(ids, table, scale=scale)


def embed_backward(dx: Any, ids: Any, table: Any, *, dweight: Any, scale: float = 1.0) -> None:
    """:func:`gpu_ops.embedding_backward`, added to ``dweight``."""
    if isinstance(table, Table):
        table.embed_backward(dx, ids, dweight=dweight, scale=scale)
    else:
        embedding_backward(dx, ids, table.shape[0], dweight=dweight, scale=scale)


def head_logits(h: Any, table: Any) -> Any:
    """Logits (..., vocab)."""
    return table.logits(h) if isinstance(table, Table) else linear(h, table)


def head_loss(h: Any, table: Any, targets: Any, **options: Any) -> Any:
    """:func:`gpu_ops.linear_cross_entropy` of an output layer."""
    if isinstance(table, Table):
        return table.loss(h, targets, **options)
    return linear_cross_entropy(h, table, targets, **options)
