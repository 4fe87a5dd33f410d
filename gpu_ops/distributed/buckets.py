"""Buckets of a model's arrays, end to end: ranks send each as one message, and each rank has a share of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

from gpu_ops.core.arrays import as_bits
from gpu_ops.distributed.transport import array_module

__all__ = ["Bucket", "Shard", "buckets_of"]

Array = npt.NDArray[Any]

Key = TypeVar("Key")

_SEGMENT = 256  # elements: as in FlatParams, 512 bytes of 16-bit ones; 8-bit moments have a scale for each


class Shard(NamedTuple):
    """Elements of a flattened array that a rank has; they are at ``here`` in its array ``piece``."""

    name: str
    elements: slice
    piece: str
    here: slice


@dataclass(frozen=True)
class Bucket:
    """Arrays by name, each at a multiple of 512 bytes or more. Those that decay come first, up to ``decayed``.

    Each of ``shards`` ranks has an equal share, as two arrays: ``decays`` and ``rest``.
    """

    number: int
    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    decayed: int
    size: int
    shards: int

    @classmethod
    def of(
        cls,
        number: int,
        shapes: Mapping[str, tuple[int, ...]],
        decay: Collection[str],
        ranks: int,
        shards: int,
        room: Mapping[str, int],
    ) -> Bucket:
        starts: dict[str, int] = {}
        at = decayed = 0
        for decays in (True, False):
            for name in (n for n in shapes if (n in decay) == decays):
                starts[name] = at
                at += -(-room[name] // _SEGMENT) * _SEGMENT
            decayed = at if decays else decayed
        unit = ranks * _SEGMENT
        return cls(number, dict(shapes), starts, decayed, -(-at // unit) * unit, shards)

    @property
    def pieces(self) -> tuple[str, str]:
        """Names of a rank's two arrays."""
        return f"{self.number}.decays", f"{self.number}.rest"

    def lengths(self, rank: int) -> dict[str, int]:
        """Lengths of a rank's two arrays, by name."""
        begin, end = self._share(rank)
        decays = max(0, min(end, self.decayed) - begin)
        return dict(zip(self.pieces, (decays, end - begin - decays), strict=True))

    def owned(self, rank: int) -> Iterator[Shard]:
        """Elements that a rank has, for each array of which it has any."""
        begin, end = self._share(rank)
        for name, start in self.starts.items():
            first, last = max(start, begin), min(start + math.prod(self.shapes[name]), end)
            if first < last:
                decays = start < self.decayed
                at = begin if decays else max(begin, self.decayed)
                here = slice(first - at, last - at)
                yield Shard(name, slice(first - start, last - start), self.pieces[not decays], here)

    def views(self, decays: Array, rest: Array) -> dict[str, Array]:
        """Views of the arrays in the two buffers that hold them all."""
        views = {}
        for name, start in self.starts.items():
            source, at = (decays, start) if start < self.decayed else (rest, start - self.decayed)
            shape = self.shapes[name]
            views[name] = source[at : at + math.prod(shape)].reshape(shape)
        return views

    def views_of(self, buffer: Array) -> dict[str, Array]:
        """Views of the arrays in the one buffer that holds them all."""
        return self.views(buffer[: self.decayed], buffer[self.decayed :])

    def joined(self, arrays: Mapping[str, Array]) -> Array:
        """Join a rank's two arrays into one."""
        parts = [arrays[name] for name in self.pieces]
        joined: Array = array_module(parts[0]).concatenate([as_bits(x) for x in parts]).view(parts[0].dtype)
        return joined

    def put(self, share: Array, arrays: Mapping[str, Array], *, add: bool = False) -> None:
        """Copy a share to a rank's two arrays, or add it to them."""
        length = arrays[self.pieces[0]].size
        for name, part in zip(self.pieces, (share[:length], share[length:]), strict=True):
            target = arrays[name]
            if add:
                target += part
            else:
                target[...] = part

    def _share(self, rank: int) -> tuple[int, int]:
        length = self.size // self.shards
        rank %= self.shards
        return rank * length, (rank + 1) * length


def buckets_of(
    parts: Mapping[Key, Mapping[str, tuple[int, ...]]],
    decay: Collection[str],
    ranks: int,
    shards: int,
    least: float,
    room: Mapping[str, int],
) -> tuple[list[Bucket], dict[Key, int]]:
    """Buckets of successive parts, closed as soon as they have ``least`` elements, and the bucket of each part.

    ``room``: number of elements of each array; where it differs between ranks, the maximum. Each array then has the
    same offset on all ranks.
    """
    groups: list[dict[str, tuple[int, ...]]] = []
    numbers: dict[Key, int] = {}
    size = math.inf
    for key, part in parts.items():
        if size >= least:
            groups.append({})
            size = 0
        groups[-1].update(part)
        numbers[key] = len(groups) - 1
        size += sum(room[name] for name in part)
    return [Bucket.of(i, shapes, decay, ranks, shards, room) for i, shapes in enumerate(groups)], numbers
