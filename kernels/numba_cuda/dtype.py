"""Elements of any dtype in Numba kernels: bfloat16 as uint16 bits, the others as themselves.

``functions(name)`` returns what a kernel needs for a dtype: ``load(x)`` widens an element to the compute type
(float32, or float64 for float64), ``store(x)`` rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, uint16, uint32
from numba.cuda import libdevice

__all__ = ["Functions", "functions"]


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


@cache
def functions(dtype: str) -> Functions:
    return {
        "bfloat16": Functions(_float32_of_bfloat16, _bfloat16_of_float32, float32, "uint16", "float32"),
        "float16": Functions(_float32_of, _float16_of_float32, float32, "float16", "float32"),
        "float32": Functions(_same, _same, float32, "float32", "float32"),
        "float64": Functions(_same, _same, float64, "float64", "float64"),
    }[dtype]
