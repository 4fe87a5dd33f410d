"""Reader and writer of the rope entries of Hugging Face configs, in the old and new spelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpu_ops.core.checks import flag, integer, number
from gpu_ops.errors import OptionError

if TYPE_CHECKING:
    from gpu_ops.formats.rope_scaling import RopeScaling

__all__ = ["KINDS", "scaling_from_hf", "scaling_to_hf"]

KINDS = ("default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3")

_WHO = "RopeScaling.from_hf"
_DEFAULT_THETA = 10000.0
_ALIASES = {"su": "longrope"}  # the name of longrope in early Phi-3 configs
_PARTS = ("rope_scaling", "rope_parameters")
_PART_KEYS = {"rope_type", "type", "factor", "short_factor", "long_factor", "mscale", "attention_factor"}
_WHOLE_KEYS = {*_PARTS, "rope_theta", "rotary_emb_base", "max_position_embeddings"}


def scaling_from_hf(new: type[RopeScaling], config: Any, layer_type: str | None = None) -> RopeScaling:
    """Read a config, see :meth:`gpu_ops.RopeScaling.from_hf`; ``new`` is that class."""
    if not isinstance(config, Mapping):
        raise OptionError(
            f"{_WHO}: expected a dict, got {type(config).__name__}; pass config.to_dict(), or config.json "
            "through json.load"
        )
    part, whole = _find(config)
    part = _layer(part, layer_type)
    if "mrope_section" in part:
        raise OptionError(
            f"{_WHO}: mrope_section (positions with several axes, Qwen2-VL) is not supported; for text-only "
            "input all its axes are equal: remove the entry"
        )
    read = _Reader(part, whole)
    scaling = _build(new, _kind(part), read)
    theta = read.first("rope_theta", "rotary_emb_base")
    partial = read.first("partial_rotary_factor", "rotary_pct")
    return dataclasses.replace(scaling, theta=theta, partial_rotary_factor=partial)


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
    """Entries of a config that :func:`scaling_from_hf` reads, in the spelling that every version knows."""
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


class _Reader:
    """Reader of entries of the rope part, and of the whole config where transformers reads them too."""

    def __init__(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        self.part = part
        self.whole = whole

    def number(self, name: str) -> float | None:
        value = self.part.get(name)
        return None if value is None else number(_WHO, name, value)

    def need(self, name: str) -> Any:
        value = self.part.get(name)
        if value is None:
            rope_type = _kind(self.part)
            raise OptionError(f"{_WHO}: rope type {rope_type!r} needs {name!r}; got {sorted(self.part)}")
        return value

    def first(self, *names: str) -> float | None:
        for name in names:
            for config in (self.part, self.whole):
                if config.get(name) is not None:
                    return number(_WHO, name, config[name])
        return None

    def length(self, *names: str) -> int:
        """First of these lengths that the config has; the whole config (Phi-3) comes before the rope part."""
        for name in names:
            for config in (self.whole, self.part):
                value = config.get(name)
                if value is not None:
                    integral = isinstance(value, float) and value.is_integer()  # JSON written as 8192.0
                    return integer(_WHO, name, int(value) if integral else value, low=1)
        raise OptionError(
            f"{_WHO}: rope type {_kind(self.part)!r} needs {' or '.join(names)}; pass the whole config, not "
            "only its rope part"
        )

    def original(self) -> int:
        return self.length("original_max_position_embeddings", "max_position_embeddings")

    def stretch(self) -> float:
        """``factor``, or the ratio of the two lengths if a config has no factor."""
        factor = self.number("factor")
        return factor if factor is not None else self.length("max_position_embeddings") / self.original()


def _find(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the rope part, and the config that contains it."""
    parts = {name: config.get(name) for name in _PARTS}
    present = [n for n, part in parts.items() if part is not None and (not isinstance(part, Mapping) or part)]
    for name in present:
        if not isinstance(parts[name], Mapping):
            raise OptionError(f"{_WHO}: {name} must be a dict, got {type(parts[name]).__name__}")
    if len(present) == 2:
        return _both(config, *(config[name] for name in _PARTS)), config
    if present:
        return config[present[0]], config
    if _PART_KEYS & config.keys() or any(_PART_KEYS & p.keys() for p in _layers(config).values()):
        return config, {}
    text = config.get("text_config")  # models with several parts keep the language model's config here
    if isinstance(text, Mapping):
        return _find(text)
    if not _WHOLE_KEYS & config.keys():
        raise OptionError(
            f"{_WHO}: found no rope entry; expected a config with {', '.join(sorted(_WHOLE_KEYS))} among its "
            f"keys, or its rope part with 'rope_type'; got the keys {sorted(map(str, config))[:12]}"
        )
    return {}, config


def _both(config: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope part of a config with both ``rope_scaling`` and ``rope_parameters``, which replaces it in
    transformers 5. As there, ``rope_scaling`` counts; if ``rope_parameters`` has layer types, it counts for
    ``full_attention``."""
    if _layers(new) and not _layers(old):
        return {**new, "full_attention": {**_layers(new).get("full_attention", {}), **old}}
    theta = old.get("rope_theta", config.get("rope_theta"))
    theta, lost = _DEFAULT_THETA if theta is None else theta, new.get("rope_theta")
    if lost not in (None, theta):
        raise OptionError(
            f"{_WHO}: rope_scaling replaces rope_parameters, and with it rope_theta={lost!r:.40}: the "
            f"model would run with {theta!r:.40}. Remove rope_scaling, or write rope_theta into it"
        )
    return old


def _layers(part: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: p for name, p in part.items() if isinstance(p, Mapping)}


def _layer(part: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    layers = _layers(part)
    if not layers or _PART_KEYS & part.keys():
        if layer_type is not None:
            raise OptionError(f"{_WHO}: layer_type={layer_type!r}, but this config has one set for all")
        return part
    if not isinstance(layer_type, str) or layer_type not in layers:
        raise OptionError(
            f"{_WHO}: this config has rope parameters per layer type; pass layer_type=, one of "
            f"{', '.join(map(repr, layers))}; got {layer_type!r}"
        )
    return layers[layer_type]


def _kind(part: Mapping[str, Any]) -> str:
    rope_type = part.get("rope_type", part.get("type", "default"))
    rope_type = _ALIASES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in KINDS:
        raise OptionError(
            f"{_WHO}: rope type {rope_type!r} is unknown; there are {', '.join(map(repr, KINDS))}"
        )
    return rope_type


def _build(new: type[RopeScaling], kind: str, read: _Reader) -> RopeScaling:
    if kind == "linear":
        return new.linear(read.need("factor"))
    if kind == "ntk":
        return new.ntk(read.need("factor"))
    if kind == "dynamic":
        # transformers scales beyond max_position_embeddings here, even if a config has an original length
        return new.dynamic(
            read.need("factor"), read.length("max_position_embeddings", "original_max_position_embeddings")
        )
    if kind == "yarn":
        return new.yarn(
            read.stretch(),
            read.original(),
            attention_factor=read.number("attention_factor"),
            mscale=read.number("mscale"),
            mscale_all_dim=read.number("mscale_all_dim"),
            beta_fast=read.number("beta_fast") or 32.0,
            beta_slow=read.number("beta_slow") or 1.0,
            truncate=flag(_WHO, "truncate", read.part.get("truncate", True)),
        )
    if kind == "longrope":
        return _longrope(new, read)
    if kind == "llama3":
        return new.llama3(
            read.need("factor"),
            read.original(),
            low_freq_factor=read.need("low_freq_factor"),
            high_freq_factor=read.need("high_freq_factor"),
        )
    return new("default")


def _longrope(new: type[RopeScaling], read: _Reader) -> RopeScaling:
    short, long = read.number("short_mscale"), read.number("long_mscale")  # Phi-3.5-MoE has both
    attention_factor = read.number("attention_factor") if short is None else short
    return new.longrope(
        read.need("short_factor"),
        read.need("long_factor"),
        read.original(),
        factor=1.0 if attention_factor is not None else read.stretch(),
        attention_factor=attention_factor,
        long_attention_factor=long,
    )
