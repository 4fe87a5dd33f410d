"""Elements of any dtype in Numba kernels: bfloat16 as uint16 bits, the others unchanged.

``functions(name)`` returns the functions for a dtype: ``load(x)`` widens an element to the compute type
(float32, or float64 for float64), ``store(x)`` rounds to nearest even. int8 and uint8, which has the bits of e4m3,
are those of quantized pages: ``store`` takes numbers up to ``LARGEST``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int8, int32, uint8, uint16, uint32
from numba.cuda import libdevice

__all__ = ["LARGEST", "Functions", "functions", "magnitude", "of_magnitude"]

LARGEST = {"int8": 127.0, "uint8": 448.0}


class Functions(NamedTuple):
    load: Callable[[Any], Any]
    store: Callable[[Any], Any]
    compute: Any  # the Numba type
    element: str  # name in signatures
    statistics: str  # type of rstd and dweight in signatures


@cuda.jit(device=True)
def _float32_of_bfloat16(bits):
    return libdevice.int_as_float(np.int32(uint32(bits) << uint32(16)))


@cuda.jit(device=True)
def _bfloat16_of_float32(value):
    bits = uint32(libdevice.float_as_int(value))
    if value != value:
        return uint16(0x7FFF)
    return uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@cuda.jit(device=True)
def _float32_of(value):
    return float32(value)


@cuda.jit(device=True)
def _float16_of_float32(value):
    return np.float16(value)


@cuda.jit(device=True)
def _same(value):
    return value


@cuda.jit(device=True)
def magnitude(value):
    """Bits of |value|, a float32: integers in the same order, NaN above infinity."""
    return int32(libdevice.float_as_int(value) & int32(0x7FFFFFFF))


@cuda.jit(device=True)
def of_magnitude(bits):
    return libdevice.int_as_float(int32(bits))


@cuda.jit(device=True)
def _int8_of_float32(value):
    return int8(int32(libdevice.rintf(value)))


@cuda.jit(device=True)
def _float32_of_e4m3(code):
    size = uint32(code) & uint32(0x7F)
    if size == uint32(0x7F):
        return float32(math.nan)
    # The exponent's bias differs by 120; multiplying by 2^120 also makes subnormals right.
    value = of_magnitude(size << uint32(20)) * float32(2.0**120)
    return -value if uint32(code) & uint32(0x80) else value


@cuda.jit(device=True)
def _e4m3_of_float32(value):
    size = uint32(magnitude(value))
    # 2^-6; numbers below are multiples of 2^-9, the value of the last bit of 2^14
    if size < uint32(0x3C800000):
        code = uint32(magnitude(of_magnitude(size) + float32(2.0**14))) - uint32(0x46800000)
    else:
        odd = (size >> uint32(20)) & uint32(1)
        code = ((size + uint32(0x7FFFF) + odd) >> uint32(20)) - uint32(120 << 3)
    return uint8(code | (uint32(libdevice.float_as_int(value)) >> uint32(24)) & uint32(0x80))


@cache
def functions(dtype: str) -> Functions:
    return {
        "bfloat16": Functions(_float32_of_bfloat16, _bfloat16_of_float32, float32, "uint16", "float32"),
        "float16": Functions(_float32_of, _float16_of_float32, float32, "float16", "float32"),
        "float32": Functions(_same, _same, float32, "float32", "float32"),
        "float64": Functions(_same, _same, float64, "float64", "float64"),
        "int8": Functions(_float32_of, _int8_of_float32, float32, "int8", "float32"),
        "uint8": Functions(_float32_of_e4m3, _e4m3_of_float32, float32, "uint8", "float32"),
    }[dtype]
