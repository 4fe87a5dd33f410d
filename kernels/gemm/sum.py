"""Sum of the parts of a matrix product whose K was divided. The CUDA C++ kernel is ``sum.cu``."""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm.args import aligned, stride
from gpu_ops.kernels.program import Builder, Tensor

__all__ = ["VARIANT", "add_up"]

_THREADS = 256
_NULL = np.uint64(0)


def add_up(
    builder: Builder,
    parts: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Store the sum of ``parts`` (splits, rows, cols), float32 and contiguous, in ``out``, rounded once.

    The sum includes ``residual``, an array like out, which may be out, and ``bias``, one row.
    """
    splits, rows, cols = parts.shape
    more = [x for x in (residual, bias) if x is not None]
    width = 4 if aligned([out, *more], 4 * out.itemsize) else 1
    strides = (np.int64(stride(out)), np.int64(0 if residual is None else stride(residual)))
    arrays = (parts, out, *(_NULL if x is None else x for x in (residual, bias)))
    args = (*arrays, np.int64(rows), np.int64(cols), *strides, np.int32(splits))
    grid = (-(-rows * cols // (width * _THREADS)), 1, 1)
    builder.launch(_kernel(out.dtype.name, width), grid, (_THREADS, 1, 1), args)


def _kernel(dtype: str, width: int) -> CudaKernel:
    return CudaKernel("gemm/sum", "gemm_sum", (("DTYPE", DTYPES[dtype]), ("WIDTH", width)))


VARIANT = Variant(_kernel("bfloat16", 4), _THREADS)
"""The kernel of an aligned bfloat16 result."""
