"""One forward pass of a Llama over a paged cache: prompts, parts of prompts and single tokens in one ragged batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.arrays import on_cuda
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.step import Step
from gpu_ops.inference.step_attention import attend, check_window
from gpu_ops.models.block_steps import BlockStep, Projection, Run, block_steps
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.elementwise import softcapped
from gpu_ops.models.llama import last_norm
from gpu_ops.models.projection import normed
from gpu_ops.models.weights import Llama, Table, check_models, embed, head_logits
from gpu_ops.ops.rope.rope_append_kv import rope_append_kv
from gpu_ops.ops.rows.embedding import embedding

__all__ = ["cache_for", "check_model", "longest", "next_logits"]


def next_logits(
    weights: Llama, config: LlamaConfig, cache: PagedKVCache, step: Step, *, max_seqlen: int | None = None
) -> Any:
    """Logits after the last new token of each sequence. Writes the new tokens' keys and values to the cache.

    For sequences that ``reserve`` had parents for, the logits after all new tokens: the rows are ``step.logit_rows``.

    Parameters
    ----------
    weights : Llama
        Weights whose projections may be arrays, ternary, or have adapters.
    config : LlamaConfig
    cache : PagedKVCache
        Cache with the layers and head sizes of ``config``, in the dtype of the weights, or int8 or float8_e4m3fn.
    step : Step
        Result of :meth:`PagedKVCache.reserve` for these tokens. Call :meth:`PagedKVCache.commit` next.

    max_seqlen : int, optional
        Length that ``dynamic`` and ``longrope`` scalings take their frequencies from, the same in every call on a
        cache. Default: the capacity of the cache, ``num_pages * page_size``, or 2^20 with a window.

    Returns
    -------
    logits : array (sequences, vocab), in the weights' dtype; (logit_rows, vocab) if the step has these

    Raises
    ------
    OptionError, ShapeError
        Weights, config and cache do not match, or a layer has a window that ends before tokens that branch.

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
    check_model(weights, config, cache)
    if step.tree is not None:
        for layer_config in config.by_layer:
            check_window("next_logits", step.tree, layer_config.window)
    length = longest(cache) if max_seqlen is None else max_seqlen
    x = embed(step.tokens, weights.embed, scale=config.embedding_factor(weights.embed.dtype))
    x = _CachedRun(cache, step, length).layers(x, weights, config)
    if step.logit_rows is not None:
        x = embedding(step.logit_rows, x)
    elif step.max_seqlen_q > 1 or len(step.tokens) > len(step.seqused_k):
        x = embedding(step.cu_seqlens_q[1:] - 1, x)  # the rows of the last tokens
    z = head_logits(last_norm(x, weights, config)[0], weights.lm_head)
    return softcapped(z, config.logits_softcap)


def longest(cache: PagedKVCache) -> int:
    """Default for the number of tokens of the longest sequence."""
    return cache.num_pages * cache.page_size if cache.window < 0 else 1 << 20


def cache_for(
    weights: Llama,
    config: LlamaConfig,
    *,
    num_pages: int | None = None,
    lengths: Iterable[int] | None = None,
    page_size: int = 16,
    dtype: npt.DTypeLike | None = None,
) -> PagedKVCache:
    """Make a cache with a model's layers and heads, on the device of its weights.

    Pass ``num_pages``, or the ``lengths`` of sequences that must fit together. ``dtype``: that of the weights, or
    int8 or float8_e4m3fn in half the bytes of bfloat16; see :class:`PagedKVCache`. For a small random model in
    float32 the worst logit moved by 3 % of the logits' standard deviation with int8, and by 13 to 23 % with
    float8_e4m3fn, whose elements have 4 significant bits; bfloat16 weights moved it by 3 to 6 %.
    """
    check_models("cache_for", config, weights=weights)
    windows = [layer_config.window for layer_config in config.by_layer]
    window = max(windows, default=-1) if all(w >= 0 for w in windows) else -1
    page_size = checks.integer("cache_for", "page_size", page_size, low=1)
    if num_pages is None and lengths is not None:
        lengths = [checks.integer("cache_for", f"lengths[{i}]", n, low=0) for i, n in enumerate(lengths)]
        null_page = int(window >= 0)
        num_pages = max(1, sum(-(-n // page_size) for n in lengths)) + null_page
    elif num_pages is None or lengths is not None:
        raise OptionError("cache_for: pass num_pages= or lengths=, one of them")
    return PagedKVCache(
        config.nlayers,
        config.nheads_kv,
        config.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        dtype=weights.embed.dtype if dtype is None else dtype,
        device="cuda" if on_cuda(weights.embed) else "cpu",
        window=window,
    )


def check_model(weights: Llama, config: LlamaConfig, cache: PagedKVCache) -> None:
    """Check that weights and cache match the config, and that the cache keeps all tokens that layers see."""
    check_models("inference", config, weights=weights)
    checks.instance("inference", "cache", cache, PagedKVCache)
    if len(cache.keys) != config.nlayers:
        raise OptionError(
            f"inference: the config has {config.nlayers} layers, and the cache has {len(cache.keys)}"
        )
    if isinstance(weights.embed, Table) and weights.embed.divides_tokens:
        raise OptionError("inference: the weights divide tokens among ranks; use sequence_parallel=False")
    heads = (config.nheads_kv, config.head_dim)
    if cache.keys and cache.keys[0].shape[2:] != heads:
        raise ShapeError(
            f"inference: the cache has heads of {cache.keys[0].shape[2:]}, and the config of {heads}"
        )
    for layer, spec in zip(weights.layers, config.by_layer, strict=True):
        layer.check(spec)
        if cache.window >= 0 and not 0 <= spec.window <= cache.window:
            raise OptionError(
                f"inference: a layer has window={spec.window}, and the cache window={cache.window}; see cache_for"
            )


class _CachedRun(Run):
    """Forward call of all layers, which write the new keys and values to the cache."""

    def __init__(self, cache: PagedKVCache, step: Step, max_seqlen: int) -> None:
        self.cache, self.step, self.max_seqlen = cache, step, max_seqlen

    def layers(self, x: Any, weights: Llama, config: LlamaConfig) -> Any:
        self.steps = block_steps(_ATTENTION, config.sub_norms, config.post_norms)
        for i, (layer, layer_config) in enumerate(zip(weights.layers, config.by_layer, strict=True)):
            self.i, self.arrays = i, {"x": x}
            self.weights, self.config = layer, layer_config
            x = self.forward()
        return x

    def norm(self, x: Any, weight: Any, eps: float, into: Any = None, *, out: Any = None) -> tuple[Any, Any]:
        return normed(x, weight, into, eps=eps, weight_offset=self.config.weight_offset), None


class _CachedAttention(BlockStep):
    """Norms of heads, rotation, and attention over the cache."""

    def forward(self, run: _CachedRun, qkv: Any) -> tuple[Any, ...]:
        i, cache, config, step = run.i, run.cache, run.config, run.step
        keys, values = cache.keys[i], cache.values[i]
        scales = {"k_scale": cache.key_scales[i], "v_scale": cache.value_scales[i]}
        q = rope_append_kv(
            *run.split(qkv),
            keys,
            values,
            **scales,
            slot_mapping=step.slot_mapping,
            positions=step.positions if config.theta is not None else step.positions * 0,  # rotation by zero
            theta=config.theta,
            scaling=config.scaling if config.theta is not None else None,
            seqlen=run.max_seqlen,
            q_weight=run.weights.q_norm,
            k_weight=run.weights.k_norm,
            eps=config.eps,
            weight_offset=config.weight_offset,
        )
        attn = attend(q, keys, values, step, **scales, **config.attention_options)
        return (attn.reshape(qkv.shape[0], -1),)


_ATTENTION = Projection(("h1",), ("qkv",), "qkv"), _CachedAttention(("qkv",), ("attn",))
