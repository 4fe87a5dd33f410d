"""Operands as floating-point values, and the shape that all elementwise floating-point forms have.

The values of f16 and bf16 are float32; packed types get a last axis of two elements, low half first. A form
unpacks its operands, flushes subnormals (``.ftz``), computes, clamps (``.sat``, ``.relu``), rounds,
flushes again, packs.

The sign and payload of a NaN are not PTX's promise; forms that promise the canonical NaN give it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.emulator.instructions import Op
from gpu_ops.emulator.instructions.lanes import join, split
from gpu_ops.emulator.types import DTYPE, Array

__all__ = [
    "canonical", "chain", "element_of", "elementwise", "flush_of", "relu", "saturate", "unpack",
]  # fmt: skip

Step = Callable[[Array], Array]

_NAN: dict[np.dtype[Any], Any] = {
    np.dtype(np.float16): np.array(0x7FFF, np.uint16).view(np.float16)[()],
    np.dtype(np.float32): np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()],
    np.dtype(np.float64): np.float64("nan"),
}
_MIN_NORMAL: dict[np.dtype[Any], Any] = {dtype: np.finfo(dtype).smallest_normal for dtype in _NAN}


def elementwise(
    ptx_type: str,
    operands: int,
    compute: Callable[..., Array],
    *,
    rounding: Step | None = None,
    ftz: bool = False,
    clamp: Step | None = None,
) -> Op:
    """The form of this type that computes each element of the result from those of its operands."""
    flushing = flush_of(element_of(ptx_type)) if ftz else None
    prepare = unpack(ptx_type, flushing)
    finish = chain(clamp, rounding, flushing, _pack(ptx_type))

    def run(*sources: Array) -> Array:
        result = compute(*(sources if prepare is None else map(prepare, sources)))
        return result if finish is None else finish(result)

    plain = prepare is None and finish is None
    return Op((ptx_type,), (ptx_type,) * operands, compute if plain else run)


def chain(*steps: Step | None) -> Step | None:
    """The given steps one after the other; None is no step."""
    taken = tuple(step for step in steps if step is not None)
    if len(taken) < 2:
        return taken[0] if taken else None

    def run(values: Array) -> Array:
        for one in taken:
            values = one(values)
        return values

    return run


def element_of(ptx_type: str) -> str:
    """The type of one element: ``f16`` of ``f16x2``."""
    return ptx_type.removesuffix("x2")


def unpack(ptx_type: str, flushing: Step | None = None) -> Step | None:
    """From operands to values; ``flushing`` is for their elements."""
    element = element_of(ptx_type)
    dtype = DTYPE[element]
    lanes: Step | None = (lambda words: split(words, dtype)) if ptx_type != element else None
    return chain(lanes, flushing, {"f16": _widen_float16, "bf16": _widen_bfloat16}.get(element))


def _pack(ptx_type: str) -> Step | None:
    """From rounded elements (bf16: bits) to the result."""
    dtype = DTYPE[ptx_type]
    return (lambda elements: join(elements, dtype)) if ptx_type.endswith("x2") else None


def _widen_float16(values: Array) -> Array:
    return values.astype(np.float32)


def _widen_bfloat16(bits: Array) -> Array:
    words: Array = bits.astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def flush_of(element: str) -> Step:
    """Subnormal elements (bf16: bits) become zero of their sign."""
    return _flush_bfloat16 if element == "bf16" else _flush


def _flush(values: Array) -> Array:
    flushed: Array = values * (np.abs(values) >= _MIN_NORMAL[values.dtype])
    return flushed


def _flush_bfloat16(bits: Array) -> Array:
    flushed: Array = bits & np.where(bits & np.uint16(0x7F80), np.uint16(0xFFFF), np.uint16(0x8000))
    return flushed


def saturate(values: Array) -> Array:
    """Clamped to [0, 1]; NaN and -0 become +0."""
    return np.where(values > 0, np.minimum(values, 1), values.dtype.type(0))


def relu(values: Array) -> Array:
    """Negative values and -0 become +0; NaN stays."""
    clamped: Array = np.maximum(values, 0)
    clamped += 0  # -0 becomes +0
    return clamped


def canonical(values: Array) -> Array:
    """Every NaN becomes the one that PTX calls canonical."""
    nan = values != values
    if np.count_nonzero(nan):
        return np.where(nan, _NAN[values.dtype], values)
    return values
