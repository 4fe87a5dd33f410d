"""Index of a sharded checkpoint's files, and a reader of their contents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.distributed.runs import Slices, common, runs_of
from gpu_ops.errors import FormatError
from gpu_ops.formats.files import opened
from gpu_ops.formats.safetensors import SafetensorsFile

__all__ = ["KIND", "Index", "Reader", "read_index"]

Array = npt.NDArray[Any]

KIND = "gpu_ops sharded state 1"


@dataclass(frozen=True)
class Index:
    """Contents of ``index.json``. ``tensors``: the shape of each array, and the elements that each file has of it."""

    next_step: int
    meta: dict[str, Any]
    dtypes: dict[str, str]
    files: list[str]
    tensors: dict[str, tuple[tuple[int, ...], list[tuple[int, Slices]]]]

    @classmethod
    def from_json(cls, index: Any) -> Index:
        """Read an index; ValueError, KeyError, TypeError, AttributeError or IndexError if it is none."""
        if index["kind"] != KIND or not isinstance(index["meta"], dict):
            raise ValueError(
                f"kind {index['kind']!r} and meta {index['meta']!r:.80}; expected {KIND!r}, a dict"
            )
        files = list(index["files"])
        for name in files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no file of the folder")
        tensors = {}
        for name, entry in index["tensors"].items():
            shape = tuple(int(n) for n in entry["shape"])
            shards = [(range(len(files))[x["file"]], Slices.from_json(shape, x)) for x in entry["shards"]]
            tensors[name] = shape, shards
        dtypes = {buffer: str(dtype) for buffer, dtype in index["dtypes"].items()}
        next_step = int(index["next_step"])
        if not 1 <= next_step < 1 << 63:
            raise ValueError(f"next_step is {next_step}")
        return cls(next_step, index["meta"], dtypes, files, tensors)


class Reader:
    """Reader of a checkpoint's files."""

    def __init__(self, op: str, where: Path, index: Index, stack: contextlib.ExitStack) -> None:
        self._op, self._where, self._index, self._stack = op, where, index, stack
        self._files: dict[int, SafetensorsFile] = {}

    def find(self, name: str, part: Slices) -> list[tuple[int, Any]]:
        """Find the files with elements of ``part`` of an array, and their runs; FormatError if no file has some."""
        wanted, overlaps = runs_of(part), []
        missing = np.ones(part.last - part.first, np.bool_)
        for number, saved in self._index.tensors[name][1]:
            overlap = common(wanted, runs_of(saved))
            if not overlap[0].size:
                continue
            for buffer, dtype in self._index.dtypes.items():
                stored = self._open(number).tensors.get(f"{buffer}/{name}")
                if stored is None or (stored.dtype, stored.shape) != (dtype, (saved.last - saved.first,)):
                    raise FormatError(
                        f"{self._op}: {self._files[number].path} has {buffer}/{name} as {stored}, but index.json has "
                        f"{dtype} ({saved.last - saved.first},)"
                    )
            overlaps.append((number, overlap))
            for a, n in zip(overlap[0].tolist(), overlap[2].tolist(), strict=True):
                missing[a : a + n] = False
        if missing.any():
            raise FormatError(
                f"{self._op}: {self._where} has no file with {int(missing.sum())} elements of {name}"
            )
        return overlaps

    def read(self, key: str, found: Sequence[tuple[int, Any]], target: Array) -> None:
        """Read the elements that :meth:`find` found into ``target``."""
        for number, (here, whole, length) in found:
            first, last = int(whole.min()), int((whole + length).max())
            data = self._open(number).elements(key, first, last)
            for a, b, n in zip(here.tolist(), whole.tolist(), length.tolist(), strict=True):
                target[a : a + n] = data[b - first : b - first + n]

    def _open(self, number: int) -> SafetensorsFile:
        if number not in self._files:
            path = self._where / self._index.files[number]
            file = self._stack.enter_context(opened(self._op, path))
            self._files[number] = SafetensorsFile(self._op, path, file)
        return self._files[number]


def read_index(op: str, where: Path) -> Index:
    path = where / "index.json"
    with opened(op, path) as file:
        try:
            return Index.from_json(json.load(file))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{op}: {path} is no index of a sharded checkpoint: {error!r}") from error
