"""Rotation of the halves of a head, as LLVM IR: chunk by chunk of VECTOR_BYTES.

    x    | x1: chunk | chunk | x2: chunk | chunk |        y1 = x1 cos - x2 sin
    cos  |   of x1's elements        sin likewise         y2 = x2 cos + x1 sin

Both chunks of x are read before any of y is stored, so y may be x.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir.build import address, fma, load_vector, number, shuffle, splat, store_vector
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.narrow import narrow


@intrinsic
def rotate_halves(typingctx, x, y, cos, sin, half, sign):
    """``half``: a multiple of the elements of a chunk of y; x: in the type of y or of cos; sin times ``sign``."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        half_, sign_ = args[4:]
        row = Rows(y.dtype)

        def wide(pointer: Any) -> list[Any]:
            """A chunk's elements in the computing type, in the order in which the chunk becomes vectors."""
            n = row.lanes
            parts = [load_vector(b, b.gep(pointer, [number(n * i)]), row.vector) for i in range(row.parts)]
            if y.dtype == types.uint16:
                low, high = parts
                return [shuffle(b, low, high, [2 * lane + odd for lane in range(n)]) for odd in range(2)]
            return parts

        def vectors(pointer: Any) -> list[Any]:
            return row.load(b, pointer) if x.dtype == y.dtype else wide(pointer)

        negate = splat(b, sign_, row.lanes)
        with cgutils.for_range(b, b.udiv(half_, number(row.elements))) as loop:
            at = b.mul(loop.index, number(row.elements))
            pointers = [address(context, b, sig.args[i], args[i], at) for i in range(4)]
            first, second = (vectors(p) for p in (pointers[0], b.gep(pointers[0], [half_])))
            c, s = wide(pointers[2]), [b.fmul(v, negate) for v in wide(pointers[3])]
            results: tuple[list[Any], list[Any]] = ([], [])
            for x1, x2, cosine, sine in zip(first, second, c, s, strict=True):
                results[0].append(fma(b, x1, cosine, b.fneg(b.fmul(x2, sine))))
                results[1].append(fma(b, x2, cosine, b.fmul(x1, sine)))
            for values, p in zip(results, (pointers[1], b.gep(pointers[1], [half_])), strict=True):
                store_vector(b, narrow(b, y.dtype, values), p)
        return context.get_dummy_value()

    return types.void(x, y, cos, sin, types.int64, cos.dtype), codegen
