"""Matrix products on the GPU, with the activation of a gated MLP in their epilogues: choice of kernel and launch.

The CUDA C++ kernels are ``gemm_sm80.cu`` (tensor cores), ``gemv.cu`` (up to 16 rows) and
``sum.cu``; the readable twin is ``numba_cuda/gemm.py``. :mod:`.cublas` decides when cuBLAS takes their place.
K is divided only for results too small to occupy the device, always in the same way: the same numbers give the same
bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.kernels.common.arguments import ACTIVATIONS, DTYPES
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.compiler.kernel import Define
from gpu_ops.kernels.gemm import cublas
from gpu_ops.kernels.gemm import sum as gemm_sum
from gpu_ops.kernels.gemm.args import (
    Gemm,
    Operand,
    aligned,
    gated,
    gated_backward,
    product,
    stride,
    sum_of_products,
    two_products,
)
from gpu_ops.kernels.gemm.config import (
    FEW,
    DeviceLimits,
    FewConfig,
    MatmulConfig,
    MatmulProblem,
    select_config,
    select_few,
)
from gpu_ops.kernels.gemm.sum import add_up
from gpu_ops.kernels.program import Builder, Layout, Tensor

__all__ = [
    "launch_few",
    "launch_numba",
    "launch_raw",
    "launch_tiles",
    "parts_of",
    "tiles_config",
    "tiles_defines",
    "variants",
]

# The kernels' last parameter: GemmShape and GemvShape.
GEMM_SHAPE = np.dtype(
    [("stride_a", "i8"), ("stride_b", "i8", (2,)), ("stride_c", "i8", (2,)), ("stride_total", "i8")]
    + [("split_c", "i8")]
    + [(name, "i4") for name in ("m", "n", "k", "unused")],
    align=True,
)
GEMV_SHAPE = np.dtype(
    [("stride_x", "i8"), ("stride_w", "i8", (2,)), ("stride_c", "i8"), ("split_c", "i8")]
    + [(name, "i4") for name in ("m", "n", "k", "unused")],
    align=True,
)


def launch_raw(builder: Builder, g: Gemm) -> None:
    """Launch the CUDA C++ kernel, or the library, that is fastest."""
    m, n = g.out[0].shape
    if m * n == 0:
        return
    along = not (g.a[0].across or g.b[0].across)
    few = m <= FEW and along and g.pairs == "kOne"
    if cublas.takes(builder, g):
        cublas.run(builder, g)
    elif few and g.epilogue == "kGateKeep":  # as they are computed again, and h as if they were not kept
        launch_raw(builder, two_products(g.a * 2, g.b, g.out[1:]))
        launch_raw(builder, replace(g, out=g.out[:1], epilogue="kGate"))
    elif few and g.epilogue in ("kStore", "kLinear", "kGate"):
        _launch_few(builder, g)
    else:
        _launch_tiles(builder, g)


def launch_numba(builder: Builder, g: Gemm) -> None:
    """Launch the Numba kernel; its unused arguments have stand-ins."""
    from gpu_ops.kernels.gemm.numba_cuda import gemm as twin

    a, b, out = [o.array for o in g.a], [o.array for o in g.b], g.out
    if out[0].size == 0:
        return
    kernel = twin.kernel(
        a[0].dtype.name,
        out[0].dtype.name,
        g.a[0].across,
        g.b[0].across,
        g.pairs == "kSum",
        g.epilogue,
        g.activation,
    )
    grid = (math.prod(-(-n // twin.BLOCK) for n in out[0].shape), 1, 1)
    for i in range(2 if g.pairs == "kTwo" else 1):
        c = out if len(out) == 3 else (out[i],) * 3
        if g.epilogue == "kLinear":
            none = out[0][:0]
            c = (out[0], none if g.residual is None else g.residual, none if g.bias is None else g.bias)
        total = c[0] if g.total is None else g.total
        args = (a[i], b[i], a[-1], b[-1], *c, total)
        builder.launch(kernel, grid, (twin.THREADS, 1, 1), args)


def _launch_tiles(builder: Builder, g: Gemm) -> None:
    a, b = ([o.array for o in operands] for operands in (g.a, g.b))
    launch_tiles(builder, g, (*_filled(a)[:2], *_filled(b)[:2]), _strides(b), _tiles_kernel)


def tiles_config(builder: Builder, g: Gemm) -> MatmulConfig:
    """Configuration of ``gemm_sm80.cu`` for a product."""
    (m, n), batch = g.out[0].shape, 2 if g.pairs == "kTwo" else 1
    problem = MatmulProblem(
        g.dtype.itemsize,
        m,
        n,
        g.a[0].k * (2 if g.pairs == "kSum" else 1),
        batch=batch,
        gated=g.epilogue in ("kGate", "kGateKeep"),
        splittable=batch == 1 and g.epilogue in ("kStore", "kLinear"),
    )
    return select_config(problem, DeviceLimits(builder.sms, builder.smem_per_block_optin))


def launch_tiles(
    builder: Builder,
    g: Gemm,
    operands: tuple[Any, ...],
    strides: tuple[int, int],
    kernel_of: Callable[[Gemm, MatmulConfig, str], CudaKernel],
) -> None:
    """Launch a kernel of ``gemm_mainloop.cuh``, of a product, a configuration and the dtype of its result.
    ``operands``: its arguments for g.a and g.b; ``strides``: of g.b."""
    out, config = g.out[0], tiles_config(builder, g)
    (m, n), k = out.shape, g.a[0].k
    addends = {"residual": g.residual, "bias": g.bias}
    target, more = (out, g.out[1:]) if g.epilogue != "kLinear" else (out, tuple(addends.values()))
    if config.splits > 1:
        target, more = parts_of(builder, config.splits, m, n), ()
        g = replace(g, epilogue="kStore", residual=None, bias=None)
    shape = np.zeros((), GEMM_SHAPE)
    shape["m"], shape["n"], shape["k"] = m, n, k
    shape["stride_a"], shape["split_c"] = stride(g.a[0].array), m * n
    shape["stride_b"], shape["stride_c"] = strides, _strides((target, *more))
    if g.total is not None:
        shape["stride_total"] = stride(g.total)
    total = _NULL if g.total is None else g.total
    args = (*operands, *_filled((target, *more)), total, shape[()])
    kernel = kernel_of(g, config, target.dtype.name)
    grid = (config.blocks, config.splits, 2 if g.pairs == "kTwo" else 1)
    builder.launch(kernel, grid, (config.threads, 1, 1), args, shared=config.shared_bytes)
    if config.splits > 1:
        add_up(builder, target, out, **addends)


def _launch_few(builder: Builder, g: Gemm) -> None:
    arrays = [o.array for o in g.b]
    launch_few(builder, g, _filled(arrays)[:2], _strides(arrays), functools.partial(_few_kernel, g))


def launch_few(
    builder: Builder,
    g: Gemm,
    weights: tuple[Any, ...],
    strides: tuple[int, int],
    kernel_of: Callable[[FewConfig, str], CudaKernel],
    least_rows: int = 8,
) -> None:
    """Launch a kernel of ``gemv.cuh``, of a configuration and the dtype of its result. ``weights``: its arguments
    for g.b; ``strides``: of their rows."""
    x, out, gate = g.a[0], g.out[0], g.epilogue == "kGate"
    (m, n), k = out.shape, x.k
    limits = DeviceLimits(builder.sms, builder.smem_per_block_optin)
    config = select_few(m, n, k, x.array.dtype.itemsize, gate, limits, least_rows=least_rows)
    direct = config.splits == 1 and g.epilogue != "kLinear"
    target = out if direct else parts_of(builder, config.splits, m, n)
    shape = np.zeros((), GEMV_SHAPE)
    shape["m"], shape["n"], shape["k"] = m, n, k
    shape["stride_x"], shape["stride_w"] = stride(x.array), strides
    shape["stride_c"], shape["split_c"] = stride(target), m * n
    args = (x.array, *weights, target, shape[()])
    kernel = kernel_of(config, target.dtype.name)
    builder.launch(kernel, (config.blocks, config.splits, 1), (config.threads, 1, 1), args)
    if not direct:
        add_up(builder, target, out, residual=g.residual, bias=g.bias)


def parts_of(builder: Builder, splits: int, m: int, n: int) -> Tensor:
    """Workspace in which the blocks of a divided K leave their sums."""
    return builder.scratch((splits, m, n), np.float32, "parts of sums")


_NULL = np.uint64(0)
# Products of float32 in a sum: with more, the roundings of the sum exceed the error of 3 x TF32.
_FEW_PRODUCTS = 64


def _filled(arrays: Iterable[Tensor | None]) -> tuple[Tensor | np.uint64, ...]:
    """Three pointers; null where there is no array."""
    pointers = (*(_NULL if x is None else x for x in arrays), _NULL, _NULL)
    return pointers[:3]


def _tiles_kernel(g: Gemm, config: MatmulConfig, out: str) -> CudaKernel:
    operands = {
        "A_ALONG_K": int(not g.a[0].across),
        "B_ALONG_K": int(not g.b[0].across),
        "PAIRS": g.pairs,
        "ACTIVATION": ACTIVATIONS[g.activation],
    }
    return CudaKernel("gemm/gemm_sm80", "gemm", tiles_defines(g, config, out, operands))


def tiles_defines(
    g: Gemm, config: MatmulConfig, out: str, operands: Mapping[str, str | int]
) -> tuple[Define, ...]:
    """Macros of a kernel of ``gemm_mainloop.cuh``, those of its operands among them."""
    tile = config.tile
    defines = {
        "DTYPE": DTYPES[g.dtype.name],
        "OUT": DTYPES[out],
        **operands,
        "EPILOGUE": g.epilogue,
        "ALIGNED": int(g.is_aligned),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": config.block_k,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "STAGES": config.stages,
        "EXACT": int(g.dtype == np.float32 and g.a[0].k <= _FEW_PRODUCTS),
    }
    return tuple(defines.items())


def _few_kernel(g: Gemm, config: FewConfig, out: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[g.dtype.name],
        "OUT": DTYPES[out],
        "GATED": int(g.epilogue == "kGate"),
        "ACTIVATION": ACTIVATIONS[g.activation],
        "ROWS": config.rows,
        "TOKENS": config.tokens,
        "ALIGNED": int(aligned(o.array for o in (*g.a, *g.b))),
        "WARPS": config.threads // 32,
        "UNROLL": config.unroll,
    }
    return CudaKernel("gemm/gemv", "gemv", tuple(defines.items()))


def _strides(arrays: Iterable[Tensor | None]) -> tuple[int, int]:
    """Strides of two arrays, or of one twice."""
    strides = [0 if array is None else stride(array) for array in arrays]
    return strides[0], strides[min(1, len(strides) - 1)]


def variants(arch: str) -> Iterator[Variant]:
    """CUDA C++ kernels of Llama-3-8B's MLP, forward and backward, for several numbers of tokens; some unaligned."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    limits = DeviceLimits(100, smem_per_block_optin(arch))
    for g in _representative():
        (m, n), k = g.out[0].shape, g.a[0].k
        itemsize, gate = g.dtype.itemsize, g.epilogue in ("kGate", "kGateKeep")
        dtype = g.out[0].dtype.name
        if m <= FEW:
            few = select_few(m, n, k, itemsize, gate, limits)
            yield Variant(_few_kernel(g, few, dtype), few.threads)
        else:
            config = select_config(MatmulProblem(itemsize, m, n, k, gated=gate), limits)
            yield Variant(_tiles_kernel(g, config, dtype), config.threads, config.shared_bytes)
    yield gemm_sum.VARIANT


def _representative() -> Iterator[Gemm]:
    import ml_dtypes

    for dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)):
        for tokens, ffn in ((1, 14335), (8192, 14335), (1, 14336), (16, 14336), (24, 14336), (8192, 14336)):
            x, w = (Operand(_matrix(rows, 4096, dtype)) for rows in (tokens, ffn))
            h, y = (_matrix(tokens, cols, dtype) for cols in (ffn, 4096))
            yield gated(x, w, w, h, activation="gelu")
            yield product(Operand(h), Operand(_matrix(4096, ffn, dtype)), y)
        total = _matrix(8192, 4096, np.dtype(np.float32))
        h_across, x_across = Operand(h, True), Operand(x.array, True)
        dw = _matrix(ffn, 4096, np.dtype(np.float32))
        w_down, w_across = Operand(_matrix(4096, ffn, dtype), True), Operand(w.array, True)
        yield gated(x, w, w, h, activation="gelu", kept=(h, h))
        yield gated_backward(x, w_down, (h, h), (h, h, h), activation="gelu")
        yield two_products((x, x), (w, w), (h, h))
        yield product(h_across, x_across, dw)
        yield product(h_across, x_across, dw, total=dw)
        yield sum_of_products((Operand(h),) * 2, (w_across,) * 2, total, total=total)


def _matrix(rows: int, cols: int, dtype: np.dtype[Any]) -> Tensor:
    return Tensor.of("", Layout.contiguous((rows, cols), dtype))
