"""Residual stream of a model whose weights are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_ops.distributed.comm import Comm

__all__ = ["Stream"]

_TOKENS = -2  # axis of (batch, seqlen, hidden) and (tokens, hidden)


@dataclass(frozen=True)
class Stream:
    """Residual stream: each rank holds all tokens or, if ``divided``, an equal run of them (sequence parallelism)."""

    comm: Comm
    divided: bool = False

    def whole(self, x: Any) -> Any:
        """Gather all tokens of the stream."""
        return self.comm.all_gather(x, _TOKENS) if self.divided else x

    def summed(self, x: Any) -> Any:
        """Sum all ranks' ``x``, each over all tokens; divided like the stream."""
        return self.comm.reduce_scatter(x, _TOKENS) if self.divided else self.comm.all_reduce(x)
