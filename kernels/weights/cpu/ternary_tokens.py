"""Activations for the ternary matmul: quantised to int8 per token, or widened, in the micro-kernels' order.

Rows go to a scratch buffer that is zero from K on, so that padding codes meet zeros. ``lanes`` is 0 for
the natural order (lanes along N), else the width of a vector (lanes along K): within each chunk of
16 * lanes values, int8 is ordered (plane, word, byte) and float (code, word).
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.numba_api import njit
from gpu_ops.kernels.common.cpu.dtype import load, magnitude, of_magnitude, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim

_EPS = 1e-5  # the smallest absmax for a scale


@njit(inline="always")
def absmax_of(row, zero):
    """Largest magnitude, at least _EPS; infinite or NaN if an element is. ``zero``: a zero of the row's dtype."""
    largest = magnitude(load(zero, 0))
    for i in range(len(row)):
        m = magnitude(load(row, i))
        largest = m if m > largest else largest
    return max(np.float64(of_magnitude(largest)), _EPS)


@device_function
def put(natural, k, group, lanes, target, sums):
    """Store the int8 codes ``natural`` of a token in the order of ``lanes``, and their sums per group."""
    for g in range(len(sums)):
        total = np.int64(0)
        for i in range(g * group, min(k, (g + 1) * group)):
            total += np.int64(natural[i])
        sums[g] = total
    if lanes == 0:
        for i in range(len(target)):
            target[i] = natural[i]
    else:
        source, words = natural.view(np.int32), target.view(np.int32)
        for c in range(len(target) // (16 * lanes)):
            for plane in range(4):
                for word in range(lanes):
                    words[(c * 4 + plane) * lanes + word] = source[(c * lanes + word) * 4 + plane]


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        write("int8", 2),
        types.int64,
        types.int64,
        write("float64", 2),
        write("float64", 1),
    ),
    fastmath=frozenset(),
)
def ternary_quantize_tokens(state, n_tasks, chunk, x, q, group, lanes, sums, scale):
    """q = rint(x * 127 / absmax); its sums per group of k; scale = absmax / 127, NaN for a non-finite token."""
    tokens, k = x.shape
    padded = q.shape[1]
    natural = np.zeros(padded, np.int8)
    zero = np.zeros(1, x.dtype)
    task = claim(state)
    while task < n_tasks:
        for t in range(task * chunk, min(q.shape[0], (task + 1) * chunk)):
            target = write_row(q, (t,))
            if t >= tokens:  # rows that fill up a tile
                for i in range(padded):
                    target[i] = 0
                continue
            row = read_row(x, (t,))
            absmax = absmax_of(row, zero)
            finite = absmax < np.inf
            scale[t] = absmax / 127.0 if finite else np.nan
            s = 127.0 / absmax if finite else 0.0
            if finite:
                for i in range(k):
                    natural[i] = np.int8(np.int32(np.rint(np.float64(load(row, i)) * s)))
            else:
                for i in range(k):
                    natural[i] = 0
            put(natural, k, group, lanes, target, write_row(sums, (t,)))
        task = claim(state)


@kernel(
    lambda t: (
        *(types.int64, read("int8", 2), read(t, 1), write("int8", 2), types.int64, types.int64),
        *(write("float64", 2), write("float64", 1)),
    ),
    variants=("float32", "float64"),
)
def ternary_take_tokens(state, n_tasks, chunk, x, x_scale, q, group, lanes, sums, scale):
    """:func:`ternary_quantize_tokens` of int8 codes with their scales, one per token or one for all."""
    tokens, k = x.shape
    natural = np.zeros(q.shape[1], np.int8)
    task = claim(state)
    while task < n_tasks:
        for t in range(task * chunk, min(q.shape[0], (task + 1) * chunk)):
            target = write_row(q, (t,))
            if t < tokens:
                row = read_row(x, (t,))
                for i in range(k):
                    natural[i] = row[i]
                scale[t] = x_scale[min(t, len(x_scale) - 1)]
                put(natural, k, group, lanes, target, write_row(sums, (t,)))
            else:  # rows that fill up a tile
                target[:] = 0
        task = claim(state)


@kernel(lambda t: (types.int64, read(t, 2), write(compute(t).name, 2), types.int64))
def ternary_widen_tokens(state, n_tasks, chunk, x, wide, lanes):
    """Widen x to the computing type."""
    tokens, k = x.shape
    padded = wide.shape[1]
    task = claim(state)
    while task < n_tasks:
        for t in range(task * chunk, min(wide.shape[0], (task + 1) * chunk)):
            target = write_row(wide, (t,))
            for i in range(padded):
                target[i] = 0
            if t < tokens:
                row = read_row(x, (t,))
                if lanes == 0:
                    for i in range(k):
                        target[i] = load(row, i)
                else:
                    for i in range(k):
                        inside = i % (16 * lanes)
                        target[i - inside + (inside % 16) * lanes + inside // 16] = load(row, i)
        task = claim(state)
