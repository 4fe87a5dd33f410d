"""Philox 4x32-10 in compiled code: see ``reference/philox.py``."""

from __future__ import annotations

import numpy as np

from .jit import noinline_function

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


@noinline_function
def philox4x32(c0, c1, c2, c3, n, k0, k1):
    """Replace ``n`` counters, whose words are in four arrays of uint32, by their random words; the key is uint32.

    Round after round over all: LLVM makes no vectors of a loop whose body has ten.
    """
    for _ in range(10):
        for i in range(n):
            p0, p1 = np.uint64(c0[i]) * _M0, np.uint64(c2[i]) * _M1
            c0[i], c1[i] = np.uint32(p1 >> _HALF) ^ c1[i] ^ k0, np.uint32(p1)
            c2[i], c3[i] = np.uint32(p0 >> _HALF) ^ c3[i] ^ k1, np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
