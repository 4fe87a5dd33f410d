"""One step of an online softmax, as LLVM IR: turns a tile of scores into weights; maximum and sum stay in registers.

    lanes: queries
    +-------------+
    |   s[0]      |  row after row
    |   s[1]      |      P = exp2(factor * (S - maximum))
    |   ...       |  over the scores, and its sum.
    +-------------+

The product that makes the scores also finds the maximum of each lane (``gemm_rows_largest``); where scores change
later, :func:`largest_scores` does.

Weights are floats in place of the scores, or, in a target array of uint32, pairs of bfloat16 for codegen/gemm.py: row
j of the weights is rows 2j and 2j + 1 of the scores, and is in the first half of their memory.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    dot_bfloat16,
    every,
    fma,
    load_vector,
    maximum,
    number,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.exp2 import FLOAT32, FLOAT64, PAIRS, exp2
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, types
from gpu_ops.kernels.common.cpu.codegen.rows import narrow
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES

ROWS = 8  # scores come in multiples of 8 rows
_STEP = 4  # rows that are weighed in one round


@intrinsic
def largest_scores(typingctx, s, at, ld, rows, top, lane):
    """top[lane] = maximum of top[lane] and every score of the vector of lanes at ``s[at]``."""
    size = s.dtype.bitwidth // 8

    def codegen(context, b, sig, args):
        _, at_, ld_, rows_, _, lane_ = args
        vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), VECTOR_BYTES // size)
        scores = address(context, b, sig.args[0], args[0], at_)
        top_at = address(context, b, sig.args[4], args[4], lane_)
        top = cgutils.alloca_once_value(b, load_vector(b, top_at, vector))
        with cgutils.for_range(b, b.sdiv(rows_, number(ROWS))) as loop:
            rows = [b.add(b.mul(loop.index, number(ROWS)), number(i)) for i in range(ROWS)]
            loaded = [load_vector(b, b.gep(scores, [b.mul(j, ld_)]), vector) for j in rows]
            b.store(maximum(b, [*loaded, b.load(top)]), top)
        store_vector(b, b.load(top), top_at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, i, i, i, top, i), codegen


@intrinsic
def softmax_step(typingctx, s, at, ld, rows, p, factor, row_max, row_sum, taken, alpha, lane):
    """Weights of the vector of lanes at ``s[at]``, ``rows`` rows (a multiple of ROWS) ``ld`` apart.

    ``alpha`` [lane] is the new ``row_max`` on entry and the factor for older sums on return; ``row_max`` and
    ``row_sum`` are updated. ``p`` is ``s``, or the uint32 view of it; ``factor`` > 0 is 1 except for pairs, whose
    weights are also summed as they were rounded, in ``taken``.
    """

    def codegen(context, b, sig, args):
        top_at, sum_at, alpha_at = (address(context, b, sig.args[i], args[i], args[10]) for i in (6, 7, 9))
        vector, scale = _lanes(b, s, args[5])
        old, new = load_vector(b, top_at, vector), load_vector(b, alpha_at, vector)
        rescale = _rescale(b, old, new, scale, _polynomial(s, p))
        store_vector(b, new, top_at)
        store_vector(b, rescale, alpha_at)
        scores, weights = (address(context, b, sig.args[i], args[i], args[1]) for i in (0, 4))
        sums = _weigh(b, scores, weights, args[2], args[3], new, scale, _polynomial(s, p))
        taken_at = address(context, b, sig.args[8], args[8], args[10])
        for total, at in zip(sums, (sum_at, taken_at)[: len(sums)], strict=True):
            store_vector(b, fma(b, load_vector(b, at, vector), rescale, total), at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, i, i, i, p, s.dtype, row_max, row_sum, taken, alpha, i), codegen


def _polynomial(s: Any, p: Any) -> tuple[float, ...]:
    return PAIRS if p.dtype == types.uint32 else FLOAT32 if s.dtype == types.float32 else FLOAT64


def _lanes(b: Any, s: Any, factor: Any) -> tuple[ir.VectorType, Any]:
    size = s.dtype.bitwidth // 8
    vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), VECTOR_BYTES // size)
    return vector, splat(b, factor, vector.count)


def _seen(b: Any, top: Any) -> Any:
    """``top``, or 0 where no key has been seen, to avoid -inf - -inf."""
    lowest = b.fcmp_ordered("==", top, every(top.type, float("-inf")))
    return b.select(lowest, every(top.type, 0.0), top)


def _rescale(b: Any, old: Any, new: Any, scale: Any, polynomial: tuple[float, ...]) -> Any:
    """exp2(factor * (old - new)), computed as weights are: exactly 1 where the maximum does not change."""
    return exp2(b, _exponent(b, old, _seen(b, new), scale, polynomial), polynomial)


def _exponent(b: Any, x: Any, top: Any, scale: Any, polynomial: tuple[float, ...]) -> Any:
    """factor * (x - top), difference first: the difference of rounded products is far from 0 where they are huge."""
    distance = b.fsub(x, top)
    return b.fmul(distance, scale) if polynomial is PAIRS else distance


def _weigh(
    b: Any,
    scores: Any,
    weights: Any,
    ld: Any,
    rows: Any,
    top: Any,
    scale: Any,
    polynomial: tuple[float, ...],
) -> list[Any]:
    """Turn scores into weights. A tile has a separate sum: small terms keep their digits. Of pairs, also the sum
    of the rounded weights."""
    pairs, vector = polynomial is PAIRS, top.type
    ones = every(ir.VectorType(ir.IntType(32), vector.count), 0x3F803F80)  # pairs of bfloat16
    top = _seen(b, top)

    def row(pointer: Any, j: Any, offset: int) -> Any:
        return b.gep(pointer, [b.mul(b.add(j, number(offset)), ld)])

    total, taken = cgutils.alloca_once(b, vector), cgutils.alloca_once(b, vector)
    b.store(every(vector, 0.0), total)
    b.store(every(vector, 0.0), taken)
    with cgutils.for_range(b, b.sdiv(rows, number(_STEP))) as loop:
        first = b.mul(loop.index, number(_STEP))
        p = [load_vector(b, row(scores, first, i), vector) for i in range(_STEP)]
        p = [exp2(b, _exponent(b, x, top, scale, polynomial), polynomial) for x in p]
        if pairs:
            half = b.mul(loop.index, number(_STEP // 2))
            for i in range(_STEP // 2):
                both = narrow(b, types.uint16, p[2 * i : 2 * i + 2])
                store_vector(b, both, row(weights, half, i))
                b.store(dot_bfloat16(b, both, ones, b.load(taken)), taken)
        else:
            for i, x in enumerate(p):
                store_vector(b, x, row(weights, first, i))
        while len(p) > 1:
            p = [b.fadd(x, y) for x, y in zip(p[::2], p[1::2], strict=True)]
        b.store(b.fadd(b.load(total), p[0]), total)
    return [b.load(total), b.load(taken)] if pairs else [b.load(total)]
