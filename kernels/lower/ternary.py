"""Ternary matmul on the GPU: host functions of ``cuda/ternary_*.cu`` and of the twins in ``numba_cuda/ternary.py``.

x (tokens, K) and y (tokens, N) have unit stride on the last axis; codes (N, bytes) are w2, scale (1 or N, groups)
float32, both contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, alignment, row_stride
from gpu_ops.kernels.lower.ternary_config import (
    GEMV_SHARED,
    UNIT,
    GemmConfig,
    GemvConfig,
    gemm_config,
    gemm_configs,
    gemv_config,
    gemv_configs,
)

__all__ = ["TOKENS_THREADS", "is_whole", "matmul", "scale_stride", "tokens_kernel", "variants"]


def matmul(
    device: Any, backend: str, x: Any, codes: Any, k: int, scale: Any, y: Any, *, activations: str
) -> None:
    """``y = x @ (scale * trits).T``; y is left alone where an axis is empty."""
    tokens, n = y.shape
    if 0 in (tokens, n, k):
        return
    if backend == "numba":
        _twin(device, x, codes, k, scale, y, activations)
        return
    if activations == "int8":
        gemv = gemv_config(tokens, n, k, scale.shape[1], sms=device.sms)
        if gemv is not None:
            _gemv(device, gemv, x, codes, k, scale, y)
            return
        rows, sums, inverse = _quantized(device, x, k, scale.shape[1] > 1)
    else:
        rows, sums, inverse = _padded(device, x, k), scale, scale  # stand-ins: the kernel touches neither
    _gemm(device, rows, sums, inverse, codes, scale, y)


def _twin(device: Any, x: Any, codes: Any, k: int, scale: Any, y: Any, activations: str) -> None:
    from gpu_ops.kernels.numba_cuda import ternary as twins

    (tokens, n), dtype = y.shape, x.dtype.name
    inverse = device.empty((tokens if activations == "int8" else 1,), np.float64)
    if activations == "int8":
        q = device.empty((tokens, k), np.int8)
        threads = (twins.QUANTIZE_THREADS, 1, 1)
        device.launch(twins.quantize_kernel(dtype), (tokens, 1, 1), threads, (x, q, inverse))
        x = q
    # One group takes in the padding: it ends with the last word.
    group = k // scale.shape[1] if scale.shape[1] > 1 else codes.shape[1] * 4
    grid = (-(-n // twins.TILE), min(-(-tokens // twins.TILE), 65535), 1)
    args = (x, inverse, codes.view(np.uint32), scale, y, np.int64(group))
    device.launch(twins.matmul_kernel(dtype, activations), grid, (twins.TILE, twins.TILE, 1), args)


def _gemv(device: Any, config: GemvConfig, x: Any, codes: Any, k: int, scale: Any, y: Any) -> None:
    tokens, n = y.shape
    groups = scale.shape[1]
    args = (
        x,
        codes,
        scale,
        y,
        row_stride(x),
        scale_stride(scale),
        row_stride(y),
        np.int32(codes.shape[1]),
        np.int32(tokens),
        np.int32(n),
        np.int32(k),
        np.int32(k // groups // UNIT),
        np.int32(is_whole(x)),
        np.int32(config.shares),
    )
    kernel = _gemv_kernel(x.dtype.name, config.tokens, config.rows, config.shares > 1, groups > 1)
    device.launch(kernel, (config.grid, 1, 1), (config.threads, 1, 1), args, shared=config.shared_bytes)


def _quantized(device: Any, x: Any, k: int, grouped: bool) -> tuple[Any, Any, Any]:
    """x as int8, zero up to whole units; its sums per token, or per token and unit; 1 / s per token."""
    tokens, units = x.shape[0], -(-k // UNIT)
    q = device.empty((tokens, units * UNIT), np.int8)
    sums = device.empty((tokens, units) if grouped else (tokens,), np.int32)
    inverse = device.empty((tokens,), np.float64)
    sizes = (row_stride(x), np.int32(k), np.int32(units * UNIT), np.int32(is_whole(x)))
    args = (x, q, inverse, sums, *sizes)
    kernel = tokens_kernel("ternary_quantize_tokens", x.dtype.name, grouped)
    device.launch(kernel, (tokens, 1, 1), (TOKENS_THREADS, 1, 1), args)
    return q, sums, inverse


def _padded(device: Any, x: Any, k: int) -> Any:
    """x where its rows are whole units and aligned, else such a copy."""
    if k % UNIT == 0 and is_whole(x):
        return x
    tokens, width = x.shape[0], -(-k // UNIT) * UNIT
    copy = device.empty((tokens, width), x.dtype)
    args = (x, copy, row_stride(x), np.int32(k), np.int32(width))
    device.launch(
        tokens_kernel("ternary_pad_tokens", x.dtype.name, False),
        (tokens, 1, 1),
        (TOKENS_THREADS, 1, 1),
        args,
    )
    return copy


def _gemm(device: Any, rows: Any, sums: Any, inverse: Any, codes: Any, scale: Any, y: Any) -> None:
    tokens, n = y.shape
    itemsize, grouped = rows.dtype.itemsize, scale.shape[1] > 1
    units = codes.shape[1] * 4 // UNIT
    smem = device.smem_per_block_optin
    config, splits = gemm_config(
        tokens, n, units * UNIT, itemsize, grouped=grouped, sms=device.sms, smem_per_block_optin=smem
    )
    shape = np.zeros((), _SHAPE)
    shape["x_stride"], shape["row_bytes"] = row_stride(rows), codes.shape[1]
    shape["scale_stride"], shape["y_stride"] = scale_stride(scale), row_stride(y)
    shape["tokens"], shape["n"], shape["units"], shape["splits"] = tokens, n, units, splits
    shape["group_units"] = units // scale.shape[1]
    shape["aligned"] = n % 4 == 0 and alignment([y], tokens) % (4 * y.dtype.itemsize) == 0
    kernel = _gemm_kernel(rows.dtype.name, y.dtype.name, grouped, splits > 1, config)
    target = y
    if splits > 1:
        exact = itemsize == 1 and not grouped
        target = device.empty((splits, tokens, n), np.int32 if exact else np.float32, "parts of sums")
    args = (rows, codes, scale, sums, inverse, target, shape[()])
    grid = (config.blocks(tokens, n), splits, 1)
    device.launch(kernel, grid, (config.threads, 1, 1), args, shared=config.shared_bytes(itemsize))
    if splits > 1:
        kernel = replace(kernel, entry="ternary_gemm_sum")
        grid = (-(-tokens * -(-n // 4) // SUM_THREADS), 1, 1)
        device.launch(kernel, grid, (SUM_THREADS, 1, 1), (target, scale, sums, inverse, y, shape[()]))


# TernaryShape of ternary_gemm.cu
_SHAPE = np.dtype(
    [(name, np.int64) for name in ("x_stride", "row_bytes", "scale_stride", "y_stride")]
    + [(name, np.int32) for name in ("tokens", "n", "units", "group_units", "aligned", "splits")]
)

TOKENS_THREADS = SUM_THREADS = 256


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``matmul`` launches."""
    smem = smem_per_block_optin(arch)
    for grouped, dtype in itertools.product((False, True), DTYPES):
        for tokens, rows, divided in gemv_configs():
            yield Variant(_gemv_kernel(dtype, tokens, rows, divided, grouped), 256, GEMV_SHARED)
        for entry in ("ternary_quantize_tokens", "ternary_pad_tokens", "ternary_round_tokens"):
            yield Variant(tokens_kernel(entry, dtype, grouped), TOKENS_THREADS)
        for act in ("int8", dtype):
            itemsize = 1 if act == "int8" else 4 if dtype == "float32" else 2
            for c in gemm_configs(itemsize, grouped=grouped, smem_per_block_optin=smem):
                for divided in (False, True):
                    kernel = _gemm_kernel(act, dtype, grouped, divided, c)
                    yield Variant(kernel, c.threads, c.shared_bytes(itemsize))
                yield Variant(replace(kernel, entry="ternary_gemm_sum"), SUM_THREADS)


def _gemv_kernel(dtype: str, tokens: int, rows: int, divided: bool, grouped: bool) -> CudaKernel:
    defines: dict[str, str | int] = {"DTYPE": DTYPES[dtype], "TOKENS": tokens, "ROWS": rows}
    defines |= {"DIVIDED": int(divided), "GROUPED": int(grouped)}
    return CudaKernel("ternary_gemv", "ternary_gemv", tuple(defines.items()))


def tokens_kernel(entry: str, dtype: str, grouped: bool) -> CudaKernel:
    return CudaKernel("ternary_tokens", entry, (("DTYPE", DTYPES[dtype]), ("GROUPED", int(grouped))))


def _gemm_kernel(act: str, out: str, grouped: bool, divided: bool, config: GemmConfig) -> CudaKernel:
    defines: dict[str, str | int] = {"ACT": "q8" if act == "int8" else DTYPES[act], "OUT": DTYPES[out]}
    defines |= {"GROUPED": int(grouped), "DIVIDED": int(divided)}
    defines |= {name.upper(): size for name, size in vars(config).items()}
    return CudaKernel("ternary_gemm", "ternary_gemm", tuple(defines.items()))


def is_whole(x: Any) -> bool:
    """Whether rows of x are whole vectors of 16 bytes, aligned."""
    return alignment([x], x.shape[0]) == 16 and x.shape[1] * x.dtype.itemsize % 16 == 0


def scale_stride(scale: Any) -> np.int64:
    return np.int64(0 if scale.shape[0] == 1 else scale.shape[1])
