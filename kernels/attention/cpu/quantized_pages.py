"""Rows of keys and values in one byte per element, times a float32 scale: int8, or uint8 with the bits of e4m3.

reference/attention/quantized_pages.py defines them. An e4m3 number is a sign, 4 bits of exponent (bias 7) and 3 of
mantissa; 0x7F and 0xFF are NaN.
"""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import larger, smaller
from gpu_ops.kernels.common.cpu.codegen.numba_api import types
from gpu_ops.kernels.common.cpu.dtype import as_float32, as_uint32, load, magnitude, of_magnitude
from gpu_ops.kernels.common.cpu.jit import constant, device_function, exact, generic, read

__all__ = ["NO_SCALE", "SCALE", "encode_row", "is_quantized", "number", "put_scaled", "scale_at"]

NO_SCALE = np.empty((0, 0, 0), np.float32)
SCALE = read("float32", 3)  # (num_pages, page_size, nheads_kv)
_CODES = (types.int8, types.uint8)
_TINY = np.float32(2.0**-126)  # the smallest scale: its inverse is finite


@constant
def is_quantized(x):
    """Whether array ``x`` holds codes."""
    return x.dtype in _CODES


@generic
def number(row, i):
    """Element ``i`` of a row of any dtype, without the scale, in the computing type."""
    if row.dtype == types.int8:
        return lambda row, i: np.float32(row[i])
    return (lambda row, i: _of_e4m3(row[i])) if row.dtype == types.uint8 else (lambda row, i: load(row, i))


@generic
def scale_at(scales, x, page, row, head):
    """Scale of a row of array ``x``; 1 if the array holds numbers."""
    if x.dtype in _CODES:
        return lambda scales, x, page, row, head: scales[page, row, head]
    return lambda scales, x, page, row, head: np.float32(1)


@device_function
def put_scaled(to, row, dim, scale):
    for d in range(dim):
        to[d] = number(row, d) * scale


@device_function
def _of_e4m3(code):
    u = np.uint32(code)
    # The exponent bias differs by 120; multiplying by 2^120 also makes subnormals right.
    size = as_float32((u & np.uint32(0x7F)) << np.uint32(20)) * np.float32(2.0**120)
    size = np.float32(np.nan) if size == np.float32(480) else size
    return as_float32(as_uint32(size) | (u & np.uint32(0x80)) << np.uint32(24))


@generic
def _largest(codes):
    largest = np.float32(127 if codes.dtype == types.int8 else 448)
    return lambda codes: largest


@generic
def _encode(codes, i, x):
    """Write the code of ``x``, which is at most the largest number, rounded to nearest even."""

    def int8(codes, i, x):
        codes[i] = np.int8(np.int32(np.rint(x)))

    def e4m3(codes, i, x):
        u = as_uint32(x)
        a = u & np.uint32(0x7FFFFFFF)
        # Normal: rebias the exponent by 120 and round to even.
        odd = (a >> np.uint32(20)) & np.uint32(1)
        normal = ((a + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
        # Below 2^-6 numbers are multiples of 2^-9, which is the value of the last bit of 2^14.
        small = as_uint32(as_float32(a) + np.float32(2.0**14)) - np.uint32(0x46800000)
        code = small if a < np.uint32(0x3C800000) else normal
        codes[i] = np.uint8(code | ((u >> np.uint32(24)) & np.uint32(0x80)))

    return int8 if codes.dtype == types.int8 else e4m3


@exact
def encode_row(to, x):
    """Write the codes of the float32 row ``x``, and return its scale."""
    top = np.int32(0)
    for i in range(len(x)):
        top = larger(top, magnitude(x[i]))
    largest = _largest(to)
    scale = of_magnitude(top) / largest
    if not _TINY <= scale < np.inf:  # zeros, an infinity or a NaN
        for i in range(len(x)):
            to[i] = 0
        return np.float32(0) if scale < _TINY else np.float32(np.nan)
    inverse = np.float32(1) / scale
    for i in range(len(x)):
        _encode(to, i, larger(smaller(x[i] * inverse, largest), -largest))
    return scale
