"""Dropout of the elements of an array. All backends drop the same elements.

Element i of an array in C order has number n = offset + i. Its 32 random bits are word n % 4 of those that Philox
4x32-10 returns for

    counter   (n // 4, low and high half, 0, 2**32 - 1)
    key       the seed, low and high half

and it is kept if they are at least p * 2**32. The last word makes these counters differ from those of attention,
where it is the index of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.reference.philox import DROPOUT_DOMAIN, philox4x32
from gpu_ops.reference.precision import Array, Precision, steps

__all__ = ["dropout", "dropout_backward", "dropout_mask"]


def dropout_mask(shape: tuple[int, ...], p: float, *, seed: Any, offset: int = 0) -> npt.NDArray[np.bool_]:
    """The elements that dropout keeps: bool of ``shape``.

    Examples
    --------
    >>> from gpu_ops.reference.rows.dropout import dropout_mask
    >>> dropout_mask((2, 3), 0.5, seed=7)
    array([[ True,  True,  True],
           [ True, False, False]])
    """
    number = int(np.asarray(seed).reshape(())) % (1 << 64)
    n = np.uint64(offset) + np.arange(int(np.prod(shape)), dtype=np.uint64)
    groups, group = np.unique(n >> np.uint64(2), return_inverse=True)
    counter = groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32), 0, DROPOUT_DOMAIN
    words = philox4x32(counter, (number & 0xFFFFFFFF, number >> 32))
    kept = words[group, n % np.uint64(4)] >= min(round(p * 2**32), 2**32 - 1)
    return np.asarray(kept.reshape(shape))


def dropout(x: Array, p: float, *, seed: Any, offset: int = 0, precision: Precision = "rounded") -> Array:
    """``x * kept / (1 - p)``, where ``kept`` is 0 with probability p and else 1."""
    s = steps(precision, x.dtype)
    factor = s.step(dropout_mask(x.shape, p, seed=seed, offset=offset) / (1 - p))
    with np.errstate(over="ignore", invalid="ignore"):  # inf * 0 is NaN
        return s.store(s.load(x) * factor)


def dropout_backward(
    dy: Array, p: float, *, seed: Any, offset: int = 0, precision: Precision = "rounded"
) -> Array:
    """Gradient of :func:`dropout` with respect to x: dropout of dy."""
    return dropout(dy, p, seed=seed, offset=offset, precision=precision)
