"""Dropout of attention weights in Numba kernels; ``reference/attention/dropout.py`` defines which are kept.

One call of Philox per weight, of which an eighth is used: easy to read. The CUDA C++ kernels use all of it.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, uint32, uint64

from gpu_ops.kernels.common.numba_cuda.philox import philox4x32

__all__ = ["keeper"]


@cache
def keeper(dropout: str):
    """Device function that returns whether the weight of a pair is kept. ``dropout``: of Features."""
    in_array = dropout == "array"

    @cuda.jit(device=True)
    def keep(seed, dropout_p, sequence, head, query, key):
        number = uint64(seed[0]) if in_array else uint64(seed)
        i, j = uint32(query), uint32(key)
        row_group = (i >> uint32(4)) << uint32(3) | i & uint32(7)
        key_group = (j >> uint32(5)) << uint32(3) | j & uint32(7)
        w0, w1, w2, w3 = philox4x32(
            row_group, key_group, uint32(head), uint32(sequence), uint32(number), uint32(number >> uint64(32))
        )
        low, high = (w1, w3) if j & uint32(8) else (w0, w2)
        word = high if j & uint32(16) else low
        half = uint32(word >> ((i & uint32(8)) << uint32(1))) & uint32(0xFFFF)
        return half >= uint32(dropout_p * 65536)

    return keep
