"""Buckets of a model's arrays, end to end: ranks send each as one message, and each rank has a share of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import as_bits
from gpu_ops.core.state_arrays import zeros
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.engine import Pending
from gpu_ops.distributed.transport import array_module
from gpu_ops.training.flat import FlatParams

__all__ = ["Bucket", "Gradients", "Shard", "Weights", "buckets_of"]

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


_UNDER_WAY = 2  # messages; each holds a bucket twice: the sent and the received one


class Weights:
    """Whole weights by name, gathered from shares in ``flat``.

    In stage 3 they exist between :meth:`gather` and :meth:`free`; otherwise ``arrays`` has NaN of the same shapes,
    without memory.
    """

    def __init__(self, comm: Comm, buckets: Sequence[Bucket], flat: FlatParams, stage: int) -> None:
        self._comm, self._buckets, self._flat, self._stage = comm, buckets, flat, stage
        self.dtype: np.dtype[Any] = flat.buffers["params"].dtype
        self.arrays: dict[str, Array] = {}
        self._whole: dict[int, Array] = {}
        self._gathers: dict[int, tuple[Array, Pending]] = {}
        for bucket in buckets:
            if stage == 0:
                self.arrays |= bucket.views(*(flat.params[name] for name in bucket.pieces))
            elif stage < 3:
                self._whole[bucket.number] = zeros((bucket.size,), self.dtype, flat.device)
                self.arrays |= bucket.views_of(self._whole[bucket.number])
            else:
                self._leave_shapes(bucket)

    def publish(self) -> None:
        """Give all ranks the shares that each of them has changed."""
        self.free_all()
        sent: list[Pending] = []
        for number, whole in self._whole.items():
            share = self._buckets[number].joined(self._flat.params)
            sent.append(self._comm.start_all_gather(share, out=whole))
            if len(sent) > _UNDER_WAY:
                sent.pop(0).wait()
        for pending in sent:
            pending.wait()

    def start_gather(self, number: int) -> None:
        """Start to gather a bucket in stage 3; the transfer overlaps with the work that follows."""
        if self._stage == 3 and number not in self._gathers:
            bucket = self._buckets[number]
            whole = np.empty(bucket.size, self.dtype)
            pending = self._comm.start_all_gather(bucket.joined(self._flat.params), out=whole)
            self._gathers[number] = whole, pending

    def gather(self, number: int) -> None:
        if self._stage == 3:
            self.start_gather(number)
            whole, pending = self._gathers[number]
            pending.wait()
            self.arrays |= self._buckets[number].views_of(whole)

    def free(self, number: int) -> None:
        if self._stage == 3:
            del self._gathers[number]
            self._leave_shapes(self._buckets[number])

    def free_all(self) -> None:
        """Free buckets that a failed pass has left: they would not follow changes of the shares."""
        for number in list(self._gathers):
            self.gather(number)  # waits for the transfer
            self.free(number)

    def _leave_shapes(self, bucket: Bucket) -> None:
        placeholder = np.full((), np.nan, self.dtype)
        self.arrays |= {name: np.broadcast_to(placeholder, shape) for name, shape in bucket.shapes.items()}


class Gradients:
    """Whole gradients by name; their sums over the ranks are added to shares in ``flat``. From stage 2 on they exist
    between :meth:`open` and :meth:`send`."""

    def __init__(
        self,
        comm: Comm,
        buckets: Sequence[Bucket],
        flat: FlatParams,
        stage: int,
        sum_shared: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._comm, self._buckets, self._flat, self._stage = comm, buckets, flat, stage
        self._sum_shared = sum_shared
        self.arrays: dict[str, Array] = {}
        self._whole: dict[int, Array] = {}
        self._sent: deque[tuple[int, Pending]] = deque()  # may have a bucket twice, for two microbatches
        self._shares: dict[int, Array] = {}  # sums that go back to all ranks
        for bucket in buckets:
            if stage == 0:
                self.arrays |= bucket.views(*(flat.grads[name] for name in bucket.pieces))
            elif stage == 1:
                self.open(bucket.number)

    def open(self, number: int) -> None:
        """Make a bucket of zeros, unless it exists."""
        if self._stage and number not in self._whole:
            bucket = self._buckets[number]
            dtype = self._flat.buffers["grads"].dtype
            self._whole[number] = zeros((bucket.size,), dtype, self._flat.device)
            self.arrays |= bucket.views_of(self._whole[number])

    def send(self, number: int) -> None:
        """Start the sum of a bucket; it overlaps with the work that follows."""
        bucket = self._buckets[number]
        self._sum_shared({name: self.arrays[name] for name in bucket.shapes})
        whole = self._whole[number] if self._stage else bucket.joined(self._flat.grads)
        self._sent.append((number, self._comm.start_reduce_scatter(whole)))
        if self._stage >= 2:
            del self._whole[number]
            for name in bucket.shapes:
                del self.arrays[name]
        if len(self._sent) > _UNDER_WAY:
            self._receive()

    def poll(self) -> None:
        """Let MPI move data."""
        for _, pending in self._sent:
            pending.poll()

    def finish(self) -> None:
        """Wait for all sums."""
        while self._sent:
            self._receive()
        for number, share in self._shares.items():
            self._buckets[number].put(self._comm.all_gather(share), self._flat.grads)
        self._shares.clear()

    def clear(self) -> None:
        """Set gradients to zero, once all transfers have arrived."""
        while self._sent:
            self._receive()
        self._shares.clear()
        self._flat.zero_grad()
        for whole in self._whole.values():
            whole.fill(0)

    def _receive(self) -> None:
        """Wait for the sum of the bucket that was sent first, and store it."""
        number, pending = self._sent.popleft()
        share = pending.wait()
        if self._stage == 0:
            self._shares[number] = share
        else:
            self._buckets[number].put(share, self._flat.grads, add=self._stage >= 2)
