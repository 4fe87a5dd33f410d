"""Models in the folders of Hugging Face transformers: ``config.json``, and safetensors in one file or in shards.

Weights are read and cast in pieces of 16 MiB, straight into their place: the memory is that of the model. A folder
that does not hold exactly the model of its config is refused before anything is allocated."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import one_of
from gpu_ops.core.out_of_memory import typed_memory_errors
from gpu_ops.errors import FormatError, MissingFileError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, system_errors, write_file
from gpu_ops.formats.safetensors import NUMPY_DTYPES, SafetensorsFile, header_of
from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.models.checkpoint_names import Part, plan_of
from gpu_ops.models.checkpoint_ternary import read_ternary
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.config_hf import read_config
from gpu_ops.models.weights import Llama
from gpu_ops.training.state_arrays import StateArray, check_device, named_dtype, to_device

__all__ = ["load", "save"]

_LOAD, _SAVE = "models.load", "models.save"
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = {NUMPY_DTYPES[name]: name for name in ("F16", "BF16", "F32", "F64")}
_MOST_INDEX = 1 << 24  # bytes; of 100 per tensor
_RECOMPUTED = ".rotary_emb.inv_freq"  # in early Llamas
_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"


@typed_memory_errors(_LOAD)
def load(
    folder: Any, *, dtype: npt.DTypeLike | None = None, device: str | None = None
) -> tuple[Llama, LlamaConfig]:
    """A model from the folder that ``save_pretrained`` of Hugging Face transformers writes, or :func:`save`.

    Parameters
    ----------
    folder : path
        With ``config.json``, and ``model.safetensors`` or the shards that ``model.safetensors.index.json`` names.
    dtype : dtype, optional
        float16, bfloat16, float32 or float64, of all weights; default: that of the embedding table in the file.
    device : {"cpu", "cuda", "emulator"}, optional
        "cuda" gives CuPy arrays, anything else NumPy arrays.

    Returns
    -------
    weights : Llama
        Packed projections of BitNet are a :class:`gpu_ops.TernaryMatrix` each; the rest are arrays.
    config : LlamaConfig

    Raises
    ------
    OptionError
        A config of another family, or one that asks for what its family does not have: see
        :meth:`LlamaConfig.from_hf`. Quantised weights other than BitNet's.
    FormatError, ShapeError
        A damaged file. A tensor is missing, there twice, of another shape than the config says, or one too many.
        The message names it and its file.
    FileError
        A file cannot be read; MissingFileError where there is none.

    Notes
    -----
    Takes the memory of the model, 16 MiB, and with ``device="cuda"`` one array on the host. A line on stderr says
    what is waited for, after a second.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from gpu_ops import models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     models.save(folder, weights, config)
    ...     weights, config = models.load(folder, dtype="bfloat16")
    >>> models.logits(np.array([[1, 2, 3]]), weights, config).shape
    (1, 3, 256)
    """
    where = path_of(_LOAD, folder)
    place = one_of(_LOAD, "device", "cpu" if device is None else device, ("cpu", "cuda", "emulator"))
    check_device(_LOAD, place)
    kind = None if dtype is None else named_dtype(_LOAD, "dtype", dtype)
    entries = read_config(_LOAD, where / "config.json")
    config = LlamaConfig.from_hf(entries)
    with visible(f"gpu_ops: loading {where}"), contextlib.ExitStack() as stack:
        holder = _open(where, stack)
        if config.nlayers > len(holder):  # before there is a list of them
            raise FormatError(
                f"{_LOAD}: {where}: the config has {config.nlayers} layers, and the files {len(holder)} tensors"
            )
        plan = plan_of(config)
        arrays: dict[str, Any] = {**read_ternary(_LOAD, where, entries, plan)}
        packed = {part.name for name in arrays for part in plan[name]}
        _check(where, holder, plan, config, packed)
        if kind is None:
            kind = NUMPY_DTYPES[holder[_TABLE].tensors[_TABLE].dtype]
        for name, shape in config.shapes().items():
            if name in arrays:
                continue
            array = np.empty(shape, kind)
            for part in plan[name]:
                _fill(array[part.rows].reshape(-1), holder[part.name], part.name)
            arrays[name] = to_device(array, place)
    return Llama.of(arrays, config), config


@typed_memory_errors(_SAVE)
def save(
    folder: Any, weights: Llama, config: LlamaConfig, *, entries: Mapping[str, Any] | None = None
) -> None:
    """Write a model that Hugging Face transformers reads, and :func:`load`.

    Parameters
    ----------
    folder : path
        Made if it is not there. ``model.safetensors`` and then ``config.json`` are written, each whole or not at all:
        a file that is there stays as it was until the new one is on the disk.
    weights : Llama
        Arrays of any library, on any device, in float16, bfloat16, float32 or float64. CUDA arrays are copied to the
        host one by one.
    config : LlamaConfig
    entries : mapping, optional
        What else ``config.json`` is to say, such as ``max_position_embeddings`` and ``eos_token_id``; the entries of
        the config that was loaded will do. What ``config`` says itself comes first.

    Raises
    ------
    OptionError
        No family of transformers has the options of ``config`` together; a weight is missing, or no plain array.
    ShapeError, DTypeError
        A weight is not what ``config`` says.
    FileError
        A file cannot be written.
    """
    where = path_of(_SAVE, folder)
    text = _config_text(config, entries, weights)
    given = weights.arrays()
    for name, x in given.items():
        if not hasattr(x, "dtype"):
            raise OptionError(
                f"{_SAVE}: {name} is a {type(x).__name__}; plain arrays are saved: models.merged makes one of a "
                "Lora, .weight is that of a Latent, .dequantize() of a TernaryMatrix"
            )
    if config.tied and weights.lm_head is not weights.embed:
        raise OptionError(f"{_SAVE}: config.tied is True, and lm_head is another array than embed")
    Llama.of(given, config)
    if extra := given.keys() - config.shapes().keys():
        raise OptionError(f"{_SAVE}: the weights have {min(extra)}, and the config has no such thing")
    plan = plan_of(config)
    found = {name: StateArray(_SAVE, name, given[name]) for name in plan}
    tensors = {p.name: (_stored(name, found[name].dtype), p.shape) for name, ps in plan.items() for p in ps}

    def pieces() -> Iterator[Any]:
        yield header_of(tensors, {"format": "pt"})
        for name, parts in plan.items():
            array = found[name].copied()
            for part in parts:
                yield array[part.rows].reshape(-1).view(np.uint8)

    with visible(f"gpu_ops: saving {where}"):
        with system_errors(_SAVE, where):
            where.mkdir(parents=True, exist_ok=True)
        write_file(_SAVE, where / _ONE_FILE, pieces())
        write_file(_SAVE, where / "config.json", [text])


def _config_text(config: LlamaConfig, entries: Mapping[str, Any] | None, weights: Llama) -> bytes:
    """``config.json``."""
    if entries is not None and not isinstance(entries, Mapping):
        raise OptionError(f"{_SAVE}: entries must be a mapping, got {type(entries).__name__}")
    replaced = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "dtype")
    more = {name: value for name, value in (entries or {}).items() if name not in replaced}
    whole = {
        **more,
        **config.to_hf(more.get("model_type")),
        "torch_dtype": str(getattr(weights.embed, "dtype", None)),
    }
    if LlamaConfig.from_hf(whole) != config:
        raise OptionError(f"{_SAVE}: entries= contradict the config; pass fewer of them")
    try:
        return json.dumps(whole, indent=2).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{_SAVE}: entries= cannot be written as JSON: {error}") from error


def _stored(name: str, dtype: np.dtype[Any]) -> str:
    if dtype not in _STORED:
        raise OptionError(f"{_SAVE}: {name} is {dtype}; allowed: {', '.join(map(str, _STORED))}")
    return _STORED[dtype]


def _open(where: Path, stack: contextlib.ExitStack) -> dict[str, SafetensorsFile]:
    """The open file of each tensor."""
    if (where / _ONE_FILE).exists():
        names, listed = [_ONE_FILE], None
    elif (where / _INDEX).exists():
        listed = _read_index(where / _INDEX)
        names = sorted(set(listed.values()))
    else:
        raise MissingFileError(
            errno.ENOENT, f"{_LOAD}: there is no {_ONE_FILE} and no {_INDEX} in this folder", str(where)
        )
    holder: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile(_LOAD, where / name, stack.enter_context(opened(_LOAD, where / name)))
        for tensor in file.tensors:
            if tensor in holder:
                raise FormatError(f"{file.what}: {tensor[:80]!r} is in {holder[tensor].path.name} as well")
            holder[tensor] = file
    for tensor, name in (listed or {}).items():
        if tensor not in holder or holder[tensor].path.name != name:
            raise FormatError(
                f"{_LOAD}: {where / name}: there is no {tensor[:80]!r}, which {_INDEX} says it holds"
            )
    return holder


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor. Only files of the same folder: an index comes from anywhere."""
    with opened(_LOAD, path) as file:
        text = file.read(_MOST_INDEX)
    try:
        listed = json.loads(text)["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise ValueError("its weight_map is no object with an entry")
        for name in listed.values():
            if not isinstance(name, str) or Path(name).name != name or "\0" in name:
                raise ValueError(f"weight_map has the file {name!r:.80}; expected a name in the same folder")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{_LOAD}: {path} is no index of safetensors files: {error}") from error
    return listed


def _check(
    where: Path,
    holder: Mapping[str, SafetensorsFile],
    plan: Mapping[str, list[Part]],
    config: LlamaConfig,
    packed: Set[str],
) -> None:
    """An error unless exactly the tensors of the plan are there. ``packed``: ternary ones, which were read."""
    parts = {part.name: part for each in plan.values() for part in each if part.name not in packed}
    for name, part in parts.items():
        if name not in holder:
            hint = "; if the output layer is the embedding table, set tie_word_embeddings" * (name == _HEAD)
            raise FormatError(f"{_LOAD}: {where}: there is no {name!r}, of shape {part.shape}{hint}")
        stored = holder[name].tensors[name]
        if stored.shape != part.shape:
            raise ShapeError(
                f"{holder[name].what}: {name} has shape {stored.shape}, and {part.shape} by the config"
            )
        if stored.dtype not in _STORED.values():
            raise FormatError(
                f"{holder[name].what}: {name} is {stored.dtype[:80]}; {', '.join(_STORED.values())} are loaded"
            )
    scales = {f"{name}_scale" for name in packed}
    for name in sorted(holder.keys() - parts.keys() - packed - scales):
        if name == _HEAD and config.tied:
            _check_tied(holder)
        elif not name.endswith(_RECOMPUTED):
            raise FormatError(
                f"{holder[name].what}: {name[:80]!r} is no part of a {config.nlayers}-layer model of this config; "
                "what it would do is not known"
            )


def _check_tied(holder: Mapping[str, SafetensorsFile]) -> None:
    """An output layer beside the embedding table that it is."""
    head, table = holder[_HEAD], holder[_TABLE]
    same = str(head.tensors[_HEAD]) == str(table.tensors[_TABLE])
    if not same or not all(map(np.array_equal, _bytes(head, _HEAD), _bytes(table, _TABLE))):
        raise FormatError(
            f"{head.what}: {_HEAD} differs from {_TABLE}, and the config says that they are tied; if the model has "
            "both, set tie_word_embeddings to false"
        )


def _bytes(file: SafetensorsFile, name: str) -> Iterator[Array]:
    return (piece.view(np.uint8) for piece in file.pieces(name))


def _fill(target: Array, file: SafetensorsFile, name: str) -> None:
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
