"""Matrix-product micro-kernels with C in registers (an array in a Numba loop would live in memory):

                    n: NV vectors of LANES
                  +--------+--------+
    MR rows of A  |  acc   |  acc   |    per step k: NV loads of B, MR broadcasts of A, MR * NV
    (broadcast)   |  ...   |  ...   |    fused multiply-adds; C is touched once, at the end
                  +--------+--------+

Two forms differ in the layout of A, so that no operand is ever transposed in memory:

    gemm_rows     C[m, n] (+)= sum_k A[m, k] B[k, n]
    gemm_columns  C[m, n] (+)= sum_k A[k, m] B[k, n]

float32 and float64, and bfloat16 where the CPU multiplies it (``target.DOT_BFLOAT16``): A and B are then uint32
arrays whose element k is the pair of bfloat16 of steps 2k (low half) and 2k + 1, and C is float32. Where the CPU has
tile registers (``target.TILES``) whole tiles of such a product by rows are multiplied there (codegen/tiles.py).
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import (
    address,
    dot_bfloat16,
    every,
    fma,
    hidden,
    load_vector,
    maximum,
    number,
    prefetcher,
    shuffle,
    splat,
    store_vector,
)
from gpu_ops.kernels.common.cpu.codegen.memory import lanes
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.softmax import largest_scores
from gpu_ops.kernels.common.cpu.codegen.target import CONVERTS_FLOAT16, MR, TILES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, multiply_tiles
from gpu_ops.kernels.common.cpu.jit import constant, device_function, generic

ROUND = 4  # steps of k between loop tests: the CPU predicts the end of a loop of 16 rounds, not of 64
_IR = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.uint32: ir.IntType(32)}


def _micro(columns: bool, nv: int, scaled: bool = False, largest: bool = False, mr: int = MR) -> Any:
    """C tile of ``mr`` rows by ``nv`` vectors; offsets and leading dimensions count elements (of pairs: words).

    ``columns``: A is (k, m). ``scaled``, ``largest``: an epilogue reads, or keeps, a number per column of C.
    """

    def emit(types_, args, context, builder):
        c, b = types_[0], types_[6]
        width = VECTOR_BYTES // (c.dtype.bitwidth // 8)
        align = c.dtype.bitwidth // 8
        vector = ir.VectorType(_IR[c.dtype], width)
        factors = ir.VectorType(_IR[b.dtype], width)
        multiply_add = dot_bfloat16 if b.dtype == types.uint32 else fma

        def base(index: int) -> Any:
            array = context.make_array(types_[index])(context, builder, args[index])
            return builder.gep(array.data, [args[index + 1]])

        pc, pa, pb = base(0), base(3), base(6)
        ldc_, lda_, ldb_, k_ = args[2], args[5], args[8], args[9]
        tile = [(m, n) for m in range(mr) for n in range(nv)]
        # Three rows of A per start, at 0, 1 and 2 times lda, are addresses that a load can hold. Where LLVM sees how
        # starts are related it adds them up in a chain, loads four steps of a row at once and spills: half more time.
        starts = [hidden(builder, builder.gep(pa, [builder.mul(lda_, number(m))])) for m in range(0, mr, 3)]
        acc = [cgutils.alloca_once(builder, vector) for _ in tile]
        for total in acc:
            builder.store(every(vector, 0.0), total)

        def step(kk: Any) -> None:
            row_b = builder.gep(pb, [builder.mul(kk, ldb_)])
            vb = [
                builder.load(
                    builder.bitcast(builder.gep(row_b, [number(n * width)]), factors.as_pointer()),
                    align=align,
                )
                for n in range(nv)
            ]
            if columns:
                row_a = builder.gep(pa, [builder.mul(kk, lda_)])
                pointers = [builder.gep(row_a, [number(m)]) for m in range(mr)]
            else:
                rows = [builder.gep(start, [kk]) for start in starts]
                pointers = [builder.gep(rows[m // 3], [builder.mul(lda_, number(m % 3))]) for m in range(mr)]
            va = [splat(builder, builder.load(p), width) for p in pointers]
            for (m, n), total in zip(tile, acc, strict=True):
                builder.store(multiply_add(builder, va[m], vb[n], builder.load(total)), total)

        rounds = builder.sdiv(k_, number(ROUND))
        # a round of half a panel takes half the time, for the same amount of A
        ask = (lambda: None) if scaled or largest else prefetcher(builder, args[11], max(1, 4 // nv))
        with cgutils.for_range(builder, rounds) as loop:
            ask()
            first = builder.mul(loop.index, number(ROUND))
            for i in range(ROUND):
                step(builder.add(first, number(i)))
        done = builder.mul(rounds, number(ROUND))
        with cgutils.for_range(builder, builder.sub(k_, done)) as loop:
            step(builder.add(done, loop.index))
        result = [builder.load(total) for total in acc]
        targets = [
            builder.bitcast(
                builder.gep(pc, [builder.add(builder.mul(ldc_, number(m)), number(n * width))]),
                vector.as_pointer(),
            )
            for m, n in tile
        ]
        if scaled:
            at = base(10)
            factor = [load_vector(builder, builder.gep(at, [number(n * width)]), vector) for n in range(nv)]
            for (_, n), pointer, value in zip(tile, targets, result, strict=True):
                total = fma(builder, builder.load(pointer, align=align), factor[n], value)
                builder.store(total, pointer, align=align)
            return context.get_dummy_value()
        if largest:
            for n in range(nv):
                column = [value for (_, at), value in zip(tile, result, strict=True) if at == n]
                pointer = builder.gep(base(10), [number(n * width)])
                store_vector(
                    builder, maximum(builder, [*column, load_vector(builder, pointer, vector)]), pointer
                )
            for pointer, value in zip(targets, result, strict=True):
                builder.store(value, pointer, align=align)
            return context.get_dummy_value()
        with builder.if_else(args[10]) as (add, replace):
            with add:
                for pointer, value in zip(targets, result, strict=True):
                    total = builder.fadd(builder.load(pointer, align=align), value)
                    builder.store(total, pointer, align=align)
            with replace:
                for pointer, value in zip(targets, result, strict=True):
                    builder.store(value, pointer, align=align)
        return context.get_dummy_value()

    i = types.int64

    @intrinsic
    def micro(typingctx, c, c0, ldc, a, a0, lda, b, b0, ldb, k, accumulate, ahead):
        def codegen(context, builder, sig, args):
            return emit(sig.args, args, context, builder)

        return signature(types.void, c, i, i, a, i, i, b, i, i, i, types.boolean, ahead), codegen

    @intrinsic
    def micro_epilogue(typingctx, c, c0, ldc, a, a0, lda, b, b0, ldb, k, per_column, per_column0):
        def codegen(context, builder, sig, args):
            return emit(sig.args, args, context, builder)

        return signature(types.void, c, i, i, a, i, i, b, i, i, i, per_column, i), codegen

    return micro_epilogue if scaled or largest else micro


rows_1, rows_2, columns_1, columns_2 = (_micro(columns, nv) for columns in (False, True) for nv in (1, 2))
_scaled_1, _scaled_2 = (_micro(True, nv, scaled=True) for nv in (1, 2))
_largest_1, _largest_2 = (_micro(False, nv, largest=True) for nv in (1, 2))


def transpose_vectors(b: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square by interleaving rows i and i + half, log2(width) times."""
    width, half = len(rows), len(rows) // 2
    orders = [[i // 2 + start + i % 2 * width for i in range(width)] for start in (0, half)]
    for _ in range(width.bit_length() - 1):
        rows = [shuffle(b, rows[i], rows[i + half], order) for i in range(half) for order in orders]
    return rows


def square_elements(w: Any, step: Any) -> int:
    """Elements of a row in a square of ``w`` that :func:`rows_in_place` transposes, for steps of type ``step``.

    0: none, its elements are widened one by one.
    """
    width = VECTOR_BYTES * 8 // step.bitwidth
    if w == types.uint16:  # two bfloat16 per lane
        return 2 * width
    return width if w == step or (w == types.int16 and CONVERTS_FLOAT16) else 0


def _in_place(mr: int) -> Any:
    """C[m, n] (+)= sum_k A[m, k] W[n, k] for one vector of rows n of W, read in place, and ``mr`` rows of A.

    Squares of W, a vector from each row, are transposed in registers, so that lanes are rows and a sum adds up in the
    order of k. ``rest`` steps follow from ``panel``, one vector of W's rows per step.
    """

    def emit(types_, args, context, b):
        factor, stored = types_[10].dtype, types_[6].dtype
        width = VECTOR_BYTES * 8 // factor.bitwidth
        elements = square_elements(stored, factor)
        factors = ir.VectorType(_IR[factor], width)
        totals = ir.VectorType(_IR[types_[0].dtype], width)
        multiply_add = dot_bfloat16 if factor == types.uint32 else fma
        paired = factor == types.float32 and stored == types.uint16
        pc, pa, pw, panel = (address(context, b, types_[i], args[i], args[i + 1]) for i in (0, 3, 6, 10))
        ldc, lda, ldw, squares, rest, accumulate = (args[i] for i in (2, 5, 8, 9, 12, 13))
        starts = [hidden(b, b.gep(pa, [b.mul(lda, number(m))])) for m in range(0, mr, 3)]
        acc = [cgutils.alloca_once(b, totals) for _ in range(mr)]
        for total in acc:
            b.store(every(totals, 0.0), total)

        def step(kk: Any, column: Any) -> None:
            rows = [b.gep(start, [kk]) for start in starts]
            for m, total in enumerate(acc):
                x = b.load(b.gep(rows[m // 3], [b.mul(lda, number(m % 3))]))
                b.store(multiply_add(b, splat(b, x, width), column, b.load(total)), total)

        def halves(column: Any) -> list[Any]:
            """Two steps of float32 from a vector of pairs of bfloat16."""
            bits = every(column.type, 16), every(column.type, -1 << 16)
            return [b.bitcast(x, factors) for x in (b.shl(column, bits[0]), b.and_(column, bits[1]))]

        per_square = elements if factor != types.uint32 else elements // 2
        if elements:
            element = {types.uint16: ir.IntType(32), types.int16: ir.HalfType()}.get(stored, factors.element)
            row_vector = ir.VectorType(element, width)
            with cgutils.for_range(b, squares) as loop:
                first = b.gep(pw, [b.mul(loop.index, number(elements))])
                rows = [
                    load_vector(b, b.gep(first, [b.mul(ldw, number(i))]), row_vector) for i in range(width)
                ]
                if stored == types.int16:
                    rows = [b.fpext(row, factors) for row in rows]
                columns = transpose_vectors(b, rows)
                vectors = [v for column in columns for v in (halves(column) if paired else [column])]
                start = b.mul(loop.index, number(per_square))
                for i, vector in enumerate(vectors):
                    step(b.add(start, number(i)), vector)
        done = b.mul(squares, number(per_square))
        with cgutils.for_range(b, rest) as loop:
            column = load_vector(b, b.gep(panel, [b.mul(loop.index, number(width))]), factors)
            step(b.add(done, loop.index), column)
        result = [b.load(total) for total in acc]
        targets = [b.gep(pc, [b.mul(ldc, number(m))]) for m in range(mr)]
        with b.if_then(accumulate):
            for total, value, target in zip(acc, result, targets, strict=True):
                b.store(b.fadd(load_vector(b, target, totals), value), total)
        for total, target in zip(acc, targets, strict=True):
            store_vector(b, b.load(total), target)
        return context.get_dummy_value()

    i = types.int64

    @intrinsic
    def rows_in_place(
        typingctx, c, c0, ldc, a, a0, lda, w, w0, ldw, squares, panel, panel0, rest, accumulate
    ):
        def codegen(context, builder, sig, args):
            return emit(sig.args, args, context, builder)

        return signature(types.void, c, i, i, a, i, i, w, i, i, i, panel, i, i, types.boolean), codegen

    return rows_in_place


one_row_in_place, rows_in_place = _in_place(1), _in_place(MR)


def _emit_copy(context: Any, builder: Any, sig: Any, args: Any, transposed: bool) -> None:
    size = sig.args[0].dtype.bitwidth // 8
    width = VECTOR_BYTES // size
    vector = ir.VectorType(_IR[sig.args[0].dtype], width)

    def pointers(index: int, count: int) -> list[Any]:
        array = context.make_array(sig.args[index])(context, builder, args[index])
        base = builder.gep(array.data, [args[index + 1]])
        steps = [builder.mul(args[index + 2], number(i)) for i in range(count)]
        return [builder.bitcast(builder.gep(base, [i]), vector.as_pointer()) for i in steps]

    count = width if transposed else 1
    rows = [builder.load(p, align=size) for p in pointers(3, count)]
    if len(args) > 6:
        factor = load_vector(builder, address(context, builder, sig.args[6], args[6], args[7]), vector)
        rows = [builder.fmul(row, factor) for row in rows]
    if transposed:
        rows = transpose_vectors(builder, rows)
    for row, pointer in zip(rows, pointers(0, count), strict=True):
        builder.store(row, pointer, align=size)


def _copy(transposed: bool) -> Any:
    """Copy one vector, or a square of vectors transposed: compiled loops over two arrays do it by elements."""

    @intrinsic
    def copy(typingctx, to, to0, ldt, source, source0, lds):
        def codegen(context, builder, sig, args):
            _emit_copy(context, builder, sig, args, transposed)
            return context.get_dummy_value()

        i = types.int64
        return signature(types.void, to, i, i, source, i, i), codegen

    return copy


copy_vector, copy_transposed = _copy(False), _copy(True)


@intrinsic
def copy_transposed_scaled(typingctx, to, to0, ldt, source, source0, lds, factor, factor0):
    """Copy transposed floats, each vector of the source times the vector ``factor[factor0]``."""

    def codegen(context, builder, sig, args):
        _emit_copy(context, builder, sig, args, True)
        return context.get_dummy_value()

    i = types.int64
    return signature(types.void, to, i, i, source, i, i, factor, i), codegen


def takes_tiles(a: Any) -> bool:
    """Whether operands of the type of array ``a`` are multiplied in tile registers."""
    return TILES and a.dtype == types.uint32


in_tiles = constant(takes_tiles)


@generic
def gemm_rows(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
    """C[m, n] (+)= A[m, k] B[k, n] from offsets c0, a0, b0. m in steps of MR, n of one vector."""

    def tiles(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
        rows, depth = m // TILE * TILE, k // TILE * TILE
        if depth > 0:
            sizes = rows, n, depth
            multiply_tiles(c, c0, ldc, a, a0, lda, b, b0, ldb, 2 * TILE, sizes, accumulate, ())
        if (depth < k) | (k == 0):  # an empty sum is written too
            after, more = b0 + depth * ldb, accumulate | (depth > 0)
            _vector_rows(c, c0, ldc, a, a0 + depth, lda, b, after, ldb, rows, n, k - depth, more)
        at_c, at_a = c0 + rows * ldc, a0 + rows * lda
        _vector_rows(c, at_c, ldc, a, at_a, lda, b, b0, ldb, m - rows, n, k, accumulate)

    return tiles if takes_tiles(a) else _vector_rows.py_func


@device_function
def _vector_rows(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
    width = lanes(c)
    paired = n - n % (2 * width)
    for j in range(0, paired, 2 * width):
        for i in range(0, m, MR):
            rows_2(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, accumulate, ())
    for j in range(paired, n, width):
        for i in range(0, m, MR):
            rows_1(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, accumulate, ())


@generic
def gemm_rows_largest(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, top, top0):
    """C[m, n] = A[m, k] B[k, n] from offsets c0, a0, b0; top[n] = max(top[n], column n)."""

    def tiles(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, top, top0):
        gemm_rows(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, False)
        for j in range(0, n, lanes(c)):
            largest_scores(c, c0 + j, ldc, m, top, top0 + j)

    return tiles if takes_tiles(a) else _vector_rows_largest.py_func


@device_function
def _vector_rows_largest(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, top, top0):
    width = lanes(c)
    paired = n - n % (2 * width)
    for j in range(0, paired, 2 * width):
        for i in range(0, m, MR):
            _largest_2(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, top, top0 + j)
    for j in range(paired, n, width):
        for i in range(0, m, MR):
            _largest_1(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, top, top0 + j)


@device_function
def gemm_columns(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
    """C[m, n] (+)= A[k, m] B[k, n] from offsets c0, a0, b0. m in steps of MR, n of one vector."""
    width = lanes(c)
    paired = n - n % (2 * width)
    for j in range(0, paired, 2 * width):
        for i in range(0, m, MR):
            columns_2(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, accumulate, ())
    for j in range(paired, n, width):
        for i in range(0, m, MR):
            columns_1(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, accumulate, ())


@device_function
def gemm_columns_scaled(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, factor, factor0):
    """C[m, n] = C[m, n] factor[n] + A[k, m] B[k, n]; gemm_columns adds to C without a factor."""
    width = lanes(c)
    paired = n - n % (2 * width)
    for j in range(0, paired, 2 * width):
        for i in range(0, m, MR):
            _scaled_2(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, factor, factor0 + j)
    for j in range(paired, n, width):
        for i in range(0, m, MR):
            _scaled_1(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, factor, factor0 + j)
