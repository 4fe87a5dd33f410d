"""Gated linear units as LLVM IR: ``y = act(gate) * up`` and its gradient, with act(g) = g * c(g), c from 0 to 1
(relu2: from 0 on).

Infinities take their limits, act(-inf) = -0 and act'(inf) = 1 (relu2: 0 and inf): where ``inf * 0`` would appear, a
factor is clamped first. NaN stays NaN. Each formula is the same instructions for every element of every row, so
results do not depend on where a row begins or ends.

===========  ==========================  =======================================================
computed in  for results of              e^x on [-log(2) / 2, log(2) / 2], largest relative error
===========  ==========================  =======================================================
float32      float16, bfloat16           degree 4, 2.6e-6
float32      float32                     degree 6, 2.5e-9 (rounding dominates: 1e-7 in all)
float64      float64                     degree 11, 4.2e-18
===========  ==========================  =======================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_ops.kernels.common.cpu.codegen.build import call, fma
from gpu_ops.kernels.common.cpu.codegen.numba_api import ir, types
from gpu_ops.kernels.common.cpu.codegen.rows import Chunk, Step, map_rows
from gpu_ops.kernels.common.cpu.codegen.target import VECTOR_BYTES


@dataclass(frozen=True)
class Number:
    """Format in which e^x is computed: polynomial with the highest power first, log 2 in two parts."""

    mantissa: int
    bias: int
    polynomial: tuple[float, ...]
    log2: tuple[float, float]
    limits: tuple[float, float]
    """e^x is 0 at the first; at the second sigmoid is 1, and x^3 * (1 - sigmoid) is negligible."""
    largest: float


_LOG2_32 = 0.693145751953125, 1.4286068203094172e-06
_LIMITS_32 = -88.1, 60.0
_LARGEST_32 = float.fromhex("0x1.fffffep+127")
HALF = Number(
    23,
    127,
    (0.04145777789464826, 0.16791401152297825, 0.500043935251611, 0.9999631151395357, 0.9999992525945525),
    _LOG2_32,
    _LIMITS_32,
    _LARGEST_32,
)
SINGLE = Number(
    23,
    127,
    (
        0.0013941108433972451,
        0.008375126398153337,
        0.041666352896775165,
        0.16666415514653277,
        0.5000000047117757,
        1.0,
        1.0,
    ),
    _LOG2_32,
    _LIMITS_32,
    _LARGEST_32,
)
DOUBLE = Number(
    52,
    1023,
    (
        2.0958715906344595e-09,
        2.5111953971307783e-08,
        2.755714613723696e-07,
        2.7557235697483464e-06,
        2.4801587452759796e-05,
        0.00019841269894825146,
        0.0013888888888832424,
        0.008333333333317934,
        0.04166666666666675,
        0.16666666666666682,
        0.5,
        1.0,
        1.0,
    ),
    (0.6931471803691238, 1.9082149292705877e-10),
    (-709.4, 300.0),
    float.fromhex("0x1.fffffffffffffp+1023"),
)


class Lanes:
    """A vector with arithmetic; Python numbers are constants in all lanes."""

    def __init__(self, b: Any, value: Any, number: Number) -> None:
        self.b, self.value, self.number = b, value, number

    def of(self, value: Any) -> Lanes:
        return Lanes(self.b, value, self.number)

    def operand(self, x: Lanes | float) -> Any:
        return x.value if isinstance(x, Lanes) else ir.Constant(self.value.type, [x] * self.value.type.count)

    def __add__(self, x: Lanes | float) -> Lanes:
        return self.of(self.b.fadd(self.value, self.operand(x)))

    def __sub__(self, x: Lanes | float) -> Lanes:
        return self.of(self.b.fsub(self.value, self.operand(x)))

    def __mul__(self, x: Lanes | float) -> Lanes:
        return self.of(self.b.fmul(self.value, self.operand(x)))

    def fma(self, factor: Lanes | float, term: Lanes | float) -> Lanes:
        return self.of(fma(self.b, self.value, self.operand(factor), self.operand(term)))

    def at_least(self, low: float) -> Lanes:
        """Maximum of each lane and ``low``; NaN stays NaN, as in ``at_most``."""
        below = self.b.fcmp_ordered("<", self.value, self.operand(low))
        return self.of(self.b.select(below, self.operand(low), self.value))

    def at_most(self, high: float) -> Lanes:
        above = self.b.fcmp_ordered(">", self.value, self.operand(high))
        return self.of(self.b.select(above, self.operand(high), self.value))

    def polynomial(self, coefficients: tuple[float, ...]) -> Lanes:
        """Polynomial of the lanes; the coefficient of the highest power is first."""
        total = self.of(self.operand(coefficients[0]))
        for coefficient in coefficients[1:]:
            total = total.fma(self, coefficient)
        return total

    def reciprocal(self) -> Lanes:
        """Reciprocal of a number from 0.5 to 2^120 (more in float64)."""
        if VECTOR_BYTES == 64 and self.number is not DOUBLE:  # an estimate of 14 bits, and a Newton step
            none = ir.Constant(ir.IntType(16), -1)
            name, undefined = "llvm.x86.avx512.rcp14.ps.512", ir.Constant(self.value.type, ir.Undefined)
            near = self.of(call(self.b, name, self.value.type, self.value, undefined, none))
            missing = self.of(self.b.fneg(self.value)).fma(near, 1.0)
            return near.fma(missing, near)
        return self.of(self.b.fdiv(self.operand(1.0), self.value))

    def integer_power(self) -> tuple[Lanes, Lanes]:
        """2^n and x - n log(2), where n is the integer next to x / log(2). Adding ``magic`` rounds to it, and leaves
        it in the low mantissa bits with the exponent's bias added; from -bias on 2^n is 0."""
        words = ir.VectorType(ir.IntType(64 if self.number is DOUBLE else 32), self.value.type.count)
        magic = 1.5 * 2.0**self.number.mantissa + self.number.bias
        rounded = self.fma(1.0 / math.log(2.0), magic)
        n = rounded - magic
        high, low = self.number.log2
        rest = n.fma(-low, n.fma(-high, self))
        shift = ir.Constant(words, [self.number.mantissa] * words.count)
        power = self.b.shl(self.b.bitcast(rounded.value, words), shift)
        return self.of(self.b.bitcast(power, self.value.type)), rest


def exp(x: Lanes) -> Lanes:
    """Exponential of x <= 0; 0 where the result is not a normal number."""
    power, rest = x.at_least(x.number.limits[0]).integer_power()
    return power * rest.polynomial(x.number.polynomial)


def sigmoid(x: Lanes) -> tuple[Lanes, Lanes]:
    """sigmoid(x) and 1 - sigmoid(x), the latter without cancellation.

    1 / (1 + e^-x) = 2^n / (2^n + e^-rest): neither overflows, and where 2^n is 0 the result is.
    """
    low, high = x.number.limits
    power, rest = x.at_least(low).at_most(high).integer_power()
    p = (rest * -1.0).polynomial(x.number.polynomial)
    r = (power + p).reciprocal()
    return power * r, p * r


def silu(g: Lanes) -> Lanes:
    s, _ = sigmoid(g)
    return g.at_least(g.number.limits[0]) * s


def silu_backward(g: Lanes) -> tuple[Lanes, Lanes]:
    """Return act and act'."""
    s, rest = sigmoid(g)
    low, high = g.number.limits
    not_below = g.at_least(low)
    return not_below * s, s * not_below.at_most(high).fma(rest, 1.0)


def gelu(g: Lanes) -> Lanes:
    phi, _ = normal(g)
    return g.at_least(-g.number.largest) * phi


def gelu_backward(g: Lanes) -> tuple[Lanes, Lanes]:
    phi, density = normal(g)
    near = g.at_least(-g.number.largest).at_most(g.number.largest)
    return g.at_least(-g.number.largest) * phi, near.fma(density, phi)


def gelu_tanh(g: Lanes) -> Lanes:
    s, _ = sigmoid(tanh_argument(g))
    return g.at_least(-g.number.largest) * s


def gelu_tanh_backward(g: Lanes) -> tuple[Lanes, Lanes]:
    s, rest = sigmoid(tanh_argument(g))
    near = g.at_least(-40.0).at_most(40.0)  # beyond, s is 0 or 1 and the slope could overflow
    slope = (near * near).fma(SLOPE_3, SLOPE_1)
    return g.at_least(-g.number.largest) * s, s * (near * slope).fma(rest, 1.0)


def relu2(g: Lanes) -> Lanes:
    c = g.at_least(0.0)
    return c * c


def relu2_backward(g: Lanes) -> tuple[Lanes, Lanes]:
    c = g.at_least(0.0)
    return c * c, c + c


# (1 + tanh z) / 2 = sigmoid(2 z),  2 z = SLOPE_1 * g + SLOPE_3 / 3 * g**3
SLOPE_1 = 2.0 * math.sqrt(2.0 / math.pi)
SLOPE_3 = 3.0 * 0.044715 * SLOPE_1


def tanh_argument(g: Lanes) -> Lanes:
    return g * (g * g).fma(SLOPE_3 / 3.0, SLOPE_1)


# The minimax fit of exp(a^2 / 2) * Phi(-a) on [0, 14] in relative error, 5.8e-8, in t = 1 / (1 + 0.3 a)
_TAIL = (
    0.03837834852134263,
    -0.16916638279325766,
    0.2286606067688054,
    -0.07650703619797662,
    0.14253587883624855,
    0.094683386164979,
    0.12192037344142682,
    0.11948768510479232,
    7.169070897206087e-06,
)


def normal(g: Lanes) -> tuple[Lanes, Lanes]:
    """The normal distribution function and its density.

    Phi(-a) = exp(-a^2 / 2) * polynomial for a >= 0: one formula, no branches; in float32 Phi is within 2e-7.
    """
    b = g.b
    e = exp(g * g * -0.5)
    density = e * math.sqrt(0.5 / math.pi)
    if g.number is DOUBLE:
        return g.of(_erfc(b, g * -math.sqrt(0.5))) * 0.5, density
    a = g.of(call(b, f"llvm.fabs.v{g.value.type.count}f32", g.value.type, g.value)).at_most(_FAR)
    tail = e * a.fma(0.3, 1.0).reciprocal().polynomial(_TAIL)
    below = b.fcmp_ordered("<", g.value, g.operand(0.0))
    return g.of(b.select(below, tail.value, (g.of(g.operand(1.0)) - tail).value)), density


_FAR = 1e6  # e is 0 long before


def _erfc(b: Any, x: Lanes) -> Any:
    """Complementary error function of float64, lane by lane, from libm."""
    result = x.value
    for lane in range(result.type.count):
        at = ir.Constant(ir.IntType(32), lane)
        value = call(b, "erfc", ir.DoubleType(), b.extract_element(x.value, at))
        result = b.insert_element(result, value, at)
    return result


_FORWARD: dict[str, Callable[[Lanes], Lanes]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}
_BACKWARD: dict[str, Callable[[Lanes], tuple[Lanes, Lanes]]] = {
    "silu": silu_backward,
    "gelu": gelu_backward,
    "gelu_tanh": gelu_tanh_backward,
    "relu2": relu2_backward,
}


def _by_lanes(step: Callable[[list[Lanes]], tuple[Lanes, ...]]) -> Step:
    """Turn a step on vectors into one on chunks."""

    def on_chunks(operands: list[Chunk], _: list[Chunk]) -> tuple[Chunk, ...]:
        b, row = operands[0].b, operands[0].row
        kind = DOUBLE if row.dtype == types.float64 else HALF if row.dtype.bitwidth == 16 else SINGLE
        parts = zip(*(chunk.parts for chunk in operands), strict=True)
        results = [step([Lanes(b, x, kind) for x in part]) for part in parts]
        return tuple(Chunk(b, row, [y.value for y in result]) for result in zip(*results, strict=True))

    return on_chunks


def _forward(act: Callable[[Lanes], Lanes]) -> Step:
    """y = act(gate) * up"""
    return _by_lanes(lambda operands: (act(operands[0]) * operands[1],))


def _backward(act: Callable[[Lanes], tuple[Lanes, Lanes]], *, hidden: bool) -> Step:
    """dgate = dy * up * act'(gate), dup = dy * act(gate), and h = act(gate) * up if ``hidden``."""

    def step(operands: list[Lanes]) -> tuple[Lanes, ...]:
        dy, gate, up = operands
        value, slope = act(gate)
        # dy * up could be infinite where the slope is 0
        return dy * slope * up, dy * value, *((value * up,) if hidden else ())

    return _by_lanes(step)


forward = {name: map_rows(_forward(act)) for name, act in _FORWARD.items()}
backward = {name: map_rows(_backward(act, hidden=False), streamed=2) for name, act in _BACKWARD.items()}
backward_hidden = {name: map_rows(_backward(act, hidden=True), streamed=3) for name, act in _BACKWARD.items()}
