"""Ternary matmul on the GPU: host functions of ``cuda/ternary_*.cu`` and of the twins in ``numba_cuda/ternary.py``.

x (tokens, K) and y (tokens, N) have unit stride on the last axis; codes (N, bytes) are w2, scale (1 or N, groups)
float32, both contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.jit import CudaKernel, Variant
from gpu_ops.kernels.ternary_config import UNIT, gemv_config, gemv_configs

__all__ = ["matmul", "variants"]

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def matmul(
    device: Any, backend: str, x: Any, codes: Any, k: int, scale: Any, y: Any, *, activations: str
) -> None:
    """``y = x @ (scale * trits).T``."""
    tokens, n = y.shape
    if tokens == 0 or n == 0:
        return
    if k == 0:
        y.fill(0)
        return
    if backend == "numba":
        _twin(device, x, codes, k, scale, y, activations)
        return
    for first in range(0, tokens, 4):
        part = slice(first, first + 4)
        _gemv(device, x[part], codes, k, scale, y[part])


def _twin(device: Any, x: Any, codes: Any, k: int, scale: Any, y: Any, activations: str) -> None:
    from gpu_ops.kernels.numba_cuda import ternary as twins

    (tokens, n), dtype = y.shape, x.dtype.name
    inverse = device.empty((tokens if activations == "int8" else 1,), np.float64)
    if activations == "int8":
        q = device.empty((tokens, k), np.int8)
        threads = (twins.QUANTIZE_THREADS, 1, 1)
        device.launch(twins.quantize_kernel(dtype), (tokens, 1, 1), threads, (x, q, inverse))
        x = q
    group = (
        k // scale.shape[1] if scale.shape[1] > 1 else codes.shape[1] * 4
    )  # whole words: the last one ends it
    grid = (-(-n // twins.TILE), min(-(-tokens // twins.TILE), 65535), 1)
    args = (x, inverse, codes.view(np.uint32), scale, y, np.int64(group))
    device.launch(twins.matmul_kernel(dtype, activations), grid, (twins.TILE, twins.TILE, 1), args)


def _gemv(device: Any, x: Any, codes: Any, k: int, scale: Any, y: Any) -> None:
    tokens, n = y.shape
    groups = scale.shape[1]
    config = gemv_config(tokens, n, k, groups, sms=device.sms)
    assert config is not None
    kernel = _gemv_kernel(x.dtype.name, config.tokens, config.rows, groups > 1)
    args = (
        x,
        codes,
        scale,
        y,
        _stride(x),
        np.int64(codes.shape[1]),
        _scale_stride(scale),
        _stride(y),
        np.int32(tokens),
        np.int32(n),
        np.int32(k),
        np.int32(max(k // groups // UNIT, 1)),
        np.int32(_is_whole(x)),
    )
    device.launch(kernel, (config.grid, 1, 1), (config.threads, 1, 1), args, shared=config.shared_bytes)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``matmul`` launches."""
    for dtype in _DTYPES:
        for tokens, rows in gemv_configs():
            for grouped in (False, True):
                yield Variant(_gemv_kernel(dtype, tokens, rows, grouped), 256, 64 * 1024)


def _gemv_kernel(dtype: str, tokens: int, rows: int, grouped: bool) -> CudaKernel:
    defines = (("DTYPE", _DTYPES[dtype]), ("TOKENS", tokens), ("ROWS", rows), ("GROUPED", int(grouped)))
    return CudaKernel("ternary_gemv", "ternary_gemv", defines)


def _is_whole(x: Any) -> bool:
    """Whether rows of x are whole vectors of 16 bytes, aligned."""
    strides = x.strides[0] if x.shape[0] > 1 else 0
    return math.gcd(_address(x), strides, x.shape[1] * x.dtype.itemsize) % 16 == 0


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)  # else CuPy's


def _stride(array: Any) -> np.int64:
    """Elements from one row to the next."""
    return np.int64(array.strides[0] // array.dtype.itemsize)


def _scale_stride(scale: Any) -> np.int64:
    return np.int64(0 if scale.shape[0] == 1 else scale.shape[1])
