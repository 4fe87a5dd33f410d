"""Small LLVM IR helpers for modules that emit vector code; ``b`` is an IR builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.numba_api import alloca_once, get_or_insert_function, ir, unpack_tuple
from gpu_ops.kernels.common.cpu.codegen.target import NEAR

_I64 = ir.IntType(64)


def number(value: int) -> Any:
    return ir.Constant(_I64, value)


def every(vector: Any, value: float) -> Any:
    """Vector with one number in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call(b: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    function = get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def address(context: Any, b: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to element ``offset`` of an array, counted in elements from its first."""
    return b.gep(context.make_array(array_type)(context, b, array).data, [offset])


def load_vector(b: Any, pointer: Any, vector: Any) -> Any:
    return b.load(b.bitcast(pointer, vector.as_pointer()), align=1)


def store_vector(b: Any, value: Any, pointer: Any) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=1)


def shuffle(b: Any, x: Any, y: Any, indices: list[int]) -> Any:
    """Lanes of x (0, 1, ...) and of y (count, count + 1, ...) in the given order."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def splat(b: Any, scalar: Any, width: int) -> Any:
    vector = ir.VectorType(scalar.type, width)
    inserted = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return shuffle(b, inserted, inserted, [0] * width)


def fma(b: Any, x: Any, y: Any, total: Any) -> Any:
    # fmuladd: one instruction where the CPU has it, multiply and add (not a library call) elsewhere
    suffix = "f64" if x.type.element == ir.DoubleType() else "f32"
    return call(b, f"llvm.fmuladd.v{x.type.count}{suffix}", x.type, x, y, total)


def rounded(b: Any, x: Any) -> Any:
    """float32 vector that no later operation takes in unrounded: kernels allow fused multiply-adds everywhere."""
    return call(b, f"llvm.arithmetic.fence.v{x.type.count}f32", x.type, x)


def maximum(b: Any, vectors: list[Any]) -> Any:
    """Maximum per lane; a NaN may be lost."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        larger = [b.select(b.fcmp_ordered(">", x, y), x, y) for x, y in pairs]
        vectors = larger + vectors[len(vectors) // 2 * 2 :]
    return vectors[0]


class _BFloat(ir.Type):
    """The type bfloat, which LLVM has and llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def dot_bfloat16(b: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x0 y0 + x1 y1 per lane, of pairs of bfloat16 in 32-bit lanes; needs ``target.DOT_BFLOAT16``."""
    pairs = ir.VectorType(_BFloat(), 32)
    return call(
        b, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, b.bitcast(x, pairs), b.bitcast(y, pairs)
    )


def round_bfloat16(b: Any, low: Any, high: Any) -> Any:
    """The lanes of ``low``, then of ``high``, as bfloat16 in 32-bit words; needs ``target.DOT_BFLOAT16``."""
    name, pairs = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_BFloat(), 32)
    return b.bitcast(call(b, name, pairs, high, low), ir.VectorType(ir.IntType(32), 16))


def prefetch(b: Any, pointer: Any, near: int = 3) -> None:
    """Prefetch the cache line of ``pointer``, which need not be a valid address.

    ``near`` 3: into the first cache; 2: into the second alone, which on a Zen core makes loops that read from L2 a
    fifth slower, and from memory a tenth.
    """
    i32 = ir.IntType(32)
    flags = [ir.Constant(i32, value) for value in (0, near, 1)]  # for reading, to stay in all caches, data
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.bitcast(pointer, ir.IntType(8).as_pointer()), *flags)


def prefetcher(b: Any, ahead: Any, count: int) -> Callable[[], None]:
    """Function that prefetches the next ``count`` places of rows.

    ``ahead``: the first row's address, bytes into it, bytes to prefetch each time (0: nothing), bytes of a row, bytes
    from a row to the next; or () for no prefetch at all.
    """
    if not ahead.type.elements:
        return lambda: None
    line, inside, advance, length, stride = unpack_tuple(b, ahead)
    at, within = alloca_once(b, _I64), alloca_once(b, _I64)
    b.store(line, at)
    b.store(inside, within)
    parts = [b.udiv(b.mul(advance, number(i)), number(count)) for i in range(count)]

    def ask() -> None:
        with b.if_then(b.icmp_signed("!=", advance, number(0))):
            row, offset = b.load(at), b.load(within)
            for part in parts:
                prefetch(b, b.inttoptr(b.add(b.add(row, offset), part), ir.IntType(8).as_pointer()), NEAR)
            moved = b.add(offset, advance)
            over = b.icmp_signed(">=", moved, length)
            b.store(b.select(over, b.add(row, stride), row), at)
            b.store(b.select(over, b.sub(moved, length), moved), within)

    return ask


def hidden(b: Any, value: Any) -> Any:
    """Copy of ``value`` whose origin LLVM cannot see."""
    return b.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)


def lane_sum(b: Any, vector: Any) -> Any:
    """Sum over the lanes of a vector: halves are added, then their halves."""
    count = half = vector.type.count
    add = b.add if isinstance(vector.type.element, ir.IntType) else b.fadd
    while half > 1:
        half //= 2
        vector = add(vector, shuffle(b, vector, vector, [(i + half) % count for i in range(count)]))
    return b.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def lane_sums(b: Any, vectors: list[Any]) -> Any:
    """Vector whose lane i is the sum over the lanes of ``vectors[i]``; fewer vectors than lanes repeat.

    Each step adds neighbours and halves the number of vectors: 15 steps for 16 vectors.
    """
    width = vectors[0].type.count
    add = b.add if isinstance(vectors[0].type.element, ir.IntType) else b.fadd
    block = 1
    while len(vectors) > 1:
        low = [c if c & block == 0 else width + c - block for c in range(width)]
        high = [c + block if c & block == 0 else width + c for c in range(width)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [add(shuffle(b, x, y, low), shuffle(b, x, y, high)) for x, y in pairs]
        block *= 2
    total = vectors[0]
    while block < width:
        total = add(total, shuffle(b, total, total, [c ^ block for c in range(width)]))
        block *= 2
    return total
