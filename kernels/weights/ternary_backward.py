"""Gradients of the ternary matmul on the GPU: ``ternary_backward.cu`` and its Numba twin.

dx = dy @ W      ternary_backward: packed weights on tensor cores; the parts of N of a small result by gemm_sum
dw = dy^T @ xq   a matrix product (:mod:`gpu_ops.kernels.gemm.gemm`); for int8 activations ternary_round_tokens
                 computes xq from x

dy (tokens, N), x and dx (tokens, K), dw (N, K) have unit stride on the last axis; codes (N, bytes) are w2, scale
(1 or N, groups) float32, both contiguous. No axis is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, as_rows, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm import gemm
from gpu_ops.kernels.gemm.args import Operand, aligned, product
from gpu_ops.kernels.gemm.sum import add_up
from gpu_ops.kernels.program import MAX_GRID, Builder, Dynamic, Spec, Tensor, lowers
from gpu_ops.kernels.weights.ternary import TOKENS_THREADS, is_whole, scale_stride, tokens_kernel
from gpu_ops.kernels.weights.ternary_config import UNIT, BackwardTile, backward_config, backward_tiles

__all__ = ["variants"]


@dataclass(frozen=True)
class _Gradients:
    """``dx = dy @ W`` and ``dw = dy.T @ xq``, or only one of them."""

    dy: Tensor
    x: Tensor
    codes: Tensor
    scale: Tensor
    dx: Tensor | None
    dw: Tensor | None

    @classmethod
    def of(cls, spec: Spec, builder: Builder) -> _Gradients | None:
        """Gradients of a spec; None if an axis is empty: then the results are zeros, if they have elements."""
        dx, dw = spec.get("dx"), spec.get("dw")
        dy, x = rows_of(spec, "dy"), rows_of(spec, "x")
        if 0 in (*x.shape, dy.shape[1]):
            for result in (dx, dw):
                if result is not None:
                    builder.zero(result)
            return None
        dx = None if dx is None else rows_of(spec, "dx")
        return cls(dy, x, spec.tensor("w.codes"), spec.tensor("w.scale"), dx, dw)


@lowers("ternary_matmul_backward", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import ternary_backward

    g = _Gradients.of(spec, builder)
    if g is None:
        return
    (tokens, n), k, activations = g.dy.shape, g.x.shape[1], spec["activations"]

    def run(views: Mapping[str, Any]) -> None:
        dy, x = as_rows(views["dy"]), as_rows(views["x"])
        dx = as_rows(views["dx"]) if "dx" in views else None
        codes, scale, dw = views["w.codes"], views["w.scale"], views.get("dw")
        ternary_backward.backward(dy, x, codes, scale, dx, dw, activations=activations)

    builder.call(run, ternary_backward.config(tokens, n, k, g.dy.dtype.name))


@lowers("ternary_matmul_backward", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    g = _Gradients.of(spec, builder)
    if g is None:
        return
    if g.dx is not None:
        _dx(builder, g.dy, g.codes, g.scale, g.dx)
    if g.dw is not None:
        used = g.x if spec["activations"] == "native" else _rounded(builder, g.x)
        gemm.launch_raw(builder, product(Operand(g.dy, True), Operand(used, True), g.dw))


@lowers("ternary_matmul_backward", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    g = _Gradients.of(spec, builder)
    if g is None:
        return
    if g.dx is not None:
        _twin_dx(builder, g.dy, g.codes, g.scale, g.dx)
    if g.dw is not None:
        used = g.x if spec["activations"] == "native" else _rounded_twin(builder, g.x)
        gemm.launch_numba(builder, product(Operand(g.dy, True), Operand(used, True), g.dw))


def _dx(builder: Builder, dy: Tensor, codes: Tensor, scale: Tensor, dx: Tensor) -> None:
    (tokens, k), n, itemsize = dx.shape, dy.shape[1], dy.dtype.itemsize
    tile, splits = backward_config(tokens, n, k, itemsize, sms=builder.sms)
    target = dx if splits == 1 else builder.empty((splits * tokens, k), np.float32, "parts of sums")
    shape = np.zeros((), _SHAPE)
    shape["dy_stride"], shape["dx_stride"], shape["split_dx"] = row_stride(dy), row_stride(target), tokens * k
    shape["row_bytes"], shape["scale_stride"] = codes.shape[1], scale_stride(scale)
    shape["tokens"], shape["n"], shape["k"] = tokens, n, k
    shape["group_units"] = -(-k // scale.shape[1] // UNIT)
    shape["aligned"], shape["unit"] = aligned([target]), 1.0
    # float16 weights are rounded in units of about the largest scale
    struct = Dynamic("unit", _SHAPE, shape[()]) if dy.dtype == np.float16 else shape[()]
    kernel = _kernel(dy.dtype.name, target.dtype.name, scale.size > 1, aligned([dy]), tile)
    grid = (tile.blocks(tokens, k), splits, 1)
    args = (dy, codes, scale, target, struct)
    builder.launch(kernel, grid, (tile.threads, 1, 1), args, shared=tile.shared_bytes(itemsize))
    if splits > 1:
        add_up(builder, target.reshape(splits, tokens, k), dx)


def _twin_dx(builder: Builder, dy: Tensor, codes: Tensor, scale: Tensor, dx: Tensor) -> None:
    from gpu_ops.kernels.weights.numba_cuda import ternary_backward as twin

    tokens, k = dx.shape
    grid = (-(-k // twin.TILE), min(-(-tokens // twin.TILE), MAX_GRID[1]), 1)
    args = (dy, codes.view(np.uint32), scale, dx, np.int64(k // scale.shape[1]))
    builder.launch(twin.kernel(dy.dtype.name), grid, (twin.TILE, twin.TILE, 1), args)


def _rounded(builder: Builder, x: Tensor) -> Tensor:
    """x as the forward pass multiplied it: quantised to int8 and scaled back."""
    tokens, k = x.shape
    rounded = builder.empty((tokens, k), x.dtype, "x of int8")
    args = (x, rounded, row_stride(x), np.int32(k), np.int32(is_whole(x)))
    kernel = tokens_kernel("ternary_round_tokens", x.dtype.name, False)
    builder.launch(kernel, (tokens, 1, 1), (TOKENS_THREADS, 1, 1), args)
    return rounded


def _rounded_twin(builder: Builder, x: Tensor) -> Tensor:
    from gpu_ops.kernels.weights.numba_cuda import ternary as twins

    tokens, k = x.shape
    rounded = builder.empty((tokens, k), x.dtype, "x of int8")
    inverse = builder.empty((tokens,), np.float64, "inverse scales of x")
    twin = twins.quantize_kernel(x.dtype.name, back=True)
    builder.launch(twin, (tokens, 1, 1), (twins.QUANTIZE_THREADS, 1, 1), (x, rounded, inverse))
    return rounded


_SHAPE = np.dtype(
    [(name, np.int64) for name in ("dy_stride", "row_bytes", "scale_stride", "dx_stride", "split_dx")]
    + [(name, np.int32) for name in ("tokens", "n", "k", "group_units", "aligned")]
    + [("unit", np.float32)]
)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel of the gradient of x: results of its dtype, and parts of sums."""
    for dtype, itemsize in (("float16", 2), ("bfloat16", 2), ("float32", 4)):
        for tile in backward_tiles(itemsize):
            for scaled in (False, True):
                for out in dict.fromkeys((dtype, "float32")):
                    kernel = _kernel(dtype, out, scaled, True, tile)
                    yield Variant(kernel, tile.threads, tile.shared_bytes(itemsize))
            kernel = _kernel(dtype, dtype, True, False, tile)
            yield Variant(kernel, tile.threads, tile.shared_bytes(itemsize))


def _kernel(dtype: str, out: str, scaled: bool, whole: bool, tile: BackwardTile) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype], "OUT": DTYPES[out], "SCALED": int(scaled), "ALIGNED": int(whole),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n(2 if dtype != "float32" else 4),
        "WARPS_M": tile.warps_m, "WARPS_K": tile.warps_k, "STAGES": tile.stages,
    }  # fmt: skip
    return CudaKernel("weights/ternary_backward", "ternary_backward", tuple(defines.items()))
