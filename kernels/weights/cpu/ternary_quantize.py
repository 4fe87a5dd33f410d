"""Ternary quantisation: statistics of |w| per group, then codes straight into packed w2 words.

Two passes over the weights (three for mean + std), float64 sums, no trit ever stored unpacked. A scope, which has
one limit and one scale, is a group of one row, or of all rows.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import load, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import REASSOC, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim


@kernel(
    lambda t: (types.int64, read(t, 2), types.int64, read("float64", 2)) + 3 * (write("float64", 2),),
    fastmath=REASSOC,
)
def ternary_statistics(state, n_tasks, chunk, w, group, center, total, squares, largest):
    """Per row and group: sum |w|, sum (|w| - center)^2, max |w|. Center is (1 or rows, groups)."""
    rows = w.shape[0]
    per_row = 0 if center.shape[0] == 1 else 1
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            row = read_row(w, (r,))
            for g in range(total.shape[1]):
                c = center[r * per_row, g]
                sum1, sum2, top = 0.0, 0.0, 0.0
                for i in range(g * group, (g + 1) * group):
                    a = abs(np.float64(load(row, i)))
                    sum1 += a
                    sum2 += (a - c) * (a - c)
                    top = a if a > top else top
                total[r, g] = sum1
                squares[r, g] = sum2
                largest[r, g] = top
        task = claim(state)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        types.int64,
        read("float64", 2),
        write("uint32", 2),
        write("float64", 2),
        write("float64", 2),
    ),
    fastmath=REASSOC,
)
def ternary_encode(state, n_tasks, chunk, w, group, limit, words, count, total):
    """Codes 1 + sign(w) where |w| > limit, else 1, 16 to a word; number and sum of the |w| above the limit."""
    rows = w.shape[0]
    per_row = 0 if limit.shape[0] == 1 else 1
    codes = np.ones(16 * words.shape[1], np.uint32)
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            row = read_row(w, (r,))
            for g in range(count.shape[1]):
                d = limit[r * per_row, g]
                kept, kept_sum = 0, 0.0
                for i in range(g * group, (g + 1) * group):
                    v = np.float64(load(row, i))
                    beyond = abs(v) > d  # with a limit below zero, zeros too
                    codes[i] = np.uint32(1) + np.uint32(beyond & (v > 0.0)) - np.uint32(beyond & (v < 0.0))
                    kept += np.int64(beyond)
                    kept_sum += abs(v) if beyond else 0.0
                count[r, g] = kept
                total[r, g] = kept_sum
            target = write_row(words, (r,))
            for i in range(words.shape[1]):
                word = np.uint32(0)
                for plane in range(4):
                    for byte in range(4):
                        word |= codes[16 * i + 4 * plane + byte] << np.uint32(8 * byte + 2 * plane)
                target[i] = word
        task = claim(state)


LIMITS = ("mean", "absmean", "absmax", "twn", "meanstd", "manual")
EPS = 1e-5  # the smallest scale of absmean


@kernel(
    lambda _: (
        types.int64,
        types.float64,
        types.int64,
        *(read("float64", 2),) * 3,
        write("float64", 2),
        write("float32", 2),
        write("int64", 1),
    ),
    variants=(None,),
    fastmath=frozenset(),
)
def ternary_limits(state, n_tasks, method, threshold, size, total, squares, largest, limit, scale, faults):
    """Limit of LIMITS[method] and absmean's scale of each scope; number of those that are not finite."""
    rows, groups = total.shape
    for scope in range(limit.shape[0]):
        first, stop = (0, rows) if limit.shape[0] == 1 else (scope, scope + 1)
        for g in range(groups):
            sum1, sum2, top = 0.0, 0.0, 0.0
            for r in range(first, stop):
                sum1 += total[r, g]
                sum2 += squares[r, g]
                top = max(top, largest[r, g])
            mean = sum1 / size
            faults[0] += not np.isfinite(mean)
            d = mean
            if method == 1:
                scale[scope, g] = np.float32(max(mean, EPS))
                faults[0] += not np.isfinite(scale[scope, g])
                # |w / scale| rounds to 0 exactly up to scale / 2 (half to even), also in floating point
                d = np.float64(scale[scope, g]) / 2
            elif method == 2:
                d = threshold * top
            elif method == 3:
                d = threshold * mean
            elif method == 4:
                d = mean + threshold * np.sqrt(sum2 / size)
            elif method == 5:
                d = threshold
            limit[scope, g] = d


@kernel(
    lambda _: (read("float64", 2), read("float64", 2), write("float32", 2), write("int64", 1)),
    variants=(None,),
    fastmath=frozenset(),
)
def ternary_scales(state, n_tasks, count, kept, scale, faults):
    """Mean |w| of the kept weights of each scope, 1 if none; number of means that are not finite."""
    rows, groups = count.shape
    for scope in range(scale.shape[0]):
        first, stop = (0, rows) if scale.shape[0] == 1 else (scope, scope + 1)
        for g in range(groups):
            number, sum_ = 0.0, 0.0
            for r in range(first, stop):
                number += count[r, g]
                sum_ += kept[r, g]
            scale[scope, g] = np.float32(sum_ / number if number > 0 else 1.0)
            faults[0] += not np.isfinite(scale[scope, g])
