"""A Llama as functions of its weights: hidden states, loss and gradients, with a hand-written backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any, Literal

from gpu_ops.core.checks import computing_dtype, instance, one_of
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.models.block import Saved, Sequences, block_backward, block_forward
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import softcapped, times
from gpu_ops.models.offload import prefetch, release
from gpu_ops.models.weights import Block, Llama, check_models, embed, embed_backward, head_logits, head_loss
from gpu_ops.ops.loss.cross_entropy import LossOptions
from gpu_ops.ops.norm.rmsnorm import rmsnorm, rmsnorm_backward

__all__ = [
    "LocalParams",
    "Part",
    "Parts",
    "Pass",
    "check_loss_options",
    "hidden_states",
    "last_norm",
    "logits",
    "loss",
    "loss_and_grads",
    "names_of",
    "part_of",
    "parts_of",
]


def hidden_states(
    ids: Any, weights: Llama, config: LlamaConfig, *, sequences: Sequences | None = None
) -> Any:
    """Input of the output layer, (..., hidden): the normalised states, divided by ``logits_scaling``. Nothing of the
    layers is kept."""
    check_models("hidden_states", config, weights=weights)
    x = embed(ids, weights.embed, scale=config.embedding_factor(weights.embed.dtype))
    for layer, layer_config in zip(weights.layers, config.by_layer, strict=True):
        x = block_forward(x, layer, layer_config, policy="layer", sequences=sequences)[0]
    return last_norm(x, weights, config)[0]


def logits(ids: Any, weights: Llama, config: LlamaConfig, *, sequences: Sequences | None = None) -> Any:
    """Logits (..., vocab), in the weights' dtype."""
    z = head_logits(hidden_states(ids, weights, config, sequences=sequences), weights.lm_head)
    return softcapped(z, config.logits_softcap)


def loss(
    ids: Any,
    targets: Any,
    weights: Llama,
    config: LlamaConfig,
    *,
    sequences: Sequences | None = None,
    **options: Any,
) -> Any:
    """Cross-entropy of the targets, float32 (float64 for float64). ``options``: those of
    :func:`gpu_ops.linear_cross_entropy`."""
    h = hidden_states(ids, weights, config, sequences=sequences)
    return head_loss(h, weights.lm_head, targets, **{"softcap": config.logits_softcap} | options)


def loss_and_grads(
    ids: Any,
    targets: Any,
    weights: Llama,
    config: LlamaConfig,
    *,
    grads: Llama,
    policy: str | Sequence[str] = "none",
    sequences: Sequences | None = None,
    dloss: Any = 1.0,
    **options: Any,
) -> Any:
    """Return the loss; the gradients of all weights are added to ``grads``.

    Parameters
    ----------
    ids, targets : int32 or int64 arrays (batch, seqlen), or (tokens,) with ``sequences.cu_seqlens``
    weights : Llama
    grads : Llama
        float32 (float64 for float64), zero before the first part of a batch. None in place of an array: that weight
        is frozen.
    policy : str, or one per layer
        Policy of what to keep between forward and backward: see :func:`gpu_ops.models.block_forward`.
    dloss : number or 0-d array
        Gradient of the loss, such as the scale of :class:`gpu_ops.training.GradScaler`.
    options
        Those of :func:`gpu_ops.linear_cross_entropy`: ``ignore_index``, ``label_smoothing``, ``denominator``, ...
        ``softcap`` is the model's if it is not given.

    Returns
    -------
    loss : 0-d array, float32 (float64 for float64)
    """
    _check(weights, grads, config, options)
    batch_pass = Pass(LocalParams(weights, grads), config, policy=policy, sequences=sequences)
    return batch_pass.run(ids, targets, dloss=dloss, options=options)


_LOSS_OPTIONS = (*(f.name for f in fields(LossOptions)), "chunk")


def check_loss_options(options: Mapping[str, Any]) -> None:
    for name in options:
        one_of("loss_and_grads", "option", name, _LOSS_OPTIONS)


def _check(weights: Llama, grads: Llama, config: LlamaConfig, options: Mapping[str, Any]) -> None:
    """Check everything that would otherwise raise after some gradients have been added."""
    check_loss_options(options)
    check_models("loss_and_grads", config, weights=weights, grads=grads)
    pairs = [(n, getattr(weights, n), getattr(grads, n)) for n in ("embed", "norm", "lm_head")]
    for i, (layer, grad) in enumerate(zip(weights.layers, grads.layers, strict=True)):
        pairs += [
            (f"layers[{i}].{f.name}", getattr(layer, f.name), getattr(grad, f.name)) for f in fields(layer)
        ]
    for name, weight, grad in pairs:
        if grad is None or not hasattr(weight, "dtype") or not hasattr(grad, "dtype"):
            continue
        expected = computing_dtype(str(weight.dtype))
        if tuple(grad.shape) != tuple(weight.shape):
            raise ShapeError(f"loss_and_grads: grads.{name} has shape {grad.shape}, expected {weight.shape}")
        if grad.dtype != expected:
            raise DTypeError(f"loss_and_grads: grads.{name} is {grad.dtype}, expected {expected}")


# A training pass over a model, part by part: its embedding, its layers, its output.
#
# :class:`Parts` returns the weights of a part when the pass reaches it. They may be gathered then and freed
# afterwards, and their gradients may be sent to other processes while those of the previous part are computed.

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
