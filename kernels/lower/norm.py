"""RMSNorm and LayerNorm on the GPU: which kernel, its arguments, the launch.

Arrays are (rows, cols) with unit stride on the last axis; weight and bias (cols,), mean and rstd (rows,) are
contiguous. The CUDA C++ kernels are ``cuda/norm*.cu``, their readable twins ``numba_cuda/norm.py``; the two ops
call ``rmsnorm.py`` and ``layernorm.py`` beside this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, alignment, epsilon, float32, row_stride
from gpu_ops.kernels.lower.norm_config import BackwardConfig, RowConfig, select_backward, select_forward

__all__ = ["Norm", "backward", "forward", "variants"]

Norm = Literal["rmsnorm", "layernorm"]

_SUMS: dict[Norm, int] = {"rmsnorm": 1, "layernorm": 2}  # over columns, and over rows: dweight, dbias
_TWIN_THREADS = 256
_DWEIGHT = CudaKernel("norm_dweight", "norm_dweight")


def forward(
    device: Any,
    backend: str,
    norm: Norm,
    x: Any,
    weight: Any,
    bias: Any | None,
    residual: Any | None,
    y: Any,
    s: Any | None,
    mean: Any | None,
    rstd: Any,
    *,
    eps: float,
    weight_offset: float = 0.0,
    llama: bool = False,
) -> None:
    """Fills ``y``, ``rstd``, in LayerNorm ``mean``, with ``residual`` ``s = x + residual`` if it is to be kept.

    ``y`` may be ``x``.
    """
    rows, cols = x.shape
    if rows == 0:
        return
    has_bias, has_residual, has_sum = (np.int32(a is not None) for a in (bias, residual, s))
    # Stand-ins for what is not there: nobody touches them, but that a sum which nobody keeps lies in y meanwhile.
    bias = weight if bias is None else bias
    residual, s = (x if residual is None else residual), (y if s is None else s)
    arrays = (x, weight, bias, residual, y, s, rstd if mean is None else mean, rstd)
    if backend == "numba":
        kernel = _twin(norm, "forward", x.dtype.name)
        args = (*arrays, np.float64(eps), np.float64(weight_offset), np.int32(llama), has_bias, has_residual)
        device.launch(kernel, (min(rows, 2**31 - 1), 1, 1), (_TWIN_THREADS, 1, 1), args)
        return
    c = select_forward(rows, cols, x.dtype.itemsize, **_limits(device, (weight, bias), (x, residual, y, s)))
    exchange = _exchange(device, c, norm) if c.team else rstd  # else a stand-in
    sizes = (np.int64(rows), *map(np.int32, (cols, c.shared_vecs, c.team, c.block_cols)))
    numbers = (1 / cols, 1 / c.on_chip(cols), weight_offset)
    args = (
        *arrays,
        exchange,
        *sizes,
        *map(row_stride, (x, residual, y, s)),
        epsilon(eps),
        *map(float32, numbers),
        *(np.int32(llama), has_bias, has_residual, has_sum),
    )
    block = (c.threads_per_row, c.rows_per_block, 1)
    device.launch(_forward(norm, c, x.dtype.name), (c.grid, 1, 1), block, args, shared=c.shared_bytes)


def backward(
    device: Any,
    backend: str,
    norm: Norm,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any | None,
    rstd: Any,
    dresidual: Any | None,
    dx: Any,
    dweight: Any,
    dbias: Any | None,
    *,
    weight_offset: float = 0.0,
    llama: bool = False,
) -> None:
    """Fills ``dx``, which may be ``dy``, ``dweight`` and, in LayerNorm, ``dbias``.

    With no rows nothing runs, and the caller fills them.
    """
    rows, cols = x.shape
    if rows == 0:
        return
    has_dresidual = np.int32(dresidual is not None)
    dresidual = dy if dresidual is None else dresidual  # a stand-in, as below
    mean = rstd if mean is None else mean
    if backend == "numba":
        grid = min(rows, 2 * device.sms)
        partials = [device.empty((grid, cols), np.float64) for _ in range(_SUMS[norm])]
        twin = _twin(norm, "backward", x.dtype.name)
        arrays = (dy, x, weight, mean, rstd, dresidual, dx, partials[0], partials[-1])
        args = (*arrays, np.float64(weight_offset), np.int32(llama), has_dresidual)
        device.launch(twin, (grid, 1, 1), (_TWIN_THREADS, 1, 1), args)
        for partial, total in zip(partials, (dweight, dbias), strict=False):
            reduce = _twin(norm, "dweight", x.dtype.name)
            device.launch(reduce, (-(-cols // _TWIN_THREADS), 1, 1), (_TWIN_THREADS, 1, 1), (partial, total))
        return
    c = select_backward(
        rows, cols, x.dtype.itemsize, sums=_SUMS[norm], **_limits(device, (weight,), (x, dy, dresidual, dx))
    )
    partial = device.empty((_SUMS[norm], c.parts, cols), np.float32)
    exchange = _exchange(device, c, norm) if c.team else partial  # another stand-in
    args = (
        *(dy, x, weight, mean, rstd, dresidual, dx, partial, exchange),
        *(np.int64(rows), np.int32(cols), np.int32(c.parts), np.int32(c.team), np.int32(c.block_cols)),
        *map(row_stride, (dy, x, dresidual, dx)),
        *(float32(1 / cols), float32(weight_offset), np.int32(llama), has_dresidual),
    )
    block = (c.threads_per_row, c.rows_per_block, 1)
    device.launch(_backward(norm, c, x.dtype.name), (c.grid, 1, 1), block, args, shared=c.shared_bytes)
    totals = (partial, dweight, dweight if dbias is None else dbias, np.int32(c.parts), np.int32(cols))
    device.launch(_DWEIGHT, (-(-cols // 32), _SUMS[norm], 1), (32, 32, 1), totals)


# Columns that need every way to keep a row, by vectors of 16 bytes and, the odd ones, of one element.
_SIZES = (1024, 2048, 4096, 5120, 16384, 2**17, 2**24, 255, 511, 1023, 4095, 16383, 2**17 + 1, 2**24 + 1)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` and ``backward`` launch, with the threads of a long row in its reach."""
    limits: dict[str, int] = {"sms": 16, "smem_per_block_optin": smem_per_block_optin(arch)}
    seen = set()
    for norm, (dtype, itemsize) in itertools.product(
        _SUMS, (("float16", 2), ("bfloat16", 2), ("float32", 4))
    ):
        for cols, aligned in itertools.product(_SIZES, (16, itemsize)):
            f = select_forward(1, cols, itemsize, alignment=aligned, **limits)
            b = select_backward(1, cols, itemsize, sums=_SUMS[norm], alignment=aligned, **limits)
            for variant in (
                Variant(_forward(norm, f, dtype), f.threads, f.shared_bytes),
                Variant(_backward(norm, b, dtype), b.threads, b.shared_bytes),
            ):
                if variant.kernel not in seen:
                    seen.add(variant.kernel)
                    yield variant
    yield Variant(_DWEIGHT, 1024)


def _forward(norm: Norm, c: RowConfig, dtype: str) -> CudaKernel:
    return _kernel("norm", "forward", norm, c, dtype)


def _backward(norm: Norm, c: BackwardConfig, dtype: str) -> CudaKernel:
    return _kernel("norm_backward", "backward", norm, c, dtype)


def _kernel(stem: str, step: str, norm: Norm, c: RowConfig | BackwardConfig, dtype: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "NORM": norm,
        "DTYPE": DTYPES[dtype],
        "VEC": c.vec,
        "ACCESS": c.access,
        "VECS": c.vecs,
        "TEAM": int(c.team > 0),
    }
    return CudaKernel(stem, f"{norm}_{step}", tuple(defines.items()), cooperative=c.team > 0)


def _exchange(device: Any, c: RowConfig | BackwardConfig, norm: Norm) -> Any:
    """Where a team's blocks leave each other their sums over a row."""
    return device.zeros((c.grid // c.team, 2, c.team, _SUMS[norm]), np.uint64, "exchange")


def _twin(norm: Norm, which: str, dtype: str) -> NumbaKernel:
    """The Numba kernel of this name, in this dtype."""
    from gpu_ops.kernels.numba_cuda import norm as twins

    return twins.kernel(norm, which, dtype)


def _limits(device: Any, vectors: tuple[Any, ...], matrices: tuple[Any, ...]) -> dict[str, int]:
    """What a choice depends on beside the shape."""
    rows = matrices[0].shape[0]
    return {
        "alignment": math.gcd(alignment(vectors, 1), alignment(matrices, rows)),
        "sms": device.sms,
        "smem_per_block_optin": device.smem_per_block_optin,
    }
