"""How each backend runs softmax: threads per row, the mask's axes, launches.

x, y, dy and dx are (rows, cols) with unit stride on the last axis. The CUDA C++ kernels are ``cuda/softmax.cu``, their
readable twins ``numba_cuda/softmax.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import (
    DTYPES,
    alignment,
    as_rows,
    float32,
    heads_alignment,
    row_stride,
    rows_of,
    strides_of,
)
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["variants"]

_MAX_THREADS = 512
_BLOCK = 128  # threads of a block that has several rows
_VECS = {"forward": 4, "backward": 2}  # vectors per thread and array: 16 (float32) or 32 numbers in registers
_TWIN_THREADS = 256
_MAX_GRID = 2**31 - 1
_MASKS = {**DTYPES, "bool": "visible"}
_MASK_AXES = np.dtype([(name, "i8") for name in ("middle", "inner", "outer_", "middle_", "inner_", "column_")])


def mask_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Lengths of a broadcast mask's leading axes after merging those that one stride walks through.

    ``strides``: 0 where the mask broadcasts. At least three lengths, the outer ones 1.
    """
    merged: list[int] = []
    reach = None  # the stride that continues the last merged axis
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if stride == reach:
            merged[-1] *= n
        else:
            merged.append(n)
        reach = stride * n
    return (*[1] * (3 - len(merged)), *reversed(merged))


@lowers("softmax", "cpu")
def forward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import softmax

    x, mask, scale = spec.tensor("x"), spec.get("mask"), spec["scale"]
    *leading, cols = x.shape
    rows = math.prod(leading)
    mask_cols = mask.shape[-1] if mask is not None and mask.ndim else 1
    axes = (1, 1, rows)
    if mask is not None and (merged := mask_axes(leading, _broadcast(mask, leading).strides[:-1])):
        axes = merged if len(merged) == 3 else axes  # more axes: NumPy copies the mask

    def run(views: Mapping[str, Any]) -> None:
        mask = views.get("mask")
        if mask is not None:
            mask = np.broadcast_to(mask, (*leading, mask_cols)).reshape(*axes, mask_cols)
        softmax.forward(as_rows(views["x"]), mask, as_rows(views["y"]), scale=scale)

    on.call(run, softmax.config(rows, cols))


@lowers("softmax_backward", "cpu")
def backward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import softmax

    y, scale = rows_of(spec, "y"), spec["scale"]

    def run(views: Mapping[str, Any]) -> None:
        softmax.backward(*(as_rows(views[name]) for name in ("dy", "y", "dx")), scale=scale)

    on.call(run, softmax.config(*y.shape))


@lowers("softmax", "raw")
def forward_raw(spec: Spec, on: Builder) -> None:
    for x, mask, y in _parts(spec):
        rows, cols = x.shape
        axes = np.zeros((), _MASK_AXES)
        bytes_apart = math.gcd(16, alignment((x, y), rows))
        if mask is not None:
            axes[()] = (*mask.shape[1:3], *strides_of(mask))
            vector = min(16, 16 // x.itemsize * mask.itemsize)
            if mask.shape[-1] > 1 and heads_alignment([mask]) % vector:
                bytes_apart = 1
        else:
            axes[()] = (1, 1, 0, 0, 0, 1)
        kernel, grid, block = _config("forward", rows, cols, x.dtype, mask, bytes_apart)
        args = (x, x if mask is None else mask, y, np.int64(rows), np.int64(cols), row_stride(x), row_stride(y))
        on.launch(kernel, grid, block, (*args, axes[()], float32(spec["scale"])))


@lowers("softmax", "numba")
def forward_numba(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cuda import softmax as twins

    for x, mask, y in _parts(spec):
        kernel = twins.forward(x.dtype.name, "" if mask is None else mask.dtype.name)
        if mask is None:
            mask = x.reshape(1, 1, *x.shape)
        elif mask.dtype == np.bool_:
            mask = mask.view(np.uint8)
        grid = min(len(x), _MAX_GRID), 1, 1
        on.launch(kernel, grid, (_TWIN_THREADS, 1, 1), (x, mask, y, np.float64(spec["scale"])))


@lowers("softmax_backward", "raw")
def backward_raw(spec: Spec, on: Builder) -> None:
    arrays = dy, _, _ = tuple(rows_of(spec, name) for name in ("dy", "y", "dx"))
    rows, cols = dy.shape
    if dy.size:
        kernel, grid, block = _config("backward", rows, cols, dy.dtype, None, alignment(arrays, rows))
        sizes = (np.int64(rows), np.int64(cols), *map(row_stride, arrays))
        on.launch(kernel, grid, block, (*arrays, *sizes, float32(spec["scale"])))


@lowers("softmax_backward", "numba")
def backward_numba(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cuda import softmax as twins

    arrays = tuple(rows_of(spec, name) for name in ("dy", "y", "dx"))
    if arrays[0].size:
        grid = min(len(arrays[0]), _MAX_GRID), 1, 1
        kernel = twins.backward(arrays[0].dtype.name)
        on.launch(kernel, grid, (_TWIN_THREADS, 1, 1), (*arrays, np.float64(spec["scale"])))


def _broadcast(mask: Tensor, leading: Sequence[int]) -> Tensor:
    """The mask over all rows; its last axis stays as it is."""
    return mask.broadcast_to((*leading, mask.shape[-1] if mask.ndim else 1))


def _parts(spec: Spec) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """x, mask and y of each launch: one, unless more than three leading axes of the mask do not merge."""
    x, y, mask = rows_of(spec, "x"), rows_of(spec, "y"), spec.get("mask")
    leading = spec.tensor("x").shape[:-1]
    if x.size and mask is None:
        yield x, None, y
    elif x.size and mask is not None:
        yield from _masked(x, _broadcast(mask, leading), y)


def _masked(x: Tensor, mask: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    *leading, mask_cols = mask.shape
    axes = mask_axes(leading, mask.strides[:-1])
    if len(axes) == 3:
        yield x, mask.reshape(*axes, mask_cols), y
        return
    step = len(x) // leading[0]
    for i in range(leading[0]):
        rows = slice(i * step, (i + 1) * step)
        yield from _masked(x[rows], mask[i], y[rows])


def _config(
    which: str, rows: int, cols: int, dtype: np.dtype[Any], mask: Tensor | None, bytes_apart: int
) -> tuple[CudaKernel, tuple[int, ...], tuple[int, ...]]:
    """Kernel, grid and block; ``bytes_apart``: bytes that divide the address of every row."""
    vec, vecs = 16 // dtype.itemsize, _VECS[which]
    n_vecs = -(-cols // vec)
    # A power of two that holds the row in registers, if one does.
    threads = min(max(1 << (-(-n_vecs // vecs) - 1).bit_length(), 4), _MAX_THREADS)
    rows_per_block = max(_BLOCK // threads, 1)
    aligned = bytes_apart % 16 == 0 and (rows == 1 or cols % vec == 0)
    kernel = _kernel(
        which,
        dtype.name,
        "" if mask is None else mask.dtype.name,
        vec if aligned and cols % vec == 0 else 1,
        vecs if n_vecs <= threads * vecs else 0,
    )
    return kernel, (-(-rows // rows_per_block), 1, 1), (threads, rows_per_block, 1)


def _kernel(which: str, dtype: str, mask: str, access: int, vecs: int) -> CudaKernel:
    defines = {"DTYPE": DTYPES[dtype], "MASK": _MASKS.get(mask, "nothing"), "ACCESS": access, "VECS": vecs}
    return CudaKernel("softmax", f"softmax_{which}", tuple(defines.items()))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    for (dtype, vec), aligned, held in itertools.product(
        (("float16", 8), ("bfloat16", 8), ("float32", 4)), (True, False), (True, False)
    ):
        for which, mask in (("backward", ""), *(("forward", m) for m in {"", "bool", dtype, "float32"})):
            vecs = _VECS[which] if held else 0
            yield Variant(_kernel(which, dtype, mask, vec if aligned else 1, vecs), _MAX_THREADS)
