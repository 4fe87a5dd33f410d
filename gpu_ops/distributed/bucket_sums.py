"""Buckets of whole weights and gradients: gather the shares of all ranks, and add gradients up into shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.state_arrays import zeros
from gpu_ops.distributed.buckets import Bucket
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.engine import Pending
from gpu_ops.training.flat import FlatParams

__all__ = ["Gradients", "Weights"]

Array = npt.NDArray[Any]

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
