"""Approximate functions: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div with ``.approx`` or ``.full``.

Silicon may be off by the error bounds of the PTX documentation. Here the value is the nearest one: float64
arithmetic, good to its last bits, and one rounding. Special values are as documented.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu_ops.emulator.instructions import FLOAT, Op, semantics, unknown
from gpu_ops.emulator.instructions.elements import element_of, elementwise, flush_of
from gpu_ops.emulator.instructions.rounding import round_to
from gpu_ops.emulator.types import Array

__all__ = ["approximation"]

_flush = flush_of("f64")  # of float32 and float64
_MAX_DIVISOR = np.float32(2.0**126)


def _divide(a: Array, b: Array) -> Array:
    """``div.approx``: the reciprocal of a divisor above 2^126 is subnormal and counts as zero."""
    return np.where(np.abs(b) > _MAX_DIVISOR, a * np.copysign(np.float32(0), b), a / b)


#: Of float64 values, except division, which is float32's own.
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


@semantics("ex2", "lg2", "rsqrt", "sin", "cos", "tanh", types=FLOAT)
def approximation(opcode: str, modifiers: tuple[str, ...]) -> Op:
    """The form of one function; ``floating`` passes on div, rcp and sqrt."""
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
        return Op(("f64",), ("f64",), _upper_words(function) if ftz else function)
    if opcode == "ex2":
        fine &= ptx_type == "f32" or (ptx_type in _HALVES and ftz == (element == "bf16"))
    elif opcode == "tanh":
        fine &= not ftz and (ptx_type == "f32" or ptx_type in _HALVES)
    else:
        fine &= ptx_type == "f32"
    if not fine:
        raise unknown(opcode, modifiers)

    def compute(values: Array) -> Array:
        # Subnormal arguments of the sine become zero with and without .ftz.
        return function((_flush(values) if opcode == "sin" else values).astype(np.float64))

    rounding = round_to(element, "rn")
    return elementwise(ptx_type, 1, compute, rounding=rounding, ftz=ftz)


def _upper_words(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``.approx.ftz.f64``: of the upper word of the operand, 20 bits of fraction, to the upper word."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(0x80000000)

    def run(a: Array) -> Array:
        argument = np.where(a == a, (a.view(np.uint64) & ~low).view(np.float64), a)
        result = _flush(function(_flush(argument)))
        upper = ((result.view(np.uint64) + half) & ~low).view(np.float64)
        return np.where(result == result, upper, result)

    return run
