"""Matrix products in x86's tile registers (AMX): 16 rows of 16 words each. One instruction multiplies two of
them, 16 times the operations of a vector of float32.

                 16 columns   16
               +------------+------------+
    16 steps   |  B  tmm6   |  B  tmm7   |     one step is a word of 2 bfloat16, which add up in float32,
               +------------+------------+     or of 4 int8 in A and uint8 in B, which add up in int32
      16 steps
    +--------+ +------------+------------+
    | A tmm4 | |  C  tmm0   |  C  tmm1   |     per 16 steps four loads and four products; C is touched at the
 16 +--------+ +------------+------------+     start and at the end
    | A tmm5 | |  C  tmm2   |  C  tmm3   |
 16 +--------+ +------------+------------+

A[row, step], B[step, column] and C[row, column] are in memory as ``gemm.gemm_rows`` takes them. A thread calls
:func:`open_tiles` before its first product, and :func:`close_tiles` after its last: between them the registers have
the shape above, and a switch to another thread saves them.
"""

from __future__ import annotations

import struct
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import address, call, number, prefetcher
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, ir, signature, types
from gpu_ops.kernels.common.cpu.codegen.target import TILES
from gpu_ops.kernels.common.cpu.jit import device_function, generic

TILE = 16  # rows of a tile, and words of a row
_I8, _VOID = ir.IntType(8), ir.VoidType()
# palette 1; bytes per row, and rows, of each of eight tiles
_CONFIG = struct.pack("<BB14x16H16B", 1, 0, *[4 * TILE] * 8, *[0] * 8, *[TILE] * 8, *[0] * 8)
_A, _B = 4, 6  # the first register of each; C's are 0 to 3
_WORD, _ROW = 4, 4 * TILE  # bytes
_PRODUCTS = {types.uint32: "llvm.x86.tdpbf16ps", types.int8: "llvm.x86.tdpbsud"}


@intrinsic
def open_tiles(typingctx):
    """Configure all tile registers as TILE rows of TILE words. Does nothing without AMX."""

    def codegen(context, b, sig, args):
        if TILES:
            data = ir.Constant(ir.ArrayType(_I8, len(_CONFIG)), bytearray(_CONFIG))
            config = cgutils.global_constant(b, "tile_config", data)
            call(b, "llvm.x86.ldtilecfg", _VOID, b.bitcast(config, _I8.as_pointer()))
        return context.get_dummy_value()

    return signature(types.void), codegen


@intrinsic
def close_tiles(typingctx):
    """Release the tile registers, so that they are no longer saved."""

    def codegen(context, b, sig, args):
        if TILES:
            call(b, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return signature(types.void), codegen


def _move(b: Any, name: str, tile: int, pointer: Any, stride: Any) -> None:
    call(b, f"llvm.x86.{name}d64", _VOID, _I8(tile), pointer, stride)


def _micro(down: int, across: int) -> Any:
    """C (+)= A B for ``down`` by ``across`` tiles, k > 0 steps; offsets and leading dimensions count elements.

    Prefetches the next place of ``ahead`` once per 16 steps (``build.prefetcher``).
    """
    tile = [(i, j) for i in range(down) for j in range(across)]

    @intrinsic
    def micro(typingctx, c, c0, ldc, a, a0, lda, b, b0, ldb, k, accumulate, ahead):
        product = _PRODUCTS[a.dtype]

        def codegen(context, builder, sig, args):
            pc, pa, pb = (
                builder.bitcast(
                    address(context, builder, sig.args[i], args[i], args[i + 1]), _I8.as_pointer()
                )
                for i in (0, 3, 6)
            )
            stride_c, stride_a, stride_b = (
                builder.mul(args[i + 2], number(sig.args[i].dtype.bitwidth // 8)) for i in (0, 3, 6)
            )

            def at(base: Any, stride: Any, i: int, j: int) -> Any:
                return builder.gep(
                    base, [builder.add(builder.mul(stride, number(i * TILE)), number(j * _ROW))]
                )

            ask = prefetcher(builder, args[11], 1)
            with builder.if_else(args[10]) as (add, replace):
                with add:
                    for i, j in tile:
                        _move(builder, "tileload", across * i + j, at(pc, stride_c, i, j), stride_c)
                with replace:
                    for i, j in tile:
                        call(builder, "llvm.x86.tilezero", _VOID, _I8(across * i + j))
            with cgutils.for_range_slice(builder, number(0), args[9], number(TILE)) as (step, _):
                rows_a = builder.gep(pa, [builder.mul(step, number(_WORD))])
                rows_b = builder.gep(pb, [builder.mul(step, stride_b)])
                ask()
                for i, j in tile:  # operands are loaded just before their product
                    if j == 0:
                        _move(builder, "tileload", _A + i, at(rows_a, stride_a, i, 0), stride_a)
                    if i == 0:
                        _move(builder, "tileload", _B + j, at(rows_b, stride_b, 0, j), stride_b)
                    call(builder, product, _VOID, _I8(across * i + j), _I8(_A + i), _I8(_B + j))
            for i, j in tile:
                _move(builder, "tilestore", across * i + j, at(pc, stride_c, i, j), stride_c)
            return context.get_dummy_value()

        n = types.int64
        return signature(types.void, c, n, n, a, n, n, b, n, n, n, types.boolean, ahead), codegen

    return micro


_micro_1_1, _micro_1_2, _micro_2_1, _micro_2_2 = (_micro(i, j) for i in (1, 2) for j in (1, 2))


@generic
def later(ahead, count):
    """``ahead`` after ``count`` prefetches."""

    def rows(ahead, count):
        row, inside, advance, length, stride = ahead
        inside += count * advance
        return row + inside // length * stride, inside % length, advance, length, stride

    return rows if len(ahead) else lambda ahead, count: ahead


@device_function
def multiply_tiles(c, c0, ldc, a, a0, lda, b, b0, ldb, panel, sizes, accumulate, ahead):
    """C[m, n] (+)= A[m, k] B[k, n] from offsets c0, a0, b0; ``sizes`` = (m, n, k) in whole tiles, k > 0.

    B is in panels of two tiles' columns, ``panel`` elements from one to the next. ``ahead``: see
    ``build.prefetcher``.
    """
    m, n, k = sizes
    for j in range(0, n, 2 * TILE):
        at_b = b0 + j // (2 * TILE) * panel
        for i in range(0, m, 2 * TILE):
            at_c, at_a = c0 + i * ldc + j, a0 + i * lda
            if n - j > TILE:
                if m - i > TILE:
                    _micro_2_2(c, at_c, ldc, a, at_a, lda, b, at_b, ldb, k, accumulate, ahead)
                else:
                    _micro_1_2(c, at_c, ldc, a, at_a, lda, b, at_b, ldb, k, accumulate, ahead)
            elif m - i > TILE:
                _micro_2_1(c, at_c, ldc, a, at_a, lda, b, at_b, ldb, k, accumulate, ahead)
            else:
                _micro_1_1(c, at_c, ldc, a, at_a, lda, b, at_b, ldb, k, accumulate, ahead)
            ahead = later(ahead, k // TILE)
