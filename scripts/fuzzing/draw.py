"""Random arguments: shapes, dtypes, values and memory layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from scripts.fuzzing.maths import DTYPES, Array

T = TypeVar("T")
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257, 384)


class Draw:
    """Source of random arguments. ``small``: for the emulator. Every array is in a buffer of 0xFF bytes (NaN, -1),
    whose other bytes must not change."""

    def __init__(self, seed: Sequence[int], small: bool = False) -> None:
        self.rng, self.small = np.random.default_rng(seed), small
        self.buffers: list[Array] = []
        self.written: list[Array] = []

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def pick(self, *options: T) -> T:
        return options[int(self.rng.integers(len(options)))]

    def integer(self, low: int, high: int) -> int:
        """Random integer from ``low`` to ``high`` inclusive."""
        return int(self.rng.integers(low, high + 1))

    def length(self, limit: int, empty: float = 0.0) -> int:
        if self.chance(empty):
            return 0
        return self.pick(*(n for n in LENGTHS if n <= limit))

    def dtype(self) -> np.dtype[Any]:
        return self.pick(*DTYPES)

    def values(self, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> Array:
        """Normal values with some zeros."""
        x = np.asarray(scale * self.rng.standard_normal(tuple(shape)))
        if self.chance(0.1):
            x[self.rng.random(x.shape) < 0.2] = 0.0
        return x.astype(dtype)

    def array(self, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> Array:
        return self.place(self.values(shape, dtype, scale))

    def out(self, shape: Sequence[int], dtype: Any, rows: bool = False) -> Array:
        """Array for a result."""
        return self.place(np.full(tuple(shape), 7, dtype), written=True, rows=rows)

    def place(self, values: Any, written: bool = False, rows: bool = False) -> Array:
        """Copy the values into a separate buffer, contiguous or not.

        ``written``: a result, whose last axis is contiguous, as the ops require. ``rows``: other axes merge into one.
        """
        values = np.asarray(values)
        n = values.ndim
        order = list(range(n))
        steps, before, after = [1] * n, [0] * n, [0] * n
        layout = self.pick("plain", "plain", "plain", "offset", "padded", "stepped", "reversed", "permuted")
        free = n - 1 if written else n
        if layout == "padded" and n:
            axis = n - 1 if rows else self.integer(0, n - 1)
            before[axis], after[axis] = self.integer(0, 3), self.integer(1, 5)
        elif layout == "offset" and n:
            before[0] = 1
        elif free > 0 and not (rows and n > 2):
            axis = self.integer(0, free - 1)
            if layout == "stepped":
                steps[axis] = 2
            elif layout == "reversed":
                steps[axis] = -1
            elif layout == "permuted":
                order[:free] = [int(i) for i in self.rng.permutation(free)]
        sizes = [before[i] + values.shape[i] * abs(steps[i]) + after[i] for i in order]
        buffer = np.empty(sizes, values.dtype)
        buffer.reshape(-1).view(np.uint8).fill(0xFF)
        view = buffer.transpose([order.index(i) for i in range(n)])
        inner = (slice(before[i], before[i] + values.shape[i] * abs(steps[i])) for i in range(n))
        view = view[(*inner, ...)]
        view = view[(*(slice(None, None, step) for step in steps), ...)]
        view[...] = values
        self.buffers.append(buffer)
        if written:
            self.written.append(view)
        elif self.chance(0.1):
            view.flags.writeable = False
        return view
