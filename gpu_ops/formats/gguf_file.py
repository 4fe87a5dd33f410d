"""An open GGUF file: single values of its metadata, and its tensors, as floats in pieces or packed.

Every tensor of a known type is checked against the file's size, and none may share bytes with another: reading all
of them takes memory in proportion to the file.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError
from gpu_ops.formats.files import read_part
from gpu_ops.formats.gguf_header import NUMBER_TYPES, PACKED_TYPES, STRING, GGUFTensor, read_header
from gpu_ops.formats.packed_matrix import PackedMatrix
from gpu_ops.formats.ternary_files import gguf_matrix
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.reference.weights.packed_formats import FORMATS as PACKED_FORMATS
from gpu_ops.reference.weights.packed_formats import decode
from gpu_ops.reference.weights.ternary_formats import FORMATS

__all__ = ["FLOATS", "PACKED", "TERNARY", "Blocks", "GGUFFile"]

_PIECE = 1 << 20  # numbers decoded at a time


TERNARY = {"I2_S": "i2_s"}
"""Formats of tensors with one scale for all their weights, by type: no blocks of :class:`gpu_ops.PackedMatrix`."""


class GGUFFile:
    """Tensors and metadata of an open file; FormatError if it is damaged."""

    def __init__(self, op: str, path: Path, file: BinaryIO) -> None:
        self._file, self.path, self.what = file, path, f"{op}: {path}"
        header = read_header(op, path, file)
        self._values = header.values
        self.keys = tuple(header.values)
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self._check_places(header.tensors)

    def value(self, key: str) -> Any:
        """Value of a key: a number, a bool or a string; None if there is no such key. A float32 is returned as the
        shortest decimal that rounds to it: 1e-05, as in the config that the file was made from."""
        if key not in self._values:
            return None
        type, position = self._values[key]
        what = f"{self.what}: {key}"
        if type == STRING:
            size = int(read_part(what, self._file, position, 8).view("<u8")[0])
            try:
                return read_part(what, self._file, position + 8, size).tobytes().decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{what} is no text: {error}") from error
        if type not in NUMBER_TYPES:
            raise FormatError(f"{what} is an array; a model has one value for all layers")
        dtype = np.dtype(NUMBER_TYPES[type]).newbyteorder("<")
        number = read_part(what, self._file, position, dtype.itemsize).view(dtype)[0]
        return float(str(number)) if dtype == np.float32 else number.item()

    def pieces(self, name: str) -> Iterator[Array]:
        """Elements in order, some at a time; quantised ones as float32, and ternary ones all at once."""
        tensor, what = self.tensors[name], f"{self.what}: {name}"
        if tensor.dtype in TERNARY:
            yield self.matrix(name).dequantize().reshape(-1)
            return
        floats = FLOATS[tensor.dtype]
        step = _PIECE // floats.count * floats.nbytes
        end = tensor.start + self._size(tensor)
        for start in range(tensor.start, end, step):
            data = read_part(what, self._file, start, min(step, end - start))
            with np.errstate(all="ignore"):  # for invalid scales
                numbers = floats.decode(data.reshape(-1, floats.nbytes))
            yield numbers.reshape(-1)

    def matrix(self, name: str) -> TernaryMatrix:
        """Read a ternary tensor."""
        tensor = self.tensors[name]
        return gguf_matrix(f"{self.what}: {name}", self._file, tensor, FORMATS[TERNARY[tensor.dtype]])

    def packed(self, name: str) -> PackedMatrix:
        """Read a quantised tensor of two axes."""
        tensor = self.tensors[name]
        format, (rows, cols) = PACKED[tensor.dtype], tensor.shape
        data = read_part(f"{self.what}: {name}", self._file, tensor.start, self._size(tensor))
        return PackedMatrix(data.reshape(rows, -1), (rows, cols), format.name)

    def _size(self, tensor: GGUFTensor) -> int:
        """Size in bytes; 0 if the type is not supported."""
        shape = tensor.shape
        if tensor.dtype in FLOATS:
            floats = FLOATS[tensor.dtype]
            if math.prod(shape[-1:]) % floats.count:
                raise ValueError(f"rows of {tensor.dtype} have a multiple of {floats.count} elements")
            return math.prod(shape) // floats.count * floats.nbytes
        if tensor.dtype in TERNARY and len(shape) == 2:
            return math.prod(FORMATS[TERNARY[tensor.dtype]].packed_shape((shape[0], shape[1])))
        return 0

    def _check_places(self, tensors: list[GGUFTensor]) -> None:
        previous_end, total = 0, os.fstat(self._file.fileno()).st_size
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            label = f"{self.what}: tensor {tensor.name[:80]!r}"
            try:
                end = tensor.start + self._size(tensor)
            except ValueError as error:
                raise FormatError(f"{label} has shape {tensor.shape}: {error}") from error
            if tensor.start < previous_end:
                raise FormatError(f"{label} begins at byte {tensor.start}, within the one before it")
            if end > total:
                raise FormatError(f"{label} should end at byte {end}, and the file does at {total}")
            previous_end = end


@dataclass(frozen=True)
class Blocks:
    """A type of blocks: ``count`` numbers in ``nbytes`` bytes; ``decode`` maps (blocks, bytes) to numbers."""

    count: int
    nbytes: int
    decode: Callable[[Array], Array]


def _plain(dtype: Any) -> Blocks:
    return Blocks(1, np.dtype(dtype).itemsize, lambda data: data.view(dtype))


PACKED = {name.upper(): PACKED_FORMATS[name] for name in PACKED_TYPES}
"""Formats of quantised tensors by type."""

FLOATS = {
    "F32": _plain("<f4"),
    "F16": _plain("<f2"),
    "BF16": _plain(ml_dtypes.bfloat16),
    "F64": _plain("<f8"),
    **{name: Blocks(f.block, f.nbytes, functools.partial(decode, f)) for name, f in PACKED.items()},
}
