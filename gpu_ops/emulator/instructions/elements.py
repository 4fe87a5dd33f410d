"""Elements of floating-point operands: packing, flushing, clamping, fused multiply-add, rounding.

The values of f16 and bf16 are float32; packed types get a last axis of two elements, low half first. A form unpacks
its operands, flushes subnormals (``.ftz``), computes, clamps (``.sat``, ``.relu``), rounds, flushes again and
packs. PTX promises neither the sign nor the payload of a NaN; forms that promise the canonical NaN return it.

A value wider than the result is exact or *rounded to odd*: truncated, with the last bit set if that lost anything.
Rounding such a value to a format with at least two bits less gives what rounding the exact value would give (Boldo
and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic

from gpu_ops.emulator.aot import ufunc
from gpu_ops.emulator.instructions import InstructionForm
from gpu_ops.emulator.syntax import DTYPE, Array

Step = Callable[[Array], Array]

_NAN: dict[np.dtype[Any], Any] = {
    np.dtype(np.float16): np.array(0x7FFF, np.uint16).view(np.float16)[()],
    np.dtype(np.float32): np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()],
    np.dtype(np.float64): np.float64("nan"),
}
_MIN_NORMAL: dict[np.dtype[Any], Any] = {dtype: np.finfo(dtype).smallest_normal for dtype in _NAN}


# ---- elements ----------------------------------------------------------------------------------------------


def split(words: Array, dtype: npt.DTypeLike) -> Array:
    """View of the narrow values of every word, shape (T, values), lowest first (GPU and host are little-endian)."""
    return words[:, np.newaxis].view(dtype)


def join(lanes: Array, dtype: npt.DTypeLike) -> Array:
    """Words that hold these values: the inverse of :func:`split`."""
    return np.ascontiguousarray(lanes).view(dtype)[:, 0]


def elementwise(
    ptx_type: str,
    operands: int,
    compute: Callable[..., Array],
    *,
    rounding: Step | None = None,
    ftz: bool = False,
    clamp: Step | None = None,
) -> InstructionForm:
    """Form of this type that computes each element of its result from the elements of its operands."""
    flushing = flush_of(element_of(ptx_type)) if ftz else None
    prepare = unpack(ptx_type, flushing)
    finish = chain(clamp, rounding, flushing, _pack(ptx_type))

    def run(*sources: Array) -> Array:
        result = compute(*(sources if prepare is None else map(prepare, sources)))
        return result if finish is None else finish(result)

    plain = prepare is None and finish is None
    return InstructionForm((ptx_type,), (ptx_type,) * operands, compute if plain else run)


def chain(*steps: Step | None) -> Step | None:
    """Compose steps in sequence, except those that are None."""
    taken = tuple(step for step in steps if step is not None)
    if len(taken) < 2:
        return taken[0] if taken else None

    def run(values: Array) -> Array:
        for function in taken:
            values = function(values)
        return values

    return run


def element_of(ptx_type: str) -> str:
    """Type of one element: ``f16`` for ``f16x2``."""
    return ptx_type.removesuffix("x2")


def unpack(ptx_type: str, flushing: Step | None = None) -> Step | None:
    """Step from operands to values; ``flushing`` applies to their elements."""
    element = element_of(ptx_type)
    dtype = DTYPE[element]
    lanes: Step | None = (lambda words: split(words, dtype)) if ptx_type != element else None
    return chain(lanes, flushing, {"f16": _widen_float16, "bf16": _widen_bfloat16}.get(element))


def _pack(ptx_type: str) -> Step | None:
    """Step from rounded elements (bf16: bits) to the result."""
    dtype = DTYPE[ptx_type]
    return (lambda elements: join(elements, dtype)) if ptx_type.endswith("x2") else None


def _widen_float16(values: Array) -> Array:
    return values.astype(np.float32)


def _widen_bfloat16(bits: Array) -> Array:
    words: Array = bits.astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def flush_of(element: str) -> Step:
    """Step that flushes subnormal elements (bf16: bits) to zeros of their sign."""
    return _flush_bfloat16 if element == "bf16" else _flush


def _flush(values: Array) -> Array:
    flushed: Array = values * (np.abs(values) >= _MIN_NORMAL[values.dtype])
    return flushed


def _flush_bfloat16(bits: Array) -> Array:
    flushed: Array = bits & np.where(bits & np.uint16(0x7F80), np.uint16(0xFFFF), np.uint16(0x8000))
    return flushed


def saturate(values: Array) -> Array:
    """Clamp to [0, 1]; NaN and -0 become +0."""
    return np.where(values > 0, np.minimum(values, 1), values.dtype.type(0))


def relu(values: Array) -> Array:
    """Replace negative values and -0 by +0; NaN stays."""
    clamped: Array = np.maximum(values, 0)
    clamped += 0  # -0 becomes +0
    return clamped


def canonical(values: Array) -> Array:
    """Replace every NaN by the one that PTX calls canonical."""
    nan = values != values
    if np.count_nonzero(nan):
        return np.where(nan, _NAN[values.dtype], values)
    return values


# ---- fused multiply-add ------------------------------------------------------------------------------------

MODE = {name: np.uint8(number) for number, name in enumerate(("odd", "rz", "rm", "rp"))}
_ODD, _DOWN, _UP = 0, 2, 3


@intrinsic  # type: ignore[untyped-decorator]
def _llvm_fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), codegen


@ufunc("float32(float32, float32, float32)", "float64(float64, float64, float64)")
def fma(a, b, c):  # type: ignore[no-untyped-def]
    """Compute ``a * b + c`` of float32 or float64, rounded to nearest even."""
    return _llvm_fma(a, b, c)


@ufunc("float32(float32, float32, float32, uint8)")
def fma32(a, b, c, mode):  # type: ignore[no-untyped-def]
    """Compute ``a * b + c`` of float32, rounded by ``mode``.

    The product is exact in float64, and the error of the float64 sum is a float64 too (Knuth's TwoSum), so the
    nearest float32 moves by one if the sign of the error requires it.
    """
    product = np.float64(a) * np.float64(b)
    term = np.float64(c)
    total = product + term
    part = total - product
    rest = (product - (total - part)) + (term - part)  # NaN if total is not finite
    result = np.float32(total)
    # Has the sign of exact - result: the loss of rounding to float32 is 0 or outweighs the rest.
    error = (total - np.float64(result)) + rest
    bits = np.int64(result.view(np.uint32))
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31
    inexact = np.int64((error < 0) | (error > 0))
    # An inexact result, even 0, has the sign of the exact one. Branches would be mispredicted, so there are none.
    magnitude -= inexact & np.int64((error > 0) == (sign == 1)) & np.int64(magnitude != 0)  # truncated
    outward = np.int64(mode == _DOWN) & sign | np.int64(mode == _UP) & (sign ^ 1)
    magnitude += inexact & outward
    magnitude |= inexact & np.int64(mode == _ODD)
    # In mode rm an exact zero is -0 unless both terms are +0.
    negative_term = np.int64(np.signbit(product)) | np.int64(np.signbit(term))
    sign |= np.int64(mode == _DOWN) & np.int64(magnitude == 0) & (inexact ^ 1) & negative_term
    return np.uint32(sign << 31 | magnitude).view(np.float32)


# ---- rounding ----------------------------------------------------------------------------------------------

#: Rounding modes: to nearest even, toward zero, down, up.
MODES = frozenset(("rn", "rz", "rm", "rp"))

_TOWARD = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}


def round_to(element: str, mode: str) -> Callable[[Array], Array]:
    """Step that rounds values, exact or rounded to odd, to f16, bf16 (as bits), f32 or f64."""
    if element == "bf16":
        return partial(_round_bfloat16, mode=mode)
    dtype = DTYPE[element]

    def nearest(values: Array) -> Array:
        return values.astype(dtype, copy=False)

    def directed(values: Array) -> Array:
        rounded = nearest(values)
        return step(rounded, values - rounded, mode)

    rounding = nearest if mode == "rn" else directed
    return (lambda values: canonical(rounding(values))) if element == "f16" else rounding


def step(nearest: Array, error: Array, mode: str) -> Array:
    """Move the nearest value to the one that ``mode`` requires; ``error`` has the sign of exact - nearest."""
    if mode == "rn":
        return nearest
    if mode == "rz":
        wrong = np.where(nearest > 0, error < 0, error > 0)
    else:
        wrong = error < 0 if mode == "rm" else error > 0
    return np.where(wrong, np.nextafter(nearest, nearest.dtype.type(_TOWARD[mode])), nearest)


def _round_bfloat16(values: Array, mode: str) -> Array:
    """Upper half of a float32, plus one where the lower half and the mode require it."""
    if values.dtype == np.float64:
        bits = _float32_to_odd(values)
    else:
        bits = values.astype(np.float32, copy=False).view(np.uint32)
    if mode == "rn":
        rounded = nearest_bits(bits, 16)
    elif mode == "rz":
        rounded = bits
    else:
        sign = bits >> np.uint32(31)
        rounded = bits + (sign if mode == "rm" else sign ^ np.uint32(1)) * np.uint32(0xFFFF)
    result = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = values != values
    if np.count_nonzero(nan):
        result[nan] = 0x7FFF
    return result


def nearest_bits(bits: Array, dropped: int) -> Array:
    """Round float32 bits to nearest even above the ``dropped`` bits, which the caller must cut off."""
    rounded: Array = bits >> np.uint32(dropped)
    rounded &= np.uint32(1)
    rounded += np.uint32((1 << dropped - 1) - 1)
    rounded += bits
    return rounded


def _float32_to_odd(values: Array) -> Array:
    """Bits of float64 values as float32, rounded to odd."""
    nearest = values.astype(np.float32)
    bits: Array = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(values))  # truncated
    bits |= nearest != values
    return bits


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Nearest float64 to ``a + b``, and the rest, which is NaN where the sum is not finite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(nearest: Array, error: Array) -> Array:
    """Round ``nearest + error``, the results of :func:`two_sum`, to odd."""
    bits = nearest.view(np.int64)
    outward = (error > 0) == (nearest > 0)
    inexact = (error != 0) & (error == error)
    odd: Array = bits + (inexact & (bits & 1 == 0)) * np.where(outward, 1, -1)
    return odd.view(np.float64)


def halves(integers: Array) -> tuple[Array, Array]:
    """Split 64-bit integers into pairs of float64 with exactly that sum."""
    integer = integers.dtype.type
    low = (integers & integer(0xFFFFFFFF)).astype(np.float64)
    return (integers >> integer(32)).astype(np.float64) * 2.0**32, low
