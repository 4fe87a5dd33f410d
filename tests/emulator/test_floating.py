"""Floating-point instructions of the emulator against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.forms import FORMATS, edges, expand, operands_of, run_form
from tests.emulator.rounding import (
    NAN,
    bits_array,
    check_elements,
    clamped,
    decode,
    encode,
    flushed,
    flushed_value,
    rounded,
)

MODES = ("rn", "rz", "rm", "rp")


def parts(form):
    """Opcode, flags, element type and rounding mode of a form."""
    opcode, *flags, ptx_type = form.split(".")
    mode = next((flag for flag in flags if flag in MODES), "rn")
    return opcode, flags, ptx_type.removesuffix("x2"), mode


def root(exact):
    """Square root, or a rational number that rounds the same way in every format."""
    scale = 1 << 1200
    whole = math.isqrt(exact.numerator * scale * scale // exact.denominator)
    is_root = Fraction(whole, scale) ** 2 == exact
    return Fraction(whole, scale) if is_root else Fraction(2 * whole + 1, 2 * scale)


#: The result of finite operands as a rational number.
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": root,
}


def sign(value):
    return math.copysign(1.0, value)


def zero(operation, mode, values):
    """Exactly zero result of finite operands."""
    if operation in ("add", "sub", "fma"):
        *factors, term = values
        signs = [math.prod(map(sign, factors)), -sign(term) if operation == "sub" else sign(term)]
        both = signs[0] if signs[0] == signs[1] else -1.0 if mode == "rm" else 1.0
        return math.copysign(0.0, both)
    return math.copysign(0.0, math.prod(map(sign, values)))


def limit(operation, *values):
    """Result where an operand is infinite or NaN, or the divisor is zero."""
    if operation in ("div", "rcp"):
        dividend, divisor = (1.0, *values)[-2:]
        if divisor == 0:
            infinite = math.copysign(math.inf, sign(dividend) * sign(divisor))
            return math.nan if dividend == 0 or math.isnan(dividend) else infinite
        return dividend / divisor
    if operation == "sqrt":
        return math.nan if values[0] < 0 else values[0]
    a, b, c = {
        "add": lambda a, b: (a, 1.0, b),
        "sub": lambda a, b: (a, 1.0, -b),
        "mul": lambda a, b: (a, b, 0.0),
        "fma": lambda a, b, c: (a, b, c),
    }[operation](*values)
    # Use signs only, so that no finite product overflows.
    a, b = (x if x == 0 or not math.isfinite(x) else sign(x) for x in (a, b))
    return a * b + c


def arithmetic(operation, element, mode):
    """Definition of an operation: the exact result, rounded once."""

    def oracle(*values):
        special = not all(map(math.isfinite, values))
        if operation in ("div", "rcp"):
            special |= values[-1] == 0
        if operation == "sqrt":
            special |= values[0] < 0
        if special:
            return encode(element, limit(operation, *values))
        exact = EXACT[operation](*map(Fraction, values))
        return rounded(element, exact, mode) if exact else encode(element, zero(operation, mode, values))

    return oracle


def with_flags(oracle, element, flags):
    """Definition with subnormals flushed before and after it, and its result clamped."""

    def run(*values):
        if "ftz" in flags:
            values = [flushed_value(element, x) for x in values]
        bits = oracle(*values)
        if "ftz" in flags:
            bits = flushed(element, bits)
        return clamped(element, bits, flags)

    return run


def encode_any(element, value):
    """Bits of a value of the format; any NaN has the same bits."""
    exponent, fraction, _ = FORMATS[element]
    bits = encode(element, value)
    return ((1 << exponent + 1) - 1 << fraction - 1) if bits == NAN else bits


def check_arithmetic(form, operands):
    opcode, flags, element, mode = parts(form)
    oracle = arithmetic("fma" if opcode == "mad" else opcode, element, mode)
    check_elements(form, with_flags(oracle, element, flags), operands)


@pytest.mark.parametrize(
    "form",
    expand(
        "{add,sub,mul}.{f32,f64,f16,f16x2,bf16,bf16x2,f32x2}",
        "{add,sub,mul,fma,div,rcp,sqrt}.{rn,rz,rm,rp}.{f32,f64}",
        "{add,mul,fma}.{rn,rz,rm,rp}.f32x2",
        "{add,sub,mul,fma}.rn.{f16,f16x2,bf16,bf16x2}",
        "mad.{rn,rz}.{f32,f64}",
    ),
)
def test_arithmetic(form, rng):
    check_arithmetic(form, operands_of(form, rng, 200))


@pytest.mark.parametrize(
    "form",
    expand(
        "{add,mul,fma}.{rn,rm}.{ftz,sat,ftz.sat}.f32",
        "{div,rcp,sqrt}.rn.ftz.f32",
        "{sub,fma}.rn.{ftz,sat,ftz.sat}.{f16,f16x2}",
        "fma.rn.relu.{f16,f16x2,bf16,bf16x2}",
        "fma.rn.ftz.relu.f16",
        "add.rz.ftz.f32x2",
    ),
)
def test_flags(form, rng):
    check_arithmetic(form, operands_of(form, rng, 200))


def hard_triples(element, rng, n):
    """Operands of fma whose result is at or next to the midpoint between two values, or nearly cancels."""
    exponent, fraction, _ = FORMATS[element]
    bias = (1 << exponent - 1) - 1
    last = 2.0**-fraction

    def any_sign(value):
        return value if rng.integers(2) else -value

    def product_near_half_of_last_place():
        """a * b is half the last place of c, or that times 1 - 2^-2f or so."""
        bits = int(rng.integers(0, (2 * bias + 1) << fraction))
        power = max(bits >> fraction, 1) - bias - fraction - 1
        low = max(power // 2, 1 - bias)
        pairs = [(1.0, 1.0), (1 + last, 1 - last), (1 + last, 1.0), (1 - last / 2, 1.0)]
        left, right = pairs[rng.integers(len(pairs))]
        return (
            any_sign(math.ldexp(left, low)),
            math.ldexp(right, power - low),
            any_sign(decode(element, bits)),
        )

    def product_halfway():
        """a * b has one bit too many, and c is zero or much smaller."""
        product = 0
        while product.bit_length() != fraction + 2:
            width = int(rng.integers(1, fraction + 2))
            left = int(rng.integers(1 << width - 1, 1 << width)) | 1
            right = int(rng.integers(1, 1 << fraction + 2 - width)) | 1
            product = left * right
        scale = int(rng.integers(-bias // 4, bias // 4))
        tiny = math.ldexp(
            float(rng.integers(0, 2)), max(scale - int(rng.integers(0, bias // 2)), 1 - bias - fraction)
        )
        return any_sign(math.ldexp(left, scale)), float(right), any_sign(tiny)

    def cancelling():
        a, c = (
            decode(element, int(bits)) for bits in rng.integers(bias - 4 << fraction, bias + 4 << fraction, 2)
        )
        return any_sign(a), nearest_value(element, c / a), any_sign(c)

    kinds = (product_near_half_of_last_place, product_halfway, cancelling)
    triples = [kinds[i % 3]() for i in range(n)]
    return [[encode_any(element, x) for x in column] for column in zip(*triples, strict=True)]


def nearest_value(element, value):
    """Nearest value of the format."""
    return decode(element, encode(element, value))


@pytest.mark.parametrize(
    ("form", "n"),
    [
        *((f"fma.{mode}.f32", 6000 if mode == "rn" else 2000) for mode in MODES),
        *((f"fma.{mode}.f64", 2000 if mode == "rn" else 500) for mode in MODES),
        ("fma.rn.f16", 4000),
        ("fma.rn.bf16", 4000),
    ],
)
def test_fma_next_to_ties_and_cancelling(form, n, rng):
    _, _, element, _ = parts(form)
    columns = hard_triples(element, rng, n)
    check_arithmetic(form, [bits_array(element, column) for column in columns])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ["f32", "f64"])
def test_sums_next_to_ties(element, mode, rng):
    """b is a few units in the last place of a, or much smaller."""
    exponent, fraction, _ = FORMATS[element]
    a = rng.integers(0, ((1 << exponent) - 1) << fraction, 600)
    down = rng.integers(0, fraction + 4, 600)
    field = np.maximum((a >> fraction) - down, 0)
    b = field << fraction | rng.integers(0, 1 << fraction, 600) & -(1 << rng.integers(0, fraction, 600))
    b |= rng.integers(0, 2, 600) << exponent + fraction
    operands = [bits_array(element, column.astype(np.uint64).tolist()) for column in (a, b)]
    for opcode in ("add", "sub"):
        check_arithmetic(f"{opcode}.{mode}.{element}", operands)


def extremum(opcode, flags, element):
    def oracle(*values):
        if "abs" in flags:
            signs, values = math.prod(map(sign, values)), [abs(x) for x in values]
        numbers = [x for x in values if not math.isnan(x)]
        if not numbers or ("NaN" in flags and len(numbers) < len(values)):
            return NAN
        result = (min if opcode == "min" else max)(numbers, key=lambda x: (x, sign(x)))
        return encode(element, math.copysign(result, signs) if "xorsign" in flags else result)

    return oracle


@pytest.mark.parametrize(
    "form",
    expand(
        "{min,max}.{f32,f64,f16,f16x2,bf16,bf16x2}",
        "{min,max}.{NaN,xorsign.abs,NaN.xorsign.abs}.{f32,f16,f16x2,bf16,bf16x2}",
        "{min,max}.{ftz,ftz.NaN,ftz.xorsign.abs}.{f32,f16,f16x2}",
        "{min3,max3}.{ftz,NaN,abs,ftz.NaN.abs}.f32",
        "{min3,max3}.f32",
    ),
)
def test_float_extremum(form, rng):
    opcode, flags, element, _ = parts(form)
    oracle = extremum(opcode[:3], flags, element)
    check_elements(form, with_flags(oracle, element, set(flags) & {"ftz"}), operands_of(form, rng, 200))


@pytest.mark.parametrize("form", expand("{min,max}.NaN.{f32,f16,f16x2,bf16,bf16x2}"))
def test_extremum_gives_the_canonical_nan(form):
    _, _, element, _ = parts(form)
    ptx_type = form.split(".")[-1]
    exponent, fraction, _ = FORMATS[element]
    some = ((1 << exponent) - 1 << fraction) + 1
    pair = 2 if ptx_type != element else 1
    (result,) = run_form(form, bits_array(ptx_type, [some] * pair), bits_array(ptx_type, [0] * pair))
    canonical = (1 << exponent + fraction) - 1
    expected = bits_array(ptx_type, [canonical] * pair)
    np.testing.assert_array_equal(result.view(f"u{result.itemsize}"), expected.view(f"u{result.itemsize}"))


@pytest.mark.parametrize(
    "form", expand("{abs,neg}.{f32,f64,f16,f16x2,bf16,bf16x2}", "{abs,neg}.ftz.{f32,f16,f16x2}")
)
def test_float_sign(form, rng):
    opcode, flags, element, _ = parts(form)
    oracle = with_flags(lambda a: encode(element, abs(a) if opcode == "abs" else -a), element, flags)
    check_elements(form, oracle, [edges(form.split(".")[-1], rng, 400)])


# Approximate instructions return the nearest value, and special values as documented.

INF = math.inf


def exp2(x):
    return INF if x > 1000 else math.exp2(x)  # Python raises where IEEE overflows


def log2(x):
    return -INF if x == 0 else math.nan if x < 0 else math.log2(x)


def reciprocal(x):
    return math.copysign(INF, x) if x == 0 else 1 / x


def sine(x):
    return math.nan if math.isinf(x) else math.sin(flushed_value("f32", x))


FUNCTIONS = {
    "ex2": exp2,
    "lg2": log2,
    "rcp": reciprocal,
    "rsqrt": lambda x: math.nan if x < 0 else reciprocal(math.sqrt(x)),
    "sqrt": lambda x: math.nan if x < 0 else math.sqrt(x),
    "sin": sine,
    "cos": lambda x: math.nan if math.isinf(x) else math.cos(x),
    "tanh": math.tanh,
}


def check(form, function, operands):
    *_, ptx_type = form.split(".")
    element = ptx_type.removesuffix("x2")

    def oracle(*values):
        if "ftz" in form:
            return flushed(element, encode(element, function(*(flushed_value(element, x) for x in values))))
        return encode(element, function(*values))

    check_elements(form, oracle, operands)


@pytest.mark.parametrize(
    "form",
    expand(
        "{ex2,lg2,rcp,rsqrt,sqrt,sin,cos}.approx.f32",
        "{ex2,lg2,rcp,rsqrt,sqrt,sin,cos}.approx.ftz.f32",
        "tanh.approx.{f32,f16,f16x2,bf16,bf16x2}",
        "ex2.approx.{f16,f16x2}",
        "ex2.approx.ftz.{bf16,bf16x2}",
    ),
)
def test_nearest_value(form, rng):
    opcode, *_, ptx_type = form.split(".")
    operands = [edges(ptx_type, rng, 600)]
    if ptx_type == "f32":  # most random bits are too large or too small for these functions
        operands[0] = np.concatenate([operands[0], rng.normal(0, 8, 400).astype(np.float32)])
    check(form, FUNCTIONS[opcode], operands)


def divide(a, b):
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(INF, a) * math.copysign(1, b)
    return a / b  # float64, whose quotient rounds to float32 as the exact one does


def divide_by_reciprocal(a, b):
    return divide(a, b) if math.isnan(b) or abs(b) <= 2.0**126 else a * math.copysign(0.0, b)


@pytest.mark.parametrize("form", expand("div.{approx,full}.f32", "div.{approx,full}.ftz.f32"))
def test_division(form, rng):
    check(form, divide_by_reciprocal if "approx" in form else divide, operands_of(form, rng, 400))


def upper_word(function):
    """Function of the upper 32 bits, with 20 fraction bits in the result."""

    def oracle(x):
        if math.isnan(x):
            return NAN
        bits = encode("f64", x) >> 32 << 32
        high = np.array([bits], np.uint64).view(np.float64)[0].item()
        value = flushed_value("f64", function(flushed_value("f64", high)))
        if value == 0 or not math.isfinite(value):
            return encode("f64", value)
        step = Fraction(2) ** (math.frexp(value)[1] - 21)
        return encode("f64", float(round(Fraction(value) / step) * step))

    return oracle


@pytest.mark.parametrize("opcode", ["rcp", "rsqrt"])
def test_upper_word(opcode, rng):
    check_elements(f"{opcode}.approx.ftz.f64", upper_word(FUNCTIONS[opcode]), [edges("f64", rng, 600)])


def test_rsqrt_of_f64(rng):
    check_elements(
        "rsqrt.approx.f64", lambda x: encode("f64", FUNCTIONS["rsqrt"](x)), [edges("f64", rng, 600)]
    )


@pytest.mark.parametrize(
    ("form", "operand", "result"),
    [
        ("ex2.approx.f32", -INF, 0.0),
        ("ex2.approx.f32", -0.0, 1.0),
        ("ex2.approx.f32", -140.0, 2.0**-140),
        ("ex2.approx.ftz.f32", -140.0, 0.0),
        ("ex2.approx.f32", 128.0, INF),
        ("lg2.approx.f32", -0.0, -INF),
        ("lg2.approx.f32", 2.0**-149, -149.0),
        ("lg2.approx.ftz.f32", -(2.0**-149), -INF),
        ("rcp.approx.f32", -0.0, -INF),
        ("rcp.approx.f32", 2.0**127, 2.0**-127),
        ("rcp.approx.ftz.f32", 2.0**127, 0.0),
        ("rcp.approx.ftz.f32", -(2.0**-140), -INF),
        ("rsqrt.approx.f32", -0.0, -INF),
        ("rsqrt.approx.f32", INF, 0.0),
        ("sin.approx.f32", -(2.0**-140), -0.0),
        ("tanh.approx.f32", -INF, -1.0),
    ],
)
def test_special_values(form, operand, result):
    (actual,) = run_form(form, np.array([operand], np.float32))
    np.testing.assert_array_equal(actual.view(np.uint32), np.array([result], np.float32).view(np.uint32))


def test_quotients_that_float64_would_round_twice_have_the_nearest_value(rng):
    """The division oracle relies on this: quotients of 24-bit numbers are never that close to a tie."""
    a, b = (rng.integers(1 << 23, 1 << 24, 2000).tolist() for _ in range(2))
    for x, y in zip(a, b, strict=True):
        assert encode("f32", x / y) == rounded("f32", Fraction(x, y), "rn")
