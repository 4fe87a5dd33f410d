"""Models in GGUF files: the config from the metadata, and tensors under llama.cpp's names.

Files of the architecture ``llama`` hold the rows of queries and keys in the order of interleaved rotary pairs. They
are reordered, so that a model is the same as from its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import integer
from gpu_ops.errors import FormatError, OptionError
from gpu_ops.formats.gguf_file import FLOATS, PACKED, TERNARY, GGUFFile
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.models.config import PROJECTIONS, LlamaConfig
from gpu_ops.models.tensors import ModelSource, Names, Part, fill

__all__ = ["NAMES", "GGUFSource"]

NAMES = Names(
    modules={
        "embed": ("token_embd",),
        "norm": ("output_norm",),
        "lm_head": ("output",),
        "attn_norm": ("attn_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "o": ("attn_output",),
        "mlp_norm": ("ffn_norm",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
        "q_norm": ("attn_q_norm",),
        "k_norm": ("attn_k_norm",),
        "attn_sub_norm": ("attn_sub_norm",),
        "ffn_sub_norm": ("ffn_sub_norm",),
    },
    layer="blk.{}.",
    dtypes=(*FLOATS, *TERNARY),
    unread=("rope_freqs.weight",),  # read for the config instead
)
_EMBED, _FREQS = NAMES.embed, "rope_freqs.weight"


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    """Model type in transformers."""
    interleaved: bool
    """Whether rotary pairs are neighbours: the rows of a head are then 0, d/2, 1, d/2 + 1, ... in our order."""
    activation: str = "silu"


_ARCHITECTURES = {
    "llama": _Architecture("llama", interleaved=True),
    "qwen2": _Architecture("qwen2", interleaved=False),
    "qwen3": _Architecture("qwen3", interleaved=False),
    "bitnet": _Architecture("bitnet", interleaved=False),  # of the first reproductions, in llama.cpp
    **dict.fromkeys(  # of bitnet.cpp: BitNet b1.58 2B4T
        ("bitnet-b1.58", "bitnet-25"), _Architecture("bitnet", interleaved=False, activation="relu2")
    ),
}
# Keys of an architecture, and the equivalent entries of a Hugging Face config.
_NEEDED = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_READ = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "context_length"),
)
_SAY_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
# All other keys change the model, unless they have the value listed here, or 0 if none is listed. A model that
# ignored one would run and be wrong.
_NEUTRAL = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


class GGUFSource(ModelSource[LlamaConfig]):
    """A model in an open GGUF file."""

    def __init__(self, op: str, path: Path, file: BinaryIO, activations: str | None = None) -> None:
        """``activations``: keep quantised matrices packed, with this form of activations."""
        self._activations = activations
        self._file = GGUFFile(op, path, file)
        metadata = _Metadata(op, self._file)
        self._interleaved = metadata.architecture.interleaved
        config = LlamaConfig.from_hf(metadata.entries())
        super().__init__(config, dict.fromkeys(self._file.tensors, self._file), NAMES)

    def read(self, name: str, parts: list[Part], dtype: np.dtype[Any]) -> Any:
        """Read an array of ``dtype``, or a packed matrix: of I2_S projections a :class:`TernaryMatrix`."""
        ternary = all(self._file.tensors[part.name].dtype in TERNARY for part in parts)
        if ternary and name.rpartition(".")[2] in PROJECTIONS:
            return self._ternary(parts)
        quantized = all(self._file.tensors[part.name].dtype in PACKED for part in parts)
        if quantized and self._activations is not None:
            return PackedMatrix.joined([self._packed(part) for part in parts])
        array = np.empty((parts[-1].rows.stop, *parts[0].shape[1:]), dtype)
        for part in parts:
            rows = array[part.rows]
            fill(rows.reshape(-1), self._file, part.name)
            if (ordered := self._ordered(part, rows)) is not rows:
                rows[...] = ordered
        return array

    def _packed(self, part: Part) -> PackedMatrix:
        assert self._activations is not None
        matrix = self._file.packed(part.name).with_activations(self._activations)
        rows = np.arange(matrix.shape[0])
        ordered = self._ordered(part, rows)
        return matrix if ordered is rows else matrix.rows(ordered)

    def _ternary(self, parts: list[Part]) -> TernaryMatrix:
        matrices = [(part, self._file.matrix(part.name)) for part in parts]
        return TernaryMatrix.joined(
            [TernaryMatrix.from_trits(self._ordered(part, w.trits()), w.scale) for part, w in matrices]
        )

    def _ordered(self, part: Part, rows: Array) -> Array:
        """Rows of a part in our order: for queries and keys, all first components of pairs before the second ones."""
        if not self._interleaved or not part.name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
            return rows
        pairs = rows.reshape(-1, self.config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


class _Metadata:
    """Metadata of a file as the entries of a Hugging Face config."""

    def __init__(self, op: str, file: GGUFFile) -> None:
        self._op, self._file = op, file
        name = file.value("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise OptionError(
                f"{file.what}: general.architecture is {name!r:.80}; known: {', '.join(_ARCHITECTURES)}"
            )
        if (count := file.value("split.count")) not in (None, 0, 1):
            raise FormatError(
                f"{file.what} is one of {count} parts of a model; join them: llama-gguf-split --merge"
            )
        self._prefix, self.architecture = f"{name}.", _ARCHITECTURES[name]

    def entries(self) -> dict[str, Any]:
        file, tensors = self._file, self._file.tensors
        self._check_others()
        entries: dict[str, Any] = {theirs: self._value(key) for key, theirs in _NEEDED.items()}
        for key, theirs in _NEEDED.items():
            if entries[theirs] is None:
                raise FormatError(f"{file.what}: there is no {self._prefix}{key}")
        if _EMBED not in tensors or len(tensors[_EMBED].shape) != 2:
            raise FormatError(f"{file.what}: there is no {_EMBED!r} of two axes")
        head_dim = self._head_dim()
        entries |= {
            "model_type": self.architecture.model_type,
            "hidden_act": self.architecture.activation,
            "vocab_size": tensors[_EMBED].shape[0],
            "num_key_value_heads": self._integer("attention.head_count_kv", entries["num_attention_heads"]),
            "head_dim": head_dim,
            "rope_theta": self._value("rope.freq_base", 10000.0),
            "rope_scaling": self._scaling(head_dim),
            "tie_word_embeddings": NAMES.lm_head not in tensors,
        }
        for entry, module in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_down")):
            if f"blk.0.{module}.bias" in tensors:
                entries[entry] = True
        return entries

    def _value(self, key: str, otherwise: Any = None) -> Any:
        value = self._file.value(self._prefix + key)
        return otherwise if value is None else value

    def _integer(self, key: str, otherwise: Any) -> int:
        return integer(self._op, self._prefix + key, self._value(key, otherwise), low=1)

    def _check_others(self) -> None:
        """Raise an error if a key changes the model in an unsupported way."""
        known = (*_NEEDED, *_READ, *_SAY_NOTHING)
        for name in self._file.keys:
            key = name.removeprefix(self._prefix)
            if key == name or key in known:
                continue
            value = self._file.value(name)
            if value not in ((_NEUTRAL[key],) if key in _NEUTRAL else (0, "")):
                raise OptionError(f"{self._file.what}: {name[:80]}={value!r:.80} is not supported")

    def _head_dim(self) -> int:
        heads, hidden = (self._integer(key, None) for key in ("attention.head_count", "embedding_length"))
        head_dim = self._integer("attention.key_length", hidden // heads)
        for key, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotated parts")):
            if (other := self._integer(key, head_dim)) != head_dim:
                raise OptionError(
                    f"{self._file.what}: {self._prefix}{key} is {other}, and a head has {head_dim} dimensions; "
                    f"{what} of another size are not supported"
                )
        return head_dim

    def _scaling(self, head_dim: int) -> Mapping[str, Any] | None:
        """Rope part of a config."""
        factor = self._value("rope.scaling.factor", 0.0)
        name = self._value("rope.scaling.type", "linear" if factor else "none")  # as llama.cpp reads it
        if _FREQS in self._file.tensors:
            if name != "none":
                raise OptionError(
                    f"{self._file.what}: {_FREQS} and {self._prefix}rope.scaling.type={name!r:.80} together are not "
                    "supported"
                )
            return self._divisors(head_dim)
        if name == "none":
            return None
        if name == "linear":
            return {"rope_type": "linear", "factor": factor}
        if name != "yarn":
            raise OptionError(
                f"{self._file.what}: {self._prefix}rope.scaling.type is {name!r:.80}; known: none, linear, yarn"
            )
        betas = {f"beta_{end}": self._value(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        return {"rope_type": "yarn", "factor": factor, **self._original(), **betas}

    def _original(self) -> dict[str, int]:
        """Length that the model was trained with, as an entry."""
        length = self._integer("rope.scaling.original_context_length", self._value("context_length"))
        return {"original_max_position_embeddings": length}

    def _divisors(self, head_dim: int) -> Mapping[str, Any]:
        """Rope part for one divisor per frequency: llama3 if they are those of Llama 3.1 or later, else longrope."""
        stored = self._file.tensors[_FREQS]
        if stored.shape != (head_dim // 2,) or stored.dtype != "F32":
            raise FormatError(
                f"{self._file.what}: {_FREQS} is {stored.dtype} {stored.shape}; expected F32 {(head_dim // 2,)}"
            )
        divisors = np.concatenate(list(self._file.pieces(_FREQS))).astype(np.float64)
        theta = self._value("rope.freq_base", 10000.0)
        llama3 = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if divisors.max() > 1:
            plain = RopeScaling("default").inv_freq(head_dim, theta)
            ratio = plain / RopeScaling.from_hf(llama3).inv_freq(head_dim, theta)
            if np.allclose(ratio, divisors, rtol=1e-5, atol=0):
                return llama3
        return {
            "rope_type": "longrope",  # has a divisor for each frequency
            "short_factor": divisors.tolist(),
            "long_factor": divisors.tolist(),
            "attention_factor": 1.0,
            **self._original(),
        }
