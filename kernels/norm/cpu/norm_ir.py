"""Passes of the norms over rows, as LLVM IR (codegen/rows.py, codegen/sums.py).

=====================  ====================================  ==============================================
pass                   operands                              scalars
=====================  ====================================  ==============================================
add                    x, residual                           none; two results, the first may be streamed
add_up                 x, residual                           none; never streamed, whatever is fetched
squares                x                                     none
rms_scale              x, weight                             rstd, weight_offset
rms_sums               rows of dy, x; weight                 rstd of each, weight_offset; sum of the products
                                                             dy n weight for each row, of dy n for each column
exact_rms_sum          dy, x, weight                         rstd, weight_offset; of the products, in float64
rms_gradient           dy, x, weight[, dresidual]            rstd, weight_offset, mean of the products
exact_deviations       x                                     a number near the mean, in float64
moments                x                                     a number near the mean; of the deviations from it, and
                                                             of their squares
exact_moments          x                                     the same, in float64
squared_deviations     x                                     mean
exact_squares          x                                     mean, in float64
layer_scale            x, weight[, bias]                     mean, rstd
layer_sums             rows of dy, x; weight                 mean, rstd of each; sums of dy n weight and dy
                                                             weight for each row, of dy n and dy for each column
exact_layer_sums       dy, x, weight                         mean, rstd; the sums for a row, in float64
layer_gradient         dy, x, weight[, dresidual]            mean, rstd, mean of the products, mean of dy weight
=====================  ====================================  ==============================================
"""

from __future__ import annotations

from gpu_ops.kernels.common.cpu.codegen.rows import Chunk, fold_rows, map_rows
from gpu_ops.kernels.common.cpu.codegen.sums import sum_rows

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
