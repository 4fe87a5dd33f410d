"""Ternary matmul for many tokens: vector lanes along N, codes unpacked once per block of tokens.

A task is PANEL_ROWS rows of weights x up to ``block_m`` tokens. Along K it unpacks BLOCK_K codes of its
rows into a panel that stays in L1 and multiplies all its tokens by it, TILE_M at a time: two vector
sums per token, each step two loads from the panel and TILE_M broadcasts; where the CPU has tile registers, they
multiply (codegen/tiles.py). Scales are applied when a group of k ends.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import scratch, smaller
from gpu_ops.kernels.common.cpu.codegen.target import TILES
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, close_tiles, multiply_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import like, store, write_row
from gpu_ops.kernels.common.cpu.jit import compute, device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim
from gpu_ops.kernels.weights.cpu.ternary_ir import CHUNK, LANES, PANEL_ROWS, TILE_M, tile, unpack_panel

BLOCK_M = 128  # tokens per task: their sums (16 KB of int32) stay in L2
BLOCK_K = 2 * CHUNK  # codes unpacked at a time: 16 KB of int8 panel
BLOCK_K_FLOAT = CHUNK  # 32 KB of float32 panel
SUM_K = 64  # floats summed in sequence; then such sums in float32 per block, and blocks in float64
SPAN = 2**22  # codes whose int32 sums cannot overflow: 3 * 128 * SPAN < 2^31


@device_function
def unpack_rows(codes, row_bytes, n, r0, k, words, panel, at, step):
    """Unpack PANEL_ROWS rows of codes from r0, ``words`` words from code k on, to the panel from ``at`` on."""
    for h in range(2):
        first = smaller(r0 + h * LANES, n - 1)
        start = first * row_bytes + k // 4
        unpack_panel(codes, start, row_bytes, n - 1 - first, words, panel, at + h * step)


@device_function
def multiply_vectors(panel, p0, x, x0, x_stride, steps, acc, first, m):
    for t in range(first, m, TILE_M):
        tile(TILE_M, panel, p0, x, x0 + t * x_stride, x_stride, steps, acc, t * PANEL_ROWS)


@generic
def multiply(panel, p0, x, x0, x_stride, steps, acc, m):
    """acc[m, PANEL_ROWS] += x[m, steps] @ panel[steps, PANEL_ROWS]; a step is four int8."""

    def vectors(panel, p0, x, x0, x_stride, steps, acc, m):
        multiply_vectors(panel, p0, x, x0, x_stride, steps, acc, 0, m)

    def tiles(panel, p0, x, x0, x_stride, steps, acc, m):
        whole, depth, ld = m // TILE * TILE, steps // TILE * TILE, 4 * PANEL_ROWS
        if depth > 0:
            sizes = whole, PANEL_ROWS, depth
            multiply_tiles(acc, 0, PANEL_ROWS, x, x0, x_stride, panel, p0, ld, 0, sizes, True, ())
        if depth < steps:
            at_panel, at_x = p0 + depth * ld, x0 + 4 * depth
            multiply_vectors(panel, at_panel, x, at_x, x_stride, steps - depth, acc, 0, whole)
        multiply_vectors(panel, p0, x, x0, x_stride, steps, acc, whole, m)

    return tiles if TILES else vectors


@kernel(
    lambda t: (
        read("uint8", 1),
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        read("int8", 1),
        types.int64,
        read("float64", 2),
        read("float64", 1),
        read("float32", 2),
        write(t, 2),
    ),
    fastmath=frozenset(),  # the same roundings as the reference
)
def ternary_gemm_int8(
    state, n_tasks, codes, row_bytes, words, depth, group, x, x_stride, sums, token_scale, scale, y
):
    """Compute y of int8 tokens. ``depth`` is K, or the padded K when one group spans it; sums per (token, group)."""
    tokens, n = y.shape
    per_row = 0 if scale.shape[0] == 1 else 1
    panels = -(-n // PANEL_ROWS)
    panel = scratch(1, BLOCK_K * PANEL_ROWS, np.int8(0))[0]
    acc = scratch(1, BLOCK_M * PANEL_ROWS, np.int32(0))[0]
    open_tiles()
    spilled = np.zeros(BLOCK_M * PANEL_ROWS, np.int64)
    result = np.empty(BLOCK_M * PANEL_ROWS, np.float64)
    factor = np.empty(PANEL_ROWS, np.float64)
    task = claim(state)
    while task < n_tasks:
        r0 = task % panels * PANEL_ROWS
        m0 = task // panels * BLOCK_M
        rows = min(PANEL_ROWS, n - r0)
        m = min(BLOCK_M, tokens - m0)
        size = m * PANEL_ROWS
        acc[:] = 0
        result[:] = 0.0
        has_spilled = False
        since = 0  # codes summed into acc
        g = 0
        for k0 in range(0, depth, BLOCK_K):
            for c in range(0, BLOCK_K, CHUNK):
                here = min(LANES, words - (k0 + c) // 16)
                if here > 0:
                    unpack_rows(codes, row_bytes, n, r0, k0 + c, here, panel, c * PANEL_ROWS, 4 * LANES)
            stop = min(k0 + BLOCK_K, depth)
            a = k0
            while a < stop:
                b = min(stop, (g + 1) * group)
                at_panel, at_x = (a - k0) * PANEL_ROWS, m0 * x_stride + a
                multiply(panel, at_panel, x, at_x, x_stride, (b - a) // 4, acc, m)
                since += b - a
                a = b
                if since > SPAN - BLOCK_K:
                    for i in range(size):
                        spilled[i] += acc[i]
                    acc[:] = 0
                    since = 0
                    has_spilled = True
                if b == min((g + 1) * group, depth):
                    for j in range(PANEL_ROWS):
                        factor[j] = scale[min(r0 + j, n - 1) * per_row, g]
                    if has_spilled:
                        for i in range(m):
                            for j in range(PANEL_ROWS):
                                at = i * PANEL_ROWS + j
                                whole = np.float64(spilled[at] + acc[at]) - sums[m0 + i, g]
                                result[at] += whole * factor[j]
                        spilled[:] = 0
                        has_spilled = False
                    else:
                        for i in range(m):
                            token_sum = sums[m0 + i, g]
                            for j in range(PANEL_ROWS):
                                at = i * PANEL_ROWS + j
                                result[at] += (np.float64(acc[at]) - token_sum) * factor[j]
                    acc[:] = 0
                    since = 0
                    g += 1
        for i in range(m):
            out = write_row(y, (m0 + i,))[r0 : r0 + rows]  # not out[r0 + j]: LLVM would scatter
            for j in range(rows):
                store(out, j, result[i * PANEL_ROWS + j] * token_scale[m0 + i])
        task = claim(state)
    close_tiles()


@kernel(
    lambda t: (
        read("uint8", 1),
        types.int64,
        types.int64,
        types.int64,
        read(compute(t).name, 1),
        types.int64,
        read("float32", 2),
        write(t, 2),
    ),
)
def ternary_gemm_native(state, n_tasks, codes, row_bytes, words, group, x, x_stride, scale, y):
    """Compute y of floats. Scales per tensor or row multiply at the end, scales per group already in the panel."""
    tokens, n = y.shape
    per_row = 0 if scale.shape[0] == 1 else 1
    panels = -(-n // PANEL_ROWS)
    panel = scratch(1, BLOCK_K_FLOAT * PANEL_ROWS, x.dtype.type(0))[0]
    acc = scratch(1, BLOCK_M * PANEL_ROWS, x.dtype.type(0))[0]
    result = np.empty(BLOCK_M * PANEL_ROWS, np.float64)
    factor = np.empty(PANEL_ROWS, np.float64)
    grouped = scale.shape[1] > 1
    task = claim(state)
    while task < n_tasks:
        r0 = task % panels * PANEL_ROWS
        m0 = task // panels * BLOCK_M
        rows = min(PANEL_ROWS, n - r0)
        m = min(BLOCK_M, tokens - m0)
        result[:] = 0.0
        for k0 in range(0, 16 * words, BLOCK_K_FLOAT):
            here = min(LANES, words - k0 // 16)
            unpack_rows(codes, row_bytes, n, r0, k0, here, panel, 0, LANES)
            if grouped:
                for k in range(16 * here):
                    g = min((k0 + k) // group, scale.shape[1] - 1)
                    for j in range(rows):
                        panel[k * PANEL_ROWS + j] *= like(panel[0], scale[r0 + j, g])
            acc[:] = 0
            for t in range(0, m, TILE_M):
                for k in range(0, 16 * here, SUM_K):
                    at, x_at, a_at = k * PANEL_ROWS, (m0 + t) * x_stride + k0 + k, t * PANEL_ROWS
                    tile(TILE_M, panel, at, x, x_at, x_stride, SUM_K, acc, a_at)
            for i in range(m * PANEL_ROWS):
                result[i] += np.float64(acc[i])
        for j in range(PANEL_ROWS):
            factor[j] = 1.0 if grouped else scale[min(r0 + j, n - 1) * per_row, 0]
        for i in range(m):
            out = write_row(y, (m0 + i,))[r0 : r0 + rows]
            for j in range(rows):
                store(out, j, result[i * PANEL_ROWS + j] * factor[j])
        task = claim(state)
