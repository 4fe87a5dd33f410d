"""Ternary x ternary on the GPU: ``ternary_planes.cu``, its twin ``numba_cuda/ternary_planes.py``.

Codes (rows, bytes) are w2, scales (1 or rows, 1) float32, both contiguous; y (m, n) float32 has unit stride on the
last axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import row_stride
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Layout, Spec, Tensor, lowers

__all__ = ["variants"]

_ROWS = (1, 4)  # of x that a warp multiplies by a row of w
_THREADS = 256
_FACTORS = ("x.codes", "x.scale", "w.codes", "w.scale")


@dataclass(frozen=True)
class _Product:
    """``y = (x_scale * x) @ (w_scale * w).T``. ``starts`` and ``chunks``: the chunks of w to visit; None: all."""

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor
    y: Tensor
    occupied: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, spec: Spec, builder: Builder) -> _Product | None:
        """Product of a spec; None if an axis is empty: then y is zeros, if it has elements."""
        y = spec.tensor("y")
        if 0 in (*y.shape, spec["k"]):
            builder.zero(y)
            return None
        options = dict(spec.options)
        occupied = None
        if "chunks" in options:
            starts, chunks = ((options[name],) for name in ("starts", "chunks"))
            occupied = (
                Tensor.of("w.starts", Layout.contiguous(starts, np.int64)),
                Tensor.of("w.chunks", Layout.contiguous(chunks, np.int32)),
            )
        if "share" in options:
            builder.note(options["share"])
        x, x_scale, w, w_scale = map(spec.tensor, _FACTORS)
        return cls(x, x_scale, w, w_scale, y, occupied)

    def lists(self, builder: Builder) -> tuple[Tensor, Tensor]:
        """``starts`` and ``chunks``, or stand-ins that no kernel reads."""
        return self.occupied or (
            builder.empty((1,), np.int64, "no starts"),
            builder.empty((1,), np.int32, "no chunks"),
        )


@lowers("ternary_product", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import ternary_planes

    options = dict(spec.options)
    k, skips = spec["k"], "chunks" in options

    def run(views: Mapping[str, Any]) -> None:
        x, x_scale, w, w_scale = (views[name] for name in _FACTORS)
        occupied = (views["w.starts"], views["w.chunks"]) if skips else None
        ternary_planes.matmul(x, x_scale, w, w_scale, k, occupied, views["y"])

    builder.call(run, ternary_planes.config(skips))
    if "share" in options:
        builder.note(options["share"])


@lowers("ternary_product", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    p = _Product.of(spec, builder)
    if p is None:
        return
    m, n = p.y.shape
    rows = _ROWS[0] if m == 1 else _ROWS[1]
    whole = p.x_scale.shape[0] > 1, p.w_scale.shape[0] > 1
    sizes = (row_stride(p.y), *map(np.int32, (p.x.shape[1], m, n, *whole)))
    grid = (-(-n // (_THREADS // 32)) * -(-m // rows), 1, 1)
    args = (p.x, p.x_scale, p.w, p.w_scale, *p.lists(builder), p.y, *sizes)
    builder.launch(_kernel(rows, p.occupied is not None), grid, (_THREADS, 1, 1), args)


@lowers("ternary_product", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.numba_cuda import ternary_planes as twins

    p = _Product.of(spec, builder)
    if p is None:
        return
    m, n = p.y.shape
    grid = (-(-n // twins.TILE), min(-(-m // twins.TILE), MAX_GRID[1]), 1)
    words = (p.x.view(np.uint64), p.x_scale, p.w.view(np.uint64), p.w_scale)
    kernel = twins.matmul_kernel(p.occupied is not None)
    builder.launch(kernel, grid, (twins.TILE, twins.TILE, 1), (*words, *p.lists(builder), p.y))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``matmul`` launches."""
    for rows in _ROWS:
        for skip in (False, True):
            yield Variant(_kernel(rows, skip), _THREADS)


def _kernel(rows: int, skip: bool) -> CudaKernel:
    return CudaKernel("weights/ternary_planes", "ternary_planes", (("ROWS", rows), ("SKIP", int(skip))))
