"""Philox 4x32-10: 128 random bits for every counter and key, without a state.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), table 2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["DROPOUT_DOMAIN", "SAMPLE_DOMAIN", "philox4x32"]

# Last words of counters, by which ops with one seed get different bits. Attention has the index of a sequence there,
# AdamW the high half of its step: both are less.
DROPOUT_DOMAIN = 0xFFFFFFFF
SAMPLE_DOMAIN = 0xFFFFFFFE

Words = npt.NDArray[np.uint64]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # increments of the key in every round
_MASK = np.uint64(0xFFFFFFFF)


def philox4x32(counter: tuple[npt.ArrayLike, ...], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Four random words (..., 4) for each counter: four arrays of integers below 2**32, which broadcast.

    Examples
    --------
    >>> from gpu_ops.reference.philox import philox4x32
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    shift = np.uint64(32)
    for i in range(10):
        k0, k1 = (np.uint64((k + i * weyl) & 0xFFFFFFFF) for k, weyl in zip(key, _WEYL, strict=True))
        p0, p1 = np.uint64(_MULTIPLIERS[0]) * c0, np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & _MASK, (p0 >> shift) ^ c3 ^ k1, p0 & _MASK
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)
