"""Export of a Hugging Face folder to a GGUF file that llama.cpp and :func:`gpu_ops.models.load` read.

Tensors are read, encoded and written in pieces: the memory needed is that of some pieces, whatever the model's size.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import FLOAT_DTYPES, integer, one_of
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import path_of
from gpu_ops.formats.gguf_header import FLOAT_TYPES, PACKED_TYPES
from gpu_ops.formats.gguf_mix import MIXES, Mix, ModelSizes, tensor_format
from gpu_ops.formats.gguf_vocabulary import read_vocabulary
from gpu_ops.formats.gguf_writer import WrittenTensor, write_tensors
from gpu_ops.formats.packed_matrix import quantize
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.formats.safetensors import SafetensorsFile
from gpu_ops.kernels.compiler.progress import steps
from gpu_ops.models.checkpoint import FolderSource
from gpu_ops.models.config import LlamaConfig
from gpu_ops.models.config_hf import DEFAULTS, FAMILIES, model_type_of, read_config
from gpu_ops.models.gguf import NAMES
from gpu_ops.models.tensors import Part, checked_plan, planned
from gpu_ops.reference.weights.packed_formats import FORMATS

__all__ = ["export_gguf"]

_OP = "models.export_gguf"
_PIECE = 1 << 18  # weights that a thread encodes at a time: some milliseconds, and at most 2 MiB
_PIECES_PER_THREAD = 4  # read ahead, for an even finish
_QUANTIZATION_VERSION = 2  # of the blocks' layouts, in llama.cpp
# Families whose models llama.cpp runs as one of its architectures.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
_SUPPORTED = (
    *("vocab", "hidden", "ffn", "nlayers", "nheads", "nheads_kv", "head_dim"),
    *("eps", "theta", "scaling", "tied", "biases", "qk_norm"),
)


@typed_memory_errors(_OP)
def export_gguf(folder: Any, path: Any, format: str = "q4_k_m") -> dict[str, str]:
    """Write the model of a Hugging Face folder to a GGUF file for llama.cpp and :func:`load`.

    Parameters
    ----------
    folder : path
        ``config.json`` and safetensors, in one file or in shards, of a Llama, Mistral, Qwen2 or Qwen3. The tokenizer
        is read from ``tokenizer.json``; without one the file has no tokens, and llama.cpp does not load it.
    path : path
        An old file is replaced when the new one is complete.
    format : str
        q4_k_m, q4_k_s, q5_k_m and q5_k_s, which give the matrices that matter most more bits, by llama.cpp's rules;
        q4_0, q4_1, q5_0, q5_1, q8_0, q6_k and iq4_nl, whose output layer is q6_k or q8_0; tq1_0 and tq2_0 for models
        whose projections are ternary, whose table of embeddings is q4_k; f16, bf16 and f32. Norms and biases are
        float32. Where a row is no multiple of 256, q4_k becomes q5_0, q5_k q5_1, q6_k q8_0, tq1_0 and tq2_0 q4_0;
        where it is no multiple of 32, a matrix is float16.

    Returns
    -------
    formats : dict of str
        Format of each tensor by its name in the file.

    Raises
    ------
    OptionError
        A model or a tokenizer that the file cannot express: options without a place in llama.cpp's architecture,
        packed weights, a pre-tokenizer that llama.cpp has no name for. A weight that is not finite.
    FormatError, ShapeError
        A damaged file in the folder.
    FileError
        A file cannot be read or written.

    Notes
    -----
    Everything but the weights' values is checked before the file is begun. Pieces of some rows are encoded by as many
    threads as calls use; codes and scales are those of :func:`gpu_ops.quantize`.

    Examples
    --------
    >>> import tempfile
    >>> from gpu_ops import models
    >>> config = models.LlamaConfig(vocab=256, hidden=256, ffn=512, nlayers=1, nheads=4)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     models.save(folder, weights, config)
    ...     formats = models.export_gguf(folder, f"{folder}/model.gguf", "q4_k_m")
    ...     weights, config = models.load(f"{folder}/model.gguf")
    >>> formats["blk.0.attn_q.weight"], formats["output.weight"], weights.lm_head
    ('q4_k', 'q6_k', PackedMatrix((256, 256), q6_k, 6.562 bits per weight))
    """
    where, target = path_of(_OP, folder), path_of(_OP, path)
    mix = MIXES[one_of(_OP, "format", format, MIXES)]
    entries = read_config(_OP, where / "config.json")
    if entries.get("quantization_config") is not None:
        raise OptionError(
            f"{_OP}: {where}: the weights are quantised already; pass the folder of the original"
        )
    with contextlib.ExitStack() as stack:
        source = FolderSource(where, stack)
        architecture = _architecture(where, entries, source.config)
        plan, _ = checked_plan(_OP, where, source)
        metadata = _metadata(where, entries, source.config, architecture, mix)
        tensors = _tensors(source, plan, mix, interleaved=architecture == "llama")
        if source.config.scaling is not None and source.config.scaling.kind == "llama3":
            tensors.insert(0, _divisors(source.config))
        from gpu_ops.kernels.common.cpu.parallel import thread_count

        pool = stack.enter_context(ThreadPoolExecutor(thread_count()))
        advance = stack.enter_context(steps(f"gpu_ops: writing {target}", len(tensors)))
        window = _PIECES_PER_THREAD * thread_count()
        write_tensors(target, [tensor.written(pool, window, advance) for tensor in tensors], metadata)
    return {tensor.name: tensor.format for tensor in tensors}


# ---- metadata ----------------------------------------------------------------------------------------------


def _architecture(where: Path, entries: Mapping[str, Any], config: LlamaConfig) -> str:
    """Architecture of llama.cpp that computes what the config says."""
    model_type = model_type_of(entries) or "llama"
    if model_type not in _ARCHITECTURES:
        raise OptionError(
            f"{_OP}: {where}: a {model_type} is not written; families that are: {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[model_type]
    plain = LlamaConfig(**{name: getattr(config, name) for name in _SUPPORTED})
    names = [field.name for field in fields(config)]
    extras = [name for name in names if getattr(plain, name) != getattr(config, name)]
    extras += ["layers without theta"] * (config.theta is None)
    extras += ["biases"] * (architecture == "qwen3" and bool(config.biases))
    width = config.nheads * config.head_dim
    extras += [f"heads of {width} in all"] * (architecture == "qwen2" and width != config.hidden)
    if extras:
        raise OptionError(
            f"{_OP}: {where}: the architecture {architecture} of llama.cpp has no {' and no '.join(extras)}, as this "
            "model does"
        )
    return architecture


def _metadata(
    where: Path, entries: Mapping[str, Any], config: LlamaConfig, architecture: str, mix: Mix
) -> dict[str, Any]:
    family = FAMILIES[model_type_of(entries) or "llama"]
    positions = {**DEFAULTS, **family.defaults, **entries}["max_position_embeddings"]
    keys = {
        "vocab_size": config.vocab,
        "context_length": integer(_OP, "max_position_embeddings", positions, low=1),
        "embedding_length": config.hidden,
        "block_count": config.nlayers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.nheads,
        "attention.head_count_kv": config.nheads_kv,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.theta or 0),
        **_scaling(config.scaling),
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": where.resolve().name,
        "general.file_type": mix.file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **read_vocabulary(_OP, where, config.vocab),
    }


def _scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """Entries of a rope scaling. llama3 has none: its divisors are a tensor."""
    if scaling is None or scaling.kind == "llama3":
        return {}
    entries: dict[str, Any] = {
        "rope.scaling.type": scaling.kind,
        "rope.scaling.factor": float(scaling.factor),
    }
    if scaling.kind == "linear":
        return entries
    length = scaling.original_max_position
    if scaling.kind == "yarn" and length is not None:
        fast, slow = float(scaling.beta_fast), float(scaling.beta_slow)
        if scaling == RopeScaling.yarn(scaling.factor, length, beta_fast=fast, beta_slow=slow):
            return entries | {
                "rope.scaling.original_context_length": length,
                "rope.scaling.yarn_beta_fast": fast,
                "rope.scaling.yarn_beta_slow": slow,
            }
    raise OptionError(
        f"{_OP}: the rope scaling {scaling} is not written; known: linear, llama3, and yarn with its usual attention "
        "factor"
    )


# ---- tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the new file, whose rows are read and encoded some at a time."""

    name: str
    shape: tuple[int, ...]
    format: str
    step: int  # rows
    read: Callable[[int, int], Array]
    """Rows from a first to a last one, exclusive."""

    def written(self, pool: ThreadPoolExecutor, window: int, advance: Callable[[], None]) -> WrittenTensor:
        def pieces() -> Iterator[Array]:
            starts = range(0, self.shape[0], self.step)
            for first in range(0, len(starts), window):
                rows = [self.read(start, start + self.step) for start in starts[first : first + window]]
                yield from pool.map(self._encoded, rows)
            advance()

        if self.format in PACKED_TYPES:
            packed = FORMATS[self.format]
            size, type = math.prod(self.shape) // packed.block * packed.nbytes, PACKED_TYPES[self.format]
        else:
            size = math.prod(self.shape) * FLOAT_DTYPES[self.format].itemsize
            type = FLOAT_TYPES[self.format]
        return WrittenTensor(self.name, type, self.shape, size, pieces)

    def _encoded(self, rows: Array) -> Array:
        """Bytes of some rows."""
        if self.format in PACKED_TYPES:
            try:
                return quantize(rows, self.format).blocks()[0].reshape(-1)
            except OptionError as error:
                raise OptionError(f"{_OP}: {self.name}: {error}") from error
        with np.errstate(all="ignore"):
            numbers = rows.astype(FLOAT_DTYPES[self.format])
        if (np.isinf(numbers) & np.isfinite(rows)).any():
            raise OptionError(
                f"{_OP}: {self.name} holds numbers beyond the range of {self.format}; write bf16 or f32"
            )
        return numbers.reshape(-1).view(np.uint8)


def _tensors(
    source: FolderSource, plan: Mapping[str, list[Part]], mix: Mix, *, interleaved: bool
) -> list[_Tensor]:
    """Tensors in the order of the model. ``interleaved``: the rows of queries and keys are reordered."""
    config = source.config
    sizes = ModelSizes(config.nlayers, config.nheads, config.nheads_kv, config.tied)
    theirs = planned(config, NAMES)
    tensors = []
    for name, parts in plan.items():
        for part, named in zip(parts, theirs[name], strict=True):
            file = source.files[part.name]
            assert isinstance(file, SafetensorsFile)
            rotated = interleaved and named.name.rpartition(".")[0].endswith((".attn_q", ".attn_k"))
            unit = config.head_dim if rotated else 1  # rows that are read together
            step = unit * max(1, _PIECE // (unit * math.prod(part.shape[1:])))
            read = functools.partial(_rows, file, part, config.head_dim if rotated else 0)
            format = tensor_format(mix, named.name, part.shape, sizes)
            tensors.append(_Tensor(named.name, part.shape, format, step, read))
    return tensors


def _rows(file: SafetensorsFile, part: Part, head_dim: int, first: int, last: int) -> Array:
    """Rows of a tensor. With ``head_dim``, those of a head are in the order 0, d/2, 1, d/2 + 1, ..."""
    cols = math.prod(part.shape[1:])
    elements = file.elements(part.name, first * cols, min(last, part.shape[0]) * cols)
    if not head_dim:
        return elements.reshape(-1, *part.shape[1:])
    halves = elements.reshape(-1, 2, head_dim // 2, *part.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1, *part.shape[1:])


def _divisors(config: LlamaConfig) -> _Tensor:
    """Divisors of the frequencies, which llama.cpp reads in place of the parameters of llama3."""
    assert config.scaling is not None
    assert config.theta is not None
    plain = RopeScaling("default").inv_freq(config.head_dim, config.theta)
    divisors = (plain / config.scaling.inv_freq(config.head_dim, config.theta)).astype(np.float32)
    size = len(divisors)
    return _Tensor("rope_freqs.weight", (size,), "float32", size, lambda first, last: divisors[first:last])
