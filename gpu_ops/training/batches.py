"""Batches of token windows, in an order that depends only on a seed and the step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.arrays import Array
from gpu_ops.core.checks import integer
from gpu_ops.errors import ShapeError
from gpu_ops.reference.philox import philox4x32
from gpu_ops.training.tokens import MOST_VOCAB, TokenFile, check_range, is_numbers, vector

__all__ = ["Batches", "permuted"]

_MOST_ROWS, _MOST_STEP = 1 << 24, (1 << 48) - 1  # so that an epoch number has at most 96 bits


class Batches:
    """Endless iterator of batches of token windows for training.

    Window w of a source is its tokens [w * seqlen, (w + 1) * seqlen], one more than ``seqlen``: the targets are the
    ids one token later. Each epoch returns every window of all sources once, in a different order. An epoch may end
    in the middle of a batch, so no window is left out. Tokens at the end of a source that do not fill a window are
    not used.

    Parameters
    ----------
    tokens : TokenFile, vector of integers, or list of these
        Vectors are not copied.
    batch, seqlen : int
        Shape of a batch.
    seed : int
        From 0 to 2**64 - 1. The order depends only on the seed and the step: it is the same on every machine.
    start : int
        Step of the first batch, for a run that resumes.
    rank, world : int
        This process takes the rows ``rank * batch`` to ``(rank + 1) * batch`` of a batch of ``world * batch``. The
        number of processes that share a batch does not change it.

    Attributes
    ----------
    step : int
        Step of the next batch.
    windows : int
        Number of windows of an epoch, which therefore takes ``windows / (batch * world)`` steps.

    Raises
    ------
    ShapeError
        No source fills a window.
    DTypeError, OptionError
        A source is invalid; a token is negative or at least 2**31; an option is out of range.

    Notes
    -----
    The order is a Feistel network of 8 rounds over the next power of two, whose keys are Philox words of the seed and
    the epoch; numbers beyond the last window are permuted again. It needs no memory.

    Examples
    --------
    >>> from gpu_ops.training import Batches
    >>> batches = Batches(np.arange(9), batch=2, seqlen=2, seed=0)
    >>> ids, targets = next(batches)
    >>> np.array_equal(targets, ids + 1), batches.windows, batches.step
    (True, 4, 1)
    """

    def __init__(
        self,
        tokens: Any,
        batch: int,
        seqlen: int,
        seed: int = 0,
        start: int = 0,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        op = "Batches"
        self.batch = integer(op, "batch", batch, low=1, high=_MOST_ROWS)
        self.seqlen = integer(op, "seqlen", seqlen, low=1, high=1 << 31)
        self.seed = integer(op, "seed", seed, low=0, high=(1 << 64) - 1)
        self.step = integer(op, "start", start, low=0, high=_MOST_STEP)
        self.world = integer(op, "world", world, low=1, high=_MOST_ROWS)
        self.rank = integer(op, "rank", rank, low=0, high=self.world - 1)
        several = isinstance(tokens, (list, tuple)) and not is_numbers(tokens)
        sources = list(tokens) if several else [tokens]
        self._sources = [_source(op, i, x) for i, x in enumerate(sources)]
        lengths = [len(source) for source in self._sources]
        self._ends = np.cumsum([max(n - 1, 0) // self.seqlen for n in lengths], dtype=np.int64)
        self.windows = int(self._ends[-1]) if lengths else 0
        if not self.windows:
            raise ShapeError(
                f"{op}: a window takes seqlen + 1 = {self.seqlen + 1} tokens, and the longest of "
                f"{len(lengths)} sources has {max(lengths, default=0)}"
            )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Array, Array]:
        batch = self.at(self.step)
        self.step += 1
        return batch

    @typed_memory_errors("Batches.at")
    def at(self, step: int) -> tuple[Array, Array]:
        """Return ids and targets of a step, int32 (batch, seqlen) each."""
        step = integer("Batches.at", "step", step, low=0, high=_MOST_STEP)
        ids = np.empty((self.batch, self.seqlen), np.int32)
        targets = np.empty_like(ids)
        for row, window in enumerate(self._windows_of(step).tolist()):
            i = int(np.searchsorted(self._ends, window, side="right"))
            first = window - (int(self._ends[i - 1]) if i else 0)
            tokens = self._sources[i].read(first * self.seqlen, self.seqlen + 1)
            ids[row], targets[row] = tokens[:-1], tokens[1:]
        return ids, targets

    def _windows_of(self, step: int) -> Array:
        epoch, first = divmod((step * self.world + self.rank) * self.batch, self.windows)
        later, index = np.divmod(first + np.arange(self.batch), self.windows)
        windows = np.empty_like(index)
        for e in range(int(later[-1]) + 1):  # nearly always one or two
            rows = later == e
            windows[rows] = permuted(index[rows], self.windows, self.seed, epoch + e)
        return windows


class _Vector:
    """An array as a source of windows."""

    def __init__(self, tokens: Array) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> Array:
        return self._tokens[start : start + count]


def permuted(index: Array, n: int, seed: int, epoch: int) -> Array:
    """Permute ``index``, numbers in [0, n), by a permutation of the n numbers."""
    bits, keys = max((n - 1).bit_length(), 2), _round_keys(seed, epoch)
    result = _feistel(index.astype(np.uint64), bits, keys)
    while (outside := result >= n).any():  # less than half of the numbers are
        result[outside] = _feistel(result[outside], bits, keys)
    return result.astype(np.int64)


_ROUNDS = 8  # even, so that the halves of an odd number of bits end in their original places


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    words = (epoch & 0xFFFFFFFF, epoch >> 32 & 0xFFFFFFFF, epoch >> 64)
    blocks = philox4x32((*words, np.arange(_ROUNDS // 4)), (seed & 0xFFFFFFFF, seed >> 32))
    return tuple(np.uint64(int(word) << 32) for word in blocks.ravel())


def _feistel(x: Array, bits: int, keys: tuple[np.uint64, ...]) -> Array:
    """Permute numbers of ``bits`` bits: each round changes one half by a function of the other."""
    low_bits = bits // 2
    for key in keys:
        high_bits = bits - low_bits
        low, high = x & np.uint64((1 << low_bits) - 1), x >> np.uint64(low_bits)
        mixed = (low | key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        high = high ^ (mixed & np.uint64((1 << high_bits) - 1))
        x, low_bits = (low << np.uint64(high_bits)) | high, high_bits
    return x


def _source(op: str, i: int, x: Any) -> TokenFile | _Vector:
    if isinstance(x, TokenFile):
        return x
    view = vector(op, f"tokens[{i}]", x)
    check_range(op, view, MOST_VOCAB, 0)
    return _Vector(view)
