"""Ternary x ternary on the CPU: 64 weights per word, with bit planes computed from w2 on demand.

nonzero, plus    a bit per weight; codes 2, 1, 0 are +1, 0, -1 (the order of bits is that of two w2 words, in both)
dot              pc(na & nw) - 2 pc(na & nw & (pa ^ pw)): both nonzero count one, those of unlike sign minus one

all chunks         vector lanes along K: planes of a by row, those of ROWS rows of w once per task
occupied chunks    vector lanes along M, since few words in a row of w are left: planes of a by word; the words of
                   w enter as scalars
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.numba_api import intrinsic, njit, signature
from gpu_ops.kernels.common.cpu.dtype import aligned_empty, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch, launcher

Array = np.ndarray[Any, Any]

ROWS = 8  # rows of w that share a row of a; their planes stay in L1
BLOCK_M = 256
WORD_NANOSECONDS, SUM_NANOSECONDS = 0.1, 2  # per word of a row of a and a row of w; per pair of rows

ONE, EVEN, ODD = np.uint64(1), np.uint64(0x5555555555555555), np.uint64(0xAAAAAAAAAAAAAAAA)


def matmul(
    a: Array, a_scale: Array, w: Array, w_scale: Array, k: int, occupied: tuple[Array, Array] | None, y: Array
) -> None:
    """``y = (a_scale * a) @ (w_scale * w).T``: w2 codes; ``occupied``: the chunks of w to visit, None for all."""
    m, n = y.shape
    if k == 0:
        y.fill(0)
    if 0 in (m, n, k):
        return
    words, chunk = -(-k // 64), items_per_task(m, k // 8)
    planes = aligned_empty((2, m, words) if occupied is None else (2, words, m), np.uint64)
    by_row = planes if occupied is None else planes.swapaxes(1, 2)
    launch(ternary_planes_unpack[None], -(-m // chunk), chunk, _as_words(a), by_row)
    n_tasks = -(-n // ROWS) * -(-m // BLOCK_M)
    args = (planes, a_scale, _as_words(w), w_scale, y)
    start = launcher(m * n * (SUM_NANOSECONDS + words * WORD_NANOSECONDS))
    if occupied is None:
        start(ternary_planes_matmul[None], n_tasks, *args)
    else:
        start(ternary_planes_skip[None], n_tasks, *occupied, *args)


def config(skipping: bool) -> str:
    """Description of the kernel that :func:`matmul` runs."""
    which = "occupied chunks of w, lanes along M" if skipping else "all chunks of w, lanes along K"
    return f"bit planes and popcounts: {which}, {ROWS} rows of w x {BLOCK_M} of x per task"


def _as_words(codes: Array) -> Array:
    """View of codes as two words per 64 codes; a copy if they are part of a file and not aligned."""
    words = codes.view(np.uint64)
    return words if words.flags.aligned else codes.copy().view(np.uint64)


@intrinsic
def popcount(typingctx, word):
    """Number of bits that are set; LLVM vectorises it."""

    def codegen(context, builder, sig, args):
        return builder.ctpop(args[0])

    return signature(types.int64, types.uint64), codegen


@njit(inline="always")
def _split(low, high):
    """Planes nonzero and plus of 64 codes in two words."""
    return ~(((low & EVEN) << ONE) | (high & EVEN)), (low & ODD) | ((high & ODD) >> ONE)


@kernel(lambda _: (types.int64, read("uint64", 2), write("uint64", 3)), variants=(None,))
def ternary_planes_unpack(state, n_tasks, chunk, codes, planes):
    task = claim(state)
    while task < n_tasks:
        for row in range(task * chunk, min((task + 1) * chunk, codes.shape[0])):
            for i in range(planes.shape[2]):
                planes[0, row, i], planes[1, row, i] = _split(codes[row, 2 * i], codes[row, 2 * i + 1])
        task = claim(state)


def _arguments(*more: types.Type) -> tuple[types.Type, ...]:
    """Types of the planes of a, its scale, w2 words of w, its scale, y."""
    scale = read("float32", 2)
    return (*more, read("uint64", 3), scale, read("uint64", 2), scale, write("float32", 2))


# fastmath: the same roundings as the reference
@kernel(lambda _: _arguments(), variants=(None,), fastmath=frozenset())
def ternary_planes_matmul(state, n_tasks, a, a_scale, w, w_scale, y):
    m, n = y.shape
    a_per_row, w_per_row = min(a_scale.shape[0] - 1, 1), min(w_scale.shape[0] - 1, 1)
    words = a.shape[2]
    planes = np.empty((2, ROWS, words), np.uint64)
    blocks = -(-n // ROWS)
    task = claim(state)
    while task < n_tasks:
        row0, m0 = task % blocks * ROWS, task // blocks * BLOCK_M
        rows = min(ROWS, n - row0)
        for r in range(rows):
            codes = read_row(w, (row0 + r,))
            for i in range(words):
                planes[0, r, i], planes[1, r, i] = _split(codes[2 * i], codes[2 * i + 1])
        for i in range(m0, min(m0 + BLOCK_M, m)):
            a_nonzero, a_plus = read_row(a, (0, i)), read_row(a, (1, i))
            out, a_factor = write_row(y, (i,)), np.float64(a_scale[i * a_per_row, 0])
            for r in range(rows):
                nonzero, plus = read_row(planes, (0, r)), read_row(planes, (1, r))
                like, unlike = np.int64(0), np.int64(0)
                for j in range(words):
                    both = a_nonzero[j] & nonzero[j]
                    like += popcount(both)
                    unlike += popcount(both & (a_plus[j] ^ plus[j]))
                factor = a_factor * np.float64(w_scale[(row0 + r) * w_per_row, 0])
                out[row0 + r] = np.float32(np.float64(like - 2 * unlike) * factor)
        task = claim(state)


@kernel(lambda _: _arguments(read("int64", 1), read("int32", 1)), variants=(None,), fastmath=frozenset())
def ternary_planes_skip(state, n_tasks, starts, chunks, a, a_scale, w, w_scale, y):
    m, n = y.shape
    a_per_row, w_per_row = min(a_scale.shape[0] - 1, 1), min(w_scale.shape[0] - 1, 1)
    words = a.shape[1]
    # stored by rows of y at the end: columns would share cache sets
    dots = np.empty((ROWS, BLOCK_M), np.int64)
    blocks = -(-n // ROWS)
    task = claim(state)
    while task < n_tasks:
        row0, m0 = task % blocks * ROWS, task // blocks * BLOCK_M
        rows, size = min(ROWS, n - row0), min(BLOCK_M, m - m0)
        dots[:] = 0
        for r in range(rows):
            codes, sums = read_row(w, (row0 + r,)), write_row(dots, (r,))[:size]
            for at in range(starts[row0 + r], starts[row0 + r + 1]):
                first = 2 * np.int64(chunks[at])
                for j in range(first, min(first + 2, words)):
                    nonzero, plus = _split(codes[2 * j], codes[2 * j + 1])
                    a_nonzero = read_row(a, (0, j))[m0 : m0 + size]
                    a_plus = read_row(a, (1, j))[m0 : m0 + size]
                    for i in range(size):
                        both = a_nonzero[i] & nonzero
                        sums[i] += popcount(both) - 2 * popcount(both & (a_plus[i] ^ plus))
        for i in range(size):
            out, a_factor = write_row(y, (m0 + i,)), np.float64(a_scale[(m0 + i) * a_per_row, 0])
            for r in range(rows):
                factor = a_factor * np.float64(w_scale[(row0 + r) * w_per_row, 0])
                out[row0 + r] = np.float32(np.float64(dots[r, i]) * factor)
        task = claim(state)
