"""Dropout of attention weights on the CPU; ``reference/attention_dropout.py`` defines which weights are kept.

A draw gives the bits of four keys, 8 apart, to each lane, which is a query: twice the words that are needed, since
two lanes share them.
"""

from __future__ import annotations

import numpy as np

from .codegen.numba_api import types
from .dtype import like
from .jit import device_function, generic, noinline_function
from .philox import philox4x32

STEPS = 1 << 16  # values of the bits of a weight
KEYS = 32  # whose draws share a part of the counter


@device_function
def drop(x, words, call, b, first, n, width, head, query, seed, careful):
    """x = 0 where dropout drops the weight: rows of ``n`` keys from ``first`` on, ``width`` lanes.

    ``words`` (4, lanes) is scratch. ``careful``: nonzero numbers stay so, as zeros would hide what is not finite.
    """
    least, query0, key = np.uint32(call.dropout_p * STEPS), call.query0, call.key0 + first
    for group in range(key // KEYS, (key + n - 1) // KEYS + 1):
        for i in range(8):
            draw(words, b, group * 8 + i, width, head, query, query0, seed[0])
            for word in range(4):
                j = group * KEYS + word * 8 + i - key
                if 0 <= j < n:
                    drop_row(x, j, words[word], query, query0, width, least, careful)


@device_function
def drop_lanes(tile, w, call, x, b, width, first, n, careful):
    """The same for a tile of the backward pass, its scratch ``w`` and the call's arrays ``x``."""
    drop(tile, w.terms.words, call, b, first, n, width, w.head, w.query, x.seed, careful)


@noinline_function
def draw(words, b, key_group, width, head, query, query0, seed):
    k0, k1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    c1, c3 = np.uint32(key_group), np.uint32(b)
    first, second, third, fourth = words[0], words[1], words[2], words[3]
    for c in range(width):
        i = query0 + query[c]
        c0, c2 = np.uint32(i >> 4 << 3 | i & 7), np.uint32(head[c])
        first[c], second[c], third[c], fourth[c] = philox4x32(c0, c1, c2, c3, k0, k1)


@device_function
def is_kept(word, query, least):
    return np.uint32(word >> np.uint32(query << 1 & 16)) & np.uint32(0xFFFF) >= least


@generic
def drop_row(x, j, words, query, query0, width, least, careful):
    """Row j of floats, or of pairs of bfloat16 along the rows."""

    def floats(x, j, words, query, query0, width, least, careful):
        row, zero, least_number = x[j], like(x[0, 0], 0.0), like(x[0, 0], 1e-45)
        for c in range(width):
            value = row[c]
            dropped = least_number if careful and value != 0 else zero
            row[c] = value if is_kept(words[c], query0 + query[c], least) else dropped

    def pairs(x, j, words, query, query0, width, least, careful):
        row, shift = x[j // 2], np.uint32(16 * (j % 2))
        mine, one = np.uint32(0xFFFF) << shift, np.uint32(1) << shift
        for c in range(width):
            dropped = np.uint32(row[c] & ~mine)
            if careful and row[c] & mine != 0:
                dropped |= one
            row[c] = row[c] if is_kept(words[c], query0 + query[c], least) else dropped

    return pairs if x.dtype == types.uint32 else floats
