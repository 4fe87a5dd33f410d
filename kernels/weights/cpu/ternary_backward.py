"""Gradients of the ternary matmul on the CPU: ``dx = dy @ W`` and ``dw = dy.T @ xq``.

Sums are float32 (float64 for float64). dw is an ordinary product. A task of dx is some tokens x columns, and some
rows of W at a time exist in its caches, as words (packing.py); a row of words is one step of the product:

                          columns of dx
                       +----------------+
        rows of W      |  W, unpacked   |      codes of later rows are prefetched meanwhile
                       +----------------+
        +--------+     +----------------+
 tokens |   dy   |     |       C        |      C += dy[tokens, rows] W[rows, columns]
        +--------+     +----------------+

bfloat16 is multiplied in pairs where the CPU supports it: xq is then rounded to it, as is W times scales by row. A
scale of the tensor, or of columns, multiplies C.

Products so small that packing operands and waking threads would take longer than the sums are computed row by row:

    for each row of W     dx += dy[:, n] * W[n]       dw[n] = sum over tokens of dy[:, n] * xq
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, prefetch_row, round_up, scratch, smaller
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import (
    aligned_empty,
    bfloat16_of_float32,
    bits,
    like,
    load,
    read_row,
    store,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import (
    compute,
    device_function,
    generic,
    inner,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.packing import elements, pack_a, packed, put_rows, steps
from gpu_ops.kernels.common.cpu.parallel import (
    TASKS_PER_THREAD,
    claim,
    items_per_task,
    launch,
    launch_inline,
    thread_count,
)
from gpu_ops.kernels.gemm.cpu.gemm import Region, matmul, products, tile_size
from gpu_ops.kernels.weights.cpu.ternary_ir import WORD, unpack_pairs, unpack_row
from gpu_ops.kernels.weights.cpu.ternary_tokens import absmax_of

Array = np.ndarray[Any, Any]

SMALL = 1 << 17  # products up to which rows are faster
TOKENS, COLUMNS = 256, 512  # limits of a task of dx: C 512 KiB of float32
STEPS = 128  # rows of W at a time: 256 KiB
SOME = 8  # rows that are unpacked before they are put into panels
AHEAD = 16  # rows
ALL = 1 << 60  # columns of a group: all share a scale


def config(tokens: int, n: int, k: int, dtype: str) -> str:
    sum_dtype = compute(dtype).name
    if tokens * n * k <= SMALL:
        return f"{sum_dtype} sums; W dense one row at a time"
    rows, columns = tile_shape(tokens, k)
    return f"{sum_dtype} sums; tiles of {rows} tokens x {columns} columns, W dense {STEPS} steps at a time"


def tile_shape(tokens: int, k: int) -> tuple[int, int]:
    """Tile of dx, small enough that every thread gets some."""
    rows, columns = min(tokens, TOKENS), COLUMNS
    while columns > 64 and -(-tokens // rows) * -(-k // columns) < TASKS_PER_THREAD * thread_count():
        columns //= 2
    return rows, columns


def backward(
    dy: Array, x: Array, codes: Array, scale: Array, dx: Array | None, dw: Array | None, *, activations: str
) -> None:
    """Compute dx and dw. dy (tokens, N), x, dx (tokens, K), dw (N, K); w2 codes (N, bytes), scale (1 or N, groups).
    A result that is None is not computed."""
    (tokens, n), k = dy.shape, x.shape[1]
    rounding = activations == "int8"
    if tokens * n * k <= SMALL:  # both in one call, requested or not
        dx = np.empty(x.shape, x.dtype) if dx is None else dx
        sum_dtype = np.float64 if x.dtype == np.float64 else np.float32
        dw = np.empty((n, k), sum_dtype) if dw is None else dw
        arrays = bits(dy), bits(x), codes, scale, bits(dx), dw
        launch_inline(ternary_small_backward[x.dtype], 1, rounding, *arrays)
        return
    if dw is not None:
        used = x
        if rounding:
            used, chunk = aligned_empty(x.shape, _used(x.dtype.name)), items_per_task(tokens, k)
            launch(ternary_used_tokens[x.dtype], -(-tokens // chunk), chunk, bits(x), bits(used))
        matmul(dy, used, dw, trans_a=True)
    if dx is not None:
        rows, columns = tile_shape(tokens, k)
        n_tasks = -(-tokens // rows) * -(-k // columns)
        words = np.empty((0, 0), packed(x.dtype.name, x.dtype.name))
        launch(ternary_dx[x.dtype], n_tasks, (rows, columns), bits(dy), codes, scale, bits(dx), words)


def _used(dtype: str) -> str:
    """Type in which xq is multiplied."""
    return dtype if packed(dtype, dtype) == "uint32" else compute(dtype).name


@inner
def add(to, factor, row):
    """to += factor * row"""
    for i in range(len(row)):
        to[i] += factor * load(row, i)


@inner
def finish(to, row):
    for i in range(len(to)):
        store(to, i, row[i])


@inner
def scale_groups(to, scale, group, first):
    """Multiply columns from ``first`` on by the scales of their groups."""
    for g in range(first // group, (first + len(to) - 1) // group + 1):
        for i in range(max(g * group, first), min((g + 1) * group, first + len(to))):
            to[i - first] *= scale[g]


@device_function
def round_tokens(to, row, zero):
    """Write one token as the forward pass multiplies it: rounded to int8, times its scale."""
    absmax = absmax_of(row, zero)
    finite = absmax < np.inf
    s, unit = 127.0 / absmax if finite else 0.0, absmax / 127.0 if finite else np.nan
    for i in range(len(row)):
        q = np.rint(np.float64(load(row, i)) * s) if finite else 0.0
        store(to, i, q * unit)


@device_function
def unpack_rows(panels, some, codes, n0, count, k0, width, scale, per_row, group):
    span = round_up(width, WORD)
    first, last = k0 // 4, (k0 + span) // 4
    for r0 in range(0, count, len(some)):
        rows = smaller(len(some), count - r0)
        for r in range(rows):
            n = n0 + r0 + r
            unpack_row(some[r, :span], read_row(codes, (n,))[first:last])
            prefetch_row(read_row(codes, (smaller(n + AHEAD, len(codes) - 1),))[first:last], last - first)
            if per_row:
                scale_groups(some[r, :width], read_row(scale, (n,)), group, k0)
        put_rows(panels, 1, some, r0, rows, 0, span)


@generic
def unpack(panels, some, codes, n0, count, k0, width, scale, per_row, group):
    """Panels = ``count`` rows of W from n0, columns from k0; times their scales if scales are by row."""

    def pairs(panels, some, codes, n0, count, k0, width, scale, per_row, group):
        if (count % 2 > 0) | (per_row & (group % WORD > 0)):
            unpack_rows(panels, some, codes, n0, count, k0, width, scale, per_row, group)
            return
        span, unit = round_up(width, WORD), bfloat16_of_float32(np.float32(1))
        for r in range(0, count, 2):
            n, c = n0 + r, 0
            low, high, low_scale, high_scale = read_row(codes, (n,)), read_row(codes, (n + 1,)), unit, unit
            while c < span:
                start, stop = k0 + c, k0 + span
                if per_row:
                    g = start // group
                    low_scale, high_scale = (
                        bfloat16_of_float32(scale[n, g]),
                        bfloat16_of_float32(scale[n + 1, g]),
                    )
                    stop = smaller((g + 1) * group, stop)
                first, last = start // 4, stop // 4
                unpack_pairs(
                    panels, r // 2, c // WORD, low[first:last], high[first:last], low_scale, high_scale
                )
                c = stop - k0
            first, last = k0 // 4, (k0 + span) // 4
            for later in (n + AHEAD, n + AHEAD + 1):
                prefetch_row(read_row(codes, (smaller(later, len(codes) - 1),))[first:last], last - first)

    return pairs if panels.dtype == types.uint32 else unpack_rows.py_func


def _dx_signature(t: str) -> tuple[types.Type, ...]:
    tile, word = types.UniTuple(types.int64, 2), write(packed(t, t), 2)
    return tile, read(t, 2), read("uint8", 2), read("float32", 2), write(t, 2), word


@kernel(_dx_signature)
def ternary_dx(state, n_tasks, tile, dy, codes, scale, dx, words):
    """Compute dx. ``words``: an array of the type in which W is multiplied."""
    rows, columns = tile
    (tokens, k), n, unit = dx.shape, len(codes), like(load(read_row(dy, (0,)), 0), 1)
    per_row, group = len(scale) > 1, k // scale.shape[1] if scale.shape[1] > 1 else ALL
    across, depth = (k + columns - 1) // columns, elements(words, STEPS)
    word, nr = words.dtype.type(0), 2 * lanes(words)
    c = scratch(round_up(rows, TILE), columns + SKEW, unit)
    a = scratch(round_up(rows, TILE), STEPS + SKEW, word)
    panels = scratch(columns // nr, STEPS * nr, word)
    some = scratch(SOME, columns, unit)
    open_tiles()
    task = claim(state)
    while task < n_tasks:
        t0, m = tile_size(task // across, rows, tokens)
        k0, width = tile_size(task % across, columns, k)
        for n0 in range(0, n, depth):
            count = min(depth, n - n0)
            unpack(panels, some, codes, n0, count, k0, width, scale, per_row, group)
            s0, s = steps(words, n0), steps(words, count)
            pack_a(a, dy, False, t0, m, s0, s)
            products(c, a, 0, a.shape[1], False, panels, 0, m, width, s, n0 > 0, Region(dy, 0, 0, 0, 0))
        for t in range(m):
            sums = c[t, :width]
            if not per_row:
                scale_groups(sums, read_row(scale, (0,)), group, k0)
            finish(write_row(dx, (t0 + t,))[k0 : k0 + width], sums)
        task = claim(state)
    close_tiles()


@kernel(lambda t: (types.int64, read(t, 2), write(_used(t), 2)), fastmath=frozenset())
def ternary_used_tokens(state, n_tasks, chunk, x, used):
    zero = np.zeros(1, x.dtype)
    task = claim(state)
    while task < n_tasks:
        for t in range(task * chunk, min(len(x), (task + 1) * chunk)):
            round_tokens(write_row(used, (t,)), read_row(x, (t,)), zero)
        task = claim(state)


@kernel(
    lambda t: (
        *(types.boolean, read(t, 2), read(t, 2), read("uint8", 2), read("float32", 2)),
        *(write(t, 2), write(compute(t).name, 2)),
    )
)
def ternary_small_backward(state, n_tasks, rounding, dy, x, codes, scale, dx, dw):
    (tokens, n), k = dy.shape, x.shape[1]
    per_row, group = min(len(scale) - 1, 1), max(1, k // scale.shape[1])
    unit = like(dw[0, 0], 1)
    row = scratch(1, 4 * codes.shape[1], unit)[0]
    used, sums = scratch(tokens, k, unit), scratch(tokens, k, unit)
    used[:], sums[:] = 0, 0
    zero = np.zeros(1, x.dtype)
    for t in range(tokens):
        if rounding:
            round_tokens(used[t], read_row(x, (t,)), zero)
        else:
            add(used[t], unit, read_row(x, (t,)))
    for r in range(n):
        unpack_row(row, read_row(codes, (r,)))
        weights, target = row[:k], write_row(dw, (r,))
        scale_groups(weights, read_row(scale, (r * per_row,)), group, 0)
        target[:] = 0
        for t in range(tokens):
            factor = load(read_row(dy, (t,)), r)
            add(sums[t], factor, weights)
            add(target, factor, used[t])
    for t in range(tokens):
        finish(write_row(dx, (t,)), sums[t])
