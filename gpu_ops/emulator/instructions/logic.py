"""Bitwise logic, shifts, byte permutations, comparisons, selection, tests of floating-point classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import InstructionForm, family, forms, unknown
from gpu_ops.emulator.instructions.elements import flush_of, unpack
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

_Binary = Callable[[Array, Array], Any]

_BITS = ("b16", "b32", "b64")
_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
_COMBINE: dict[str, _Binary] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


# Bitwise


@forms("{and,or,xor,not}.{pred,b16,b32,b64}", "cnot.{b16,b32,b64}")
def _bitwise(opcode: str, ptx_type: str) -> InstructionForm:
    dtype = DTYPE[ptx_type]
    if opcode == "not":
        return InstructionForm((ptx_type,), (ptx_type,), np.invert)
    if opcode == "cnot":
        return InstructionForm((ptx_type,), (ptx_type,), lambda a: (a == 0).astype(dtype))
    return InstructionForm((ptx_type,), (ptx_type, ptx_type), _COMBINE[opcode])


@forms("lop3.{b32,or.b32,and.b32}")
def _lop3(opcode: str, *modifiers: str) -> InstructionForm:
    """Form of any function of three bits. Its truth table is an immediate operand, hence one element."""
    operands = ("b32",) * 4
    if modifiers == ("b32",):
        return InstructionForm(("b32",), operands, _three_input)
    combine = _COMBINE[modifiers[0]]

    def run(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        result = _three_input(a, b, c, table)
        return result, combine(result != 0, q)

    return InstructionForm(("b32", "pred"), (*operands, "pred"), run)


@cache
def _monomials(table: int) -> list[int]:
    """Products whose exclusive or is the function (its algebraic normal form).

    A product is a set of factors: 4 for a, 2 for b, 1 for c. It is part of the function if that is 1 at an odd
    number of the points within the set.
    """
    return [m for m in range(8) if sum(table >> i & 1 for i in range(8) if i & m == i) % 2]


def _three_input(a: Array, b: Array, c: Array, table: Array) -> Array:
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    terms = []
    for factors in _monomials(int(table[0]) & 255):
        present = [x for bit, x in ((4, a), (2, b), (1, c)) if factors & bit]
        terms.append(reduce(np.bitwise_and, present) if present else np.full(1, 0xFFFFFFFF, np.uint32))
    result = reduce(np.bitwise_xor, terms) if terms else np.zeros(1, np.uint32)
    return np.broadcast_to(result, shape)


# Shifts and permutations. NumPy defines a shift by the width or more as PTX does: zeros, or copies of the sign. It
# takes the amount in the type of the value and treats a negative amount as a large one, so a 32-bit amount can be
# viewed as signed.


@forms("{shl,shr}.{b16,b32,b64}", "shr.{u16,u32,u64,s16,s32,s64}")
def _shift(opcode: str, ptx_type: str) -> InstructionForm:
    dtype = DTYPE[ptx_type]
    shift: Callable[[Array, Array], Any] = np.left_shift if opcode == "shl" else np.right_shift
    run = shift
    if BITS[ptx_type] == 16:
        run = lambda a, b: shift(a, np.minimum(b, 16).astype(dtype))  # noqa: E731
    elif ptx_type == "s32":
        run = lambda a, b: shift(a, b.view(dtype))  # noqa: E731
    return InstructionForm((ptx_type,), (ptx_type, "u32"), run)


@forms("shf.{l,r}.{clamp,wrap}.b32")
def _funnel(opcode: str, direction: str, mode: str, ptx_type: str) -> InstructionForm:
    """Shift the pair high:low. A left shift returns the high word of the result, a right shift the low word."""
    left, wraps = direction == "l", mode == "wrap"

    def run(low: Array, high: Array, amount: Array) -> Any:
        pair = high.astype(np.uint64) << 32 | low
        amount = np.bitwise_and(amount, 31) if wraps else np.minimum(amount, 32)
        shifted = pair << amount >> 32 if left else pair >> amount
        return shifted.astype(np.uint32)

    return InstructionForm(("b32",), ("b32", "b32", "u32"), run)


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
def _permute(opcode: str, ptx_type: str, mode: str = "") -> InstructionForm:
    """Form that selects four of the eight bytes of b:a. A digit of 8 or more repeats the sign of its byte."""
    if not mode:
        return InstructionForm(("b32",), ("b32",) * 3, _pick_bytes)
    table = np.array(_SELECTORS[mode], np.uint32)
    return InstructionForm(("b32",), ("b32",) * 3, lambda a, b, c: _pick_bytes(a, b, table[c & 3]))


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
    """Plan for the result of a selector: byte moves (source, left shift, mask) and signs (source, bit, mask)."""
    moves: dict[tuple[int, int], int] = {}
    signs: dict[tuple[int, int], int] = {}
    for i in range(4):
        digit = selector >> 4 * i & 0xF
        source, byte = divmod(digit & 7, 4)
        table, number = (signs, 8 * byte + 7) if digit & 8 else (moves, 8 * (i - byte))
        table[source, number] = table.get((source, number), 0) | 0xFF << 8 * i
    return [(*key, mask) for key, mask in moves.items()], [(*key, mask) for key, mask in signs.items()]


# Comparisons


def _less_or_greater(a: Array, b: Array) -> Any:
    return (a < b) | (a > b)


_EQUALITY: dict[str, _Binary] = {"eq": np.equal, "ne": np.not_equal}
_ORDER: tuple[_Binary, ...] = (np.less, np.less_equal, np.greater, np.greater_equal)
_SIGNED = _EQUALITY | dict(zip(("lt", "le", "gt", "ge"), _ORDER, strict=True))
_UNSIGNED = _SIGNED | dict(zip(("lo", "ls", "hi", "hs"), _ORDER, strict=True))
#: If an operand is NaN, the first six are false, including ``ne``, and the next six are true.
_FLOATING: dict[str, _Binary] = _SIGNED | {
    "ne": _less_or_greater,
    "equ": lambda a, b: ~_less_or_greater(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}

_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
_flush = flush_of("f32")  # for f16 and f64 too


def _comparisons(name: str, ptx_type: str, ftz: bool) -> tuple[_Binary, ...]:
    """Comparison of two operands, or the two comparisons of their low and high halves; () if unknown."""
    if ptx_type in _FLOATS:
        known = _FLOATING if not ftz or ptx_type in ("f16", "f16x2", "f32") else {}
        values = unpack(ptx_type, _flush if ftz else None)
    elif ptx_type in _BITS or ptx_type in _INTEGERS:
        known = {} if ftz else {"b": _EQUALITY, "s": _SIGNED, "u": _UNSIGNED}[ptx_type[0]]
        values = None
    else:
        return ()
    if name not in known:
        return ()
    compare = known[name]
    if values is None:
        return (compare,)

    def half(i: int) -> _Binary:
        return lambda a, b: compare(values(a)[:, i], values(b)[:, i])

    if ptx_type.endswith("x2"):
        return half(0), half(1)
    return (lambda a, b: compare(values(a), values(b)),)


def _parse(opcode: str, qualifiers: tuple[str, ...], ptx_type: str) -> tuple[tuple[_Binary, ...], str | None]:
    """Comparisons of ``CmpOp[.BoolOp][.ftz].type``, and the name of the operation with a predicate."""
    name, *rest = qualifiers or ("",)
    combine = rest.pop(0) if rest and rest[0] in _COMBINE else None
    compared = _comparisons(name, ptx_type, rest == ["ftz"]) if rest in ([], ["ftz"]) else ()
    if not compared:
        raise unknown(opcode, (*qualifiers, ptx_type))
    return compared, combine


@family("setp")
def _set_predicate(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    """Form of setp: p is the comparison, q its complement. For packed types p compares low halves and q high ones."""
    *qualifiers, ptx_type = modifiers or ("",)
    compared, name = _parse(opcode, tuple(qualifiers), ptx_type)

    def compare(a: Array, b: Array) -> tuple[Array, Array]:
        first = compared[0](a, b)
        return first, compared[1](a, b) if len(compared) == 2 else ~first

    if name is None:
        return InstructionForm(("pred", "pred"), (ptx_type, ptx_type), compare)
    combine = _COMBINE[name]

    def run(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        p, q = compare(a, b)
        return combine(p, c), combine(q, c)

    return InstructionForm(("pred", "pred"), (ptx_type, ptx_type, "pred"), run)


#: Value that ``set`` writes for true: all ones, or 1.0.
_TRUE = dict.fromkeys(("u16", "s16"), 0xFFFF) | dict.fromkeys(("u32", "s32"), 0xFFFFFFFF)
_TRUE |= {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


@family("set")
def _set(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    match modifiers:
        case (*qualifiers, result, source) if result in _set_results(source, "ftz" in qualifiers):
            compared, name = _parse(opcode, tuple(qualifiers), source)
        case _:
            raise unknown(opcode, modifiers)
    dtype = DTYPE[result]
    half = 0xFFFF if len(compared) == 2 else 0xFFFFFFFF
    true = [
        np.array((_TRUE[result] & half) << 16 * i).astype(f"u{dtype.itemsize}") for i in range(len(compared))
    ]
    reads = (source, source) + ("pred",) * (name is not None)

    def run(a: Array, b: Array, *c: Array) -> Any:
        outcomes = [compare(a, b) for compare in compared]
        if name is not None:
            outcomes = [_COMBINE[name](outcome, c[0]) for outcome in outcomes]
        words = [
            np.where(outcome, bits, bits.dtype.type(0)) for outcome, bits in zip(outcomes, true, strict=True)
        ]
        return reduce(np.bitwise_or, words).view(dtype)

    return InstructionForm((result,), reads, run)


def _set_results(source: str, ftz: bool) -> tuple[str, ...]:
    """Types that ``set`` can write for a source type. bf16 excludes ``.ftz`` and f16."""
    if source.endswith("x2"):
        return (source, "u32", "s32")
    floats = ("f16",) * (source != "bf16") + ("bf16",) * (not ftz)
    if source in ("f16", "bf16"):
        return (*floats, "u16", "s16", "u32", "s32")
    return (*floats, "f32", "u32", "s32")


# Selection and floating-point bits

_SELECTED = "{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32,f64}"


@forms(f"selp.{_SELECTED}")
def _select(opcode: str, ptx_type: str) -> InstructionForm:
    return InstructionForm((ptx_type,), (ptx_type, ptx_type, "pred"), lambda a, b, p: np.where(p, a, b))


@forms(f"slct.{_SELECTED}.{{s32,f32}}", f"slct.ftz.{_SELECTED}.f32")
def _select_by_sign(opcode: str, *modifiers: str) -> InstructionForm:
    """Form of slct: a if c >= 0; otherwise, and for NaN, b. With ``.ftz`` a negative subnormal counts as -0."""
    *ftz, ptx_type, sign = modifiers
    reads = (ptx_type, ptx_type, sign)
    if ftz:
        return InstructionForm((ptx_type,), reads, lambda a, b, c: np.where(_flush(c) >= 0, a, b))
    return InstructionForm((ptx_type,), reads, lambda a, b, c: np.where(c >= 0, a, b))


def _is_subnormal(x: Array) -> Any:
    return (x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal)


_CLASSES: dict[str, Callable[[Array], Any]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: x == x,
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ~_is_subnormal(x),  # zeros count as normal
    "subnormal": _is_subnormal,
}


@forms(f"testp.{{{','.join(_CLASSES)}}}.{{f32,f64}}")
def _test_class(opcode: str, name: str, ptx_type: str) -> InstructionForm:
    return InstructionForm(("pred",), (ptx_type,), _CLASSES[name])


@forms("copysign.{f32,f64}")
def _copy_sign(opcode: str, ptx_type: str) -> InstructionForm:
    """Form that joins the magnitude of the second operand and the sign of the first."""
    return InstructionForm((ptx_type,), (ptx_type, ptx_type), lambda a, b: np.copysign(b, a))
