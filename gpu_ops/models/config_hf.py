"""Reader and writer of configs of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import opened, path_of
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.formats.rope_scaling_hf import scaling_to_hf
from gpu_ops.models.config_families import ACTIVATIONS, BIASES, DEFAULTS, FAMILIES, NEUTRAL, NUMBERS, Family

if TYPE_CHECKING:
    from gpu_ops.models.config import LlamaConfig

__all__ = ["SIZES", "config_to_hf", "model_type_of", "options_from_hf", "read_config"]

_WHO = "LlamaConfig.from_hf"
_MOST_BYTES = 1 << 22  # of a config.json
_MOST_LAYERS = 1 << 16  # limits the length of lists that a number in a file can cause
_ROPE = (
    *("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
_KINDS = ("full_attention", "sliding_attention")
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
            f"{_WHO}: layer_types has {_KINDS[True]!r}, and there is no window: sliding_window="
            f"{hf.get('sliding_window')!r}, use_sliding_window={hf.get('use_sliding_window')!r}. Set both, or "
            f"make the layers {_KINDS[False]!r}"
        )
    rotations = {windowed: _rotation(family, hf, windowed) for windowed in set(slides)}
    return options, [
        (*(rotations[slid] if turns else (None, None)), window if slid else -1)
        for turns, slid in zip(rotated, slides, strict=True)
    ]


def read_config(who: str, path: Path) -> Mapping[str, Any]:
    """Read the object in a ``config.json``."""
    with opened(who, path) as file:
        text = file.read(_MOST_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{who}: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise OptionError(f"{who}: {path} holds no JSON object, as a model's config is one")
    return config


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
    layer_type, base = _KINDS[slides], "rope_local_base_freq" if slides else "rope_theta"
    old = given.get("rope_scaling")
    if isinstance(old, Mapping) and old.get("type", "default") != "default" and "rope_type" not in old:
        raise OptionError(
            f"{_WHO}: rope_scaling of a gemma3_text says type={old['type']!r:.40}, which transformers 5 ignores and "
            "earlier versions follow; call it rope_type, or remove it"
        )
    by_type = given.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or not by_type.keys() <= set(_KINDS):
        raise OptionError(f"{_WHO}: rope_parameters must hold a dict for each of {', '.join(_KINDS)}")
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
    return [layer_type == _KINDS[True] for layer_type in _each(given, "layer_types", nlayers, _KINDS)]


def _each(given: Mapping[str, Any], name: str, nlayers: int, allowed: tuple[Any, ...]) -> list[Any]:
    values = given[name]
    if not isinstance(values, (list, tuple)) or len(values) < nlayers:
        raise OptionError(f"{_WHO}: {name} must be a list with an entry for each of {nlayers} layers")
    for value in values[:nlayers]:
        if value not in allowed:
            raise OptionError(f"{_WHO}: {name} has {value!r}; known: {', '.join(map(repr, allowed))}")
    return list(values[:nlayers])


def config_to_hf(config: LlamaConfig, model_type: Any) -> dict[str, Any]:
    """Entries that the family reads back as this config; see :meth:`gpu_ops.models.LlamaConfig.to_hf`."""
    who = "LlamaConfig.to_hf"
    names = FAMILIES if model_type is None else [checks.one_of(who, "model_type", model_type, FAMILIES)]
    layers = config.by_layer or (config,)
    sliding = next((c for c in layers if c.window >= 0), config)
    rotating = next((c for c in layers if c.theta is not None and c.window < 0), None)
    rotating = rotating or next((c for c in layers if c.theta is not None), config)
    window = max(c.window for c in layers)
    slides = [c.window >= 0 for c in layers]
    common = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()} | {
        "num_key_value_heads": config.nheads_kv,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "rope_theta": 10000.0 if rotating.theta is None else rotating.theta,
        **({} if rotating.scaling is None else scaling_to_hf(rotating.scaling)),
    }
    scale = config.softmax_scale
    special = {
        "attention_bias": "o" in config.biases,
        "mlp_bias": "down" in config.biases,
        "use_sliding_window": window >= 0,
        "sliding_window": window + 1 if window >= 0 else None,
        "max_window_layers": slides.index(True) if any(slides) else config.nlayers,
        "layer_types": [_KINDS[x] for x in slides],
        "no_rope_layers": [int(c.theta is not None) for c in layers],
        "rope_local_base_freq": sliding.theta,
        "attn_logit_softcapping": config.softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
        "query_pre_attn_scalar": config.head_dim if scale is None else _whole(scale**-2),
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logits_scaling,
    }
    act = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    for family_name in names:
        family = FAMILIES[family_name]
        entries = {"architectures": [family.architecture], "model_type": family_name, **common}
        entries |= {family.activation: act, **{name: special[name] for name in family.reads}}
        if type(config).from_hf(entries) == config:
            return entries
    raise OptionError(f"{who}: {' and '.join(names)} cannot have these options together: {config}")


def _whole(x: float) -> float:
    """Round ``x`` to an integer if it differs only by rounding."""
    return round(x) if abs(x - round(x)) < 1e-9 * x else x
