"""Ternary matrices from model files: BitNet checkpoints in safetensors, and GGUF.

Every byte is checked by the strict decoder of its format, and the caller must state whatever a file leaves open: a
wrong guess would decode to plausible nonsense.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import integer, one_of
from gpu_ops.errors import FormatError, OptionError, ShapeError
from gpu_ops.formats.files import files_in, opened, path_of, read_part
from gpu_ops.formats.gguf_header import GGUFTensor, read_header
from gpu_ops.formats.safetensors import SafetensorsFile, StoredTensor
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.reference.weights.ternary_formats import FORMATS, TernaryFormat

__all__ = ["gguf_matrix", "read_bitnet", "read_gguf"]


@typed_memory_errors("read_bitnet")
def read_bitnet(
    path: Any,
    *,
    weight_scale: str | None = None,
    config: Any = None,
    names: Iterable[str] | None = None,
) -> dict[str, TernaryMatrix]:
    """Read the packed BitLinear weights of a Hugging Face checkpoint.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file, or the folder of a checkpoint with one or more of them.
    weight_scale : {"multiply", "divide"}, optional
        Meaning of the stored ``weight_scale``: the mean of the weights' magnitudes, which multiplies (AutoBitLinear,
        BitNet b1.58 2B4T), or its reciprocal, which divides (BitLinear). Required if no config states it.
    config : path or dict, optional
        The model's config, by default ``config.json`` in the folder of the weights. A ``quantization_config`` with
        the ``linear_class`` "autobitlinear" means multiply; "bitlinear", and no ``linear_class``, mean divide.
    names : iterable of str, optional
        Modules to read, such as ``"model.layers.0.mlp.up_proj"``; all packed ones by default.

    Returns
    -------
    dict of str to TernaryMatrix
        By module name, in the format hf_bitnet, ``W = scale * t`` whatever the file's convention. Modules without
        packed weights (embeddings, norms) are left out.

    Raises
    ------
    OptionError
        Nothing states whether the scale multiplies, or config and ``weight_scale`` contradict each other; a name in
        ``names`` does not exist.
    FormatError
        Bytes that are not trits, an invalid scale or one that float32 cannot hold, a config that is not an object.
    FileError
        The file cannot be read, or is not a regular file; MissingFileError, a FileNotFoundError, if there is none.

    Notes
    -----
    The number N of outputs of a module is 4 * rows, or the length of its bias.

    Examples
    --------
    >>> import gpu_ops
    >>> weights = gpu_ops.read_bitnet("BitNet-b1.58-2B-4T")  # doctest: +SKIP
    >>> y = gpu_ops.ternary_matmul(x, weights["model.layers.0.mlp.up_proj"])  # doctest: +SKIP
    """
    name = "read_bitnet"
    where = path_of(name, path)
    files = files_in(name, where, "*.safetensors")
    if not files:
        raise OptionError(f"{name}: no .safetensors file in {where}")
    if weight_scale is not None:
        weight_scale = one_of(name, "weight_scale", weight_scale, ("multiply", "divide"))
    meaning = _scale_meaning(name, weight_scale, _config(name, where, config))
    with contextlib.ExitStack() as stack:
        holder: dict[str, SafetensorsFile] = {}
        for file in files:
            contents = SafetensorsFile(name, file, stack.enter_context(opened(name, file)))
            for key in contents.tensors:
                if key in holder:
                    raise FormatError(
                        f"{name}: {key} is in {file.name} and in a file before it; expected it once"
                    )
                holder[key] = contents
        packed = [key.removesuffix(".weight_scale") for key in holder if key.endswith(".weight_scale")]
        return {
            module: _from_safetensors(name, module, holder, meaning)
            for module in _chosen(name, names, packed)
        }


# Meanings of the tensor type numbers that two projects use differently.
_CLASHES = {
    36: "i2_s of bitnet.cpp (whose ARM builds order it otherwise), once iq4_nl_4_4 of llama.cpp",
    38: "tl1 of bitnet.cpp, once iq4_nl_8_8 of llama.cpp",
    42: "q2_0 of llama.cpp (blocks of 64), another q2_0 of its forks (blocks of 128), tl2 of bitnet.cpp",
}
_CERTAIN = {34: "tq1_0", 35: "tq2_0"}
_READABLE = ("i2_s", "tl1", "tl2", "tq1_0", "tq2_0", "q2_0")


@typed_memory_errors("read_gguf")
def read_gguf(
    path: Any,
    *,
    formats: Mapping[int, str] | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, TernaryMatrix]:
    """Read the ternary tensors of a GGUF file.

    Parameters
    ----------
    path : path
    formats : dict of int to str, optional
        Meaning of tensor type numbers in this file: i2_s, tl1, tl2, tq1_0, tq2_0 or q2_0. 34 (tq1_0) and 35
        (tq2_0) are known; 36, 38 and 42 are used by several projects, so a file with them needs, for example,
        ``{36: "i2_s"}``. (39 is read as llama.cpp's mxfp4; some versions of bitnet.cpp mean tl2: ``{39: "tl2"}``.)
    names : iterable of str, optional
        Tensors to read, such as ``"blk.0.ffn_up.weight"``; all ternary ones by default.

    Returns
    -------
    dict of str to TernaryMatrix
        By tensor name. i2_s, tl1 and tl2 have the float32 scale stored after their codes. Other tensors are left out.

    Raises
    ------
    OptionError
        A tensor's type has two meanings and ``formats`` selects neither.
    FormatError, ShapeError
        The file is damaged, truncated or big-endian, its bytes are not trits, or the shape does not fit the format.
    FileError
        The file cannot be read, or is not a regular file; MissingFileError, a FileNotFoundError, if there is none.

    Examples
    --------
    >>> import gpu_ops
    >>> weights = gpu_ops.read_gguf("ggml-model-i2_s.gguf", formats={36: "i2_s"})  # doctest: +SKIP
    """
    name = "read_gguf"
    meanings = dict(_CERTAIN)
    if not isinstance(formats, (Mapping, type(None))):
        raise OptionError(f"{name}: formats must be a dict such as {{36: 'i2_s'}}, got {formats!r}")
    for number, format in (formats or {}).items():
        meanings[integer(name, "formats", number, low=0)] = one_of(name, "formats", format, _READABLE)
    where = path_of(name, path)
    with opened(name, where) as file:
        tensors = read_header(name, where, file).tensors
        ternary = [tensor.name for tensor in tensors if tensor.type in meanings or tensor.type in _CLASHES]
        chosen = set(_chosen(name, names, ternary))
        matrices, total = {}, 0
        for tensor in tensors:
            if tensor.name not in chosen:
                continue
            if tensor.type not in meanings:
                raise OptionError(
                    f"{name}: {tensor.name} has type {tensor.type}, which is {_CLASHES[tensor.type]}; say which: "
                    f"formats={{{tensor.type}: ...}}"
                )
            what = f"{name}: {tensor.name}"
            matrix = gguf_matrix(what, file, tensor, FORMATS[meanings[tensor.type]])
            total += matrix.codes.nbytes
            if total > os.fstat(file.fileno()).st_size:
                raise FormatError(
                    f"{what}: the tensors up to this one take {total} bytes, more than the file has"
                )
            matrices[tensor.name] = matrix
    return matrices


# ---- safetensors -------------------------------------------------------------------------------------------


def _from_safetensors(
    name: str, module: str, holder: Mapping[str, SafetensorsFile], meaning: str
) -> TernaryMatrix:
    weight, bias, scale = (f"{module}.{part}" for part in ("weight", "bias", "weight_scale"))
    stored = holder[weight].tensors[weight] if weight in holder else None
    if stored is None or stored.dtype != "U8" or len(stored.shape) != 2:
        raise FormatError(
            f"{name}: {module} has a weight_scale and {_described(stored, 'weight')}; "
            "expected the packed U8 (N / 4, K)"
        )
    codes = holder[weight].read(weight)
    outputs = 4 * len(codes)
    if bias in holder:
        added = holder[bias].tensors[bias]
        if len(added.shape) != 1:
            raise FormatError(f"{name}: {module} has {_described(added, 'bias')}; expected one axis")
        outputs = added.shape[0]
    factor = _factor(f"{name}: {scale}", _one_number(f"{name}: {scale}", holder[scale], scale), meaning)
    return _named(f"{name}: {module}", codes, factor, (outputs, codes.shape[1]), "hf_bitnet")


def _config(name: str, where: Path, config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike, type(None))):
        raise OptionError(f"{name}: config must be a path or a dict, got {type(config).__name__}")
    file = (
        (where if where.is_dir() else where.parent) / "config.json"
        if config is None
        else path_of(name, config)
    )
    if config is None and not file.is_file():
        return {}
    with opened(name, file) as contents:
        text = contents.read(_LONGEST_CONFIG + 1)
    try:
        if len(text) > _LONGEST_CONFIG:
            raise ValueError(f"it has more than {_LONGEST_CONFIG} bytes")
        read = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: {file} is not JSON: {error}") from error
    if not isinstance(read, Mapping):
        raise FormatError(f"{name}: {file} holds no JSON object, as a model's config is one")
    return read


_LONGEST_CONFIG = 1 << 20  # in bytes; published ones have a few thousand


def _scale_meaning(name: str, given: str | None, config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if quantization is None:  # null means the same as no entry
        quantization = {}
    if not isinstance(quantization, Mapping):
        raise FormatError(f"{name}: quantization_config of the model's config is no JSON object")
    stated = None
    if quantization.get("quant_method") == "bitnet":
        layer = one_of(name, "linear_class", quantization.get("linear_class", "bitlinear"), _LINEAR_CLASSES)
        stated = _LINEAR_CLASSES[layer]
    if given is None and stated is None:
        raise OptionError(
            f"{name}: whether weight_scale multiplies or divides is written nowhere: pass weight_scale='multiply' "
            "(mean |w|, AutoBitLinear), weight_scale='divide' (its reciprocal, BitLinear), or the model's config"
        )
    if given is not None and stated is not None and given != stated:
        raise OptionError(f"{name}: weight_scale={given!r}, but the config's linear_class says {stated!r}")
    return given or stated or ""


_LINEAR_CLASSES = {"bitlinear": "divide", "autobitlinear": "multiply"}


def _described(stored: StoredTensor | None, part: str) -> str:
    return f"no {part}" if stored is None else f"a {part} of {stored}"


def _one_number(what: str, file: SafetensorsFile, key: str) -> float:
    stored = file.tensors[key]
    if stored.dtype not in _SCALES or math.prod(stored.shape) != 1:
        raise FormatError(
            f"{what} has {stored.dtype} and shape {stored.shape}; expected one number of {', '.join(_SCALES)}"
        )
    return float(file.read(key).reshape(-1)[0])


_SCALES = ("F16", "BF16", "F32", "F64")


def _factor(what: str, value: float, meaning: str) -> np.float32:
    """Convert the stored scale to the factor of the trits."""
    if not math.isfinite(value) or value <= 0:
        raise FormatError(f"{what} is {value}; a scale is finite and positive")
    with np.errstate(all="ignore"):
        factor = np.float32(value if meaning == "multiply" else 1 / value)
    if not np.isfinite(factor) or factor == 0:
        which = "it" if meaning == "multiply" else "its reciprocal"
        raise FormatError(f"{what} is {value}, and float32, which scales are kept in, cannot hold {which}")
    return factor


# ---- GGUF --------------------------------------------------------------------------------------------------


def gguf_matrix(what: str, file: BinaryIO, tensor: GGUFTensor, fmt: TernaryFormat) -> TernaryMatrix:
    """Read a tensor of a GGUF file, with the scale after its codes if the format stores it there."""
    if len(tensor.shape) != 2:
        raise ShapeError(f"{what} has shape {tensor.shape}; ternary matrices have two axes")
    shape = (tensor.shape[0], tensor.shape[1])
    try:
        size = math.prod(fmt.packed_shape(shape))
    except ValueError as error:
        raise ShapeError(f"{what}: {error}") from error
    codes = read_part(what, file, tensor.start, size)
    if fmt.block_scale:
        return _named(what, codes, np.float32(1), shape, fmt.name)
    behind = _tl2_scale(shape, size) if fmt.name == "tl2" else size
    scale = read_part(what, file, tensor.start + behind, 4).view("<f4")
    factor = _factor(f"{what}: the scale behind the codes", float(scale[0]), "multiply")
    return _named(what, codes, factor, shape, fmt.name)


def _tl2_scale(shape: tuple[int, int], size: int) -> int:
    """Offset of tl2's scale: bitnet.cpp counts 256 columns in pairs and the rest in triples, for any tiles, and
    rounds up to 32 bytes."""
    n, k = shape
    counted = (k - 256) * n // 3 * 5 // 8 + 256 * n // 2 * 4 // 8
    return max(size, -(-counted // 32) * 32)


# ---- both --------------------------------------------------------------------------------------------------


def _chosen(name: str, names: Iterable[str] | None, found: list[str]) -> list[str]:
    if names is None:
        return found
    requested = list(names) if isinstance(names, Iterable) else [names]
    if isinstance(names, str) or not all(isinstance(item, str) for item in requested):
        raise OptionError(f"{name}: names must be a list of strings, got {names!r}")
    for missing in sorted(set(requested) - set(found)):
        near = difflib.get_close_matches(missing, found, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"{name}: the file has no ternary {missing!r}, but {len(found)} others{hint}")
    return requested


def _named(what: str, codes: Array, scale: Any, shape: tuple[int, int], format: str) -> TernaryMatrix:
    try:
        return TernaryMatrix(codes, scale, shape, format)
    except (FormatError, ShapeError) as error:
        raise type(error)(f"{what}: {error}") from error
