"""Estimate of a Llama's inference memory before it runs, and the largest batch or length that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.checks import flag, instance, integer
from gpu_ops.errors import DeviceError, OptionError, OutOfMemoryError
from gpu_ops.memory.estimate import Estimate, estimate, read_dtype
from gpu_ops.memory.sizes import MOST_SEQUENCES, MOST_TOKENS, read_size
from gpu_ops.memory.trace import Trace
from gpu_ops.memory.weights import Weights, check_blocks, planned_model
from gpu_ops.models import LlamaConfig, hidden_states
from gpu_ops.ops.attention.options import QUANTIZED
from gpu_ops.ops.gemm.linear import linear
from gpu_ops.presets import select_preset

__all__ = ["estimate_inference", "fit", "kv_cache_bytes"]

_ARRAYS = Weights()
_MOST_POSITIONS = 1 << 20  # limit of the search for a length


def kv_cache_bytes(config: LlamaConfig, *, batch: int, seqlen: int, dtype: npt.DTypeLike = np.float16) -> int:
    """Bytes of keys and values of all layers: ``2 nlayers nheads_kv head_dim itemsize`` for each token.

    With ``dtype`` int8 or float8_e4m3fn, the scale of each head takes 4 more.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> memory.kv_cache_bytes(models.PRESETS["llama-3-8b"], batch=1, seqlen=1, dtype="bfloat16") // 1024
    128
    """
    who = "memory.kv_cache_bytes"
    cache_dtype = read_dtype(who, dtype)
    head = config.head_dim * cache_dtype.itemsize + (4 if cache_dtype in QUANTIZED.values() else 0)
    tokens = integer(who, "batch", batch, low=1) * integer(who, "seqlen", seqlen, low=0)
    return 2 * config.nlayers * config.nheads_kv * head * tokens


@typed_memory_errors("memory.estimate_inference")
def estimate_inference(
    config: LlamaConfig,
    *,
    batch: int,
    seqlen: int,
    dtype: npt.DTypeLike = np.float16,
    cache_dtype: npt.DTypeLike | None = None,
    prompt: int | None = None,
    device: str | None = None,
    weights: Weights = _ARRAYS,
) -> Estimate:
    """Estimate the memory of inference: weights, a KV cache for ``seqlen`` tokens, and activations of the prompt.

    The activations are those of :func:`gpu_ops.models.hidden_states` over the prompt, and the logits of its last
    tokens; steps with one token take less.

    Parameters
    ----------
    config : LlamaConfig
    batch, seqlen : int
        Number of sequences, and of tokens of each, including the prompt.
    dtype : dtype
        Dtype of weights and activations. ``cache_dtype``: that of the cache, default the same; see
        :func:`kv_cache_bytes`.
    prompt : int, optional
        Tokens of each sequence that the model processes at a time, default ``seqlen``.
    device : str, optional
        ``"cpu"``, ``"cuda"`` (the installed card) or a card of the presets, such as ``"H100 SXM"``.
    weights : Weights
        Packed weights, adapters; default arrays.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> terms = memory.estimate_inference(models.PRESETS["llama-3-8b"], batch=8, seqlen=4096, dtype="bfloat16").parts
    >>> {name: f"{n / 2**30:.1f} GiB" for name, n in terms.items()}
    {'weights': '15.0 GiB', 'KV cache': '4.0 GiB', 'activations': '3.1 GiB'}
    """
    who = "memory.estimate_inference"
    batch = integer(who, "batch", batch, low=1, high=MOST_SEQUENCES)
    length = integer(who, "seqlen", seqlen, low=1, high=MOST_TOKENS)
    tokens = length if prompt is None else integer(who, "prompt", prompt, low=1, high=length)
    weight_dtype = read_dtype(who, dtype)
    instance(who, "weights", weights, Weights)
    check_blocks(who, weights, config)
    with Trace(device) as trace:
        model, parts = planned_model(weights, trace, config, weight_dtype)
        ids = trace.empty((batch, tokens), np.int32, "token ids")
        state = trace.live_bytes
        states = hidden_states(ids, model, config)
        logits = linear(trace.empty((batch, config.hidden), weight_dtype, "last states"), model.lm_head)
        del states, logits
        parts |= {
            "KV cache": kv_cache_bytes(config, batch=batch, seqlen=seqlen, dtype=cache_dtype or weight_dtype),
            "activations": trace.peak_bytes - state,
        }
        return Estimate.of(trace, parts)


def fit(
    config: LlamaConfig,
    budget: int | str,
    *,
    batch: int | None = None,
    seqlen: int | None = None,
    train: bool = False,
    **options: Any,
) -> int:
    """Find the largest batch for a seqlen, or the largest seqlen for a batch, that fits.

    Parameters
    ----------
    config : LlamaConfig
    budget : int or str
        Bytes; ``"80 GB"``; or a card of the presets such as ``"H100 SXM"``, whose kernels are planned for unless
        ``device=`` is given. A card's memory counts as GB of 1e9 bytes. Most have 3 to 7 % more, for the context of
        CUDA and the allocator's remainders.
    batch, seqlen : int
        Pass one of them; the other is found, up to 2^20 tokens in a sequence and 2^24 in a batch.
    train : bool
        Fit a training step, see :func:`estimate`, instead of inference, see :func:`estimate_inference`. ``options``
        are those of the function.

    Raises
    ------
    OutOfMemoryError
        Not even 1 fits; ``required`` is the size for 1.

    Examples
    --------
    >>> from gpu_ops import memory, models
    >>> memory.fit(models.PRESETS["llama-3-8b"], "24 GB", seqlen=8192, dtype="bfloat16")
    4
    """
    who = "memory.fit"
    if (batch is None) == (seqlen is None):
        raise OptionError(f"{who}: pass one of batch= and seqlen=; the other one is found")
    available, card = _budget(who, budget)
    options = {"device": card} | options
    sought, fixed = ("batch", {"seqlen": seqlen}) if batch is None else ("seqlen", {"batch": batch})
    run: Callable[..., Estimate] = estimate if flag(who, "train", train) else estimate_inference

    def takes(n: int) -> float:
        try:
            return run(config, **{sought: n}, **fixed, **options).peak
        except (DeviceError, OutOfMemoryError):  # more than a launch or the address space allows
            if n == 1:
                raise
            return math.inf

    least = takes(1)
    if least > available:
        raise OutOfMemoryError(
            f"{who}: {sought} 1 takes {int(least)} bytes, and there are {available}; "
            + ("keep less between forward and backward (policy='layer'), or " if train else "")
            + "take a smaller dtype or model, or pack the weights (weights=)",
            int(least),
            available,
        )
    limit = min(MOST_TOKENS // int(batch or seqlen or 1), _MOST_POSITIONS if seqlen is None else MOST_TOKENS)
    return _largest(takes, least, available, limit)


def _budget(who: str, budget: int | str) -> tuple[int, str | None]:
    """Bytes of a budget, and the card that has them."""
    if isinstance(budget, str):
        try:
            preset = select_preset(budget)
        except OptionError as error:
            try:
                return read_size(who, "budget", budget), None
            except OptionError:
                raise OptionError(
                    f"{who}: budget={budget!r} is no size such as '80 GB', and {error}"
                ) from None
        return int(preset.memory_gb * 1e9), preset.name
    return read_size(who, "budget", budget), None


def _largest(takes: Callable[[int], float], at_low: float, available: int, most: int) -> int:
    """Find the largest n up to ``most`` that fits, by bisection; 1 does fit. Memory grows almost in proportion to n,
    so a line through two points gives the next guess."""
    low, high, guess = 1, most + 1, 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        required = takes(guess)
        if required <= available:
            slope = (required - at_low) / (guess - low)
            low, at_low = guess, required
            guess = low + 1 + int((available - required) / slope) if slope > 0 else 2 * low
        else:
            high = guess
            share = (available - at_low) / (required - at_low) if required < math.inf else 0.5
            guess = low + int((high - low) * share)
    return low
