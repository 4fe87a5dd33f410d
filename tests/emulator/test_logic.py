"""Logic, shifts, permutations, comparisons and selection of the emulator against their definitions."""

from __future__ import annotations

import math
import operator
import struct

import numpy as np
import pytest

from gpu_ops.emulator.instructions import lookup
from gpu_ops.emulator.syntax import BITS
from tests.emulator.forms import check_form, edges, expand, operands_of, pack

INTEGERS = "{u16,u32,u64,s16,s32,s64}"
BOOLEAN = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@pytest.mark.parametrize("form", expand("{and,or,xor}.{pred,b16,b32,b64}"))
def test_two_inputs(form, rng):
    check_form(form, BOOLEAN[form.split(".")[0]], operands_of(form, rng))


@pytest.mark.parametrize("form", expand("not.{pred,b16,b32,b64}", "cnot.{b16,b32,b64}"))
def test_one_input(form, rng):
    check_form(
        form, (lambda a: -1 - a) if form.startswith("not") else (lambda a: a == 0), operands_of(form, rng)
    )


def three_inputs(a, b, c, table):
    """Bits of the table selected by the bits of the operands."""
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def test_every_function_of_three_inputs(rng):
    for table in range(256):
        operands = [*(edges("b32", rng, 20) for _ in range(3)), pack("b32", [table])]
        check_form("lop3.b32", three_inputs, operands)


@pytest.mark.parametrize(
    ("table", "function"),
    [
        (0x80, lambda a, b, c: a & b & c),
        (0xEA, lambda a, b, c: (a & b) | c),
        (0xCA, lambda a, b, c: (a & b) | (~a & c)),
        (0x96, lambda a, b, c: a ^ b ^ c),
        (0xC0, lambda a, b, c: a & b),
        (0x1A, lambda a, b, c: (a & b | c) ^ a),
    ],
)
def test_tables_of_known_functions(table, function, rng):
    operands = [*(edges("b32", rng, 100) for _ in range(3)), pack("b32", [table])]
    check_form("lop3.b32", lambda a, b, c, _: function(a, b, c), operands)


@pytest.mark.parametrize("name", ["and", "or"])
def test_three_inputs_and_a_predicate(name, rng):
    def oracle(a, b, c, table, q):
        result = three_inputs(a, b, c, table)
        return result, BOOLEAN[name](result != 0, q)

    for table in (0x00, 0x01, 0x80, 0xC0, 0xFF):
        operands = [
            *(edges("b32", rng, 200) for _ in range(3)),
            pack("b32", [table]),
            edges("pred", rng, 200),
        ]
        check_form(f"lop3.{name}.b32", oracle, operands)


@pytest.mark.parametrize("form", expand("{shl,shr}.{b16,b32,b64}", f"shr.{INTEGERS}"))
def test_shift(form, rng):
    """A shift by the width or more equals shifting one bit at a time."""
    opcode, ptx_type = form.split(".")

    def oracle(a, amount):
        steps = min(amount, BITS[ptx_type])
        return a * 2**steps if opcode == "shl" else a // 2**steps

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("shf.{l,r}.{clamp,wrap}.b32"))
def test_funnel_shift(form, rng):
    _, direction, mode, _ = form.split(".")

    def oracle(low, high, amount):
        amount = min(amount, 32) if mode == "clamp" else amount % 32
        pair = high * 2**32 + low
        return pair * 2**amount // 2**32 if direction == "l" else pair // 2**amount

    check_form(form, oracle, operands_of(form, rng))


def test_permute_by_digits(rng):
    def oracle(a, b, selector):
        source = struct.pack("<II", a, b)
        picked = []
        for i in range(4):
            digit = selector >> 4 * i & 0xF
            byte = source[digit & 7]
            picked.append((0xFF if byte >= 0x80 else 0) if digit & 8 else byte)
        return int.from_bytes(picked, "little")

    every_digit = pack("b32", [0x1111 * digit for digit in range(16)] + [0xFEDC0000 + 0x89AB])
    a, b, c = operands_of("prmt.b32", rng)
    operands = [a, b, np.concatenate([every_digit, c[every_digit.size :]])]
    check_form("prmt.b32", oracle, operands)
    for same in (0x5410, 0x7632, 0x0123, 0x4440, 0x8888, 0x9180, 0xFEDC, 0x3A7F, 0xFFFF4321):
        check_form("prmt.b32", oracle, [a[:200], b[:200], pack("b32", [same])])


PERMUTATIONS = {
    "f4e": lambda s: [s, s + 1, s + 2, s + 3],
    "b4e": lambda s: [s % 8, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
    "rc8": lambda s: [s, s, s, s],
    "ecl": lambda s: [max(i, s) for i in range(4)],
    "ecr": lambda s: [min(i, s) for i in range(4)],
    "rc16": lambda s: [0, 1, 0, 1] if s % 2 == 0 else [2, 3, 2, 3],
}


@pytest.mark.parametrize("mode", PERMUTATIONS)
def test_permute_by_mode(mode, rng):
    """Bytes are numbered from the lowest: forward and backward extraction, replication, clamping to an edge."""

    def oracle(a, b, control):
        source = struct.pack("<II", a, b)
        return int.from_bytes([source[i] for i in PERMUTATIONS[mode](control % 4)], "little")

    check_form(f"prmt.b32.{mode}", oracle, operands_of(f"prmt.b32.{mode}", rng))


# Comparisons

SIGNED = ["eq", "ne", "lt", "le", "gt", "ge"]
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOATING = [*SIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
SMALLEST_NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}


def number(bits, ptx_type):
    """Value of the bits of a floating-point operand."""
    if ptx_type == "bf16":
        bits, ptx_type = bits << 16, "f32"
    width, code = {"f16": ("H", "e"), "f32": ("I", "f"), "f64": ("Q", "d")}[ptx_type]
    return struct.unpack(f"<{code}", struct.pack(f"<{width}", bits))[0]


def compare(name, x, y):
    """Compare two numbers; an ordered comparison is false for a NaN, an unordered one true."""
    if isinstance(x, int):
        return getattr(operator, UNSIGNED.get(name, name))(x, y)
    numbers = not (math.isnan(x) or math.isnan(y))
    if name in ("num", "nan"):
        return numbers == (name == "num")
    if len(name) == 3:
        return not numbers or getattr(operator, name[:2])(x, y)
    return numbers and getattr(operator, name)(x, y)


def outcomes(name, ptx_type, a, b, ftz=False):
    """Results of comparing two operands, or both halves of a pair type."""
    if ptx_type.endswith("x2"):
        half = ptx_type[:-2]
        return [outcomes(name, half, a >> at & 0xFFFF, b >> at & 0xFFFF, ftz)[0] for at in (0, 16)]
    if ptx_type in SMALLEST_NORMAL:
        a, b = number(a, ptx_type), number(b, ptx_type)
    if ftz:
        a, b = (0.0 if abs(x) < SMALLEST_NORMAL[ptx_type] else x for x in (a, b))
    return [compare(name, a, b)]


SETP = (
    expand(
        "setp.{eq,ne}.{b16,b32,b64}",
        f"setp.{{eq,ne,lt,le,gt,ge}}.{INTEGERS}",
        "setp.{lo,ls,hi,hs}.{u16,u32,u64}",
    )
    + [f"setp.{name}.{t}" for name in FLOATING for t in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")]
    + [f"setp.{name}.ftz.{t}" for name in FLOATING for t in ("f16", "f32", "f16x2")]
    + expand(
        "setp.lt.{and,or,xor}.{s32,u64,f32,ftz.f32,bf16,f16x2,bf16x2}",
        "setp.neu.{and,or,xor}.{f64,ftz.f16x2}",
    )
    + expand("setp.eq.{and,or,xor}.b32")
)


@pytest.mark.parametrize("form", SETP)
def test_set_predicate(form, rng):
    _, name, *qualifiers, ptx_type = form.split(".")

    def oracle(a, b, c=None):
        results = outcomes(name, ptx_type, a, b, "ftz" in qualifiers)
        p, q = results if len(results) == 2 else (results[0], not results[0])
        if c is not None:
            p, q = (BOOLEAN[qualifiers[0]](x, c) for x in (p, q))
        return p, q

    assert (lookup("setp", tuple(form.split(".")[1:])).reads[2:] == ("pred",)) == bool(
        {*qualifiers} & {*BOOLEAN}
    )
    check_form(form, oracle, operands_of(form, rng))


ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}


@pytest.mark.parametrize(
    "form",
    expand("set.{eq,lt}.{u32,s32,f32,f16,bf16}.{s32,u64,f32,f64}", "set.hi.{u32,f32}.u16", "set.ne.s32.b64")
    + expand(
        "set.{ne,gtu}.{f16,u16,s16,u32,s32}.f16",
        "set.{ne,gtu}.{bf16,u16,s16,u32,s32}.bf16",
        "set.eq.bf16.f16",
    )
    + expand("set.{le,nan}.{f16x2,u32,s32}.f16x2", "set.{le,nan}.{bf16x2,u32,s32}.bf16x2")
    + expand("set.lt.{and,or,xor}.{u32.s32,f32.f64,f16x2.f16x2,u32.bf16x2,s16.f16}")
    + expand("set.gt.{ftz,and.ftz}.{u32.f32,f32.f32,s32.f16x2,f16x2.f16x2,u16.f16}"),
)
def test_set(form, rng):
    _, name, *qualifiers, result, source = form.split(".")

    def oracle(a, b, c=None):
        results = outcomes(name, source, a, b, "ftz" in qualifiers)
        if c is not None:
            results = [BOOLEAN[qualifiers[0]](x, c) for x in results]
        if len(results) == 1:
            return ONE.get(result, -1) * results[0]
        low, high = (ONE.get(result[:-2], 0xFFFF) * x for x in results)
        return low + (high << 16)

    check_form(form, oracle, operands_of(form, rng))


# Selection and floating-point bits

SELECTED = f"{{b16,b32,b64,f32,f64,{INTEGERS[1:]}"


@pytest.mark.parametrize("form", expand(f"selp.{SELECTED}"))
def test_select(form, rng):
    check_form(form, lambda a, b, p: a if p else b, operands_of(form, rng))


@pytest.mark.parametrize("form", expand(f"slct.{SELECTED}.{{s32,f32}}", f"slct.ftz.{SELECTED}.f32"))
def test_select_by_sign(form, rng):
    def oracle(a, b, c):
        if form.endswith(".f32"):
            c = number(c, "f32")
            if ".ftz." in form and abs(c) < SMALLEST_NORMAL["f32"]:
                c = 0.0
        return a if c >= 0 else b

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize(
    "form", expand("testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}")
)
def test_class(form, rng):
    _, name, ptx_type = form.split(".")
    fraction_bits, top = {"f32": (23, 0xFF), "f64": (52, 0x7FF)}[ptx_type]

    def oracle(bits):
        exponent, fraction = bits >> fraction_bits & top, bits % (1 << fraction_bits)
        if exponent == top:
            kinds = ["notanumber"] if fraction else ["infinite", "number"]
        else:
            kinds = ["finite", "number", "subnormal" if exponent == 0 and fraction else "normal"]
        return name in kinds

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("ptx_type", ["f32", "f64"])
def test_copy_sign(ptx_type, rng):
    sign = 1 << BITS[ptx_type] - 1
    form = f"copysign.{ptx_type}"
    check_form(form, lambda a, b: a // sign * sign + b % sign, operands_of(form, rng))
