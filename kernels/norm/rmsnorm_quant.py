"""Launch of RMSNorm with int8 codes on each backend, and the assignment of rows to threads.

Arrays are (rows, cols) with unit stride on the last axis; weight (cols,), scale and rowsum (rows,) are contiguous.
The CUDA C++ kernel is ``rmsnorm_quant.cu``, its readable twin ``numba_cuda/rmsnorm_quant.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, alignment, as_line, as_rows, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor, lowers

__all__ = ["QuantConfig", "select_config", "variants"]

_WARP = 32

# Limit of a row in 16-byte vectors | threads per row, None: as many warps as it takes | rows per
# block | vectors per thread, kept as floats in registers; 0: rows are read again.
_PLANS: tuple[tuple[float, int | None, int, int], ...] = (
    (64, _WARP, 4, 2),  # 512 columns of 16 bits: a warp per row, no barrier
    (2048, None, 1, 2),  # 16384 columns of 16 bits, 8192 of float32
    (math.inf, 256, 1, 0),
)
_ODD = 256, 1, 0  # rows of single elements


@dataclass(frozen=True)
class QuantConfig:
    """Assignment of rows to threads, as ``rmsnorm_quant.cu`` describes."""

    vec: int  # adjacent elements that a thread owns
    access: int  # elements per memory access: vec, or 1 where an array is not aligned
    vecs: int  # vectors per thread in registers, else 0
    threads_per_row: int
    rows_per_block: int
    grid: tuple[int, int]  # groups of rows, on two axes

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block


def select_config(rows: int, cols: int, itemsize: int, *, aligned: bool) -> QuantConfig:
    """Configuration for a problem; ``aligned``: 16-byte vectors of x and their codes can be accessed whole."""
    vec = 16 // itemsize if cols * itemsize % 16 == 0 else 1
    n_vecs = cols // vec
    threads, rows_per_block, vecs = (
        next(plan[1:] for plan in _PLANS if n_vecs <= plan[0]) if vec > 1 else _ODD
    )
    threads = threads or -(-n_vecs // (vecs * _WARP)) * _WARP
    groups = -(-rows // rows_per_block)
    grid = (min(groups, MAX_GRID[0]), -(-groups // MAX_GRID[0]))
    return QuantConfig(vec, vec if aligned else 1, vecs, threads, rows_per_block, grid)


@lowers("rmsnorm_quant_int8", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.common.cpu.parallel import items_per_task
    from gpu_ops.kernels.norm.cpu import rmsnorm_quant

    x = spec.tensor("x")
    size = math.prod(x.shape[:-1]), x.shape[-1]
    options = {
        "eps": spec["eps"],
        "weight_offset": spec["weight_offset"],
        "llama": spec["casting"] == "llama",
    }

    def run(views: Mapping[str, Any]) -> None:
        residual, s = views.get("residual"), views.get("s")
        rmsnorm_quant.forward(
            as_rows(views["x"]),
            views["weight"],
            None if residual is None else as_rows(residual),
            as_rows(views["q"]),
            as_line(views["scale"]),
            as_line(views["rowsum"]),
            None if s is None else as_rows(s),
            **options,
        )

    builder.call(run, f"{items_per_task(*size)} rows per task")


@lowers("rmsnorm_quant_int8", "raw")
def forward_raw(spec: Spec, builder: Builder) -> None:
    """Compute ``q``, ``scale``, ``rowsum`` and, with ``residual``, ``s = x + residual``."""
    arrays, has_residual = _arrays(spec)
    x, weight, residual, q, _, _, s = arrays
    rows, cols = x.shape
    if rows == 0:
        return
    vec = 16 // x.itemsize
    aligned = (
        alignment((x, residual, s), rows) == 16
        and weight.address % 16 == 0
        and alignment((q,), rows) % vec == 0
    )
    config = select_config(rows, cols, x.itemsize, aligned=aligned)
    strides = map(row_stride, (x, residual, q, s))
    numbers = float32(spec["eps"]), float32(1 / cols), float32(spec["weight_offset"])
    flags = np.int32(spec["casting"] == "llama"), has_residual
    args = (*arrays, np.int64(rows), np.int32(cols), *strides, *numbers, *flags)
    block = (config.threads_per_row, config.rows_per_block, 1)
    builder.launch(_kernel(config, x.dtype.name), (*config.grid, 1), block, args)


@lowers("rmsnorm_quant_int8", "numba")
def forward_numba(spec: Spec, builder: Builder) -> None:
    """Launch the Numba twin, a block per row."""
    arrays, has_residual = _arrays(spec)
    x = arrays[0]
    if len(x) == 0:
        return
    numbers = np.float64(spec["eps"]), np.float64(spec["weight_offset"])
    args = (*arrays, *numbers, np.int32(spec["casting"] == "llama"), has_residual)
    builder.launch(_twin(x.dtype.name), (min(len(x), MAX_GRID[0]), 1, 1), (_TWIN_THREADS, 1, 1), args)


def _arrays(spec: Spec) -> tuple[tuple[Tensor, ...], np.int32]:
    """Arrays of the kernels, and whether there is a residual; without, x stands in for it and for the sum."""
    x, weight = rows_of(spec, "x"), spec.tensor("weight")
    q, scale, rowsum = rows_of(spec, "q"), spec.tensor("scale").ravel(), spec.tensor("rowsum").ravel()
    has_residual = spec.get("residual") is not None
    residual, s = (rows_of(spec, name) if has_residual else x for name in ("residual", "s"))
    return (x, weight, residual, q, scale, rowsum, s), np.int32(has_residual)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` launches, with the threads of its longest rows."""
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
    return CudaKernel("norm/rmsnorm_quant", "rmsnorm_quant_int8", tuple(defines.items()))


def _twin(dtype: str) -> NumbaKernel:
    from gpu_ops.kernels.norm.numba_cuda import rmsnorm_quant as twins

    return twins.kernel(dtype)
