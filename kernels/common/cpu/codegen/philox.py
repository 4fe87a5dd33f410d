"""Ten rounds of Philox 4x32 in registers, as LLVM IR: a word of a counter per 64-bit lane.

A product of two words is then one instruction (pmuludq), which sees only the low halves of lanes: a product serves as
its own low half, with garbage above it, and a shift makes the high half. In lanes of 32 bits, a product takes seven.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    load_vector,
    number,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, types
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ROUNDS, _LOW = 10, 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LANES = VECTOR_BYTES // 8
_VECTORS = 2  # vectors that go through the rounds together, as each product waits for the one before
DRAWN = LANES * _VECTORS  # counters at a time
_ONES = {  # 1 as arrays of float16, bfloat16, float32 and float64 store it
    types.int16: (0x3C00, ir.IntType(16)),
    types.uint16: (0x3F80, ir.IntType(16)),
    types.float32: (1.0, ir.FloatType()),
    types.float64: (1.0, ir.DoubleType()),
}


@intrinsic
def philox_rounds(typingctx, c0, c1, c2, c3, n, k0, k1):
    """Replace the first ``n`` counters, whose words are in four arrays of uint32, by their random words."""

    def codegen(context, b, sig, args):
        words = [address(context, b, sig.args[i], args[i], number(0)) for i in range(4)]

        def draw(first: Any, lanes: int, vectors: int) -> None:
            narrow, wide = ir.VectorType(_I32, lanes), ir.VectorType(_I64, lanes)
            starts = [b.add(first, number(i * lanes)) for i in range(vectors)]
            places = [[b.gep(p, [start]) for p in words] for start in starts]
            counters = [[b.zext(load_vector(b, p, narrow), wide) for p in place] for place in places]
            for place, drawn in zip(places, rounds(b, counters, args[5:]), strict=True):
                for p, x in zip(place, drawn, strict=True):
                    store_vector(b, b.trunc(x, narrow), p)

        step = number(DRAWN)
        with cgutils.for_range(b, b.udiv(args[4], step)) as loop:
            draw(b.mul(loop.index, step), LANES, _VECTORS)
        rest = b.urem(args[4], step)
        with cgutils.for_range(b, rest) as loop:
            draw(b.add(b.sub(args[4], rest), loop.index), 1, 1)
        return context.get_dummy_value()

    return types.void(c0, c1, c2, c3, types.int64, types.uint32, types.uint32), codegen


def rounds(b: Any, counters: list[list[Any]], key: Any) -> list[list[Any]]:
    """Random words of counters, four vectors each; bits above a word are garbage."""
    word = counters[0][0].type

    def every(value: int) -> Any:
        return ir.Constant(word, [value] * word.count)

    keys = list(key)
    for _ in range(_ROUNDS):
        k0, k1 = (splat(b, b.zext(k, _I64), word.count) for k in keys)
        drawn = []
        for c in counters:
            factors = zip(c[::2], _MULTIPLIERS, strict=True)
            p0, p1 = (b.mul(b.and_(x, every(_LOW)), every(m)) for x, m in factors)
            high0, high1 = (b.lshr(p, every(32)) for p in (p0, p1))
            drawn.append([b.xor(b.xor(high1, c[1]), k0), p1, b.xor(b.xor(high0, c[3]), k1), p0])
        counters, keys = drawn, [b.add(k, _I32(weyl)) for k, weyl in zip(keys, _WEYL, strict=True)]
    return counters


@intrinsic
def draw_bits(typingctx, kept, group, n, k0, k1, least):
    """Fill ``kept``, an array of floats, with ones and zeros: whether a word is at least ``least``.

    Four words each of ``n`` counters (group, low and high half, 0, 2**32 - 1) and those that follow, up to whole
    vectors. Even lanes have the first half of the counters of a vector, odd ones the second: pairs of lanes then hold
    the words of a counter one after another.
    """
    kept_value, element = _ONES[kept.dtype]

    def codegen(context, b, sig, args):
        word_vector, narrow = ir.VectorType(_I64, LANES), ir.VectorType(_I32, 2 * LANES)
        stored = ir.VectorType(element, 2 * LANES)
        ones, zeros = (
            ir.Constant(stored, [value] * stored.count) for value in (kept_value, type(kept_value)(0))
        )
        counter_of_lane = [lane // 2 + lane % 2 * (LANES // 2) for lane in range(LANES)]
        start, limit = (splat(b, args[i], count) for i, count in ((1, LANES), (5, 2 * LANES)))
        place = address(context, b, sig.args[0], args[0], number(0))

        def every(value: int) -> Any:
            return ir.Constant(word_vector, [value] * LANES)

        step = number(DRAWN)
        with cgutils.for_range(b, b.udiv(b.add(args[2], number(DRAWN - 1)), step)) as loop:
            first = b.mul(loop.index, step)
            here = b.add(start, splat(b, first, LANES))
            counters = []
            for i in range(_VECTORS):
                groups = b.add(here, ir.Constant(word_vector, [lane + i * LANES for lane in counter_of_lane]))
                counters.append([groups, b.lshr(groups, every(32)), every(0), every(_LOW)])
            for i, c in enumerate(rounds(b, counters, args[3:5])):
                pairs = [
                    b.or_(b.and_(x, every(_LOW)), b.shl(y, every(32)))
                    for x, y in zip(c[::2], c[1::2], strict=True)
                ]
                for half in range(2):
                    order = [lane + half + odd * LANES for lane in range(0, LANES, 2) for odd in range(2)]
                    words = b.bitcast(shuffle(b, *pairs, order), narrow)
                    bits = b.select(b.icmp_unsigned(">=", words, limit), ones, zeros)
                    at = b.add(first, number(i * LANES + half * LANES // 2))
                    store_vector(b, bits, b.gep(place, [b.mul(at, number(4))]))
        return context.get_dummy_value()

    return types.void(kept, types.uint64, types.int64, types.uint32, types.uint32, types.uint32), codegen
