"""Sizes of a BERT, from the config of Hugging Face transformers, and the names of its tensors there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpu_ops.core import checks
from gpu_ops.errors import OptionError
from gpu_ops.models.config_hf import SIZES
from gpu_ops.models.tensors import STORED, Names

__all__ = ["NAMES", "BertConfig"]

_WHO = "BertConfig"
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ENTRIES = {
    **SIZES,
    "max_positions": "max_position_embeddings",
    "ntypes": "type_vocab_size",
}
# Entries that change the model, and the values that do not change it.
_NEUTRAL = {
    "model_type": ("bert", None),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
NAMES = Names(
    modules={
        "embed": ("embeddings.word_embeddings",),
        "positions": ("embeddings.position_embeddings",),
        "types": ("embeddings.token_type_embeddings",),
        "norm": ("embeddings.LayerNorm",),
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "o": ("attention.output.dense",),
        "attn_norm": ("attention.output.LayerNorm",),
        "up": ("intermediate.dense",),
        "down": ("output.dense",),
        "mlp_norm": ("output.LayerNorm",),
    },
    layer="encoder.layer.{}.",
    dtypes=tuple(STORED.values()),
    unread=(
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    ),  # token states do not use them
)


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT.

    Parameters
    ----------
    vocab, hidden, ffn, nlayers, nheads : int
        hidden is a multiple of nheads.
    max_positions : int
        Number of tokens of the longest sequence.
    ntypes : int
        Number of token types, such as those of a first and a second sentence.
    eps : float
        Epsilon of the layer norms.
    activation : {"gelu", "gelu_tanh"}
    """

    vocab: int
    hidden: int
    ffn: int
    nlayers: int
    nheads: int
    max_positions: int = 512
    ntypes: int = 2
    eps: float = 1e-12
    activation: str = "gelu"
    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in _ENTRIES:
            checks.integer(_WHO, name, getattr(self, name), low=int(name != "nlayers"))
        checks.computable(_WHO, "eps", self.eps, "float32", low=0.0)
        checks.one_of(_WHO, "activation", self.activation, set(_ACTIVATIONS.values()))
        if self.hidden % self.nheads:
            raise OptionError(f"{_WHO}: hidden={self.hidden} is no multiple of nheads={self.nheads}")

    @property
    def head_dim(self) -> int:
        """Number of elements of a head."""
        return self.hidden // self.nheads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read the entries of a Hugging Face config; OptionError for those of another model."""
        for name, allowed in _NEUTRAL.items():
            if config.get(name) not in allowed:
                raise OptionError(
                    f"{_WHO}.from_hf: {name}={config[name]!r:.80} is not supported; expected {allowed[0]!r}"
                )
        missing = [name for name in (*_ENTRIES.values(), "layer_norm_eps") if config.get(name) is None]
        if missing:
            raise OptionError(f"{_WHO}.from_hf: the config has no {', '.join(missing)}")
        act = checks.one_of(f"{_WHO}.from_hf", "hidden_act", config.get("hidden_act", "gelu"), _ACTIVATIONS)
        sizes = {ours: config[theirs] for ours, theirs in _ENTRIES.items()}
        return cls(**sizes, eps=config["layer_norm_eps"], activation=_ACTIVATIONS[act])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name; weights of layers are called ``layers.<i>.<part>``."""
        h, f, vector = self.hidden, self.ffn, (self.hidden,)
        block: dict[str, tuple[int, ...]] = {"qkv": (3 * h, h), "o": (h, h), "up": (f, h), "down": (h, f)}
        block |= {"attn_norm": vector, "mlp_norm": vector}
        block |= {f"{part}_bias": shape[:1] for part, shape in block.items()}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, h), "norm": vector, "norm_bias": vector}
        shapes |= {"positions": (self.max_positions, h), "types": (self.ntypes, h)}
        for i in range(self.nlayers):
            shapes |= {f"layers.{i}.{part}": shape for part, shape in block.items()}
        return shapes

    def joined(self) -> dict[str, tuple[int, ...]]:
        """Numbers of rows of q, k and v in ``qkv``."""
        return {"qkv": (self.hidden,) * 3}
