"""Integer instructions of the emulator against their definitions in Python's unbounded integers."""

from __future__ import annotations

from fractions import Fraction
from math import trunc

import numpy as np
import pytest

from gpu_ops.emulator.syntax import BITS
from tests.emulator.forms import check_form, edges, expand, form_op, operands_of, pack, run_form

WORDS = "{u16,u32,u64,s16,s32,s64}"
LONG = "{u32,s32,u64,s64}"
S32 = range(-(1 << 31), 1 << 31)


def saturate(value):
    return min(max(value, S32[0]), S32[-1])


def signed(value, width):
    """Value of the low ``width`` bits in two's complement."""
    value %= 1 << width
    return value - (1 << width) if value >> width - 1 else value


def on_halves(function, is_signed):
    """Apply a definition on 16-bit values to both halves of 32-bit operands."""

    def both(*words):
        low, high = (
            function(*(signed(w >> at, 16) if is_signed else w >> at & 0xFFFF for w in words))
            for at in (0, 16)
        )
        return low % (1 << 16) | high % (1 << 16) << 16

    return both


@pytest.mark.parametrize("form", expand(f"{{add,sub}}.{WORDS}", "add.{u16x2,s16x2}", "{add,sub}.sat.s32"))
def test_sum(form, rng):
    sign = 1 if form.startswith("add") else -1
    oracle = {
        "sat": lambda a, b: saturate(a + sign * b),
        "u16x2": on_halves(lambda a, b: a + b, False),
        "s16x2": on_halves(lambda a, b: a + b, True),
    }.get(form.split(".")[1], lambda a, b: a + sign * b)
    check_form(form, oracle, operands_of(form, rng))


def part_of(product, part, width):
    return product >> width if part == "hi" else product


@pytest.mark.parametrize("form", expand(f"{{mul,mad}}.{{lo,hi}}.{WORDS}", "{mul,mad}.wide.{u16,s16,u32,s32}"))
def test_product(form, rng):
    opcode, part, ptx_type = form.split(".")
    width = BITS[ptx_type]
    if opcode == "mul":
        check_form(form, lambda a, b: part_of(a * b, part, width), operands_of(form, rng))
    else:
        check_form(form, lambda a, b, c: part_of(a * b, part, width) + c, operands_of(form, rng))


def test_saturated_product(rng):
    operands = operands_of("mad.hi.sat.s32", rng)
    check_form("mad.hi.sat.s32", lambda a, b, c: saturate((a * b >> 32) + c), operands)
    operands = operands_of("mad24.hi.sat.s32", rng)
    check_form(
        "mad24.hi.sat.s32", lambda a, b, c: saturate((signed(a, 24) * signed(b, 24) >> 16) + c), operands
    )


@pytest.mark.parametrize("form", expand("{mul24,mad24}.{lo,hi}.{u32,s32}"))
def test_product_of_24_bits(form, rng):
    _, part, ptx_type = form.split(".")

    def oracle(a, b, c=0):
        if ptx_type == "s32":
            product = signed(a, 24) * signed(b, 24)
        else:
            product = a % (1 << 24) * (b % (1 << 24))
        return (product >> 16 if part == "hi" else product) + c

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand(f"{{add,addc,sub,subc}}.cc.{LONG}", f"{{addc,subc}}.{LONG}"))
def test_carry(form, rng):
    opcode, *_, ptx_type = form.split(".")
    modulus = 1 << BITS[ptx_type]

    def oracle(a, b, carry=False):
        a, b = a % modulus, b % modulus
        total = a + b + carry if opcode.startswith("add") else a - b - carry
        out = total not in range(modulus)
        return (total, out) if ".cc." in form else total

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand(f"{{mad,madc}}.{{lo,hi}}.cc.{LONG}", f"madc.{{lo,hi}}.{LONG}"))
def test_carry_of_product(form, rng):
    _, part, *_, ptx_type = form.split(".")
    width = BITS[ptx_type]

    def oracle(a, b, c, carry=False):
        total = part_of(a * b, part, width) % (1 << width) + c % (1 << width) + carry
        return (total, total >> width) if ".cc." in form else total

    check_form(form, oracle, operands_of(form, rng))


def test_carries_chain_to_wide_integers(rng):
    """Carries chain to 128-bit sums, differences and products of 32-bit instructions, as compilers generate them."""
    a, b = ([int.from_bytes(rng.bytes(16), "little") for _ in range(200)] for _ in range(2))
    a[:3], b[:3] = [(1 << 128) - 1, 0, 1 << 64], [1, 1, (1 << 64) + 1]

    def limbs(values):
        return [pack("u32", (value >> 32 * i for value in values)) for i in range(4)]

    def value(words):
        return [sum(int(word) << 32 * i for i, word in enumerate(row)) for row in zip(*words, strict=True)]

    for opcode, sign in (("add", 1), ("sub", -1)):
        words, carry = [], ()
        for i, (x, y) in enumerate(zip(limbs(a), limbs(b), strict=True)):
            form = f"{opcode}{'c' if i else ''}{'.cc' if i < 3 else ''}.u32"
            word, *carry = run_form(form, x, y, *carry)
            words.append(word)
        assert value(words) == [(x + sign * y) % (1 << 128) for x, y in zip(a, b, strict=True)]

    # a (4 limbs) times the lowest limb of b, added to b: a chain of low halves and a chain of high halves.
    factor, total = limbs(b)[0], [*limbs(b), pack("u32", [0] * len(b))]
    for part, offset in (("lo", 0), ("hi", 1)):
        carry = ()
        for i, x in enumerate(limbs(a)):
            form = f"mad{'c' if carry else ''}.{part}.cc.u32"
            total[i + offset], *carry = run_form(form, x, factor, total[i + offset], *carry)
        if part == "lo":
            (total[4],) = run_form("addc.u32", total[4], pack("u32", [0]), *carry)
    assert value(total) == [x * (y % (1 << 32)) + y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("form", expand(f"sad.{WORDS}"))
def test_sum_of_distances(form, rng):
    check_form(form, lambda a, b, c: c + abs(a - b), operands_of(form, rng))


@pytest.mark.parametrize("form", expand(f"{{div,rem}}.{WORDS}"))
def test_quotient(form, rng):
    def oracle(a, b):
        if b == 0:
            return -1
        quotient = trunc(Fraction(a, b))
        return quotient if form.startswith("div") else a - quotient * b

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("{abs,neg}.{s16,s32,s64}"))
def test_sign(form, rng):
    check_form(form, abs if form.startswith("abs") else lambda a: 0 - a, operands_of(form, rng))


@pytest.mark.parametrize(
    "form", expand(f"{{min,max}}.{WORDS}", "{min,max}.{u16x2,s16x2,relu.s32,relu.s16x2}")
)
def test_extremum(form, rng):
    opcode, *_, ptx_type = form.split(".")
    pick = min if opcode == "min" else max
    if "relu" in form:
        oracle = lambda a, b: max(pick(a, b), 0)  # noqa: E731
    else:
        oracle = pick
    if ptx_type.endswith("x2"):
        oracle = on_halves(oracle, ptx_type == "s16x2")
    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("dp4a.{u32,s32}.{u32,s32}", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}"))
def test_dot(form, rng):
    opcode, *half, a_type, b_type = form.split(".")
    size = 1 if opcode == "dp4a" else 2

    def lanes(word, size, ptx_type):
        data = (word % (1 << 32)).to_bytes(4, "little")
        return [
            int.from_bytes(data[i : i + size], "little", signed=ptx_type == "s32") for i in range(0, 4, size)
        ]

    def oracle(a, b, c):
        factors = lanes(b, 1, b_type)
        if half:
            factors = factors[:2] if half == ["lo"] else factors[2:]
        return c + sum(x * y for x, y in zip(lanes(a, size, a_type), factors, strict=True))

    assert form_op(form).writes == ("u32" if a_type == b_type == "u32" else "s32",)
    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("{popc,clz,brev}.{b32,b64}"))
def test_bits(form, rng):
    opcode, ptx_type = form.split(".")
    digits = f"0{BITS[ptx_type]}b"
    oracle = {
        "popc": lambda a: format(a, digits).count("1"),
        "clz": lambda a: BITS[ptx_type] if a == 0 else format(a, digits).index("1"),
        "brev": lambda a: int(format(a, digits)[::-1], 2),
    }[opcode]
    every_length = [1 << i for i in range(BITS[ptx_type])] + [(2 << i) - 1 for i in range(BITS[ptx_type])]
    check_form(form, oracle, [np.concatenate([*operands_of(form, rng), pack(ptx_type, every_length)])])


@pytest.mark.parametrize("form", expand(f"bfind.{LONG}", f"bfind.shiftamt.{LONG}"))
def test_highest_bit(form, rng):
    ptx_type = form.split(".")[-1]
    width = BITS[ptx_type]

    def oracle(a):
        sign = ptx_type[0] == "s" and a < 0
        positions = [i for i in range(width) if (a >> i & 1) != sign]
        if not positions:
            return 0xFFFFFFFF
        return width - 1 - positions[-1] if "shiftamt" in form else positions[-1]

    every_length = [(1 << i) + d for i in range(width) for d in (-1, 0, 1)]
    every_length += [-value for value in every_length]
    check_form(form, oracle, [np.concatenate([*operands_of(form, rng), pack(ptx_type, every_length)])])


def test_nth_bit(rng):
    def oracle(mask, base, offset):
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        order = range(base, 32) if offset > 0 else range(base, -1, -1)
        positions = [i for i in order if mask >> i & 1]
        return positions[abs(offset) - 1] if abs(offset) <= len(positions) else 0xFFFFFFFF

    n = 2000
    mask, base = edges("b32", rng, n), pack("b32", rng.integers(0, 32, n).tolist())
    offset = pack("s32", rng.integers(-12, 13, n).tolist())
    offset[:4] = pack("s32", [-(1 << 31), (1 << 31) - 1, 32, -32])
    check_form("fns.b32", oracle, [mask, base, offset])


@pytest.mark.parametrize("form", expand(f"bfe.{LONG}"))
def test_extract(form, rng):
    ptx_type = form.split(".")[-1]
    top = BITS[ptx_type] - 1

    def oracle(a, position, length):
        position, length = position & 255, length & 255
        if ptx_type[0] == "u" or length == 0:
            fill = 0
        else:
            fill = a >> min(position + length - 1, top) & 1
        bits = [a >> position + i & 1 if i < length and position + i <= top else fill for i in range(top + 1)]
        return sum(bit << i for i, bit in enumerate(bits))

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("bfi.{b32,b64}"))
def test_insert(form, rng):
    width = BITS[form.split(".")[-1]]

    def oracle(a, b, position, length):
        bits = [b >> i & 1 for i in range(width)]
        position, length = position & 255, length & 255
        for i in range(min(length, width)):
            if position + i < width:
                bits[position + i] = a >> i & 1
        return sum(bit << i for i, bit in enumerate(bits))

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("szext.{clamp,wrap}.{u32,s32}"))
def test_extend(form, rng):
    _, mode, ptx_type = form.split(".")

    def oracle(a, width):
        width = width % 32 if mode == "wrap" else min(width, 32)
        if width == 0:
            return 0
        return signed(a, width) if ptx_type == "s32" else a % (1 << width)

    check_form(form, oracle, operands_of(form, rng))


@pytest.mark.parametrize("form", expand("bmsk.{clamp,wrap}.b32"))
def test_mask(form, rng):
    def oracle(start, width):
        if ".wrap." in form:
            start, width = start % 32, width % 32
        return sum(1 << i for i in range(32) if start <= i < start + min(width, 32))

    check_form(form, oracle, operands_of(form, rng))
