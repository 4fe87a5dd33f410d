"""Header of a GGUF file: its tensors, and where their bytes and the values of its keys start.

Every count is checked against the bytes that are left, and the number of items read one by one is limited, so a
damaged header costs neither memory nor time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpu_ops.errors import FormatError

__all__ = ["ALIGNMENT", "ARRAY", "FLOAT_TYPES", "MOST_AXES", "NUMBER_TYPES", "PACKED_TYPES", "STRING",
           "TERNARY_TYPES", "UINT32", "GGUFHeader", "GGUFTensor", "read_header"]  # fmt: skip

# Types of values; NUMBER_TYPES maps type numbers to NumPy dtypes.
NUMBER_TYPES = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
UINT32, STRING, ARRAY = 4, 8, 9
# Types of tensors that are written.
FLOAT_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
TERNARY_TYPES = {"tq1_0": 34, "tq2_0": 35, "q2_0": 42}
_TYPE_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
               12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 28: "F64", 30: "BF16", 34: "TQ1_0",
               35: "TQ2_0", 36: "I2_S", 39: "MXFP4"}  # fmt: skip
PACKED_TYPES = {
    name.lower(): number for number, name in _TYPE_NAMES.items() if name.startswith(("Q", "IQ", "MXFP", "TQ"))
}
"""Type numbers of the formats of :class:`gpu_ops.PackedMatrix`."""
ALIGNMENT = 32  # of tensors, without the key general.alignment
MOST_AXES = 4

_BYTES = {type: np.dtype(dtype).itemsize for type, dtype in NUMBER_TYPES.items()}
_LEAST = {STRING: 8, ARRAY: 12}  # bytes of a value: a length; a type and a length
# Limits above any published model: 300,000 words and 500,000 merges in a vocabulary, 50,000 tensors.
_MOST_ITEMS = 1 << 21  # about a second
_MOST_NAMES = 1 << 18
_LONGEST_NAME = (1 << 16) - 1  # in bytes, of a key, in the specification


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    type: int
    shape: tuple[int, ...]  # NumPy's order: the contiguous axis last
    start: int  # in bytes from the start of the file

    @property
    def dtype(self) -> str:
        """Name of its type; if two projects use the number, the more common name."""
        return _TYPE_NAMES.get(self.type, f"of type {self.type}")


@dataclass(frozen=True)
class GGUFHeader:
    tensors: list[GGUFTensor]
    values: dict[str, tuple[int, int]]  # by key: the type of the value, and the byte where it starts


def read_header(op: str, path: Path, file: BinaryIO) -> GGUFHeader:
    """Read the header; FormatError if the file is not GGUF, damaged or big-endian."""
    try:
        return _Header(file).read()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{op}: {path} cannot be read as a GGUF file: {error}") from error


class _Header:
    """Parser of a header that advances through the file; ValueError for anything that no writer writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._size = os.fstat(file.fileno()).st_size
        self._items = 0

    def read(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number(4)
        if version & 0xFFFF == 0:  # writers do not agree on the byte order of scales within codes
            raise ValueError("its numbers are big-endian, and only little-endian files are read: convert it")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; 2 and 3 are known")
        tensors, keys = self._number(8), self._number(8)
        self._expect(24 * tensors + 13 * keys)  # each with an empty name, and a number of one byte
        if tensors + keys > _MOST_NAMES:
            raise ValueError(f"it has {tensors} tensors and {keys} keys; at most {_MOST_NAMES} are read")
        values, alignment = self._keys(keys)
        entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            label = self._name()
            if label in entries:
                raise ValueError(f"it has two tensors {label!r}")
            axes = self._number(4)
            if axes > MOST_AXES:
                raise ValueError(f"its tensor {label!r} has {axes} axes; at most {MOST_AXES} are allowed")
            dims = [self._number(8) for _ in range(axes)]
            entries[label] = self._number(4), tuple(reversed(dims)), self._number(8)
        start = -(-self._at // alignment) * alignment
        placed = [
            GGUFTensor(label, type, shape, start + offset) for label, (type, shape, offset) in entries.items()
        ]
        return GGUFHeader(placed, values)

    def _keys(self, keys: int) -> tuple[dict[str, tuple[int, int]], int]:
        """Read past all keys and their values; return where each value is, and the alignment of tensors."""
        alignment, values = ALIGNMENT, dict[str, tuple[int, int]]()
        for _ in range(keys):
            key, type = self._name(), self._number(4)
            if key in values:
                raise ValueError(f"it has the key {key!r} twice")
            values[key] = type, self._at
            if key != "general.alignment":
                self._skip_value(type)
                continue
            alignment = self._number(4)
            if type != UINT32 or alignment.bit_count() != 1:
                raise ValueError(
                    f"its alignment is {alignment} (type {type}); expected a power of two (type 4)"
                )
        return values, alignment

    def _skip_value(self, type: int) -> None:
        if type == STRING:
            self._skip(self._number(8))
        elif type == ARRAY:
            self._skip_array(self._number(4), self._number(8))
        elif type in _BYTES:
            self._skip(_BYTES[type])
        else:
            raise ValueError(f"no value has type {type}, as one at byte {self._at} would")

    def _skip_array(self, of: int, count: int) -> None:
        if of in _BYTES:
            self._skip(count * _BYTES[of])
            return
        self._expect(count * _LEAST.get(of, 0))
        self._items += count if of == STRING else 8 * count  # weighted by the time they take
        if self._items > _MOST_ITEMS:
            raise ValueError(
                f"its arrays hold more than {_MOST_ITEMS} strings, or an eighth as many arrays; no more are read"
            )
        if of == STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self._skip_value(of)

    def _skip_strings(self, count: int) -> None:
        """Skip strings four times faster than ``_skip_value``: a vocabulary has hundreds of thousands."""
        for _ in range(count):
            self._at += 8 + int.from_bytes(self._file.read(8), "little")
            if self._at > self._size:
                raise ValueError(f"a string should end at byte {self._at}, and the file does at {self._size}")
            self._file.seek(self._at)

    def _name(self) -> str:
        size = self._number(8)
        self._expect(size)
        if size > _LONGEST_NAME:
            raise ValueError(
                f"a name at byte {self._at} has {size} bytes; at most {_LONGEST_NAME} are allowed"
            )
        return self._take(size).decode()

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        self._expect(size)
        self._at += size
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError("it became shorter while it was read")
        return data

    def _skip(self, size: int) -> None:
        self._expect(size)
        self._at += size
        self._file.seek(self._at)

    def _expect(self, size: int) -> None:
        left = self._size - self._at
        if size > left:
            raise ValueError(f"{size} bytes should follow at byte {self._at}, where {left} are left")
