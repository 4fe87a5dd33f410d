"""Floating-point arithmetic: add, sub, mul, mad, fma, div, rcp, sqrt, abs, neg, min, max; approximate functions.

Rounded to nearest, NumPy computes the results of float32 and float64. f16 and bf16 are computed in float32 and then
rounded; where a float32 may have too few bits for that, it is rounded to odd (see ``elements``). In other modes sums
and products use fma, and other results move from the nearest value by one if the sign of the error requires it.

On silicon, ex2, lg2, rsqrt, sin, cos, tanh, and div, rcp and sqrt with ``.approx`` or ``.full`` may differ from the
exact value by the error bounds of the PTX document. Here the value is the nearest one: computed in float64 and
rounded once. Special values are as documented.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import isfinite, isinf, isnan
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import FLOAT, InstructionForm, family, unknown
from gpu_ops.emulator.instructions.elements import (
    MODE,
    MODES,
    canonical,
    element_of,
    elementwise,
    flush_of,
    fma,
    fma32,
    relu,
    round_to,
    saturate,
    step,
)
from gpu_ops.emulator.syntax import Array

Compute = Callable[..., Array]

_OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}

#: Functions that NumPy rounds correctly to nearest in the type of the operands.
_NEAREST: dict[str, Compute] = {
    "fma": fma,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}

#: float32 sums and products as operands of an fma. The term added to a product keeps the sign of a zero.
_FUSED: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "add": lambda mode, a, b: (a, np.float32(1), b),
    "sub": lambda mode, a, b: (b, np.float32(-1), a),
    "mul": lambda mode, a, b: (a, b, np.float32(0.0 if mode == "rm" else -0.0)),
    "fma": lambda mode, a, b, c: (a, b, c),
}

#: The sign of exact - r for a nearest result r. The operands are Fractions; for the last three also float32 in
#: float64, where products are exact and the difference of two exact numbers has the right sign.
_ERROR: dict[str, Callable[..., Any]] = {
    "add": lambda r, a, b: a + b - r,
    "sub": lambda r, a, b: a - b - r,
    "mul": lambda r, a, b: a * b - r,
    "fma": lambda r, a, b, c: a * b + c - r,
    "div": lambda r, a, b: (a - r * b) * b,
    "rcp": lambda r, a: (1 - r * a) * a,
    "sqrt": lambda r, a: a - r * r,
}


@family(*_OPERANDS, types=FLOAT)
def _arithmetic(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    *rest, ptx_type = modifiers
    flags = set(rest)
    if opcode in ("div", "rcp", "sqrt") and flags & {"approx", "full"}:
        return _approximation(opcode, modifiers)
    element = element_of(ptx_type)
    modes = flags & MODES
    clamps = flags & {"sat", "relu"}
    half = element in ("f16", "bf16")
    if opcode == "mad" and element not in ("f32", "f64"):
        raise unknown(opcode, modifiers)
    operation = "fma" if opcode == "mad" else opcode
    basic = operation in ("add", "sub", "mul", "fma")
    # add, sub and mul round to nearest by default; the others must name a mode.
    fine = len(modes) == 1 or (not modes and operation in ("add", "sub", "mul"))
    fine &= basic or ptx_type in ("f32", "f64")
    fine &= modes <= {"rn"} or not half
    fine &= len(clamps) < 2 and len(flags) == len(rest) and flags <= modes | clamps | {"ftz"}
    fine &= "ftz" not in flags or element in ("f16", "f32")
    fine &= "sat" not in flags or (basic and ptx_type in ("f16", "f16x2", "f32"))
    fine &= "relu" not in flags or (opcode == "fma" and half)
    if not fine:
        raise unknown(opcode, modifiers)
    (mode,) = modes or {"rn"}
    compute, rounding = _compute(operation, element, mode)
    if ptx_type == "f32x2":  # the NaN must not depend on the number of threads
        rounding = canonical
    clamp = saturate if "sat" in flags else relu if "relu" in flags else None
    operands = _OPERANDS[opcode]
    return elementwise(ptx_type, operands, compute, rounding=rounding, ftz="ftz" in flags, clamp=clamp)


def _compute(operation: str, element: str, mode: str) -> tuple[Compute, Callable[[Array], Array] | None]:
    """Function of an operation, and the rounding of its result if that is not rounded yet."""
    nearest = _NEAREST[operation]
    if element in ("f16", "bf16"):
        # float32 has twice their bits plus two: rounding a sum twice is harmless, and products that matter are
        # exact.
        return (partial(_fused, operation, "odd") if operation == "fma" else nearest), round_to(element, "rn")
    if mode == "rn":
        return nearest, None
    if element == "f64":
        return partial(_directed64, operation, nearest, mode), None
    return partial(_fused if operation in _FUSED else _directed32, operation, mode), None


def _fused(operation: str, mode: str, *operands: Array) -> Array:
    result: Array = fma32(*_FUSED[operation](mode, *operands), MODE[mode])
    return result


def _directed32(operation: str, mode: str, *operands: Array) -> Array:
    """Compute div, rcp and sqrt of float32 in a directed mode."""
    result = _NEAREST[operation](*operands)
    error = _ERROR[operation](*(x.astype(np.float64) for x in (result, *operands)))
    return step(result, error, mode)


def _directed64(operation: str, nearest: Compute, mode: str, *operands: Array) -> Array:
    """Compute float64 in rational numbers, one element at a time: exact for every operand, and rarely used."""
    operands = np.broadcast_arrays(*operands)
    result = nearest(*operands)
    rows = zip(result.tolist(), *(x.tolist() for x in operands), strict=True)
    error = np.fromiter((_error_sign(operation, *row) for row in rows), np.float64, result.size)
    stepped = step(result, error, mode)
    if mode == "rm" and operation in ("add", "sub", "fma"):
        *factors, term = operands
        first = np.multiply(*factors) if operation == "fma" else factors[0]
        second = -term if operation == "sub" else term
        # In mode rm an exact zero is -0 unless both terms are +0.
        negative = (result == 0) & (error == 0) & (np.signbit(first) | np.signbit(second))
        return np.where(negative, -0.0, stepped)
    return stepped


def _error_sign(operation: str, result: float, *operands: float) -> int:
    """Sign of exact - result for one result and its operands."""
    if not all(map(isfinite, operands)) or isnan(result):
        return 0
    if isinf(result):
        divides_by_zero = operation in ("div", "rcp") and operands[-1] == 0  # exactly infinite
        return 0 if divides_by_zero else -1 if result > 0 else 1
    exact = _ERROR[operation](Fraction(result), *map(Fraction, operands))
    return int(exact > 0) - int(exact < 0)


@family("abs", "neg", types=FLOAT)
def _sign(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    *flags, ptx_type = modifiers
    element = element_of(ptx_type)
    if flags not in ([], ["ftz"]) or (flags and element not in ("f16", "f32")) or ptx_type == "f32x2":
        raise unknown(opcode, modifiers)
    rounding = round_to(element, "rn")
    compute = np.abs if opcode == "abs" else np.negative
    return elementwise(ptx_type, 1, compute, rounding=rounding, ftz=bool(flags))


@family("min", "max", types=FLOAT)
def _extremum(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    *rest, ptx_type = modifiers
    flags = set(rest)
    element = element_of(ptx_type)
    allowed = {"f64": set(), "bf16": {"NaN", "xorsign", "abs"}}.get(element, {"ftz", "NaN", "xorsign", "abs"})
    magnitudes = flags & {"xorsign", "abs"}
    if not flags <= allowed or len(magnitudes) == 1 or len(flags) < len(rest) or ptx_type == "f32x2":
        raise unknown(opcode, modifiers)
    compute = _extremum_of(opcode, "NaN" in flags)
    if magnitudes:
        compute = _with_xor_of_signs(compute)
    rounding = round_to(element, "rn")
    return elementwise(ptx_type, 2, compute, rounding=rounding, ftz="ftz" in flags)


@family("min3", "max3", types=("f32",))
def _extremum_of_three(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    """Form of ``min`` and ``max`` with three sources (sm_100); in PTX the opcodes are the same."""
    *rest, _ = modifiers
    flags = set(rest)
    if not flags <= {"ftz", "NaN", "abs"} or len(flags) < len(rest):
        raise unknown(opcode, modifiers)
    two = _extremum_of(opcode[:3], "NaN" in flags)

    def compute(a: Array, b: Array, c: Array) -> Array:
        if "abs" in flags:
            a, b, c = np.abs(a), np.abs(b), np.abs(c)
        return two(two(a, b), c)

    return elementwise("f32", 3, compute, ftz="ftz" in flags)


def _extremum_of(opcode: str, propagates_nan: bool) -> Compute:
    """Minimum or maximum, where -0 is less than +0. With one NaN: the other operand, or NaN if it propagates."""
    choose, of_zeros = (np.minimum, np.bitwise_or) if opcode == "min" else (np.maximum, np.bitwise_and)

    def compute(a: Array, b: Array) -> Array:
        result: Array = choose(a, b)
        zero = result == 0
        if np.count_nonzero(zero):
            bits = f"u{a.itemsize}"
            result = np.where(zero & (a == b), of_zeros(a.view(bits), b.view(bits)).view(a.dtype), result)
        nan = result != result
        if np.count_nonzero(nan):
            if not propagates_nan:
                result = np.where(nan, np.where(a == a, a, b), result)
            return canonical(result)
        return result

    return compute


def _with_xor_of_signs(compute: Compute) -> Compute:
    """Extremum for ``.xorsign.abs``: that of the magnitudes, with the product of the signs."""

    def run(a: Array, b: Array) -> Array:
        sign = np.where(np.signbit(a) ^ np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
        return canonical(np.copysign(compute(np.abs(a), np.abs(b)), sign))

    return run


# ---- approximate functions ---------------------------------------------------------------------------------

_flush = flush_of("f64")  # for float32 too
_MAX_DIVISOR = np.float32(2.0**126)


def _divide(a: Array, b: Array) -> Array:
    """Divide as ``div.approx``: the reciprocal of a divisor above 2^126, which is subnormal, counts as zero."""
    return np.where(np.abs(b) > _MAX_DIVISOR, a * np.copysign(np.float32(0), b), a / b)


#: Functions on float64 values.
_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}

_HALVES = frozenset(("f16", "f16x2", "bf16", "bf16x2"))


@family("ex2", "lg2", "rsqrt", "sin", "cos", "tanh", types=FLOAT)
def _approximation(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    """Form of one function; :func:`_arithmetic` passes on div, rcp and sqrt."""
    *flags, ptx_type = modifiers
    ftz = flags[1:] == ["ftz"]
    element = element_of(ptx_type)
    fine = bool(flags) and (ftz or not flags[1:])
    if opcode == "div":
        if not fine or flags[0] not in ("approx", "full") or ptx_type != "f32":
            raise unknown(opcode, modifiers)
        return elementwise("f32", 2, _divide if flags[0] == "approx" else np.divide, ftz=ftz)
    fine &= flags[:1] == ["approx"]
    function = _FUNCTIONS[opcode]
    if ptx_type == "f64":
        if not fine or not (opcode == "rsqrt" or (opcode == "rcp" and ftz)):
            raise unknown(opcode, modifiers)
        return InstructionForm(("f64",), ("f64",), _upper_words(function) if ftz else function)
    if opcode == "ex2":
        fine &= ptx_type == "f32" or (ptx_type in _HALVES and ftz == (element == "bf16"))
    elif opcode == "tanh":
        fine &= not ftz and (ptx_type == "f32" or ptx_type in _HALVES)
    else:
        fine &= ptx_type == "f32"
    if not fine:
        raise unknown(opcode, modifiers)

    def compute(values: Array) -> Array:
        # The sine flushes subnormal arguments even without .ftz.
        return function((_flush(values) if opcode == "sin" else values).astype(np.float64))

    rounding = round_to(element, "rn")
    return elementwise(ptx_type, 1, compute, rounding=rounding, ftz=ftz)


def _upper_words(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Wrap ``.approx.ftz.f64``, which reads its operand's upper word (20 fraction bits) and writes an upper word."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(0x80000000)

    def run(a: Array) -> Array:
        argument = np.where(a == a, (a.view(np.uint64) & ~low).view(np.float64), a)
        result = _flush(function(_flush(argument)))
        upper = ((result.view(np.uint64) + half) & ~low).view(np.float64)
        return np.where(result == result, upper, result)

    return run
