"""The vector steps of attention over a cache, as LLVM IR: lanes along head_dim, rows as they lie.

A K or V row is named by its address, so pages and strides are all the same here; decode_rows.py
says how it becomes vectors. One call takes a few ``keys`` of a tile of ``rows`` (1, 2 or 4) query rows: their sums,
weights and addresses are in registers.

Scores lie as s[key, row] in one flat array: lane c belongs to row c % rows. Sums and maxima are
vertical. ``rows`` and ``keys`` come as tuples of that length, of which only the type matters: the code is unrolled
by them.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir.build import (
    address,
    dot_bfloat16,
    every,
    fma,
    load_vector,
    maximum,
    number,
    prefetch,
    shuffle,
    splat,
    store_vector,
    sum_lanes,
)
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.exp2 import FLOAT32, FLOAT64, exp2
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES
from gpu_ops.kernels.numba_cpu.jit import overload

# Keys of 16-bit elements at a time: a vector of a query then serves them all, and widening is most of the work.
# Others come one by one, in the order of memory: that reads 80 % of what memory gives, where four rows at once, 4 KB
# apart, read 70 (a cache of keys that stays in the processor's own is read 1.5 times as fast in fours).
NARROW_KEYS = 4
_I8 = ir.IntType(8)
_SIZE = types.intp


def _rows_at(context, b, places_type, places, first, shift, ahead, count):
    """Pointers to ``count`` rows, and to what is read ``ahead`` rows later."""
    here = address(context, b, places_type, places, first)
    there = b.gep(here, [ahead])

    def pointer(addresses, j):
        return b.inttoptr(b.add(b.load(b.gep(addresses, [number(j)])), shift), _I8.as_pointer())

    return [(pointer(here, j), pointer(there, j)) for j in range(count)]


def keys_of(rows, x):
    """As many keys of a cache like ``x`` as ``score_keys`` and ``add_values`` take at a time, as a tuple."""
    raise TypeError("compiled code only")


@overload(keys_of)
def _keys_of(rows, x):
    row = Rows(x.dtype)
    keys = (0,) * (min(NARROW_KEYS, row.lanes // rows.count) if row.parts == 2 else 1)
    return lambda rows, x: keys


def _each_chunk(b, row, dim, step):
    """``step(index, byte)`` for every whole chunk of ``dim`` elements, then ``step(index, byte, rest)``."""
    full, rest = b.sdiv(dim, number(row.elements)), b.srem(dim, number(row.elements))
    with cgutils.for_range(b, full) as loop:
        step(b.mul(loop.index, number(row.elements)), b.mul(loop.index, number(VECTOR_BYTES)))
    with b.if_then(b.icmp_signed("!=", rest, number(0))):
        step(b.mul(full, number(row.elements)), b.mul(full, number(VECTOR_BYTES)), rest)


@intrinsic
def score_keys(typingctx, rows, keys, x, places, first, shift, ahead, q, q_at, q_stride, dim, s, s_at, scale):
    """s[key, row] = scale * q[row] . x[key] for all ``keys``, whose addresses are ``places[first:] + shift``.

    Meanwhile the rows ``ahead`` places on are asked for. Where q holds words of two bfloat16, one instruction
    multiplies them with those of x; else both are in the order of the vectors.
    """
    n_rows, n_keys, pairs = rows.count, keys.count, q.dtype == types.uint32

    def codegen(context, b, sig, args):
        _, _, _, places_, first_, shift_, ahead_, q_, q_at_, q_stride_, dim_, s_, s_at_, scale_ = args
        row = Rows(x.dtype)
        words = ir.VectorType(ir.IntType(32), row.lanes)
        queries = [
            address(context, b, sig.args[7], q_, b.add(q_at_, b.mul(q_stride_, number(r))))
            for r in range(n_rows)
        ]
        pointers = _rows_at(context, b, sig.args[3], places_, first_, shift_, ahead_, n_keys)
        acc = [cgutils.alloca_once(b, row.vector) for _ in range(n_keys * n_rows)]
        for total in acc:
            b.store(row.zero, total)

        def step(element, byte, rest=None):
            values = []
            for source, coming in pointers:
                raw = row.load_raw(b, b.gep(source, [byte]), rest)
                values.append([raw] if pairs else row.widen(b, raw))
                prefetch(b, b.gep(coming, [byte]))
            multiply_add, vector = (dot_bfloat16, words) if pairs else (fma, row.vector)
            for part in range(len(values[0])):
                place = b.udiv(element, number(2)) if pairs else b.add(element, number(part * row.lanes))
                for r, query in enumerate(queries):
                    factor = load_vector(b, b.gep(query, [place]), vector)
                    for j in range(n_keys):
                        total = acc[j * n_rows + r]
                        b.store(multiply_add(b, values[j][part], factor, b.load(total)), total)

        _each_chunk(b, row, dim_, step)
        scores = b.fmul(sum_lanes(b, [b.load(total) for total in acc]), splat(b, scale_, row.lanes))
        kept = shuffle(b, scores, scores, list(range(len(acc))))
        store_vector(b, kept, address(context, b, sig.args[11], s_, s_at_))
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, keys, x, places, i, i, i, q, i, i, i, s, i, s.dtype), codegen


@intrinsic
def weigh_scores(typingctx, rows, s, s_at, n, row_max, row_sum, at):
    """s = exp2(s - row_max), maxima and sums of rows move along; behind the n weights: the factor for older sums.

    ``row_sum`` [at] is per lane. A row that has seen nothing yet keeps its -inf: -inf - (-inf) would be NaN.
    """
    n_rows = rows.count

    def codegen(context, b, sig, args):
        row = Rows(s.dtype)
        polynomial = FLOAT64 if s.dtype == types.float64 else FLOAT32
        scores = address(context, b, sig.args[1], args[1], args[2])
        top_at, sum_at = (address(context, b, sig.args[i], args[i], args[6]) for i in (4, 5))
        old = load_vector(b, top_at, row.vector)
        top, total = cgutils.alloca_once_value(b, old), cgutils.alloca_once_value(b, row.zero)
        b.store(row.zero, total)  # a block by itself: small terms keep their digits
        vectors = b.sdiv(args[3], number(row.lanes))
        with cgutils.for_range(b, vectors) as loop:
            x = load_vector(b, b.gep(scores, [b.mul(loop.index, number(row.lanes))]), row.vector)
            b.store(maximum(b, [x, b.load(top)]), top)
        new = b.load(top)
        step = n_rows
        while step < row.lanes:  # lanes of the same row
            new = maximum(b, [new, shuffle(b, new, new, [c ^ step for c in range(row.lanes)])])
            step *= 2
        store_vector(b, new, top_at)
        safe = b.select(b.fcmp_ordered("==", new, every(row.vector, float("-inf"))), row.zero, new)
        with cgutils.for_range(b, vectors) as loop:
            place = b.gep(scores, [b.mul(loop.index, number(row.lanes))])
            weight = exp2(b, b.fsub(load_vector(b, place, row.vector), safe), polynomial)
            store_vector(b, weight, place)
            b.store(b.fadd(b.load(total), weight), total)
        alpha = exp2(b, b.fsub(old, safe), polynomial)
        store_vector(b, alpha, b.gep(scores, [args[3]]))
        store_vector(b, fma(b, load_vector(b, sum_at, row.vector), alpha, b.load(total)), sum_at)
        return context.get_dummy_value()

    return types.void(rows, s, _SIZE, _SIZE, row_max, row_sum, _SIZE), codegen


@intrinsic
def add_values(typingctx, rows, keys, x, places, first, shift, ahead, p, p_at, o, o_at, o_stride, dim):
    """o[row] += sum over the ``keys`` of p[key, row] * x[key]; addresses as in :func:`score_keys`.

    Their weights stay in registers (one each, in all lanes), and O comes by, chunk after chunk.
    """
    n_rows, n_keys = rows.count, keys.count

    def codegen(context, b, sig, args):
        _, _, _, places_, first_, shift_, ahead_, p_, p_at_, o_, o_at_, o_stride_, dim_ = args
        row = Rows(x.dtype)
        weights = address(context, b, sig.args[7], p_, p_at_)
        targets = [
            address(context, b, sig.args[9], o_, b.add(o_at_, b.mul(o_stride_, number(r))))
            for r in range(n_rows)
        ]
        pointers = _rows_at(context, b, sig.args[3], places_, first_, shift_, ahead_, n_keys)
        factors = [splat(b, b.load(b.gep(weights, [number(i)])), row.lanes) for i in range(n_keys * n_rows)]

        def step(element, byte, rest=None):
            values = []
            for source, coming in pointers:
                values.append(row.load(b, b.gep(source, [byte]), rest))
                prefetch(b, b.gep(coming, [byte]))
            for part in range(row.parts):
                column = b.add(element, number(part * row.lanes))
                for r, target in enumerate(targets):
                    slot = b.gep(target, [column])
                    total = load_vector(b, slot, row.vector)
                    for j in range(n_keys):
                        total = fma(b, values[j][part], factors[j * n_rows + r], total)
                    store_vector(b, total, slot)

        _each_chunk(b, row, dim_, step)
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, keys, x, places, i, i, i, p, i, o, i, i, i), codegen
