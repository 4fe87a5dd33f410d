"""Ternary quantisation on the GPU: how many threads a run of weights has, and the launches.

A run is what lies side by side in a row of w (N, K) and shares a scale: a group, or the row. w has unit stride on the
last axis; codes (N, bytes) are w2, scale (1 or N, groups) float32, both contiguous. The CUDA C++ kernels are
``cuda/ternary_quantize.cu``, their readable twins ``numba_cuda/ternary_quantize.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import DTYPES, alignment, row_stride
from gpu_ops.kernels.lower.ternary_config import UNIT

__all__ = ["block_shape", "quantize", "variants"]

_METHODS = {"absmean": 0, "absmax": 1, "twn": 2, "manual": 3, "meanstd": 4, "percentile": 5}

_THREADS, _COMBINE_THREADS = 128, 1024
_COUNT_BLOCKS_PER_SM = 16
_RUNS, _SUMS, _SQUARES, _LIMIT, _ENCODE, _SCALE, _RANKS, _COUNT, _PICK = (
    f"ternary_quantize_{stage}"
    for stage in ("runs", "sums", "squares", "limit", "encode", "scale", "ranks", "count", "pick")
)
_DIGIT = 11  # bits that a reading of the tensor finds
_LOW = {"float16": 13, "bfloat16": 16, "float32": 0}  # bits that are 0 in what a dtype widens to


def quantize(
    device: Any,
    backend: str,
    w: Any,
    codes: Any,
    scale: Any,
    *,
    run: int,
    per_tensor: bool,
    method: str,
    threshold: float | None,
) -> None:
    """Codes and scale of ``w``, which is not empty; a scale is NaN where a weight is NaN or infinite.

    ``run``: weights of a run; all of K where a scale is of a row or, ``per_tensor``, of all.
    """
    value = 0.0 if threshold is None else threshold
    if backend == "numba":
        _twin(device, w, codes, scale, run, per_tensor, _METHODS[method], value)
        return
    n, k = w.shape
    runs = n * (k // run)
    threads, per_block = block_shape(run, w.dtype.itemsize)
    grid, block = (-(-runs // per_block), 1, 1), (threads, per_block, 1)
    stride, whole = row_stride(w), np.int32(alignment((w,), n) == 16)
    width, many, dtype = np.int32(k), np.uint32(runs), w.dtype.name
    how = (np.int32(_METHODS[method]), np.float64(value))
    if not per_tensor and method == "percentile":
        rank, share = neighbours(run, value)
        ranks = (np.int32(run), many, whole, np.uint32(rank), np.float64(share))
        device.launch(_kernel(_RANKS, dtype), grid, block, (w, codes, scale, stride, width, *ranks))
        return
    if not per_tensor:
        whose = (w, codes, scale, stride, width, np.int32(run), many, whole, *how)
        device.launch(_kernel(_RUNS, dtype), grid, block, whose)
        return
    partial, limit = device.empty((2, runs), np.float64), device.empty((1,), np.float64)
    of_tensor = (partial, limit, scale, many, np.float64(n * k), *how)
    one = ((1, 1, 1), (_COMBINE_THREADS, 1, 1))
    if method == "percentile":
        selection = device.empty((3,), np.uint64, "selection")  # Selection of ternary_quantize.cu
        counts = device.empty((1 << _DIGIT,), np.uint64, "counts")
        rank, share = neighbours(n * k, value)
        few = (min(grid[0], _COUNT_BLOCKS_PER_SM * device.sms), 1, 1)
        top = shift = 31
        while True:
            bits = (np.int32(top), np.int32(shift))
            picked = (selection, counts, limit, *bits, np.uint64(rank), np.float64(share))
            device.launch(_kernel(_PICK, dtype), *one, picked)
            if shift == _LOW[dtype]:
                break
            top, shift = shift, max(shift - _DIGIT, _LOW[dtype])
            counted = (w, selection, counts, stride, width, many, whole, np.int32(top), np.int32(shift))
            device.launch(_kernel(_COUNT, dtype), few, block, counted)
    else:
        device.launch(_kernel(_SUMS, dtype), grid, block, (w, partial, stride, width, many, whole))
        device.launch(_kernel(_LIMIT), *one, (*of_tensor, np.int32(0)))
    if method == "meanstd":
        device.launch(_kernel(_SQUARES, dtype), grid, block, (w, limit, partial, stride, width, many, whole))
        device.launch(_kernel(_LIMIT), *one, (*of_tensor, np.int32(1)))
    counts = np.int32(method != "absmean")
    args = (w, limit, codes, partial, stride, width, many, whole, counts)
    device.launch(_kernel(_ENCODE, dtype), grid, block, args)
    if counts:
        device.launch(_kernel(_SCALE), *one, (partial, limit, scale, many))


def neighbours(size: int, percentile: float) -> tuple[int, float]:
    """The rank below a percentile of so many numbers, and the share of the way to the next: as NumPy's ``linear``."""
    at = (size - 1) * (percentile / 100)
    rank = min(int(at), size - 1)
    return rank, at - rank


def block_shape(run: int, itemsize: int) -> tuple[int, int]:
    """Threads of a run (a power of two: part of a warp, or a block's), runs of a block."""
    vectors = -(-run // UNIT) * UNIT * itemsize // 16
    threads = 1 << (vectors - 1).bit_length() if vectors <= 32 else _THREADS
    return threads, _THREADS // threads


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``quantize`` launches."""
    for entry in (_RUNS, _SUMS, _SQUARES, _ENCODE, _RANKS, _COUNT):
        for dtype in DTYPES:
            yield Variant(_kernel(entry, dtype), _THREADS)
    for entry in (_LIMIT, _SCALE):
        yield Variant(_kernel(entry), _COMBINE_THREADS)
    for dtype in DTYPES:
        yield Variant(_kernel(_PICK, dtype), _COMBINE_THREADS)


def _kernel(entry: str, dtype: str = "float32") -> CudaKernel:
    return CudaKernel("ternary_quantize", entry, (("DTYPE", DTYPES[dtype]),))


def _twin(
    device: Any, w: Any, codes: Any, scale: Any, run: int, per_tensor: bool, method: int, threshold: float
) -> None:
    from gpu_ops.kernels.numba_cuda import ternary_quantize as twins

    n, k = w.shape
    runs, dtype, words = n * (k // run), w.dtype.name, codes.view(np.uint32)
    scopes, per_scope = (1, runs) if per_tensor else (runs, 1)
    size = np.float64(run * per_scope)
    partial, limit = device.empty((2, runs), np.float64), device.empty((scopes,), np.float64)
    threads = (twins.THREADS, 1, 1)
    a_block_per_run, a_thread_per_scope = (
        ((runs, 1, 1), threads),
        ((-(-scopes // twins.THREADS), 1, 1), threads),
    )
    words_of_all = n * words.shape[1]
    flat = scale.reshape(-1)

    def measure(what: str) -> None:
        device.launch(twins.statistics(what, dtype), *a_block_per_run, (w, np.int64(run), limit, partial))

    def set_limit(how: int) -> None:
        args = (partial, limit, flat, np.int64(per_scope), size, np.int64(how), np.float64(threshold))
        device.launch(twins.limits(), *a_thread_per_scope, args)

    measure("sums")
    set_limit(method)
    if method == _METHODS["percentile"]:
        rank, share = neighbours(int(size), threshold)
        args = (w, np.int64(size), np.int64(rank), np.float64(share), limit)
        ranks, many = twins.ranks(dtype, per_tensor)
        device.launch(ranks, (scopes, 1, 1), (many, 1, 1), args)
    if method == _METHODS["meanstd"]:
        measure("squares")
        set_limit(twins.WITH_STD)
    grid = (-(-words_of_all // twins.THREADS), 1, 1)
    device.launch(twins.encode(dtype), grid, threads, (w, np.int64(run), limit, words))
    if method != _METHODS["absmean"]:
        measure("kept")
        device.launch(twins.scales(), *a_thread_per_scope, (partial, limit, flat, np.int64(per_scope)))
