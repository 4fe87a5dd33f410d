"""Rotation of heads, as LLVM IR: two chunks of VECTOR_BYTES at a time, of all heads of a token or tokens of a head.

    halves  | x1: chunk | chunk | x2: chunk | chunk |     y1 = x1 cos - x2 sin
    pairs   | x1 x2 x1 x2 ...   | x1 x2 x1 x2 ...   |     y2 = x2 cos + x1 sin
    cos     |   of x1's elements        sin likewise
    gain    | of x1's elements    | of x2's               x is x * gain * the head's scale, if there are any

Both chunks of x are read before any of y is stored, so y may be x. Heads of a token share cos and sin in registers.
If a half is not a whole number of chunks, its last chunk is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import address, fma, number, shuffle, splat, store_vector
from gpu_ops.kernels.common.cpu.codegen.decode_rows import Rows
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, intrinsic, types
from gpu_ops.kernels.common.cpu.codegen.rows import narrow


def _rotation(*, pairs: bool, shared: bool) -> Any:
    """Intrinsic (x, x_step, y, y_step, heads, cos, sin, turn_step, half, sign, gains).

    Rows x and y are the first of ``heads``; others follow at ``x_step``, ``y_step`` elements. They share cos and sin,
    or use those ``turn_step`` elements on. ``half``: pairs of a head; x: in the type of y or of cos; sin
    times ``sign``; ``gains``: (), or gain for the elements of a head and a scale for each head, in the type of cos
    (of halves that share).
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x_, x_step_, y_, y_step_, heads_, cos_, sin_, turn_step_, half_, sign_, gains_ = args
        x, y, cos, sin, gains = (sig.args[i] for i in (0, 2, 5, 6, 10))
        row = Rows(y.dtype)
        n = row.lanes
        alternate = row.dtype == types.uint16  # a chunk's vectors are its even and its odd elements

        table = Rows(cos.dtype)

        def less(count: Any, elements: int) -> Any:
            return None if count is None else b.sub(count, number(elements))

        def in_order(pointer: Any, count: Any) -> list[Any]:
            places = [(b.gep(pointer, [number(n * i)]), less(count, n * i)) for i in range(row.parts)]
            return [table.load_raw(b, *place) for place in places]

        def apart(low: Any, high: Any) -> list[Any]:
            return [shuffle(b, low, high, [2 * lane + odd for lane in range(n)]) for odd in range(2)]

        def wide(pointer: Any, count: Any) -> list[Any]:
            """A chunk's elements in the computing type, in the order of its vectors."""
            parts = in_order(pointer, count)
            return apart(*parts) if alternate else parts

        def vectors(pointer: Any, count: Any) -> list[Any]:
            return row.load(b, pointer, count) if x.dtype == y.dtype else wide(pointer, count)

        def chunks_at(pointer: Any, count: Any) -> list[tuple[Any, Any]]:
            """Pointers to the two chunks of x or y that hold ``count`` pairs, and the number of valid elements."""
            if not pairs:
                return [(pointer, count), (b.gep(pointer, [half_]), count)]
            both = None if count is None else b.mul(count, number(2))
            return [(pointer, both), (b.gep(pointer, [number(row.elements)]), less(both, row.elements))]

        def load(pointer: Any, count: Any) -> tuple[list[Any], list[Any]]:
            """Load x1 and x2, a chunk's number of elements each."""
            first, second = (vectors(*chunk) for chunk in chunks_at(pointer, count))
            if not pairs:
                return first, second
            parts = first + second
            if not alternate:
                parts = [
                    v for low, high in zip(parts[::2], parts[1::2], strict=True) for v in apart(low, high)
                ]
            return parts[::2], parts[1::2]

        def store(first: list[Any], second: list[Any], pointer: Any, count: Any) -> None:
            if pairs:
                parts = [v for both in zip(first, second, strict=True) for v in both]
                if not alternate:
                    order = [lane // 2 + lane % 2 * n for lane in range(2 * n)]
                    both = zip(parts[::2], parts[1::2], strict=True)
                    parts = [shuffle(b, x1, x2, part) for x1, x2 in both for part in (order[:n], order[n:])]
                first, second = parts[: row.parts], parts[row.parts :]
            for values, (p, left) in zip((first, second), chunks_at(pointer, count), strict=True):
                chunk = narrow(b, y.dtype, values)
                if left is None:
                    store_vector(b, chunk, p)
                else:
                    row.store_raw(b, chunk, p, left)

        load_factors = in_order if pairs else wide
        negate = splat(b, sign_, n)

        def turns_at(place: Any, count: Any) -> list[list[Any]]:
            """Factors: cos for x1, sin for x2, cos for x2, sin for x1."""
            c = load_factors(address(context, b, cos, cos_, place), count)
            s = [b.fmul(v, negate) for v in load_factors(address(context, b, sin, sin_, place), count)]
            return [c, s, c, s]

        def rotate_chunks(at: Any, count: Any, head: Any, turns: list[list[Any]]) -> None:
            place = b.mul(at, number(2)) if pairs else at
            first, second = load(address(context, b, x, x_, b.add(place, b.mul(head, x_step_))), count)
            if gains:
                scale = splat(b, b.load(address(context, b, gains[1], b.extract_value(gains_, 1), head)), n)
                first, second = ([b.fmul(v, scale) for v in vs] for vs in (first, second))
            results: tuple[list[Any], list[Any]] = ([], [])
            for x1, x2, c1, s2, c2, s1 in zip(first, second, *turns, strict=True):
                results[0].append(fma(b, x1, c1, b.fneg(b.fmul(x2, s2))))
                results[1].append(fma(b, x2, c2, b.fmul(x1, s1)))
            store(*results, address(context, b, y, y_, b.add(place, b.mul(head, y_step_))), count)

        def each_chunk(do: Callable[[Any, Any], None]) -> None:
            """Call ``do`` with the place of each chunk's first pair, and the pairs of a partial last chunk."""
            elements = number(row.elements)
            with cgutils.for_range(b, b.udiv(half_, elements)) as loop:
                do(b.mul(loop.index, elements), None)
            rest = b.urem(half_, elements)
            with b.if_then(b.icmp_signed("!=", rest, number(0))):
                do(b.sub(half_, rest), rest)

        def rotate_heads(at: Any, count: Any) -> None:
            turns = turns_at(at, count)
            if gains:
                gain = b.extract_value(gains_, 0)
                g1, g2 = (wide(address(context, b, gains[0], gain, i), count) for i in (at, b.add(at, half_)))
                turns = [
                    [b.fmul(v, g) for v, g in zip(factors, gain, strict=True)]
                    for factors, gain in zip(turns, (g1, g2, g2, g1), strict=True)
                ]
            with cgutils.for_range(b, heads_) as loop:
                rotate_chunks(at, count, loop.index, turns)

        if shared:
            each_chunk(rotate_heads)
            return context.get_dummy_value()
        with cgutils.for_range(b, heads_) as loop:  # in the order of memory
            head = loop.index

            def rotate_one(at: Any, count: Any) -> None:
                rotate_chunks(at, count, head, turns_at(b.add(at, b.mul(head, turn_step_)), count))

            each_chunk(rotate_one)
        return context.get_dummy_value()

    @intrinsic
    def rotate(typingctx, x, x_step, y, y_step, heads, cos, sin, turn_step, half, sign, gains):
        i = types.int64
        return types.void(x, i, y, i, i, cos, sin, i, i, cos.dtype, gains), codegen

    return rotate


rotate_halves, rotate_pairs = (_rotation(pairs=pairs, shared=True) for pairs in (False, True))
rotate_halves_each, rotate_pairs_each = (_rotation(pairs=pairs, shared=False) for pairs in (False, True))
