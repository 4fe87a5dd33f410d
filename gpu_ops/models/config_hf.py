"""Reader of configs of Hugging Face transformers, the writer of their rope entries, and the table of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import path_of, read_object
from gpu_ops.formats.rope_scaling import RopeScaling

__all__ = [
    "ACTIVATIONS",
    "BIASES",
    "DEFAULTS",
    "FAMILIES",
    "LAYER_TYPES",
    "NEUTRAL",
    "NUMBERS",
    "SIZES",
    "Family",
    "model_type_of",
    "options_from_hf",
    "read_config",
    "scaling_to_hf",
]

_WHO = "LlamaConfig.from_hf"
_MOST_BYTES = 1 << 22  # of a config.json
_MOST_LAYERS = 1 << 16  # limits the length of lists that a number in a file can cause
_ROPE = (
    *("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "nlayers": "num_hidden_layers",
    "nheads": "num_attention_heads",
}


def options_from_hf(config: Any) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Return options for :meth:`gpu_ops.models.LlamaConfig.from_hf`, and theta, scaling and window of each layer."""
    if isinstance(config, (str, Path)):
        path = path_of(_WHO, config)
        config = read_config(_WHO, path / "config.json" if path.is_dir() else path)
    if not isinstance(config, Mapping):
        raise OptionError(f"{_WHO}: expected a dict or a path, got {type(config).__name__}")
    family = _family(config)
    hf = {**DEFAULTS, **family.defaults, **config, **family.always}
    missing = [name for name in (*SIZES.values(), "rms_norm_eps") if hf.get(name) is None]
    if missing:
        raise OptionError(f"{_WHO}: the config has no {', '.join(missing)}")
    sizes = {ours: checks.integer(_WHO, theirs, hf[theirs], low=0) for ours, theirs in SIZES.items()}
    nlayers = checks.integer(_WHO, "num_hidden_layers", sizes["nlayers"], high=_MOST_LAYERS)
    act = checks.one_of(_WHO, family.activation, hf.get(family.activation, "silu"), ACTIVATIONS)
    options = {
        **sizes,
        "nheads_kv": hf.get("num_key_value_heads") or sizes["nheads"],
        "head_dim": hf.get("head_dim") or 0,
        "eps": hf["rms_norm_eps"],
        "activation": ACTIVATIONS[act],
        "tied": _flag(hf, "tie_word_embeddings"),
        "biases": (*family.biases, *_biases(family, hf)),
        **family.options,
        **_numbers(family, hf),
    }
    rotated = _rotated(family, hf, nlayers)
    window = _window(family, hf)
    matters = window >= 0 or "rope_local_base_freq" in family.reads
    slides = _slides(family, hf, nlayers, rotated) if matters else [False] * nlayers
    if window < 0 and "layer_types" in family.reads and hf.get("layer_types") and any(_listed(hf, nlayers)):
        raise OptionError(
            f"{_WHO}: layer_types has {LAYER_TYPES[True]!r}, and there is no window: sliding_window="
            f"{hf.get('sliding_window')!r}, use_sliding_window={hf.get('use_sliding_window')!r}. Set both, or "
            f"make the layers {LAYER_TYPES[False]!r}"
        )
    rotations = {windowed: _rotation(family, hf, windowed) for windowed in set(slides)}
    return options, [
        (*(rotations[slid] if turns else (None, None)), window if slid else -1)
        for turns, slid in zip(rotated, slides, strict=True)
    ]


def read_config(who: str, path: Path) -> Mapping[str, Any]:
    """Read the object in a ``config.json``."""
    return read_object(who, path, _MOST_BYTES, OptionError, ", as a model's config is one")


def model_type_of(config: Mapping[str, Any]) -> Any:
    """Family that a config names; a mistral with an entry ``layer_types`` is a ministral, as in transformers.
    None if it names neither a family nor a known architecture."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    if model_type is None and isinstance(classes, (list, tuple)):
        model_type = next((name for name, family in FAMILIES.items() if family.architecture in classes), None)
    return "ministral" if model_type == "mistral" and "layer_types" in config else model_type


def _family(config: Mapping[str, Any]) -> Family:
    model_type = model_type_of(config)
    if model_type is not None and (not isinstance(model_type, str) or model_type not in FAMILIES):
        raise OptionError(
            f"{_WHO}: model_type is {model_type!r}; known: {', '.join(FAMILIES)}. If the model is a Llama in all but "
            "name, change the entry"
        )
    family = FAMILIES[model_type or "llama"]
    for name, allowed in NEUTRAL.items():
        if name not in family.reads and config.get(name) not in allowed:
            raise OptionError(
                f"{_WHO}: {name}={config[name]!r} is not supported; a {model_type or 'llama'} has {allowed[0]!r}"
            )
    return family


def _flag(given: Mapping[str, Any], name: str) -> bool:
    return given.get(name) is not None and checks.flag(_WHO, name, given[name])


def _biases(family: Family, given: Mapping[str, Any]) -> tuple[str, ...]:
    biases: tuple[str, ...] = ()
    for name, parts in BIASES.items():
        if name in family.reads and _flag(given, name):
            biases += parts
    return biases


def _rotated(family: Family, given: Mapping[str, Any], nlayers: int) -> list[bool]:
    """Whether each layer rotates queries and keys. A 1 in ``no_rope_layers`` means that it does."""
    if "no_rope_layers" not in family.reads:
        return [True] * nlayers
    if given.get("no_rope_layers") is None:
        every = checks.integer(_WHO, "no_rope_layer_interval", given["no_rope_layer_interval"], low=1)
        return [(i + 1) % every != 0 for i in range(nlayers)]
    return [bool(x) for x in _each(given, "no_rope_layers", nlayers, (0, 1))]


def _numbers(family: Family, given: Mapping[str, Any]) -> dict[str, float]:
    """Options that are numbers; entries that are None keep the defaults."""
    return {
        option: read(checks.number(_WHO, name, given[name], above=0.0))
        for name, (option, read) in NUMBERS.items()
        if name in family.reads and given.get(name) is not None
    }


def _rotation(
    family: Family, given: Mapping[str, Any], slides: bool
) -> tuple[float | None, RopeScaling | None]:
    """theta and scaling of the layers that see a window, or of those that see all keys."""
    if "rope_local_base_freq" in family.reads:
        given = _rope_of(family, given, slides)
    rope = {name: given[name] for name in _ROPE if given.get(name) is not None}
    scaling = RopeScaling.from_hf({**DEFAULTS, **family.defaults} | rope)
    if scaling.kind == "default":  # these families rotate whole heads, whatever partial_rotary_factor says
        return scaling.theta, None
    if scaling.partial_rotary_factor not in (None, 1.0):
        raise OptionError(
            f"{_WHO}: partial_rotary_factor={scaling.partial_rotary_factor:g} with rope type {scaling.kind!r} is "
            "not supported: this family rotates whole heads; remove the entry"
        )
    return scaling.theta, replace(scaling, partial_rotary_factor=None)


def _rope_of(family: Family, given: Mapping[str, Any], slides: bool) -> dict[str, Any]:
    """Config with the rope entries of layers of one type; ``rope_scaling`` is for layers without a window."""
    layer_type, base = LAYER_TYPES[slides], "rope_local_base_freq" if slides else "rope_theta"
    old = given.get("rope_scaling")
    if isinstance(old, Mapping) and old.get("type", "default") != "default" and "rope_type" not in old:
        raise OptionError(
            f"{_WHO}: rope_scaling of a gemma3_text says type={old['type']!r:.40}, which transformers 5 ignores and "
            "earlier versions follow; call it rope_type, or remove it"
        )
    by_type = given.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or not by_type.keys() <= set(LAYER_TYPES):
        raise OptionError(f"{_WHO}: rope_parameters must hold a dict for each of {', '.join(LAYER_TYPES)}")
    parts = (by_type.get(layer_type), None if slides else given.get("rope_scaling"))
    part = {"rope_theta": family.defaults[base] if given[base] is None else given[base]}
    for entries in parts:
        if entries is not None and not isinstance(entries, Mapping):
            raise OptionError(
                f"{_WHO}: the rope entries of {layer_type} must be a dict, got {type(entries).__name__}"
            )
        part |= entries or {}
    whole = {name: x for name, x in given.items() if name not in ("rope_scaling", "rope_theta")}
    return whole | {"rope_parameters": part}


def _window(family: Family, given: Mapping[str, Any]) -> int:
    """Window of the layers that have one. A window of transformers counts the query itself."""
    size = given.get("sliding_window") if "sliding_window" in family.reads else None
    if "use_sliding_window" in family.reads and not _flag(given, "use_sliding_window"):
        size = None
    return -1 if size is None else checks.integer(_WHO, "sliding_window", size, low=1) - 1


def _slides(family: Family, given: Mapping[str, Any], nlayers: int, rotated: list[bool]) -> list[bool]:
    """Whether each layer sees a window."""
    if "layer_types" not in family.reads:
        return [True] * nlayers
    if given.get("layer_types") is not None:
        return _listed(given, nlayers)
    if "no_rope_layers" in family.reads:
        return [not x for x in rotated]
    if "sliding_window_pattern" in {**family.defaults, **family.always}:
        every = checks.integer(_WHO, "sliding_window_pattern", given["sliding_window_pattern"], low=1)
        return [(i + 1) % every != 0 for i in range(nlayers)]
    if "max_window_layers" not in family.reads:
        return [True] * nlayers
    first = checks.integer(_WHO, "max_window_layers", given["max_window_layers"], low=0)
    return [i >= first for i in range(nlayers)]


def _listed(given: Mapping[str, Any], nlayers: int) -> list[bool]:
    """Whether ``layer_types`` says that each layer sees a window."""
    return [
        layer_type == LAYER_TYPES[True] for layer_type in _each(given, "layer_types", nlayers, LAYER_TYPES)
    ]


def _each(given: Mapping[str, Any], name: str, nlayers: int, allowed: tuple[Any, ...]) -> list[Any]:
    values = given[name]
    if not isinstance(values, (list, tuple)) or len(values) < nlayers:
        raise OptionError(f"{_WHO}: {name} must be a list with an entry for each of {nlayers} layers")
    for value in values[:nlayers]:
        if value not in allowed:
            raise OptionError(f"{_WHO}: {name} has {value!r}; known: {', '.join(map(repr, allowed))}")
    return list(values[:nlayers])


# Fields of each kind, and their names in the rope part of a config.
_ORIGINAL = {"original_max_position": "original_max_position_embeddings"}
_WRITTEN: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": _ORIGINAL
    | {name: name for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")},
    "longrope": _ORIGINAL | {name: name for name in ("short_factor", "long_factor", "attention_factor")},
    "llama3": _ORIGINAL | {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")},
}


def scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """Entries of a config that :meth:`gpu_ops.RopeScaling.from_hf` reads, as every version spells them."""
    if scaling.kind not in _WRITTEN:
        raise OptionError(f"RopeScaling: transformers has no {scaling.kind!r}; it has {', '.join(_WRITTEN)}")
    partial = scaling.partial_rotary_factor
    if partial not in (None, 1.0):
        raise OptionError(
            f"RopeScaling: partial_rotary_factor={partial:g}; the models that are written rotate whole heads in "
            "transformers, whatever their config says"
        )
    names = dict(_WRITTEN[scaling.kind])
    if scaling.long_attention_factor is not None:
        del names["attention_factor"]
        names |= {"attention_factor": "short_mscale", "long_attention_factor": "long_mscale"}
    elif scaling.kind == "longrope" and scaling.factor != 1.0:  # factor determined the attention factor
        del names["attention_factor"]
        names["factor"] = "factor"
    part = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
    part = {name: list(value) if isinstance(value, tuple) else value for name, value in part.items()}
    entries: dict[str, Any] = {"rope_scaling": {"rope_type": scaling.kind, **part} if part else None}
    original = scaling.original_max_position
    if scaling.kind == "dynamic":  # it scales beyond this length
        entries["max_position_embeddings"] = original
    elif original is not None and scaling.kind in ("yarn", "longrope"):
        # transformers 4 takes YaRN's factor, and LongRoPE's original length, from these
        entries["max_position_embeddings"] = round(scaling.factor * original)
        if scaling.kind == "longrope":
            entries["original_max_position_embeddings"] = original
    return entries


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
