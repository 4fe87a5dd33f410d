"""Sums the parts of a matrix product whose K was divided. The CUDA C++ kernel is ``cuda/gemm_sum.cu``."""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES
from gpu_ops.kernels.lower.gemm_args import aligned, stride
from gpu_ops.kernels.program import Builder, Tensor

__all__ = ["VARIANT", "add_up"]

_THREADS = 256


def add_up(on: Builder, parts: Tensor, out: Tensor) -> None:
    """``out`` is the sum of ``parts`` (splits, rows, cols), float32 and contiguous, rounded once."""
    splits, rows, cols = parts.shape
    width = 4 if aligned([out], 4 * out.itemsize) else 1
    args = (parts, out, np.int64(rows), np.int64(cols), np.int64(stride(out)), np.int32(splits))
    grid = (-(-rows * cols // (width * _THREADS)), 1, 1)
    on.launch(_kernel(out.dtype.name, width), grid, (_THREADS, 1, 1), args)


def _kernel(dtype: str, width: int) -> CudaKernel:
    return CudaKernel("gemm_sum", "gemm_sum", (("DTYPE", DTYPES[dtype]), ("WIDTH", width)))


VARIANT = Variant(_kernel("bfloat16", 4), _THREADS)
"""The kernel of an aligned bfloat16 result."""
