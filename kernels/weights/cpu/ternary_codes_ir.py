"""LLVM IR for the ternary micro-kernels: the vector width, and operations on vectors of packed codes.

LANES 32-bit elements make a vector: 16 with AVX-512, 8 with AVX2, else 4. ``b`` is an IR builder.
"""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen import build
from gpu_ops.kernels.common.cpu.codegen.build import address as element_pointer
from gpu_ops.kernels.common.cpu.codegen.build import call
from gpu_ops.kernels.common.cpu.codegen.build import number as i64
from gpu_ops.kernels.common.cpu.codegen.numba_api import cgutils, ir
from gpu_ops.kernels.common.cpu.codegen.target import FEATURES, XEON

LANES = 16 if "+avx512vnni" in FEATURES and "+avx512bw" in FEATURES else 8 if "+avx2" in FEATURES else 4
VNNI = LANES == 16 or (LANES == 8 and "+avxvnni" in FEATURES)
TILE_M = 8 if LANES == 16 else 4  # tokens of a tile: 16 (8) sums, in 32 (16) registers
PANEL_ROWS = 2 * LANES  # rows of a panel: two adjacent vectors
CHUNK = 16 * LANES  # codes in one vector of words

I8, I32 = ir.IntType(8), ir.IntType(32)
INT = ir.VectorType(I32, LANES)
# Cache into which codes that are read once are prefetched. Into the first only, a Xeon would read them
# at little more than half the speed.
ONCE = 3 if XEON else 0
FLOAT = {"float32": ir.FloatType(), "float64": ir.DoubleType()}


def describe() -> str:
    """Names of the instructions that the int8 kernels use."""
    return {16: "AVX-512 VNNI", 8: "AVX-VNNI" if VNNI else "AVX2"}.get(LANES, "128-bit vectors")


def every(value: int) -> ir.Constant:
    return ir.Constant(INT, [value] * LANES)


def splat(b: Any, scalar: Any) -> Any:
    return build.splat(b, scalar, LANES)


def row_pointer(
    context: Any, b: Any, array_type: Any, codes: Any, offset: Any, stride: Any, r: int, last: Any
) -> Any:
    """Pointer to row r of a block; rows past the matrix repeat the last one, and their results are not stored."""
    row = b.select(b.icmp_signed("<", i64(r), last), i64(r), last)
    return element_pointer(context, b, array_type, codes, b.add(offset, b.mul(stride, row)))


def dot4(b: Any, total: Any, codes: Any, x: Any) -> Any:
    """total[lane] += sum over the lane's 4 bytes of codes (unsigned, at most 3) * x (signed)."""
    if LANES == 16:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", INT, total, codes, x)
    if VNNI:
        return call(b, "llvm.x86.avx512.vpdpbusd.256", INT, total, codes, x)
    if LANES == 8:  # pairs: at most 2 * 3 * 128, so int16 cannot saturate
        as_bytes, as_words = ir.VectorType(I8, 32), ir.VectorType(ir.IntType(16), 16)
        left, right = b.bitcast(codes, as_bytes), b.bitcast(x, as_bytes)
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", as_words, left, right)
        fours = call(b, "llvm.x86.avx2.pmadd.wd", INT, pairs, ir.Constant(as_words, [1] * 16))
        return b.add(total, fours)
    products = []  # int16 holds them; even and odd neighbours added as int32: a multiply-add on most CPUs
    for operand, widen in ((codes, b.zext), (x, b.sext)):
        as_bytes = b.bitcast(operand, ir.VectorType(I8, 4 * LANES))
        products.append(
            widen(widen(as_bytes, ir.VectorType(ir.IntType(16), 4 * LANES)), ir.VectorType(I32, 4 * LANES))
        )
    terms = b.mul(*products)
    width = 4 * LANES
    while width > LANES:
        width //= 2
        parts = [
            ir.Constant(ir.VectorType(I32, width), [2 * i + odd for i in range(width)]) for odd in range(2)
        ]
        terms = b.add(*(b.shuffle_vector(terms, terms, part) for part in parts))
    return b.add(total, terms)


def plane(b: Any, words: Any, i: int) -> Any:
    return b.and_(b.lshr(words, every(2 * i)) if i else words, every(0x03030303))


def trit(b: Any, words: Any, e: int, dtype: str) -> Any:
    """Code e of each word as -1.0, 0.0 or 1.0."""
    shift = 8 * (e % 4) + 2 * (e // 4)
    index = b.lshr(words, every(shift)) if shift else words
    vector = ir.VectorType(FLOAT[dtype], LANES)
    if dtype == "float32" and LANES >= 8:  # a table in a register, indexed by the low two bits of each lane
        table = ir.Constant(vector, [-1.0, 0.0, 1.0, 2.0] * (LANES // 4))
        name = "llvm.x86.avx512.vpermilvar.ps.512" if LANES == 16 else "llvm.x86.avx.vpermilvar.ps.256"
        return call(b, name, vector, table, index)
    return b.sitofp(b.sub(b.and_(index, every(3)), every(1)), vector)


def copy_words(b: Any, source: Any, count: Any) -> Any:
    """``count`` < LANES words from memory, the rest zero: reads nothing past the row's end."""
    room = cgutils.alloca_once_value(b, ir.Constant(INT, [0] * LANES))
    b.store(ir.Constant(INT, [0] * LANES), room)
    target = b.bitcast(room, I32.as_pointer())
    words = b.bitcast(source, I32.as_pointer())
    with cgutils.for_range(b, count) as loop:
        b.store(b.load(b.gep(words, [loop.index]), align=1), b.gep(target, [loop.index]))
    return b.load(room)


def transpose(b: Any, v: list[Any]) -> list[Any]:
    """LANES vectors as a square, transposed: blocks of 1, 2, 4, ... swap across the diagonal."""
    block = 1
    while block < LANES:
        low = [c if c & block == 0 else LANES + c - block for c in range(LANES)]
        high = [c + block if c & block == 0 else LANES + c for c in range(LANES)]
        masks = [ir.Constant(ir.VectorType(I32, LANES), m) for m in (low, high)]
        for i in range(LANES):
            if i & block == 0:
                first, second = v[i], v[i | block]
                v[i] = b.shuffle_vector(first, second, masks[0])
                v[i | block] = b.shuffle_vector(first, second, masks[1])
        block *= 2
    return v
