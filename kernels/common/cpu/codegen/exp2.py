"""Exponential 2^x per lane: an integer power of two times a polynomial of the rest."""

from __future__ import annotations

from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import call, every, fma
from gpu_ops.kernels.common.cpu.codegen.numba_api import ir
from gpu_ops.kernels.common.cpu.codegen.target import SCALEF

LOG2E = 1.4426950408889634
# 2^f = 1 + f * polynomial for f in [0, 1), highest power first; 2^0 is exactly 1. Largest relative errors 3.3e-6,
# for weights that become bfloat16, 8.2e-8 and 3.2e-18. PAIRS is 2 at 1: the weight of a largest score is
# 2^x of an x that rounding may leave just below 0.
PAIRS = (0.013555747234615785, 0.05203236900823575, 0.2413797629377184, 0.6930321208194301)
FLOAT32 = (
    0.0018671302119512632,
    0.009017029962529613,
    0.055799913425224286,
    0.24016445003927303,
    0.6931513118176098,
)
FLOAT64 = (
    6.263466142296021e-10,
    6.559529322770528e-09,
    1.0253212435721934e-07,
    1.320836728895114e-06,
    1.5253175055562796e-05,
    0.0001540351230962866,
    0.0013333558629566756,
    0.009618129099550796,
    0.05550410866560225,
    0.2402265069590633,
    0.693147180559946,
)


def exp2(b: Any, x: Any, polynomial: tuple[float, ...]) -> Any:
    """2^x of a vector, for x up to 127 (float64: 1023); NaN stays NaN.

    0 where 2^x is not a normal number, perhaps for the smallest too: some processors are a hundred times slower if
    a result is below those, even if 0, except for -inf (bfloat16 attention of steeply falling scores: 72 ms, and 25).
    """
    return (_scalef if SCALEF else _shift)(b, x, polynomial)


def _polynomial(b: Any, f: Any, polynomial: tuple[float, ...]) -> Any:
    p = every(f.type, polynomial[0])
    for coefficient in (*polynomial[1:], 1.0):
        p = fma(b, p, f, every(f.type, coefficient))
    return p


def _scalef(b: Any, x: Any, polynomial: tuple[float, ...]) -> Any:
    """2^x with x - floor(x), 0 for -inf, and p * 2^floor(x) in one instruction each: 10 instead of 14."""
    vector, i32 = x.type, ir.IntType(32)
    name, lowest = ("pd", -1022.0) if vector.element == ir.DoubleType() else ("ps", -126.0)
    lanes, zero = ir.IntType(vector.count), every(vector, 0.0)
    whole, rounding = ir.Constant(lanes, -1), ir.Constant(i32, 4)  # all lanes; as everywhere
    down = ir.Constant(i32, 9)  # to an integer, without exceptions
    f = call(b, f"llvm.x86.avx512.mask.reduce.{name}.512", vector, x, down, zero, whole, rounding)
    kept = b.bitcast(b.fcmp_unordered(">=", x, every(vector, lowest)), lanes)
    p = _polynomial(b, f, polynomial)
    return call(b, f"llvm.x86.avx512.mask.scalef.{name}.512", vector, p, x, zero, kept, rounding)


def _shift(b: Any, x: Any, polynomial: tuple[float, ...]) -> Any:
    """2^x by shifts: ``magic`` rounds to an integer, and leaves it plus the exponent's bias in the low mantissa bits.

    So f is in [0, 1], and 1 for some integers x, but 0 for 0.
    """
    vector = x.type
    mantissa, bias = (52, 1023) if vector.element == ir.DoubleType() else (23, 127)
    integer = ir.VectorType(ir.IntType(64 if mantissa == 52 else 32), vector.count)
    magic = every(vector, 1.5 * 2.0**mantissa + bias)
    lowest = every(vector, 0.25 - bias)  # its exponent bits read 0
    x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
    half = every(vector, 0.5 - 2.0 ** -(mantissa + 2))  # the number below it
    rounded = b.fadd(b.fsub(x, half), magic)
    p = _polynomial(b, b.fsub(x, b.fsub(rounded, magic)), polynomial)
    power = b.shl(b.bitcast(rounded, integer), every(integer, mantissa))
    return b.fmul(p, b.bitcast(power, vector))
