"""A Llama as functions of its weights: hidden states, loss and gradients, with a hand-written backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gpu_ops.core.checks import computing_dtype, one_of
from gpu_ops.errors import DTypeError, ShapeError
from gpu_ops.models.block import Sequences, block_forward
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import softcapped
from gpu_ops.models.passes import LocalParams, Pass, last_norm
from gpu_ops.models.table import embed, head_logits, head_loss
from gpu_ops.models.weights import Llama, check_models
from gpu_ops.ops.loss.options import LossOptions

__all__ = ["check_loss_options", "hidden_states", "logits", "loss", "loss_and_grads"]


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
