"""One forward pass of a Llama over a paged cache: prompts, parts of prompts and single tokens in one ragged batch."""

from __future__ import annotations

from typing import Any

from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.step import Step
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.projection import project
from gpu_ops.models.weights import Block, Llama
from gpu_ops.ops.attention_varlen import attention_varlen
from gpu_ops.ops.embedding import embedding
from gpu_ops.ops.linear import linear
from gpu_ops.ops.rmsnorm import rmsnorm
from gpu_ops.ops.rope_append_kv import rope_append_kv
from gpu_ops.ops.swiglu import swiglu

__all__ = ["next_logits"]


def next_logits(weights: Llama, config: LlamaConfig, cache: PagedKVCache, step: Step) -> Any:
    """The logits after the last new token of each sequence. Writes the new tokens' keys and values to the cache.

    Parameters
    ----------
    weights : Llama
        Projections may be arrays, ternary, or carry adapters.
    config : LlamaConfig
    cache : PagedKVCache
        With the layers and head sizes of ``config``, in the dtype of the weights.
    step : Step
        What :meth:`PagedKVCache.reserve` returned for these tokens. Call :meth:`PagedKVCache.commit` next.

    Returns
    -------
    logits : array (sequences, vocab), in the weights' dtype

    Examples
    --------
    >>> from gpu_ops import inference, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> cache = inference.cache_for(weights, config, num_pages=8)
    >>> one, other = cache.add(), cache.add()
    >>> step = cache.reserve({one: [5, 6, 7], other: [9]})
    >>> inference.next_logits(weights, config, cache, step).shape
    (2, 256)
    """
    x = embedding(step.tokens, weights.embed)
    for i, (layer, own) in enumerate(zip(weights.layers, config.by_layer, strict=True)):
        x = _block(x, layer, own, cache.keys[i], cache.values[i], step)
    last = embedding(step.cu_seqlens_q[1:] - 1, x)  # the rows of the last tokens
    return linear(rmsnorm(last, weights.norm, eps=config.eps), weights.lm_head)


def _block(x: Any, layer: Block, config: LlamaConfig, keys: Any, values: Any, step: Step) -> Any:
    h = rmsnorm(x, layer.attn_norm, eps=config.eps)
    heads = project(h, layer.qkv, layer.qkv_bias).reshape(x.shape[0], -1, config.head_dim)
    q, k, v = (heads[:, part] for part in config.head_slices)
    q = rope_append_kv(
        q,
        k,
        v,
        keys,
        values,
        slot_mapping=step.slot_mapping,
        positions=step.positions if config.theta is not None else step.positions * 0,  # a rotation by nothing
        theta=config.theta,
        scaling=config.scaling,
        q_weight=layer.q_norm,
        k_weight=layer.k_norm,
        eps=config.eps,
    )
    attn = attention_varlen(
        q,
        keys,
        values,
        step.cu_seqlens_q,
        block_table=step.block_table,
        seqused_k=step.seqused_k,
        max_seqlen_q=step.max_seqlen_q,
        causal=True,
        window_size=config.window_size,
    )
    x = project(attn.reshape(x.shape[0], -1), layer.o, layer.o_bias, x)
    h = rmsnorm(x, layer.mlp_norm, eps=config.eps)
    act = swiglu(project(h, layer.gate_up, layer.gate_up_bias), activation=config.activation)
    return project(act, layer.down, layer.down_bias, x)
