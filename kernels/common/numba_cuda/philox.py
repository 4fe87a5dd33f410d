"""Philox 4x32-10 in Numba kernels for GPUs: see ``reference/philox.py``."""

from __future__ import annotations

from numba import cuda, uint32, uint64

__all__ = ["DROPOUT_DOMAIN", "SAMPLE_DOMAIN", "SEED_TYPES", "philox4x32"]

# Last words of counters, as in reference/philox.py, which a test compares.
DROPOUT_DOMAIN, SAMPLE_DOMAIN = 0xFFFFFFFF, 0xFFFFFFFE

# Type of a seed in signatures, by its place; "": there is none.
SEED_TYPES = {"": "int32", "number": "uint64", "array": "uint64[:]"}


@cuda.jit(device=True)
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random words for a counter of four words; all are uint32, like the key."""
    for _ in range(10):
        p0, p1 = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0, c1 = uint32(p1 >> uint64(32)) ^ c1 ^ k0, uint32(p1)
        c2, c3 = uint32(p0 >> uint64(32)) ^ c3 ^ k1, uint32(p0)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3
