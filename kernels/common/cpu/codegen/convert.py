"""Conversion of vectors to rows of any element type: the inverse of ``decode_rows.Rows``, in its element order."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import round_bfloat16, shuffle
from gpu_ops.kernels.common.cpu.codegen.numba_api import ir, types
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, FEATURES

_I16, _I32 = ir.IntType(16), ir.IntType(32)


def narrow(b: Any, dtype: types.Type, vectors: list[Any]) -> Any:
    """The vectors of one chunk rounded to nearest even, as the vector that is stored."""
    if dtype == types.uint16:
        return _bfloat16(b, *vectors)
    if dtype == types.int16:
        half = _half if "+f16c" in FEATURES else _half_by_integers
        return _joined(b, *(half(b, x) for x in vectors))
    return vectors[0]


def _joined(b: Any, low: Any, high: Any) -> Any:
    return shuffle(b, low, high, list(range(2 * low.type.count)))


def _bfloat16(b: Any, even: Any, odd: Any) -> Any:
    n = even.type.count
    if DOT_BFLOAT16:
        both = b.bitcast(round_bfloat16(b, even, odd), ir.VectorType(_I16, 2 * n))
        return shuffle(b, both, both, [i // 2 + i % 2 * n for i in range(2 * n)])
    words = ir.VectorType(_I32, n)

    def every(value: int) -> Any:
        return ir.Constant(words, [value] * n)

    def rounded(x: Any) -> Any:
        u = b.bitcast(x, words)
        to_even = b.add(every(0x7FFF), b.and_(b.lshr(u, every(16)), every(1)))
        quiet_nan = b.or_(u, every(0x400000))  # rounding could carry a NaN's payload into inf
        return b.select(b.fcmp_unordered("uno", x, x), quiet_nan, b.add(u, to_even))

    return b.or_(b.lshr(rounded(even), every(16)), b.and_(rounded(odd), every(-65536)))


def _half(b: Any, x: Any) -> Any:
    return b.bitcast(
        b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), ir.VectorType(_I16, x.type.count)
    )


def _half_by_integers(b: Any, x: Any) -> Any:
    """Convert float32 to float16 in integers, as float16_of_float32 in dtype.py does."""
    n = x.type.count
    words = ir.VectorType(_I32, n)

    def every(value: int) -> Any:
        return ir.Constant(words, [value] * n)

    u = b.bitcast(x, words)
    a = b.and_(u, every(0x7FFFFFFF))
    odd = b.and_(b.lshr(a, every(13)), every(1))
    normal = b.lshr(b.add(b.add(a, every(0xC8000FFF - (1 << 32))), odd), every(13))
    shifted = b.fadd(b.bitcast(a, x.type), ir.Constant(x.type, [0.5] * n))
    subnormal = b.sub(b.bitcast(shifted, words), every(0x3F000000))
    h = b.select(b.icmp_signed("<", a, every(0x38800000)), subnormal, normal)
    special = b.select(b.icmp_signed(">", a, every(0x7F800000)), every(0x7E00), every(0x7C00))
    h = b.select(b.icmp_signed(">=", a, every(0x47800000)), special, h)
    return b.trunc(b.or_(h, b.and_(b.lshr(u, every(16)), every(0x8000))), ir.VectorType(_I16, n))
