"""A training pass over a model, part by part: its embedding, its layers, its output.

:class:`Parts` returns the weights of a part when the pass reaches it. They may be gathered then and freed afterwards,
and their gradients may be sent to other processes while those of the previous part are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from gpu_ops.core.checks import instance
from gpu_ops.errors import OptionError
from gpu_ops.models.block import Saved, Sequences, block_backward, block_forward
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import times
from gpu_ops.models.offload import prefetch, release
from gpu_ops.models.table import embed, embed_backward, head_loss
from gpu_ops.models.weights import Block, Llama
from gpu_ops.ops.norm.rmsnorm import rmsnorm, rmsnorm_backward

__all__ = ["LocalParams", "Part", "Parts", "Pass", "last_norm", "names_of", "part_of", "parts_of"]

Part = int | Literal["embed", "head"]
"""Part of a model: the embedding, a layer by its number, or the last norm and the output layer."""


class Parts(ABC):
    """Weights and gradients of a model, part by part: a :class:`Block` for a layer, else a :class:`Llama` with at
    least the part's arrays."""

    @abstractmethod
    def forward(self, part: Part) -> AbstractContextManager[Any]:
        """Context with the part's weights, for a forward call."""

    @abstractmethod
    def backward(self, part: Part) -> AbstractContextManager[tuple[Any, Any]]:
        """Context with the part's weights and gradient arrays; the gradients have been added when it exits."""


class LocalParams(Parts):
    """Parts of a model whose arrays are all in this process."""

    def __init__(self, weights: Llama, grads: Llama) -> None:
        self._weights, self._grads = weights, grads

    @contextmanager
    def forward(self, part: Part) -> Iterator[Any]:
        yield _of(self._weights, part)

    @contextmanager
    def backward(self, part: Part) -> Iterator[tuple[Any, Any]]:
        yield _of(self._weights, part), _of(self._grads, part)


def _of(model: Llama, part: Part) -> Any:
    return model.layers[part] if isinstance(part, int) else model


def parts_of(config: LlamaConfig) -> tuple[Part, ...]:
    """All parts, in the order of the forward pass."""
    return ("embed", *range(config.nlayers), "head")


def names_of(config: LlamaConfig, part: Part) -> list[str]:
    """Names of the arrays of a part; a tied table belongs to the embedding."""
    if isinstance(part, int):
        return [f"layers.{part}.{name}" for name in config.block_shapes()]
    if part == "embed":
        return ["embed"]
    return ["norm"] if config.tied else ["norm", "lm_head"]


def part_of(arrays: Mapping[str, Any], config: LlamaConfig, part: Part) -> Block | Llama:
    """Make a part from arrays by name."""
    if isinstance(part, int):
        return Block(**{name: arrays[f"layers.{part}.{name}"] for name in config.block_shapes()})
    if part == "embed":
        return Llama(arrays["embed"], [], None, None)
    return Llama(None, [], arrays["norm"], arrays["embed" if config.tied else "lm_head"])


class Pass:
    """Pass of one batch over some parts of a model, forward and then backward.

    ``x`` is passed from part to part: hidden states, and in the backward their gradient.
    """

    def __init__(
        self,
        parts: Parts,
        config: LlamaConfig,
        *,
        policy: str | Sequence[str] = "none",
        sequences: Sequences | None = None,
    ) -> None:
        if sequences is not None:
            instance("loss_and_grads", "sequences", sequences, Sequences)
        self._parts, self._config, self._sequences = parts, config, sequences
        self._policies = [policy] * config.nlayers if isinstance(policy, str) else list(policy)
        if len(self._policies) != config.nlayers:
            raise OptionError(f"loss_and_grads: {len(self._policies)} policies for {config.nlayers} layers")
        self._saved: list[Saved] = []
        self.x: Any = None

    def run(self, ids: Any, targets: Any, *, dloss: Any, options: Mapping[str, Any]) -> Any:
        """Run all parts of a model that is entirely in this process; return the loss."""
        layers = range(self._config.nlayers)
        self.embed(ids)
        self.forward(layers)
        value = self.head(targets, dloss=dloss, options=options)
        self.backward(layers)
        self.embed_backward(ids)
        return value

    def embed(self, ids: Any) -> None:
        with self._parts.forward("embed") as weights:
            self.x = embed(ids, weights.embed, scale=self._config.embedding_factor(weights.embed.dtype))

    def forward(self, layers: range) -> None:
        for i in layers:
            self._layer(i)

    def head(self, targets: Any, *, dloss: Any, options: Mapping[str, Any]) -> Any:
        """Return the loss; its gradient replaces the hidden states."""
        config = self._config
        with self._parts.backward("head") as (weights, grads):
            h, rstd = last_norm(self.x, weights, config)
            grad_options: dict[str, Any] = (
                {"only": "dx"} if grads.lm_head is None else {"dweight": grads.lm_head}
            )
            loss_options = {"softcap": config.logits_softcap, **grad_options} | dict(options)
            value, dh, *_ = head_loss(h, weights.lm_head, targets, grads=True, dloss=dloss, **loss_options)
            del h
            dh = times(dh, 1 / config.logits_scaling)
            self.x, _ = rmsnorm_backward(
                dh, self.x, weights.norm, rstd, weight_offset=config.weight_offset, dweight=grads.norm
            )
        return value

    def backward(self, layers: range) -> None:
        for i in reversed(layers):
            self._layer_backward(i)

    def embed_backward(self, ids: Any) -> None:
        with self._parts.backward("embed") as (weights, grads):
            if grads.embed is not None:
                scale = self._config.embedding_factor(weights.embed.dtype)
                embed_backward(self.x, ids, weights.embed, scale=scale, dweight=grads.embed)

    def _layer(self, i: int) -> None:
        with self._parts.forward(i) as weights:
            layer_config, policy = self._config.by_layer[i], self._policies[i]
            self.x, saved = block_forward(
                self.x, weights, layer_config, policy=policy, sequences=self._sequences
            )
        if self._saved:
            release(self._saved[-1].x)  # one layer later, so that its copy overlaps a layer
        self._saved.append(saved)

    def _layer_backward(self, i: int) -> None:
        saved = self._saved.pop()
        if self._saved:
            prefetch(self._saved[-1].x)
        with self._parts.backward(i) as (weights, grads):
            layer_config, sequences = self._config.by_layer[i], self._sequences
            self.x = block_backward(self.x, weights, saved, layer_config, grads=grads, sequences=sequences)


def last_norm(x: Any, weights: Llama, config: LlamaConfig) -> tuple[Any, Any]:
    """Input of the output layer, and rstd."""
    h, rstd = rmsnorm(
        x, weights.norm, eps=config.stream_eps, weight_offset=config.weight_offset, return_rstd=True
    )
    return times(h, 1 / config.logits_scaling), rstd
