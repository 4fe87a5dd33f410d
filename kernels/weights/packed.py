"""Launch of products with packed weights on each backend.

forward     y = x weight^T + bias + residual
backward    dx = dy weight, of the unpacked matrix
embedding   rows of the matrix

On the CPU ``views["weight"]`` has ``panels``, and cpu/packed.py multiplies them. On a GPU "weight" is the panels of
all runs of rows in one buffer; they are unpacked to a workspace, which the products of :mod:`..gemm` read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, as_line, as_rows, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm.args import Operand, linear, product
from gpu_ops.kernels.gemm.gemm import launch_numba, launch_raw
from gpu_ops.kernels.gemm.linear import Multiply
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.recording import as_int64, on_host
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, BlockLayout, panel_bytes

__all__ = ["unpacked", "variants"]

_ROWS = 1 << 14  # of a matrix that are unpacked at a time on a GPU


@lowers("packed_linear", "cpu")
def _forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    y = spec.tensor("y")
    if not y.size:
        return
    tokens = math.prod(y.shape[:-1])
    mode, dtype, cols = spec["activations"], y.dtype.name, spec["cols"]

    def run(views: Mapping[str, Any]) -> None:
        residual, bias, columns = views.get("residual"), views.get("bias"), views["weight"].columns
        x, out = as_rows(views["x"]), as_rows(views["y"])
        if columns is not None:
            stored = np.empty_like(x)  # an index would change the order in memory
            on_host(np.take, x, columns, 1, stored)
            x = stored
        addends = None if residual is None else as_rows(residual), None if bias is None else bias[None]
        kernels.forward(x, views["weight"].panels(LANES), addends, out, mode)

    text = kernels.config(tokens, dtype, [(rows, layout.name) for rows, layout in spec["parts"]], mode)
    copied = tokens * cols * y.itemsize * spec["reordered"]
    builder.call(run, text, copied + kernels.scratch_bytes(tokens, spec["rows"], cols, dtype, mode))


@lowers("packed_linear_backward", "cpu")
def _backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels

    dx = spec.tensor("dx")
    if not dx.size or not spec["rows"]:
        builder.zero(dx)
        return

    def run(views: Mapping[str, Any]) -> None:
        kernels.backward_input(as_rows(views["dy"]), views["weight"], as_rows(views["dx"]))

    sizes = math.prod(dx.shape[:-1]), spec["rows"], spec["cols"], dx.dtype.name
    copied = spec["rows"] * spec["cols"] * dx.itemsize * spec["reordered"]
    scratch = copied + kernels.backward_scratch_bytes(*sizes)
    builder.call(run, "one product with the unpacked matrix", scratch)


@lowers("packed_embedding", "cpu")
def _embedding_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    x, scale = spec.tensor("x"), spec["scale"]
    if not x.size:
        return

    def run(views: Mapping[str, Any]) -> None:
        panels = views["weight"].panels(LANES)
        ids = as_int64(as_line(views["ids"]))
        kernels.embedding(ids, panels, scale, as_rows(views["x"]))

    builder.call(run, "the panels of the rows")


# ---- GPUs --------------------------------------------------------------------------------------------------

_UNIT, _WARPS = 32, 4  # as in packed_unpack.cu


def _forward(spec: Spec, builder: Builder, multiply: Multiply, backend: str) -> None:
    y, x = rows_of(spec, "y"), rows_of(spec, "x")
    bias, residual = spec.get("bias"), spec.get("residual")
    if not y.size:
        return
    if not x.size and bias is None and residual is None:
        builder.zero(spec.tensor("y"))
        return
    more = None if residual is None else rows_of(spec, "residual")
    for first, rows, weight in _unpacked(spec, builder, backend, x.dtype, _ROWS):
        part = slice(first, first + rows)
        gemm = linear(
            Operand(x),
            Operand(weight),
            y[:, part],
            residual=None if more is None else more[:, part],
            bias=None if bias is None else bias[None, part],
        )
        multiply(builder, gemm)


def _backward(spec: Spec, builder: Builder, multiply: Multiply, backend: str) -> None:
    dy, dx = rows_of(spec, "dy"), rows_of(spec, "dx")
    if not dx.size or not dy.size:
        builder.zero(spec.tensor("dx"))
        return
    weight = unpacked(spec, builder, backend, dy.dtype)
    multiply(builder, product(Operand(dy), Operand(weight, True), dx))


def unpacked(spec: Spec, builder: Builder, backend: str, dtype: np.dtype[Any]) -> Tensor:
    """The whole matrix in a workspace."""
    ((_, _, weight),) = _unpacked(spec, builder, backend, dtype, spec["rows"])
    return weight


def _unpacked(
    spec: Spec, builder: Builder, backend: str, dtype: np.dtype[Any], limit: int
) -> Iterator[tuple[int, int, Tensor]]:
    """First row, number of rows and weights of pieces of the matrix of up to ``limit`` rows, in one workspace.

    With a limit of all rows it is one piece; otherwise a piece has one format."""
    cols, total = spec["cols"], spec["rows"]
    buffer = spec.tensor("weight")
    columns = buffer[buffer.size - 4 * cols :].view(np.int32) if spec["reordered"] else None
    if limit >= total:
        weight = builder.scratch((total, cols), dtype, "unpacked weight")
        for first, rows, layout, panels in _parts(spec):
            _unpack(builder, backend, layout, panels, weight[first : first + rows], columns)
        yield 0, total, weight
        return
    for start, rows, layout, panels in _parts(spec):
        size = panel_bytes(layout, GPU_LANES, cols)
        for first in range(0, rows, limit):
            count = min(limit, rows - first)
            weight = builder.scratch((count, cols), dtype, "unpacked weight")
            _unpack(builder, backend, layout, panels[first // GPU_LANES * size :], weight, columns)
            yield start + first, count, weight


def _parts(spec: Spec) -> Iterator[tuple[int, int, BlockLayout, Tensor]]:
    """First row, number of rows, layout and panels of runs of rows."""
    buffer, first, byte = spec.tensor("weight"), 0, 0
    for rows, layout in spec["parts"]:
        size = -(-rows // GPU_LANES) * panel_bytes(layout, GPU_LANES, spec["cols"])
        yield first, rows, layout, buffer[byte : byte + size]
        first, byte = first + rows, byte + size


def _unpack(
    builder: Builder,
    backend: str,
    layout: BlockLayout,
    panels: Tensor,
    weight: Tensor,
    columns: Tensor | None,
) -> None:
    if not weight.size:
        return
    (rows, cols), dtype, values = weight.shape, weight.dtype.name, _values(builder, layout)
    if backend == "raw":
        grid = (-(-rows // GPU_LANES), -(-cols // (_UNIT * _WARPS)), 1)
        order = values if columns is None else columns  # not read without columns
        args: tuple[Any, ...] = (panels, values, order, weight, np.int64(rows), np.int64(cols))
        kernel = _kernel("unpack", layout, dtype, columns is not None)
        builder.launch(kernel, grid, (32 * _WARPS, 1, 1), args)
    else:
        from gpu_ops.kernels.weights.numba_cuda import packed as twins

        order = panels[:0].view(np.int32) if columns is None else columns
        args = (*_buffers(panels), values, order, weight)
        builder.launch(twins.unpack(layout, dtype), (rows, cols // _UNIT, 1), (_UNIT, 1, 1), args)


def _embedding(spec: Spec, builder: Builder, backend: str) -> None:
    x, ids, scale = rows_of(spec, "x"), spec.tensor("ids").ravel(), spec["scale"]
    if not x.size:
        return
    (tokens, cols), dtype, total = x.shape, x.dtype.name, np.int64(spec["rows"])
    for first, rows, layout, panels in _parts(spec):
        values, place = _values(builder, layout), (np.int64(first), np.int64(rows), total)
        if backend == "raw":
            grid = (tokens, -(-cols // (_UNIT * 32 * _WARPS)), 1)
            has_64_bits = np.int32(ids.itemsize == 8)
            args: tuple[Any, ...] = (
                panels,
                values,
                ids,
                x,
                has_64_bits,
                float32(scale),
                *place,
                np.int64(cols),
                row_stride(x),
            )
            builder.launch(_kernel("embedding", layout, dtype), grid, (32 * _WARPS, 1, 1), args)
        else:
            from gpu_ops.kernels.weights.numba_cuda import packed as twins

            twin = twins.embedding(layout, dtype, ids.dtype.name)
            args = (*_buffers(panels), values, ids, x, np.float64(scale), *place)
            builder.launch(twin, (tokens, cols // _UNIT, 1), (_UNIT, 1, 1), args)


def _buffers(panels: Tensor) -> tuple[Tensor, ...]:
    """Panels in the types of their fields."""
    return panels, panels.view(np.float16), panels.view(np.uint32), panels.view(np.float32)


def _values(builder: Builder, layout: BlockLayout) -> Tensor:
    """Table of values of the codes; a zero if they are integers."""
    if layout.is_e4m3:
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        values = np.array(layout.table or (0.0,), np.float32)
    return builder.constant(values, f"values of {layout.name}")


def _kernel(which: str, layout: BlockLayout, dtype: str, reordered: bool = False) -> CudaKernel:
    defines = (
        ("DTYPE", DTYPES[dtype]),
        ("BLOCK", layout.block),
        ("RUN", layout.run),
        ("BITS", layout.bits),
        ("SCALE_BYTES", layout.scale_bytes),
        ("RUN_SCALES", int(layout.has_run_scales)),
        ("MINIMUM", int(layout.has_minimum)),
        ("RUN_MINIMUMS", int(layout.has_run_minimums)),
        ("TABLE", int(layout.offset is None)),
        ("OFFSET", layout.offset or 0),
        ("REORDERED", int(reordered)),
    )
    return CudaKernel("weights/packed_unpack", f"packed_{which}", defines)


lowers("packed_linear", "raw")(partial(_forward, multiply=launch_raw, backend="raw"))
lowers("packed_linear", "numba")(partial(_forward, multiply=launch_numba, backend="numba"))
lowers("packed_linear_backward", "raw")(partial(_backward, multiply=launch_raw, backend="raw"))
lowers("packed_linear_backward", "numba")(partial(_backward, multiply=launch_numba, backend="numba"))
lowers("packed_embedding", "raw")(partial(_embedding, backend="raw"))
lowers("packed_embedding", "numba")(partial(_embedding, backend="numba"))


_EXAMPLES = (
    BlockLayout("q8_0", 32, 32, 8, 2, False, False, False, 128, ()),
    BlockLayout("mxfp4", 32, 32, 4, 1, False, False, False, None, ()),  # the table is an argument
    BlockLayout("q5_k", 256, 32, 5, 2, True, True, True, 0, ()),
    BlockLayout("q6_k", 256, 16, 6, 2, True, False, False, 32, ()),
    BlockLayout("uint4_g128", 128, 128, 4, 4, False, False, True, 0, ()),
    BlockLayout("e4m3_g128", 128, 128, 8, 4, False, False, False, None, ()),
)


def variants(arch: str) -> Iterator[Variant]:
    """Kernels of formats that differ most."""
    for dtype, layout, which in itertools.product(DTYPES, _EXAMPLES, ("unpack", "embedding")):
        if dtype != "bfloat16" or int(arch[3:].rstrip("af")) >= 80:
            yield Variant(_kernel(which, layout, dtype), 32 * _WARPS)
