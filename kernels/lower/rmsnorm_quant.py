"""RMSNorm with int8 codes on the GPU: how rows lie on threads, and the launch. ``select_config`` needs no GPU.

Arrays are (rows, cols) with unit stride on the last axis; weight (cols,), scale and rowsum (rows,) are contiguous.
The CUDA C++ kernel is ``cuda/rmsnorm_quant.cu``, its readable twin ``numba_cuda/rmsnorm_quant.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, address, alignment, epsilon, float32, row_stride

__all__ = ["QuantConfig", "forward", "select_config", "variants"]

_WARP = 32
_MAX_GRID = 2**31 - 1

# Rows of whole 16-byte vectors, up to so many of them | threads per row, None: as many warps as it takes | rows per
# block | vectors per thread, kept as floats in registers; 0: rows are read again.
_PLANS: tuple[tuple[float, int | None, int, int], ...] = (
    (64, _WARP, 4, 2),  # 512 columns of 16 bits: a warp per row, no barrier
    (2048, None, 1, 2),  # 16384 columns of 16 bits, 8192 of float32
    (math.inf, 256, 1, 0),
)
_ODD = 256, 1, 0  # rows of single elements


@dataclass(frozen=True)
class QuantConfig:
    """How rows are laid out on threads, as ``cuda/rmsnorm_quant.cu`` says."""

    vec: int  # elements that a thread owns side by side
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    vecs: int  # vectors per thread in registers, else 0
    threads_per_row: int
    rows_per_block: int
    grid: tuple[int, int]  # groups of rows, on two axes

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block


def select_config(rows: int, cols: int, itemsize: int, *, aligned: bool) -> QuantConfig:
    """The kernel for a problem; ``aligned``: 16-byte vectors of x and their codes can be accessed whole."""
    vec = 16 // itemsize if cols * itemsize % 16 == 0 else 1
    n_vecs = cols // vec
    threads, rows_per_block, vecs = (
        next(plan[1:] for plan in _PLANS if n_vecs <= plan[0]) if vec > 1 else _ODD
    )
    threads = threads or -(-n_vecs // (vecs * _WARP)) * _WARP
    groups = -(-rows // rows_per_block)
    grid = (min(groups, _MAX_GRID), -(-groups // _MAX_GRID))
    return QuantConfig(vec, vec if aligned else 1, vecs, threads, rows_per_block, grid)


def forward(
    device: Any,
    backend: str,
    x: Any,
    weight: Any,
    residual: Any | None,
    q: Any,
    scale: Any,
    rowsum: Any,
    s: Any | None,
    *,
    eps: float,
    weight_offset: float,
    llama: bool,
) -> None:
    """Fills ``q``, ``scale``, ``rowsum`` and, with ``residual``, ``s = x + residual``."""
    rows, cols = x.shape
    if rows == 0:
        return
    has_residual = np.int32(residual is not None)
    if residual is None:
        residual, s = x, x  # stand-ins: nobody touches them
    arrays = (x, weight, residual, q, scale, rowsum, s)
    if backend == "numba":
        flags = (np.float64(eps), np.float64(weight_offset), np.int32(llama), has_residual)
        grid = (min(rows, _MAX_GRID), 1, 1)
        device.launch(_twin(x.dtype.name), grid, (_TWIN_THREADS, 1, 1), (*arrays, *flags))
        return
    vec = 16 // x.dtype.itemsize
    aligned = (
        alignment((x, residual, s), rows) == 16
        and address(weight) % 16 == 0
        and alignment((q,), rows) % vec == 0
    )
    config = select_config(rows, cols, x.dtype.itemsize, aligned=aligned)
    strides = map(row_stride, (x, residual, q, s))
    numbers = epsilon(eps), float32(1 / cols), float32(weight_offset)
    args = (*arrays, np.int64(rows), np.int32(cols), *strides, *numbers, np.int32(llama), has_residual)
    block = (config.threads_per_row, config.rows_per_block, 1)
    device.launch(_kernel(config, x.dtype.name), (*config.grid, 1), block, args)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` launches, with the threads of a long row in its reach."""
    seen = set()
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for cols, aligned in itertools.product((8192, 1 << 20, 1001), (True, False)):
            config = select_config(1, cols, itemsize, aligned=aligned)
            kernel = _kernel(config, dtype)
            if kernel not in seen:
                seen.add(kernel)
                yield Variant(kernel, config.threads)


_TWIN_THREADS = 256


def _kernel(config: QuantConfig, dtype: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype],
        "VEC": config.vec,
        "ACCESS": config.access,
        "VECS": config.vecs,
    }
    return CudaKernel("rmsnorm_quant", "rmsnorm_quant_int8", tuple(defines.items()))


def _twin(dtype: str) -> NumbaKernel:
    from gpu_ops.kernels.numba_cuda import rmsnorm_quant as twins

    return twins.kernel(dtype)
