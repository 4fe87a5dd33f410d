"""Floating-point formats in exact arithmetic: decode bits, round rational numbers, compare a form with the result.

Values are Python floats, which hold every value of every format. Exact results are Fractions. Rounded results are
bits, with ``NAN`` for any NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from gpu_ops.emulator.syntax import DTYPE, Array
from tests.emulator.forms import FORMATS, bits_of, form_op, run_form

NAN = "NaN"


def decode(element: str, bits: int) -> float:
    """Value of these bits in a format."""
    exponent, fraction, below = FORMATS[element]
    bits >>= below
    all_ones = (1 << exponent) - 1
    sign = -1.0 if bits >> exponent + fraction else 1.0
    field, part = bits >> fraction & all_ones, bits & (1 << fraction) - 1
    if element == "e4m3" and field == all_ones and part == 7:  # the only NaN, and no infinities
        return math.nan
    if element != "e4m3" and field == all_ones:
        return math.copysign(math.nan if part else math.inf, sign)
    bias = all_ones >> 1
    if field == 0:
        return sign * math.ldexp(part, 1 - bias - fraction)
    return sign * math.ldexp(part + (1 << fraction), field - bias - fraction)


def encode(element: str, value: float, mode: str = "rn") -> int | str:
    """Bits of a value, rounded if the format cannot represent it."""
    exponent, fraction, below = FORMATS[element]
    sign = int(math.copysign(1.0, value) < 0) << exponent + fraction
    if math.isnan(value):
        return NAN
    if math.isinf(value):
        return (sign | (1 << exponent) - 1 << fraction) << below
    return rounded(element, Fraction(value), mode) if value else sign << below


def rounded(element: str, exact: Fraction, mode: str) -> int:
    """Bits of a rational number other than zero, in one of the modes rn, rz, rm, rp and rna (ties away)."""
    exponent, fraction, below = FORMATS[element]
    negative, size = exact < 0, abs(exact)
    bias = (1 << exponent - 1) - 1
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= size < Fraction(2) ** power
    power = max(power, 1 - bias)  # of the leading bit; below this, values are subnormal
    steps = size / Fraction(2) ** (power - fraction)
    count, rest = divmod(steps, 1)
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and count % 2 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    # The leading bit adds one to the exponent field, as does a carry.
    bits = (power + bias - 1 << fraction) + count + up
    infinity = (1 << exponent) - 1 << fraction
    if bits >= infinity:
        stays = mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
        bits = infinity - 1 if stays else infinity
    return (int(negative) << exponent + fraction | bits) << below


def flushed(element: str, bits: int | str) -> int | str:
    """Flush subnormal bits to zero of their sign."""
    exponent, fraction, below = FORMATS[element]
    assert below == 0
    if bits == NAN or bits >> fraction & (1 << exponent) - 1:
        return bits
    return bits >> exponent + fraction << exponent + fraction


def flushed_value(element: str, value: float) -> float:
    """Flush a value to zero of its sign if it is subnormal in the format."""
    bias = (1 << FORMATS[element][0] - 1) - 1
    return math.copysign(0.0, value) if abs(value) < 2.0 ** (1 - bias) else value


def clamped(element: str, bits: int | str, flags: Sequence[str]) -> int | str:
    """Apply ``.sat`` or ``.relu`` to a result, if they are among the flags."""
    value = math.nan if bits == NAN else decode(element, bits)
    if "sat" in flags:
        return encode(element, min(value, 1.0) if value > 0 else 0.0)
    if "relu" in flags and value <= 0:
        return 0
    return bits


def elements(ptx_type: str, array: Array) -> list[int]:
    """Bits of every element; of pairs, the lower element first."""
    words = bits_of(array)
    if ptx_type.endswith("x2"):
        return words.view(f"u{words.itemsize // 2}").tolist()
    return words.tolist()


def values(ptx_type: str, array: Array) -> list[float] | list[int]:
    """Numbers that an operand represents."""
    element = ptx_type.removesuffix("x2")
    if element not in FORMATS:
        return array.tolist()
    return [decode(element, bits) for bits in elements(ptx_type, array)]


def is_nan(element: str, bits: int) -> bool:
    return element in FORMATS and math.isnan(decode(element, bits))


def check_elements(form: str, oracle: Callable[..., int | str], operands: Sequence[Array]) -> None:
    """Compare an elementwise form with ``oracle``, which maps values to bits (integers to integers)."""
    op = form_op(form)
    (result,) = run_form(form, *operands)
    rows = list(zip(*(values(t, x) for t, x in zip(op.reads, operands, strict=True)), strict=True))
    compare(form, op.writes[0], result, [oracle(*row) for row in rows], rows)


def compare(
    form: str, ptx_type: str, result: Array, wanted: Sequence[int | str], rows: Sequence[object]
) -> None:
    """Fail on the first element that differs."""
    element = ptx_type.removesuffix("x2")
    actual = elements(ptx_type, result) if element in FORMATS else result.tolist()
    assert len(actual) == len(wanted) > 0
    for have, expected, row in zip(actual, wanted, rows, strict=True):
        if not (is_nan(element, have) if expected == NAN else have == expected):
            text = expected if expected == NAN else hex(expected)
            pytest.fail(f"{form} of {row}: {have:#x}, should be {text}")


def bits_array(ptx_type: str, bits: Sequence[int]) -> Array:
    """Operand from the bits of its elements; of pairs, the lower element first."""
    dtype = DTYPE[ptx_type]
    size = dtype.itemsize // (2 if ptx_type.endswith("x2") else 1)
    return np.array(bits, f"u{size}").view(dtype)
