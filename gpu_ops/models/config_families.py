"""Families of Hugging Face configs: their properties, and the entries that set options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ACTIVATIONS", "BIASES", "DEFAULTS", "FAMILIES", "NEUTRAL", "NUMBERS", "Family"]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Family:
    architecture: str
    reads: tuple[str, ...] = ()
    """Entries of ``NEUTRAL`` that the family uses."""
    biases: tuple[str, ...] = ()
    """Projections with a bias, whatever the config says."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of LlamaConfig, whatever the config says."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for missing entries, if they differ from ``DEFAULTS``."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Entries that override the config."""
    activation: str = "hidden_act"
    """Entry that names the activation."""


DEFAULTS = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
BIASES = {"attention_bias": ("qkv", "o"), "mlp_bias": ("gate_up", "down")}
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {
    **{"sliding_window": 4096, "max_window_layers": 28},
    **{"num_key_value_heads": 32, "max_position_embeddings": 32768},
}
_GRANITE = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_GEMMA = {"weight_offset": 1.0, "post_norms": True, "embedding_scale": None}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", (*BIASES,)),
    "mistral": Family(
        "MistralForCausalLM",
        ("sliding_window",),
        defaults=_MISTRAL,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        ("sliding_window", "layer_types"),
        defaults=_MISTRAL,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _WINDOWS, biases=("qkv",), defaults=_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        ("attention_bias", *_WINDOWS),
        options={"qk_norm": True},
        defaults={**_QWEN, "head_dim": 128},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        (*BIASES, *_WINDOWS, "no_rope_layers"),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4}
        | {"rope_theta": 2000000.0, "max_position_embeddings": 32768},
    ),
    "granite": Family("GraniteForCausalLM", (*BIASES, *_GRANITE), defaults=dict.fromkeys(_GRANITE, 1.0)),
    "bitnet": Family(
        "BitNetForCausalLM",
        ("attention_bias",),
        options={"sub_norms": True},
        defaults={"hidden_act": "relu2", "num_key_value_heads": 5, "rope_theta": 500000.0},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        ("attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", *_SOFTCAPS),
        options=_GEMMA,
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
        always={"sliding_window_pattern": 2},
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (
            *("attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar"),
            *("final_logit_softcapping", "rope_local_base_freq"),
        ),
        options=_GEMMA | {"qk_norm": True},
        defaults=_GEMMA_DEFAULTS
        | {"sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
        | {"max_position_embeddings": 131072},
        activation="hidden_activation",
    ),
}
# Entries that change a model, and the values that do not change it. A model that ignored one would run and be wrong.
# Entries of biases are not listed: the files have biases or not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "no_rope_layers": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "rope_local_base_freq": (None,),
    "use_bidirectional_attention": (False, None),
}
# Entries that are numbers, the options that they set, and the conversion.
NUMBERS: dict[str, tuple[str, Callable[[float], float]]] = {
    "attn_logit_softcapping": ("softcap", float),
    "final_logit_softcapping": ("logits_softcap", float),
    "query_pre_attn_scalar": ("softmax_scale", lambda x: x**-0.5),
    "attention_multiplier": ("softmax_scale", float),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logits_scaling", float),
}
