"""Access of kernels to elements and rows of every dtype and any strides.

========  ================  ===================
dtype     enters a kernel   computed in
========  ================  ===================
float16   int16 bits        float32
bfloat16  uint16 bits       float32
float32   float32           float32
float64   float64           float64
========  ================  ===================

The integer type tells the two 16-bit formats apart, so one generic kernel body serves all four:
``load(row, i)`` widens, ``store(row, i, value)`` rounds to nearest even, ``like(value, 0.5)`` is a
constant in the computing type (a bare Python constant would widen float32 maths to float64).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.kernels.common.cpu.codegen.numba_api import (
    intrinsic,
    ir,
    make_array,
    populate_array,
    signature,
    types,
    unpack_tuple,
)
from gpu_ops.kernels.common.cpu.codegen.target import CONVERTS_FLOAT16
from gpu_ops.kernels.common.cpu.jit import device_function, generic
from gpu_ops.memory_pool import POOL

SMALL_BYTES = 1 << 12
_BITS = {
    np.dtype(np.float16): np.dtype(np.int16),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.uint16),
    np.dtype(ml_dtypes.float8_e4m3fn): np.dtype(np.uint8),
}


def bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integer view of an array of 16-bit floats or e4m3, as kernels take it; other arrays unchanged."""
    as_integer = _BITS.get(x.dtype)
    return x if as_integer is None else x.view(as_integer)


def all_bits(*arrays: np.ndarray[Any, Any]) -> Iterable[np.ndarray[Any, Any]]:
    """:func:`bits` of arrays that share a dtype, which is looked up once."""
    as_integer = _BITS.get(arrays[0].dtype)
    return arrays if as_integer is None else [x.view(as_integer) for x in arrays]


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Like np.empty, on a cache line and in reused memory if it is large (finding a line takes 1 us).

    A vector, or a row of a tile register, that straddles two lines costs twice.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= SMALL_BYTES:
        return np.empty(shape, dtype)
    raw = POOL.empty((size + 64,), np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _row(x: Any, index: Any, readonly: bool) -> Any:
    view = types.Array(x.dtype, 1, "C", readonly=readonly)

    def codegen(context, builder, sig, args):
        source = make_array(sig.args[0])(context, builder, args[0])
        shape = unpack_tuple(builder, source.shape)
        strides = unpack_tuple(builder, source.strides)
        indices = unpack_tuple(builder, args[1])
        offset = context.get_constant(types.intp, 0)
        for i, stride in zip(indices, strides[:-1], strict=True):
            offset = builder.add(offset, builder.mul(i, stride))
        bytes_pointer = builder.bitcast(source.data, context.get_value_type(types.voidptr))
        data = builder.bitcast(builder.gep(bytes_pointer, [offset]), source.data.type)
        result = make_array(sig.return_type)(context, builder)
        populate_array(
            result,
            data=data,
            shape=[shape[-1]],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
            parent=None,
        )
        return result._getvalue()

    indices = types.UniTuple(types.intp, x.ndim - 1) if x.ndim > 1 else index
    return signature(view, x, indices), codegen


@intrinsic
def read_row(typingctx, x, index):
    """``x[*index]`` for all axes but the last: a contiguous read-only view (the last axis has unit stride).

    Plain indexing of an any-strides array would give an any-strides row, which LLVM cannot vectorise.
    """
    return _row(x, index, readonly=True)


@intrinsic
def write_row(typingctx, x, index):
    """:func:`read_row` for an output."""
    return _row(x, index, readonly=False)


def _bitcast(to: types.Type) -> Any:
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, sig, args):
            value, target = args[0], context.get_value_type(to)
            if isinstance(sig.args[0], types.Integer) and sig.args[0].bitwidth > to.bitwidth:
                # Numba widens integer arithmetic to 64 bits; LLVM narrows it again in vector code.
                value = builder.trunc(value, ir.IntType(to.bitwidth))
            return builder.bitcast(value, target)

        return signature(to, value), codegen

    return cast


as_float32 = _bitcast(types.float32)
as_uint32 = _bitcast(types.uint32)
as_float64 = _bitcast(types.float64)
as_int64 = _bitcast(types.int64)


@intrinsic
def like(typingctx, value, constant):
    """``constant`` in the type of ``value``."""
    result, constant_type = (
        types.float64 if value == types.float64 else types.float32,
        types.unliteral(constant),
    )

    def codegen(context, builder, sig, args):
        return context.cast(builder, args[1], constant_type, result)

    return signature(result, value, constant_type), codegen


@generic
def load(x, i):
    """Element ``i`` of a 1-D row in the computing type."""
    if x.dtype == types.int16:
        return lambda x, i: float32_of_float16(x[i])
    if x.dtype == types.uint16:
        return lambda x, i: float32_of_bfloat16(x[i])
    return lambda x, i: x[i]


@generic
def store(x, i, value):
    """Round ``value`` to the row's dtype and write it."""
    if x.dtype == types.int16:

        def store_float16(x, i, value):
            x[i] = float16_of_float32(np.float32(value))

        return store_float16
    if x.dtype == types.uint16:

        def store_bfloat16(x, i, value):
            x[i] = bfloat16_of_float32(np.float32(value))

        return store_bfloat16

    def store_native(x, i, value):
        x[i] = value

    return store_native


@generic
def rounded(x, value):
    """``value`` rounded to the dtype of row ``x``, still in the computing type."""
    if x.dtype == types.int16:
        return lambda x, value: float32_of_float16(float16_of_float32(np.float32(value)))
    if x.dtype == types.uint16:
        return lambda x, value: float32_of_bfloat16(bfloat16_of_float32(np.float32(value)))
    return lambda x, value: value


@generic
def magnitude(value):
    """Bits of |value|: integers in the same order, NaN above infinity. LLVM makes vector code of their maximum."""
    if value == types.float64:
        return lambda value: as_int64(value) & np.int64(0x7FFFFFFFFFFFFFFF)
    return lambda value: np.int32(as_uint32(value) & np.uint32(0x7FFFFFFF))


@generic
def of_magnitude(m):
    """Float of a :func:`magnitude`."""
    return (lambda m: as_float64(m)) if m == types.int64 else (lambda m: as_float32(m))


@device_function
def float32_of_bfloat16(x):
    return as_float32(np.uint32(x) << np.uint32(16))


@intrinsic
def bfloat16_of_float32(typingctx, x):
    """Round to nearest even, in 32-bit integers: Numba's own arithmetic is 64 bits wide, half the lanes."""

    def codegen(context, builder, sig, args):
        bits32 = ir.IntType(32)
        u = builder.bitcast(args[0], bits32)
        high = builder.lshr(u, bits32(16))
        to_even = builder.add(bits32(0x7FFF), builder.and_(high, bits32(1)))
        rounded = builder.lshr(builder.add(u, to_even), bits32(16))
        quiet_nan = builder.or_(high, bits32(0x40))  # rounding could carry a NaN's payload into inf
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, quiet_nan, rounded), ir.IntType(16))

    return signature(types.uint16, types.float32), codegen


@intrinsic
def _float32_of_half(typingctx, x):
    def codegen(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return signature(types.float32, types.int16), codegen


@intrinsic
def _half_of_float32(typingctx, x):
    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return signature(types.int16, types.float32), codegen


@device_function
def _float32_of_float16_bits(x):
    h = np.uint32(np.uint16(x))
    # The exponent bias differs by 112; multiplying by 2^112 also makes subnormals right.
    magnitude = as_float32((h & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    u = as_uint32(magnitude)
    u |= np.uint32(0x7F800000) if magnitude >= np.float32(65536.0) else np.uint32(0)  # inf and NaN
    return as_float32(u | ((h & np.uint32(0x8000)) << np.uint32(16)))


@device_function
def _float16_bits_of_float32(x):
    u = as_uint32(x)
    a = u & np.uint32(0x7FFFFFFF)
    # Normal: rebias the exponent and round to even. The constant is ((15 - 127) << 23) + 0xFFF mod 2^32.
    normal = (a + np.uint32(0xC8000FFF) + ((a >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    # Subnormal: adding 0.5 leaves the rounded result in the low mantissa bits.
    subnormal = as_uint32(as_float32(a) + np.float32(0.5)) - np.uint32(0x3F000000)
    special = np.uint32(0x7E00) if a > np.uint32(0x7F800000) else np.uint32(0x7C00)
    h = subnormal if a < np.uint32(0x38800000) else normal
    h = special if a >= np.uint32(0x47800000) else h
    return np.int16(h | ((u >> np.uint32(16)) & np.uint32(0x8000)))


float32_of_float16 = _float32_of_half if CONVERTS_FLOAT16 else _float32_of_float16_bits
float16_of_float32 = _half_of_float32 if CONVERTS_FLOAT16 else _float16_bits_of_float32
