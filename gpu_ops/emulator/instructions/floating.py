"""Floating-point arithmetic: add, sub, mul, mad, fma, div, rcp, sqrt, abs, neg, min, max.

To nearest, NumPy computes the results of float32 and float64. f16 and bf16 are computed in float32 and rounded
to them from there; where a float32 may not have enough bits for that it is rounded to odd (see ``fma``). In
the other modes sums and products are fma's, and of the rest the nearest result moves by one where the sign of
its error says so.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import isfinite, isinf, isnan
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import FLOAT, Op, semantics, unknown
from gpu_ops.emulator.instructions.approximate import approximation
from gpu_ops.emulator.instructions.elements import canonical, element_of, elementwise, relu, saturate
from gpu_ops.emulator.instructions.fma import MODE, fma, fma32
from gpu_ops.emulator.instructions.rounding import MODES, round_to, step
from gpu_ops.emulator.types import Array

__all__: list[str] = []

Compute = Callable[..., Array]

_OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}

#: What NumPy rounds correctly to nearest in the type of its operands.
_NEAREST: dict[str, Compute] = {
    "fma": fma,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}

#: float32 sums and products as operands of an fma. The term added to a product leaves a zero's sign alone.
_FUSED: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "add": lambda mode, a, b: (a, np.float32(1), b),
    "sub": lambda mode, a, b: (b, np.float32(-1), a),
    "mul": lambda mode, a, b: (a, b, np.float32(0.0 if mode == "rm" else -0.0)),
    "fma": lambda mode, a, b, c: (a, b, c),
}

#: The sign of exact - r for a nearest result r: of Fractions, and for the last three of float32 in float64,
#: where the product is exact and a difference of two exact numbers has the right sign.
_ERROR: dict[str, Callable[..., Any]] = {
    "add": lambda r, a, b: a + b - r,
    "sub": lambda r, a, b: a - b - r,
    "mul": lambda r, a, b: a * b - r,
    "fma": lambda r, a, b, c: a * b + c - r,
    "div": lambda r, a, b: (a - r * b) * b,
    "rcp": lambda r, a: (1 - r * a) * a,
    "sqrt": lambda r, a: a - r * r,
}


@semantics(*_OPERANDS, types=FLOAT)
def _arithmetic(opcode: str, modifiers: tuple[str, ...]) -> Op:
    *rest, ptx_type = modifiers
    flags = set(rest)
    if opcode in ("div", "rcp", "sqrt") and flags & {"approx", "full"}:
        return approximation(opcode, modifiers)
    element = element_of(ptx_type)
    modes = flags & MODES
    clamps = flags & {"sat", "relu"}
    half = element in ("f16", "bf16")
    if opcode == "mad" and element not in ("f32", "f64"):
        raise unknown(opcode, modifiers)
    operation = "fma" if opcode == "mad" else opcode
    basic = operation in ("add", "sub", "mul", "fma")
    # add, sub and mul round to nearest when nothing is said; the others have to say.
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
    if ptx_type == "f32x2":  # which NaN comes out must not depend on how many threads there are
        rounding = canonical
    clamp = saturate if "sat" in flags else relu if "relu" in flags else None
    operands = _OPERANDS[opcode]
    return elementwise(ptx_type, operands, compute, rounding=rounding, ftz="ftz" in flags, clamp=clamp)


def _compute(operation: str, element: str, mode: str) -> tuple[Compute, Callable[[Array], Array] | None]:
    """How to compute, and how to round what that gives, unless it is rounded."""
    nearest = _NEAREST[operation]
    if element in ("f16", "bf16"):
        # float32 has twice their bits and two more: a sum may round twice, a product that matters is exact.
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
    """div, rcp and sqrt of float32."""
    result = _NEAREST[operation](*operands)
    error = _ERROR[operation](*(x.astype(np.float64) for x in (result, *operands)))
    return step(result, error, mode)


def _directed64(operation: str, nearest: Compute, mode: str, *operands: Array) -> Array:
    """float64 by rational numbers, one at a time: exact for every operand, and rare."""
    operands = np.broadcast_arrays(*operands)
    result = nearest(*operands)
    rows = zip(result.tolist(), *(x.tolist() for x in operands), strict=True)
    error = np.fromiter((_error_sign(operation, *row) for row in rows), np.float64, result.size)
    stepped = step(result, error, mode)
    if mode == "rm" and operation in ("add", "sub", "fma"):
        *factors, term = operands
        first = np.multiply(*factors) if operation == "fma" else factors[0]
        second = -term if operation == "sub" else term
        # An exact zero rounded down is -0 unless both terms are +0.
        negative = (result == 0) & (error == 0) & (np.signbit(first) | np.signbit(second))
        return np.where(negative, -0.0, stepped)
    return stepped


def _error_sign(operation: str, result: float, *operands: float) -> int:
    """The sign of exact - result for one result and its operands."""
    if not all(map(isfinite, operands)) or isnan(result):
        return 0
    if isinf(result):
        divides_by_zero = operation in ("div", "rcp") and operands[-1] == 0  # exactly infinite
        return 0 if divides_by_zero else -1 if result > 0 else 1
    exact = _ERROR[operation](Fraction(result), *map(Fraction, operands))
    return int(exact > 0) - int(exact < 0)


@semantics("abs", "neg", types=FLOAT)
def _sign(opcode: str, modifiers: tuple[str, ...]) -> Op:
    *flags, ptx_type = modifiers
    element = element_of(ptx_type)
    if flags not in ([], ["ftz"]) or (flags and element not in ("f16", "f32")) or ptx_type == "f32x2":
        raise unknown(opcode, modifiers)
    rounding = round_to(element, "rn")
    compute = np.abs if opcode == "abs" else np.negative
    return elementwise(ptx_type, 1, compute, rounding=rounding, ftz=bool(flags))


@semantics("min", "max", types=FLOAT)
def _extremum(opcode: str, modifiers: tuple[str, ...]) -> Op:
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


@semantics("min3", "max3", types=("f32",))
def _extremum_of_three(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """``min`` and ``max`` with three sources (sm_100); PTX gives them the name of the others."""
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
    """-0 is less than +0, whichever comes first; a NaN gives way to the other operand, or is the result."""
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
    """``.xorsign.abs``: of the magnitudes, with the product of the signs."""

    def run(a: Array, b: Array) -> Array:
        sign = np.where(np.signbit(a) ^ np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
        return canonical(np.copysign(compute(np.abs(a), np.abs(b)), sign))

    return run
