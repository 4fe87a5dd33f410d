"""Rotation of the halves of heads, as LLVM IR: chunk by chunk of VECTOR_BYTES, of all heads of a token.

    x    | x1: chunk | chunk | x2: chunk | chunk |        y1 = x1 cos - x2 sin
    cos  |   of x1's elements        sin likewise         y2 = x2 cos + x1 sin
    gain | of x1's elements    | of x2's                  x stands for x * gain * the head's scale, if there are such

Both chunks of x are read before any of y is stored, so y may be x. The heads share cos and sin in registers.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir.build import address, fma, load_vector, number, shuffle, splat, store_vector
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.narrow import narrow


@intrinsic
def rotate_halves(typingctx, x, x_step, y, y_step, heads, cos, sin, half, sign, gains):
    """Rows x and y are the first of ``heads``, the others ``x_step`` and ``y_step`` elements on.

    ``half``: a multiple of the elements of a chunk of y; x: in the type of y or of cos; sin times ``sign``;
    ``gains``: (), or gain for the elements of a head and a scale for each head, in the type of cos.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x_, x_step_, y_, y_step_, heads_, cos_, sin_, half_, sign_, gains_ = args
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
        with cgutils.for_range(b, b.udiv(half_, number(row.elements))) as chunks:
            at = b.mul(chunks.index, number(row.elements))
            c = wide(address(context, b, cos, cos_, at))
            s = [b.fmul(v, negate) for v in wide(address(context, b, sin, sin_, at))]
            turns = [c, s, c, s]  # cos for x1, sin for x2, cos for x2, sin for x1
            if gains:
                gain = b.extract_value(gains_, 0)
                g1, g2 = (wide(address(context, b, gains[0], gain, i)) for i in (at, b.add(at, half_)))
                turns = [
                    [b.fmul(v, g) for v, g in zip(turn, gain, strict=True)]
                    for turn, gain in zip(turns, (g1, g2, g2, g1), strict=True)
                ]
            with cgutils.for_range(b, heads_) as loop:
                source = address(context, b, x, x_, b.add(at, b.mul(loop.index, x_step_)))
                target = address(context, b, y, y_, b.add(at, b.mul(loop.index, y_step_)))
                first, second = vectors(source), vectors(b.gep(source, [half_]))
                if gains:
                    scales = address(context, b, gains[1], b.extract_value(gains_, 1), loop.index)
                    scale = splat(b, b.load(scales), row.lanes)
                    first, second = ([b.fmul(v, scale) for v in vs] for vs in (first, second))
                results: tuple[list[Any], list[Any]] = ([], [])
                for x1, x2, c1, s2, c2, s1 in zip(first, second, *turns, strict=True):
                    results[0].append(fma(b, x1, c1, b.fneg(b.fmul(x2, s2))))
                    results[1].append(fma(b, x2, c2, b.fmul(x1, s1)))
                for values, p in zip(results, (target, b.gep(target, [half_])), strict=True):
                    store_vector(b, narrow(b, y.dtype, values), p)
        return context.get_dummy_value()

    i = types.int64
    return types.void(x, i, y, i, i, cos, sin, i, cos.dtype, gains), codegen
