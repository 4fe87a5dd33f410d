"""Rotation of heads, as LLVM IR: two chunks of VECTOR_BYTES at a time, of all heads of a token or tokens of a head.

    halves  | x1: chunk | chunk | x2: chunk | chunk |     y1 = x1 cos - x2 sin
    pairs   | x1 x2 x1 x2 ...   | x1 x2 x1 x2 ...   |     y2 = x2 cos + x1 sin
    cos     |   of x1's elements        sin likewise
    gain    | of x1's elements    | of x2's               x stands for x * gain * the head's scale, if there are such

Both chunks of x are read before any of y is stored, so y may be x. Heads of a token share cos and sin in registers.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir.build import address, fma, load_vector, number, shuffle, splat, store_vector
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.narrow import narrow


def _rotation(*, pairs: bool, shared: bool) -> Any:
    """An intrinsic (x, x_step, y, y_step, heads, cos, sin, turn_step, half, sign, gains).

    Rows x and y are the first of ``heads``, the others ``x_step`` and ``y_step`` elements on. They share cos and sin,
    or those of each are ``turn_step`` elements on. ``half``: a multiple of the elements of a chunk of y; x: in the
    type of y or of cos; sin times ``sign``; ``gains``: (), or gain for the elements of a head and a scale for each
    head, in the type of cos (of halves that share).
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x_, x_step_, y_, y_step_, heads_, cos_, sin_, turn_step_, half_, sign_, gains_ = args
        x, y, cos, sin, gains = (sig.args[i] for i in (0, 2, 5, 6, 10))
        row = Rows(y.dtype)
        n = row.lanes
        alternate = row.dtype == types.uint16  # a chunk becomes its even elements and its odd ones

        def in_order(pointer: Any) -> list[Any]:
            return [load_vector(b, b.gep(pointer, [number(n * i)]), row.vector) for i in range(row.parts)]

        def apart(low: Any, high: Any) -> list[Any]:
            return [shuffle(b, low, high, [2 * lane + odd for lane in range(n)]) for odd in range(2)]

        def wide(pointer: Any) -> list[Any]:
            """A chunk's elements in the computing type, in the order in which the chunk becomes vectors."""
            parts = in_order(pointer)
            return apart(*parts) if alternate else parts

        def vectors(pointer: Any) -> list[Any]:
            return row.load(b, pointer) if x.dtype == y.dtype else wide(pointer)

        def load(pointer: Any) -> tuple[list[Any], list[Any]]:
            """x1 and x2, of as many elements each as a chunk has."""
            if not pairs:
                return vectors(pointer), vectors(b.gep(pointer, [half_]))
            parts = vectors(pointer) + vectors(b.gep(pointer, [number(row.elements)]))
            if not alternate:
                parts = [
                    v for low, high in zip(parts[::2], parts[1::2], strict=True) for v in apart(low, high)
                ]
            return parts[::2], parts[1::2]

        def store(first: list[Any], second: list[Any], pointer: Any) -> None:
            if not pairs:
                store_vector(b, narrow(b, y.dtype, first), pointer)
                store_vector(b, narrow(b, y.dtype, second), b.gep(pointer, [half_]))
                return
            parts = [v for both in zip(first, second, strict=True) for v in both]
            if not alternate:
                order = [lane // 2 + lane % 2 * n for lane in range(2 * n)]
                both = zip(parts[::2], parts[1::2], strict=True)
                parts = [shuffle(b, x1, x2, part) for x1, x2 in both for part in (order[:n], order[n:])]
            for i in range(2):
                chunk = narrow(b, y.dtype, parts[i * row.parts : (i + 1) * row.parts])
                store_vector(b, chunk, b.gep(pointer, [number(i * row.elements)]))

        turn = in_order if pairs else wide
        negate = splat(b, sign_, n)
        chunks = b.udiv(half_, number(row.elements))

        def turns_at(place: Any) -> list[list[Any]]:
            """cos for x1, sin for x2, cos for x2, sin for x1."""
            c = turn(address(context, b, cos, cos_, place))
            s = [b.fmul(v, negate) for v in turn(address(context, b, sin, sin_, place))]
            return [c, s, c, s]

        def rotate_chunks(at: Any, head: Any, turns: list[list[Any]]) -> None:
            place = b.mul(at, number(2)) if pairs else at
            first, second = load(address(context, b, x, x_, b.add(place, b.mul(head, x_step_))))
            if gains:
                scale = splat(b, b.load(address(context, b, gains[1], b.extract_value(gains_, 1), head)), n)
                first, second = ([b.fmul(v, scale) for v in vs] for vs in (first, second))
            results: tuple[list[Any], list[Any]] = ([], [])
            for x1, x2, c1, s2, c2, s1 in zip(first, second, *turns, strict=True):
                results[0].append(fma(b, x1, c1, b.fneg(b.fmul(x2, s2))))
                results[1].append(fma(b, x2, c2, b.fmul(x1, s1)))
            store(*results, address(context, b, y, y_, b.add(place, b.mul(head, y_step_))))

        if not shared:  # in the order of memory
            with cgutils.for_range(b, heads_) as loop, cgutils.for_range(b, chunks) as chunk:
                at = b.mul(chunk.index, number(row.elements))
                rotate_chunks(at, loop.index, turns_at(b.add(at, b.mul(loop.index, turn_step_))))
            return context.get_dummy_value()
        with cgutils.for_range(b, chunks) as chunk:
            at = b.mul(chunk.index, number(row.elements))
            turns = turns_at(at)
            if gains:
                gain = b.extract_value(gains_, 0)
                g1, g2 = (wide(address(context, b, gains[0], gain, i)) for i in (at, b.add(at, half_)))
                turns = [
                    [b.fmul(v, g) for v, g in zip(turn, gain, strict=True)]
                    for turn, gain in zip(turns, (g1, g2, g2, g1), strict=True)
                ]
            with cgutils.for_range(b, heads_) as loop:
                rotate_chunks(at, loop.index, turns)
        return context.get_dummy_value()

    @intrinsic
    def rotate(typingctx, x, x_step, y, y_step, heads, cos, sin, turn_step, half, sign, gains):
        i = types.int64
        return types.void(x, i, y, i, i, cos, sin, i, i, cos.dtype, gains), codegen

    return rotate


rotate_halves, rotate_pairs = (_rotation(pairs=pairs, shared=True) for pairs in (False, True))
rotate_halves_each, rotate_pairs_each = (_rotation(pairs=pairs, shared=False) for pairs in (False, True))
