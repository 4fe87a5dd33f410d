"""cvt on the emulator against exact rational arithmetic, and the packed forms against ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gpu_ops.emulator.syntax import BITS, DTYPE
from tests.emulator.forms import FORMATS, edges, expand, form_op, run_form
from tests.emulator.rounding import (
    NAN,
    bits_array,
    check_elements,
    clamped,
    compare,
    decode,
    encode,
    flushed,
    flushed_value,
    rounded,
    values,
)

INTEGERS = "{u8,s8,u16,s16,u32,s32,u64,s64}"
MODES = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
#: Pairs of formats: the second includes all values of the first.
WIDER = [("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64")]
NARROWER = [*((wider, narrow) for narrow, wider in WIDER), ("f16", "bf16"), ("bf16", "f16")]


def limits(ptx_type):
    info = np.iinfo(DTYPE[ptx_type])
    return int(info.min), int(info.max)


def wrap(ptx_type, value):
    low, high = limits(ptx_type)
    return (value - low) % (high - low + 1) + low


@pytest.mark.parametrize("form", expand(f"cvt.{INTEGERS}.{INTEGERS}", f"cvt.sat.{INTEGERS}.{INTEGERS}"))
def test_integer_to_integer(form, rng):
    *flags, target, source = form.split(".")[1:]
    low, high = limits(target)
    oracle = (lambda x: min(max(x, low), high)) if flags else (lambda x: wrap(target, x))
    check_elements(form, oracle, [edges(source, rng, 200)])


@pytest.mark.parametrize("form", expand(f"cvt.{{rn,rz,rm,rp}}.{{f16,bf16,f32,f64}}.{INTEGERS}"))
def test_integer_to_float(form, rng):
    _, mode, target, source = form.split(".")
    operand = edges(source, rng, 200)
    check_elements(form, lambda x: encode_integer(target, x, mode), [operand])


def encode_integer(element, value, mode):
    return rounded(element, Fraction(value), mode) if value else 0


@pytest.mark.parametrize("form", expand("cvt.{rn,rz,rm,rp}.{f16,bf16,f32,f64}.{u64,s64}"))
def test_long_integers_next_to_ties(form, rng):
    """Integers at or close to a value of the format or the midpoint between two."""
    _, mode, target, source = form.split(".")
    fraction = FORMATS[target][1]
    leading = rng.integers(1 << fraction + 1, 1 << fraction + 2, 300).tolist()  # one bit more than fits
    shifts = rng.integers(0, BITS[source] - fraction - 2, 300).tolist()
    numbers = [
        (x << s) + d for x, s, d in zip(leading, shifts, rng.integers(-1, 2, 300).tolist(), strict=True)
    ]
    numbers += [-x for x in numbers]
    operand = np.array([wrap(source, x) for x in numbers], DTYPE[source])
    check_elements(form, lambda x: encode_integer(target, x, mode), [operand])


def to_integer(target, source, mode):
    low, high = limits(target)

    def oracle(x):
        if math.isnan(x):
            return wrap(target, 1 << BITS[target] - 1) if source == "f64" or BITS[target] == 64 else 0
        if math.isinf(x):
            return high if x > 0 else low
        return min(max(INTEGRAL[mode](x), low), high)

    return oracle


def near_limits(source, rng):
    """Floats near the ends of the integer types and halfway between small integers."""
    ends = [
        2.0**n * (1 + d) for n in (7, 8, 15, 16, 31, 32, 63, 64) for d in (0, 2.0**-9, -(2.0**-9), 2.0**-30)
    ]
    halves = (rng.integers(-600, 600, 200) / 2).tolist()
    numbers = [x for end in ends for x in (end, -end)] + halves
    return bits_array(source, [encode(source, x) for x in numbers])


@pytest.mark.parametrize("form", expand(f"cvt.{{rni,rzi,rmi,rpi}}.{INTEGERS}.{{f16,bf16,f32,f64}}"))
def test_float_to_integer(form, rng):
    _, mode, target, source = form.split(".")
    operand = np.concatenate([edges(source, rng, 150), near_limits(source, rng)])
    check_elements(form, to_integer(target, source, mode), [operand])


@pytest.mark.parametrize("form", expand("cvt.{rzi,rpi}.ftz.{s32,u64}.f32", "cvt.rni.sat.u8.f32"))
def test_float_to_integer_with_flags(form, rng):
    _, mode, flag, target, source = form.split(".")
    oracle = to_integer(target, source, mode)
    operand = np.concatenate([edges(source, rng, 150), near_limits(source, rng)])
    check_elements(form, (lambda x: oracle(flushed_value(source, x))) if flag == "ftz" else oracle, [operand])


def between(target, source, flags):
    """Definition of a conversion between floating-point types."""
    mode = next((flag for flag in flags if flag in MODES), "rn")
    integral = next((INTEGRAL[flag] for flag in flags if flag in INTEGRAL), None)

    def oracle(x):
        if "ftz" in flags and source == "f32":
            x = flushed_value(source, x)
        if integral and math.isfinite(x):
            x = math.copysign(float(integral(x)), x)
        bits = clamped(target, encode(target, x, mode), flags)
        if "satfinite" in flags and bits != NAN and math.isinf(decode(target, bits)):
            bits -= 1  # the largest value has the bits before infinity
        return flushed(target, bits) if "ftz" in flags and target == "f32" else bits

    return oracle


def next_to_ties(target, source, rng):
    """Values of ``target`` and midpoints between them, plus or minus one unit in the last place of ``source``."""
    codes = rng.integers(0, (1 << BITS[target] - 1) - 1, 300).tolist()
    pairs = [(decode(target, code), decode(target, code + 1)) for code in codes]
    points = [x for low, high in pairs if math.isfinite(high) for x in (low, (low + high) / 2)]
    bits = [encode(source, x) for x in points if x]
    unsigned = np.dtype(f"u{DTYPE[source].itemsize}")
    moves = rng.integers(-1, 2, len(bits)).astype(unsigned)
    signs = rng.integers(0, 2, len(bits)).astype(unsigned) << unsigned.type(BITS[source] - 1)
    return (np.array(bits, unsigned) + moves | signs).view(DTYPE[source])


FLOAT_FORMS = [
    *(f"cvt.{flag}{target}.{source}" for source, target in WIDER for flag in ("", "sat.")),
    *(f"cvt.{mode}.{target}.{source}" for source, target in NARROWER for mode in MODES),
    *expand(
        "cvt.{rn,rm}.{ftz,ftz.sat,sat}.f32.f64", "cvt.{rn,rz}.{relu,satfinite,relu.satfinite}.{f16,bf16}.f32"
    ),
    *expand(
        "cvt.rn.ftz.{f16,bf16}.f32", "cvt.ftz.f64.f32", "cvt.ftz.f32.f16", "cvt.{sat,ftz,ftz.sat}.f32.f32"
    ),
    *(f"cvt.{mode}.{t}.{t}" for t in ("f16", "bf16", "f32", "f64") for mode in INTEGRAL),
    *expand("cvt.{rzi,rpi}.{ftz,sat,ftz.sat}.f32.f32", "cvt.{f16.f16,bf16.bf16,f32.f32,f64.f64}"),
]


@pytest.mark.parametrize("form", FLOAT_FORMS)
def test_float_to_float(form, rng):
    *flags, target, source = form.split(".")[1:]
    operand = edges(source, rng, 300)
    if (source, target) in NARROWER:
        operand = np.concatenate([operand, next_to_ties(target, source, rng)])
    else:
        operand = np.concatenate([operand, near_limits(source, rng)])
    check_elements(form, between(target, source, flags), [operand])


@pytest.mark.parametrize(
    "form",
    expand(
        "cvt.{rn,rz}.{f16x2,bf16x2}.f32", "cvt.{rn,rz}.{relu,relu.satfinite,satfinite}.{f16x2,bf16x2}.f32"
    ),
)
def test_pair(form, rng):
    *flags, target, _ = form.split(".")[1:]
    element = target.removesuffix("x2")
    a, b = (
        np.concatenate([edges("f32", rng, 200), next_to_ties(element, "f32", rng)])[:450] for _ in range(2)
    )
    (result,) = run_form(form, a, b)
    # the first operand is the upper element
    rows = list(zip(values("f32", b), values("f32", a), strict=True))
    oracle = between(element, "f32", flags)
    compare(
        form,
        target,
        result,
        [oracle(x) for row in rows for x in row],
        [row for row in rows for _ in range(2)],
    )


@pytest.mark.parametrize(
    "form",
    expand(
        "cvt.{rn,rz}.tf32.f32",
        "cvt.{rna,rn,rz}.satfinite.tf32.f32",
        "cvt.rn.relu.tf32.f32",
        "cvt.rna.tf32.f32",
    ),
)
def test_tf32(form, rng):
    *flags, _, _ = form.split(".")[1:]
    exact = edges("tf32", rng, 300)
    nearby = (
        exact
        + (1 << 12) * rng.integers(0, 2, 300).astype(np.uint32)
        + rng.integers(-1, 2, 300).astype(np.uint32)
    )
    operand = np.concatenate([nearby.view(np.float32), edges("f32", rng, 300)])

    def oracle(x):
        bits = clamped("tf32", encode("tf32", x, flags[0]), flags)
        if "satfinite" in flags and bits != NAN and math.isinf(decode("tf32", bits)):
            bits -= 1 << 13
        return bits

    check_elements(form, oracle, [operand])


FLOAT8 = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0)}


def float8(target, numbers, flags):
    """8-bit codes from ml_dtypes for values clamped to the range."""
    dtype, largest = FLOAT8[target]
    numbers = np.where(numbers <= 0, 0, numbers) if "relu" in flags else numbers
    with np.errstate(invalid="ignore"):
        codes = np.clip(numbers, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(numbers), 0x7F, codes).astype(np.uint8)


def about_float8(target, rng, n):
    """Values at or close to those of the format, the midpoints between neighbours, and some out of range."""
    dtype, _ = FLOAT8[target]
    grid = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.04, grid[:1] * 1.1])
    return rng.choice(points, n) * rng.choice(np.array([1, 1 - 2.0**-20, 1 + 2.0**-20], np.float32), n)


@pytest.mark.parametrize(
    "form", expand("cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32", "cvt.rn.satfinite.relu.{e4m3x2,e5m2x2}.f32")
)
def test_float8_from_f32(form, rng):
    *flags, target, _ = form.split(".")[1:]
    a, b = (np.concatenate([edges("f32", rng, 500), about_float8(target, rng, 1500)]) for _ in range(2))
    (result,) = run_form(form, a, b)
    np.testing.assert_array_equal(result >> 8, float8(target, a, flags))
    np.testing.assert_array_equal(result & 0xFF, float8(target, b, flags))


@pytest.mark.parametrize(
    "form", expand("cvt.rn.satfinite.{e4m3x2,e5m2x2}.f16x2", "cvt.rn.satfinite.relu.{e4m3x2,e5m2x2}.f16x2")
)
def test_float8_from_f16(form):
    *flags, target, _ = form.split(".")[1:]
    every = np.arange(1 << 16, dtype=np.uint16)
    (result,) = run_form(form, every.view(np.uint32))
    expected = float8(target, every.view(np.float16).astype(np.float32), flags)
    np.testing.assert_array_equal(result.view(np.uint8), expected)


@pytest.mark.parametrize("form", expand("cvt.rn.f16x2.{e4m3x2,e5m2x2}", "cvt.rn.relu.f16x2.{e4m3x2,e5m2x2}"))
def test_float8_to_f16(form):
    *flags, _, source = form.split(".")[1:]
    codes = np.arange(256, dtype=np.uint8)
    (result,) = run_form(form, codes.view(np.uint16))
    expected = codes.view(FLOAT8[source][0]).astype(np.float16)
    if "relu" in flags:
        expected = np.where(expected <= 0, np.float16(0), expected)
    bits = np.where(np.isnan(expected), 0x7FFF, expected.view(np.uint16))
    np.testing.assert_array_equal(result.view(np.uint16), bits)


@pytest.mark.parametrize(
    "form", [*expand("cvt.pack.sat.{u16,s16}.s32"), *expand("cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32")]
)
def test_pack(form, rng):
    target = form.split(".")[3]
    width = int(target[1:])
    low, high = (0, 2**width - 1) if target[0] == "u" else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    reads = form_op(form).reads
    operands = [edges(ptx_type, rng, 300) for ptx_type in reads]
    operands[1][:100] = rng.integers(low - 3, high + 4, 100)

    def oracle(a, b, above=0):
        a, b = (min(max(x, low), high) % (1 << width) for x in (a, b))
        return (above << 2 * width | a << width | b) % (1 << 32)

    check_elements(form, oracle, operands)


def test_nan_converts_to_the_canonical_nan():
    nan = np.array([0xFF800001, 0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    for form, bits in (
        ("cvt.rn.f16.f32", 0x7FFF),
        ("cvt.rz.bf16.f32", 0x7FFF),
        ("cvt.rna.tf32.f32", 0x7FFFFFFF),
    ):
        (result,) = run_form(form, nan)
        assert (result.view(f"u{result.itemsize}") == bits).all(), form
