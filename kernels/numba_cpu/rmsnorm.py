"""RMSNorm on the CPU, forward and backward: one task is a run of rows.

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n

Each row is read from memory once: later passes over it find it in the cache. Sums of squares are float64, of
short sums in the computing type where these are in its range, so that no finite input overflows. dweight is a
float64 partial per task, added up in order: the same result every time, whatever thread ran which task. It grows by
a few rows at a time, whose sum is in the computing type, before their dx, which may be dy's memory.

Forward (passes in ``codegen/norm.py``; results too large for a cache go past it)::

    x        | row r | row r + 1 ...         row r + 1 is fetched while y is stored
    residual | row r | row r + 1 ...
    sums     | row r of s |                  scratch, for the passes that follow
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu.codegen import norm
from gpu_ops.kernels.numba_cpu.codegen.decode_rows import chunk_elements
from gpu_ops.kernels.numba_cpu.codegen.memory import place_of, scratch
from gpu_ops.kernels.numba_cpu.codegen.numba_api import njit
from gpu_ops.kernels.numba_cpu.codegen.rows import UNROLLED
from gpu_ops.kernels.numba_cpu.codegen.stream import fence, stays_in_cache
from gpu_ops.kernels.numba_cpu.codegen.sums import TOGETHER
from gpu_ops.kernels.numba_cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.numba_cpu.dtype import all_bits, bits, like, read_row, write_row
from gpu_ops.kernels.numba_cpu.jit import compute, device_function, inner, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

SHORT_SUM = 16 * UNROLLED * MAX_LANES  # numbers that add up in the computing type: 16 in a lane
CACHED = 1 << 16  # elements in all
TINY = 2.0**-80  # a sum of float32 squares below this may have lost some to underflow


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    y: Array,
    s: Array | None,
    rstd: Array,
    *,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    """All (rows, cols) except ``weight`` (cols,) and ``rstd`` (rows,); ``s`` only with ``residual``."""
    rows, cols = x.shape
    chunk = items_per_task(rows, cols)
    launch(
        rmsnorm_forward[x.dtype],
        -(-rows // chunk),
        chunk,
        *all_bits(x, weight, x if residual is None else residual, y, y if s is None else s),
        rstd,
        eps,
        weight_offset,
        residual is not None,
        casting == "llama",
        not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes)),
    )


def backward(
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dresidual: Array | None,
    dx: Array,
    dweight: Array,
    *,
    weight_offset: float,
    casting: str,
) -> None:
    """Fills ``dx`` (rows, cols) and ``dweight`` (cols,), in rstd's dtype."""
    rows, cols = x.shape
    if casting == "llama" and weight_offset:  # rounds their sum to x's dtype
        weight, weight_offset = (weight.astype(rstd.dtype) + weight_offset).astype(x.dtype), 0.0
    chunk = items_per_task(rows, cols)
    n_tasks = -(-rows // chunk)
    partial = np.zeros((n_tasks, cols))  # float64: a float32 sum over rows would lose digits
    launch(
        rmsnorm_backward[x.dtype],
        n_tasks,
        chunk,
        bits(dy),
        bits(x),
        bits(weight),
        rstd,
        bits(dy if dresidual is None else dresidual),
        bits(dx),
        partial,
        weight_offset,
        dresidual is not None,
        casting == "llama",
        not stays_in_cache(dx.nbytes),
    )
    dweight[...] = partial.sum(axis=0)


def short_sums(short: Any, exact: Any, least: float = -1.0) -> Any:
    """A function (operands, scalars, wide): the float64 sum over rows, of short sums in the computing type.

    ``short`` and ``exact`` are passes of codegen/norm.py. Where the size of a sum is not between ``least`` and infinity,
    ``exact`` takes the same numbers, with the scalars ``wide``, in float64. ``uncounted``, not ``inner``: reordered,
    a sum of differences from a number would be the difference of two large sums.
    """

    @device_function
    def add_up(operands, scalars, wide):
        total, length = 0.0, len(operands[0])
        for start in range(0, length, SHORT_SUM):
            count = min(SHORT_SUM, length - start)
            value = short(operands, scalars, start, count)
            if not (least < abs(value) < np.inf):
                value = exact(operands, wide, start, count)
            total += value
        return total

    return add_up


_squares = short_sums(norm.squares, norm.exact_squares, TINY)


@device_function
def sum_of_squares(x):
    return _squares((x,), (), (0.0,))


@inner
def together(rows, cols):
    """Rows whose operands stay in the cache from one pass to the next."""
    return max(1, min(TOGETHER, CACHED // max(1, cols), rows))


@device_function
def shared_chunks(lines, of, result, r, first, stop):
    """For a pass over row r of the rows from ``first`` to ``stop`` of a result."""
    joined = result.strides[0] == result.shape[1] * result.itemsize
    return write_row(lines, (of,)), joined and r > first, joined and r + 1 < stop


@njit
def add_residual(sums, s, row, residual, r, after, out, shared, streaming):
    """``sums[0] = row + residual[r]``, which also goes to ``s[r]``, unless y stands in where s is not."""
    total, copy = write_row(sums, (0,)), write_row(s, (r,))
    operands, coming = (row, read_row(residual, (r,))), (read_row(residual, (after,)),)
    if place_of(copy) == place_of(out):
        norm.add_up((total,), operands, (), coming, (), streaming)
    else:
        norm.add((copy, total), operands, (), coming, shared, streaming)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 1),
        read(t, 2),
        write(t, 2),
        write(t, 2),
        write(compute(t).name, 1),
        types.float64,
        compute(t),
        types.boolean,
        types.boolean,
        types.boolean,
    )
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama, streaming
):
    rows, cols = x.shape
    w = read_row(weight, ())
    sums, lines = (
        scratch(1, cols if has_residual else 0, weight[0]),
        scratch(2, 2 * chunk_elements(w), weight[0]),
    )
    task = claim(state)
    while task < n_tasks:
        first, stop = task * chunk, min(rows, (task + 1) * chunk)
        for r in range(first, stop):
            after = min(r + 1, rows - 1)
            row, out = read_row(x, (r,)), write_row(y, (r,))
            following = (read_row(x, (after,)),)
            if has_residual:
                shared = shared_chunks(lines, 1, s, r, first, stop)
                add_residual(sums, s, row, residual, r, after, out, shared, streaming)
                row = read_row(sums, (0,))
            scale = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(row) / cols + eps))
            rstd[r] = scale
            shared = shared_chunks(lines, 0, y, r, first, stop)
            if llama:
                norm.rms_scale_llama((out,), (row, w), (scale, weight_offset), following, shared, streaming)
            else:
                norm.rms_scale((out,), (row, w), (scale, weight_offset), following, shared, streaming)
        if streaming:
            fence()
        task = claim(state)


@kernel(
    lambda t: (
        types.int64,
        read(t, 2),
        read(t, 2),
        read(t, 1),
        read(compute(t).name, 1),
        read(t, 2),
        write(t, 2),
        write("float64", 2),
        compute(t),
        types.boolean,
        types.boolean,
        types.boolean,
    ),
)
def rmsnorm_backward(
    state, n_tasks, chunk, dy, x, weight, rstd, dresidual, dx, partial, weight_offset, has_dresidual, llama,
    streaming,
):  # fmt: skip
    rows, cols = x.shape
    w = read_row(weight, ())
    step = together(chunk, cols)
    sums, strides = np.empty(step), (dy.strides[0], x.strides[0])
    lines = scratch(1, 2 * chunk_elements(w), weight[0])
    task = claim(state)
    while task < n_tasks:
        dw, begin, stop = write_row(partial, (task,)), task * chunk, min(rows, (task + 1) * chunk)
        for first in range(begin, stop, step):
            n = min(step, stop - first)
            starts, scales = (read_row(dy, (first,)), read_row(x, (first,))), (rstd[first:],)
            if llama:
                norm.rms_sums_llama((sums,), (dw,), starts, strides, (w,), scales, (weight_offset,), n, cols)
            else:
                norm.rms_sums((sums,), (dw,), starts, strides, (w,), scales, (weight_offset,), n, cols)
            for i in range(n):
                r = first + i
                operands, result = (read_row(dy, (r,)), read_row(x, (r,)), w), (write_row(dx, (r,)),)
                if not abs(sums[i]) < np.inf:
                    sums[i] = norm.exact_rms_sum(operands, (rstd[r], weight_offset), 0, cols)
                scalars = rstd[r], weight_offset, like(rstd[r], sums[i] / cols)
                shared = shared_chunks(lines, 0, dx, r, begin, stop)
                if has_dresidual:
                    more = (operands[0], operands[1], w, read_row(dresidual, (r,)))
                    norm.rms_gradient(result, more, scalars, (), shared, streaming)
                else:
                    norm.rms_gradient(result, operands, scalars, (), shared, streaming)
        if streaming:
            fence()
        task = claim(state)
