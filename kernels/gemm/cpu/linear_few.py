"""Linear layer for a few tokens: bound by memory, with each row of the weight read once.

The tiles of gemm.py would compute a vector of tokens even for one token. Here vector lanes are rows of w:

    w    nr rows, SUM_STEPS steps of K at a time    transposed into a panel in the first cache; the next are fetched
    y    one token by ONE_ROW vectors of rows, or up to MR tokens by two vectors

Every sum adds up in the order of the tiles, so that the bits of a token do not depend on others. One thread of a Xeon
without tile registers, 1024 x 768: bfloat16 112 us instead of 412 (8 tokens: 236), float32 241 instead of 300.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.arena import as_type
from gpu_ops.kernels.common.cpu.codegen.gemm import ONE_ROW, copy_transposed, one_row, rows_2
from gpu_ops.kernels.common.cpu.codegen.memory import (
    SKEW,
    lanes,
    prefetch_row,
    round_up,
    scratch,
    smaller,
    span,
)
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.dtype import all_bits, read_row
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
    return ONE_ROW if tokens == 1 else 2


def _signature(t: str) -> tuple[types.Type, ...]:
    return (
        types.int64,
        read(t, 2),
        read(t, 2),
        write(packed(t), 2),
        types.UniTuple(read(t, 2), 2),
        write(t, 2),
    )


@device_function
def fetch(w, like, r0, n, kk):
    """Prefetch SUM_STEPS steps from kk of n rows from r0, up to the end of the array."""
    first, count = elements(like, kk), elements(like, SUM_STEPS)
    for r in range(r0, smaller(r0 + n, len(w))):
        row = read_row(w, (r,))
        prefetch_row(span(row, first, count), smaller(count, len(row) - first))


@generic
def turn(panel, at, nr, lying, w, r0, m, kk, k):
    """Transpose m rows of w from r0, k steps from kk, into columns of panel[k, nr] from ``at`` on."""

    def copies(panel, at, nr, lying, w, r0, m, kk, k):
        ld = lying.shape[1]
        take_rows(lying, w, r0, m, kk, k)
        for i in range(0, k, lanes(panel)):
            copy_transposed(panel, i * nr + at, nr, lying, i, ld)

    copy = device_function(copies)

    def in_place(panel, at, nr, lying, w, r0, m, kk, k):
        words, width = as_type(w, panel[0]), lanes(panel)
        ld, misaligned = w.strides[0] // words.itemsize, w.strides[0] % words.itemsize
        if (m < width) | (round_up(kk + k, width) > words.shape[1]) | (misaligned != 0):
            copy(panel, at, nr, lying, w, r0, m, kk, k)
        else:
            for i in range(0, k, width):
                copy_transposed(panel, i * nr + at, nr, words, r0 * ld + kk + i, ld)

    words_as_they_lie = w.dtype == panel.dtype or (w.dtype == types.uint16 and panel.dtype == types.uint32)
    return in_place if words_as_they_lie else copies


@kernel(_signature)
def linear_few(state, n_tasks, vectors, x, w, kind, addends, y):
    tokens, n = y.shape
    width, k_all = lanes(kind), steps(kind, x.shape[1])
    nr = vectors * width
    rows = scratch(MR, round_up(k_all, MAX_LANES) + SKEW, kind[0, 0])
    pack_a(rows, x, False, 0, tokens, 0, k_all)
    transposed = scratch(width, SUM_STEPS + SKEW, kind[0, 0])
    ld = nr + SKEW
    panel = scratch(1, SUM_STEPS * ld, kind[0, 0])[0]
    c = scratch(MR, nr, sum_of(kind))
    task = claim(state)
    while task < n_tasks:
        r0 = task * nr
        for kk in range(0, max(1, k_all), SUM_STEPS):
            k, following = min(SUM_STEPS, k_all - kk), kk + SUM_STEPS
            for j in range(r0, min(n, r0 + nr), width):
                if following < k_all:
                    fetch(w, panel, j, width, following)
                else:
                    fetch(w, panel, j + nr, width, 0)
                turn(panel, j - r0, ld, transposed, w, j, min(width, n - j), kk, k)
            if vectors == ONE_ROW:
                one_row(c, 0, nr, rows, kk, rows.shape[1], panel, 0, ld, k, kk > 0, ())
            else:
                rows_2(c, 0, nr, rows, kk, rows.shape[1], panel, 0, ld, k, kk > 0, ())
        for t in range(tokens):
            finish_row(c[t], t, r0, min(nr, n - r0), y, c, addends, False, True)
        task = claim(state)
