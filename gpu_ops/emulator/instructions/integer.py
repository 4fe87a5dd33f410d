"""Integer arithmetic: sums and carries, products, byte dot products, quotients, minima; bit counts and bit fields.

Integer arrays wrap around in NumPy as registers do, so the common forms are one or two ufuncs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import InstructionForm, forms
from gpu_ops.emulator.instructions.elements import join, split
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

_Binary = Callable[[Array, Array], Array]

_WORDS = "{u16,u32,u64,s16,s32,s64}"
_LONG = "{u32,s32,u64,s64}"
_ONES = np.uint32(0xFFFFFFFF)  # also the result of a search that finds no bit
_TWICE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _on_pairs(function: Callable[..., Array], ptx_type: str) -> Callable[..., Array]:
    """Apply ``function`` to both 16-bit halves of its operands."""
    dtype = DTYPE[ptx_type.removesuffix("x2")]
    return lambda *words: join(function(*(split(word, dtype) for word in words)), np.uint32)


def _saturated(wide: Array) -> Array:
    return wide.clip(-(1 << 31), (1 << 31) - 1).astype(np.int32)


# Sums


@forms(f"{{add,sub}}.{_WORDS}", "add.{u16x2,s16x2}")
def _sum(opcode: str, ptx_type: str) -> InstructionForm:
    ufunc = np.add if opcode == "add" else np.subtract
    run = _on_pairs(ufunc, ptx_type) if ptx_type.endswith("x2") else ufunc
    return InstructionForm((ptx_type,), (ptx_type, ptx_type), run)


@forms("{add,sub}.sat.s32")
def _saturated_sum(opcode: str, _: str, ptx_type: str) -> InstructionForm:
    ufunc = np.add if opcode == "add" else np.subtract
    return InstructionForm(("s32",), ("s32", "s32"), lambda a, b: _saturated(ufunc(a, b, dtype=np.int64)))


@forms(
    f"{{add,addc,sub,subc}}.cc.{_LONG}",
    f"{{addc,subc}}.{_LONG}",
    f"{{mad,madc}}.{{lo,hi}}.cc.{_LONG}",
    f"madc.{{lo,hi}}.{_LONG}",
)
def _with_carry(opcode: str, *modifiers: str) -> InstructionForm:
    """Form of sums and products that read the carry (addc, subc, madc), write it (.cc), or both. sub: the borrow."""
    ptx_type = modifiers[-1]
    takes, gives = opcode in ("addc", "subc", "madc"), "cc" in modifiers
    dtype = DTYPE[ptx_type]
    unsigned = f"u{dtype.itemsize}"
    product = _product(modifiers[0], ptx_type) if opcode in ("mad", "madc") else None
    subtracts = opcode in ("sub", "subc")

    def run(*operands: Array) -> Array | tuple[Array, Array]:
        carry = operands[-1] if takes else np.bool_(False)
        if product is not None:
            x, y = product(operands[0], operands[1]).view(unsigned), operands[2].view(unsigned)
        else:
            x, y = operands[0].view(unsigned), operands[1].view(unsigned)
        if subtracts:
            result = x - y - carry
            out = (x < y) | (carry & (x == y))
        else:
            result = x + y + carry
            out = (result < x) | (carry & (result == x))
        return (result.view(dtype), out) if gives else result.view(dtype)

    reads = (ptx_type,) * (2 if product is None else 3) + ("cc",) * takes
    return InstructionForm((ptx_type, *("cc",) * gives), reads, run)


@forms(f"sad.{_WORDS}")
def _sum_of_distances(opcode: str, ptx_type: str) -> InstructionForm:
    return InstructionForm(
        (ptx_type,), (ptx_type,) * 3, lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c
    )


# Products


@forms(
    f"{{mul,mad}}.{{lo,hi}}.{_WORDS}", "{mul,mad}.wide.{u16,u32,s16,s32}", "{mul24,mad24}.{lo,hi}.{u32,s32}"
)
def _multiply(opcode: str, part: str, ptx_type: str) -> InstructionForm:
    product = _product_24(part, ptx_type) if opcode.endswith("24") else _product(part, ptx_type)
    result = _TWICE[ptx_type] if part == "wide" else ptx_type
    if opcode.startswith("mul"):
        return InstructionForm((result,), (ptx_type, ptx_type), product)
    return InstructionForm((result,), (ptx_type, ptx_type, result), lambda a, b, c: product(a, b) + c)


@forms("{mad,mad24}.hi.sat.s32")
def _saturated_multiply(opcode: str, *_: str) -> InstructionForm:
    product = _product_24("hi", "s32") if opcode == "mad24" else _product("hi", "s32")
    return InstructionForm(
        ("s32",), ("s32",) * 3, lambda a, b, c: _saturated(np.add(product(a, b), c, dtype=np.int64))
    )


def _product(part: str, ptx_type: str) -> _Binary:
    """Low or high half of the product in the type of the factors, or the whole product."""
    if part == "lo":
        return np.multiply
    if BITS[ptx_type] == 64:
        return _high_unsigned if ptx_type == "u64" else _high_signed
    bits, dtype, wide_dtype = BITS[ptx_type], DTYPE[ptx_type], DTYPE[_TWICE[ptx_type]]
    if part == "wide":
        return lambda a, b: np.multiply(a, b, dtype=wide_dtype)
    return lambda a, b: (np.multiply(a, b, dtype=wide_dtype) >> bits).astype(dtype)


def _high_unsigned(a: Array, b: Array) -> Any:
    """Bits 127:64 of the product, from the four products of 32-bit halves."""
    low = 0xFFFFFFFF
    a_low, a_high, b_low, b_high = a & low, a >> 32, b & low, b >> 32
    middle = a_high * b_low + (a_low * b_low >> 32)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> 32) + (other >> 32)


def _high_signed(a: Array, b: Array) -> Any:
    """Bits 127:64 of the signed product. A negative factor is its unsigned view minus 2^64, so the other factor is
    subtracted from the high half."""
    high = _high_unsigned(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - (a >> 63 & b) - (b >> 63 & a)


def _product_24(part: str, ptx_type: str) -> _Binary:
    """Product of the low 24 bits: ``lo`` is bits 31:0 and ``hi`` bits 47:16 of it."""
    dtype, wide_dtype, shift = DTYPE[ptx_type], DTYPE[_TWICE[ptx_type]], 16 if part == "hi" else 0
    return lambda a, b: (np.multiply(a << 8 >> 8, b << 8 >> 8, dtype=wide_dtype) >> shift).astype(dtype)


@forms("dp4a.{u32,s32}.{u32,s32}", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}")
def _dot(opcode: str, *modifiers: str) -> InstructionForm:
    """Form of c plus the dot product of four bytes, or of two 16-bit halves of a with two bytes of b."""
    a_type, b_type = modifiers[-2:]
    bytes_of_a, used = (1, slice(None)) if opcode == "dp4a" else (2, slice(0, 2))
    if modifiers[0] == "hi":
        used = slice(2, 4)
    result = "u32" if a_type == b_type == "u32" else "s32"
    a_dtype, b_dtype = f"{DTYPE[a_type].kind}{bytes_of_a}", f"{DTYPE[b_type].kind}1"
    dtype = DTYPE[result]

    def run(a: Array, b: Array, c: Array) -> Any:
        return np.vecdot(split(a, a_dtype).astype(dtype), split(b, b_dtype)[:, used].astype(dtype)) + c

    return InstructionForm((result,), (a_type, b_type, result), run)


# Quotients, signs, order


@forms(f"{{div,rem}}.{_WORDS}")
def _divide(opcode: str, ptx_type: str) -> InstructionForm:
    """Form of div and rem, rounded toward zero. Division by zero gives all ones, as NVIDIA's assembler folds it."""
    dtype, width = DTYPE[ptx_type], BITS[ptx_type]
    unsigned = f"u{dtype.itemsize}"

    def signed_quotient(a: Array, b: Array) -> Any:
        magnitude = (np.abs(a).view(unsigned) // np.abs(b).view(unsigned)).view(dtype)
        sign = (a ^ b) >> width - 1  # -1 where the quotient is negative
        return (magnitude ^ sign) - sign

    exact: _Binary = np.fmod
    if opcode == "div":
        exact = signed_quotient if dtype.kind == "i" else np.floor_divide

    def run(a: Array, b: Array) -> Any:
        by_zero = b == 0
        return exact(a, b | by_zero) | -by_zero.astype(dtype)

    return InstructionForm((ptx_type,), (ptx_type, ptx_type), run)


@forms("{abs,neg}.{s16,s32,s64}")
def _sign(opcode: str, ptx_type: str) -> InstructionForm:
    return InstructionForm((ptx_type,), (ptx_type,), np.abs if opcode == "abs" else np.negative)


@forms(f"{{min,max}}.{_WORDS}", "{min,max}.{u16x2,s16x2,relu.s32,relu.s16x2}")
def _extremum(opcode: str, *modifiers: str) -> InstructionForm:
    ptx_type = modifiers[-1]
    plain: Callable[..., Array] = np.minimum if opcode == "min" else np.maximum
    run = plain
    if "relu" in modifiers:
        run = lambda a, b: np.maximum(plain(a, b), 0)  # noqa: E731
    if ptx_type.endswith("x2"):
        run = _on_pairs(run, ptx_type)
    return InstructionForm((ptx_type,), (ptx_type, ptx_type), run)


# Counts and searches


@forms("{popc,clz,brev}.{b32,b64}")
def _bits(opcode: str, ptx_type: str) -> InstructionForm:
    width = BITS[ptx_type]
    if opcode == "brev":
        return InstructionForm((ptx_type,), (ptx_type,), _reversal(width))
    if opcode == "popc":
        return InstructionForm(("u32",), (ptx_type,), lambda a: np.bitwise_count(a).astype(np.uint32))
    return InstructionForm(("u32",), (ptx_type,), lambda a: width - _bit_length(a))


def _reversal(width: int) -> Callable[[Array], Any]:
    """Reverse the bytes, then the nibbles of each byte, the pairs of each nibble and the bits of each pair."""
    steps = [(4, 0x0F0F0F0F0F0F0F0F), (2, 0x3333333333333333), (1, 0x5555555555555555)]

    def run(a: Array) -> Any:
        bits = a.byteswap()
        for shift, low in steps:
            mask = low % (1 << width)
            bits = (bits >> shift & mask) | (bits & mask) << shift
        return bits

    return run


def _bit_length(a: Array) -> Any:
    """Number of bits up to the highest set one, from the exponent of the value as a float64.

    ``a & ~(a >> 1)`` has the same highest bit and a 0 below it, so the conversion cannot round up.
    """
    return np.frexp((a & ~(a >> 1)).astype(np.float64))[1].astype(np.uint32)


@forms(f"bfind.{_LONG}", f"bfind.shiftamt.{_LONG}")
def _find_highest(opcode: str, *modifiers: str) -> InstructionForm:
    """Form that finds the highest bit unlike the sign; with ``.shiftamt``, the shift that brings it to the top."""
    *shiftamt, ptx_type = modifiers
    width, unsigned = BITS[ptx_type], f"u{DTYPE[ptx_type].itemsize}"

    def run(a: Array) -> Any:
        magnitude = (a ^ a >> width - 1).view(unsigned) if ptx_type[0] == "s" else a
        length = _bit_length(magnitude)
        if shiftamt:
            return np.where(length == 0, _ONES, width - length)
        return length - 1

    return InstructionForm(("u32",), (ptx_type,), run)


@forms("fns.b32")
def _find_nth(opcode: str, ptx_type: str) -> InstructionForm:
    """Form of the n-th set bit, counted up from a base bit, or down for negative n. 0 tests the base bit."""
    positions = np.arange(32, dtype=np.uint32)

    def run(mask: Array, base: Array, offset: Array) -> Array:
        mask, base, offset = mask[:, np.newaxis], base[:, np.newaxis], offset[:, np.newaxis]
        is_set = mask >> positions & 1 == 1
        ahead = np.where(offset < 0, positions <= base, positions >= base) & is_set
        ahead &= (offset != 0) | (positions == base)
        upwards = ahead.cumsum(axis=1)
        rank = np.where(offset < 0, upwards[:, -1:] - upwards + 1, upwards)
        hit = ahead & (rank == np.maximum(np.abs(offset.astype(np.int64)), 1))
        return np.where(hit.any(axis=1), hit.argmax(axis=1).astype(np.uint32), _ONES)

    return InstructionForm(("b32",), ("b32", "b32", "s32"), run)


# Fields


@forms(f"bfe.{_LONG}")
def _extract(opcode: str, ptx_type: str) -> InstructionForm:
    """Form of a bit field: ``length`` bits at ``position``. Above its top a signed operand repeats its sign."""
    dtype, width = DTYPE[ptx_type], BITS[ptx_type]

    def run(a: Array, position: Array, length: Array) -> Any:
        unused = (width - np.minimum(length & 255, width)).astype(dtype)
        return a >> (position & 255).astype(dtype) << unused >> unused

    return InstructionForm((ptx_type,), (ptx_type, "u32", "u32"), run)


@forms("bfi.{b32,b64}")
def _insert(opcode: str, ptx_type: str) -> InstructionForm:
    dtype = DTYPE[ptx_type]
    ones = np.array(-1).astype(dtype)

    def run(a: Array, b: Array, position: Array, length: Array) -> Any:
        position, length = (position & 255).astype(dtype), (length & 255).astype(dtype)
        mask = ~(ones << length) << position
        return (b & ~mask) | (a << position & mask)

    return InstructionForm((ptx_type,), (ptx_type, ptx_type, "u32", "u32"), run)


@forms("szext.{clamp,wrap}.{u32,s32}", "bmsk.{clamp,wrap}.b32")
def _low_bits(opcode: str, mode: str, ptx_type: str) -> InstructionForm:
    dtype = DTYPE[ptx_type]

    def limited(count: Array) -> Array:
        return np.minimum(count, 32) if mode == "clamp" else np.bitwise_and(count, 31)

    def extend(a: Array, width: Array) -> Any:
        unused = (32 - limited(width)).astype(dtype)
        return a << unused >> unused

    def mask(start: Array, width: Array) -> Any:
        return ~(_ONES << limited(width)) << limited(start)

    return InstructionForm((ptx_type,), (ptx_type, "u32"), extend if opcode == "szext" else mask)
