"""Configs of Hugging Face transformers, read and written: which families there are, and what each has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import opened, path_of
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.formats.rope_scaling_hf import scaling_to_hf

if TYPE_CHECKING:
    from gpu_ops.models.config import LlamaConfig

__all__ = ["config_to_hf", "options_from_hf", "read_config"]

_WHO = "LlamaConfig.from_hf"
_MOST_BYTES = 1 << 22  # of a config.json
_MOST_LAYERS = 1 << 16  # so that a number in a file makes no list of any length
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclass(frozen=True)
class _Family:
    architecture: str
    reads: tuple[str, ...] = ()
    """Entries that change the model, of those in ``_NEUTRAL``."""
    biases: tuple[str, ...] = ()
    """Projections that have one whatever the config says."""
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of transformers, for entries that are missing."""


_BIASES = {"attention_bias": ("qkv", "o"), "mlp_bias": ("gate_up", "down")}
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", (*_BIASES,)),
    "mistral": _Family(
        "MistralForCausalLM",
        ("sliding_window",),
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": _Family("Qwen2ForCausalLM", _WINDOWS, biases=("qkv",), defaults=_QWEN),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        ("attention_bias", *_WINDOWS),
        qk_norm=True,
        defaults={**_QWEN, "head_dim": 128},
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        (*_BIASES, *_WINDOWS, "no_rope_layers"),
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4}
        | {"rope_theta": 2000000.0},
    ),
}
# Entries that change a model, and the values that leave it as it is. A model that ignored one would run and be wrong.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_BIASES, (False, None)),
    "sliding_window": (None,),
    "no_rope_layers": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
}
_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "nlayers": "num_hidden_layers",
    "nheads": "num_attention_heads",
}


def options_from_hf(config: Any) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """See :meth:`gpu_ops.models.LlamaConfig.from_hf`: its options, and theta, scaling and window of each layer."""
    if isinstance(config, (str, Path)):
        path = path_of(_WHO, config)
        config = read_config(_WHO, path / "config.json" if path.is_dir() else path)
    if not isinstance(config, Mapping):
        raise OptionError(f"{_WHO}: expected a dict or a path, got {type(config).__name__}")
    family = _family(config)
    given = {**family.defaults, **config}
    missing = [name for name in (*_SIZES.values(), "rms_norm_eps") if given.get(name) is None]
    if missing:
        raise OptionError(f"{_WHO}: the config has no {', '.join(missing)}")
    sizes = {ours: checks.integer(_WHO, theirs, given[theirs], low=0) for ours, theirs in _SIZES.items()}
    nlayers = checks.integer(_WHO, "num_hidden_layers", sizes["nlayers"], high=_MOST_LAYERS)
    scaling = RopeScaling.from_hf(given)
    plain = scaling.kind == "default" and scaling.partial_rotary_factor in (None, 1.0)
    act = checks.one_of(_WHO, "hidden_act", given.get("hidden_act", "silu"), _ACTIVATIONS)
    options = {
        **sizes,
        "nheads_kv": given.get("num_key_value_heads") or sizes["nheads"],
        "head_dim": given.get("head_dim") or 0,
        "eps": given["rms_norm_eps"],
        "activation": _ACTIVATIONS[act],
        "tied": _flag(given, "tie_word_embeddings"),
        "biases": (*family.biases, *_biases(family, given)),
        "qk_norm": family.qk_norm,
    }
    theta = 10000.0 if scaling.theta is None else scaling.theta
    rotations = {True: (theta, None if plain else scaling), False: (None, None)}
    rotated = _rotated(family, given, nlayers)
    windows = _windows(family, given, nlayers, rotated)
    return options, [(*rotations[turns], window) for turns, window in zip(rotated, windows, strict=True)]


def read_config(who: str, path: Path) -> Mapping[str, Any]:
    """The object in a ``config.json``."""
    with opened(who, path) as file:
        text = file.read(_MOST_BYTES)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{who}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{who}: {path} holds no JSON object, as a model's config is one")
    return found


def _family(config: Mapping[str, Any]) -> _Family:
    kind = config.get("model_type")
    if kind is not None and (not isinstance(kind, str) or kind not in _FAMILIES):
        raise OptionError(
            f"{_WHO}: model_type is {kind!r}; known: {', '.join(_FAMILIES)}. If the model is a Llama in all but "
            "name, change the entry"
        )
    family = _FAMILIES[kind or "llama"]
    for name, allowed in _NEUTRAL.items():
        if name not in family.reads and config.get(name) not in allowed:
            raise OptionError(
                f"{_WHO}: {name}={config[name]!r} is not supported; a {kind or 'llama'} has {allowed[0]!r}"
            )
    return family


def _flag(given: Mapping[str, Any], name: str) -> bool:
    return given.get(name) is not None and checks.flag(_WHO, name, given[name])


def _biases(family: _Family, given: Mapping[str, Any]) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    for name, parts in _BIASES.items():
        if name in family.reads and _flag(given, name):
            found += parts
    return found


def _rotated(family: _Family, given: Mapping[str, Any], nlayers: int) -> list[bool]:
    """Whether each layer rotates queries and keys. A 1 in ``no_rope_layers`` means that it does."""
    if "no_rope_layers" not in family.reads:
        return [True] * nlayers
    if given.get("no_rope_layers") is None:
        every = checks.integer(_WHO, "no_rope_layer_interval", given["no_rope_layer_interval"], low=1)
        return [(i + 1) % every != 0 for i in range(nlayers)]
    return [bool(x) for x in _each(given, "no_rope_layers", nlayers, (0, 1))]


def _windows(family: _Family, given: Mapping[str, Any], nlayers: int, rotated: list[bool]) -> list[int]:
    """Of each layer. A window of transformers counts the query itself."""
    size = given.get("sliding_window") if "sliding_window" in family.reads else None
    if "use_sliding_window" in family.reads and not _flag(given, "use_sliding_window"):
        size = None
    if size is None:
        return [-1] * nlayers
    window = checks.integer(_WHO, "sliding_window", size, low=1) - 1
    if "layer_types" not in family.reads:
        slides = [True] * nlayers
    elif given.get("layer_types") is not None:
        kinds = _each(given, "layer_types", nlayers, ("full_attention", "sliding_attention"))
        slides = [kind == "sliding_attention" for kind in kinds]
    elif "no_rope_layers" in family.reads:
        slides = [not x for x in rotated]
    else:
        first = checks.integer(_WHO, "max_window_layers", given["max_window_layers"], low=0)
        slides = [i >= first for i in range(nlayers)]
    return [window if x else -1 for x in slides]


def _each(given: Mapping[str, Any], name: str, nlayers: int, allowed: tuple[Any, ...]) -> list[Any]:
    values = given[name]
    if not isinstance(values, (list, tuple)) or len(values) < nlayers:
        raise OptionError(f"{_WHO}: {name} must be a list with an entry for each of {nlayers} layers")
    for value in values[:nlayers]:
        if value not in allowed:
            raise OptionError(f"{_WHO}: {name} has {value!r}; known: {', '.join(map(repr, allowed))}")
    return list(values[:nlayers])


def config_to_hf(config: LlamaConfig, model_type: Any) -> dict[str, Any]:
    """See :meth:`gpu_ops.models.LlamaConfig.to_hf`: entries that the family reads back as this config."""
    who = "LlamaConfig.to_hf"
    kinds = _FAMILIES if model_type is None else [checks.one_of(who, "model_type", model_type, _FAMILIES)]
    layers = config.by_layer or (config,)
    turning = next((c for c in layers if c.theta is not None), config)
    window = max(c.window for c in layers)
    slides = [c.window >= 0 for c in layers]
    common = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()} | {
        "num_key_value_heads": config.nheads_kv,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.eps,
        "hidden_act": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation),
        "tie_word_embeddings": config.tied,
        "rope_theta": 10000.0 if turning.theta is None else turning.theta,
        **({} if turning.scaling is None else scaling_to_hf(turning.scaling)),
    }
    special = {
        "attention_bias": "o" in config.biases,
        "mlp_bias": "down" in config.biases,
        "use_sliding_window": window >= 0,
        "sliding_window": window + 1 if window >= 0 else None,
        "max_window_layers": slides.index(True) if any(slides) else config.nlayers,
        "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
        "no_rope_layers": [int(c.theta is not None) for c in layers],
    }
    for kind in kinds:
        family = _FAMILIES[kind]
        entries = {"architectures": [family.architecture], "model_type": kind, **common}
        entries |= {name: special[name] for name in family.reads}
        if type(config).from_hf(entries) == config:
            return entries
    raise OptionError(f"{who}: {' and '.join(kinds)} cannot have these options together: {config}")
