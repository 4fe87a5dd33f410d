"""Conversions (cvt) between integer and floating-point types, including packed ones.

A floating-point result is the value, clamped (``.sat``, ``.relu``, ``.satfinite``) and rounded once. An integer
result is the value rounded to an integer and clamped to the range of the type. In packed results the first operand
is the upper element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gpu_ops.emulator.instructions import InstructionForm, family, unknown
from gpu_ops.emulator.instructions.elements import (
    MODES,
    canonical,
    chain,
    element_of,
    flush_of,
    halves,
    join,
    nearest_bits,
    relu,
    round_to,
    saturate,
    split,
    step,
    to_odd,
    two_sum,
    unpack,
)
from gpu_ops.emulator.syntax import BITS, DTYPE, Array

Step = Callable[[Array], Array]

_INTEGERS = frozenset(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("f16", "bf16", "f32", "f64"))
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
#: The largest values, for ``.satfinite``.
_LARGEST = {"f16": 65504.0, "bf16": 255 * 2.0**120, "tf32": 2047 * 2.0**117}
_FLOAT8 = {"e4m3x2": (3, 7, 448.0), "e5m2x2": (2, 15, 57344.0)}  # fraction bits, bias, largest value


@family("cvt")
def _convert(opcode: str, modifiers: tuple[str, ...]) -> InstructionForm:
    op = None
    if modifiers[:2] == ("pack", "sat"):
        op = _pack_integers(*modifiers[2:])
    elif len(modifiers) >= 2:
        *rest, target, source = modifiers
        flags = frozenset(rest)
        if len(flags) == len(rest):
            op = _select(flags, target, source)
    if op is None:
        raise unknown(opcode, modifiers)
    return op


def _select(flags: frozenset[str], to: str, source: str) -> InstructionForm | None:
    """Form with these flags, or None if it does not exist."""
    if to in _INTEGERS:
        if source in _INTEGERS:
            return _resize(to, source, "sat" in flags) if flags <= {"sat"} else None
        return _to_integer(flags, to, source) if source in _FLOATS else None
    if to in _FLOATS:
        if source in _INTEGERS:
            return _from_integer(flags, to, source)
        return _between_floats(flags, to, source) if source in _FLOATS else None
    if to == "tf32" and source == "f32":
        return _to_tf32(flags)
    if to in ("f16x2", "bf16x2") and source == "f32":
        return _to_pair(flags, to)
    if to in _FLOAT8 and source in ("f32", "f16x2"):
        return _to_float8(flags, to, source)
    if to == "f16x2" and source in _FLOAT8:
        return _from_float8(flags, source)
    return None


def _resize(to: str, source: str, clamps: bool) -> InstructionForm:
    """Extend by the sign of the source, or truncate; ``.sat`` clamps to the range of the result."""
    dtype, ours, theirs = DTYPE[to], np.iinfo(DTYPE[to]), np.iinfo(DTYPE[source])
    low, high = max(ours.min, theirs.min), min(ours.max, theirs.max)
    if clamps and (low, high) != (theirs.min, theirs.max):
        return InstructionForm((to,), (source,), lambda a: np.clip(a, low, high).astype(dtype))
    return InstructionForm((to,), (source,), lambda a: a.astype(dtype))


def _to_integer(flags: frozenset[str], to: str, source: str) -> InstructionForm | None:
    modes = flags & set(_TO_INTEGRAL)
    # Out-of-range values are always clamped, so .sat changes nothing.
    if len(modes) != 1 or not flags <= modes | {"ftz", "sat"} or ("ftz" in flags and source != "f32"):
        return None
    (mode,) = modes
    rounding, dtype, bits = _TO_INTEGRAL[mode], DTYPE[to], BITS[to]
    info = np.iinfo(dtype)
    low, end = float(info.min), float(info.max + 1)
    of_nan = 1 << bits - 1 if source == "f64" or bits == 64 else 0
    nan = np.array(of_nan, f"u{dtype.itemsize}").view(dtype)[()]
    values_of = unpack(source, flush_of("f32") if "ftz" in flags else None)
    exact_limit = np.float64(info.max) < end  # otherwise the largest integer is not a float64

    def run(operand: Array) -> Array:
        values = operand if values_of is None else values_of(operand)
        integral = rounding(values).astype(np.float64)
        is_nan = integral != integral
        has_nan = np.count_nonzero(is_nan)
        if has_nan:
            integral[is_nan] = 0
        if exact_limit:
            np.maximum(integral, low, out=integral)
            result = np.minimum(integral, end - 1, out=integral).astype(dtype)
        else:
            above = integral >= end
            integral[above] = 0
            result = np.maximum(integral, low).astype(dtype)
            result[above] = info.max
        if has_nan:
            result[is_nan] = nan
        return result

    return InstructionForm((to,), (source,), run)


def _from_integer(flags: frozenset[str], to: str, source: str) -> InstructionForm | None:
    modes = flags & MODES
    if len(modes) != 1 or not flags <= modes | {"sat"}:
        return None
    (mode,) = modes

    def short(integers: Array) -> Array:
        return integers.astype(np.float64)

    def long(integers: Array) -> Array:
        nearest, error = two_sum(*halves(integers))
        return step(nearest, error, mode) if to == "f64" else to_odd(nearest, error)

    values = short if BITS[source] < 64 else long
    return _unary(to, source, values, saturate if "sat" in flags else None, round_to(to, mode))


def _unary(to: str, source: str, *steps: Step | None) -> InstructionForm:
    run = chain(*steps)
    assert run is not None
    return InstructionForm((to,), (source,), run)


def _between_floats(flags: frozenset[str], to: str, source: str) -> InstructionForm | None:
    modes, integral = flags & MODES, flags & set(_TO_INTEGRAL)
    exact = to in (source, "f64") or (to == "f32" and source != "f64")
    fine = len(modes) == (0 if exact else 1) and len(integral) <= (to == source)
    fine &= flags <= modes | integral | {"ftz", "sat", "relu", "satfinite"}
    fine &= "ftz" not in flags or "f32" in (to, source)
    fine &= not flags & {"relu", "satfinite"} or (source == "f32" and to in ("f16", "bf16"))
    if not fine:
        return None
    (mode,) = modes or {"rn"}
    before, after = (flush_of("f32") if "ftz" in flags and x == "f32" else None for x in (source, to))
    to_integral = _TO_INTEGRAL[next(iter(integral))] if integral else None
    return _unary(
        to, source, unpack(source, before), to_integral, _clamp(flags, to), round_to(to, mode), after
    )


def _clamp(flags: frozenset[str], to: str) -> Step | None:
    """Step that ``.sat``, ``.relu`` and ``.satfinite`` apply to a value before it is rounded."""
    steps: list[Step] = [{"sat": saturate, "relu": relu}[flag] for flag in ("sat", "relu") if flag in flags]
    if "satfinite" in flags:
        largest = _LARGEST[to]
        steps.append(lambda values: np.clip(values, -largest, largest))
    return chain(*steps)


def _to_pair(flags: frozenset[str], to: str) -> InstructionForm | None:
    """Form such as ``cvt.rn.bf16x2.f32``: converts two operands; the first becomes the upper half."""
    modes = flags & {"rn", "rz"}
    if len(modes) != 1 or not flags <= modes | {"relu", "satfinite"}:
        return None
    (mode,) = modes
    element = element_of(to)
    convert = chain(_clamp(flags, element), round_to(element, mode))
    assert convert is not None
    return InstructionForm((to,), ("f32", "f32"), lambda a, b: _pair(convert(a), convert(b), DTYPE[to]))


def _pair(upper: Array, lower: Array, dtype: np.dtype[np.unsignedinteger]) -> Array:
    shape = np.broadcast_shapes(upper.shape, lower.shape)
    lanes = np.empty((*shape, 2), upper.dtype)
    lanes[:, 0], lanes[:, 1] = lower, upper
    return join(lanes, dtype)


def _to_tf32(flags: frozenset[str]) -> InstructionForm | None:
    """Form that rounds a float32 so that its last 13 bits are zero. ``.rna`` rounds ties away from zero."""
    modes = flags & {"rna", "rn", "rz"}
    fine = len(modes) == 1 and flags <= modes | {"satfinite", "relu"}
    if not fine or {"rna", "relu"} <= flags:
        return None
    (mode,) = modes

    def rounded(values: Array) -> Array:
        bits = values.view(np.uint32)
        if mode == "rna":
            bits = bits + np.uint32(0x1000)
        elif mode == "rn":
            bits = nearest_bits(bits, 13)
        return np.where(values == values, bits & np.uint32(0xFFFFE000), np.uint32(0x7FFFFFFF))

    return _unary("tf32", "f32", _clamp(flags, "tf32"), rounded)


def _to_float8(flags: frozenset[str], to: str, source: str) -> InstructionForm | None:
    """Form to 8-bit floats. Values that are too large become the largest finite value: only NaN gives NaN."""
    if not {"rn", "satfinite"} <= flags <= {"rn", "satfinite", "relu"}:
        return None
    encode = chain(relu if "relu" in flags else None, partial(_encode_float8, *_FLOAT8[to]))
    assert encode is not None
    if source == "f32":
        return InstructionForm((to,), ("f32", "f32"), lambda a, b: _pair(encode(a), encode(b), DTYPE[to]))
    return InstructionForm(
        (to,), (source,), lambda a: join(encode(split(a, np.float16).astype(np.float32)), DTYPE[to])
    )


def _encode_float8(fraction: int, bias: int, largest: float, values: Array) -> Array:
    """8-bit codes of float32 values."""
    is_nan = values != values
    magnitude = np.where(is_nan, np.float32(0), np.minimum(np.abs(values), np.float32(largest)))
    dropped = 23 - fraction
    normal = (nearest_bits(magnitude.view(np.uint32), dropped) >> dropped) - (127 - bias << fraction)
    subnormal = np.rint(magnitude * np.float32(2.0 ** (bias - 1 + fraction))).astype(np.uint32)
    code = np.where(magnitude < 2.0 ** (1 - bias), subnormal, normal)
    code |= (values.view(np.uint32) >> 31) << 7
    return np.where(is_nan, 0x7F, code).astype(np.uint8)


def _from_float8(flags: frozenset[str], source: str) -> InstructionForm | None:
    if not {"rn"} <= flags <= {"rn", "relu"}:
        return None
    codes = np.arange(256, dtype=np.uint16)
    if source == "e5m2x2":  # the upper byte of a float16
        table = (codes << 8).view(np.float16)
    else:  # the bits of a float16 with a bias larger by 8; all ones is NaN
        table = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).view(np.float16) * np.float16(256)
        table[[0x7F, 0xFF]] = np.nan
    table = canonical(table)
    if "relu" in flags:
        table = relu(table)
    return _unary("f16x2", source, lambda words: join(table[split(words, np.uint8)], np.uint32))


def _pack_integers(*types: str) -> InstructionForm | None:
    """Form of ``cvt.pack.sat``: packs clamped a above clamped b; narrow types leave c in the bits above both."""
    match types:
        case ("u16" | "s16" as to, "s32"):
            reads: tuple[str, ...] = ("s32", "s32")
        case ("u8" | "s8" | "u4" | "s4" | "u2" | "s2" as to, "s32", "b32"):
            reads = ("s32", "s32", "b32")
        case _:
            return None
    bits = int(to[1:])
    low, high = (0, (1 << bits) - 1) if to[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)

    def field(values: Array) -> Array:
        return np.clip(values, low, high).view(np.uint32) & np.uint32((1 << bits) - 1)

    def run(a: Array, b: Array, *above: Array) -> Array:
        packed = field(a) << np.uint32(bits) | field(b)
        return packed | above[0] << np.uint32(2 * bits) if above else packed

    return InstructionForm(("b32",), reads, run)
