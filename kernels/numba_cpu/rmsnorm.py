"""RMSNorm on the CPU, forward and backward (loops over rows in norm.py).

forward    s = x + residual,  rstd = 1 / sqrt(mean(s^2) + eps),  y = (s * rstd) * (offset + weight)
backward   n = x * rstd,  m = dy * (offset + weight),  dx = rstd * (m - n * mean(m * n)) + dresidual
           dweight = sum over rows of dy * n
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from .codegen import norm
from .codegen.arena import by_reference
from .codegen.stream import stays_in_cache
from .dtype import all_bits, bits, like, read_row, write_row
from .jit import compute, device_function, kernel, read, types, write
from .norm import backward_rows, backward_scratch, config, forward_rows, forward_scratch, sum_of_squares
from .parallel import items_per_task, launch

__all__ = ["backward", "config", "forward"]

Array = np.ndarray[Any, Any]


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
    arrays = all_bits(x, weight, x if residual is None else residual, y, y if s is None else s)
    streaming = not stays_in_cache(y.nbytes + (0 if s is None else s.nbytes))
    flags = residual is not None, casting == "llama", streaming
    launch(rmsnorm_forward[x.dtype], -(-rows // chunk), chunk, *arrays, rstd, eps, weight_offset, *flags)


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
    arrays = bits(dy), bits(x), bits(weight), rstd, bits(dy if dresidual is None else dresidual), bits(dx)
    flags = dresidual is not None, casting == "llama", not stays_in_cache(dx.nbytes)
    launch(rmsnorm_backward[x.dtype], n_tasks, chunk, *arrays, partial, weight_offset, *flags)
    dweight[...] = partial.sum(axis=0)


Forward = namedtuple("Forward", "w rstd eps weight_offset llama")
Backward = namedtuple("Backward", "rstd weight_offset llama")


@device_function
def _normalise(r, row, out, given, following, shared, streaming):
    w, weight_offset = given.w, given.weight_offset
    scale = like(weight_offset, 1.0 / np.sqrt(sum_of_squares(row) / len(row) + given.eps))
    given.rstd[r] = scale
    if given.llama:
        norm.rms_scale_llama((out,), (row, w), (scale, weight_offset), following, shared, streaming)
    else:
        norm.rms_scale((out,), (row, w), (scale, weight_offset), following, shared, streaming)


_forward = forward_rows(_normalise)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 1), read(t, 2), write(t, 2), write(t, 2)),
        *(write(compute(t).name, 1), types.float64, compute(t)),
        *(types.boolean,) * 3,
    )
)
def rmsnorm_forward(
    state, n_tasks, chunk, x, weight, residual, y, s, rstd, eps, weight_offset, has_residual, llama, streaming
):
    w = read_row(weight, ())
    given = by_reference(Forward(w, rstd, eps, weight_offset, llama))
    sums, lines = forward_scratch(x, w, has_residual)
    _forward(state, n_tasks, chunk, x, residual, y, s, sums, lines, given, streaming)


@device_function
def _add_sums(sums, partial, task, starts, strides, w, given, first, n):
    weight_offset, scales = given.weight_offset, (given.rstd[first:],)
    totals, cols = (write_row(partial, (task,)),), partial.shape[1]
    if given.llama:
        norm.rms_sums_llama(sums[:1], totals, starts, strides, (w,), scales, (weight_offset,), n, cols)
    else:
        norm.rms_sums(sums[:1], totals, starts, strides, (w,), scales, (weight_offset,), n, cols)


@device_function
def _scalars(operands, sums, i, r, given):
    rstd, weight_offset, total, cols = given.rstd, given.weight_offset, sums[0][i], len(operands[0])
    if not abs(total) < np.inf:
        total = norm.exact_rms_sum(operands, (rstd[r], weight_offset), 0, cols)
    return rstd[r], weight_offset, like(rstd[r], total / cols)


_backward = backward_rows(_add_sums, _scalars, norm.rms_gradient)


@kernel(
    lambda t: (
        *(types.int64, read(t, 2), read(t, 2), read(t, 1), read(compute(t).name, 1), read(t, 2), write(t, 2)),
        *(write("float64", 2), compute(t)),
        *(types.boolean,) * 3,
    )
)
def rmsnorm_backward(
    state,
    n_tasks,
    chunk,
    dy,
    x,
    weight,
    rstd,
    dresidual,
    dx,
    partial,
    weight_offset,
    has_dresidual,
    llama,
    streaming,
):
    given = by_reference(Backward(rstd, weight_offset, llama))
    flags, w = (has_dresidual, streaming), read_row(weight, ())
    work = backward_scratch(chunk, w)
    _backward(state, n_tasks, chunk, dy, x, w, dresidual, dx, partial, work, given, flags)
