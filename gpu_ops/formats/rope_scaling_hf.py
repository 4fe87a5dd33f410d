"""Reader of the rope entries of Hugging Face configs, in the old and new spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_ops.core.checks import flag, integer, number
from gpu_ops.errors import OptionError

__all__ = ["KINDS", "Entries", "rope_entries"]

KINDS = ("default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3")

_WHO = "RopeScaling.from_hf"
_DEFAULT_THETA = 10000.0
_ALIASES = {"su": "longrope"}  # the name of longrope in early Phi-3 configs
_PARTS = ("rope_scaling", "rope_parameters")
_PART_KEYS = {"rope_type", "type", "factor", "short_factor", "long_factor", "mscale", "attention_factor"}
_WHOLE_KEYS = {*_PARTS, "rope_theta", "rotary_emb_base", "max_position_embeddings"}


def rope_entries(config: Any, layer_type: str | None = None) -> Entries:
    """Rope entries of a config, see :meth:`gpu_ops.RopeScaling.from_hf`."""
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
    return Entries(part, whole)


class Entries:
    """Entries of the rope part, and of the whole config where transformers reads them too."""

    def __init__(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        self.part = part
        self.whole = whole

    @property
    def kind(self) -> str:
        """Kind of :class:`gpu_ops.RopeScaling`."""
        return _kind(self.part)

    @property
    def theta(self) -> float | None:
        return self.first("rope_theta", "rotary_emb_base")

    @property
    def partial_rotary_factor(self) -> float | None:
        return self.first("partial_rotary_factor", "rotary_pct")

    def flag(self, name: str, default: bool) -> bool:
        return flag(_WHO, name, self.part.get(name, default))

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
