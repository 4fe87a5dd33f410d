"""Gradients of the ternary matmul on the GPU: host functions of ``cuda/ternary_backward.cu`` and of the Numba twin.

dx = dy @ W      ternary_backward: packed weights on tensor cores; the parts of N of a small result by gemm_sum
dw = dy^T @ xq   a matrix product (:mod:`.gemm`); for int8 activations ternary_round_tokens makes xq of x

dy (tokens, N), x and dx (tokens, K), dw (N, K) have unit stride on the last axis; codes (N, bytes) are w2, scale
(1 or N, groups) float32, both contiguous. No axis is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower import gemm
from gpu_ops.kernels.lower.arguments import DTYPES, row_stride
from gpu_ops.kernels.lower.gemm import Operand
from gpu_ops.kernels.lower.gemm_args import aligned
from gpu_ops.kernels.lower.ternary import TOKENS_THREADS, is_whole, scale_stride, tokens_kernel
from gpu_ops.kernels.lower.ternary_config import UNIT, BackwardTile, backward_config, backward_tiles

__all__ = ["backward", "variants"]


def backward(
    device: Any,
    backend: str,
    dy: Any,
    x: Any,
    codes: Any,
    scale: Any,
    dx: Any,
    dw: Any,
    *,
    activations: str,
    unit: float,
) -> None:
    """Fills dx and dw. ``unit``: a power of two, about the largest scale."""
    if backend == "numba":
        _twin_dx(device, dy, codes, scale, dx)
    else:
        _dx(device, dy, codes, scale, dx, unit)
    used = x if activations == "native" else _rounded(device, backend, x)
    gemm.product(device, backend, Operand(dy, True), Operand(used, True), dw)


def _dx(device: Any, dy: Any, codes: Any, scale: Any, dx: Any, unit: float) -> None:
    (tokens, k), n, itemsize = dx.shape, dy.shape[1], dy.dtype.itemsize
    tile, splits = backward_config(tokens, n, k, itemsize, sms=device.sms)
    target = dx if splits == 1 else device.empty((splits * tokens, k), np.float32, "parts of sums")
    shape = np.zeros((), _SHAPE)
    shape["dy_stride"], shape["dx_stride"], shape["split_dx"] = row_stride(dy), row_stride(target), tokens * k
    shape["row_bytes"], shape["scale_stride"] = codes.shape[1], scale_stride(scale)
    shape["tokens"], shape["n"], shape["k"] = tokens, n, k
    shape["group_units"] = -(-k // scale.shape[1] // UNIT)
    shape["aligned"], shape["unit"] = aligned([target]), unit
    kernel = _kernel(dy.dtype.name, target.dtype.name, scale.size > 1, aligned([dy]), tile)
    grid = (tile.blocks(tokens, k), splits, 1)
    args = (dy, codes, scale, target, shape[()])
    device.launch(kernel, grid, (tile.threads, 1, 1), args, shared=tile.shared_bytes(itemsize))
    if splits > 1:
        gemm.add_up(device, target.reshape(splits, tokens, k), dx)


def _twin_dx(device: Any, dy: Any, codes: Any, scale: Any, dx: Any) -> None:
    from gpu_ops.kernels.numba_cuda import ternary_backward as twin

    tokens, k = dx.shape
    grid = (-(-k // twin.TILE), min(-(-tokens // twin.TILE), 65535), 1)
    args = (dy, codes.view(np.uint32), scale, dx, np.int64(k // scale.shape[1]))
    device.launch(twin.kernel(dy.dtype.name), grid, (twin.TILE, twin.TILE, 1), args)


def _rounded(device: Any, backend: str, x: Any) -> Any:
    """x as the forward multiplied it: quantised to int8 and scaled back."""
    (tokens, k), dtype = x.shape, x.dtype.name
    rounded = device.empty((tokens, k), x.dtype, "x of int8")
    if backend == "numba":
        from gpu_ops.kernels.numba_cuda import ternary as twins

        inverse = device.empty((tokens,), np.float64)
        twin = twins.quantize_kernel(dtype, back=True)
        device.launch(twin, (tokens, 1, 1), (twins.QUANTIZE_THREADS, 1, 1), (x, rounded, inverse))
        return rounded
    args = (x, rounded, row_stride(x), np.int32(k), np.int32(is_whole(x)))
    kernel = tokens_kernel("ternary_round_tokens", dtype, False)
    device.launch(kernel, (tokens, 1, 1), (TOKENS_THREADS, 1, 1), args)
    return rounded


# BackwardShape of ternary_backward.cu
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
    return CudaKernel("ternary_backward", "ternary_backward", tuple(defines.items()))
