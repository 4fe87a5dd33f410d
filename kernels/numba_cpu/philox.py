"""Philox 4x32-10 in compiled code: see ``reference/philox.py``."""

from __future__ import annotations

import numpy as np

from .jit import device_function

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


@device_function
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random words for a counter of four; all are uint32, as the key."""
    for _ in range(10):
        p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
        c0, c1 = np.uint32(p1 >> _HALF) ^ c1 ^ k0, np.uint32(p1)
        c2, c3 = np.uint32(p0 >> _HALF) ^ c3 ^ k1, np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3
