"""Matrix products on the GPU, with what a gated MLP does to their results: which kernel, and the launch.

All are ``C = A B^T`` of an A with m rows and a B with n, both of k columns, which lie in memory along k or across
it (:class:`Operand`). The CUDA C++ kernels are ``cuda/gemm_sm80.cu`` (tensor cores), ``cuda/gemv.cu`` (up to 16
rows) and ``cuda/gemm_sum.cu``, the readable twin is ``numba_cuda/gemm.py``; :mod:`.gemm_library` says when cuBLAS
takes their place. Sums are float32, rounded once. K is divided only for results too small to occupy the device,
always in the same way: the same numbers give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import ACTIVATIONS, DTYPES
from gpu_ops.kernels.lower.gemm_args import Epilogue, Operand, Work, aligned, stride
from gpu_ops.kernels.lower.gemm_config import (
    FEW,
    Config,
    DeviceLimits,
    FewConfig,
    Problem,
    select_config,
    select_few,
)

__all__ = [
    "Operand",
    "add_up",
    "gated",
    "gated_backward",
    "product",
    "sum_of_products",
    "two_products",
    "variants",
]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray


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


def product(
    device: Any, backend: str, a: Operand, b: Operand, out: Array, *, total: Array | None = None
) -> None:
    """``out = a b^T``, plus ``total`` (float32, float64 for float64), which may be ``out`` itself."""
    _run(device, backend, Work((a,), (b,), (out,), epilogue=_adding(total), total=total))


def two_products(
    device: Any, backend: str, a: tuple[Operand, ...], b: tuple[Operand, ...], out: tuple[Array, ...]
) -> None:
    """``out[i] = a[i] b[i]^T`` for i = 0, 1, alike in shape, in one launch."""
    _run(device, backend, Work(a, b, out, "kTwo"))


def sum_of_products(
    device: Any,
    backend: str,
    a: tuple[Operand, ...],
    b: tuple[Operand, ...],
    out: Array,
    *,
    total: Array | None = None,
) -> None:
    """``out = a[0] b[0]^T + a[1] b[1]^T``, plus ``total``, added up before it is rounded."""
    _run(device, backend, Work(a, b, (out,), "kSum", _adding(total), total=total))


def gated(
    device: Any, backend: str, x: Operand, w_gate: Operand, w_up: Operand, h: Array, *, activation: str
) -> None:
    """``h = act(x w_gate^T) * (x w_up^T)``; gate and up are never in memory."""
    _run(device, backend, Work((x,), (w_gate, w_up), (h,), epilogue="kGate", activation=activation))


def gated_backward(
    device: Any,
    backend: str,
    dy: Operand,
    w_down: Operand,
    gate: Array,
    up: Array,
    h: Array,
    *,
    activation: str,
) -> None:
    """With ``dh = dy w_down^T``, never in memory: gate becomes dgate, up becomes dup, h ``act(gate) * up``."""
    out = (gate, up, h)
    _run(device, backend, Work((dy,), (w_down,), out, epilogue="kGateBackward", activation=activation))


def _adding(total: Array | None) -> Epilogue:
    return "kStore" if total is None else "kAdd"


def _run(device: Any, backend: str, work: Work) -> None:
    m, n = work.out[0].shape
    if m * n == 0:
        return
    if backend == "numba":
        _run_twin(device, work)
        return
    from gpu_ops.kernels.lower import cublas as gemm_library

    if gemm_library.takes(device, work):
        gemm_library.run(device, work)
        return
    along = not (work.a[0].across or work.b[0].across)
    if m <= FEW and along and work.pairs == "kOne" and work.epilogue in ("kStore", "kGate"):
        _run_few(device, work)
    else:
        _run_tiles(device, work)


def _run_twin(device: Any, work: Work) -> None:
    """The Numba kernel; its unused arguments have stand-ins."""
    from gpu_ops.kernels.numba_cuda import gemm as twin

    a, b, out = [o.array for o in work.a], [o.array for o in work.b], work.out
    kernel = twin.kernel(
        a[0].dtype.name, out[0].dtype.name, work.a[0].across, work.b[0].across, work.pairs == "kSum",
        work.epilogue, work.activation,
    )  # fmt: skip
    grid = (math.prod(-(-n // twin.BLOCK) for n in out[0].shape), 1, 1)
    for i in range(2 if work.pairs == "kTwo" else 1):
        c = out if len(out) == 3 else (out[i],) * 3
        total = c[0] if work.total is None else work.total
        args = (a[i], b[i], a[-1], b[-1], *c, total)
        device.launch(kernel, grid, (twin.THREADS, 1, 1), args)


def _run_tiles(device: Any, work: Work) -> None:
    out = work.out[0]
    (m, n), k = out.shape, work.a[0].k
    splittable = work.pairs != "kTwo" and work.epilogue == "kStore"
    problem = Problem(
        work.dtype.itemsize, m, n, k * (2 if work.pairs == "kSum" else 1),
        batch=2 if work.pairs == "kTwo" else 1, gated=work.epilogue == "kGate", splittable=splittable,
    )  # fmt: skip
    config = select_config(problem, DeviceLimits(device.sms, device.smem_per_block_optin))
    target = out if config.splits == 1 else device.empty((config.splits, m, n), np.float32, "parts of sums")
    shape = np.zeros((), GEMM_SHAPE)
    shape["m"], shape["n"], shape["k"] = m, n, k
    shape["stride_a"], shape["split_c"] = stride(work.a[0].array), m * n
    shape["stride_b"] = _strides(o.array for o in work.b)
    shape["stride_c"] = _strides((target, *work.out[1:]))
    if work.total is not None:
        shape["stride_total"] = stride(work.total)
    a, b = (_filled(o.array for o in operands) for operands in (work.a, work.b))
    c = _filled((target, *work.out[1:]))
    kernel = _tiles_kernel(work, config, target.dtype.name)
    args = (*a[:2], *b[:2], *c, _NULL if work.total is None else work.total, shape[()])
    grid = (config.blocks, config.splits, problem.batch)
    device.launch(kernel, grid, (config.threads, 1, 1), args, shared=config.shared_bytes)
    if config.splits > 1:
        add_up(device, target, out)


def _run_few(device: Any, work: Work) -> None:
    x, out, gate = work.a[0], work.out[0], work.epilogue == "kGate"
    (m, n), k = out.shape, x.k
    limits = DeviceLimits(device.sms, device.smem_per_block_optin)
    config = select_few(m, n, k, x.array.dtype.itemsize, gate, limits)
    target = out if config.splits == 1 else device.empty((config.splits, m, n), np.float32, "parts of sums")
    shape = np.zeros((), GEMV_SHAPE)
    shape["m"], shape["n"], shape["k"] = m, n, k
    shape["stride_x"], shape["stride_w"] = stride(x.array), _strides(o.array for o in work.b)
    shape["stride_c"], shape["split_c"] = stride(target), m * n
    w = _filled(o.array for o in work.b)
    args = (x.array, *w[:2], target, shape[()])
    kernel = _few_kernel(work, config, target.dtype.name)
    device.launch(kernel, (config.blocks, config.splits, 1), (config.threads, 1, 1), args)
    if config.splits > 1:
        add_up(device, target, out)


def add_up(device: Any, parts: Array, out: Array) -> None:
    """``out`` is the sum of ``parts`` (splits, rows, cols), float32 and contiguous, rounded once."""
    splits, rows, cols = parts.shape
    width = 4 if aligned([out], 4 * out.dtype.itemsize) else 1
    kernel = _sum_kernel(out.dtype.name, width)
    args = (parts, out, np.int64(rows), np.int64(cols), np.int64(stride(out)), np.int32(splits))
    device.launch(kernel, (-(-rows * cols // (width * _SUM_THREADS)), 1, 1), (_SUM_THREADS, 1, 1), args)


_NULL = np.uint64(0)
_SUM_THREADS = 256
# Of float32, in a sum: more of them, and the roundings of the sum exceed what 3 x TF32 loses.
_FEW_PRODUCTS = 64


def _filled(arrays: Iterable[Array]) -> tuple[Array, Array, Array]:
    """Three pointers; null where there is no array."""
    found = (*arrays, _NULL, _NULL)[:3]
    return found[0], found[1], found[2]


def _tiles_kernel(work: Work, config: Config, out: str) -> CudaKernel:
    tile = config.tile
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[work.dtype.name], "OUT": DTYPES[out],
        "A_ALONG_K": int(not work.a[0].across), "B_ALONG_K": int(not work.b[0].across),
        "PAIRS": work.pairs, "EPILOGUE": work.epilogue, "ACTIVATION": ACTIVATIONS[work.activation],
        "ALIGNED": int(work.is_aligned), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_K": config.block_k, "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "STAGES": config.stages,
        "EXACT": int(work.dtype == np.float32 and work.a[0].k <= _FEW_PRODUCTS),
    }  # fmt: skip
    return CudaKernel("gemm_sm80", "gemm", tuple(defines.items()))


def _few_kernel(work: Work, config: FewConfig, out: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[work.dtype.name], "OUT": DTYPES[out],
        "GATED": int(work.epilogue == "kGate"), "ACTIVATION": ACTIVATIONS[work.activation],
        "ROWS": config.rows, "TOKENS": config.tokens,
        "ALIGNED": int(aligned([o.array for o in (*work.a, *work.b)])),
        "WARPS": config.threads // 32, "UNROLL": config.unroll,
    }  # fmt: skip
    return CudaKernel("gemv", "gemv", tuple(defines.items()))


def _sum_kernel(dtype: str, width: int) -> CudaKernel:
    return CudaKernel("gemm_sum", "gemm_sum", (("DTYPE", DTYPES[dtype]), ("WIDTH", width)))


def _strides(arrays: Iterable[Array]) -> tuple[int, int]:
    """Of two arrays, or of one twice."""
    found = [stride(array) for array in arrays]
    return found[0], found[min(1, len(found) - 1)]


def variants(arch: str) -> Iterator[Variant]:
    """The CUDA C++ kernels of a Llama-3-8B's MLP, forward and backward, by tokens; some of them unaligned."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    limits = DeviceLimits(100, smem_per_block_optin(arch))
    for work in _representative():
        (m, n), k = work.out[0].shape, work.a[0].k
        itemsize, gate = work.dtype.itemsize, work.epilogue == "kGate"
        dtype = work.out[0].dtype.name
        if m <= FEW:
            few = select_few(m, n, k, itemsize, gate, limits)
            yield Variant(_few_kernel(work, few, dtype), few.threads)
        else:
            config = select_config(Problem(itemsize, m, n, k, gated=gate), limits)
            yield Variant(_tiles_kernel(work, config, dtype), config.threads, config.shared_bytes)
    yield Variant(_sum_kernel("bfloat16", 4), _SUM_THREADS)


def _representative() -> Iterator[Work]:
    """Problems, of arrays that have a shape and no memory of their own."""
    import ml_dtypes

    for dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)):
        for tokens, ffn in ((1, 14335), (8192, 14335), (1, 14336), (16, 14336), (24, 14336), (8192, 14336)):
            x, w = (Operand(_imagined(rows, 4096, dtype)) for rows in (tokens, ffn))
            h, y = (_imagined(tokens, cols, dtype) for cols in (ffn, 4096))
            yield Work((x,), (w, w), (h,), epilogue="kGate", activation="gelu")
            yield Work((Operand(h),), (Operand(_imagined(4096, ffn, dtype)),), (y,))
        total = _imagined(8192, 4096, np.dtype(np.float32))
        h_across, x_across, dw = Operand(h, True), Operand(x.array, True), _imagined(ffn, 4096, dtype)
        w_down, w_across = Operand(_imagined(4096, ffn, dtype), True), Operand(w.array, True)
        yield Work((x,), (w_down,), (h, h, h), epilogue="kGateBackward", activation="gelu")
        yield Work((h_across,) * 2, (x_across,) * 2, (dw, dw), "kTwo")
        yield Work((Operand(h),) * 2, (w_across,) * 2, (total,), "kSum", "kAdd", total=total)


def _imagined(rows: int, cols: int, dtype: np.dtype[Any]) -> Array:
    return np.lib.stride_tricks.as_strided(
        np.empty(1, dtype), (rows, cols), (cols * dtype.itemsize, dtype.itemsize)
    )
