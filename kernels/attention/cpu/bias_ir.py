"""Addition of bias to scores, as LLVM IR. Rows of bias are queries, rows of S^T keys: squares are transposed.

bias    | query 0: keys ... |      bfloat16  as words of two keys, which are widened where they are added
        | query 1: keys ... |      else      widened first; float16 makes two squares
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    every,
    fma,
    load_vector,
    number,
    prefetch,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows
from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.codegen.gemm import transpose_vectors
from gpu_ops.kernels.common.cpu.codegen.numba_api import intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES

PANEL = 2  # vectors of lanes that process the same keys one after the other
# A very negative finite bias is not a mask: scores in base 2 stay finite.
_LOWEST = {"float": -3.3e38, "double": -1.7e308}


@intrinsic
def add_square(typingctx, s, at, ld, keys, queries, starts, lane, offset, bias, factor):
    """s = factor * s + log2(e) * bias for a vector of lanes from ``s[at]`` on and a chunk of keys, rows ``ld`` apart.

    ``starts[lane]`` and so on are addresses of rows of ``bias``, ``offset`` bytes before the chunk; rows of the next
    panel are prefetched. Elements beyond ``keys`` and ``queries`` are not read, and count as 0. -inf is a mask: from
    the bias alone, then also for a NaN score, or from the score alone.
    """
    score = ir.DoubleType() if s.dtype == types.float64 else ir.FloatType()

    def codegen(context, b, sig, args):
        square = _Square(b, bias.dtype, ir.VectorType(score, VECTOR_BYTES * 8 // s.dtype.bitwidth))
        scores = address(context, b, s, args[0], args[1])
        places = address(context, b, starts, args[5], args[6])
        lanes = square.vector.count
        rows = [b.add(b.load(b.gep(places, [number(i)])), args[7]) for i in range(lanes)]
        rows = [b.inttoptr(row, ir.IntType(8).as_pointer()) for row in rows]
        factors = splat(b, args[9], lanes)

        def add(j: int, more: Any) -> None:
            pointer = b.gep(scores, [b.mul(args[2], number(j))])
            store_vector(b, _sum(b, load_vector(b, pointer, square.vector), more, factors), pointer)

        full = [
            b.icmp_signed("==", args[3 + i], number(n)) for i, n in enumerate((square.rows.elements, lanes))
        ]
        with b.if_else(b.and_(*full)) as (whole, part):
            with whole:
                for i in range(lanes):
                    later = b.add(b.load(b.gep(places, [number(PANEL * lanes + i)])), args[7])
                    prefetch(b, b.inttoptr(later, ir.IntType(8).as_pointer()))
                for j, more in enumerate(square.by_keys([square.rows.load_raw(b, row) for row in rows])):
                    add(j, more)
            with part:
                counts = [
                    b.select(b.icmp_signed("<", number(i), args[4]), args[3], number(0)) for i in range(lanes)
                ]
                raw_rows = [square.rows.load_raw(b, row, n) for row, n in zip(rows, counts, strict=True)]
                for j, more in enumerate(square.by_keys(raw_rows)):
                    with b.if_then(b.icmp_signed("<", number(j), args[3])):
                        add(j, more)
        return context.get_dummy_value()

    i = types.int64
    return signature(types.void, s, i, i, i, i, starts, i, i, bias, s.dtype), codegen


class _Square:
    """Chunks of rows as vectors of ``vector``, one for each key."""

    def __init__(self, b: Any, kind: types.Type, vector: ir.VectorType) -> None:
        self.b, self.rows, self.vector = b, Rows(kind), vector

    def by_keys(self, chunks: list[Any]) -> list[Any]:
        if self.rows.dtype == types.uint16:
            words = ir.VectorType(ir.IntType(32), self.vector.count)
            pairs = transpose_vectors(self.b, [self.b.bitcast(chunk, words) for chunk in chunks])
            return [x for pair in pairs for x in self.rows.widen(self.b, pair)]
        parts = zip(*(self._widened(chunk) for chunk in chunks), strict=True)
        return [x for part in parts for x in transpose_vectors(self.b, list(part))]

    def _widened(self, chunk: Any) -> list[Any]:
        vectors, n = self.rows.widen(self.b, chunk), self.vector.count
        if vectors[0].type == self.vector:
            return vectors
        halves = [shuffle(self.b, x, x, list(range(start, start + n))) for x in vectors for start in (0, n)]
        return [self.b.fpext(half, self.vector) for half in halves]  # float32 bias of float64 scores


def _sum(b: Any, score: Any, more: Any, factor: Any) -> Any:
    infinite, lowest = every(score.type, float("-inf")), every(score.type, _LOWEST[str(score.type.element)])
    total = fma(b, score, factor, b.fmul(more, every(score.type, LOG2E)))
    total = b.select(b.fcmp_ordered("<", total, lowest), lowest, total)
    hidden = [b.fcmp_ordered("==", x, infinite) for x in (more, score)]
    return b.select(b.or_(*hidden), infinite, total)
