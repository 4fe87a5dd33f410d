"""One step of an online softmax, as LLVM IR: a tile of scores becomes weights, maximum and sum stay in registers.

    lanes: queries
    +-------------+
    |   s[0]      |  row after row
    |   s[1]      |      P = exp2(factor * (S - maximum))
    |   ...       |  over the scores, and its sum.
    +-------------+

The product that makes the scores finds the largest of each lane as well (``gemm_rows_largest``); where they change
after that, :func:`largest_scores` does.

Weights are floats in place of the scores, or (a target array of uint32) pairs of bfloat16, as ``ir.gemm`` takes them:
row j of the weights is rows 2j and 2j + 1 of the scores, and lies in the first half of their memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir.build import (
    address,
    every,
    fma,
    load_vector,
    maximum,
    number,
    splat,
    store_vector,
)
from gpu_ops.kernels.numba_cpu.ir.exp2 import FLOAT32, FLOAT64, PAIRS, exp2
from gpu_ops.kernels.numba_cpu.ir.narrow import narrow
from gpu_ops.kernels.numba_cpu.ir.target import TILES, VECTOR_BYTES

ROWS = 8  # scores come in multiples of so many rows
# How far, in powers of two, scores may rise above the maximum before it moves, where O is not scaled for free.
LATE = 8.0
_STEP = 4  # rows that are weighed in one round


@intrinsic
def largest_scores(typingctx, s, at, ld, rows, top, lane):
    """top[lane] is at least what it was, and every score of the vector of lanes at ``s[at]``."""
    size = s.dtype.bitwidth // 8

    def codegen(context, b, sig, args):
        _, at_, ld_, rows_, _, lane_ = args
        vector = ir.VectorType(ir.FloatType() if size == 4 else ir.DoubleType(), VECTOR_BYTES // size)
        scores = address(context, b, sig.args[0], args[0], at_)
        top_at = address(context, b, sig.args[4], args[4], lane_)
        top = cgutils.alloca_once_value(b, load_vector(b, top_at, vector))
        with cgutils.for_range(b, b.sdiv(rows_, number(ROWS))) as loop:
            rows = [b.add(b.mul(loop.index, number(ROWS)), number(i)) for i in range(ROWS)]
            found = [load_vector(b, b.gep(scores, [b.mul(j, ld_)]), vector) for j in rows]
            b.store(maximum(b, [*found, b.load(top)]), top)
        store_vector(b, b.load(top), top_at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, i, i, i, top, i), codegen


@intrinsic
def softmax_step(typingctx, s, at, ld, rows, p, factor, row_max, row_sum, alpha, lane):
    """Weights of the vector of lanes at ``s[at]``, ``rows`` rows (a multiple of ROWS) that lie ``ld`` apart.

    ``alpha`` [lane] comes as the new ``row_max`` and leaves as the factor for what was summed before; ``row_max`` and
    ``row_sum`` move along. ``p`` is ``s``, or the uint32 view of it; ``factor`` > 0 is 1 except for pairs.
    """
    pairs = p.dtype == types.uint32
    size = s.dtype.bitwidth // 8
    polynomial = PAIRS if pairs else FLOAT32 if size == 4 else FLOAT64

    def codegen(context, b, sig, args):
        _, at_, ld_, rows_, _, factor_, _, _, _, lane_ = args
        element = ir.FloatType() if size == 4 else ir.DoubleType()
        vector = ir.VectorType(element, VECTOR_BYTES // size)
        zero, lowest = every(vector, 0.0), every(vector, float("-inf"))
        scores = address(context, b, sig.args[0], args[0], at_)
        top_at, sum_at, alpha_at = (address(context, b, sig.args[i], args[i], lane_) for i in (6, 7, 8))
        weights = b.bitcast(scores, ir.IntType(32).as_pointer()) if pairs else scores
        scale = splat(b, factor_, vector.count)

        def row(pointer: Any, j: Any, offset: int) -> Any:
            return b.gep(pointer, [b.mul(b.add(j, number(offset)), ld_)])

        def power(x: Any, top: Any) -> Any:
            x = b.fsub(x, top)
            return exp2(b, b.fmul(x, scale) if pairs else x, polynomial)

        old, new = load_vector(b, top_at, vector), load_vector(b, alpha_at, vector)
        if pairs and TILES:
            rise = b.fmul(b.fsub(new, old), scale)
            new = b.select(b.fcmp_ordered("<=", rise, every(vector, LATE)), old, new)
        safe = b.select(b.fcmp_ordered("==", new, lowest), zero, new)  # nothing seen yet: no -inf - -inf
        rescale = power(old, safe)
        store_vector(b, new, top_at)
        store_vector(b, rescale, alpha_at)

        total = cgutils.alloca_once_value(b, zero)  # a tile by itself: its small terms keep their digits
        b.store(zero, total)
        with cgutils.for_range(b, b.sdiv(rows_, number(_STEP))) as loop:
            first = b.mul(loop.index, number(_STEP))
            found = [power(load_vector(b, row(scores, first, i), vector), safe) for i in range(_STEP)]
            if pairs:
                half = b.mul(loop.index, number(_STEP // 2))
                for i in range(_STEP // 2):
                    store_vector(b, narrow(b, types.uint16, found[2 * i : 2 * i + 2]), row(weights, half, i))
            else:
                for i, x in enumerate(found):
                    store_vector(b, x, row(weights, first, i))
            while len(found) > 1:
                found = [b.fadd(x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
            b.store(b.fadd(b.load(total), found[0]), total)
        store_vector(b, fma(b, load_vector(b, sum_at, vector), rescale, b.load(total)), sum_at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(s, i, i, i, p, s.dtype, row_max, row_sum, alpha, i), codegen
