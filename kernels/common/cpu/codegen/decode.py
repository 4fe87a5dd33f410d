"""Vector steps of attention over a cache, as LLVM IR: lanes along head_dim, rows in place.

A K or V row is identified by its address, so pages and strides make no difference here; decode_rows.py
converts it to vectors. One call takes a few ``keys`` of a tile of ``rows`` (1, 2 or 4) query rows: their sums,
weights and addresses are in registers.

Scores are stored as s[key, row] in one flat array: lane c belongs to row c % rows. Sums and maxima are
vertical. ``rows`` and ``keys`` come as tuples of that length, of which only the type matters: the code is unrolled
by them.
"""

from __future__ import annotations

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    dot_bfloat16,
    every,
    fma,
    lane_sums,
    load_vector,
    maximum,
    number,
    prefetch,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows
from gpu_ops.kernels.common.cpu.codegen.exp2 import FLOAT32, FLOAT64, exp2
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, types
from gpu_ops.kernels.common.cpu.codegen.target import NEAR, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.jit import generic

# Keys of 8 or 16 bits per element at a time, so that a vector of a query, or of O, serves all. Two rows of 2 KB
# are a page of 4 KB: alternating between more rows costs a fifth of the memory bandwidth. That is worth it for
# values only, because O, which is larger, is read and written for each. Other keys come one by one, in memory order.
SCORED_KEYS, ADDED_KEYS = 2, 4
STRAIGHT = 128  # elements of a row that are unrolled: setting up a loop takes as long as a few chunks
_I8 = ir.IntType(8)
_SIZE = types.intp


def _each_tile(context, b, x_type, x, places, later, sizes, count, step):
    """Run ``step(n, rows)`` for each tile n of query rows, all ``sizes`` = (KV heads, tiles of one), head after head.

    ``rows``: pointers to the head's ``count`` rows, whose addresses for the first head are at ``places``, and to what
    is prefetched meanwhile: ``later`` = (offset in places; from there, bytes per head and per row).
    All tiles of a head prefetch the same lines: repeats are free.
    """
    strides = context.make_array(x_type)(context, b, x).strides
    head_stride = b.extract_value(strides, 2) if x_type.ndim == 4 else number(0)  # a matrix is one head
    ahead, per_head, per_row = (b.extract_value(later, i) for i in range(3))
    heads, tiles = (b.extract_value(sizes, i) for i in range(2))
    here = [b.load(b.gep(places, [number(j)])) for j in range(count)]
    ahead_start = b.load(b.gep(places, [ahead]))
    with cgutils.for_range(b, heads) as head:
        shift, beyond = b.mul(head.index, head_stride), b.add(ahead_start, b.mul(head.index, per_head))
        starts = [b.add(address_, shift) for address_ in here]
        starts += [b.add(beyond, b.mul(per_row, number(j))) for j in range(count)]
        pointers = [b.inttoptr(start, _I8.as_pointer()) for start in starts]
        with cgutils.for_range(b, tiles) as tile:
            n = b.add(b.mul(head.index, tiles), tile.index)
            step(n, list(zip(pointers[:count], pointers[count:], strict=True)))


def _row_of(context, b, array_type, array, index, at=None):
    """Pointer to a row of a C-contiguous matrix, or to its element ``at``."""
    matrix = context.make_array(array_type)(context, b, array)
    start = b.mul(index, b.extract_value(matrix.shape, 1))
    return b.gep(matrix.data, [start if at is None else b.add(start, at)])


def _keys(rows, x, narrow):
    row = Rows(x.dtype)
    return (0,) * (min(narrow, row.lanes // rows.count) if row.parts > 1 else 1)


@generic
def scored_keys(rows, x):
    """Tuple with one entry per key that ``score_keys`` takes at a time from a cache like ``x``."""
    keys = _keys(rows, x, SCORED_KEYS)
    return lambda rows, x: keys


@generic
def added_keys(rows, x):
    """Tuple with one entry per key that ``add_values`` takes at a time."""
    keys = _keys(rows, x, ADDED_KEYS)
    return lambda rows, x: keys


def _each_chunk(b, row, dim, step):
    """Run ``step(index, byte)`` for every whole chunk of ``dim`` elements, then ``step(index, byte, rest)``."""
    full, rest = b.sdiv(dim, number(row.elements)), b.srem(dim, number(row.elements))

    def chunk(i, *rest):
        step(b.mul(i, number(row.elements)), b.mul(i, number(VECTOR_BYTES)), *rest)

    with b.if_else(b.icmp_signed("==", dim, number(STRAIGHT))) as (straight, otherwise):
        with straight:
            for i in range(STRAIGHT // row.elements):
                chunk(number(i))
        with otherwise:
            with cgutils.for_range(b, full) as loop:
                chunk(loop.index)
            with b.if_then(b.icmp_signed("!=", rest, number(0))):
                chunk(full, rest)


@intrinsic
def score_keys(typingctx, rows, keys, x, places, first, later, sizes, q, dim, s, at, scale):
    """s[tile, at:] = scale * q[row] . x[key] for all ``keys``, whose addresses are ``places[first:]``, and all tiles.

    As many rows are prefetched elsewhere: see :func:`_each_tile`. Where q holds words of two bfloat16, one
    instruction multiplies them with those of x; else both are in the order of the vectors.
    """
    n_rows, n_keys, pairs = rows.count, keys.count, q.dtype == types.uint32

    def codegen(context, b, sig, args):
        _, _, x_, places_, first_, later_, sizes_, q_, dim_, s_, at_, scale_ = args
        row = Rows(x.dtype)
        words = ir.VectorType(ir.IntType(32), row.lanes)
        multiply_add, vector = (dot_bfloat16, words) if pairs else (fma, row.vector)
        acc = [cgutils.alloca_once(b, row.vector) for _ in range(n_keys * n_rows)]

        def tile(n, pointers):
            queries = [
                _row_of(context, b, sig.args[7], q_, b.add(b.mul(n, number(n_rows)), number(r)))
                for r in range(n_rows)
            ]
            for total in acc:
                b.store(row.zero, total)

            def step(element, byte, rest=None):
                values = []
                for source, coming in pointers:
                    raw = row.load_raw(b, b.gep(source, [byte]), rest)
                    values.append([raw] if pairs else row.widen(b, raw))
                    prefetch(b, b.gep(coming, [byte]), NEAR)
                for part in range(len(values[0])):
                    place = b.udiv(element, number(2)) if pairs else b.add(element, number(part * row.lanes))
                    for r, query in enumerate(queries):
                        factor = load_vector(b, b.gep(query, [place]), vector)
                        for j in range(n_keys):
                            total = acc[j * n_rows + r]
                            b.store(multiply_add(b, values[j][part], factor, b.load(total)), total)

            _each_chunk(b, row, dim_, step)
            scores = b.fmul(lane_sums(b, [b.load(total) for total in acc]), splat(b, scale_, row.lanes))
            kept = shuffle(b, scores, scores, list(range(len(acc))))
            store_vector(b, kept, _row_of(context, b, sig.args[9], s_, n, at_))

        first_place = address(context, b, sig.args[3], places_, first_)
        _each_tile(context, b, sig.args[2], x_, first_place, later_, sizes_, n_keys, tile)
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, keys, x, places, i, later, sizes, q, i, s, i, s.dtype), codegen


@intrinsic
def weigh_scores(typingctx, rows, s, s_at, n, row_max, row_sum, at):
    """s = exp2(s - row_max); updates maxima and sums of rows. The factor for older sums follows the n weights.

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
        b.store(row.zero, total)  # a separate sum per block: small terms keep their digits
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
def add_values(typingctx, rows, keys, x, places, first, later, sizes, p, at, o, dim):
    """o[row] += sum over the ``keys`` of p[tile, at:][key, row] * x[key], for all tiles as in :func:`score_keys`.

    Their weights stay in registers (one each, in all lanes), and O is streamed, chunk after chunk.
    """
    n_rows, n_keys = rows.count, keys.count

    def codegen(context, b, sig, args):
        _, _, x_, places_, first_, later_, sizes_, p_, at_, o_, dim_ = args
        row = Rows(x.dtype)

        def tile(n, pointers):
            weights = _row_of(context, b, sig.args[7], p_, n, at_)
            targets = [
                _row_of(context, b, sig.args[9], o_, b.add(b.mul(n, number(n_rows)), number(r)))
                for r in range(n_rows)
            ]
            factors = [
                splat(b, b.load(b.gep(weights, [number(i)])), row.lanes) for i in range(n_keys * n_rows)
            ]

            def step(element, byte, rest=None):
                values = []
                for source, coming in pointers:
                    values.append(row.load(b, b.gep(source, [byte]), rest))
                    prefetch(b, b.gep(coming, [byte]), NEAR)
                for part in range(row.parts):
                    column = b.add(element, number(part * row.lanes))
                    for r, target in enumerate(targets):
                        slot = b.gep(target, [column])
                        total = load_vector(b, slot, row.vector)
                        for j in range(n_keys):
                            total = fma(b, values[j][part], factors[j * n_rows + r], total)
                        store_vector(b, total, slot)

            _each_chunk(b, row, dim_, step)

        first_place = address(context, b, sig.args[3], places_, first_)
        _each_tile(context, b, sig.args[2], x_, first_place, later_, sizes_, n_keys, tile)
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, keys, x, places, i, later, sizes, p, i, o, i), codegen
