"""The header of a GGUF file: which tensors it holds, and where their bytes begin.

No length is believed before it is held against the file's own: a damaged one could ask for any amount of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.errors import FormatError

__all__ = ["GGUFTensor", "read_header"]

_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its type
_UINT32 = 4


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    type: int
    shape: tuple[int, ...]  # NumPy's order: the contiguous axis last
    start: int  # in bytes from the start of the file


def read_header(name: str, path: Path) -> tuple[Array, list[GGUFTensor]]:
    """The file's bytes and its tensors; FormatError where it is none, damaged or big-endian."""
    try:
        data: Array = np.memmap(path, mode="r")
        return data, _Header(data.data).tensors()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: {path} cannot be read as a GGUF file: {error}") from error


class _Header:
    """What is read of it moves on, byte by byte; ValueError for whatever no writer writes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def tensors(self) -> list[GGUFTensor]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number(4)
        if version & 0xFFFF == 0:  # what scales within codes look like then, writers do not agree on
            raise ValueError("its numbers are big-endian, and only little-endian files are read: convert it")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; 2 and 3 are known")
        tensors, keys = self._number(8), self._number(8)
        alignment = self._alignment(keys)
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            label = self._text()
            if label in found:
                raise ValueError(f"it has two tensors {label!r}")
            dims = np.frombuffer(self._take(8 * self._number(4)), "<u8").tolist()
            found[label] = self._number(4), tuple(reversed(dims)), self._number(8)
        start = -(-self._at // alignment) * alignment
        return [GGUFTensor(label, type, shape, start + at) for label, (type, shape, at) in found.items()]

    def _alignment(self, keys: int) -> int:
        """Past all keys and their values; of what they say, the alignment of tensors alone is needed."""
        alignment, seen = 32, set()
        for _ in range(keys):
            key, type = self._text(), self._number(4)
            if key in seen:
                raise ValueError(f"it has the key {key!r} twice")
            seen.add(key)
            if key != "general.alignment":
                self._skip_value(type)
                continue
            alignment = self._number(4)
            if type != _UINT32 or alignment.bit_count() != 1:
                raise ValueError(
                    f"its alignment is {alignment} (type {type}); expected a power of two (type 4)"
                )
        return alignment

    def _skip_value(self, type: int) -> None:
        if type == _STRING:
            self._skip(self._number(8))
        elif type == _ARRAY:
            of, count = self._number(4), self._number(8)
            if of in _BYTES:
                self._skip(count * _BYTES[of])
            else:
                for _ in range(count):
                    self._skip_value(of)
        elif type in _BYTES:
            self._skip(_BYTES[type])
        else:
            raise ValueError(f"no value has type {type}, as one at byte {self._at} would")

    def _text(self) -> str:
        return self._take(self._number(8)).decode()

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        start = self._at
        self._skip(size)
        return bytes(self._data[start : self._at])

    def _skip(self, size: int) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise ValueError(f"{size} bytes should follow at byte {self._at}, where {left} are left")
        self._at += size
