"""Sums over a few rows, along them and across, as LLVM IR: each chunk is read once and added to both.

        chunk by chunk ->
row 0 | x x x x x x x ... | -> a sum    a vector for each row: SHORT chunks add up in the computing type
row 1 | x x x x x x x ... | -> a sum    (``short``), then in float64 (``long``), the lanes at the end
row 2 | x x x x x x x ... | -> a sum
        | | | | | | |
        v v v v v v v                   a vector for each chunk, in a register, then added to a float64 row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    every,
    load_vector,
    number,
    prefetch,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, types
from gpu_ops.kernels.common.cpu.codegen.rows import DOUBLE, Chunk, everywhere, over_lanes
from gpu_ops.kernels.common.cpu.codegen.target import NEAR

TOGETHER = 4  # maximum number of rows
SHORT = 16  # chunks

Term = Callable[[list[Chunk], list[Chunk], list[Chunk]], tuple[Chunk, ...]]


class _RowSums:
    """Sums of ``kinds`` terms for each row, chunk by chunk."""

    def __init__(self, b: Any, row: Rows, kinds: int, n_rows: Any) -> None:
        self.b, self.row, self.kinds, self.n_rows = b, row, kinds, n_rows
        self.vectors = kinds * row.parts  # of a row
        self.wide = ir.VectorType(DOUBLE, row.lanes)
        size = TOGETHER * self.vectors
        self.short, self.long = (cgutils.alloca_once(b, vector, size) for vector in (row.vector, self.wide))
        with cgutils.for_range(b, b.mul(n_rows, number(self.vectors))) as loop:
            for sums, vector in ((self.short, row.vector), (self.long, self.wide)):
                b.store(every(vector, 0.0), b.gep(sums, [loop.index]))

    def add(self, r: Any, terms: tuple[Chunk, ...], rest: Any) -> None:
        """Add terms to row r. ``rest``: number of elements of the chunk that count; None: all."""
        b, lanes = self.b, self.row.elements_of_lanes()
        for sum_index, term in enumerate(terms):
            for part, x in enumerate(term.parts):
                if rest is not None:
                    places = ir.Constant(ir.VectorType(ir.IntType(64), self.row.lanes), lanes[part])
                    inside = b.icmp_signed("<", places, splat(b, rest, self.row.lanes))
                    x = b.select(inside, x, every(self.row.vector, 0.0))
                place = b.add(b.mul(r, number(self.vectors)), number(sum_index * self.row.parts + part))
                _grow(b, b.gep(self.short, [place]), x)

    def flush(self) -> None:
        b = self.b
        with cgutils.for_range(b, b.mul(self.n_rows, number(self.vectors))) as loop:
            p = b.gep(self.short, [loop.index])
            x = b.load(p)
            _grow(b, b.gep(self.long, [loop.index]), x if x.type == self.wide else b.fpext(x, self.wide))
            b.store(every(self.row.vector, 0.0), p)

    def store(self, results: list[Any]) -> None:
        """Store the sums, in an array for each term."""
        b = self.b
        with cgutils.for_range(b, self.n_rows) as loop:
            for sum_index, p in enumerate(results):
                first = b.add(b.mul(loop.index, number(self.vectors)), number(sum_index * self.row.parts))
                places = [b.add(first, number(part)) for part in range(self.row.parts)]
                total = over_lanes(b, [b.load(b.gep(self.long, [place])) for place in places])
                b.store(total, b.gep(p, [loop.index]))


def _grow(b: Any, p: Any, x: Any) -> None:
    b.store(b.fadd(b.load(p), x), p)


def sum_rows(term: Term) -> Any:
    """Intrinsic that sums term(operands, shared, scalars): first results are for rows, the last for columns.

    ``sums``: float64 arrays = the sums of each row. ``totals``: float64 rows += the sums of each column in the
    computing type. ``operands``: first row of each; ``strides``: bytes from a row to the next; ``shared``: a row
    used with all. ``scalars``: arrays of a number per row, then ``constants``. As many of the following rows are
    prefetched here, not in the pass that streams its stores: there LayerNorm took a fifth longer.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        def beginnings(k: int) -> list[Any]:
            arrays = [(t, b.extract_value(args[k], i)) for i, t in enumerate(sig.args[k])]
            return [address(context, b, t, array, number(0)) for t, array in arrays]

        row = Rows(sig.args[2][0].dtype)
        results, targets, pointers, beside, numbers = (beginnings(k) for k in (0, 1, 2, 4, 5))
        strides, n_rows, count = args[3], args[7], args[8]
        constants = everywhere(b, row, args[6], len(sig.args[6]))
        along = _RowSums(b, row, len(results), n_rows)
        across = [[cgutils.alloca_once(b, row.vector) for _ in range(row.parts)] for _ in targets]

        def step(at: Any, rest: Any = None) -> list[list[Any]]:
            """Sums across the rows, in float64, of the chunks from element ``at`` on."""
            shared = [Chunk(b, row, row.load(b, b.gep(p, [at]), rest)) for p in beside]
            for total in (total for parts in across for total in parts):
                b.store(every(row.vector, 0.0), total)
            with cgutils.for_range(b, n_rows) as loop:
                chunks = []
                for i, p in enumerate(pointers):
                    stride = b.extract_value(strides, i)
                    start = b.bitcast(b.gep(p, [at]), ir.IntType(8).as_pointer())
                    prefetch(b, b.gep(start, [b.mul(b.add(loop.index, n_rows), stride)]), NEAR)
                    here = b.bitcast(b.gep(start, [b.mul(loop.index, stride)]), p.type)
                    chunks.append(Chunk(b, row, row.load(b, here, rest)))
                loaded = [splat(b, b.load(b.gep(p, [loop.index])), row.lanes) for p in numbers]
                values = term(chunks, shared, [Chunk(b, row, [x] * row.parts) for x in loaded] + constants)
                along.add(loop.index, values[: len(results)], rest)
                for value, parts in zip(values[len(results) :], across, strict=True):
                    for x, total in zip(value.parts, parts, strict=True):
                        _grow(b, total, x)
            return [Chunk(b, row, [b.load(x) for x in parts]).in_order().doubles().parts for parts in across]

        whole, rest = b.udiv(count, number(row.elements)), b.urem(count, number(row.elements))
        with cgutils.for_range(b, b.udiv(b.add(whole, number(SHORT - 1)), number(SHORT))) as blocks:
            first = b.mul(blocks.index, number(SHORT))
            left = b.sub(whole, first)
            n = b.select(b.icmp_signed("<", left, number(SHORT)), left, number(SHORT))
            with cgutils.for_range(b, n) as loop:
                at = b.mul(b.add(first, loop.index), number(row.elements))
                for vectors, target in zip(step(at), targets, strict=True):
                    for i, x in enumerate(vectors):
                        p = b.gep(target, [b.add(at, number(i * x.type.count))])
                        store_vector(b, b.fadd(load_vector(b, p, x.type), x), p)
            along.flush()
        with b.if_then(b.icmp_signed("!=", rest, number(0)), likely=False):
            at = b.mul(whole, number(row.elements))
            buffer = cgutils.alloca_once(b, DOUBLE, row.elements)
            for vectors, target in zip(step(at, rest), targets, strict=True):
                for i, x in enumerate(vectors):
                    store_vector(b, x, b.gep(buffer, [number(i * x.type.count)]))
                with cgutils.for_range(b, rest) as loop:
                    _grow(b, b.gep(target, [b.add(at, loop.index)]), b.load(b.gep(buffer, [loop.index])))
            along.flush()
        along.store(results)
        return context.get_dummy_value()

    @intrinsic
    def add_up(typingctx, sums, totals, operands, strides, shared, scalars, constants, rows, count):
        i = types.int64
        return types.void(sums, totals, operands, strides, shared, scalars, constants, i, i), codegen

    return add_up
