"""Linear layer for a few tokens: bound by memory, with each row of the weight read once.

The tiles of gemm.py would compute a vector of tokens even for one token. Here vector lanes are rows of w, one vector
of rows at a time and along all of K: the hardware prefetches eight rows that are read in order, but not 32 in pieces.
Squares of w are transposed in registers, straight into the sums of up to MR tokens.

Every sum adds up in the order of the tiles, so that the bits of a token do not depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.gemm import one_row_in_place, rows_in_place, square_elements
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, round_up, scratch, smaller
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import all_bits
from gpu_ops.kernels.common.cpu.jit import device_function, generic, kernel, read, types, write
from gpu_ops.kernels.common.cpu.packing import (
    SUM_STEPS,
    elements,
    in_registers,
    pack_a,
    packed,
    steps,
    take_rows,
)
from gpu_ops.kernels.common.cpu.parallel import claim, launcher, thread_count
from gpu_ops.kernels.gemm.cpu.gemm import finish_row
from gpu_ops.kernels.gemm.cpu.swiglu_mlp_tile import sum_of

Array = np.ndarray[Any, Any]


def is_few(tokens: int, dtype: str) -> bool:
    """Whether there are few tokens. Tile registers multiply a vector of tokens as fast as they read the weight."""
    return tokens <= MR and not in_registers(packed(dtype))


def scratch_bytes(cols: int, dtype: str) -> int:
    """Bytes of the tokens in the computing type, for every thread."""
    return thread_count() * MR * cols * (8 if dtype == "float64" else 4)


def forward(x: Array, weight: Array, addends: Sequence[Array | None], y: Array) -> None:
    """Compute y. ``addends``: an array like y, and one row."""
    absent, step = np.empty((0, 0), y.dtype), np.zeros((1, 1), packed(x.dtype.name))
    a, b, w, y_bits, *more = all_bits(
        *(absent if array is None else array for array in addends), weight, y, x
    )
    tasks = -(-len(weight) // (_vectors(len(x)) * VECTOR_BYTES // step.itemsize))
    launch = launcher(weight.nbytes / 8)
    launch(linear_few[x.dtype], tasks, _vectors(len(x)), *more, w, step, (a, b), y_bits)


def _vectors(tokens: int) -> int:
    return 4 if tokens == 1 else 2


def _signature(t: str) -> tuple[types.Type, ...]:
    return (
        types.int64,
        read(t, 2),
        read(t, 2),
        write(packed(t), 2),
        types.UniTuple(read(t, 2), 2),
        write(t, 2),
    )


@generic
def square(w, panel):
    """Elements of a row of w in a square that is transposed in registers; 0 if rows are copied."""
    count = square_elements(w.dtype, panel.dtype)
    return lambda w, panel: count


@device_function
def turn(panel, staged, w, r0, m, kk, k):
    """Transpose m rows of w from r0, k steps from kk, into columns of panel[k, lanes]."""
    width = lanes(panel)
    take_rows(staged, w, r0, m, kk, k)
    for i in range(k):
        for j in range(m):
            panel[i * width + j] = staged[j, i]


@kernel(_signature)
def linear_few(state, n_tasks, vectors, x, w, step, addends, y):
    tokens, n = y.shape
    width, k_all = lanes(step), steps(step, x.shape[1])
    nr = vectors * width
    rows = scratch(MR, round_up(k_all, MAX_LANES) + SKEW, step[0, 0])
    pack_a(rows, x, False, 0, tokens, 0, k_all)
    staged = scratch(width, SUM_STEPS + SKEW, step[0, 0])
    panel = scratch(1, SUM_STEPS * width, step[0, 0])[0]
    c = scratch(MR, width, sum_of(step))
    ldx, ldw, in_square = rows.shape[1], w.strides[0] // w.itemsize, square(w, panel)
    task = claim(state)
    while task < n_tasks:
        for r in range(task * nr, min(n, task * nr + nr), width):
            m = min(width, n - r)
            for kk in range(0, max(1, k_all), SUM_STEPS):
                k, first = min(SUM_STEPS, k_all - kk), elements(step, kk)
                squares = 0
                if (m == width) & (in_square > 0):
                    squares = smaller(elements(step, k), w.shape[1] - first) // max(1, in_square)
                done = steps(step, squares * in_square)
                if done < k:
                    turn(panel, staged, w, r, m, kk + done, k - done)
                at, rest = r * ldw + first, k - done
                if tokens == 1:
                    one_row_in_place(c, 0, width, rows, kk, ldx, w, at, ldw, squares, panel, 0, rest, kk > 0)
                else:
                    rows_in_place(c, 0, width, rows, kk, ldx, w, at, ldw, squares, panel, 0, rest, kk > 0)
            for t in range(tokens):
                finish_row(c[t], t, r, m, y, c, addends, False, True)
        task = claim(state)
