"""Ternary quantisation on the GPU: number of threads per run of weights, and the launches.

A run is a contiguous part of a row of w (N, K) that shares a scale: a group, or the row. w has unit stride on the
last axis; codes (N, bytes) are w2, scale (1 or N, groups) float32, both contiguous. The CUDA C++ kernels are
``ternary_quantize.cu``, their readable twins ``numba_cuda/ternary_quantize.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, alignment, row_stride
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.weights.ternary_config import UNIT

__all__ = ["block_shape", "neighbours", "variants"]

_METHODS = {"absmean": 0, "absmax": 1, "twn": 2, "manual": 3, "meanstd": 4, "percentile": 5}

_THREADS, _COMBINE_THREADS = 128, 1024
_ONE = ((1, 1, 1), (_COMBINE_THREADS, 1, 1))  # a launch of one block
_COUNT_BLOCKS_PER_SM = 16
_RUNS, _SUMS, _SQUARES, _LIMIT, _ENCODE, _SCALE, _RANKS, _COUNT, _PICK = (
    f"ternary_quantize_{stage}"
    for stage in ("runs", "sums", "squares", "limit", "encode", "scale", "ranks", "count", "pick")
)
_DIGIT = 11  # bits found per pass over the tensor
_LOW = {"float16": 13, "bfloat16": 16, "float32": 0}  # low bits that are 0 after widening


@dataclass(frozen=True)
class _Task:
    """Quantisation of w to the workspaces codes and scale; a scale is NaN if a weight is NaN or infinite.

    ``run``: weights of a run; all of K if scales are per row or, with ``per_tensor``, one for all.
    """

    w: Tensor
    codes: Tensor
    scale: Tensor
    run: int
    per_tensor: bool
    method: str
    threshold: float

    @classmethod
    def of(cls, spec: Spec, builder: Builder) -> _Task | None:
        """Task of a spec; None if there are no weights."""
        w, run, per_tensor = spec.tensor("w"), spec["run"], spec["per_tensor"]
        if not w.size:
            builder.note("NumPy, float64")
            return None
        n, k = w.shape
        codes = builder.empty((n, -(-k // UNIT) * (UNIT // 4)), np.uint8, "codes")
        scale = builder.empty((1 if per_tensor else n, k // run), np.float32, "scale")
        return cls(w, codes, scale, run, per_tensor, spec["method"], spec["threshold"] or 0.0)

    @property
    def runs(self) -> int:
        n, k = self.w.shape
        return n * (k // self.run)


@lowers("ternary_quantize", "raw")
def _raw(spec: Spec, builder: Builder) -> None:
    t = _Task.of(spec, builder)
    if t is None:
        return
    n, k = t.w.shape
    threads, per_block = block_shape(t.run, t.w.itemsize)
    grid, block = (-(-t.runs // per_block), 1, 1), (threads, per_block, 1)
    stride, width, many = row_stride(t.w), np.int32(k), np.uint32(t.runs)
    whole, dtype = np.int32(alignment((t.w,), n) == 16), t.w.dtype.name
    if t.per_tensor:
        _whole_tensor(t, builder, grid, block)
    elif t.method == "percentile":
        rank, share = neighbours(t.run, t.threshold)
        ranks = (np.int32(t.run), many, whole, np.uint32(rank), np.float64(share))
        builder.launch(_kernel(_RANKS, dtype), grid, block, (t.w, t.codes, t.scale, stride, width, *ranks))
    else:
        how = (np.int32(_METHODS[t.method]), np.float64(t.threshold))
        args = (t.w, t.codes, t.scale, stride, width, np.int32(t.run), many, whole, *how)
        builder.launch(_kernel(_RUNS, dtype), grid, block, args)


def _whole_tensor(
    t: _Task, builder: Builder, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    """Launch statistics of all of w, a limit from them, then codes."""
    n, k = t.w.shape
    dtype, counts = t.w.dtype.name, np.int32(t.method != "absmean")
    runs = (row_stride(t.w), np.int32(k), np.uint32(t.runs), np.int32(alignment((t.w,), n) == 16))
    partial, limit = (
        builder.empty((2, t.runs), np.float64, "partial"),
        builder.empty((1,), np.float64, "limit"),
    )
    how = (np.int32(_METHODS[t.method]), np.float64(t.threshold))
    of_tensor = (partial, limit, t.scale, np.uint32(t.runs), np.float64(n * k), *how)
    if t.method == "percentile":
        _select(t, builder, grid, block, limit)
    else:
        builder.launch(_kernel(_SUMS, dtype), grid, block, (t.w, partial, *runs))
        builder.launch(_kernel(_LIMIT), *_ONE, (*of_tensor, np.int32(0)))
    if t.method == "meanstd":
        builder.launch(_kernel(_SQUARES, dtype), grid, block, (t.w, limit, partial, *runs))
        builder.launch(_kernel(_LIMIT), *_ONE, (*of_tensor, np.int32(1)))
    builder.launch(_kernel(_ENCODE, dtype), grid, block, (t.w, limit, t.codes, partial, *runs, counts))
    if counts:
        builder.launch(_kernel(_SCALE), *_ONE, (partial, limit, t.scale, np.uint32(t.runs)))


def _select(
    t: _Task, builder: Builder, grid: tuple[int, int, int], block: tuple[int, int, int], limit: Tensor
) -> None:
    """Launch radix selection of the percentile of |w|: each pass over w finds some of its bits."""
    n, k = t.w.shape
    dtype = t.w.dtype.name
    selection = builder.empty((3,), np.uint64, "selection")  # Selection of ternary_quantize.cu
    counts = builder.empty((1 << _DIGIT,), np.uint64, "counts")
    runs = (row_stride(t.w), np.int32(k), np.uint32(t.runs), np.int32(alignment((t.w,), n) == 16))
    rank, share = neighbours(n * k, t.threshold)
    few = (min(grid[0], _COUNT_BLOCKS_PER_SM * builder.sms), 1, 1)
    top = shift = 31
    while True:
        bits = (np.int32(top), np.int32(shift))
        picked = (selection, counts, limit, *bits, np.uint64(rank), np.float64(share))
        builder.launch(_kernel(_PICK, dtype), *_ONE, picked)
        if shift == _LOW[dtype]:
            return
        top, shift = shift, max(shift - _DIGIT, _LOW[dtype])
        counted = (t.w, selection, counts, *runs, np.int32(top), np.int32(shift))
        builder.launch(_kernel(_COUNT, dtype), few, block, counted)


def neighbours(size: int, percentile: float) -> tuple[int, float]:
    """Rank below a percentile of ``size`` numbers, and the fraction of the way to the next, as NumPy's ``linear``."""
    at = (size - 1) * (percentile / 100)
    rank = min(int(at), size - 1)
    return rank, at - rank


def block_shape(run: int, itemsize: int) -> tuple[int, int]:
    """Threads of a run (a power of two: part of a warp, or a block), runs of a block."""
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
    return CudaKernel("weights/ternary_quantize", entry, (("DTYPE", DTYPES[dtype]),))


@lowers("ternary_quantize", "numba")
def _numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.numba_cuda import ternary_quantize as twins

    t = _Task.of(spec, builder)
    if t is None:
        return
    dtype, words, flat = t.w.dtype.name, t.codes.view(np.uint32), t.scale.reshape(-1)
    scopes, per_scope = (1, t.runs) if t.per_tensor else (t.runs, 1)
    size = np.float64(t.run * per_scope)
    partial, limit = (
        builder.empty((2, t.runs), np.float64, "partial"),
        builder.empty((scopes,), np.float64, "limit"),
    )
    threads = (twins.THREADS, 1, 1)
    a_block_per_run = ((t.runs, 1, 1), threads)
    a_thread_per_scope = ((-(-scopes // twins.THREADS), 1, 1), threads)

    def measure(what: str) -> None:
        builder.launch(
            twins.statistics(what, dtype), *a_block_per_run, (t.w, np.int64(t.run), limit, partial)
        )

    def set_limit(how: int) -> None:
        args = (partial, limit, flat, np.int64(per_scope), size, np.int64(how), np.float64(t.threshold))
        builder.launch(twins.limits(), *a_thread_per_scope, args)

    measure("sums")
    set_limit(_METHODS[t.method])
    if t.method == "percentile":
        rank, share = neighbours(int(size), t.threshold)
        args = (t.w, np.int64(size), np.int64(rank), np.float64(share), limit)
        ranks, many = twins.ranks(dtype, t.per_tensor)
        builder.launch(ranks, (scopes, 1, 1), (many, 1, 1), args)
    if t.method == "meanstd":
        measure("squares")
        set_limit(twins.WITH_STD)
    grid = (-(-t.w.shape[0] * words.shape[1] // twins.THREADS), 1, 1)
    builder.launch(twins.encode(dtype), grid, threads, (t.w, np.int64(t.run), limit, words))
    if t.method != "absmean":
        measure("kept")
        builder.launch(twins.scales(), *a_thread_per_scope, (partial, limit, flat, np.int64(per_scope)))
