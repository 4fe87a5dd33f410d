"""Index of a sharded checkpoint's files, and a reader of their contents."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import FormatError
from gpu_ops.formats.files import opened
from gpu_ops.formats.safetensors import SafetensorsFile

__all__ = ["KIND", "Index", "Reader", "Runs", "Slices", "common", "covers", "read_index", "runs_of"]

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


Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Slices:
    """Elements of an array of this shape: ``pieces``, (start, stop) each, select along an axis; of that selection,
    flattened, elements ``first`` to ``last``. No pieces: the whole array."""

    shape: tuple[int, ...]
    axis: int
    pieces: tuple[tuple[int, int], ...]
    first: int
    last: int

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "pieces": [list(piece) for piece in self.pieces],
            "elements": [self.first, self.last],
        }

    @classmethod
    def from_json(cls, shape: Sequence[int], value: Any) -> Slices:
        """Read a part; ValueError, KeyError, TypeError or IndexError if an array of this shape has no such part."""
        pieces = tuple((int(a), int(b)) for a, b in value["pieces"])
        first, last = (int(x) for x in value["elements"])
        part = cls(tuple(shape), int(value["axis"]), pieces, first, last)
        length = part.shape[part.axis] if part.pieces else 0
        ascending = pieces == tuple(sorted(pieces)) and all(0 <= a <= b <= length for a, b in pieces)
        inside = 0 <= part.axis < max(1, len(part.shape)) and 0 <= first <= last <= part.size
        if not inside or not ascending:
            raise ValueError(f"{value} is no part of an array of shape {part.shape}")
        return part

    @property
    def size(self) -> int:
        """Number of elements in all pieces."""
        if not self.pieces:
            return math.prod(self.shape)
        others = math.prod(n for axis, n in enumerate(self.shape) if axis != self.axis)
        return others * sum(stop - start for start, stop in self.pieces)


@dataclass(frozen=True)
class Runs:
    """Runs of ``length`` elements each, from ``here`` on in a part and from ``whole`` on in the array. Both ascend,
    except that a piece may occur several times."""

    here: Integers
    whole: Integers
    length: Integers


def runs_of(part: Slices) -> Runs:
    """Runs of a part; ``here`` counts from the part's first element."""
    pieces = np.array(part.pieces or ((0, part.shape[0] if part.shape else 1),), np.int64)
    axis = part.axis if part.pieces else 0
    outer, inner = math.prod(part.shape[:axis]), math.prod(part.shape[axis + 1 :])
    lengths = pieces[:, 1] - pieces[:, 0]
    before = np.cumsum(lengths) - lengths
    rows = np.arange(outer)[:, None]
    here = ((rows * lengths.sum() + before) * inner).reshape(-1)
    whole = ((rows * (part.shape[axis] if part.shape else 1) + pieces[:, 0]) * inner).reshape(-1)
    length = np.tile(lengths * inner, outer)
    first, last = np.maximum(here, part.first), np.minimum(here + length, part.last)
    keep = first < last
    clipped = first - part.first, whole + first - here, last - first
    return Runs(*(x[keep] for x in clipped))


def common(a: Runs, b: Runs) -> tuple[Integers, Integers, Integers]:
    """Runs that two parts of an array have in common: their starts in a, in b, and their lengths."""
    ends = b.whole + b.length
    low = np.searchsorted(ends, a.whole, side="right")
    high = np.searchsorted(b.whole, a.whole + a.length, side="left")
    counts = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(counts)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[of_a]
    start = np.maximum(a.whole[of_a], b.whole[of_b])
    length = np.minimum(a.whole[of_a] + a.length[of_a], ends[of_b]) - start
    return a.here[of_a] + start - a.whole[of_a], b.here[of_b] + start - b.whole[of_b], length


def covers(size: int, parts: Sequence[Runs]) -> bool:
    """Whether the parts together have all ``size`` elements of an array."""
    starts = np.concatenate([np.zeros(1, np.int64), *(part.whole for part in parts)])
    ends = np.concatenate([np.zeros(1, np.int64), *(part.whole + part.length for part in parts)])
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    return bool((starts[order][1:] <= reach[:-1]).all() and reach[-1] == size)
