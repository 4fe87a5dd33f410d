"""Checks of ternary shapes, trits, bytes and scales; packing by NumPy with typed errors."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Call
from gpu_ops.core.checks import integer
from gpu_ops.errors import DTypeError, FormatError, OptionError, ShapeError
from gpu_ops.reference.weights.ternary_formats import TernaryFormat
from gpu_ops.reference.weights.ternary_layouts import LayoutError, decode, encode

__all__ = [
    "check_integers",
    "check_scale",
    "check_trits",
    "fits",
    "matrix_shape",
    "not_finite",
    "number_array",
    "on_host",
    "pack",
    "unpack",
]


_LONGEST = 1 << 48


def matrix_shape(op: str, shape: Any) -> tuple[int, int]:
    """Check a shape and return it as two non-negative Python integers."""
    try:
        sizes = tuple(shape)
    except Exception:  # not a sequence, or one that cannot be read: a memoryview of two axes
        sizes = ()
    if len(sizes) != 2:
        raise ShapeError(f"{op}: shape must be (N, K), got {shape!r}")
    n, k = (integer(op, "shape", size, low=0) for size in sizes)
    if max(n, k) > _LONGEST:  # with another axis of 0, NumPy's own error would come late and untyped
        raise ShapeError(f"{op}: shape ({n}, {k}) has an axis of more than 2^48")
    return n, k


def check_trits(op: str, trits: Array) -> Array:
    """Check an integer matrix of -1, 0, +1 and return it as int8."""
    check_integers(op, trits)
    if trits.size and (trits.min() < -1 or trits.max() > 1):
        index = tuple(int(i) for i in np.argwhere((trits < -1) | (trits > 1))[0])
        raise FormatError(f"{op}: trits[{index[0]}, {index[1]}] is {trits[index]}; a trit is -1, 0 or +1")
    return trits.astype(np.int8, copy=False)


def check_integers(op: str, trits: Array) -> None:
    """Require a matrix of signed integers."""
    if not np.issubdtype(trits.dtype, np.signedinteger):
        raise DTypeError(f"{op}: trits is {trits.dtype}; pass a signed integer array of -1, 0, +1 (int8)")
    if trits.ndim != 2:
        raise ShapeError(f"{op}: trits has shape {trits.shape}; expected (N, K)")


def pack(op: str, trits: Array, fmt: TernaryFormat, scale: Array | None = None) -> Array:
    """Encode; errors of the format are raised as typed errors."""
    n, k = trits.shape
    fits(op, (n, k), fmt)
    try:
        return encode(trits, fmt.name, scale=scale)
    except LayoutError as error:
        raise FormatError(f"{op}: {error}") from error


def unpack(op: str, packed: Array, shape: tuple[int, int], fmt: TernaryFormat, *, strict: bool) -> Array:
    """Decode; errors of the format are raised as typed errors."""
    if packed.dtype != np.uint8:
        raise DTypeError(
            f"{op}: packed codes are {packed.dtype}; expected uint8 (other bytes: .view(np.uint8))"
        )
    fits(op, shape, fmt)
    try:
        return decode(packed, shape, fmt.name, strict=strict)
    except LayoutError as error:
        lenient = op == "ternary_unpack" and strict and packed.size >= math.prod(fmt.packed_shape(shape))
        hint = "; strict=False decodes it all the same" if lenient else ""
        raise FormatError(f"{op}: {error}{hint}") from error


def fits(op: str, shape: tuple[int, int], fmt: TernaryFormat) -> None:
    """Require that the format can hold the shape."""
    try:
        fmt.packed_shape(shape)
    except ValueError as error:
        raise ShapeError(f"{op}: {error}") from error


def on_host(array: Any) -> Array:
    """Copy a CuPy array to host memory; NumPy arrays are returned unchanged."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    return np.asarray(cupy.asnumpy(array))


def not_finite(op: str) -> OptionError:
    return OptionError(f"{op}: w holds NaN or infinity (or its |w| overflow); a trit cannot carry them on")


def number_array(op: str, scale: Any) -> Array | None:
    """Convert a real number of Python or NumPy, or a 0-d NumPy array, to a 0-d float32 array; else None."""
    if isinstance(scale, np.ndarray) and not scale.ndim:
        scale = scale[()]
    real = isinstance(scale, (int, float, np.integer, np.floating, ml_dtypes.bfloat16))
    if real and not isinstance(scale, (bool, np.timedelta64)):
        try:
            with np.errstate(all="ignore"):  # infinity is refused in any case
                return np.asarray(scale, np.float32)
        except OverflowError as error:
            raise OptionError(f"{op}: scale is an integer that float32 cannot hold") from error
    if isinstance(scale, (bool, complex, str, np.generic)):
        raise DTypeError(f"{op}: scale is {type(scale).__name__}; expected a number or a float32 array")
    return None


def check_scale(scale: Any, shape: tuple[int, int]) -> Array:
    """Check a scale: finite float32, of shape (), (N,) or (N, G)."""
    n, k = shape
    number = number_array("TernaryMatrix", scale)
    array = Call("TernaryMatrix").read("scale", scale) if number is None else number
    if array.dtype != np.float32:
        raise DTypeError(
            f"TernaryMatrix: scale is {array.dtype}; scales are float32: scale.astype(np.float32)"
        )
    fits = array.shape in ((), (n,)) or (
        array.ndim == 2 and array.shape[0] == n and array.shape[1] > 0 and k % array.shape[1] == 0
    )
    if not fits:
        raise ShapeError(
            f"TernaryMatrix: scale has shape {array.shape}; expected () per tensor, ({n},) per row, or "
            f"({n}, G) with G groups that divide K={k}"
        )
    if not np.isfinite(array).all():
        raise OptionError("TernaryMatrix: scale holds NaN or infinity")
    return np.ascontiguousarray(array) if array.ndim else array  # GPU kernels need it contiguous
