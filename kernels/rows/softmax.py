"""Launch of softmax on each backend: axes of the mask, threads per row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.common import arguments
from gpu_ops.kernels.common.arguments import DTYPES, as_rows, float32, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["variants"]

Part = tuple[Tensor, Tensor | None, Tensor]  # x, mask and y of one launch

_TWIN_THREADS = 256  # of a row
_VECS = {"forward": 4, "backward": 2}  # vectors per thread and array: 16 (float32) or 32 numbers in registers
_MASKS = {**DTYPES, "bool": "visible", "": "nothing"}
_MASK_AXES = np.dtype(
    [(name, "i8") for name in ("middle", "inner", "outer_", "middle_", "inner_", "column_")]
)


@lowers("softmax", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import softmax

    shape, mask_tensor, parts = spec.tensor("x").shape, spec.get("mask"), _parts(spec)
    mask_cols = mask_tensor.shape[-1] if mask_tensor is not None and mask_tensor.ndim else 1
    mask = parts[0][1] if len(parts) == 1 else None
    axes = (
        (1, 1, math.prod(shape[:-1])) if mask is None else mask.shape[:3]
    )  # NumPy copies a mask of more axes

    def run(views: Mapping[str, Any]) -> None:
        mask = views.get("mask")
        if mask is not None:
            mask = np.broadcast_to(mask, (*shape[:-1], mask_cols)).reshape(*axes, mask_cols)
        softmax.forward(as_rows(views["x"]), mask, as_rows(views["y"]), scale=spec["scale"])

    builder.call(run, softmax.config(math.prod(shape[:-1]), shape[-1]))


@lowers("softmax_backward", "cpu")
def backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.cpu import softmax

    def run(views: Mapping[str, Any]) -> None:
        softmax.backward(*[as_rows(views[name]) for name in ("dy", "y", "dx")], scale=spec["scale"])

    builder.call(run, softmax.config(*rows_of(spec, "y").shape))


@lowers("softmax", "raw")
def forward_raw(spec: Spec, builder: Builder) -> None:
    for x, mask, y in _parts(spec):
        axes = (1, 1, 0, 0, 0, 1) if mask is None else (*mask.shape[1:3], *arguments.strides_of(mask))
        pointers, last = (
            (x, x if mask is None else mask, y),
            (np.array(axes, _MASK_AXES)[()], float32(spec["scale"])),
        )
        _launch_raw(builder, "forward", pointers, (x, y), mask, last)


@lowers("softmax_backward", "raw")
def backward_raw(spec: Spec, builder: Builder) -> None:
    arrays = tuple(rows_of(spec, name) for name in ("dy", "y", "dx"))
    _launch_raw(builder, "backward", arrays, arrays, None, (float32(spec["scale"]),))


@lowers("softmax", "numba")
def forward_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import softmax as twins

    for x, mask, y in _parts(spec):
        mask_dtype = "" if mask is None else mask.dtype.name
        seen = (
            x.reshape(1, 1, *x.shape)
            if mask is None
            else mask.view(np.uint8)
            if mask_dtype == "bool"
            else mask
        )
        args = (x, seen, y, np.float64(spec["scale"]))
        builder.launch(twins.forward(x.dtype.name, mask_dtype), (len(x), 1, 1), (_TWIN_THREADS, 1, 1), args)


@lowers("softmax_backward", "numba")
def backward_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.rows.numba_cuda import softmax as twins

    arrays = dy, *_ = tuple(rows_of(spec, name) for name in ("dy", "y", "dx"))
    args, grid = (*arrays, np.float64(spec["scale"])), (len(dy) if dy.size else 0, 1, 1)
    builder.launch(twins.backward(dy.dtype.name), grid, (_TWIN_THREADS, 1, 1), args)


def _parts(spec: Spec) -> list[Part]:
    """Parts to launch: one, unless the mask needs more than three axes in addition to the columns."""
    x = spec.tensor("x")
    return _split((rows_of(spec, "x"), spec.get("mask"), rows_of(spec, "y")), x.shape[:-1]) if x.size else []


def _split(part: Part, leading: tuple[int, ...]) -> list[Part]:
    """Split a part so that the mask is (outer, middle, inner, cols or 1) without a copy."""
    x, mask, y = part
    if mask is None:
        return [part]
    mask_view = mask.broadcast_to((*leading, mask.shape[-1] if mask.ndim else 1))
    for i, j in itertools.combinations_with_replacement(range(len(leading) + 1), 2):
        axes = map(math.prod, (leading[:i], leading[i:j], leading[j:]))
        try:
            return [(x, mask_view.reshape(*axes, mask_view.shape[-1]), y)]
        except ValueError:  # these axes do not merge
            continue
    rows = itertools.pairwise(range(0, len(x) + 1, len(x) // leading[0]))
    parts = [_split((x[a:b], mask_view[i], y[a:b]), leading[1:]) for i, (a, b) in enumerate(rows)]
    return list(itertools.chain.from_iterable(parts))


def _launch_raw(
    builder: Builder,
    which: str,
    pointers: tuple[Tensor, ...],
    arrays: tuple[Tensor, ...],
    mask: Tensor | None,
    last: tuple[Any, ...],
) -> None:
    """Launch. ``arrays``: the (rows, cols) arrays of ``pointers``; ``last``: arguments after their strides."""
    (rows, cols), dtype = arrays[0].shape, arrays[0].dtype
    aligned, vec, vecs = arguments.alignment(arrays, rows), 16 // dtype.itemsize, _VECS[which]
    if mask is not None and mask.dtype != np.bool_ and mask.shape[-1] > 1:
        aligned = min(aligned, arguments.heads_alignment([mask]))
    threads, rows_per_block = arguments.row_threads(cols, vec * vecs)
    access = vec if aligned == 16 and cols % vec == 0 else 1
    held = vecs if cols <= threads * vec * vecs else 0  # vectors of a thread, if they hold the row
    kernel = _kernel(which, dtype.name, "" if mask is None else mask.dtype.name, access, held)
    args = (*pointers, np.int64(rows), np.int64(cols), *map(arguments.row_stride, arrays), *last)
    grid = (-(-rows // rows_per_block) if cols else 0, 1, 1)
    builder.launch(kernel, grid, (threads, rows_per_block, 1), args)


def _kernel(which: str, dtype: str, mask: str, access: int, vecs: int) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), ("MASK", _MASKS[mask]), ("ACCESS", access), ("VECS", vecs))
    return CudaKernel("rows/softmax", f"softmax_{which}", defines)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that is launched."""
    for dtype, aligned, held in itertools.product(DTYPES, (True, False), (True, False)):
        access = (4 if dtype == "float32" else 8) if aligned else 1
        for which, mask in (
            ("backward", ""),
            *(("forward", m) for m in sorted({"", "bool", dtype, "float32"})),
        ):
            yield Variant(
                _kernel(which, dtype, mask, access, _VECS[which] if held else 0), arguments.ROW_THREADS
            )
