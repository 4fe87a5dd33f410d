"""Ternary matmul for few tokens: vector lanes along K, each packed byte read once per four tokens.

y[t, n] = token_scale[t] * scale[n] * (sum over k of code * q - sum over k of q)      int8 activations
y[t, n] = scale[n] * sum over k of trit * x                                           native activations

Bytes: N * K / 4 for the codes and little else, so memory is the limit when the weights are not in the
cache. One task is some rows for all tokens; a micro-kernel takes 4 rows x 1 or 4 tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import store, write_row
from gpu_ops.kernels.common.cpu.jit import device_function, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import TASKS_PER_THREAD, claim, thread_count
from gpu_ops.kernels.weights.cpu.ternary_ir import dot_float32, dot_int8

# Rows of a task for several tokens: 64 rows of 4096 codes are 64 KB, which stay in L2 for all tokens.
ROWS = 64
# For one token: at the end of a task, the prefetched rows belong to another (530 us against 505).
ROWS_OF_ONE = 256
SPAN = 2**18  # words whose int32 sums cannot overflow: 16 * SPAN codes of 3 times an activation of 128 < 2^31
SPAN_FLOAT = 256  # words summed in float32 before the lanes are: long sums lose digits


def rows_per_task(n: int, tokens: int) -> int:
    """Rows per task: a multiple of four, few enough for every thread to have some tasks."""
    even = -(-n // (TASKS_PER_THREAD * thread_count()))
    return ROWS if tokens > 1 else max(ROWS, min(ROWS_OF_ONE, even - even % 4))


def _sums(dot: Any, span: int) -> Any:
    """Device function for total[token, row] = codes of ``rows`` rows from ``r0`` times ``step`` (1 or 4) tokens of x
    from ``x_at``; ``dot`` adds up ``span`` words at most, in the type of ``part``."""

    @device_function
    def add_up(total, part, codes, row_bytes, words, x, x_at, x_stride, r0, rows, n, step):
        total[:] = 0
        for r in range(0, rows, 4):
            last = n - 1 - r0 - r
            for w in range(0, words, span):
                count = min(span, words - w)
                at, token = (r0 + r) * row_bytes + 4 * w, x_at + 16 * w
                if step == 1:
                    dot(4, 1, codes, at, row_bytes, last, x, token, x_stride, count, part)
                else:
                    dot(4, 4, codes, at, row_bytes, last, x, token, x_stride, count, part)
                for i in range(step):
                    for j in range(4):
                        total[i, r + j] += part[4 * i + j]

    return add_up


_sums_int8, _sums_float32 = _sums(dot_int8, SPAN), _sums(dot_float32, SPAN_FLOAT)


@kernel(
    lambda t: (
        *(types.int64, read("uint8", 1), types.int64, types.int64, read("int8", 1), types.int64),
        *(read("float64", 2), read("float64", 1), read("float32", 2), write(t, 2)),
    ),
    fastmath=frozenset(),  # the same roundings as the reference
)
def ternary_gemv_int8(
    state, n_tasks, chunk, codes, row_bytes, words, x, x_stride, sums, token_scale, scale, y
):
    tokens, n = y.shape
    per_row = 0 if scale.shape[0] == 1 else 1
    step = 1 if tokens == 1 else 4
    part, total = np.empty(16, np.int32), np.empty((4, chunk), np.int64)
    task = claim(state)
    while task < n_tasks:
        r0 = task * chunk
        rows = min(chunk, n - r0)
        for t in range(0, tokens, step):
            _sums_int8(total, part, codes, row_bytes, words, x, t * x_stride, x_stride, r0, rows, n, step)
            for i in range(min(step, tokens - t)):
                out = write_row(y, (t + i,))[r0 : r0 + rows]  # not out[r0 + j]: LLVM would scatter
                token_sum, factor = sums[t + i, 0], token_scale[t + i]
                for j in range(rows):
                    value = (np.float64(total[i, j]) - token_sum) * np.float64(scale[(r0 + j) * per_row, 0])
                    store(out, j, value * factor)
        task = claim(state)


@kernel(
    lambda t: (
        *(types.int64, read("uint8", 1), types.int64, types.int64, read("float32", 1), types.int64),
        *(read("float32", 2), write(t, 2)),
    ),
    variants=("float16", "bfloat16", "float32"),
)
def ternary_gemv_native(state, n_tasks, chunk, codes, row_bytes, words, x, x_stride, scale, y):
    tokens, n = y.shape
    per_row = 0 if scale.shape[0] == 1 else 1
    step = 1 if tokens == 1 else 4
    part, total = np.empty(16, np.float32), np.empty((4, chunk), np.float32)
    task = claim(state)
    while task < n_tasks:
        r0 = task * chunk
        rows = min(chunk, n - r0)
        for t in range(0, tokens, step):
            _sums_float32(total, part, codes, row_bytes, words, x, t * x_stride, x_stride, r0, rows, n, step)
            for i in range(min(step, tokens - t)):
                out = write_row(y, (t + i,))[r0 : r0 + rows]
                for j in range(rows):
                    store(out, j, total[i, j] * scale[(r0 + j) * per_row, 0])
        task = claim(state)
