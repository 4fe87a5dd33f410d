"""Writer of GGUF files for llama.cpp and the gguf package: metadata, float arrays and ternary matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.formats.files import path_of, write_file
from gpu_ops.formats.gguf_header import (
    ALIGNMENT,
    ARRAY,
    FLOAT_TYPES,
    MOST_AXES,
    NUMBER_TYPES,
    PACKED_TYPES,
    STRING,
    TERNARY_TYPES,
    UINT32,
)
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.formats.ternary_packing import with_embedded_scale
from gpu_ops.reference.weights.ternary_formats import FORMATS

__all__ = ["WrittenTensor", "write_gguf", "write_tensors"]

_OP = "write_gguf"
_VERSION = 3
_MATRIX_TYPES = PACKED_TYPES | FLOAT_TYPES
_TYPE_OF = {np.dtype(dtype): type for type, dtype in NUMBER_TYPES.items()}
_INTEGERS = ("u4", "i4", "u8", "i8")  # types of a Python int: the first that holds it
_LONGEST_KEY = (1 << 16) - 1  # in bytes
_LONGEST_NAME = 63  # in bytes; llama.cpp refuses tensors with longer names


def write_gguf(path: Any, tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a GGUF file, version 3. An old file is replaced when the new one is complete.

    Parameters
    ----------
    path : path
    tensors : mapping of str to array, PackedMatrix or TernaryMatrix
        Tensors by name, at most 63 bytes, written in this order. Arrays of float32, float16 and bfloat16 with 1 to 4
        axes; packed matrices of one format, other than those of bitsandbytes; ternary ones in the formats tq1_0,
        tq2_0 and q2_0. A ternary matrix's ``scale`` is multiplied into the float16 scales of its blocks; if it is
        1.0, the codes are written unchanged.
    metadata : mapping of str to value, optional
        str, bool, int, float, NumPy scalars, and lists or arrays of them, including nested ones. A NumPy scalar or
        array keeps its type. A Python int becomes uint32, int32, uint64 or int64, the first that holds it (or all
        of a list), and a Python float becomes float32, as llama.cpp expects. ``general.alignment`` is the
        alignment of the tensors; default 32.

    Raises
    ------
    ShapeError
        No axes, more than 4, or an axis of length 0, which llama.cpp refuses.
    DTypeError
        An array of another dtype; a value that has no GGUF type.
    FormatError
        A matrix in another format, or whose scales its blocks cannot hold: groups that end within a block, or
        scales outside the range of float16.
    OptionError
        A name or key that is too long or not a string, a list of several types or an empty list, an invalid path.
    FileError
        The file cannot be written. An old file is then unchanged.

    Notes
    -----
    The type number of q2_0, 42, has another meaning elsewhere: read it with
    ``read_gguf(path, formats={42: "q2_0"})``.
    Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Examples
    --------
    >>> import tempfile, numpy as np, gpu_ops
    >>> rng = np.random.default_rng(0)
    >>> w = gpu_ops.ternary_quantize(rng.standard_normal((4, 512), dtype=np.float32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/model.gguf"
    ...     tensors = {"blk.0.ffn_up.weight": w.to("tq2_0"), "output_norm.weight": np.ones(512, np.float32)}
    ...     gpu_ops.write_gguf(path, tensors, {"general.architecture": "bitnet", "bitnet.block_count": 1})
    ...     gpu_ops.read_gguf(path)
    {'blk.0.ffn_up.weight': TernaryMatrix((4, 512), format='tq2_0', scale per tensor, 532 bytes)}
    """
    target = path_of(_OP, path)
    for argument, mapping in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(mapping, Mapping) and (mapping is not None or argument == "tensors"):
            raise OptionError(f"{_OP}: {argument} must be a dict, got {type(mapping).__name__}")
    values = {} if metadata is None else dict(metadata)
    write_tensors(target, [_written(name, tensor) for name, tensor in tensors.items()], values)


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write; its bytes are made just before they are written."""

    name: str
    type: int
    shape: tuple[int, ...]
    size: int  # in bytes
    pieces: Callable[[], Iterable[Array]]
    """Bytes in order, as vectors of uint8."""

    def entry(self, start: int) -> bytes:
        dims = np.array(self.shape[::-1], "<u8").tobytes()
        axes, type = _packed("u4", len(self.shape)), _packed("u4", self.type)
        return _string("a name", self.name) + axes + dims + type + _packed("u8", start)


def write_tensors(path: Path, tensors: Sequence[WrittenTensor], metadata: Mapping[str, Any]) -> None:
    """Write a file of tensors that are made as they are written; see :func:`write_gguf`."""
    try:
        keys = b"".join(_key(key, value) for key, value in metadata.items())
    except RecursionError as error:
        raise OptionError(f"{_OP}: metadata holds a list within itself") from error
    counts = _packed("u8", len(tensors)) + _packed("u8", len(metadata))
    header = bytearray(b"GGUF" + _packed("u4", _VERSION) + counts + keys)
    alignment, end = _alignment(metadata), 0
    for tensor in tensors:
        header += tensor.entry(end)
        end += tensor.size + -tensor.size % alignment
    write_file(_OP, path, _parts(header, tensors, alignment))


def _parts(header: bytearray, tensors: Sequence[WrittenTensor], alignment: int) -> Iterator[Any]:
    yield header + bytes(-len(header) % alignment)
    for tensor in tensors:
        yield from tensor.pieces()
        yield bytes(-tensor.size % alignment)


# ---- tensors -----------------------------------------------------------------------------------------------


def _written(name: Any, given: Any) -> WrittenTensor:
    if not isinstance(name, str) or not 0 < len(_string("a tensor's name", name)) - 8 <= _LONGEST_NAME:
        raise OptionError(
            f"{_OP}: a tensor's name is a string of 1 to {_LONGEST_NAME} bytes, got {name!r:.99}"
        )
    what = f"{_OP}: {name}"
    if isinstance(given, TernaryMatrix):
        if given.format not in TERNARY_TYPES:
            raise FormatError(
                f"{what} is a TernaryMatrix in the format {given.format!r}; GGUF files hold "
                f"{', '.join(TERNARY_TYPES)}: convert it, say, .to('tq2_0')"
            )
        shape, type = tuple(given.shape), TERNARY_TYPES[given.format]
        size = math.prod(FORMATS[given.format].packed_shape(given.shape))

        def data() -> Array:
            packed = with_embedded_scale(what, given.codes, given.scale, given.shape, given.format)
            return packed.reshape(-1)
    elif isinstance(given, PackedMatrix):
        names = {name for _, name in given.formats}
        if len(names) > 1 or not names <= _MATRIX_TYPES.keys():
            raise FormatError(
                f"{what} is a PackedMatrix of {' and '.join(sorted(names))}; a tensor of GGUF has one of "
                f"{', '.join(_MATRIX_TYPES)}: convert it, say, .to('q8_0')"
            )
        (name_,), shape, size = names, given.shape, given.file_nbytes
        type = _MATRIX_TYPES[name_]

        def data() -> Array:
            return np.concatenate([blocks.reshape(-1) for blocks in given.blocks()])
    else:
        array = Call(_OP).read(name, given)
        if array.dtype.name not in FLOAT_TYPES:
            raise DTypeError(
                f"{what} is {array.dtype}; expected {', '.join(FLOAT_TYPES)}, a PackedMatrix or a TernaryMatrix"
            )
        shape, type, size = array.shape, FLOAT_TYPES[array.dtype.name], array.nbytes

        def data() -> Array:  # reads again: a copy of a transposed array is held only while it is written
            return np.ascontiguousarray(Call(_OP).read(name, given)).reshape(-1).view(np.uint8)

    if not 1 <= len(shape) <= MOST_AXES or 0 in shape:
        raise ShapeError(
            f"{what} has shape {shape}; a tensor of GGUF has 1 to {MOST_AXES} axes, none of length 0"
        )
    return WrittenTensor(name, type, shape, size, lambda: [data()])


# ---- metadata ----------------------------------------------------------------------------------------------


def _alignment(metadata: Mapping[str, Any]) -> int:
    if "general.alignment" not in metadata:
        return ALIGNMENT
    type, data = _value("general.alignment", metadata["general.alignment"])
    alignment = int.from_bytes(data, "little")
    if type != UINT32 or alignment % 8 or alignment.bit_count() != 1:
        raise OptionError(
            f"{_OP}: general.alignment must be a power of two from 8 on, an int or np.uint32; got "
            f"{metadata['general.alignment']!r:.99}"
        )
    return alignment


def _key(key: Any, value: Any) -> bytes:
    if not isinstance(key, str) or not 0 < len(_string("a key", key)) - 8 <= _LONGEST_KEY:
        raise OptionError(
            f"{_OP}: a key of metadata is a string of 1 to {_LONGEST_KEY} bytes, got {key!r:.99}"
        )
    type, data = _value(key, value)
    return _string("a key", key) + _packed("u4", type) + data


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """Type of a value, and its bytes."""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, str):
        return STRING, _string(key, value)
    if isinstance(value, np.ndarray) and value.dtype in _TYPE_OF and value.ndim == 1:
        data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        return ARRAY, _packed("u4", _TYPE_OF[value.dtype]) + _packed("u8", len(value)) + data
    if isinstance(value, (list, tuple, np.ndarray)):
        return ARRAY, _items(key, value)
    dtype = _dtype(key, [value])
    return _TYPE_OF[dtype], _packed(dtype, value)


def _items(key: str, values: Sequence[Any] | Array) -> bytes:
    """Bytes of an array: the type of its items, their number, their bytes."""
    if not len(values):
        if isinstance(values, np.ndarray) and values.dtype.kind in "UT":
            return _packed("u4", STRING) + _packed("u8", 0)
        raise OptionError(
            f"{_OP}: {key} is an empty list, which has no type; pass an array: np.empty(0, np.int32)"
        )
    if all(
        isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, str) for value in values
    ):
        return _value(key, np.array(values, _dtype(key, values)))[1]
    items = [_value(key, value) for value in values]
    types = {type for type, _ in items}
    if len(types) > 1:
        raise OptionError(f"{_OP}: {key} is a list of several types; the items of an array have one")
    return _packed("u4", types.pop()) + _packed("u8", len(items)) + b"".join(data for _, data in items)


def _dtype(key: str, values: Sequence[Any] | Array) -> np.dtype[Any]:
    """Dtype in which numbers, all of one type, are written."""
    cls = type(values[0])
    if any(type(value) is not cls for value in values):
        raise OptionError(f"{_OP}: {key} is a list of several types; the items of an array have one")
    if cls is int:
        for dtype in map(np.dtype, _INTEGERS):
            limits = np.iinfo(dtype)
            if limits.min <= min(values) and max(values) <= limits.max:
                return dtype
        raise OptionError(f"{_OP}: {key} is an integer, or a list of them, that no 64 bits hold")
    if cls is float:
        with np.errstate(all="ignore"):
            if np.isinf(np.array(values, np.float32)).sum() != np.isinf(values).sum():
                raise OptionError(f"{_OP}: {key} is beyond float32, which a float becomes; pass np.float64")
        return np.dtype(np.float32)
    known = np.dtype(cls) if cls is bool or issubclass(cls, np.generic) else None
    if known not in _TYPE_OF:
        raise DTypeError(
            f"{_OP}: {key} is {cls.__name__}; GGUF has types for str, bool, int, float, the NumPy numbers of 8 "
            "to 64 bits (no float16), and arrays of them"
        )
    return known


def _packed(dtype: Any, value: Any) -> bytes:
    return np.array(value, np.dtype(dtype).newbyteorder("<")).tobytes()


def _string(what: str, text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{_OP}: {what} {text!r:.99} is no text that UTF-8 can hold: {error}") from error
    return _packed("u8", len(data)) + data
