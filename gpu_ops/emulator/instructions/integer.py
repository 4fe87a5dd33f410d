"""Integer arithmetic: sums and carries, products, byte dot products, quotients, signs, minima.

Integer arrays wrap around in NumPy as registers do, so that the common forms are one or two ufuncs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import INTEGER, Op, semantics, unknown
from gpu_ops.emulator.instructions.lanes import join, split
from gpu_ops.emulator.types import BITS, DTYPE, Array

__all__: list[str] = []

_Binary = Callable[[Array, Array], Array]

_WORDS = frozenset(("u16", "u32", "u64", "s16", "s32", "s64"))
_PAIRS = {"u16x2": np.dtype(np.uint16), "s16x2": np.dtype(np.int16)}
_LONG = frozenset(("u32", "s32", "u64", "s64"))
_TWICE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _on_pairs(function: Callable[..., Array], dtype: np.dtype[Any]) -> Callable[..., Array]:
    """``function`` on both 16-bit halves of its operands."""
    return lambda *words: join(function(*(split(word, dtype) for word in words)), np.uint32)


def _saturated(wide: Array) -> Array:
    return wide.clip(-(1 << 31), (1 << 31) - 1).astype(np.int32)


# Sums


@semantics("add", "sub", types=INTEGER)
def _sum(opcode: str, modifiers: tuple[str, ...]) -> Op:
    ufunc = np.add if opcode == "add" else np.subtract
    match modifiers:
        case (ptx_type,) if ptx_type in _WORDS:
            return Op((ptx_type,), (ptx_type, ptx_type), ufunc)
        case ("u16x2" | "s16x2" as ptx_type,) if opcode == "add":
            return Op((ptx_type,), (ptx_type, ptx_type), _on_pairs(ufunc, _PAIRS[ptx_type]))
        case ("sat", "s32"):
            return Op(("s32",), ("s32", "s32"), lambda a, b: _saturated(ufunc(a, b, dtype=np.int64)))
        case ("cc", ptx_type) if ptx_type in _LONG:
            return _with_carry(opcode, modifiers)
    raise unknown(opcode, modifiers)


@semantics("addc", "subc", "madc")
def _with_carry(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """add.cc, addc, addc.cc, and the same of sub and mad: the carry (sub: the borrow) goes in, out or both."""
    *qualifiers, ptx_type = modifiers or ("",)
    takes = opcode in ("addc", "subc", "madc")
    gives = qualifiers[-1:] == ["cc"]
    part = qualifiers[:-1] if gives else qualifiers
    is_mad = opcode in ("mad", "madc")
    if ptx_type not in _LONG or part not in ([["lo"], ["hi"]] if is_mad else [[]]):
        raise unknown(opcode, modifiers)
    dtype = DTYPE[ptx_type]
    unsigned = f"u{dtype.itemsize}"
    product = _product(part[0], ptx_type) if is_mad else None
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

    reads = (ptx_type,) * (3 if is_mad else 2) + ("cc",) * takes
    return Op((ptx_type, *("cc",) * gives), reads, run)


@semantics("sad")
def _sum_of_distances(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match modifiers:
        case (ptx_type,) if ptx_type in _WORDS:
            return Op((ptx_type,), (ptx_type,) * 3, lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)
    raise unknown(opcode, modifiers)


# Products


@semantics("mul", "mad", types=INTEGER)
def _multiply(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match modifiers:
        case ("lo" | "hi" as part, ptx_type) if ptx_type in _WORDS:
            return _product_op(opcode, _product(part, ptx_type), ptx_type, ptx_type)
        case ("wide", ptx_type) if ptx_type in _TWICE:
            wide = DTYPE[_TWICE[ptx_type]]
            run: _Binary = lambda a, b: np.multiply(a, b, dtype=wide)  # noqa: E731
            return _product_op(opcode, run, ptx_type, _TWICE[ptx_type])
        case ("hi", "sat", "s32") if opcode == "mad":
            return _saturated_mad(_product("hi", "s32"))
        case ("lo" | "hi", "cc", ptx_type) if opcode == "mad" and ptx_type in _LONG:
            return _with_carry(opcode, modifiers)
    raise unknown(opcode, modifiers)


@semantics("mul24", "mad24")
def _multiply_24(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """Products of the low 24 bits: ``lo`` is bits 31:0, ``hi`` bits 47:16."""
    match modifiers:
        case ("lo" | "hi" as part, "u32" | "s32" as ptx_type):
            return _product_op(opcode, _product_24(part, ptx_type), ptx_type, ptx_type)
        case ("hi", "sat", "s32") if opcode == "mad24":
            return _saturated_mad(_product_24("hi", "s32"))
    raise unknown(opcode, modifiers)


def _product_op(opcode: str, product: _Binary, factor: str, result: str) -> Op:
    if opcode.startswith("mul"):
        return Op((result,), (factor, factor), product)
    return Op((result,), (factor, factor, result), lambda a, b, c: product(a, b) + c)


def _saturated_mad(product: _Binary) -> Op:
    return Op(("s32",), ("s32",) * 3, lambda a, b, c: _saturated(np.add(product(a, b), c, dtype=np.int64)))


def _product(part: str, ptx_type: str) -> _Binary:
    """The low or the high half of the product, in the type of the factors."""
    if part == "lo":
        return np.multiply
    if BITS[ptx_type] == 64:
        return _high_unsigned if ptx_type == "u64" else _high_signed
    bits, dtype, wide = BITS[ptx_type], DTYPE[ptx_type], DTYPE[_TWICE[ptx_type]]
    return lambda a, b: (np.multiply(a, b, dtype=wide) >> bits).astype(dtype)


def _high_unsigned(a: Array, b: Array) -> Any:
    """Bits 127:64 of the product, from the four products of 32-bit halves."""
    low = 0xFFFFFFFF
    a_low, a_high, b_low, b_high = a & low, a >> 32, b & low, b >> 32
    middle = a_high * b_low + (a_low * b_low >> 32)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> 32) + (other >> 32)


def _high_signed(a: Array, b: Array) -> Any:
    """A negative factor is its unsigned view less 2^64, so the other one is taken off the high half."""
    high = _high_unsigned(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - (a >> 63 & b) - (b >> 63 & a)


def _product_24(part: str, ptx_type: str) -> _Binary:
    dtype, wide, shift = DTYPE[ptx_type], DTYPE[_TWICE[ptx_type]], 16 if part == "hi" else 0

    return lambda a, b: (np.multiply(a << 8 >> 8, b << 8 >> 8, dtype=wide) >> shift).astype(dtype)


@semantics("dp4a", "dp2a")
def _dot(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """c plus the dot product of four bytes, or of two 16-bit halves of a with two bytes of b."""
    match opcode, modifiers:
        case "dp4a", ("u32" | "s32" as a_type, "u32" | "s32" as b_type):
            bytes_of_a, used = 1, slice(None)
        case "dp2a", ("lo" | "hi" as half, "u32" | "s32" as a_type, "u32" | "s32" as b_type):
            bytes_of_a, used = 2, slice(0, 2) if half == "lo" else slice(2, 4)
        case _:
            raise unknown(opcode, modifiers)
    result = "u32" if a_type == b_type == "u32" else "s32"
    a_dtype, b_dtype = f"{DTYPE[a_type].kind}{bytes_of_a}", f"{DTYPE[b_type].kind}1"
    dtype = DTYPE[result]

    def run(a: Array, b: Array, c: Array) -> Any:
        return np.vecdot(split(a, a_dtype).astype(dtype), split(b, b_dtype)[:, used].astype(dtype)) + c

    return Op((result,), (a_type, b_type, result), run)


# Quotients, signs, order


@semantics("div", "rem", types=INTEGER)
def _divide(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """Rounded toward zero. By zero both give all ones, as NVIDIA's assembler folds them."""
    match modifiers:
        case (ptx_type,) if ptx_type in _WORDS:
            pass
        case _:
            raise unknown(opcode, modifiers)
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

    return Op((ptx_type,), (ptx_type, ptx_type), run)


@semantics("abs", "neg", types=INTEGER)
def _sign(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match modifiers:
        case ("s16" | "s32" | "s64" as ptx_type,):
            return Op((ptx_type,), (ptx_type,), np.abs if opcode == "abs" else np.negative)
    raise unknown(opcode, modifiers)


@semantics("min", "max", types=INTEGER)
def _extremum(opcode: str, modifiers: tuple[str, ...]) -> Op:
    *relu, ptx_type = modifiers
    if relu and (relu != ["relu"] or ptx_type not in ("s32", "s16x2")):
        raise unknown(opcode, modifiers)
    run: Callable[..., Array] = np.minimum if opcode == "min" else np.maximum
    if relu:
        plain = run
        run = lambda a, b: np.maximum(plain(a, b), 0)  # noqa: E731
    if ptx_type in _PAIRS:
        run = _on_pairs(run, _PAIRS[ptx_type])
    return Op((ptx_type,), (ptx_type, ptx_type), run)
