"""Vector code as LLVM IR: the matrix-product micro-kernels that Numba's loops cannot express.

A micro-kernel keeps a tile of C in registers (an array in a Numba loop lives in memory):

                    n: NV vectors of LANES
                  +--------+--------+
    MR rows of A  |  acc   |  acc   |    per step k: NV loads of B, MR broadcasts of A, MR * NV
    (broadcast)   |  ...   |  ...   |    fused multiply-adds; C is touched once, at the end
                  +--------+--------+

Two forms differ in where A's elements lie, so that no operand is ever transposed in memory:

    gemm_rows     C[m, n] (+)= sum_k A[m, k] B[k, n]
    gemm_columns  C[m, n] (+)= sum_k A[k, m] B[k, n]

Vectors are as wide as Numba's own target (not only the host, so NUMBA_CPU_NAME agrees).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.registry import cpu_target
from numba.core.typing.templates import signature
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from gpu_ops.kernels.numba_cpu.simd_ir import fma, number, splat

FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
VECTOR_BYTES = 64 if "+avx512f" in FEATURES else 32 if "+avx2" in FEATURES else 16
MR = 8 if VECTOR_BYTES == 64 else 4  # MR * 2 accumulators: half of the registers each width has
MAX_LANES = VECTOR_BYTES // 4
# Elements added to the rows of a scratch tile: rows of a power of two of bytes would share a few sets of the
# first cache, and a panel of 256 of them would not stay in it (attention, seqlen 2048: 41 ms against 38).
SKEW = 16

_I64 = ir.IntType(64)
_IR = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


def lanes(x):
    """Elements of 1-D array ``x`` in one vector."""
    raise TypeError("compiled code only")


@overload(lanes)
def _lanes(x):
    width = VECTOR_BYTES // (x.dtype.bitwidth // 8)
    return lambda x: width


@njit
def round_up(n, step):
    return (n + step - 1) // step * step


@intrinsic
def scratch(typingctx, rows, columns, of):
    """Uninitialised (rows, columns) array of the type of ``of`` on a 64-byte boundary, rows contiguous."""
    array = types.Array(of, 2, "C")
    size = of.bitwidth // 8

    def allocate(n, m):
        flat = np.empty(n * m * size + 64, np.uint8)
        start = (-flat.ctypes.data) % 64
        return flat[start : start + n * m * size]

    def codegen(context, builder, sig, args):
        flat_type = types.Array(types.uint8, 1, "C")
        flat = context.compile_internal(
            builder, allocate, signature(flat_type, types.int64, types.int64), args[:2]
        )
        source = context.make_array(flat_type)(context, builder, flat)
        result = context.make_array(array)(context, builder)
        width = context.get_constant(types.intp, size)
        populate_array(
            result,
            data=builder.bitcast(source.data, result.data.type),
            shape=list(args[:2]),
            strides=[builder.mul(args[1], width), width],
            itemsize=width,
            meminfo=source.meminfo,
        )
        return result._getvalue()

    return signature(array, types.int64, types.int64, of), codegen


def _micro(columns: bool, nv: int) -> Any:
    """C tile of MR rows by ``nv`` vectors; offsets and leading dimensions count elements."""

    @intrinsic
    def micro(typingctx, c, c0, ldc, a, a0, lda, b, b0, ldb, k, accumulate):
        element = _IR[c.dtype]
        width = VECTOR_BYTES // (c.dtype.bitwidth // 8)
        align = c.dtype.bitwidth // 8
        vector = ir.VectorType(element, width)

        def codegen(context, builder, sig, args):
            def base(index: int) -> Any:
                array = context.make_array(sig.args[index])(context, builder, args[index])
                return builder.gep(array.data, [args[index + 1]])

            pc, pa, pb = base(0), base(3), base(6)
            ldc_, lda_, ldb_, k_, accumulate_ = args[2], args[5], args[8], args[9], args[10]
            tile = [(m, n) for m in range(MR) for n in range(nv)]
            rows = [builder.mul(lda_, number(m)) for m in range(MR)]

            entry = builder.block
            loop = builder.append_basic_block("k.loop")
            done = builder.append_basic_block("k.done")
            zero = ir.Constant(vector, [0.0] * width)
            builder.cbranch(builder.icmp_signed(">", k_, number(0)), loop, done)

            builder.position_at_end(loop)
            kk = builder.phi(_I64)
            acc = [builder.phi(vector) for _ in tile]
            kk.add_incoming(number(0), entry)
            row_b = builder.gep(pb, [builder.mul(kk, ldb_)])
            vb = [
                builder.load(
                    builder.bitcast(builder.gep(row_b, [number(n * width)]), vector.as_pointer()), align=align
                )
                for n in range(nv)
            ]
            if columns:
                row_a = builder.gep(pa, [builder.mul(kk, lda_)])
                pointers = [builder.gep(row_a, [number(m)]) for m in range(MR)]
            else:
                at_k = builder.gep(pa, [kk])
                pointers = [builder.gep(at_k, [rows[m]]) for m in range(MR)]
            va = [splat(builder, builder.load(p), width) for p in pointers]
            new = [fma(builder, va[m], vb[n], total) for (m, n), total in zip(tile, acc, strict=True)]
            following = builder.add(kk, number(1))
            end = builder.block
            kk.add_incoming(following, end)
            for phi, value in zip(acc, new, strict=True):
                phi.add_incoming(zero, entry)
                phi.add_incoming(value, end)
            builder.cbranch(builder.icmp_signed("<", following, k_), loop, done)

            builder.position_at_end(done)
            result = [builder.phi(vector) for _ in tile]
            for phi, value in zip(result, new, strict=True):
                phi.add_incoming(zero, entry)
                phi.add_incoming(value, end)
            targets = [
                builder.bitcast(
                    builder.gep(pc, [builder.add(builder.mul(ldc_, number(m)), number(n * width))]),
                    vector.as_pointer(),
                )
                for m, n in tile
            ]
            with builder.if_else(accumulate_) as (add, replace):
                with add:
                    for pointer, value in zip(targets, result, strict=True):
                        total = builder.fadd(builder.load(pointer, align=align), value)
                        builder.store(total, pointer, align=align)
                with replace:
                    for pointer, value in zip(targets, result, strict=True):
                        builder.store(value, pointer, align=align)
            return context.get_dummy_value()

        i = types.int64
        return signature(types.void, c, i, i, a, i, i, b, i, i, i, types.boolean), codegen

    return micro


_rows_1, _rows_2 = _micro(columns=False, nv=1), _micro(columns=False, nv=2)
_columns_1, _columns_2 = _micro(columns=True, nv=1), _micro(columns=True, nv=2)


def _copy(transposed: bool) -> Any:
    """Moves one vector, or the transpose of a square of vectors: compiled loops over two arrays do it by elements."""

    @intrinsic
    def copy(typingctx, to, to0, ldt, source, source0, lds):
        element = _IR[to.dtype]
        size = to.dtype.bitwidth // 8
        width = VECTOR_BYTES // size
        vector = ir.VectorType(element, width)

        def codegen(context, builder, sig, args):
            def pointers(index: int, count: int) -> list[Any]:
                array = context.make_array(sig.args[index])(context, builder, args[index])
                base = builder.gep(array.data, [args[index + 1]])
                steps = [builder.mul(args[index + 2], number(i)) for i in range(count)]
                return [builder.bitcast(builder.gep(base, [i]), vector.as_pointer()) for i in steps]

            count = width if transposed else 1
            rows = [builder.load(p, align=size) for p in pointers(3, count)]
            half = width // 2
            low, high = (
                ir.Constant(
                    ir.VectorType(ir.IntType(32), width),
                    [i // 2 + start + i % 2 * width for i in range(width)],
                )
                for start in (0, half)
            )
            distance = count
            while distance > 1:  # interleaving rows i and i + half, log2(width) times, transposes
                pairs = [(rows[i], rows[i + half]) for i in range(half)]
                rows = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in (low, high)]
                distance //= 2
            for row, pointer in zip(rows, pointers(0, count), strict=True):
                builder.store(row, pointer, align=size)
            return context.get_dummy_value()

        i = types.int64
        return signature(types.void, to, i, i, source, i, i), codegen

    return copy


copy_vector, copy_transposed = _copy(False), _copy(True)


@njit
def gemm_rows(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
    """C[m, n] (+)= A[m, k] B[k, n] from offsets c0, a0, b0. m in steps of MR, n of one vector."""
    width = lanes(c)
    wide = n - n % (2 * width)
    for j in range(0, wide, 2 * width):
        for i in range(0, m, MR):
            _rows_2(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, accumulate)
    for j in range(wide, n, width):
        for i in range(0, m, MR):
            _rows_1(c, c0 + i * ldc + j, ldc, a, a0 + i * lda, lda, b, b0 + j, ldb, k, accumulate)


@njit
def gemm_columns(c, c0, ldc, a, a0, lda, b, b0, ldb, m, n, k, accumulate):
    """C[m, n] (+)= A[k, m] B[k, n] from offsets c0, a0, b0. m in steps of MR, n of one vector."""
    width = lanes(c)
    wide = n - n % (2 * width)
    for j in range(0, wide, 2 * width):
        for i in range(0, m, MR):
            _columns_2(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, accumulate)
    for j in range(wide, n, width):
        for i in range(0, m, MR):
            _columns_1(c, c0 + i * ldc + j, ldc, a, a0 + i, lda, b, b0 + j, ldb, k, accumulate)
