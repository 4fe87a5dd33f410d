"""Code shared by RMSNorm and LayerNorm on the CPU: sums over a row, the residual, and the use of caches.

A task is a run of rows. Each row is read from memory once: later passes over it find it in the cache. Sums over a row
are float64 sums of short sums in the computing type, where these are in its range, so that no finite input overflows.
Gradients of weights are float64 partials per task, added up in order: the same result every time, whatever thread ran
which task. They grow by a few rows at a time, whose sum is in the computing type, before their dx, which may be dy's
memory.

Forward (passes: the table below; results too large for a cache go past it)::

    x        | row r | row r + 1 ...         row r + 1 is prefetched while y is stored
    residual | row r | row r + 1 ...
    sums     | row r of s |                  scratch, for the passes that follow
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import place_of
from gpu_ops.kernels.common.cpu.codegen.rows import UNROLLED, Chunk, fold_rows, map_rows
from gpu_ops.kernels.common.cpu.codegen.sums import TOGETHER, sum_rows
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.common.cpu.dtype import read_row, write_row
from gpu_ops.kernels.common.cpu.jit import device_function, inner
from gpu_ops.kernels.common.cpu.parallel import items_per_task

# Passes of the norms over rows, as LLVM IR (codegen/rows.py, codegen/sums.py).
#
# =====================  ====================================  =================================================
# pass                   operands                              scalars
# =====================  ====================================  =================================================
# add                    x, residual                           none; two results, the first may be streamed
# add_up                 x, residual                           none; never streamed, whatever is fetched
# squares                x                                     none
# rms_scale              x, weight                             rstd, weight_offset
# rms_sums               rows of dy, x; weight                 rstd of each, weight_offset; sum of the products
#                                                              dy n weight for each row, of dy n for each column
# exact_rms_sum          dy, x, weight                         rstd, weight_offset; of the products, in float64
# rms_gradient           dy, x, weight[, dresidual]            rstd, weight_offset, mean of the products
# exact_deviations       x                                     a number near the mean, in float64
# moments                x                                     a number near the mean; of the deviations
#                                                              from it, and of their squares
# exact_moments          x                                     the same, in float64
# squared_deviations     x                                     mean
# exact_squares          x                                     mean, in float64
# layer_scale            x, weight[, bias]                     mean, rstd
# layer_sums             rows of dy, x; weight                 mean, rstd of each; sums of dy n weight and
#                                                              dy weight for each row, of dy n and dy for each
#                                                              column
# exact_layer_sums       dy, x, weight                         mean, rstd; the sums for a row, in float64
# layer_gradient         dy, x, weight[, dresidual]            mean, rstd, mean of the products, mean of
#                                                              dy weight
# =====================  ====================================  =================================================

Chunks = list[Chunk]


def _squared(x: Chunk) -> Chunk:
    return x * x


def _rms_scale(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (x, weight), (rstd, offset) = operands, scalars
    return (x * rstd * (offset + weight),)


def _rms_scale_llama(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    """RMSNorm with roundings at the same places as transformers' LlamaRMSNorm."""
    (x, weight), (rstd, offset) = operands, scalars
    return ((x * rstd).rounded() * (offset + weight).rounded(),)


def _rms_sums(operands: Chunks, shared: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    (dy, x), (weight,), (rstd, offset) = operands, shared, scalars
    product = dy * (x * rstd)
    return product * (offset + weight), product


def _rms_sums_llama(operands: Chunks, shared: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    """Sums for the Llama casting, whose forward pass multiplies the rounded n by weight."""
    (dy, x), (weight,), (rstd, offset) = operands, shared, scalars
    n = x * rstd
    return dy * n * (offset + weight), dy * n.rounded()


def _exact_rms_sum(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight), (rstd, offset) = operands, scalars
    return (dy.doubles() * (x * rstd).doubles() * (offset + weight).doubles(),)


def _rms_gradient(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight, *more), (rstd, offset, mean) = operands, scalars
    d = rstd * (dy * (offset + weight) - x * rstd * mean)
    return (d + more[0] if more else d,)


def _moments(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    deviation = operands[0] - scalars[0]
    return deviation, _squared(deviation)


def _exact_moments(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    deviation = operands[0].doubles() - scalars[0]
    return deviation, _squared(deviation)


def _layer_scale(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (x, weight, *bias), (mean, rstd) = operands, scalars
    y = (x - mean) * rstd * weight
    return (y + bias[0] if bias else y,)


def _layer_sums(operands: Chunks, shared: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk, Chunk, Chunk]:
    (dy, x), (weight,), (mean, rstd) = operands, shared, scalars
    product = dy * ((x - mean) * rstd)
    return product * weight, dy * weight, product, dy


def _exact_layer_sums(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    (dy, x, weight), (mean, rstd) = operands, scalars
    gradient = dy.doubles() * weight.doubles()
    return gradient * ((x - mean) * rstd).doubles(), gradient


def _layer_gradient(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight, *more), (mean, rstd, mean_product, mean_gradient) = operands, scalars
    d = rstd * (dy * weight - (x - mean) * rstd * mean_product - mean_gradient)
    return (d + more[0] if more else d,)


add = map_rows(lambda operands, _: (operands[0] + operands[1],) * 2)
add_up = map_rows(lambda operands, _: (operands[0] + operands[1],), streamed=0)
squares = fold_rows(lambda operands, _: (_squared(operands[0]),))
rms_scale = map_rows(_rms_scale)
rms_scale_llama = map_rows(_rms_scale_llama)
rms_gradient = map_rows(_rms_gradient)
exact_rms_sum = fold_rows(_exact_rms_sum, double=True)
rms_sums = sum_rows(_rms_sums)
rms_sums_llama = sum_rows(_rms_sums_llama)
moments = fold_rows(_moments, sums=2)
exact_moments = fold_rows(_exact_moments, sums=2, double=True)
exact_deviations = fold_rows(lambda operands, scalars: (operands[0].doubles() - scalars[0],), double=True)
squared_deviations = fold_rows(lambda operands, scalars: (_squared(operands[0] - scalars[0]),))
exact_squares = fold_rows(
    lambda operands, scalars: (_squared(operands[0].doubles() - scalars[0]),), double=True
)
layer_scale = map_rows(_layer_scale)
layer_sums = sum_rows(_layer_sums)
exact_layer_sums = fold_rows(_exact_layer_sums, sums=2, double=True)
layer_gradient = map_rows(_layer_gradient)


SHORT_SUM = 16 * UNROLLED * MAX_LANES  # numbers summed in the computing type: 16 per lane
CACHED = 1 << 16  # total elements
TINY = 2.0**-80  # a sum of float32 squares below this may have lost some to underflow


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


Array = np.ndarray[Any, Any]


def store_sum(total: Array, partial: Array, add: bool) -> None:
    """Store the sum of the rows of ``partial`` in ``total``. ``add``: add to its contents."""
    column_sums = partial.sum(axis=0)
    total[...] = total + column_sums if add else column_sums


def short_sums(short: Any, exact: Any, least: float = -1.0) -> Any:
    """Function (operands, scalars, wide) for the float64 sum over rows of short sums in the computing type.

    ``short`` and ``exact`` are passes of the table above. Where the size of a sum is not between ``least`` and
    infinity, ``exact`` takes the same numbers, with the scalars ``wide``, in float64. A device function, not
    ``inner``: reordered, a sum of differences from a number would be the difference of two large sums.
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


_squares = short_sums(squares, exact_squares, TINY)


@device_function
def sum_of_squares(x):
    return _squares((x,), (), (0.0,))


@inner
def together(rows, cols):
    """Rows whose operands stay in the cache from one pass to the next."""
    return max(1, min(TOGETHER, CACHED // max(1, cols), rows))


@device_function
def shared_chunks(lines, of, result, r, first, stop):
    """``shared`` of ``rows.map_rows`` for row r of a result, of which the task has the rows from first to stop."""
    joined = result.strides[0] == result.shape[1] * result.itemsize
    return write_row(lines, (of,)), joined and r > first, joined and r + 1 < stop


@device_function
def add_residual(sums, s, row, residual, r, after, out, shared, streaming):
    """Compute ``sums[0] = row + residual[r]``, and store it in ``s[r]``, unless y stands in for a missing s."""
    total, copy = write_row(sums, (0,)), write_row(s, (r,))
    operands, coming = (row, read_row(residual, (r,))), (read_row(residual, (after,)),)
    if place_of(copy) == place_of(out):
        add_up((total,), operands, (), coming, (), streaming)
    else:
        add((copy, total), operands, (), coming, shared, streaming)
