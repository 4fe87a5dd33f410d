"""A Llama as functions of its weights: hidden states, loss and gradients. No tape: the backward is written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gpu_ops.core.checks import computing_dtype, one_of
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.models.block import Saved, Sequences, block_backward, block_forward
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import softcapped, times
from gpu_ops.models.offload import prefetch, release
from gpu_ops.models.table import embed, embed_backward, head_logits, head_loss
from gpu_ops.models.weights import Llama
from gpu_ops.ops.loss_options import LossOptions
from gpu_ops.ops.rmsnorm import rmsnorm, rmsnorm_backward

__all__ = ["hidden_states", "logits", "loss", "loss_and_grads"]


def hidden_states(
    ids: Any, weights: Llama, config: LlamaConfig, *, sequences: Sequences | None = None
) -> Any:
    """What the output layer multiplies, (..., hidden): the normalised states, divided by ``logits_scaling``. Keeps
    nothing of the layers."""
    x = embed(ids, weights.embed, scale=config.embedding_factor(weights.embed.dtype))
    for layer, own in zip(weights.layers, config.by_layer, strict=True):
        x = block_forward(x, layer, own, policy="layer", sequences=sequences)[0]
    return last_norm(x, weights, config)[0]


def last_norm(x: Any, weights: Llama, config: LlamaConfig) -> tuple[Any, Any]:
    """What the output layer multiplies, and rstd."""
    h, rstd = rmsnorm(
        x, weights.norm, eps=config.stream_eps, weight_offset=config.weight_offset, return_rstd=True
    )
    return times(h, 1 / config.logits_scaling), rstd


def logits(ids: Any, weights: Llama, config: LlamaConfig, *, sequences: Sequences | None = None) -> Any:
    """(..., vocab), in the weights' dtype."""
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
    """The cross-entropy of the targets, float32 (float64 for float64). ``options``: those of
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
    """The loss; the gradients of all weights are added to ``grads``.

    Parameters
    ----------
    ids, targets : int32 or int64 arrays (batch, seqlen), or (tokens,) with ``sequences.cu_seqlens``
    weights : Llama
    grads : Llama
        float32 (float64 for float64), zero before the first part of a batch. None in place of an array: that weight
        is frozen.
    policy : str, or one of each layer
        What to keep between forward and backward: see :func:`gpu_ops.models.block_forward`.
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
    options = {"softcap": config.logits_softcap} | options
    scale = config.embedding_factor(weights.embed.dtype)
    x = embed(ids, weights.embed, scale=scale)
    saved: list[Saved] = []
    for layer, own, kept in zip(weights.layers, config.by_layer, _policies(policy, config), strict=True):
        x, one = block_forward(x, layer, own, policy=kept, sequences=sequences)
        if saved:
            release(saved[-1].x)  # a layer later: its copy had the time of one
        saved.append(one)
        del one
    h, rstd = last_norm(x, weights, config)
    to: dict[str, Any] = {"only": "dx"} if grads.lm_head is None else {"dweight": grads.lm_head}
    value, dh, *_ = head_loss(h, weights.lm_head, targets, grads=True, dloss=dloss, **to, **options)
    del h
    dh = times(dh, 1 / config.logits_scaling)
    dx, _ = rmsnorm_backward(
        dh, x, weights.norm, rstd, weight_offset=config.weight_offset, dweight=grads.norm
    )
    del dh, x, rstd
    for layer, grad, own in zip(
        reversed(weights.layers), reversed(grads.layers), reversed(config.by_layer), strict=True
    ):
        one = saved.pop()
        if saved:
            prefetch(saved[-1].x)
        dx = block_backward(dx, layer, one, own, grads=grad, sequences=sequences)
    if grads.embed is not None:
        embed_backward(dx, ids, weights.embed, scale=scale, dweight=grads.embed)
    return value


_LOSS_OPTIONS = (*(f.name for f in fields(LossOptions)), "chunk")


def _check(weights: Llama, grads: Llama, config: LlamaConfig, options: Mapping[str, Any]) -> None:
    """What would otherwise be found when some gradients have been added to."""
    for name in options:
        one_of("loss_and_grads", "option", name, _LOSS_OPTIONS)
    for what, model in (("weights", weights), ("grads", grads)):
        if len(model.layers) != config.nlayers:
            raise OptionError(
                f"loss_and_grads: {what} have {len(model.layers)} layers, and the config has {config.nlayers}"
            )
    pairs = [(n, getattr(weights, n), getattr(grads, n)) for n in ("embed", "norm", "lm_head")]
    for i, (layer, grad) in enumerate(zip(weights.layers, grads.layers, strict=True)):
        pairs += [
            (f"layers[{i}].{f.name}", getattr(layer, f.name), getattr(grad, f.name)) for f in fields(layer)
        ]
    for name, weight, grad in pairs:
        if grad is None or not hasattr(weight, "dtype") or not hasattr(grad, "dtype"):
            continue
        wide = computing_dtype(str(weight.dtype))
        if tuple(grad.shape) != tuple(weight.shape):
            raise ShapeError(f"loss_and_grads: grads.{name} has shape {grad.shape}, expected {weight.shape}")
        if grad.dtype != wide:
            raise DTypeError(f"loss_and_grads: grads.{name} is {grad.dtype}, expected {wide}")


def _policies(policy: str | Sequence[str], config: LlamaConfig) -> list[str]:
    """One for each layer."""
    each = [policy] * config.nlayers if isinstance(policy, str) else list(policy)
    if len(each) != config.nlayers:
        raise OptionError(f"loss_and_grads: {len(each)} policies for {config.nlayers} layers")
    return each
