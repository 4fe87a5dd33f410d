"""The vector steps of attention over a cache, as LLVM IR: lanes along head_dim, rows as they lie.

A K or V row is named by its address, so pages and strides are all the same here; decode_rows.py
says how it becomes vectors.

Scores of a tile of ``rows`` (1, 2 or 4) query rows lie as s[key, row] in one flat array: a vector
holds LANES / rows keys, and lane c belongs to row c % rows. Sums and maxima are vertical. ``rows`` comes
as a tuple of that length, of which only the type matters: the code is unrolled by it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from gpu_ops.kernels.numba_cpu.ir.build import (
    address,
    fma,
    load_vector,
    number,
    prefetch,
    shuffle,
    splat,
    store_vector,
    sum_lanes,
)
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES

ACCUMULATORS = 16 if VECTOR_BYTES == 64 else 8  # vectors that stay in registers: half of them
MANY = 8
_I8 = ir.IntType(8)
_SIZE = types.intp


def _pointer(b: Any, addresses: Any, j: Any, shift: Any) -> Any:
    return b.inttoptr(b.add(b.load(b.gep(addresses, [j])), shift), _I8.as_pointer())


@intrinsic
def score_keys(typingctx, rows, x, keys, shift, fetch, ahead, first, limit, q, q_at, q_stride, dim, s, s_at):
    """s[key, row] = q[row] . x[key] for LANES / rows keys, whose addresses are ``keys[first:] + shift``.

    Meanwhile the rows at ``fetch[first:] + ahead``, of ``limit`` bytes, are asked for: they come next.
    """
    n_rows = rows.count

    def codegen(context, b, sig, args):
        _, _, keys_, shift_, fetch_, ahead_, first_, limit_, q_, q_at_, q_stride_, dim_, s_, s_at_ = args
        row = Rows(x.dtype)
        n_keys = row.lanes // n_rows
        group = min(n_keys, 4)  # as many addresses as fit in registers
        queries = [
            address(context, b, sig.args[8], q_, b.add(q_at_, b.mul(q_stride_, number(r))))
            for r in range(n_rows)
        ]
        sums = []
        for start in range(0, n_keys, group):
            at = b.add(first_, number(start))
            here = address(context, b, sig.args[2], keys_, at)
            there = address(context, b, sig.args[4], fetch_, at)
            sources = [_pointer(b, here, number(j), shift_) for j in range(group)]
            coming = [_pointer(b, there, number(j), ahead_) for j in range(group)]
            acc = [cgutils.alloca_once(b, row.vector) for _ in range(group * n_rows)]
            for total in acc:
                b.store(row.zero, total)

            def step(index, count=None, sources=sources, coming=coming, acc=acc):
                byte = b.mul(index, number(VECTOR_BYTES))
                element = b.mul(index, number(row.elements))
                inside = b.select(b.icmp_signed("<", byte, limit_), byte, number(0))
                values = []
                for source, target in zip(sources, coming, strict=True):
                    values.append(row.load(b, b.gep(source, [byte]), count))
                    prefetch(b, b.gep(target, [inside]))
                for part in range(row.parts):
                    column = b.add(element, number(part * row.lanes))
                    for r, query in enumerate(queries):
                        factor = load_vector(b, b.gep(query, [column]), row.vector)
                        for j in range(group):
                            total = acc[j * n_rows + r]
                            b.store(fma(b, values[j][part], factor, b.load(total)), total)

            full = b.sdiv(dim_, number(row.elements))
            rest = b.srem(dim_, number(row.elements))
            with cgutils.for_range(b, full) as loop:
                step(loop.index)
            with b.if_then(b.icmp_signed("!=", rest, number(0))):
                step(full, rest)
            sums += [b.load(total) for total in acc]
        store_vector(b, sum_lanes(b, sums), address(context, b, sig.args[12], s_, s_at_))
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, x, keys, i, fetch, i, i, i, q, i, i, i, s, i), codegen


@intrinsic
def subtract_max(typingctx, rows, s, s_at, n, row_max, max_at):
    """s -= its rows' maxima, ``row_max`` among them and moved along; behind the n scores: old - new maximum.

    A row that has seen nothing yet keeps its -inf: -inf - (-inf) would be NaN.
    """
    n_rows = rows.count

    def codegen(context, b, sig, args):
        row = Rows(s.dtype)
        scores = address(context, b, sig.args[1], args[1], args[2])
        kept = address(context, b, sig.args[4], args[4], args[5])
        bigger = lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)  # noqa: E731  # NaN x: y
        old = load_vector(b, kept, row.vector)
        top = cgutils.alloca_once_value(b, old)
        vectors = b.sdiv(args[3], number(row.lanes))
        with cgutils.for_range(b, vectors) as loop:
            x = load_vector(b, b.gep(scores, [b.mul(loop.index, number(row.lanes))]), row.vector)
            b.store(bigger(x, b.load(top)), top)
        new = b.load(top)
        step = n_rows
        while step < row.lanes:  # lanes of the same row
            new = bigger(new, shuffle(b, new, new, [c ^ step for c in range(row.lanes)]))
            step *= 2
        store_vector(b, new, kept)
        lowest = ir.Constant(row.vector, [float("-inf")] * row.lanes)
        safe = b.select(b.fcmp_ordered("==", new, lowest), row.zero, new)
        with cgutils.for_range(b, vectors) as loop:
            target = b.gep(scores, [b.mul(loop.index, number(row.lanes))])
            store_vector(b, b.fsub(load_vector(b, target, row.vector), safe), target)
        store_vector(b, b.fsub(old, safe), b.gep(scores, [args[3]]))
        return context.get_dummy_value()

    return types.void(rows, s, _SIZE, _SIZE, row_max, _SIZE), codegen


@intrinsic
def add_weights(typingctx, p, p_at, n, row_sum, sum_at):
    """row_sum = row_sum * alpha + sum of p[:n] per lane; alpha lies behind the n weights."""

    def codegen(context, b, sig, args):
        row = Rows(p.dtype)
        weights = address(context, b, sig.args[0], args[0], args[1])
        kept = address(context, b, sig.args[3], args[3], args[4])
        alpha = load_vector(b, b.gep(weights, [args[2]]), row.vector)
        total = cgutils.alloca_once_value(b, row.zero)  # a block by itself: small terms keep their digits
        b.store(row.zero, total)
        with cgutils.for_range(b, b.sdiv(args[2], number(row.lanes))) as loop:
            x = load_vector(b, b.gep(weights, [b.mul(loop.index, number(row.lanes))]), row.vector)
            b.store(b.fadd(b.load(total), x), total)
        store_vector(b, fma(b, load_vector(b, kept, row.vector), alpha, b.load(total)), kept)
        return context.get_dummy_value()

    return types.void(p, _SIZE, _SIZE, row_sum, _SIZE), codegen


@intrinsic(prefer_literal=True)
def add_values(
    typingctx,
    rows,
    chunks,
    x,
    values,
    shift,
    fetch,
    ahead,
    n,
    limit,
    byte,
    rest,
    p,
    p_at,
    alpha_at,
    o,
    o_at,
    o_stride,
):
    """o[row] = o[row] * alpha[row] + sum over n keys of p[key, row] * x[key], the rows taken from ``byte`` on.

    ``chunks`` MANY: as many as the registers hold; 1: one; 0: the last one, of ``rest`` elements only.
    Addresses as in :func:`score_keys`; asks for the same bytes of the rows that come next.
    """
    n_rows = rows.count
    partial = chunks.literal_value == 0
    n_chunks = _chunks_in_registers(n_rows, x.dtype) if chunks.literal_value == MANY else 1

    def codegen(context, b, sig, args):
        values_, shift_, fetch_, ahead_, n_, limit_, byte_, rest_ = args[3:11]
        p_, p_at_, alpha_at_, o_, o_at_, o_stride_ = args[11:]
        row = Rows(x.dtype)
        vectors = n_chunks * row.parts
        weights = address(context, b, sig.args[11], p_, p_at_)
        alpha = address(context, b, sig.args[11], p_, alpha_at_)
        start = b.add(shift_, byte_)
        start_ahead = b.add(ahead_, b.select(b.icmp_signed("<", byte_, limit_), byte_, number(0)))
        here = address(context, b, sig.args[3], values_, number(0))
        there = address(context, b, sig.args[5], fetch_, number(0))
        acc, targets, factors = [], [], []
        for r in range(n_rows):
            target = address(context, b, sig.args[14], o_, b.add(o_at_, b.mul(o_stride_, number(r))))
            factor = splat(b, b.load(b.gep(alpha, [number(r)])), row.lanes)
            for i in range(vectors):
                targets.append(b.gep(target, [number(i * row.lanes)]))
                factors.append(factor)
                acc.append(cgutils.alloca_once(b, row.vector))
                b.store(row.zero, acc[-1])
        with cgutils.for_range(b, n_) as loop:
            source = _pointer(b, here, loop.index, start)
            coming = _pointer(b, there, loop.index, start_ahead)
            loaded = []
            for c in range(n_chunks):
                step = number(c * VECTOR_BYTES)
                loaded += row.load(b, b.gep(source, [step]), rest_ if partial else None)
                if c * VECTOR_BYTES % 64 == 0:
                    prefetch(b, b.gep(coming, [step]))
            at = b.gep(weights, [b.mul(loop.index, number(n_rows))])
            for r in range(n_rows):
                weight = splat(b, b.load(b.gep(at, [number(r)])), row.lanes)
                for i in range(vectors):
                    total = acc[r * vectors + i]
                    b.store(fma(b, loaded[i], weight, b.load(total)), total)
        for target, factor, total in zip(targets, factors, acc, strict=True):
            store_vector(b, fma(b, load_vector(b, target, row.vector), factor, b.load(total)), target)
        return context.get_dummy_value()

    i = _SIZE
    return types.void(rows, chunks, x, values, i, fetch, i, i, i, i, i, p, i, i, o, i, i), codegen


def chunks_in_registers(rows, x):
    """Chunks of a row of array ``x`` that :func:`add_values` does at once for MANY."""
    raise TypeError("compiled code only")


@overload(chunks_in_registers)
def _overload_chunks_in_registers(rows, x):
    chunks = _chunks_in_registers(rows.count, x.dtype)
    return lambda rows, x: chunks


def _chunks_in_registers(rows: int, dtype: Any) -> int:
    return max(min(ACCUMULATORS // rows, 8) // (2 if dtype.bitwidth == 16 else 1), 1)
