"""Shifts and byte permutations; counts, searches and fields of bits.

NumPy defines a shift by the width or more as PTX does: zeros, or copies of the sign. It takes the amount in the
type of the value, and treats a negative amount as a large one, so a 32-bit amount can be viewed as signed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import Op, forms
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

_ONES = np.uint32(0xFFFFFFFF)  # also the result of a search that finds no bit
_LONG = "{u32,s32,u64,s64}"


# Shifts and permutations


@forms("{shl,shr}.{b16,b32,b64}", "shr.{u16,u32,u64,s16,s32,s64}")
def _shift(opcode: str, ptx_type: str) -> Op:
    dtype = DTYPE[ptx_type]
    shift: Callable[[Array, Array], Any] = np.left_shift if opcode == "shl" else np.right_shift
    run = shift
    if BITS[ptx_type] == 16:
        run = lambda a, b: shift(a, np.minimum(b, 16).astype(dtype))  # noqa: E731
    elif ptx_type == "s32":
        run = lambda a, b: shift(a, b.view(dtype))  # noqa: E731
    return Op((ptx_type,), (ptx_type, "u32"), run)


@forms("shf.{l,r}.{clamp,wrap}.b32")
def _funnel(opcode: str, direction: str, mode: str, ptx_type: str) -> Op:
    """Shift the pair high:low. A left shift returns the high word of the result, a right shift the low word."""
    left, wraps = direction == "l", mode == "wrap"

    def run(low: Array, high: Array, amount: Array) -> Any:
        pair = high.astype(np.uint64) << 32 | low
        amount = np.bitwise_and(amount, 31) if wraps else np.minimum(amount, 32)
        shifted = pair << amount >> 32 if left else pair >> amount
        return shifted.astype(np.uint32)

    return Op(("b32",), ("b32", "b32", "u32"), run)


#: The selector of each mode for the four values of its control: one digit per byte, highest first.
_SELECTORS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@forms("prmt.b32", f"prmt.b32.{{{','.join(_SELECTORS)}}}")
def _permute(opcode: str, ptx_type: str, mode: str = "") -> Op:
    """Four of the eight bytes of b:a. A digit of 8 or more repeats the sign of its byte."""
    if not mode:
        return Op(("b32",), ("b32",) * 3, _pick_bytes)
    table = np.array(_SELECTORS[mode], np.uint32)
    return Op(("b32",), ("b32",) * 3, lambda a, b, c: _pick_bytes(a, b, table[c & 3]))


def _pick_bytes(a: Array, b: Array, selector: Array) -> Any:
    if selector.size == 1:  # nearly always an immediate
        return _pick_same_bytes(a, b, int(selector[0]) & 0xFFFF)
    pair = b.astype(np.uint64) << 32 | a
    result = np.zeros(np.broadcast_shapes(pair.shape, selector.shape), np.uint32)
    for i in range(4):
        digit = selector >> 4 * i
        byte = (pair >> ((digit & 7) << 3)).astype(np.uint8)
        sign = (byte.view(np.int8) >> 7).view(np.uint8)
        result |= np.where(digit & 8, sign, byte).astype(np.uint32) << 8 * i
    return result


def _pick_same_bytes(a: Array, b: Array, selector: int) -> Any:
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    moves, signs = _plan(selector)
    for source, left, mask in moves:
        word = b if source else a
        result |= (word << left if left >= 0 else word >> -left) & mask
    for source, sign, mask in signs:
        result |= -((b if source else a) >> sign & 1) & mask
    return result


@cache
def _plan(selector: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """How to build the result of a selector: byte moves (source, left shift, mask) and signs (source, bit, mask)."""
    moves: dict[tuple[int, int], int] = {}
    signs: dict[tuple[int, int], int] = {}
    for i in range(4):
        digit = selector >> 4 * i & 0xF
        source, byte = divmod(digit & 7, 4)
        table, number = (signs, 8 * byte + 7) if digit & 8 else (moves, 8 * (i - byte))
        table[source, number] = table.get((source, number), 0) | 0xFF << 8 * i
    return [(*key, mask) for key, mask in moves.items()], [(*key, mask) for key, mask in signs.items()]


# Counts and searches


@forms("{popc,clz,brev}.{b32,b64}")
def _bits(opcode: str, ptx_type: str) -> Op:
    width = BITS[ptx_type]
    if opcode == "brev":
        return Op((ptx_type,), (ptx_type,), _reversal(width))
    if opcode == "popc":
        return Op(("u32",), (ptx_type,), lambda a: np.bitwise_count(a).astype(np.uint32))
    return Op(("u32",), (ptx_type,), lambda a: width - _bit_length(a))


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
    """The number of bits up to the highest set one, from the exponent of the value as a float64.

    ``a & ~(a >> 1)`` has the same highest bit and a 0 below it, so the conversion cannot round up.
    """
    return np.frexp((a & ~(a >> 1)).astype(np.float64))[1].astype(np.uint32)


@forms(f"bfind.{_LONG}", f"bfind.shiftamt.{_LONG}")
def _find_highest(opcode: str, *modifiers: str) -> Op:
    """The highest bit that differs from the sign; with ``.shiftamt`` the shift that brings it to the top."""
    *shiftamt, ptx_type = modifiers
    width, unsigned = BITS[ptx_type], f"u{DTYPE[ptx_type].itemsize}"

    def run(a: Array) -> Any:
        magnitude = (a ^ a >> width - 1).view(unsigned) if ptx_type[0] == "s" else a
        length = _bit_length(magnitude)
        if shiftamt:
            return np.where(length == 0, _ONES, width - length)
        return length - 1

    return Op(("u32",), (ptx_type,), run)


@forms("fns.b32")
def _find_nth(opcode: str, ptx_type: str) -> Op:
    """The n-th set bit, counted upwards from a base bit, or downwards for a negative n. 0 tests the base bit."""
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

    return Op(("b32",), ("b32", "b32", "s32"), run)


# Fields


@forms(f"bfe.{_LONG}")
def _extract(opcode: str, ptx_type: str) -> Op:
    """The field of ``length`` bits from ``position``. Above its top a signed operand continues with its sign."""
    dtype, width = DTYPE[ptx_type], BITS[ptx_type]

    def run(a: Array, position: Array, length: Array) -> Any:
        unused = (width - np.minimum(length & 255, width)).astype(dtype)
        return a >> (position & 255).astype(dtype) << unused >> unused

    return Op((ptx_type,), (ptx_type, "u32", "u32"), run)


@forms("bfi.{b32,b64}")
def _insert(opcode: str, ptx_type: str) -> Op:
    dtype = DTYPE[ptx_type]
    ones = np.array(-1).astype(dtype)

    def run(a: Array, b: Array, position: Array, length: Array) -> Any:
        position, length = (position & 255).astype(dtype), (length & 255).astype(dtype)
        mask = ~(ones << length) << position
        return (b & ~mask) | (a << position & mask)

    return Op((ptx_type,), (ptx_type, ptx_type, "u32", "u32"), run)


@forms("szext.{clamp,wrap}.{u32,s32}", "bmsk.{clamp,wrap}.b32")
def _low_bits(opcode: str, mode: str, ptx_type: str) -> Op:
    dtype = DTYPE[ptx_type]

    def limited(count: Array) -> Array:
        return np.minimum(count, 32) if mode == "clamp" else np.bitwise_and(count, 31)

    def extend(a: Array, width: Array) -> Any:
        unused = (32 - limited(width)).astype(dtype)
        return a << unused >> unused

    def mask(start: Array, width: Array) -> Any:
        return ~(_ONES << limited(width)) << limited(start)

    return Op((ptx_type,), (ptx_type, "u32"), extend if opcode == "szext" else mask)
