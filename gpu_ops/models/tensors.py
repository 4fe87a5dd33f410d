"""Tensors of a model's files: mapping to rows of our arrays, checks, and reading; packed ternary projections."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.files import opened
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.quantized_layers import METHODS, QuantizedLayer, quantized_layer
from gpu_ops.formats.safetensors import NUMPY_DTYPES, SafetensorsFile
from gpu_ops.formats.ternary_files import read_bitnet
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.models.config import PROJECTIONS

__all__ = [
    "HF",
    "ONE_FILE",
    "STORED",
    "File",
    "Files",
    "ModelConfig",
    "ModelSource",
    "Names",
    "PackedWeight",
    "Part",
    "checked_plan",
    "fill",
    "open_folder",
    "packed_weights",
    "planned",
    "read_all",
    "same_values",
    "with_post_norms",
    "with_prefix",
    "with_stored_prefix",
]

ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OUTER = ("embed", "positions", "types", "norm")  # parts outside layers, except the output layer
_MOST_INDEX = 1 << 24  # bytes, at 100 per tensor
STORED = {NUMPY_DTYPES[name]: name for name in ("F16", "BF16", "F32", "F64")}


class ModelConfig(Protocol):
    """Interface of a model's config."""

    @property
    def nlayers(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether the output layer's weight is the embedding table."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array by name; arrays of layers are called ``layers.<i>.<part>``."""

    def joined(self) -> dict[str, tuple[int, ...]]:
        """Parts of a layer that join several tensors, with the number of rows of each."""


AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)


class File(Protocol):
    """Interface of an open file of tensors."""

    what: str
    path: Path

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensors by name; each has a ``dtype``, by its name in the format, and a ``shape``."""

    def pieces(self, name: str) -> Iterator[Array]:
        """Elements of a float tensor in order, some at a time."""


Files = Mapping[str, File]
"""Open file of each tensor."""


@dataclass(frozen=True)
class Names:
    """Names of the tensors of a model in a format."""

    modules: Mapping[str, tuple[str, ...]]
    """Modules whose rows follow each other in one of our arrays; ``_bias`` has the same modules."""
    layer: str
    """Prefix of the modules of a layer."""
    dtypes: tuple[str, ...]
    """Dtypes that are read."""
    unread: tuple[str, ...]
    """Suffixes of names of tensors that are not read, as the config has the same information."""

    @property
    def embed(self) -> str:
        return f"{self.modules['embed'][0]}.weight"

    @property
    def lm_head(self) -> str:
        """Name of the output layer's tensor; empty if a model has none."""
        return f"{self.modules['lm_head'][0]}.weight" if "lm_head" in self.modules else ""


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
        "attn_sub_norm": ("self_attn.attn_sub_norm",),
        "ffn_sub_norm": ("mlp.ffn_sub_norm",),
    },
    layer="model.layers.{}.",
    dtypes=tuple(STORED.values()),
    unread=(".rotary_emb.inv_freq",),  # in early Llamas
)


def with_post_norms(names: Names) -> Names:
    """Names for a model with post-norms, one of which has the usual name of ``mlp_norm``."""
    others = {
        "attn_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    }
    return replace(names, modules={**names.modules, **others})


def with_prefix(names: Names, prefix: str, old: str = "") -> Names:
    """Names of the same tensors with ``prefix`` in place of ``old``, except for the output layer."""
    outer = {part: modules for part, modules in names.modules.items() if part in _OUTER}
    renamed = {part: tuple(prefix + name.removeprefix(old) for name in each) for part, each in outer.items()}
    return replace(names, modules={**names.modules, **renamed}, layer=prefix + names.layer.removeprefix(old))


def with_stored_prefix(names: Names, files: Files) -> Names:
    """Names of a decoder as in its files: those of a base model lack the prefix ``model.``."""
    for prefix in ("", "model.model."):
        if f"{prefix}norm.weight" in files and "model.norm.weight" not in files:
            return with_prefix(names, prefix, "model.")
    return names


@dataclass(frozen=True)
class Part:
    """A tensor of a file that is some rows of one of our arrays."""

    name: str
    rows: slice
    shape: tuple[int, ...]


class PackedWeight(NamedTuple):
    """One of our arrays that is packed in a file: the names of its tensors, and a function that reads it."""

    tensors: Set[str]
    read: Callable[[], Any]


@dataclass
class ModelSource(Generic[AnyConfig]):
    """Config and files of a model."""

    config: AnyConfig
    files: Files
    names: Names

    def packed(self, plan: Mapping[str, list[Part]]) -> Mapping[str, PackedWeight]:
        """Find and check our arrays whose tensors are packed in a special format. None here."""
        return {}

    def read(self, name: str, parts: list[Part], dtype: np.dtype[Any]) -> Any:
        """Read one of our arrays from these parts."""
        array = np.empty((parts[-1].rows.stop, *parts[0].shape[1:]), dtype)
        for part in parts:
            fill(array[part.rows].reshape(-1), self.files[part.name], part.name)
        return array


def planned(config: ModelConfig, names: Names) -> dict[str, list[Part]]:
    """Tensors that each array consists of."""
    joined, plan = config.joined(), {}
    for name, shape in config.shapes().items():
        layer, _, part = name.rpartition(".")
        base, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
        prefix = names.layer.format(layer.removeprefix("layers.")) if layer else ""
        starts = [0, *itertools.accumulate(joined.get(base, shape[:1]))]
        plan[name] = [
            Part(f"{prefix}{module}.{suffix}", slice(start, end), (end - start, *shape[1:]))
            for module, (start, end) in zip(names.modules[base], itertools.pairwise(starts), strict=True)
        ]
    return plan


def read_all(
    op: str, where: Path, source: ModelSource[Any], dtype: np.dtype[Any] | None
) -> Iterator[tuple[str, Any]]:
    """Read the arrays of a model by name, one at a time; first check that the files hold exactly its tensors.

    ``dtype`` None: that of the embedding table, float32 if it is quantised."""
    plan, packed = checked_plan(op, where, source)
    table = source.names.embed
    if dtype is None:
        dtype = NUMPY_DTYPES.get(source.files[table].tensors[table].dtype, np.dtype(np.float32))
    for name, parts in plan.items():
        yield name, packed[name].read() if name in packed else source.read(name, parts, dtype)


def checked_plan(
    op: str, where: Path, source: ModelSource[Any]
) -> tuple[dict[str, list[Part]], Mapping[str, PackedWeight]]:
    """Return the plan and its packed arrays. Raises unless the files hold exactly the tensors of the plan."""
    config, files, names = source.config, source.files, source.names
    if config.nlayers > len(files):  # before a list of layers is made
        raise FormatError(
            f"{op}: {where}: the config has {config.nlayers} layers, and the files {len(files)} tensors"
        )
    plan = planned(config, names)
    packed = source.packed(plan)
    packed_names = set().union(*(weight.tensors for weight in packed.values()))
    parts = {part.name: part for name, each in plan.items() for part in each if name not in packed}
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
    for name in sorted(files.keys() - parts.keys() - packed_names):
        if not (config.tied and name == names.lm_head) and not name.endswith(names.unread):
            raise FormatError(
                f"{files[name].what}: {name[:80]!r} is no part of a {config.nlayers}-layer model of this config; "
                "what it would do is not known"
            )
    return plan, packed


def same_values(files: Files, names: Names, *, rounded: bool = False) -> bool:
    """Whether the output layer equals the embedding table; ``rounded``: up to rounding to the narrower dtype."""
    pair = [(files[name], name) for name in (names.lm_head, names.embed)]
    head, table = (file.tensors[name] for file, name in pair)
    if head.shape != table.shape or not {head.dtype, table.dtype} <= set(names.dtypes):
        return False
    dtypes = [NUMPY_DTYPES[stored.dtype] for stored in (head, table)]
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    target = narrow if rounded or dtypes[0] == dtypes[1] else np.dtype(np.float64)
    counts = [dtype.itemsize // narrow.itemsize for dtype in dtypes]  # of pieces with as many elements
    streams = (_cast(*each, count, target) for each, count in zip(pair, counts, strict=True))
    return all(map(np.array_equal, *streams))


def _cast(file: File, name: str, count: int, dtype: np.dtype[Any]) -> Iterator[Array]:
    """Bytes of a tensor, cast, ``count`` pieces at a time."""
    pieces = file.pieces(name)
    while batch := list(itertools.islice(pieces, count)):
        with np.errstate(all="ignore"):
            yield np.concatenate(batch).astype(dtype).view(np.uint8)


def fill(target: Array, file: File, name: str) -> None:
    """Read the elements of a tensor into ``target``, cast."""
    end = 0
    for piece in file.pieces(name):
        rows = target[end : end + len(piece)]
        with np.errstate(all="ignore"):
            rows[...] = piece
        if piece.dtype != target.dtype and (np.isinf(rows) & np.isfinite(piece)).any():
            raise OptionError(
                f"{file.what}: {name} holds numbers beyond the range of {target.dtype}; load bfloat16 or float32"
            )
        end += len(piece)


def open_folder(op: str, where: Path, stack: contextlib.ExitStack) -> dict[str, SafetensorsFile]:
    """Open the files of a folder, one file or those that an index lists; return the file of each tensor."""
    if (where / ONE_FILE).exists():
        names, listed = [ONE_FILE], None
    elif (where / _INDEX).exists():
        listed = _read_index(op, where / _INDEX)
        names = sorted(set(listed.values()))
    else:
        raise MissingFileError(
            errno.ENOENT, f"{op}: there is no {ONE_FILE} and no {_INDEX} in this folder", str(where)
        )
    holder: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile(op, where / name, stack.enter_context(opened(op, where / name)))
        for tensor in file.tensors:
            if tensor in holder:
                raise FormatError(f"{file.what}: {tensor[:80]!r} is in {holder[tensor].path.name} as well")
            holder[tensor] = file
    for tensor, name in (listed or {}).items():
        if tensor not in holder or holder[tensor].path.name != name:
            raise FormatError(
                f"{op}: {where / name}: there is no {tensor[:80]!r}, which {_INDEX} says it holds"
            )
    return holder


def _read_index(op: str, path: Path) -> dict[str, str]:
    """Read the file name of each tensor. Only files of the same folder are allowed, as an index is untrusted."""
    with opened(op, path) as file:
        text = file.read(_MOST_INDEX)
    try:
        listed = json.loads(text)["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise ValueError("its weight_map is no object with an entry")
        for name in listed.values():
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise ValueError(f"weight_map has the file {name!r:.80}; expected a name in the same folder")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{op}: {path} is no index of safetensors files: {error}") from error
    return listed


def packed_weights(
    who: str,
    where: Path,
    entries: Mapping[str, Any],
    files: Mapping[str, Any],
    plan: Mapping[str, list[Part]],
) -> dict[str, PackedWeight]:
    """Find the packed weights of a folder, by the names of the model's arrays; none in a checkpoint of floats."""
    quantization = entries.get("quantization_config")
    if quantization is None:
        return {}
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method == "bitnet":
        return _read_ternary(who, where, quantization, plan)
    if method not in METHODS:
        raise OptionError(
            f"{who}: {where}: quantization_config has quant_method={method!r:.80}; weights that are loaded: floats, "
            f"bitnet, {', '.join(METHODS)}"
        )
    weights = {}
    for name, parts in plan.items():
        if len(parts[0].shape) != 2:
            continue
        modules = [part.name.removesuffix(".weight") for part in parts]
        layers = [
            quantized_layer(files, module, part.shape, quantization)  # type: ignore[arg-type]  # two axes
            for module, part in zip(modules, parts, strict=True)
        ]
        present = [layer for layer in layers if layer is not None]
        if not present:
            continue
        if len(present) < len(layers):
            raise FormatError(
                f"{who}: {where}: {present[0].name} is quantised, and the model's {name} is not as a whole"
            )
        weights[name] = PackedWeight(
            set().union(*(layer.tensors for layer in present)), functools.partial(_read_layers, present)
        )
    if not weights:
        raise FormatError(f"{who}: {where}: quantization_config says that weights are quantised, and none is")
    return weights


def _read_layers(layers: Sequence[QuantizedLayer]) -> PackedMatrix:
    """Read layers into one matrix."""
    return PackedMatrix.joined([layer.read() for layer in layers])


def _read_ternary(
    who: str, where: Path, quantization: Mapping[str, Any], plan: Mapping[str, list[Part]]
) -> dict[str, PackedWeight]:
    """Read BitNet's packed projections, by the names of the model's arrays."""
    for name, expected in {"quantization_mode": "offline", "use_rms_norm": False}.items():
        if quantization.get(name) not in (None, expected):
            raise OptionError(
                f"{who}: {where}: quantization_config has {name}={quantization[name]!r}, expected {expected!r}"
            )
    packed = read_bitnet(where)
    if not packed:
        raise FormatError(f"{who}: {where}: quantization_config says that weights are packed, and none is")
    arrays = {}
    for name, parts in plan.items():
        modules = [part.name.removesuffix(".weight") for part in parts]
        present = [module for module in modules if module in packed]
        if not present:
            continue
        if len(present) < len(modules) or name.rpartition(".")[2] not in PROJECTIONS:
            raise FormatError(
                f"{who}: {where}: {present[0]} is packed, and the model's {name} is not as a whole"
            )
        if f"{name}_bias" in plan and quantization.get("linear_class") == "autobitlinear":
            raise OptionError(
                f"{who}: {where}: {present[0]} has a bias, which the scale of an AutoBitLinear multiplies as well; "
                "that is not supported"
            )
        matrices = [packed.pop(module) for module in modules]
        for part, matrix in zip(parts, matrices, strict=True):
            if matrix.shape != part.shape:
                raise ShapeError(
                    f"{who}: {where}: {part.name} is {matrix.shape}, and {part.shape} by the config"
                )
        weight = TernaryMatrix.joined(matrices)
        tensors = {stored for part in parts for stored in (part.name, f"{part.name}_scale")}
        arrays[name] = PackedWeight(tensors, functools.partial(_as_read, weight))
    if packed:
        raise FormatError(f"{who}: {where}: {min(packed)} is packed, and no part of a model of this config")
    return arrays


def _as_read(weight: TernaryMatrix) -> TernaryMatrix:
    return weight
