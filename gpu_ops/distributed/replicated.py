"""Interface of :class:`TensorParallel` for a model whose weights are all on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.single import SingleProcess
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Block, Llama

__all__ = ["ReplicatedWeights"]


class ReplicatedWeights:
    """Model whose weights are not divided."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = self.whole = config
        self.comm: Comm = SingleProcess("tp")
        self._shapes = config.shapes()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def room(self) -> dict[str, int]:
        return {name: math.prod(shape) for name, shape in self._shapes.items()}

    def pieces(self, name: str, rank: int | None = None) -> tuple[int, tuple[slice, ...]]:
        return 0, ()

    def model(self, weights: Mapping[str, Any]) -> Llama:
        return Llama.of(weights, self.config)

    def part(self, plain: Block | Llama) -> Block | Llama:
        return plain

    def states_shape(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*ids, self.config.hidden)

    def sum_shared_grads(self, grads: Mapping[str, Any]) -> None:
        """Do nothing: there are no shared gradients."""

    def holds(self, name: str) -> list[tuple[slice, float]]:
        return [(slice(0, math.prod(self._shapes[name])), 1.0)]
