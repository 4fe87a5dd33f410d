"""Safetensors files: 8 bytes of header length, a JSON header, and the bytes of the tensors.

The header is checked against the file: tensors must be in the file without gaps and overlaps, as the format
requires, so reading all of them takes no more memory than the file's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError
from gpu_ops.formats.files import read_part

__all__ = ["MOST_HEADER", "NUMPY_DTYPES", "SafetensorsFile", "StoredTensor", "header_of"]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
"""Dtypes that are read and written."""

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Bytes of a header: 140,000 tensors at the 120 bytes per tensor of published files; up to 25 times that as objects.
MOST_HEADER = 1 << 24
_MOST_AXES = 64
_PIECE = 1 << 24  # bytes, whole elements of every dtype


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes from the start of the file
    size: int  # in bytes

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class SafetensorsFile:
    """Tensors and metadata of an open file; FormatError if it is damaged."""

    def __init__(self, op: str, path: Path, file: BinaryIO) -> None:
        self._file, self.path, self.what = file, path, f"{op}: {path}"
        try:
            self.metadata, self.tensors = _read_header(file)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.what} cannot be read as a safetensors file: {error}") from error

    def read(self, name: str) -> Array:
        """Read a tensor of one of ``NUMPY_DTYPES`` into a new array."""
        stored = self.tensors[name]
        return self._read(name, stored, 0, stored.size).reshape(stored.shape)

    def elements(self, name: str, first: int, last: int) -> Array:
        """Read elements ``first`` up to ``last``, exclusive, in row-major order, into a new vector."""
        stored = self.tensors[name]
        size = NUMPY_DTYPES[stored.dtype].itemsize
        return self._read(name, stored, first * size, (last - first) * size)

    def pieces(self, name: str) -> Iterator[Array]:
        """Elements of a tensor in order, some at a time."""
        stored = self.tensors[name]
        for start in range(0, stored.size, _PIECE):
            yield self._read(name, stored, start, min(_PIECE, stored.size - start))

    def _read(self, name: str, stored: StoredTensor, start: int, size: int) -> Array:
        data = read_part(f"{self.what}: {name}", self._file, stored.start + start, size)
        return data.view(NUMPY_DTYPES[stored.dtype])


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Header of a file with ``tensors``, (dtype, shape) by name, in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * _BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start aligned
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    total = os.fstat(file.fileno()).st_size
    if total < 8:
        raise ValueError(f"it has {total} bytes, and the length of the header takes 8")
    size = int.from_bytes(file.read(8), "little")
    if size > total - 8:
        raise ValueError(f"its header should have {size} bytes, and {total - 8} follow")
    if size > MOST_HEADER:
        raise ValueError(f"its header has {size} bytes; at most {MOST_HEADER} are read")
    text = file.read(size)
    if text[:1] != b"{":
        raise ValueError("its header does not begin with {")
    entries = json.loads(text.decode(), object_pairs_hook=_without_repetitions)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is no object of strings")
    tensors = {name: _tensor(name, entry, 8 + size) for name, entry in entries.items()}
    end = 8 + size
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if stored.start != end:
            raise ValueError(
                f"tensor {name[:80]!r} begins at byte {stored.start}, and the one before it ends at {end}"
            )
        end += stored.size
    if end != total:
        raise ValueError(f"its tensors end at byte {end}, and the file at {total}")
    return metadata, tensors


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("its header has a key twice")
    return entries


def _tensor(name: str, entry: Any, data: int) -> StoredTensor:
    """Check a header entry. ``data``: byte where the data of the tensors starts."""
    wrong = ValueError(
        f"the header's entry of {name[:80]!r} is not a dtype, a shape and data_offsets that fit each other"
    )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise wrong
    size = offsets[1] - offsets[0]
    bits = _BITS.get(dtype)  # one of a later version of the format is nothing that is read here
    if size < 0 or (bits is not None and math.prod(shape) * bits != 8 * size):
        raise wrong
    return StoredTensor(dtype, tuple(shape), data + offsets[0], size)


def _sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= _MOST_AXES
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )
