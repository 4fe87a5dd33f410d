"""Dropout of attention weights on the CPU; ``reference/attention/core.py`` defines which weights are kept.

A draw gives 32 lanes (queries) the bits of 32 keys. It makes twice the words that are needed, since
two lanes share them.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.dtype import like
from gpu_ops.kernels.common.cpu.jit import device_function, generic, noinline_function
from gpu_ops.kernels.common.cpu.philox import philox4x32

STEPS = 1 << 16  # values of the bits of a weight
KEYS, LANES = 32, 32  # of a draw
WORDS = KEYS // 4 * LANES


@device_function
def drop(x, words, call, b, first, n, width, head, query, seed, careful):
    """Set x = 0 where dropout drops the weight: rows of ``n`` keys from ``first`` on, ``width`` lanes.

    ``words`` (4, WORDS) is scratch. ``careful``: nonzero numbers stay nonzero, as zeros would hide non-finite values.
    """
    least, key = np.uint32(call.dropout_p * STEPS), call.key0 + first
    for lane in range(0, width, LANES):
        count = smaller(LANES, width - lane)
        for group in range(key // KEYS, (key + n - 1) // KEYS + 1):
            draw(words, b, group * 8, count, head[lane:], query[lane:], call.query0, seed[0])
            # 8 and 4, which a compiler that knows them would unroll: a sixth of a kernel's instructions
            for i in range(words.shape[1] // LANES):
                for word in range(len(words)):
                    j = group * KEYS + word * 8 + i - key
                    if 0 <= j < n:
                        drop_row(x, j, lane, words[word], i * count, count, least, careful)


@device_function
def drop_lanes(tile, w, call, x, b, width, first, n, careful):
    """Apply dropout to a tile of the backward pass, with its scratch ``w`` and the call's arrays ``x``."""
    drop(tile, w.terms.words, call, b, first, n, width, w.head, w.query, x.seed, careful)


@noinline_function
def draw(words, b, key_group, width, head, query, query0, seed):
    """Draw the bits of weights: element i * width + c of words[m] is for key i + 8 m and lane c."""
    c0, c1, c2, c3 = words[0], words[1], words[2], words[3]
    for i in range(8):
        for c in range(width):
            at, position = i * width + c, query0 + query[c]
            c0[at], c1[at] = np.uint32(position >> 4 << 3 | position & 7), np.uint32(key_group + i)
            c2[at], c3[at] = np.uint32(head[c]), np.uint32(b)
    philox4x32(c0, c1, c2, c3, 8 * width, np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    for m in range(4):
        row = words[m]
        for i in range(8):
            for c in range(width):
                half = np.uint32((query0 + query[c]) << 1 & 16)
                row[i * width + c] = row[i * width + c] >> half & np.uint32(0xFFFF)


@generic
def drop_row(x, j, lane, bits, at, width, least, careful):
    """Drop lanes of row j of floats, or of pairs of bfloat16 along the rows."""

    def floats(x, j, lane, bits, at, width, least, careful):
        row, zero, least_number = x[j, lane : lane + width], like(x[0, 0], 0.0), like(x[0, 0], 1e-45)
        if careful:
            for c in range(width):
                if bits[at + c] < least and row[c] != 0:
                    row[c] = least_number
        else:
            for c in range(width):
                row[c] = row[c] if bits[at + c] >= least else zero

    def pairs(x, j, lane, bits, at, width, least, careful):
        row, shift = x[j // 2, lane : lane + width], np.uint32(16 * (j % 2))
        mine, lowest = np.uint32(0xFFFF) << shift, np.uint32(1) << shift
        for c in range(width):
            rest = np.uint32(row[c] & ~mine)
            dropped = rest | lowest if careful and rest != row[c] else rest
            row[c] = row[c] if bits[at + c] >= least else dropped

    return pairs if x.dtype == types.uint32 else floats
