"""The shape of a Llama: sizes, and the options of its ops."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import opened, path_of
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.reference.swiglu import Activation

__all__ = ["LlamaConfig"]

_WHO = "LlamaConfig"
_MOST_BYTES = 1 << 22  # of a config.json
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# What other architectures add to these; a model that ignored them would run and be wrong.
_REFUSED = {
    "attention_bias": False,
    "mlp_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "no_rope_layers": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_TYPES = ("llama", "mistral")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a Llama-shaped decoder: Llama 1 to 3, Mistral, and models of their architecture.

    Parameters
    ----------
    vocab, hidden, ffn, nlayers : int
    nheads, nheads_kv : int
        Of queries, and of keys and values; nheads is a multiple of nheads_kv (default: equal).
    head_dim : int
        Default: hidden / nheads.
    eps : float
        Of the RMS norms.
    theta : float
        Base of the rotary frequencies. ``scaling``: a :class:`gpu_ops.RopeScaling`, or None.
    window : int
        A query sees so many keys before its own; -1: all of them.
    activation : str
        As :func:`gpu_ops.swiglu` takes it.
    tied : bool
        The output layer's weight is the embedding table.

    Examples
    --------
    >>> from gpu_ops.models import LlamaConfig
    >>> config = LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> config.head_dim, config.parameters
    (16, 125248)
    """

    vocab: int
    hidden: int
    ffn: int
    nlayers: int
    nheads: int
    nheads_kv: int = 0
    head_dim: int = 0
    eps: float = 1e-5
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    window: int = -1
    activation: str = "silu"
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "ffn", "nheads"):
            checks.integer(_WHO, name, getattr(self, name), low=1)
        checks.integer(_WHO, "nlayers", self.nlayers, low=0)
        checks.number(_WHO, "eps", self.eps, low=0.0)
        checks.integer(_WHO, "window", self.window, low=-1)
        checks.one_of(_WHO, "activation", self.activation, get_args(Activation))
        object.__setattr__(self, "nheads_kv", self.nheads_kv or self.nheads)
        if self.nheads % checks.integer(_WHO, "nheads_kv", self.nheads_kv, low=1):
            raise OptionError(f"{_WHO}: nheads={self.nheads} is no multiple of nheads_kv={self.nheads_kv}")
        if not self.head_dim and self.hidden % self.nheads:
            raise OptionError(
                f"{_WHO}: hidden={self.hidden} is no multiple of nheads={self.nheads}; pass head_dim="
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.nheads)
        if checks.integer(_WHO, "head_dim", self.head_dim, low=2) % 2:
            raise OptionError(f"{_WHO}: head_dim={self.head_dim} is odd; rotary embedding turns pairs")

    @property
    def window_size(self) -> tuple[int, int]:
        """As :func:`gpu_ops.attention` takes it."""
        return (self.window, 0) if self.window >= 0 else (-1, -1)

    @property
    def head_slices(self) -> tuple[slice, slice, slice]:
        """The heads of q, k and v among those of ``qkv``."""
        q, kv = self.nheads, self.nheads_kv
        return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by name. ``qkv`` and ``gate_up`` hold the rows of several projections of one input."""
        h, d = self.hidden, self.head_dim
        found: dict[str, tuple[int, ...]] = {"embed": (self.vocab, h)}
        for i in range(self.nlayers):
            found |= {
                f"layers.{i}.attn_norm": (h,),
                f"layers.{i}.qkv": ((self.nheads + 2 * self.nheads_kv) * d, h),
                f"layers.{i}.o": (h, self.nheads * d),
                f"layers.{i}.mlp_norm": (h,),
                f"layers.{i}.gate_up": (2 * self.ffn, h),
                f"layers.{i}.down": (h, self.ffn),
            }
        found["norm"] = (h,)
        return found if self.tied else found | {"lm_head": (self.vocab, h)}

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    @classmethod
    def from_hf(cls, config: Any) -> LlamaConfig:
        """From a Hugging Face config: a dict, or the path of ``config.json`` or its folder.

        Raises
        ------
        OptionError
            An entry is missing, or asks for what a Llama does not have.
        """
        if isinstance(config, (str, Path)):
            path = path_of(f"{_WHO}.from_hf", config)
            path = path / "config.json" if path.is_dir() else path
            with opened(f"{_WHO}.from_hf", path) as file:
                config = _parsed(path, file.read(_MOST_BYTES))
        if not isinstance(config, Mapping):
            raise OptionError(f"{_WHO}.from_hf: expected a dict or a path, got {type(config).__name__}")
        _refuse(config)
        names = {
            "vocab": "vocab_size",
            "hidden": "hidden_size",
            "ffn": "intermediate_size",
            "nlayers": "num_hidden_layers",
            "nheads": "num_attention_heads",
        }
        missing = [name for name in (*names.values(), "rms_norm_eps") if config.get(name) is None]
        if missing:
            raise OptionError(f"{_WHO}.from_hf: the config has no {', '.join(missing)}")
        scaling, window = RopeScaling.from_hf(dict(config)), config.get("sliding_window")
        plain = scaling.kind == "default" and scaling.partial_rotary_factor in (None, 1.0)
        return cls(
            **{ours: config[theirs] for ours, theirs in names.items()},
            nheads_kv=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or 0,
            eps=config["rms_norm_eps"],
            theta=scaling.theta or 10000.0,
            scaling=None if plain else scaling,
            window=-1 if window is None else checks.integer(_WHO, "sliding_window", window, low=1) - 1,
            activation=_ACTIVATIONS[config.get("hidden_act", "silu")],
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _parsed(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{_WHO}.from_hf: {path} is no JSON: {error}") from error


def _refuse(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind is not None and kind not in _TYPES:
        raise OptionError(
            f"{_WHO}.from_hf: model_type is {kind!r}; {' and '.join(_TYPES)} are known. If the model is a Llama in "
            "all but name, change the entry"
        )
    for name, expected in _REFUSED.items():
        if config.get(name) not in (None, expected):
            raise OptionError(
                f"{_WHO}.from_hf: {name}={config[name]!r} is not supported; a Llama has {expected!r}"
            )
    if config.get("hidden_act", "silu") not in _ACTIVATIONS:
        raise OptionError(
            f"{_WHO}.from_hf: hidden_act={config['hidden_act']!r}; known: {', '.join(_ACTIVATIONS)}"
        )
