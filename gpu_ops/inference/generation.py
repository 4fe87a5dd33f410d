"""Texts for several prompts, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.inference.engine import Draft, Engine
from gpu_ops.inference.forward import cache_for
from gpu_ops.inference.kv_cache import PagedKVCache
from gpu_ops.inference.requests import Sampling
from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.weights import Llama

__all__ = ["generate"]


def generate(
    weights: Llama,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop: Sequence[int] = (),
    cache: PagedKVCache | None = None,
    kv_dtype: npt.DTypeLike | None = None,
    draft: Draft | None = None,
) -> list[list[int]]:
    """Generate the new tokens of each prompt. For streaming, and for single requests: :class:`Engine`.

    Models with a ``dynamic`` or ``longrope`` scaling use the frequencies of the longest text, prompt and new tokens,
    for all prompts. To make texts independent of other prompts, call this for each, or an engine with a
    ``max_seqlen``.

    Parameters
    ----------
    weights, config : Llama, LlamaConfig
    prompts : sequences of token ids
    max_new_tokens : int
        Limit of new tokens for each prompt.
    sampling : Sampling, or one for each prompt
        Default: greedy.
    stop : token ids
        Tokens that end a text, such as the tokenizer's end of sequence. The stop token is not returned.
    cache : PagedKVCache, optional
        Default: a cache that holds all prompts at full length, on the device of the weights. A later call with the
        same weights finds the prefixes in it. After a change of the weights in place, call
        :meth:`PagedKVCache.drop_prefixes`.
    kv_dtype : str or dtype, optional
        Dtype of that cache: the weights', or int8 or float8_e4m3fn.
    draft : function, optional
        Function that guesses the next tokens, such as :func:`prompt_lookup`: see :class:`Engine`.

    Examples
    --------
    >>> from gpu_ops import inference, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> [len(tokens) for tokens in inference.generate(weights, config, [[1, 2], [3]], max_new_tokens=5)]
    [5, 5]
    """
    if not hasattr(prompts, "__iter__") or not all(hasattr(prompt, "__len__") for prompt in prompts):
        raise OptionError("generate: prompts must be a sequence of sequences of token ids")
    checks.integer("generate", "max_new_tokens", max_new_tokens, low=1)
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
    if len(each) != len(prompts):
        raise OptionError(f"generate: {len(each)} samplings for {len(prompts)} prompts")
    lengths = [max(len(prompt) + max_new_tokens - 1, 1) for prompt in prompts]  # the last token is not read
    if cache is None:
        cache = cache_for(weights, config, lengths=lengths, dtype=kv_dtype)
    elif kv_dtype is not None:
        raise OptionError("generate: kv_dtype is for the cache that generate makes; omit it, or cache=")
    engine = Engine(weights, config, cache, max_seqlen=max(lengths, default=1), draft=draft)
    texts: list[list[int]] = [[] for _ in prompts]
    try:
        for prompt, request_sampling in zip(prompts, each, strict=True):
            engine.submit(prompt, max_new_tokens=max_new_tokens, sampling=request_sampling, stop=stop)
        with visible(f"gpu_ops: generating text for {len(prompts)} prompt{'s' * (len(prompts) > 1)}"):
            for token in engine.run():
                if token.finished == "error":
                    place = f"after prompt {token.request} and {len(texts[token.request])} tokens"
                    raise OptionError(f"generate: the logits {place} are not finite")
                if token.finished != "stop":
                    texts[token.request].append(token.token)
    finally:
        engine.clear()
    return texts
