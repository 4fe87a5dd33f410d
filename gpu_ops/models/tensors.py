"""The tensors of a model's files: which rows of our arrays each of them is, checked against the config, and read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.safetensors import NUMPY_DTYPES
from gpu_ops.models.config import LlamaConfig

__all__ = ["HF", "STORED", "File", "Files", "Names", "Part", "Source", "check", "fill", "planned"]

STORED = {NUMPY_DTYPES[name]: name for name in ("F16", "BF16", "F32", "F64")}


class File(Protocol):
    """What is needed of an open file of tensors."""

    what: str
    path: Path

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By name; each has a ``dtype``, by its name in the format, and a ``shape``."""

    def pieces(self, name: str) -> Iterator[Array]:
        """The elements of a float tensor in order, a few at a time."""


Files = Mapping[str, File]
"""The open file of each tensor."""


@dataclass(frozen=True)
class Names:
    """What a format calls the tensors of a model."""

    modules: Mapping[str, tuple[str, ...]]
    """Those whose rows follow each other in one of our arrays; ``_bias`` has the same modules."""
    layer: str
    """In front of those of a layer."""
    dtypes: tuple[str, ...]
    """Which are read."""
    unread: tuple[str, ...]
    """Ends of names: tensors that the config says too."""

    @property
    def embed(self) -> str:
        return f"{self.modules['embed'][0]}.weight"

    @property
    def lm_head(self) -> str:
        return f"{self.modules['lm_head'][0]}.weight"


HF = Names(
    modules={
        "embed": ("model.embed_tokens",),
        "norm": ("model.norm",),
        "lm_head": ("lm_head",),
        "attn_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
    },
    layer="model.layers.{}.",
    dtypes=tuple(STORED.values()),
    unread=(".rotary_emb.inv_freq",),  # in early Llamas
)


@dataclass(frozen=True)
class Part:
    """A tensor of a file: rows of an array of ours."""

    name: str
    rows: slice
    shape: tuple[int, ...]


@dataclass
class Source:
    """The config and the files of a model."""

    config: LlamaConfig
    files: Files
    names: Names

    def read(self, name: str, parts: list[Part], dtype: np.dtype[Any]) -> Any:
        """An array of ours, made of these parts."""
        array = np.empty((parts[-1].rows.stop, *parts[0].shape[1:]), dtype)
        for part in parts:
            fill(array[part.rows].reshape(-1), self.files[part.name], part.name)
        return array


def planned(config: LlamaConfig, names: Names) -> dict[str, list[Part]]:
    """The tensors that each array is made of."""
    q, kv = config.nheads * config.head_dim, config.nheads_kv * config.head_dim
    joined = {"qkv": (q, kv, kv), "gate_up": (config.ffn, config.ffn)}
    found = {}
    for name, shape in config.shapes().items():
        layer, _, part = name.rpartition(".")
        of, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
        prefix = names.layer.format(layer.removeprefix("layers.")) if layer else ""
        starts = [0, *itertools.accumulate(joined.get(of, shape[:1]))]
        found[name] = [
            Part(f"{prefix}{module}.{suffix}", slice(start, end), (end - start, *shape[1:]))
            for module, (start, end) in zip(names.modules[of], itertools.pairwise(starts), strict=True)
        ]
    return found


def check(op: str, where: Path, source: Source) -> dict[str, list[Part]]:
    """The plan; an error unless exactly its tensors are there."""
    config, files, names = source.config, source.files, source.names
    if config.nlayers > len(files):  # before there is a list of them
        raise FormatError(
            f"{op}: {where}: the config has {config.nlayers} layers, and the files {len(files)} tensors"
        )
    found = planned(config, names)
    parts = {part.name: part for each in found.values() for part in each}
    for name, part in parts.items():
        if name not in files:
            hint = "; if the output layer is the embedding table, set tie_word_embeddings"
            raise FormatError(
                f"{op}: {where}: there is no {name!r}, of shape {part.shape}{hint * (name == names.lm_head)}"
            )
        stored = files[name].tensors[name]
        if stored.shape != part.shape:
            raise ShapeError(
                f"{files[name].what}: {name} has shape {stored.shape}, and {part.shape} by the config"
            )
        if stored.dtype not in names.dtypes:
            raise FormatError(
                f"{files[name].what}: {name} is {stored.dtype[:80]}; {', '.join(names.dtypes)} are loaded"
            )
    for name in sorted(files.keys() - parts.keys()):
        if name == names.lm_head and config.tied:
            _check_tied(files, names)
        elif not name.endswith(names.unread):
            raise FormatError(
                f"{files[name].what}: {name[:80]!r} is no part of a {config.nlayers}-layer model of this config; "
                "what it would do is not known"
            )
    return found


def _check_tied(files: Files, names: Names) -> None:
    """An output layer beside the embedding table that it is."""
    head, table = files[names.lm_head], files[names.embed]
    same = str(head.tensors[names.lm_head]) == str(table.tensors[names.embed])
    if not same or not all(map(np.array_equal, _bytes(head, names.lm_head), _bytes(table, names.embed))):
        raise FormatError(
            f"{head.what}: {names.lm_head} differs from {names.embed}, and the config says that they are tied; if "
            "the model has both, set tie_word_embeddings to false"
        )


def _bytes(file: File, name: str) -> Iterator[Array]:
    return (piece.view(np.uint8) for piece in file.pieces(name))


def fill(target: Array, file: File, name: str) -> None:
    """The elements of a tensor, cast."""
    at = 0
    for piece in file.pieces(name):
        place = target[at : at + len(piece)]
        with np.errstate(over="ignore"):
            place[...] = piece
        if piece.dtype != target.dtype and (np.isinf(place) & np.isfinite(piece)).any():
            raise OptionError(
                f"{file.what}: {name} holds numbers beyond the range of {target.dtype}; load bfloat16 or float32"
            )
        at += len(piece)
