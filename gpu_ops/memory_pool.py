"""Memory of large results and scratch on the CPU, used again: what CuPy's memory pool is on a GPU.

The C library gives freed memory back to the system: always above 32 MiB, and with smaller results as soon as two of
them are free. The next results start from pages that the system clears first: 5.5 ms for 64 MiB, twice RMSNorm's
own time; 1.9 ms for two results of 2 MiB, which are written in 0.04. So the memory of a large result is kept when the
last array on it is gone, and given to the next result of its size. What was not used for long, the system may take
at any time that it runs short (``MADV_FREE``): it shows as used, and is in nobody's way.

Environment: ``GPU_OPS_POOL_MB`` is how much may be kept (512 MiB); 0 keeps nothing.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import threading
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import OptionError

__all__ = ["POOL", "MemoryPool"]

FROM_BYTES = 1 << 20
RECENT_BYTES = 64 << 20  # not offered to the system: to offer 2 MiB and use them again takes 15 us
_UNIT = 64 << 10  # of blocks: a result takes little beyond its size, and those of nearly one size share


class MemoryPool:
    """What is kept beyond the limit goes, the oldest first. Threads never wait for each other."""

    def __init__(self) -> None:
        self._kept: list[_Block] = []
        self._lock = threading.Lock()
        self.kept_bytes = 0

    @cached_property
    def limit(self) -> int:
        """In bytes."""
        given = os.environ.get("GPU_OPS_POOL_MB", "512")
        if not given.isdecimal():
            raise OptionError(
                f"GPU_OPS_POOL_MB={given!r} is not a number of MiB; 0 keeps no memory of results"
            )
        return int(given) << 20 if sys.platform == "linux" else 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """``numpy.empty``."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < FROM_BYTES or size > self.limit:
            return np.empty(shape, dtype)
        try:
            block = self._take(-(-size // _UNIT) * _UNIT)
        except OSError:  # no more mappings
            return np.empty(shape, dtype)
        return np.asarray(_Loan(self, block))[:size].view(dtype).reshape(shape)

    def _take(self, size: int) -> _Block:
        if self._lock.acquire(blocking=False):
            try:
                for i in reversed(range(len(self._kept))):  # the last is the likeliest to be in a cache
                    if len(self._kept[i]) == size:
                        self.kept_bytes -= size
                        return self._kept.pop(i)
            finally:
                self._lock.release()
        return _Block(size)

    def put(self, block: _Block) -> None:
        # Not waited for: the garbage collector may have found this result in the very thread that holds the lock.
        if not self._lock.acquire(blocking=False):
            return  # and the block goes
        try:
            block.offered = False
            self._kept.append(block)
            self.kept_bytes += len(block)
            recent = 0
            for other in reversed(self._kept):
                recent += len(other)
                if recent > RECENT_BYTES:
                    if other.offered:
                        break  # and so are the older ones
                    other.offer()
            while self.kept_bytes > self.limit:
                self.kept_bytes -= len(self._kept.pop(0))
        finally:
            self._lock.release()


class _Block(mmap.mmap):
    """Memory of the system's, as bytes for NumPy."""

    interface: dict[str, Any]
    offered: bool
    """Whether the system may take it."""

    def __new__(cls, size: int) -> _Block:
        block = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # huge pages: one fault of the system in place of 512, where it has them
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        block.interface = dict(np.frombuffer(block, np.uint8).__array_interface__)
        return block

    def offer(self) -> None:
        self.offered = True
        with contextlib.suppress(OSError):  # a system that knows no MADV_FREE: the limit bounds what is kept
            self.madvise(mmap.MADV_FREE)


class _Loan:
    """Owns a block for as long as an array lies on it."""

    def __init__(self, pool: MemoryPool, block: _Block) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__ = block.interface

    def __del__(self) -> None:
        self._pool.put(self._block)


POOL = MemoryPool()
