"""Models in files: folders of Hugging Face transformers, with ``config.json`` and safetensors in one file or in
shards; and GGUF files.

Weights are read and cast in pieces of 16 MiB, directly into the model's arrays: the memory needed is that of the
model. A folder that does not hold exactly the model of its config is refused before anything is allocated."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.checks import one_of
from gpu_ops.core.state_arrays import StateArray, check_device, named_dtype, to_device
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.files import opened, path_of, system_errors, write_file
from gpu_ops.formats.packed_matrix import WRITTEN, PackedMatrix, quantize
from gpu_ops.formats.safetensors import header_of
from gpu_ops.kernels.compiler.progress import visible
from gpu_ops.models.config import PROJECTIONS, LlamaConfig
from gpu_ops.models.config_hf import model_type_of, read_config
from gpu_ops.models.gguf import GGUFSource
from gpu_ops.models.tensors import (
    HF,
    ONE_FILE,
    STORED,
    Files,
    ModelSource,
    Names,
    PackedWeight,
    Part,
    open_folder,
    packed_weights,
    planned,
    read_all,
    same_values,
    with_post_norms,
    with_stored_prefix,
)
from gpu_ops.models.weights import Llama, check_models
from gpu_ops.reference.weights.packed_formats import PLAIN

__all__ = ["FolderSource", "load", "save"]

_LOAD, _SAVE = "models.load", "models.save"


@typed_memory_errors(_LOAD)
def load(
    path: Any,
    *,
    dtype: npt.DTypeLike | None = None,
    device: str | None = None,
    format: str | None = None,
    activations: str | None = None,
) -> tuple[Llama, LlamaConfig]:
    """Load a model from a folder that ``save_pretrained`` of Hugging Face transformers or :func:`save` writes, or
    from a GGUF file of llama.cpp.

    Parameters
    ----------
    path : path
        A folder with ``config.json``, and ``model.safetensors`` or the shards that ``model.safetensors.index.json``
        lists; linear layers may be quantised by GPTQ, AWQ, bitsandbytes, compressed-tensors, fp8 or BitNet, as
        ``quantization_config`` says. Or a GGUF file of the architecture llama, qwen2, qwen3, bitnet or bitnet-b1.58,
        with tensors in F32, F16, BF16, F64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K,
        Q6_K, IQ4_XS, TQ1_0, TQ2_0 and I2_S: files from Q2_K to Q8_0, except those with IQ1, IQ2 or IQ3 types.
    dtype : dtype, optional
        float16, bfloat16, float32 or float64, for all arrays; default: that of the embedding table in the file, or
        float32 if it is quantised. With a dtype, quantised matrices are unpacked.
    device : {"cpu", "cuda", "emulator"}, optional
        "cuda" returns CuPy arrays, the others NumPy arrays.
    format : str, optional
        Format of :func:`gpu_ops.quantize`, such as "nf4", in which projections that are arrays are packed as they
        are read: for a base of LoRA adapters, or a model that memory would not hold. Tables and norms stay arrays.
        "bfloat16", "float16" and "float32" are for the CPU; :func:`with_packed` packs the tables of a model too.
    activations : {"native", "int8"}, optional
        Form in which products with packed matrices take activations: see :func:`gpu_ops.linear`. Default "native",
        the results of the unpacked model bit for bit; "int8" is 1.5 to 3 times as fast, on the CPU.

    Returns
    -------
    weights : Llama
        Quantised matrices stay packed: each is a :class:`gpu_ops.PackedMatrix`, whose parts keep their formats if
        tensors are joined. Ternary projections with one scale per tensor, of BitNet's folders and I2_S, are a
        :class:`gpu_ops.TernaryMatrix`, with a scale per row if ``qkv`` or ``gate_up`` joins tensors of different
        scales; :meth:`gpu_ops.TernaryMatrix.from_packed` makes one of TQ1_0 and TQ2_0. All other weights are arrays.
    config : LlamaConfig

    Raises
    ------
    OptionError
        A config of another family, or one with options that its family does not have: see
        :meth:`LlamaConfig.from_hf`. Weights that are quantised by another method, or with options that are not read.
    FormatError, ShapeError
        A damaged file. A tensor is missing, duplicated, unexpected, or of another shape than in the config.
        The message names it and its file.
    FileError
        A file cannot be read; MissingFileError if there is none.

    Notes
    -----
    Needs the memory of the model, 16 MiB, and with ``device="cuda"`` one array on the host. After a second, a line on
    stderr shows the progress.

    Tensors of a folder may lack the prefix ``model.``, as in a base model. The table of a tied model may be stored as
    ``lm_head.weight``. If both are stored and differ only by the rounding of their dtypes, each is used, and
    ``config.tied`` is False.

    Queries and keys of GGUF's llama are reordered to Hugging Face's order. Its ``rope_freqs.weight`` becomes
    ``RopeScaling.llama3`` if the divisors are those of Llama 3.1 or later, else ``longrope``. Type 36 is read as I2_S
    of bitnet.cpp on x86.

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
    >>> weights, config = models.load("SmolLM2-135M-Q8_0.gguf", dtype="bfloat16")  # doctest: +SKIP
    """
    where = path_of(_LOAD, path)
    target = one_of(_LOAD, "device", "cpu" if device is None else device, ("cpu", "cuda", "emulator"))
    check_device(_LOAD, target)
    target_dtype = None if dtype is None else named_dtype(_LOAD, "dtype", dtype)
    if format is not None:
        one_of(_LOAD, "format", format, WRITTEN)
        if format in PLAIN and target == "cuda":
            raise OptionError(
                f"{_LOAD}: format={format!r} packs floats for the CPU; on a GPU pass dtype={format!r}"
            )
    mode = one_of(_LOAD, "activations", "native" if activations is None else activations, ("native", "int8"))
    packed = target_dtype is None
    with system_errors(_LOAD, where):
        is_folder = stat.S_ISDIR(where.stat().st_mode)
    with visible(f"gpu_ops: loading {where}"), contextlib.ExitStack() as stack:
        source: ModelSource[LlamaConfig]
        if is_folder:
            source = folder = FolderSource(where, stack)
            packed = packed and folder.is_quantized
        else:
            file = stack.enter_context(opened(_LOAD, where))
            source = GGUFSource(_LOAD, where, file, mode if packed else None)
        if activations is not None and format is None and not packed:
            raise OptionError(
                f"{_LOAD}: activations= is for packed matrices: of a quantised model without dtype=, or with format="
            )
        arrays = {}
        for name, array in read_all(_LOAD, where, source, target_dtype):
            if isinstance(array, PackedMatrix) and is_folder:
                array = (
                    array.with_activations(mode) if target_dtype is None else array.dequantize(target_dtype)
                )
            if format is not None and name.rpartition(".")[2] in PROJECTIONS:
                array = _packed(name, array, format, mode)
            arrays[name] = to_device(array, target) if isinstance(array, np.ndarray) else array
    return Llama.of(arrays, source.config), source.config


def _packed(name: str, array: Any, format: str, activations: str) -> Any:
    """Pack an array; other weights are packed already."""
    if not isinstance(array, np.ndarray):
        return array
    try:
        return quantize(array, format).with_activations(activations)
    except (ShapeError, OptionError) as error:
        raise type(error)(f"{_LOAD}: {name}: {error}") from error


@typed_memory_errors(_SAVE)
def save(
    folder: Any, weights: Llama, config: LlamaConfig, *, entries: Mapping[str, Any] | None = None
) -> None:
    """Write a model that Hugging Face transformers and :func:`load` read.

    Parameters
    ----------
    folder : path
        Created if missing. ``model.safetensors`` and then ``config.json`` are written, each atomically: an existing
        file is unchanged until the new one is on the disk.
    weights : Llama
        Arrays of any library, on any device, in float16, bfloat16, float32 or float64. CUDA arrays are copied to the
        host one by one.
    config : LlamaConfig
    entries : mapping, optional
        Other entries of ``config.json``, such as ``max_position_embeddings`` and ``eos_token_id``; all entries of the
        loaded config may be passed. Entries of ``config`` take precedence.

    Raises
    ------
    OptionError
        No family of transformers has all options of ``config``; a weight is missing, or not a plain array.
    ShapeError, DTypeError
        A weight does not match ``config``.
    FileError
        A file cannot be written.
    """
    where = path_of(_SAVE, folder)
    check_models(_SAVE, config, weights=weights)
    text = _config_text(config, entries, weights)
    arrays = weights.arrays()
    for name, x in arrays.items():
        if not hasattr(x, "dtype") or isinstance(x, PackedMatrix):
            raise OptionError(
                f"{_SAVE}: {name} is a {type(x).__name__}; plain arrays are saved: models.merged makes one of a "
                "Lora, .weight is that of a Latent, .dequantize() of a TernaryMatrix or PackedMatrix"
            )
    if config.tied and weights.lm_head is not weights.embed:
        raise OptionError(f"{_SAVE}: config.tied is True, and lm_head is another array than embed")
    Llama.of(arrays, config)
    if extra := arrays.keys() - config.shapes().keys():
        raise OptionError(f"{_SAVE}: the weights have {min(extra)}, and the config has no such thing")
    plan = planned(config, _names(config))
    states = {name: StateArray(_SAVE, name, arrays[name]) for name in plan}
    tensors = {p.name: (_stored(name, states[name].dtype), p.shape) for name, ps in plan.items() for p in ps}

    def pieces() -> Iterator[Any]:
        yield header_of(tensors, {"format": "pt"})
        for name, parts in plan.items():
            array = states[name].copied()
            for part in parts:
                yield array[part.rows].reshape(-1).view(np.uint8)

    with visible(f"gpu_ops: saving {where}"):
        with system_errors(_SAVE, where):
            where.mkdir(parents=True, exist_ok=True)
        write_file(_SAVE, where / ONE_FILE, pieces())
        write_file(_SAVE, where / "config.json", [text])


def _config_text(config: LlamaConfig, entries: Mapping[str, Any] | None, weights: Llama) -> bytes:
    """Text of ``config.json``."""
    if entries is not None and not isinstance(entries, Mapping):
        raise OptionError(f"{_SAVE}: entries must be a mapping, got {type(entries).__name__}")
    replaced = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "dtype")
    others = {name: value for name, value in (entries or {}).items() if name not in replaced}
    whole = {
        **others,
        **config.to_hf(model_type_of(others)),
        "torch_dtype": str(getattr(weights.embed, "dtype", None)),
    }
    if LlamaConfig.from_hf(whole) != config:
        raise OptionError(f"{_SAVE}: entries= contradict the config; pass fewer of them")
    try:
        return json.dumps(whole, indent=2).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{_SAVE}: entries= cannot be written as JSON: {error}") from error


class FolderSource(ModelSource[LlamaConfig]):
    """A model in an open folder."""

    def __init__(self, where: Path, stack: contextlib.ExitStack) -> None:
        self._where, self._entries = where, read_config(_LOAD, where / "config.json")
        config = LlamaConfig.from_hf(self._entries)
        files = open_folder(_LOAD, where, stack)
        names = with_stored_prefix(_names(config), files)
        if config.tied and names.lm_head in files:
            if names.embed in files:
                config = _tied(config, files, names)
            else:
                names = replace(names, modules={**names.modules, "embed": names.modules["lm_head"]})
        self.is_quantized = self._entries.get("quantization_config") is not None
        super().__init__(config, files, names)

    def packed(self, plan: Mapping[str, list[Part]]) -> Mapping[str, PackedWeight]:
        """Find the weights that are quantised."""
        return packed_weights(_LOAD, self._where, self._entries, self.files, plan)


def _tied(config: LlamaConfig, files: Files, names: Names) -> LlamaConfig:
    """Config of a tied model whose files have the output layer as well as the embedding table."""
    if same_values(files, names):
        return config
    if same_values(files, names, rounded=True):  # each is used as stored, as in transformers 5
        return replace(config, tied=False)
    raise FormatError(
        f"{files[names.lm_head].what}: {names.lm_head} differs from {names.embed}, and the config says that they are "
        "tied; if the model has both, set tie_word_embeddings to false"
    )


def _names(config: LlamaConfig) -> Names:
    return with_post_norms(HF) if config.post_norms else HF


def _stored(name: str, dtype: np.dtype[Any]) -> str:
    if dtype not in STORED:
        raise OptionError(f"{_SAVE}: {name} is {dtype}; allowed: {', '.join(map(str, STORED))}")
    return STORED[dtype]
