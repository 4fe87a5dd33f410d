"""Files of LoRA adapters, in the format of Hugging Face PEFT."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import instance
from gpu_ops.core.state_arrays import StateArray, named_dtype
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, system_errors, write_file
from gpu_ops.formats.safetensors import SafetensorsFile, header_of
from gpu_ops.models.config import PROJECTIONS, LlamaConfig
from gpu_ops.models.config_hf import read_config
from gpu_ops.models.tensors import HF, STORED, Part, planned, with_post_norms

__all__ = ["load_adapters", "save_adapters"]

_LOAD, _SAVE = "models.load_adapters", "models.save_adapters"
_CONFIG, _TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(layers\..+)\.lora_([AB])(?:\.default)?\.weight")
# Entries of PEFT's config that change the result in ways other than a pair of matrices.
_REFUSED = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
)


class _Adapter(NamedTuple):
    """Adapter of a module in a file: ``x @ a.T @ b.T * scale``."""

    a: Array
    b: Array
    scale: float


@typed_memory_errors(_SAVE)
def save_adapters(folder: Any, adapters: Mapping[str, Any], config: LlamaConfig, *, base: str = "") -> None:
    """Write adapters that PEFT and :func:`load_adapters` read: ``adapter_model.safetensors`` and
    ``adapter_config.json``.

    The files have an adapter for each module of transformers: those of ``qkv`` and of ``gate_up`` share ``a``, and
    each has its rows of ``b``. Their ``lora_alpha`` equals the rank, as ``b`` includes the factor.

    Parameters
    ----------
    folder : path
        Created if missing. Each file is written atomically.
    adapters : mapping
        Arrays by the names of :func:`lora_shapes`, of any library, on any device.
    config : LlamaConfig
    base : str
        Name or folder of the base model, for PEFT to find it.

    Raises
    ------
    OptionError
        A name is that of no projection, a pair is incomplete, or its dtype is not stored.
    ShapeError
        An adapter does not match ``config``.
    FileError
        A file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops import models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> adapters = models.initial_lora(models.lora_shapes(config, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     models.save_adapters(folder, adapters, config)
    ...     loaded = models.load_adapters(folder, config)
    >>> loaded["layers.0.qkv.a"].shape, loaded.keys() == adapters.keys()
    ((4, 64), True)
    """
    where = path_of(_SAVE, folder)
    instance(_SAVE, "config", config, LlamaConfig)
    if not isinstance(base, str):
        raise OptionError(f"{_SAVE}: base must be a name or a folder, got {type(base).__name__}")
    states = {name: StateArray(_SAVE, name, x) for name, x in adapters.items()}
    plan, ranks = _projections(config), {}
    tensors: dict[str, tuple[str, slice]] = {}
    for name in states:
        projection, _, half = name.rpartition(".")
        if projection not in plan or half not in ("a", "b"):
            raise OptionError(
                f"{_SAVE}: {name!r:.80} is no adapter of this config; names are layers.<i>.<"
                f"{'|'.join(PROJECTIONS)}>.<a|b>"
            )
    for projection, parts in plan.items():
        names = f"{projection}.a", f"{projection}.b"
        present = [name for name in names if name in states]
        if len(present) == 1:
            raise OptionError(f"{_SAVE}: there is {present[0]}, and not the other array of its pair")
        if not present:
            continue
        shapes = tuple(states[name].shape for name in names)
        rank = shapes[0][0] if shapes[0] else 0
        expected = (rank, parts[0].shape[1]), (parts[-1].rows.stop, rank)
        if shapes != expected or not rank:
            raise ShapeError(f"{_SAVE}: {projection} has a and b of shapes {shapes}, expected {expected}")
        for part in parts:
            module = part.name.removesuffix(".weight")
            ranks[module] = rank
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = (names[0], slice(None))
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = (names[1], part.rows)
    if not ranks:
        raise OptionError(f"{_SAVE}: adapters is empty")
    stored = {}
    for tensor, (name, rows) in tensors.items():
        dtype = states[name].dtype
        if dtype not in STORED:
            raise OptionError(f"{_SAVE}: {name} is {dtype}; allowed: {', '.join(map(str, STORED))}")
        length = len(range(*rows.indices(states[name].shape[0])))
        stored[tensor] = STORED[dtype], (length, states[name].shape[1])

    def pieces() -> Iterator[Any]:
        yield header_of(stored, {"format": "pt"})
        for name, rows in tensors.values():
            yield np.ascontiguousarray(states[name].copied()[rows]).reshape(-1).view(np.uint8)

    with system_errors(_SAVE, where):
        where.mkdir(parents=True, exist_ok=True)
    write_file(_SAVE, where / _TENSORS, pieces())
    write_file(_SAVE, where / _CONFIG, [json.dumps(_entries(ranks, base), indent=2).encode()])


def _entries(ranks: Mapping[str, int], base: str) -> dict[str, Any]:
    """Entries of ``adapter_config.json``. Modules of other ranks than the first are in its patterns."""
    rank = next(iter(ranks.values()))
    others = {module: r for module, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": others,
        "inference_mode": True,
    }


@typed_memory_errors(_LOAD)
def load_adapters(folder: Any, config: LlamaConfig, dtype: npt.DTypeLike | None = None) -> dict[str, Any]:
    """Read adapters that PEFT or :func:`save_adapters` wrote; :func:`with_lora` takes them.

    A projection that joins modules gets one pair: if their ``lora_A`` differ, as after training by PEFT, its rank is
    the sum of theirs, and ``b`` is block-diagonal, so that the product is the same. The factor ``lora_alpha / r`` (of
    rsLoRA ``lora_alpha / sqrt(r)``) is multiplied into ``b``.

    Parameters
    ----------
    folder : path
    config : LlamaConfig
        Config of the base model.
    dtype : dtype, optional
        Dtype of the arrays, which must be that of the activations; default: that of the file.

    Returns
    -------
    dict of arrays, by the names of :func:`lora_shapes`

    Raises
    ------
    OptionError
        The adapters are of another method than LoRA, or of a variant of it such as DoRA.
    FormatError
        A file is damaged, or has tensors that are no adapters of this model.
    ShapeError
        A tensor does not match ``config``.
    FileError
        A file cannot be read; MissingFileError if there is none.
    """
    where = path_of(_LOAD, folder)
    instance(_LOAD, "config", config, LlamaConfig)
    target = None if dtype is None else named_dtype(_LOAD, "dtype", dtype)
    entries = _checked_entries(where)
    with system_errors(_LOAD, where):
        if not (where / _TENSORS).exists() and (where / _PICKLE).exists():
            raise OptionError(f"{_LOAD}: {where / _PICKLE} is a pickle, which is not read; save safetensors")
    with opened(_LOAD, where / _TENSORS) as opened_file:
        file = SafetensorsFile(_LOAD, where / _TENSORS, opened_file)
        tensors: dict[tuple[str, str], str] = {}
        for name in file.tensors:
            match = _TENSOR.fullmatch(name)
            if match is None or (match[1], match[2]) in tensors:
                raise FormatError(f"{file.what}: {name!r:.120} is no adapter of a projection")
            tensors[match[1], match[2]] = name
        adapters: dict[str, Any] = {}
        for projection, parts in _projections(config).items():
            modules = [part.name.removesuffix(".weight").removeprefix("model.") for part in parts]
            present = {
                i: _adapter(file, entries, module, part, [tensors.pop((module, half), None) for half in "AB"])
                for i, (module, part) in enumerate(zip(modules, parts, strict=True))
                if (module, "A") in tensors or (module, "B") in tensors
            }
            if present:
                adapters[f"{projection}.a"], adapters[f"{projection}.b"] = _joined(present, parts, target)
    if tensors:
        raise FormatError(
            f"{file.what}: {min(tensors.values())!r:.120} is no adapter of a {config.nlayers}-layer model"
        )
    if not adapters:
        raise FormatError(f"{file.what}: there are no adapters in it")
    return adapters


def _checked_entries(where: Path) -> Mapping[str, Any]:
    entries = read_config(_LOAD, where / _CONFIG)
    if entries.get("peft_type") != "LORA":
        raise OptionError(
            f"{_LOAD}: {where}: peft_type is {entries.get('peft_type')!r:.80}, and LORA is loaded"
        )
    for name in _REFUSED:
        if entries.get(name):
            raise OptionError(
                f"{_LOAD}: {where}: {name}={entries[name]!r:.80} is not loaded, only plain LoRA"
            )
    if entries.get("bias", "none") != "none":
        raise OptionError(f"{_LOAD}: {where}: bias={entries['bias']!r:.80} is not loaded; 'none' is")
    return entries


def _projections(config: LlamaConfig) -> dict[str, list[Part]]:
    """Tensors of the weights of a model's projections."""
    plan = planned(config, with_post_norms(HF) if config.post_norms else HF)
    return {name: parts for name, parts in plan.items() if name.rpartition(".")[2] in PROJECTIONS}


def _adapter(
    file: SafetensorsFile, entries: Mapping[str, Any], module: str, part: Part, names: Sequence[str | None]
) -> _Adapter:
    a_name, b_name = names
    if a_name is None or b_name is None:
        raise FormatError(f"{file.what}: {module} has only one of lora_A and lora_B")
    shapes = [file.tensors[name].shape for name in (a_name, b_name)]
    rank = shapes[0][0] if shapes[0] else 0
    expected = [(rank, part.shape[1]), (part.shape[0], rank)]
    if shapes != expected or not rank:
        raise ShapeError(
            f"{file.what}: {module} has lora_A and lora_B of shapes {shapes}; by the config {expected}"
        )
    for name in (a_name, b_name):
        if file.tensors[name].dtype not in STORED.values():
            raise FormatError(f"{file.what}: {name} is {file.tensors[name].dtype:.80}; floats are loaded")
    alpha = _of_module(entries, "alpha_pattern", module, entries.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise FormatError(
            f"{_LOAD}: {_CONFIG}: the lora_alpha of {module} is {alpha!r:.80}, no finite number"
        )
    scale = alpha / (math.sqrt(rank) if entries.get("use_rslora") else rank)
    return _Adapter(file.read(a_name), file.read(b_name), scale)


def _of_module(entries: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    """Value of a module in a pattern of the config, whose keys are names or ends of names."""
    values = entries.get(pattern) or {}
    if not isinstance(values, Mapping):
        raise FormatError(f"{_LOAD}: {_CONFIG}: {pattern} is no object")
    for key, value in values.items():
        if not re.fullmatch(r"\^?[\w.]+\$?", key):
            raise OptionError(f"{_LOAD}: {_CONFIG}: {pattern} has {key!r:.80}; names of modules are read")
        if f".model.{module}".endswith(f".{key.strip('^$')}"):
            return value
    return default


def _joined(
    present: Mapping[int, _Adapter], parts: Sequence[Part], dtype: np.dtype[Any] | None
) -> tuple[Array, Array]:
    """Pair of arrays with the product of these adapters, which belong to some of the parts of a projection."""
    adapters = list(present.values())
    dtype = adapters[0].a.dtype if dtype is None else dtype
    shared = all(np.array_equal(adapter.a, adapters[0].a) for adapter in adapters)
    ranks = [len(adapter.a) for adapter in adapters]
    a = adapters[0].a if shared else np.concatenate([adapter.a for adapter in adapters])
    b = np.zeros((parts[-1].rows.stop, len(a)), dtype)
    first = 0
    for (i, adapter), rank in zip(present.items(), ranks, strict=True):
        b[parts[i].rows, first : first + rank] = adapter.b.astype(np.float64) * adapter.scale
        first += 0 if shared else rank
    return a.astype(dtype), b
