"""The passes of the norms over a row, as LLVM IR (ir/rows.py).

=====================  ====================================  ==============================================
pass                   operands                              scalars
=====================  ====================================  ==============================================
add                    x, residual                           none; two results, the first may be streamed
squares                x                                     none
rms_scale              x, weight                             rstd, weight_offset
rms_products           dy, x, weight                         rstd, weight_offset
exact_rms_products     dy, x, weight                         the same, in float64
rms_gradient           dy, x, weight[, dresidual]            rstd, weight_offset, mean of the products
rms_weight             rows of dy, x                         rstd of each
deviations             x                                     a number near the mean
exact_deviations       x                                     the same, in float64
squared_deviations     x                                     mean
exact_squares          x                                     mean, in float64
layer_scale            x, weight[, bias]                     mean, rstd
layer_products         dy, x, weight                         mean, rstd; two sums, also of dy weight
exact_products         dy, x, weight                         mean, rstd; the same in float64
layer_gradient         dy, x, weight[, dresidual]            mean, rstd, mean of the products, mean of dy weight
layer_weight           rows of dy, x                         mean, rstd of each; two results, also of dy
=====================  ====================================  ==============================================
"""

from __future__ import annotations

from gpu_ops.kernels.numba_cpu.ir.rows import Chunk, add_rows, fold_rows, map_rows

Chunks = list[Chunk]


def _squared(x: Chunk) -> Chunk:
    return x * x


def _rms_scale(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (x, weight), (rstd, offset) = operands, scalars
    return (x * rstd * (offset + weight),)


def _rms_scale_llama(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    """Rounded where transformers' LlamaRMSNorm rounds."""
    (x, weight), (rstd, offset) = operands, scalars
    return ((x * rstd).rounded() * (offset + weight).rounded(),)


def _rms_products(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight), (rstd, offset) = operands, scalars
    return (dy * (offset + weight) * (x * rstd),)


def _rms_gradient(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight, *more), (rstd, offset, mean) = operands, scalars
    d = rstd * (dy * (offset + weight) - x * rstd * mean)
    return (d + more[0] if more else d,)


def _layer_scale(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (x, weight, *bias), (mean, rstd) = operands, scalars
    y = (x - mean) * rstd * weight
    return (y + bias[0] if bias else y,)


def _layer_products(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    (dy, x, weight), (mean, rstd) = operands, scalars
    gradient = dy * weight
    return gradient * ((x - mean) * rstd), gradient


def _exact_products(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    products, gradients = _layer_products(operands, scalars)
    return products.doubles(), gradients.doubles()


def _layer_gradient(operands: Chunks, scalars: Chunks) -> tuple[Chunk]:
    (dy, x, weight, *more), (mean, rstd, mean_product, mean_gradient) = operands, scalars
    d = rstd * (dy * weight - (x - mean) * rstd * mean_product - mean_gradient)
    return (d + more[0] if more else d,)


def _layer_weight(operands: Chunks, scalars: Chunks) -> tuple[Chunk, Chunk]:
    (dy, x), (mean, rstd) = operands, scalars
    return dy * ((x - mean) * rstd), dy


add = map_rows(lambda operands, _: (operands[0] + operands[1],) * 2)
squares = fold_rows(lambda operands, _: (_squared(operands[0]),))
rms_scale = map_rows(_rms_scale)
rms_scale_llama = map_rows(_rms_scale_llama)
rms_products = fold_rows(_rms_products)
exact_rms_products = fold_rows(lambda *given: (_rms_products(*given)[0].doubles(),), double=True)
rms_gradient = map_rows(_rms_gradient)
rms_weight = add_rows(lambda operands, scalars: (operands[0] * (operands[1] * scalars[0]),))
rms_weight_llama = add_rows(lambda operands, scalars: (operands[0] * (operands[1] * scalars[0]).rounded(),))
deviations = fold_rows(lambda operands, scalars: (operands[0] - scalars[0],))
exact_deviations = fold_rows(lambda operands, scalars: (operands[0].doubles() - scalars[0],), double=True)
squared_deviations = fold_rows(lambda operands, scalars: (_squared(operands[0] - scalars[0]),))
exact_squares = fold_rows(
    lambda operands, scalars: (_squared(operands[0].doubles() - scalars[0]),), double=True
)
layer_scale = map_rows(_layer_scale)
layer_products = fold_rows(_layer_products, sums=2)
exact_products = fold_rows(_exact_products, sums=2, double=True)
layer_gradient = map_rows(_layer_gradient)
layer_weight = add_rows(_layer_weight)
