"""Launch of dropout on each backend, forward and backward alike: vector width, element numbering.

Arrays are (rows, cols) with unit stride on the last axis; contiguous rows become one long row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common import arguments
from gpu_ops.kernels.common.arguments import DTYPES, as_rows, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm.swiglu import select_config
from gpu_ops.kernels.program import MAX_GRID, Builder, Dynamic, Spec, Tensor, lowers

__all__ = ["variants"]

_THREADS = 128  # of a block, as select_config has it
_TWIN_THREADS = 256
_STEPS = 1 << 32  # values of an element's bits
_U64 = np.dtype(np.uint64)


def _dropped(p: float) -> np.uint32:
    """Number of values of an element's bits that drop it, from 0 on."""
    return np.uint32(min(round(p * _STEPS), _STEPS - 1))


def _names(spec: Spec) -> tuple[str, str]:
    return ("x", "y") if spec.get("x") is not None else ("dy", "dx")


@lowers("dropout", "cpu")
@lowers("dropout_backward", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import dropout

    x, y = _names(spec)
    if spec["p"] == 0:  # subnormal numbers of bfloat16 too, which vector code rounds to 0
        builder.call(lambda views: np.copyto(views[y], views[x]), "a copy")
        return
    dropped, factor = _dropped(spec["p"]), 1 / (1 - spec["p"])

    def run(views: Mapping[str, Any]) -> None:
        (seed,) = arguments.seed_on_host(views["seed"])
        first = np.uint64(views["offset"])
        dropout.dropout(
            as_rows(views[x]), as_rows(views[y]), seed=seed, offset=first, dropped=dropped, factor=factor
        )

    builder.call(run, dropout.config(*rows_of(spec, x).shape))


@lowers("dropout", "raw")
@lowers("dropout_backward", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    x, y = _arrays(spec)
    if not x.size:
        return
    (rows, cols), seed = x.shape, arguments.seed_argument(spec.get("seed"))
    # if vectors cannot be accessed whole, elements are accessed one by one: four of them take one draw
    config = select_config(rows, cols, x.itemsize, alignment=16)
    access = config.vec if arguments.alignment((x, y), rows) == 16 else 1
    seeds = (np.uint64(0), seed) if isinstance(seed, Dynamic) else (seed, np.uint64(0))
    numbers = (*seeds, Dynamic("offset", _U64), _dropped(spec["p"]), float32(1 / (1 - spec["p"])))
    args = (x, y, *numbers, np.int64(rows), np.int64(cols), row_stride(x), row_stride(y))
    block = (config.threads_per_row, config.rows_per_block, 1)
    builder.launch(_kernel(x.dtype.name, access), config.grid, block, args)


@lowers("dropout", "numba")
@lowers("dropout_backward", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import dropout as twins

    x, y = _arrays(spec)
    if not x.size:
        return
    (rows, cols), seed = x.shape, arguments.seed_argument(spec.get("seed"))
    kernel = twins.kernel(x.dtype.name, "number" if isinstance(seed, Dynamic) else "array")
    groups = (cols - 1) // 4 + 2  # of a row that begins anywhere in a group
    args = (x, y, seed, Dynamic("offset", _U64), _dropped(spec["p"]), np.float64(1 / (1 - spec["p"])))
    grid = (-(-groups // _TWIN_THREADS), min(rows, MAX_GRID[1]), 1)
    builder.launch(kernel, grid, (_TWIN_THREADS, 1, 1), args)


def _arrays(spec: Spec) -> tuple[Tensor, ...]:
    """Inputs and outputs as rows."""
    arrays = tuple(rows_of(spec, name) for name in _names(spec))
    return tuple(a.reshape(1, a.size) for a in arrays) if arguments.side_by_side(arrays) else arrays


def _kernel(dtype: str, access: int) -> CudaKernel:
    return CudaKernel("rows/dropout", "dropout", (("DTYPE", DTYPES[dtype]), ("ACCESS", access)))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    for dtype, aligned in itertools.product(DTYPES, (True, False)):
        yield Variant(_kernel(dtype, (4 if dtype == "float32" else 8) if aligned else 1), _THREADS)
