"""Approximate instructions return the nearest value, and special values as documented."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator.forms import edges, expand, operands_of, run_form
from tests.emulator.rounding import NAN, check_elements, encode, flushed, flushed_value, rounded

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
