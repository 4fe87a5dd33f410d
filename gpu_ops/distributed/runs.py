"""Positions of a part's elements in the whole array, as runs that are contiguous in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Runs", "Slices", "common", "covers", "runs_of"]

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
