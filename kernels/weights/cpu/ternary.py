"""Ternary matmul on the CPU: choice of kernel and blocks, and scratch.

few tokens    ternary_gemv: vector lanes along K, codes read in place
many tokens   ternary_gemm: codes unpacked into panels that all tokens of a block share
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.target import TILES
from gpu_ops.kernels.common.cpu.dtype import aligned_empty, bits
from gpu_ops.kernels.common.cpu.parallel import items_per_task, launch, launch_inline, launcher
from gpu_ops.kernels.weights.cpu import ternary_ir as simd
from gpu_ops.kernels.weights.cpu.ternary_gemm import BLOCK_M, ternary_gemm_int8, ternary_gemm_native
from gpu_ops.kernels.weights.cpu.ternary_gemv import rows_per_task, ternary_gemv_int8, ternary_gemv_native
from gpu_ops.kernels.weights.cpu.ternary_quantize import (
    LIMITS,
    ternary_encode,
    ternary_limits,
    ternary_scales,
    ternary_statistics,
)
from gpu_ops.kernels.weights.cpu.ternary_tokens import (
    ternary_quantize_tokens,
    ternary_take_tokens,
    ternary_widen_tokens,
)

Array = np.ndarray[Any, Any]

FEW_TOKENS = 16
# Scratch for the activations of one pass; more tokens take several passes.
SCRATCH_BYTES = 32 << 20


def config(tokens: int, n: int, groups: int, dtype: str, activations: str) -> str:
    """Description of the kernel and blocks that :func:`matmul` uses."""
    few = _few(tokens, groups, dtype, activations)
    instructions = "AMX" if TILES and activations == "int8" and not few else simd.describe()
    unit = f"{activations} activations, {instructions}"
    if few:
        return (
            f"{unit}: lanes along K, 4 rows x {1 if tokens == 1 else 4} tokens, "
            f"{rows_per_task(n, tokens)} rows per task"
        )
    return f"{unit}: lanes along N, {simd.PANEL_ROWS} rows x {simd.TILE_M} tokens, {BLOCK_M} tokens per task"


def matmul(
    x: Array,
    codes: Array,
    k: int,
    scale: Array,
    y: Array,
    *,
    activations: str,
    x_scale: Array | None = None,
) -> None:
    """``y = x @ (scale * trits).T``: x (tokens, K), w2 codes (N, bytes), scale (1 or N, groups), y (tokens, N).

    ``x_scale`` (tokens or 1): of an int8 x.
    """
    pass_tokens = max(SCRATCH_BYTES // (_padded(k) * (1 if activations == "int8" else 8)), BLOCK_M)
    if len(x) > pass_tokens:
        pass_tokens -= pass_tokens % BLOCK_M
    for first in range(0, len(x), pass_tokens):
        part = slice(first, first + pass_tokens)
        if activations == "native":
            _matmul_native(x[part], codes, k, scale, y[part])
        else:
            of_part = x_scale if x_scale is None or len(x_scale) == 1 else x_scale[part]
            _matmul_int8(x[part], of_part, codes, k, scale, y[part])


def _matmul_int8(x: Array, x_scale: Array | None, codes: Array, k: int, scale: Array, y: Array) -> None:
    tokens, n = y.shape
    dtype, groups = y.dtype, scale.shape[1]
    words = codes.shape[1] // 4
    few = _few(tokens, groups, dtype, "int8")
    group = k // groups if groups > 1 else 16 * words
    q = aligned_empty((_tile_up(tokens, few), _padded(k)), np.int8)
    sums, token_scale = np.empty((tokens, groups)), np.empty(tokens)
    chunk = items_per_task(len(q), q.shape[1])
    lanes = simd.LANES if few else 0
    made = q, group, lanes, sums, token_scale
    if x_scale is None:
        launch(ternary_quantize_tokens[dtype], -(-len(q) // chunk), chunk, bits(x), *made)
    else:
        launch(ternary_take_tokens[x_scale.dtype], -(-len(q) // chunk), chunk, x, x_scale, *made)
    flat, q_flat = codes.reshape(-1), q.reshape(-1)
    shared = (q_flat, q.shape[1], sums, token_scale, scale, bits(y))
    start = launcher(tokens * n * k / 50)
    if few:
        chunk = rows_per_task(n, tokens)
        start(ternary_gemv_int8[dtype], -(-n // chunk), chunk, flat, codes.shape[1], words, *shared)
    else:
        depth = k if groups > 1 else 16 * words
        n_tasks = -(-n // simd.PANEL_ROWS) * -(-tokens // BLOCK_M)
        start(ternary_gemm_int8[dtype], n_tasks, flat, codes.shape[1], words, depth, group, *shared)


def _matmul_native(x: Array, codes: Array, k: int, scale: Array, y: Array) -> None:
    tokens, n = y.shape
    dtype, groups = x.dtype, scale.shape[1]
    words = codes.shape[1] // 4
    few = _few(tokens, groups, dtype, "native")
    wide_tokens = aligned_empty(
        (_tile_up(tokens, few), _padded(k)), np.float64 if dtype == np.float64 else np.float32
    )
    chunk = items_per_task(len(wide_tokens), wide_tokens.shape[1])
    launch(
        ternary_widen_tokens[dtype],
        -(-len(wide_tokens) // chunk),
        chunk,
        bits(x),
        wide_tokens,
        simd.LANES if few else 0,
    )
    flat = codes.reshape(-1)
    shared = (wide_tokens.reshape(-1), wide_tokens.shape[1], scale, bits(y))
    start = launcher(tokens * n * k / 10)
    if few:
        chunk = rows_per_task(n, tokens)
        start(ternary_gemv_native[dtype], -(-n // chunk), chunk, flat, codes.shape[1], words, *shared)
    else:
        n_tasks = -(-n // simd.PANEL_ROWS) * -(-tokens // BLOCK_M)
        start(ternary_gemm_native[dtype], n_tasks, flat, codes.shape[1], words, k // max(groups, 1), *shared)


def _few(tokens: int, groups: int, dtype: Any, activations: str) -> bool:
    if groups > 1 or (activations == "native" and dtype == "float64"):
        return False
    return tokens <= FEW_TOKENS


def _tile_up(tokens: int, few: bool) -> int:
    step = simd.TILE_M if not few else 1 if tokens == 1 else 4
    return -(-tokens // step) * step


def _padded(k: int) -> int:
    """K rounded up to whole chunks of vectors of words, at least one."""
    return max(-(-k // simd.CHUNK), 1) * simd.CHUNK


def statistics(w: Array, group: int, center: Array) -> tuple[Array, Array, Array]:
    """Per row and group of ``group`` weights: sum |w|, sum (|w| - center)^2, max |w|; each (N, groups)."""
    n, k = w.shape
    total, squares, largest = np.empty((3, n, k // group))
    chunk = items_per_task(n, k)
    launch(
        ternary_statistics[w.dtype],
        -(-n // chunk),
        chunk,
        bits(w),
        group,
        center,
        total,
        squares,
        largest,
    )
    return total, squares, largest


def limits(
    method: str, threshold: float, size: int, found: tuple[Array, Array, Array], limit: Array, scale: Array
) -> bool:
    """Fill ``limit``, and ``scale`` for absmean, from :func:`statistics`, per scope of ``size`` weights: (1 or N,
    groups). Returns whether the weights, and the scale in float32, are finite."""
    faults = np.zeros(1, np.int64)
    arrays = *found, limit, scale, faults
    launch_inline(ternary_limits[None], 1, LIMITS.index(method), threshold, size, *arrays)
    return not faults[0]


def scales(count: Array, kept: Array, scale: Array) -> bool:
    """Fill ``scale`` (1 or N, groups) from the counts of :func:`encode`. Returns whether it is finite."""
    faults = np.zeros(1, np.int64)
    launch_inline(ternary_scales[None], 1, count, kept, scale, faults)
    return not faults[0]


def encode(w: Array, group: int, limit: Array) -> tuple[Array, Array, Array]:
    """w2 codes of sign(w) where |w| > limit (1 or N, groups); per row and group, the number and sum of such |w|."""
    n, k = w.shape
    words = aligned_empty((n, -(-k // 64) * 4), np.uint32)
    count, total = np.empty((2, n, k // group))
    chunk = items_per_task(n, k)
    launch(ternary_encode[w.dtype], -(-n // chunk), chunk, bits(w), group, limit, words, count, total)
    return words.view(np.uint8), count, total
