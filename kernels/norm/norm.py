"""RMSNorm and LayerNorm on the GPU: choice of kernel, arguments, launch.

Arrays are (rows, cols) with unit stride on the last axis; weight and bias (cols,), mean and rstd (rows,) are
contiguous. The CUDA C++ kernels are ``norm.cu``, ``backward.cu`` and ``dweight.cu``, their readable twins
``numba_cuda/norm.py``; the two ops call ``rmsnorm.py`` and ``layernorm.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, alignment, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.norm.config import BackwardConfig, RowConfig, select_backward, select_forward
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor

__all__ = [
    "Norm",
    "backward_numba",
    "backward_raw",
    "forward_numba",
    "forward_raw",
    "variants",
    "without_rows",
]

Norm = Literal["rmsnorm", "layernorm"]

_SUMS: dict[Norm, int] = {"rmsnorm": 1, "layernorm": 2}  # over columns, and over rows: dweight, dbias
_TWIN_THREADS = 256
_DWEIGHT = CudaKernel("norm/dweight", "norm_dweight")


def forward_raw(spec: Spec, builder: Builder, norm: Norm) -> None:
    """Launch the forward kernel: ``y``, ``rstd``, in LayerNorm ``mean``, and ``s``, the sum of x and residual."""
    a = _Forward.of(spec)
    rows, cols = a.x.shape
    if rows == 0:
        return
    c = select_forward(
        rows, cols, a.x.itemsize, **_limits(builder, (a.weight, a.bias), (a.x, a.residual, a.y, a.s))
    )
    exchange = _exchange(builder, c, norm) if c.team else a.rstd  # else a stand-in
    args = (
        *a.arrays,
        exchange,
        np.int64(rows),
        *map(np.int32, (cols, c.shared_vecs, c.team, c.block_cols)),
        *map(row_stride, (a.x, a.residual, a.y, a.s)),
        float32(spec["eps"]),
        *map(float32, (1 / cols, 1 / c.on_chip(cols), a.weight_offset)),
        *(np.int32(a.llama), *a.present),
    )
    block = (c.threads_per_row, c.rows_per_block, 1)
    builder.launch(_forward(norm, c, a.x.dtype.name), (c.grid, 1, 1), block, args, shared=c.shared_bytes)


def forward_numba(spec: Spec, builder: Builder, norm: Norm) -> None:
    """Launch the Numba twin of the forward pass, a block per row."""
    a = _Forward.of(spec)
    rows = a.x.shape[0]
    if rows == 0:
        return
    has_bias, has_residual, _ = a.present
    numbers = (np.float64(spec["eps"]), np.float64(a.weight_offset), np.int32(a.llama))
    args = (*a.arrays, *numbers, has_bias, has_residual)
    kernel = _twin(norm, "forward", a.x.dtype.name)
    builder.launch(kernel, (min(rows, MAX_GRID[0]), 1, 1), (_TWIN_THREADS, 1, 1), args)


@dataclass(frozen=True)
class _Forward:
    """Arrays of the forward kernels. Absent arrays get another's pointer, which the kernels do not read; without
    ``s``, ``y`` holds the sum of x and residual in between."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    y: Tensor
    s: Tensor
    mean: Tensor
    rstd: Tensor
    present: tuple[np.int32, np.int32, np.int32]  # bias, residual, s
    weight_offset: float
    llama: bool

    @classmethod
    def of(cls, spec: Spec) -> _Forward:
        x, weight, y = rows_of(spec, "x"), spec.tensor("weight"), rows_of(spec, "y")
        rstd = spec.tensor("rstd").ravel()
        bias, residual, s, mean = spec.get("bias"), spec.get("residual"), spec.get("s"), spec.get("mean")
        has_bias, has_residual, has_sum = (np.int32(a is not None) for a in (bias, residual, s))
        return cls(
            x,
            weight,
            weight if bias is None else bias,
            x if residual is None else rows_of(spec, "residual"),
            y,
            y if s is None else rows_of(spec, "s"),
            rstd if mean is None else mean.ravel(),
            rstd,
            (has_bias, has_residual, has_sum),
            *_rmsnorm_options(spec),
        )

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.x, self.weight, self.bias, self.residual, self.y, self.s, self.mean, self.rstd)


def backward_raw(spec: Spec, builder: Builder, norm: Norm) -> None:
    """Launch the backward kernels: ``dx``, then sums of ``dweight`` and ``dbias`` by block and in a fixed order."""
    if without_rows(spec, builder):
        return
    a = _Backward.of(spec)
    rows, cols = a.x.shape
    c = select_backward(
        rows, cols, a.x.itemsize, sums=_SUMS[norm],
        **_limits(builder, (a.weight,), (a.x, a.dy, a.dresidual, a.dx)),
    )  # fmt: skip
    partial = builder.empty((_SUMS[norm], c.parts, cols), np.float32, "partial")
    exchange = _exchange(builder, c, norm) if c.team else partial  # else a stand-in
    args = (
        *(*a.arrays, partial, exchange),
        *(np.int64(rows), np.int32(cols), np.int32(c.parts), np.int32(c.team), np.int32(c.block_cols)),
        *map(row_stride, (a.dy, a.x, a.dresidual, a.dx)),
        *(float32(1 / cols), float32(a.weight_offset), np.int32(a.llama), a.has_dresidual),
    )
    block = (c.threads_per_row, c.rows_per_block, 1)
    builder.launch(_backward(norm, c, a.x.dtype.name), (c.grid, 1, 1), block, args, shared=c.shared_bytes)
    dweight, dbias = spec.tensor("dweight"), spec.get("dbias")
    add = [np.int32(name in spec["added"]) for name in ("dweight", "dbias")]
    totals = (partial, dweight, dweight if dbias is None else dbias, np.int32(c.parts), np.int32(cols), *add)
    builder.launch(_DWEIGHT, (-(-cols // 32), _SUMS[norm], 1), (32, 32, 1), totals)


def backward_numba(spec: Spec, builder: Builder, norm: Norm) -> None:
    """Launch the Numba twins of the backward pass."""
    if without_rows(spec, builder):
        return
    a = _Backward.of(spec)
    rows, cols = a.x.shape
    grid = min(rows, 2 * builder.sms)
    partials = [builder.empty((grid, cols), np.float64, "partial") for _ in range(_SUMS[norm])]
    args = (
        *(*a.arrays, partials[0], partials[-1]),
        *(np.float64(a.weight_offset), np.int32(a.llama), a.has_dresidual),
    )
    builder.launch(_twin(norm, "backward", a.x.dtype.name), (grid, 1, 1), (_TWIN_THREADS, 1, 1), args)
    for partial, name in zip(partials, ("dweight", "dbias"), strict=False):
        reduce, add = _twin(norm, "dweight", a.x.dtype.name), np.int32(name in spec["added"])
        args = (partial, spec.tensor(name), add)
        builder.launch(reduce, (-(-cols // _TWIN_THREADS), 1, 1), (_TWIN_THREADS, 1, 1), args)


@dataclass(frozen=True)
class _Backward:
    """Arrays of the backward kernels; stand-ins for absent ones, as in the forward."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    mean: Tensor
    rstd: Tensor
    dresidual: Tensor
    dx: Tensor
    has_dresidual: np.int32
    weight_offset: float
    llama: bool

    @classmethod
    def of(cls, spec: Spec) -> _Backward:
        dy, rstd, mean = rows_of(spec, "dy"), spec.tensor("rstd"), spec.get("mean")
        has_dresidual = spec.get("dresidual") is not None
        return cls(
            dy,
            rows_of(spec, "x"),
            spec.tensor("weight"),
            (rstd if mean is None else mean).ravel(),
            rstd.ravel(),
            rows_of(spec, "dresidual") if has_dresidual else dy,
            rows_of(spec, "dx"),
            np.int32(has_dresidual),
            *_rmsnorm_options(spec),
        )

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.dy, self.x, self.weight, self.mean, self.rstd, self.dresidual, self.dx)


def _rmsnorm_options(spec: Spec) -> tuple[float, bool]:
    """weight_offset, and whether products round twice; LayerNorm has neither."""
    options = dict(spec.options)
    return options.get("weight_offset", 0.0), options.get("casting") == "llama"


def without_rows(spec: Spec, builder: Builder) -> bool:
    """Whether there are no rows. Then sums are zero, and sums that are added to stay unchanged."""
    if spec.tensor("x").size:
        return False
    for name in ("dweight", "dbias"):
        if spec.get(name) is not None and name not in spec["added"]:
            builder.zero(spec.tensor(name))
    return True


# Columns that exercise every way to keep a row, by vectors of 16 bytes or, if odd, of one element.
_SIZES = (1024, 2048, 4096, 5120, 16384, 2**17, 2**24, 255, 511, 1023, 4095, 16383, 2**17 + 1, 2**24 + 1)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` and ``backward`` launch, with the threads of its longest rows."""
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
    return _kernel("norm/norm", "forward", norm, c, dtype)


def _backward(norm: Norm, c: BackwardConfig, dtype: str) -> CudaKernel:
    return _kernel("norm/backward", "backward", norm, c, dtype)


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


def _exchange(builder: Builder, c: RowConfig | BackwardConfig, norm: Norm) -> Tensor:
    """Workspace through which a team's blocks exchange their sums over a row."""
    return builder.zeros((c.grid // c.team, 2, c.team, _SUMS[norm]), np.uint64, "exchange")


def _twin(norm: Norm, which: str, dtype: str) -> NumbaKernel:
    """Numba kernel of this name, for this dtype."""
    from gpu_ops.kernels.norm.numba_cuda import norm as twins

    return twins.kernel(norm, which, dtype)


def _limits(builder: Builder, vectors: tuple[Tensor, ...], matrices: tuple[Tensor, ...]) -> dict[str, int]:
    """Values that a choice depends on in addition to the shape."""
    rows = matrices[0].shape[0]
    return {
        "alignment": math.gcd(alignment(vectors, 1), alignment(matrices, rows)),
        "sms": builder.sms,
        "smem_per_block_optin": builder.smem_per_block_optin,
    }
