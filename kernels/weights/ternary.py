"""Launch of the ternary matmul on each backend. GPU kernels: ``ternary_*.cu``, twins ``numba_cuda/ternary.py``.

x (tokens, K) and y (tokens, N) have unit stride on the last axis; codes (N, bytes) are w2, scale (1 or N, groups)
float32, both contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, alignment, as_line, as_rows, row_stride, rows_of
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor, lowers
from gpu_ops.kernels.weights.ternary_config import (
    GEMV_SHARED,
    UNIT,
    GemmConfig,
    GemvConfig,
    gemm_config,
    gemm_configs,
    gemv_config,
    gemv_configs,
)

__all__ = ["TOKENS_THREADS", "is_whole", "scale_stride", "tokens_kernel", "variants"]


@dataclass(frozen=True)
class Product:
    """``y = x @ (scale * trits).T``: x (tokens, K), y (tokens, N), codes and scale of w."""

    x: Tensor
    codes: Tensor
    scale: Tensor
    y: Tensor
    k: int
    int8: bool
    x_scale: Tensor | None = None  # (tokens or 1), if x is int8 already

    @classmethod
    def of(cls, spec: Spec) -> Product:
        x_scale = spec.get("x_scale")
        return cls(
            rows_of(spec, "x"),
            spec.tensor("w.codes"),
            spec.tensor("w.scale"),
            rows_of(spec, "y"),
            spec["k"],
            spec["activations"] == "int8",
            None if x_scale is None else x_scale.ravel(),
        )

    def is_empty(self, builder: Builder) -> bool:
        """Whether an axis is empty: then y is zeros, if it has elements."""
        if 0 not in (*self.y.shape, self.k):
            return False
        builder.zero(self.y)
        return True


@lowers("ternary_matmul", "cpu")
def _cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import ternary

    p = Product.of(spec)
    (tokens, n), k, activations = p.y.shape, p.k, spec["activations"]

    def run(views: Mapping[str, Any]) -> None:
        x, y = as_rows(views["x"]), as_rows(views["y"])
        x_scale = None if p.x_scale is None else as_line(views["x_scale"])
        ternary.matmul(x, views["w.codes"], k, views["w.scale"], y, activations=activations, x_scale=x_scale)

    builder.call(run, ternary.config(tokens, n, p.scale.shape[1], p.x.dtype.name, activations))


@lowers("ternary_matmul", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    p = Product.of(spec)
    if p.is_empty(builder):
        return
    tokens, n = p.y.shape
    if p.int8:
        gemv = gemv_config(tokens, n, p.k, p.scale.shape[1], sms=builder.sms)
        if gemv is not None:
            _gemv(builder, gemv, p)
            return
        rows, sums, inverse = _quantized(builder, p.x, p.k, p.scale.shape[1] > 1, p.x_scale)
    else:
        # stand-ins: the kernel touches neither
        rows, sums, inverse = (
            _padded(builder, p.x, p.k),
            p.scale,
            p.scale,
        )
    _gemm(builder, rows, sums, inverse, p)


@lowers("ternary_matmul", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.numba_cuda import ternary as twins

    p = Product.of(spec)
    if p.is_empty(builder):
        return
    (tokens, n), dtype, x, inverse = p.y.shape, p.y.dtype.name, p.x, p.x_scale
    if inverse is None:
        inverse = builder.empty((tokens if p.int8 else 1,), np.float64, "inverse scales of x")
        if p.int8:
            q = builder.empty((tokens, p.k), np.int8, "x in int8")
            block = (twins.QUANTIZE_THREADS, 1, 1)
            builder.launch(twins.quantize_kernel(dtype), (tokens, 1, 1), block, (x, q, inverse))
            x = q
    group = p.k // p.scale.shape[1] if p.scale.shape[1] > 1 else p.codes.shape[1] * 4
    grid = (-(-n // twins.TILE), min(-(-tokens // twins.TILE), MAX_GRID[1]), 1)
    args = (x, inverse, p.codes.view(np.uint32), p.scale, p.y, np.int64(group))
    kernel = twins.matmul_kernel(dtype, spec["activations"], inverse.dtype.name)
    builder.launch(kernel, grid, (twins.TILE, twins.TILE, 1), args)


def _gemv(builder: Builder, config: GemvConfig, p: Product) -> None:
    x, codes, scale, y, k = p.x, p.codes, p.scale, p.y, p.k
    tokens, n = y.shape
    groups = scale.shape[1]
    x_scale, x_scale_step = _given(p.x_scale, scale)
    args = (
        x,
        x_scale,
        codes,
        scale,
        y,
        row_stride(x),
        scale_stride(scale),
        row_stride(y),
        x_scale_step,
        np.int32(codes.shape[1]),
        np.int32(tokens),
        np.int32(n),
        np.int32(k),
        np.int32(k // groups // UNIT),
        np.int32(is_whole(x)),
        np.int32(config.shares),
    )
    kernel = _gemv_kernel(
        x.dtype.name, y.dtype.name, config.tokens, config.rows, config.shares > 1, groups > 1
    )
    builder.launch(kernel, (config.grid, 1, 1), (config.threads, 1, 1), args, shared=config.shared_bytes)


def _given(x_scale: Tensor | None, stand_in: Tensor) -> tuple[Tensor, np.int32]:
    """Scales of an int8 x and the step from one to the next; ``stand_in``, which no kernel reads, for other x."""
    return (stand_in, np.int32(0)) if x_scale is None else (x_scale, np.int32(len(x_scale) > 1))


def _quantized(
    builder: Builder, x: Tensor, k: int, grouped: bool, x_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x as int8, zero up to whole units; its sums per token, or per token and unit; 1 / s per token."""
    tokens, units = x.shape[0], -(-k // UNIT)
    q = builder.empty((tokens, units * UNIT), np.int8, "x in int8")
    sums = builder.empty((tokens, units) if grouped else (tokens,), np.int32, "sums of x")
    inverse = builder.empty((tokens,), np.float64, "inverse scales of x")
    scale, step = _given(x_scale, sums)
    sizes = (row_stride(x), step, np.int32(k), np.int32(units * UNIT), np.int32(is_whole(x)))
    args = (x, scale, q, inverse, sums, *sizes)
    kernel = tokens_kernel("ternary_quantize_tokens", x.dtype.name, grouped)
    builder.launch(kernel, (tokens, 1, 1), (TOKENS_THREADS, 1, 1), args)
    return q, sums, inverse


def _padded(builder: Builder, x: Tensor, k: int) -> Tensor:
    """x itself if its rows are whole units and aligned, otherwise a copy with such rows."""
    if k % UNIT == 0 and is_whole(x):
        return x
    tokens, width = x.shape[0], -(-k // UNIT) * UNIT
    copy = builder.empty((tokens, width), x.dtype, "padded x")
    args = (x, copy, row_stride(x), np.int32(k), np.int32(width))
    builder.launch(
        tokens_kernel("ternary_pad_tokens", x.dtype.name, False),
        (tokens, 1, 1),
        (TOKENS_THREADS, 1, 1),
        args,
    )
    return copy


def _gemm(builder: Builder, rows: Tensor, sums: Tensor, inverse: Tensor, p: Product) -> None:
    codes, scale, y = p.codes, p.scale, p.y
    tokens, n = y.shape
    itemsize, grouped = rows.dtype.itemsize, scale.shape[1] > 1
    units = codes.shape[1] * 4 // UNIT
    smem = builder.smem_per_block_optin
    config, splits = gemm_config(
        tokens, n, units * UNIT, itemsize, grouped=grouped, sms=builder.sms, smem_per_block_optin=smem
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
        target = builder.empty((splits, tokens, n), np.int32 if exact else np.float32, "parts of sums")
    args = (rows, codes, scale, sums, inverse, target, shape[()])
    grid = (config.blocks(tokens, n), splits, 1)
    builder.launch(kernel, grid, (config.threads, 1, 1), args, shared=config.shared_bytes(itemsize))
    if splits > 1:
        kernel = replace(kernel, entry="ternary_gemm_sum")
        grid = (-(-tokens * -(-n // 4) // SUM_THREADS), 1, 1)
        builder.launch(kernel, grid, (SUM_THREADS, 1, 1), (target, scale, sums, inverse, y, shape[()]))


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
        for x, (tokens, rows, divided) in itertools.product((dtype, "int8"), gemv_configs()):
            yield Variant(_gemv_kernel(x, dtype, tokens, rows, divided, grouped), 256, GEMV_SHARED)
        for entry in ("ternary_quantize_tokens", "ternary_pad_tokens", "ternary_round_tokens"):
            yield Variant(tokens_kernel(entry, dtype, grouped), TOKENS_THREADS)
        for act in ("int8", dtype):
            itemsize = 1 if act == "int8" else 4 if dtype == "float32" else 2
            for c in gemm_configs(itemsize, grouped=grouped, smem_per_block_optin=smem):
                for divided in (False, True):
                    kernel = _gemm_kernel(act, dtype, grouped, divided, c)
                    yield Variant(kernel, c.threads, c.shared_bytes(itemsize))
                yield Variant(replace(kernel, entry="ternary_gemm_sum"), SUM_THREADS)
    for grouped in (False, True):
        yield Variant(tokens_kernel("ternary_quantize_tokens", "int8", grouped), TOKENS_THREADS)


def _gemv_kernel(x: str, y: str, tokens: int, rows: int, divided: bool, grouped: bool) -> CudaKernel:
    defines = {**_activations(x), "OUT": DTYPES[y], "TOKENS": tokens, "ROWS": rows}
    defines |= {"DIVIDED": int(divided), "GROUPED": int(grouped)}
    return CudaKernel("weights/ternary_gemv", "ternary_gemv", tuple(defines.items()))


def tokens_kernel(entry: str, dtype: str, grouped: bool) -> CudaKernel:
    defines = {**_activations(dtype), "GROUPED": int(grouped)}
    return CudaKernel("weights/ternary_tokens", entry, tuple(defines.items()))


def _activations(dtype: str) -> dict[str, str | int]:
    return {"DTYPE": DTYPES.get(dtype, "q8"), "GIVEN": int(dtype == "int8")}


def _gemm_kernel(act: str, out: str, grouped: bool, divided: bool, config: GemmConfig) -> CudaKernel:
    defines: dict[str, str | int] = {"ACT": "q8" if act == "int8" else DTYPES[act], "OUT": DTYPES[out]}
    defines |= {"GROUPED": int(grouped), "DIVIDED": int(divided)}
    defines |= {name.upper(): size for name, size in vars(config).items()}
    return CudaKernel("weights/ternary_gemm", "ternary_gemm", tuple(defines.items()))


def is_whole(x: Tensor) -> bool:
    """Whether rows of x are whole vectors of 16 bytes, aligned."""
    return alignment([x], x.shape[0]) == 16 and x.shape[1] * x.dtype.itemsize % 16 == 0


def scale_stride(scale: Tensor) -> np.int64:
    return np.int64(0 if scale.shape[0] == 1 else scale.shape[1])
