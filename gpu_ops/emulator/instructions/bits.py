"""Counts, searches and fields of bits: popc, clz, brev, bfind, fns, bfe, bfi, szext, bmsk.

NumPy defines a shift by the width or more as the GPU does: zeros, or copies of the sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import Op, semantics, unknown
from gpu_ops.emulator.types import BITS, DTYPE, Array

__all__: list[str] = []

_ONES = np.uint32(0xFFFFFFFF)  # also what a search gives that finds no bit
_SEARCHED = frozenset(("u32", "s32", "u64", "s64"))


@semantics("popc", "clz", "brev")
def _bits(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match modifiers:
        case ("b32" | "b64" as ptx_type,):
            width = BITS[ptx_type]
        case _:
            raise unknown(opcode, modifiers)
    if opcode == "brev":
        return Op((ptx_type,), (ptx_type,), _reversal(width))
    if opcode == "popc":
        return Op(("u32",), (ptx_type,), lambda a: np.bitwise_count(a).astype(np.uint32))
    return Op(("u32",), (ptx_type,), lambda a: width - _bit_length(a))


def _reversal(width: int) -> Callable[[Array], Any]:
    """Reverses the bytes, then the nibbles of each, the pairs of each nibble, the bits of each pair."""
    steps = [(4, 0x0F0F0F0F0F0F0F0F), (2, 0x3333333333333333), (1, 0x5555555555555555)]

    def run(a: Array) -> Any:
        bits = a.byteswap()
        for shift, low in steps:
            mask = low % (1 << width)
            bits = (bits >> shift & mask) | (bits & mask) << shift
        return bits

    return run


def _bit_length(a: Array) -> Any:
    """Bits up to the highest set one, from the exponent of the value as a float64.

    ``a & ~(a >> 1)`` has the same highest bit and a 0 below it, so that the conversion cannot round up.
    """
    return np.frexp((a & ~(a >> 1)).astype(np.float64))[1].astype(np.uint32)


@semantics("bfind")
def _find_highest(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The highest bit that is not the sign; with ``.shiftamt`` the shift that brings it to the top."""
    *shiftamt, ptx_type = modifiers or ("",)
    if ptx_type not in _SEARCHED or shiftamt not in ([], ["shiftamt"]):
        raise unknown(opcode, modifiers)
    width, unsigned = BITS[ptx_type], f"u{DTYPE[ptx_type].itemsize}"

    def run(a: Array) -> Any:
        magnitude = (a ^ a >> width - 1).view(unsigned) if ptx_type[0] == "s" else a
        length = _bit_length(magnitude)
        if shiftamt:
            return np.where(length == 0, _ONES, width - length)
        return length - 1

    return Op(("u32",), (ptx_type,), run)


@semantics("fns")
def _find_nth(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The n-th set bit counted from a base bit upwards, or downwards for a negative n; 0 tests the base."""
    if modifiers != ("b32",):
        raise unknown(opcode, modifiers)
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


@semantics("bfe")
def _extract(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The field of ``length`` bits from ``position``; past the top a signed operand goes on with its sign."""
    match modifiers:
        case (ptx_type,) if ptx_type in _SEARCHED:
            dtype, width = DTYPE[ptx_type], BITS[ptx_type]
        case _:
            raise unknown(opcode, modifiers)

    def run(a: Array, position: Array, length: Array) -> Any:
        unused = (width - np.minimum(length & 255, width)).astype(dtype)
        return a >> (position & 255).astype(dtype) << unused >> unused

    return Op((ptx_type,), (ptx_type, "u32", "u32"), run)


@semantics("bfi")
def _insert(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match modifiers:
        case ("b32" | "b64" as ptx_type,):
            dtype = DTYPE[ptx_type]
            ones = np.array(-1).astype(dtype)
        case _:
            raise unknown(opcode, modifiers)

    def run(a: Array, b: Array, position: Array, length: Array) -> Any:
        position, length = (position & 255).astype(dtype), (length & 255).astype(dtype)
        mask = ~(ones << length) << position
        return (b & ~mask) | (a << position & mask)

    return Op((ptx_type,), (ptx_type, ptx_type, "u32", "u32"), run)


@semantics("szext", "bmsk")
def _low_bits(opcode: str, modifiers: tuple[str, ...]) -> Op:
    match opcode, modifiers:
        case "szext", ("clamp" | "wrap" as mode, "u32" | "s32" as ptx_type):
            dtype = DTYPE[ptx_type]
        case "bmsk", ("clamp" | "wrap" as mode, "b32" as ptx_type):
            pass
        case _:
            raise unknown(opcode, modifiers)

    def limited(count: Array) -> Array:
        return np.minimum(count, 32) if mode == "clamp" else np.bitwise_and(count, 31)

    def extend(a: Array, width: Array) -> Any:
        unused = (32 - limited(width)).astype(dtype)
        return a << unused >> unused

    def mask(start: Array, width: Array) -> Any:
        return ~(_ONES << limited(width)) << limited(start)

    return Op((ptx_type,), (ptx_type, "u32"), extend if opcode == "szext" else mask)
