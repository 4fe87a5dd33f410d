"""Keys and values in pages of one byte per element, with a float32 scale per token and head.

    scale = max|x| / largest        code = round(x * (1 / scale))        x is about code * scale

in float32, to nearest even; ``largest`` is 127 for int8 and 448 for float8_e4m3fn. A row whose scale would be below
the smallest normal float32 has scale 0 and codes 0. A row with a NaN or an infinity has scale NaN and codes 0.

The error of an element is at most ``scale / 2`` for int8, and for e4m3 ``|x| / 16`` or ``scale / 1024``, the larger.

An array of uint8 holds the bits of e4m3 numbers: not every array library has that dtype.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpu_ops.reference.precision import Array

__all__ = ["LARGEST", "dequantize", "quantize"]

LARGEST = {"int8": 127.0, "uint8": 448.0, "float8_e4m3fn": 448.0}


def quantize(x: Array, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Codes of the shape of ``x``, in one of these dtypes, and scales without its last axis."""
    largest = np.float32(LARGEST[np.dtype(dtype).name])
    x = np.asarray(x).astype(np.float32)
    with np.errstate(all="ignore"):
        scale = np.abs(x).max(axis=-1, initial=0) / largest
        scale = np.where(np.isfinite(scale), scale, np.float32(np.nan))
        scale = np.where(scale < np.finfo(np.float32).smallest_normal, np.float32(0), scale)
        scaled = x * (1 / scale)[..., None]
    scaled = np.where(scale[..., None] > 0, scaled, np.float32(0)).clip(-largest, largest)
    if np.dtype(dtype) == np.int8:
        return np.rint(scaled).astype(np.int8), scale
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(dtype), scale


def dequantize(codes: Array, scale: Array) -> Array:
    """Numbers of codes, in float64."""
    numbers = codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    return numbers.astype(np.float64) * scale[..., None].astype(np.float64)
