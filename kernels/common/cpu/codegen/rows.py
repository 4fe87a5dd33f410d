"""Conversion of rows of any element type to vectors and back, as LLVM IR: in chunks of VECTOR_BYTES.

    x     | chunk | chunk | ...        a chunk is one or two vectors (decode_rows.py)
    more  | chunk | chunk | ...
    y     | chunk | chunk | ...        past the caches if requested, once a chunk is a line (or a part of one)

    y of row r      ... | chunk | te         consecutive rows share a chunk: the first row's part of it waits
    y of row r + 1              xt | chunk   in ``shared`` for the second, and the whole chunk goes past the caches

``map_rows`` writes rows, ``fold_rows`` sums over one, ``sum_rows`` of sums.py over several. All operands of a chunk
are read before its results are stored, so a result may be an operand's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    every,
    load_vector,
    number,
    prefetch,
    round_bfloat16,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows, chunk_elements
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, types
from gpu_ops.kernels.common.cpu.codegen.stream import past_line
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, FEATURES, NEAR, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.jit import device_function

_I16, _I32 = ir.IntType(16), ir.IntType(32)


def narrow(b: Any, dtype: types.Type, vectors: list[Any]) -> Any:
    """The vectors of one chunk rounded to nearest even, as the vector that is stored."""
    if dtype == types.uint16:
        return _bfloat16(b, *vectors)
    if dtype == types.int16:
        half = _half if "+f16c" in FEATURES else _half_by_integers
        return _joined(b, *(half(b, x) for x in vectors))
    return vectors[0]


def _joined(b: Any, low: Any, high: Any) -> Any:
    return shuffle(b, low, high, list(range(2 * low.type.count)))


def _bfloat16(b: Any, even: Any, odd: Any) -> Any:
    n = even.type.count
    if DOT_BFLOAT16:
        both = b.bitcast(round_bfloat16(b, even, odd), ir.VectorType(_I16, 2 * n))
        return shuffle(b, both, both, [i // 2 + i % 2 * n for i in range(2 * n)])
    return bfloat16_pairs(b, even, odd)


def bfloat16_pairs(b: Any, even: Any, odd: Any) -> Any:
    """Words of two bfloat16, by integers, which keep denormal numbers: ``even`` in the low halves."""
    words = ir.VectorType(_I32, even.type.count)

    def every(value: int) -> Any:
        return ir.Constant(words, [value] * words.count)

    def rounded(x: Any) -> Any:
        u = b.bitcast(x, words)
        to_even = b.add(every(0x7FFF), b.and_(b.lshr(u, every(16)), every(1)))
        quiet_nan = b.or_(u, every(0x400000))  # rounding could carry a NaN's payload into inf
        return b.select(b.fcmp_unordered("uno", x, x), quiet_nan, b.add(u, to_even))

    return b.or_(b.lshr(rounded(even), every(16)), b.and_(rounded(odd), every(-65536)))


def _half(b: Any, x: Any) -> Any:
    return b.bitcast(
        b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), ir.VectorType(_I16, x.type.count)
    )


def _half_by_integers(b: Any, x: Any) -> Any:
    """Convert float32 to float16 in integers, as float16_of_float32 in dtype.py does."""
    n = x.type.count
    words = ir.VectorType(_I32, n)

    def every(value: int) -> Any:
        return ir.Constant(words, [value] * n)

    u = b.bitcast(x, words)
    a = b.and_(u, every(0x7FFFFFFF))
    odd = b.and_(b.lshr(a, every(13)), every(1))
    normal = b.lshr(b.add(b.add(a, every(0xC8000FFF - (1 << 32))), odd), every(13))
    shifted = b.fadd(b.bitcast(a, x.type), ir.Constant(x.type, [0.5] * n))
    subnormal = b.sub(b.bitcast(shifted, words), every(0x3F000000))
    h = b.select(b.icmp_signed("<", a, every(0x38800000)), subnormal, normal)
    special = b.select(b.icmp_signed(">", a, every(0x7F800000)), every(0x7E00), every(0x7C00))
    h = b.select(b.icmp_signed(">=", a, every(0x47800000)), special, h)
    return b.trunc(b.or_(h, b.and_(b.lshr(u, every(16)), every(0x8000))), ir.VectorType(_I16, n))


UNROLLED = 4  # chunks with separate sums: an addition waits for the one before
DOUBLE = ir.DoubleType()


class Chunk:
    """Vectors of one chunk, in the computing type, with arithmetic."""

    def __init__(self, b: Any, row: Rows, parts: list[Any]) -> None:
        self.b, self.row, self.parts = b, row, parts

    def each(self, f: Callable[..., Any], *others: Chunk) -> Chunk:
        parts = zip(self.parts, *(x.parts for x in others), strict=True)
        return Chunk(self.b, self.row, [f(*part) for part in parts])

    def __add__(self, x: Chunk) -> Chunk:
        return self.each(self.b.fadd, x)

    def __sub__(self, x: Chunk) -> Chunk:
        return self.each(self.b.fsub, x)

    def __mul__(self, x: Chunk) -> Chunk:
        return self.each(self.b.fmul, x)

    def rounded(self) -> Chunk:
        """Chunk rounded to the rows' element type, still in the computing type."""
        stored = self.b.bitcast(narrow(self.b, self.row.dtype, self.parts), self.row.raw)
        return Chunk(self.b, self.row, self.row.widen(self.b, stored))

    def in_order(self) -> Chunk:
        """Chunk with the elements one after another."""
        if self.row.dtype != types.uint16:
            return self
        n, (even, odd) = self.row.lanes, self.parts
        order = [i // 2 + i % 2 * n for i in range(2 * n)]
        return Chunk(self.b, self.row, [shuffle(self.b, even, odd, half) for half in (order[:n], order[n:])])

    def doubles(self) -> Chunk:
        """Chunk in float64: twice the vectors, unless they are float64."""
        if self.row.wide == DOUBLE:
            return self
        n = self.row.lanes // 2
        halves = [shuffle(self.b, x, x, list(range(i, i + n))) for x in self.parts for i in (0, n)]
        return Chunk(self.b, self.row, [self.b.fpext(half, ir.VectorType(DOUBLE, n)) for half in halves])


Step = Callable[[list[Chunk], list[Chunk]], tuple[Chunk, ...]]


def everywhere(b: Any, row: Rows, scalars: Any, count: int) -> list[Chunk]:
    """Each scalar in all lanes; with float32 rows, a float64 takes twice the vectors, as ``doubles`` makes them."""
    chunks = []
    for i in range(count):
        value = b.extract_value(scalars, i)
        times = 2 if value.type == DOUBLE != row.wide else 1
        chunks.append(Chunk(b, row, [splat(b, value, row.lanes // times)] * (row.parts * times)))
    return chunks


def map_rows(step: Step, *, streamed: int = 1) -> Any:
    """Compiled function (results, operands, scalars, following, shared, streaming).

    results = step(operands, scalars): tuples of rows of one type and length, and of scalars in the computing type.
    Where ``streaming``, the first ``streamed`` results go past the caches, and as much of the rows ``following`` is
    prefetched meanwhile. ``shared``: (), or memory for two chunks of each of these results, whether the last
    call's results end where this one's begin, and whether the next one's begin where these end.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        results, operands, scalars, following, shared, head, streaming = args
        row = Rows(sig.args[0][0].dtype)
        sources, targets, coming = (
            [address(context, b, t, b.extract_value(arrays, i), number(0)) for i, t in enumerate(types_)]
            for types_, arrays in zip(
                (sig.args[1], sig.args[0], sig.args[3]), (operands, results, following), strict=True
            )
        )
        constants = everywhere(b, row, scalars, len(sig.args[2]))
        first = context.make_array(sig.args[0][0])(context, b, b.extract_value(results, 0))
        (count,), elements = cgutils.unpack_tuple(b, first.shape), number(row.elements)

        def at(pointers: list[Any], place: Any) -> list[Any]:
            return [b.gep(p, [place]) for p in pointers]

        def chunk(place: Any, size: Any = None) -> list[Any]:
            values = step([Chunk(b, row, row.load(b, p, size)) for p in at(sources, place)], constants)
            return [narrow(b, row.dtype, value.parts) for value in values]

        def stream(v: Any, p: Any) -> None:
            store = b.store(v, b.bitcast(p, v.type.as_pointer()), align=VECTOR_BYTES)
            store.set_metadata("nontemporal", b.module.add_metadata([ir.IntType(32)(1)]))

        def store_part(place: Any, size: Any, common: int, by_line: Callable[..., None]) -> None:
            """Store ``size`` elements from ``place`` on, by ``by_line`` if ``shared``'s flag ``common`` is set."""
            vectors = chunk(place, size)
            for i, (v, p) in enumerate(zip(vectors, at(targets, place), strict=True)):
                if i < streamed and shared.type.elements:
                    lines = b.extract_value(shared, 0)
                    line = address(context, b, sig.args[4][0], lines, number(2 * row.elements * i))
                    with b.if_else(b.and_(streaming, b.extract_value(shared, common))) as (yes, no):
                        with yes:
                            by_line(v, p, line)
                        with no:
                            row.store_raw(b, v, p, size)
                else:
                    row.store_raw(b, v, p, size)

        def complete(v: Any, p: Any, line: Any) -> None:
            past = b.sub(elements, head)
            store_vector(b, v, b.gep(line, [past]))
            stream(load_vector(b, line, v.type), b.gep(p, [b.neg(past)]))

        with b.if_then(b.icmp_signed("!=", head, number(0)), likely=False):
            store_part(number(0), head, 1, complete)
        left = b.sub(count, head)
        with cgutils.for_range(b, b.udiv(left, elements)) as loop:
            place = b.add(head, b.mul(loop.index, elements))
            vectors, here = chunk(place), at(targets, place)
            with b.if_else(streaming) as (past, plain):
                with past:
                    for p in at(coming, place):
                        prefetch(b, p, NEAR)
                    for v, p in zip(vectors[:streamed], here, strict=False):
                        stream(v, p)
                with plain:
                    for v, p in zip(vectors[:streamed], here, strict=False):
                        store_vector(b, v, p)
            for v, p in zip(vectors[streamed:], here[streamed:], strict=True):
                store_vector(b, v, p)
        rest = b.urem(left, elements)
        with b.if_then(b.icmp_signed("!=", rest, number(0)), likely=False):
            store_part(b.sub(count, rest), rest, 2, lambda v, p, line: store_vector(b, v, line))
        return context.get_dummy_value()

    @intrinsic
    def rows(typingctx, results, operands, scalars, following, shared, head, streaming):
        return types.void(results, operands, scalars, following, shared, types.int64, types.boolean), codegen

    compared = max(streamed, 1)

    @device_function
    def aligned(results, operands, scalars, following, shared, streaming):
        """Map rows. ``streaming``: from the first whole vector on, if it is at one place in all results."""
        elements, head = chunk_elements(results[0]), 0
        if streaming:
            past = past_line(results[0]) % elements
            streaming = len(results[0]) >= elements
            for y in results[:compared]:
                streaming = streaming and past_line(y) % elements == past
            head = (elements - past) % elements if streaming else 0
        rows(results, operands, scalars, following, shared, head, streaming)

    return aligned


def over_lanes(b: Any, vectors: list[Any]) -> Any:
    """Float64 sum of all lanes."""
    total = reduce(b.fadd, vectors)
    if total.type.element != DOUBLE:
        total = b.fpext(total, ir.VectorType(DOUBLE, total.type.count))
    while total.type.count > 1:
        half = total.type.count // 2
        low, high = (shuffle(b, total, total, list(range(i, i + half))) for i in (0, half))
        total = b.fadd(low, high)
    return b.extract_element(total, ir.Constant(ir.IntType(32), 0))


def fold_rows(term: Step, *, sums: int = 1, double: bool = False) -> Any:
    """Intrinsic (operands, scalars, first, count): the sum of term(operands, scalars) over these elements.

    For a term of several ``sums``, a tuple. Sums are lane by lane in the computing type or float64, as the term is
    then, and over the lanes in float64. The order does not depend on where a row begins.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        operands, scalars, first, count = args
        row = Rows(sig.args[0][0].dtype)
        pointers = [
            address(context, b, t, b.extract_value(operands, i), first) for i, t in enumerate(sig.args[0])
        ]
        constants = everywhere(b, row, scalars, len(sig.args[1]))
        vector = ir.VectorType(DOUBLE, row.lanes // 2) if double and row.wide != DOUBLE else row.vector
        elements = [  # of a chunk, in each lane of its vectors
            ir.Constant(ir.VectorType(ir.IntType(64), vector.count), lanes[i : i + vector.count])
            for lanes in row.elements_of_lanes()
            for i in range(0, row.lanes, vector.count)
        ]
        zero = every(vector, 0.0)
        totals = [
            [[cgutils.alloca_once(b, vector) for _ in elements] for _ in range(UNROLLED)] for _ in range(sums)
        ]
        for total in (total for groups in totals for group in groups for total in group):
            b.store(zero, total)

        def step(at: Any, group: int, rest: Any = None) -> None:
            here = [b.gep(p, [at]) for p in pointers]
            values = term([Chunk(b, row, row.load(b, p, rest)) for p in here], constants)
            for value, groups in zip(values, totals, strict=True):
                for x, lanes, total in zip(value.parts, elements, groups[group], strict=True):
                    if rest is not None:
                        inside = b.icmp_signed("<", lanes, splat(b, rest, lanes.type.count))
                        x = b.select(inside, x, zero)
                    b.store(b.fadd(b.load(total), x), total)

        whole, rest = b.udiv(count, number(row.elements)), b.urem(count, number(row.elements))
        rounds = b.udiv(whole, number(UNROLLED))
        with cgutils.for_range(b, rounds) as loop:
            for i in range(UNROLLED):
                step(b.mul(b.add(b.mul(loop.index, number(UNROLLED)), number(i)), number(row.elements)), i)
        done = b.mul(rounds, number(UNROLLED))
        with cgutils.for_range(b, b.sub(whole, done)) as loop:
            step(b.mul(b.add(done, loop.index), number(row.elements)), 0)
        with b.if_then(b.icmp_signed("!=", rest, number(0)), likely=False):
            step(b.mul(whole, number(row.elements)), 0, rest)
        results = []
        for groups in totals:
            results.append(over_lanes(b, [b.load(total) for group in groups for total in group]))
        return results[0] if sums == 1 else context.make_tuple(b, sig.return_type, results)

    @intrinsic
    def fold(typingctx, operands, scalars, first, count):
        result = types.float64 if sums == 1 else types.UniTuple(types.float64, sums)
        return result(operands, scalars, types.int64, types.int64), codegen

    return fold
