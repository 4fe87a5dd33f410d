"""Launch of embedding on each backend: the gradient on GPUs sorts the indices, then adds rows tile by tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common import arguments
from gpu_ops.kernels.common.arguments import DTYPES, as_line, as_rows, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.recording import as_int64

__all__ = ["variants"]

_BLOCK, _RUN, _TILE, _PART = 256, 1024, 32, 4  # as in embedding.cu and its twin


# ---- CPU ---------------------------------------------------------------------------------------------------


@lowers("embedding", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import embedding

    def run(views: Mapping[str, Any]) -> None:
        if views["x"].size:
            ids = as_int64(as_line(views["ids"]))
            embedding.forward(ids, views["weight"], as_rows(views["x"]), scale=spec["scale"])

    builder.call(run, embedding.config(*rows_of(spec, "x").shape))


@lowers("embedding_backward", "cpu")
def backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import embedding

    def run(views: Mapping[str, Any]) -> None:
        ids, dweight = as_line(views["ids"]).astype(np.int64, copy=False), views["dweight"]
        if not spec["adds"]:
            dweight.fill(0)
        if dweight.size:
            embedding.backward(as_rows(views["dx"]), ids, dweight, scale=spec["scale"])

    builder.call(run, embedding.config_backward(spec.tensor("dweight").shape[1]))


# ---- GPUs --------------------------------------------------------------------------------------------------


@lowers("embedding", "raw")
def forward_raw(spec: Spec, builder: Builder) -> None:
    weight, x = spec.tensor("weight"), rows_of(spec, "x")
    if not x.size:
        return
    vec = 16 // x.itemsize
    aligned = min(arguments.alignment((table,), len(table)) for table in (weight, x)) == 16
    access = vec if aligned and x.shape[1] % vec == 0 else 1
    threads = min(max(arguments.power_of_two(-(-x.shape[1] // vec)), 4), _BLOCK)
    per_block = _BLOCK // threads
    sizes = map(np.int64, (len(weight), *x.shape))
    args = (_ids(spec), weight, x, _wide(spec), float32(spec["scale"]), *sizes, *map(row_stride, (weight, x)))
    kernel = _kernel("forward", x.dtype.name, access)
    builder.launch(kernel, (-(-len(x) // per_block), 1, 1), (threads, per_block, 1), args)


@lowers("embedding_backward", "raw")
def backward_raw(spec: Spec, builder: Builder) -> None:
    dx, dweight = rows_of(spec, "dx"), spec.tensor("dweight")
    if not _starts(spec, builder):
        return
    (rows, cols), tiles = dx.shape, -(-len(dx) // _TILE)
    keys = _sorted_keys(
        spec, builder, _SORT, _MERGE, (_wide(spec), np.int64(len(dweight)), np.int64(rows)), (np.int64(rows),)
    )
    partial = builder.empty((tiles, cols), np.float32, "partial")
    access = (
        _PART if arguments.alignment((dx,), rows) % (_PART * dx.itemsize) == 0 and cols % _PART == 0 else 1
    )
    scale, sizes = float32(spec["scale"]), (np.int64(rows), np.int64(cols))
    args: tuple[Any, ...]
    threads, strides = _threads(cols, _PART), (row_stride(dx), row_stride(dweight))
    args = (keys, dx, dweight, partial, scale, np.int32(spec["adds"]), *sizes, *strides)
    grid = (tiles, -(-cols // (threads * _PART)), 1)
    builder.launch(_kernel("sum", dx.dtype.name, access), grid, (threads, 1, 1), args)
    threads = _threads(cols, 1)
    args = (keys, partial, dweight, scale, *sizes, row_stride(dweight))
    builder.launch(_CARRY, (tiles - 1, -(-cols // threads), 1), (threads, 1, 1), args)


@lowers("embedding", "numba")
def forward_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import embedding as twins

    ids, weight, x = _ids(spec), spec.tensor("weight"), rows_of(spec, "x")
    if x.size:
        args = (ids, weight, x, np.float64(spec["scale"]))
        builder.launch(twins.forward(x.dtype.name, ids.dtype.name), (len(x), 1, 1), (_BLOCK, 1, 1), args)


@lowers("embedding_backward", "numba")
def backward_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import embedding as twins

    dx, dweight = rows_of(spec, "dx"), spec.tensor("dweight")
    if not _starts(spec, builder):
        return
    cols, tiles = dx.shape[1], -(-len(dx) // _TILE)
    keys = _sorted_keys(
        spec, builder, twins.sort(_ids(spec).dtype.name), twins.merge(), (np.int64(len(dweight)),), ()
    )
    partial = builder.empty((tiles, cols), dweight.dtype, "partial")
    last, across = (partial, dweight, np.float64(spec["scale"])), -(-cols // _BLOCK)
    args = (keys, dx, *last, np.int32(spec["adds"]))
    builder.launch(twins.total(dx.dtype.name), (tiles, across, 1), (_BLOCK, 1, 1), args)
    builder.launch(twins.carry(dx.dtype.name), (tiles - 1, across, 1), (_BLOCK, 1, 1), (keys, *last))


def _starts(spec: Spec, builder: Builder) -> bool:
    """Fill dweight with zeros unless it is added to. Returns whether there is anything to add."""
    dx, dweight = spec.tensor("dx"), spec.tensor("dweight")
    if not spec["adds"]:
        builder.zero(dweight)
    return bool(dx.size and dweight.size)


def _sorted_keys(
    spec: Spec,
    builder: Builder,
    sort: CudaKernel | NumbaKernel,
    merge: CudaKernel | NumbaKernel,
    of_sort: tuple[Any, ...],
    of_merge: tuple[Any, ...],
) -> Tensor:
    """Sort keys index << 32 | i of every row i: by blocks, then by merging runs of twice the length each time."""
    ids = _ids(spec)
    rows, run = ids.size, _RUN
    keys = builder.empty((rows,), np.uint64, "keys")
    builder.launch(sort, (-(-rows // _RUN), 1, 1), (_RUN, 1, 1), (ids, keys, *of_sort))
    spare = builder.empty((rows if rows > _RUN else 0,), np.uint64, "spare keys")
    while run < rows:
        args = (keys, spare, np.int64(run), *of_merge)
        builder.launch(merge, (-(-rows // _BLOCK), 1, 1), (_BLOCK, 1, 1), args)
        keys, spare, run = spare, keys, 2 * run
    return keys


def _ids(spec: Spec) -> Tensor:
    return spec.tensor("ids").ravel()


def _wide(spec: Spec) -> np.int32:
    """Whether indices have 64 bits."""
    return np.int32(spec.tensor("ids").itemsize == 8)


def _threads(cols: int, each: int) -> int:
    """Threads (whole warps) for a row of ``cols`` columns, ``each`` per thread."""
    return min(32 * -(-cols // (32 * each)), _BLOCK)


def _kernel(which: str, dtype: str, access: int) -> CudaKernel:
    return CudaKernel("rows/embedding", f"embedding_{which}", (("DTYPE", DTYPES[dtype]), ("ACCESS", access)))


_SORT, _MERGE, _CARRY = (_kernel(which, "float32", 1) for which in ("sort", "merge", "carry"))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    yield from (Variant(_SORT, _RUN), Variant(_MERGE, _BLOCK), Variant(_CARRY, _BLOCK))
    for dtype, aligned in itertools.product(DTYPES, (True, False)):
        vec = 4 if dtype == "float32" else 8
        yield Variant(_kernel("forward", dtype, vec if aligned else 1), _BLOCK)
        yield Variant(_kernel("sum", dtype, _PART if aligned else 1), _BLOCK)
