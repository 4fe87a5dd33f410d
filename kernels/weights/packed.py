"""Launch of products with packed weights on each backend.

forward     y = x weight^T + bias + residual
backward    dx = dy weight, of the unpacked matrix
embedding   rows of the matrix

On the CPU ``views["weight"]`` has ``panels``, and cpu/packed.py multiplies them. On a GPU "weight" is the panels of
all runs of rows in one buffer:

int8              packed_int8.cu multiplies them with tokens of packed_tokens.cu, by integer instructions
few tokens        packed_gemv.cu decodes them in registers, with the bits of gemv.cu
more              packed_gemm.cu decodes tiles of them to shared memory, with the bits of gemm_sm80.cu
many, gradients   they are unpacked to a workspace, which the products of :mod:`..gemm` read

The Numba twins have int8 and the last way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gpu_ops.kernels.common.arguments import DTYPES, as_line, as_rows, float32, row_stride, rows_of
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.gemm.args import Epilogue, Gemm, Operand, aligned, product, stride
from gpu_ops.kernels.gemm.config import FEW, DeviceLimits, FewConfig, select_few
from gpu_ops.kernels.gemm.gemm import launch_few, launch_numba, launch_raw, parts_of
from gpu_ops.kernels.gemm.linear import Multiply
from gpu_ops.kernels.gemm.sum import add_up
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.recording import as_int64, on_host
from gpu_ops.kernels.weights import packed_gemm
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, BlockLayout, PackedShape, panel_bytes

__all__ = ["ROWS", "PackedWeight", "packed_weight", "pieces", "variants", "weight_array"]

ROWS = 1 << 14  # of a matrix that are unpacked at a time on a GPU


@lowers("packed_linear", "cpu")
def _forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels
    from gpu_ops.kernels.weights.cpu.ternary_ir import LANES

    y = spec.tensor("y")
    if not y.size:
        return
    tokens = math.prod(y.shape[:-1])
    mode, dtype, shape = spec["activations"], y.dtype.name, spec["packed_weight"]

    def run(views: Mapping[str, Any]) -> None:
        residual, bias, columns = views.get("residual"), views.get("bias"), views["weight"].columns
        x, out = as_rows(views["x"]), as_rows(views["y"])
        if columns is not None:
            stored = np.empty_like(x)  # an index would change the order in memory
            on_host(np.take, x, columns, 1, stored)
            x = stored
        addends = None if residual is None else as_rows(residual), None if bias is None else bias[None]
        kernels.forward(x, views["weight"].panels(LANES), addends, out, mode)

    text = kernels.config(tokens, dtype, [(rows, layout.name) for rows, layout in shape.parts], mode)
    copied = tokens * shape.cols * y.itemsize * shape.reordered
    builder.call(run, text, copied + kernels.scratch_bytes(tokens, shape, dtype, mode))


@lowers("packed_linear_backward", "cpu")
def _backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.weights.cpu import packed as kernels

    dx, shape = spec.tensor("dx"), spec["packed_weight"]
    if not dx.size or not shape.rows:
        builder.zero(dx)
        return

    def run(views: Mapping[str, Any]) -> None:
        kernels.backward_input(as_rows(views["dy"]), views["weight"], as_rows(views["dx"]))

    sizes = math.prod(dx.shape[:-1]), shape.rows, shape.cols, dx.dtype.name
    copied = shape.rows * shape.cols * dx.itemsize * shape.reordered
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

_UNIT, _WARPS = 32, 4  # as in packed_unpack.cu and packed_tokens.cu
_INT8_TOKENS = 1024  # of a launch of packed_int8.cu whose sums are in a workspace
_FEW_ROWS = 16  # of a block of packed_gemv.cu at least: they fill the A operand of mma
# Int8Shape of packed_int8.cu.
_INT8_SHAPE = np.dtype(
    [("stride_c", "i8"), ("split_c", "i8"), *((name, "i4") for name in ("m", "n", "k", "unused"))], align=True
)


def _forward(spec: Spec, builder: Builder, multiply: Multiply, backend: str) -> None:
    y, x = rows_of(spec, "y"), rows_of(spec, "x")
    bias, residual = spec.get("bias"), spec.get("residual")
    if not y.size:
        return
    if not x.size and bias is None and residual is None:
        builder.zero(spec.tensor("y"))
        return
    more, packed = None if residual is None else rows_of(spec, "residual"), _weight(spec)

    def product_of(x: Tensor, weight: tuple[Operand, ...], first: int, rows: int) -> Gemm:
        """Product with some rows of the matrix; ``weight`` is empty if kernels read its panels."""
        part = slice(first, first + rows)
        residual = None if more is None else more[:, part]
        row = None if bias is None else bias[None, part]
        epilogue: Epilogue = "kStore" if row is None and residual is None else "kLinear"
        return Gemm((Operand(x),), weight, (y[:, part],), epilogue=epilogue, residual=residual, bias=row)

    if spec["activations"] == "int8" and x.size:
        quantized: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for first, rows, layout, panels in packed.parts():
            key = layout.block, _summed(layout)
            if key not in quantized:
                quantized[key] = _quantized(builder, backend, x, packed.columns, *key)
            _int8(builder, backend, layout, panels, quantized[key], product_of(x, (), first, rows))
        return
    x = _reordered(builder, backend, x, packed.columns)
    if backend == "raw" and len(x) <= FEW and x.size:
        for first, rows, layout, panels in packed.parts():
            _few(builder, layout, panels, product_of(x, (), first, rows))
    elif backend == "raw" and x.size and packed_gemm.takes(builder, product_of(x, (), 0, y.shape[1])):
        for first, rows, layout, panels in packed.parts():
            weights = panels, _values(builder, layout)
            packed_gemm.launch(builder, product_of(x, (), first, rows), weights, _block_defines(layout))
    else:
        for first, rows, weight in pieces(packed, builder, backend, x.dtype, None):
            multiply(builder, product_of(x, (Operand(weight),), first, rows))


def _few(builder: Builder, layout: BlockLayout, panels: Tensor, g: Gemm) -> None:
    is_aligned = int(aligned([g.a[0].array]))

    def kernel_of(config: FewConfig, out: str) -> CudaKernel:
        return _few_kernel(layout, config, len(g.out[0]), g.dtype.name, out, is_aligned)

    launch_few(builder, g, (panels, _values(builder, layout)), (0, 0), kernel_of, _FEW_ROWS)


def _reordered(builder: Builder, backend: str, x: Tensor, columns: Tensor | None) -> Tensor:
    """x with its columns in the order of the weights."""
    if columns is None:
        return x
    result = builder.scratch(x.shape, x.dtype, "x in the order of the weights")
    if backend == "numba":
        from gpu_ops.kernels.weights.numba_cuda import packed as twins

        grid = (len(x), -(-x.shape[1] // _UNIT), 1)
        builder.launch(twins.reorder(x.dtype.name), grid, (_UNIT, 1, 1), (x, columns, result))
        return result
    kernel = CudaKernel("weights/packed_tokens", "packed_reorder", (("DTYPE", DTYPES[x.dtype.name]),))
    grid = (len(x), -(-x.shape[1] // (32 * _WARPS)), 1)
    args = (x, columns, result, np.int64(stride(x)), np.int32(x.shape[1]))
    builder.launch(kernel, grid, (32 * _WARPS, 1, 1), args)
    return result


def _quantized(
    builder: Builder, backend: str, x: Tensor, columns: Tensor | None, block: int, summed: int
) -> tuple[Tensor, ...]:
    """x in int8, scales of blocks of its elements, and sums of some of them."""
    (tokens, cols), dtype = x.shape, x.dtype.name
    m, tokens = tokens, _tile(tokens) * -(-tokens // _tile(tokens))
    q = builder.scratch((tokens, cols), np.int8, f"x in int8, blocks of {block}")
    scales = builder.scratch((tokens, cols // block), np.float32, f"scales of x, blocks of {block}")
    sums = builder.scratch((tokens, cols // summed), np.int32, f"sums of {summed} of x, blocks of {block}")
    order = sums[:0, 0] if columns is None else columns  # not read without columns
    arrays = x, order, q, scales, sums
    if backend == "raw":
        kernel = _tokens_kernel(dtype, block, summed, columns is not None)
        sizes = np.int64(stride(x)), np.int32(m), np.int32(cols), np.int64(scales.size)
        builder.launch(kernel, (-(-scales.size // _WARPS), 1, 1), (32 * _WARPS, 1, 1), (*arrays, *sizes))
    else:
        from gpu_ops.kernels.weights.numba_cuda import packed as twins

        builder.launch(twins.quantize_tokens(dtype, block, summed), (m, cols // block, 1), (1, 1, 1), arrays)
    return q, scales, sums


def _int8(
    builder: Builder, backend: str, layout: BlockLayout, panels: Tensor, x: tuple[Tensor, ...], g: Gemm
) -> None:
    (m, n), k, out = g.out[0].shape, g.a[0].k, g.out[0]
    if backend == "numba":
        from gpu_ops.kernels.weights.numba_cuda import packed as twins

        addends = [out[:0] if more is None else more for more in (g.residual, g.bias)]
        q, scales, _ = x
        args: tuple[Any, ...] = (q, scales, *_buffers(panels), _values(builder, layout), *addends, out)
        builder.launch(
            twins.int8_products(layout, out.dtype.name), (m, -(-n // _UNIT), 1), (_UNIT, 1, 1), args
        )
        return
    config = int8_config(m, n, k // layout.block, builder.sms)
    direct = config.splits == 1 and g.epilogue != "kLinear"
    values, step = _values(builder, layout), m if direct else _INT8_TOKENS
    for first in range(0, m, step):
        part, count = slice(first, first + step), min(step, m - first)
        target = out if direct else parts_of(builder, config.splits, count, n)
        shape = np.zeros((), _INT8_SHAPE)
        shape["m"], shape["n"], shape["k"] = count, n, k
        shape["stride_c"], shape["split_c"] = stride(target), count * n
        kernel = _int8_kernel(layout, config, target.dtype.name)
        grid = (-(-n // GPU_LANES), config.splits, -(-count // config.tokens))
        tokens = (array[first:] for array in x)  # with those that fill up the last tile
        builder.launch(kernel, grid, (32 * config.warps, 1, 1), (*tokens, panels, values, target, shape[()]))
        if not direct:
            residual = None if g.residual is None else g.residual[part]
            add_up(builder, target, out[part], residual=residual, bias=g.bias)


class Int8Config(NamedTuple):
    """A launch of packed_int8.cu: tokens of a block of threads, its warps, and parts of K."""

    tokens: int
    warps: int
    splits: int


def int8_config(tokens: int, rows: int, blocks: int, sms: int) -> Int8Config:
    """Configuration for a matrix whose rows have ``blocks`` blocks. K is divided where there are fewer than two
    panels per SM, in a way that does not depend on the number of tokens."""
    warps, panels = 8, -(-rows // GPU_LANES)
    splits = max(1, min(2 * sms // panels, blocks // warps, 16))
    return Int8Config(_tile(tokens), warps, splits)


def _tile(tokens: int) -> int:
    """Tokens of a block of threads."""
    return min(8, 1 << (tokens - 1).bit_length())


def _backward(spec: Spec, builder: Builder, multiply: Multiply, backend: str) -> None:
    dy, dx = rows_of(spec, "dy"), rows_of(spec, "dx")
    if not dx.size or not dy.size:
        builder.zero(spec.tensor("dx"))
        return
    weight = unpacked(_weight(spec), builder, backend, dy.dtype)
    multiply(builder, product(Operand(dy), Operand(weight, True), dx))


class PackedWeight(NamedTuple):
    """A packed matrix on a GPU: panels of all runs of rows, and then the columns, in one buffer."""

    buffer: Tensor
    shape: PackedShape

    @property
    def columns(self) -> Tensor | None:
        """Input features of the stored columns; None if they are in order."""
        if not self.shape.reordered:
            return None
        return self.buffer[self.buffer.size - 4 * self.shape.cols :].view(np.int32)

    def parts(self) -> Iterator[tuple[int, int, BlockLayout, Tensor]]:
        """First row, number of rows, layout and panels of runs of rows."""
        first, byte = 0, 0
        for rows, layout in self.shape.parts:
            size = -(-rows // GPU_LANES) * panel_bytes(layout, GPU_LANES, self.shape.cols)
            yield first, rows, layout, self.buffer[byte : byte + size]
            first, byte = first + rows, byte + size


def packed_weight(spec: Spec, name: str) -> PackedWeight | None:
    """A weight of a call; None if it is an array."""
    shape = spec[f"packed_{name}"]
    return None if shape is None else PackedWeight(spec.tensor(name), shape)


def _weight(spec: Spec) -> PackedWeight:
    return PackedWeight(spec.tensor("weight"), spec["packed_weight"])


def weight_array(spec: Spec, name: str, builder: Builder, backend: str, dtype: np.dtype[Any]) -> Tensor:
    """A weight of a call as an array: its own, or the unpacked matrix."""
    packed = packed_weight(spec, name)
    return spec.tensor(name) if packed is None else unpacked(packed, builder, backend, dtype, name)


def unpacked(
    weight: PackedWeight, builder: Builder, backend: str, dtype: np.dtype[Any], name: str = "weight"
) -> Tensor:
    """The whole matrix in a workspace for ``name``, its columns in the order of the input features."""
    result = builder.scratch((weight.shape.rows, weight.shape.cols), dtype, f"unpacked {name}")
    for first, rows, layout, panels in weight.parts():
        _unpack(builder, backend, layout, panels, result[first : first + rows], weight.columns)
    return result


def pieces(
    weight: PackedWeight, builder: Builder, backend: str, dtype: np.dtype[Any], columns: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """First row, number of rows and weights of pieces of one format, of up to ROWS rows, in one workspace. Their
    columns are as they are stored, or as ``columns`` says."""
    cols = weight.shape.cols
    for start, rows, layout, panels in weight.parts():
        size = panel_bytes(layout, GPU_LANES, cols)
        for first in range(0, rows, ROWS):
            count = min(ROWS, rows - first)
            piece = builder.scratch((count, cols), dtype, "unpacked weight")
            _unpack(builder, backend, layout, panels[first // GPU_LANES * size :], piece, columns)
            yield start + first, count, piece


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
    weight, (tokens, cols), dtype = _weight(spec), x.shape, x.dtype.name
    total = np.int64(weight.shape.rows)
    for first, rows, layout, panels in weight.parts():
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


def _summed(layout: BlockLayout) -> int:
    """Elements of x in each of the sums that packed_int8.cu reads: the products of one integer sum."""
    return min(layout.run, _UNIT)


def _values(builder: Builder, layout: BlockLayout) -> Tensor:
    """Table of values of the codes, a zero if they are integers, and of nested scales."""
    if layout.is_e4m3:
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        values = np.array(layout.table or (0.0,), np.float32)
        values = np.concatenate([values, np.frombuffer(layout.scale_values, np.float32)])
    return builder.constant(values, f"values of {layout.name}")


def _kernel(which: str, layout: BlockLayout, dtype: str, reordered: bool = False) -> CudaKernel:
    defines = (("DTYPE", DTYPES[dtype]), *_block_defines(layout), ("REORDERED", int(reordered)))
    return CudaKernel("weights/packed_unpack", f"packed_{which}", defines)


def _few_kernel(
    layout: BlockLayout, config: FewConfig, tokens: int, dtype: str, out: str, is_aligned: int
) -> CudaKernel:
    # mma always takes 8 tokens; FMAs with padding would take longer than the codes take to arrive
    columns = min(config.tokens, 1 << (tokens - 1).bit_length()) if dtype == "float32" else config.tokens
    defines = (
        ("DTYPE", DTYPES[dtype]),
        ("OUT", DTYPES[out]),
        *_block_defines(layout),
        ("ROWS", config.rows),
        ("TOKENS", columns),
        ("ALIGNED", is_aligned),
        ("WARPS", config.threads // 32),
        ("UNROLL", config.unroll),
    )
    return CudaKernel("weights/packed_gemv", "packed_gemv", defines)


def _int8_kernel(layout: BlockLayout, config: Int8Config, out: str) -> CudaKernel:
    more = ("OUT", DTYPES[out]), ("TOKENS", config.tokens), ("WARPS", config.warps)
    return CudaKernel("weights/packed_int8", "packed_int8", (*_block_defines(layout), *more))


def _tokens_kernel(dtype: str, block: int, summed: int, reordered: bool) -> CudaKernel:
    sizes = ("BLOCK", block), ("SUMMED", summed), ("REORDERED", int(reordered))
    return CudaKernel("weights/packed_tokens", "packed_quantize", (("DTYPE", DTYPES[dtype]), *sizes))


def _block_defines(layout: BlockLayout) -> tuple[tuple[str, str | int], ...]:
    """Macros of packed.cuh."""
    return (
        ("BLOCK", layout.block),
        ("RUN", layout.run),
        ("BITS", layout.bits),
        ("SCALE", layout.scale_bytes),
        ("RUN_SCALES", int(layout.has_run_scales)),
        ("MINIMUM", int(layout.has_minimum)),
        ("RUN_MINIMUMS", int(layout.has_run_minimums)),
        ("CODES", "kE4M3" if layout.is_e4m3 else "kTable" if layout.offset is None else "kIntegers"),
        ("OFFSET", layout.offset or 0),
    )


lowers("packed_linear", "raw")(partial(_forward, multiply=launch_raw, backend="raw"))
lowers("packed_linear", "numba")(partial(_forward, multiply=launch_numba, backend="numba"))
lowers("packed_linear_backward", "raw")(partial(_backward, multiply=launch_raw, backend="raw"))
lowers("packed_linear_backward", "numba")(partial(_backward, multiply=launch_numba, backend="numba"))
lowers("packed_embedding", "raw")(partial(_embedding, backend="raw"))
lowers("packed_embedding", "numba")(partial(_embedding, backend="numba"))


_EXAMPLES = (
    BlockLayout("q8_0", 32, 32, 8, 2, False, False, False, 128, ()),
    BlockLayout("mxfp4", 32, 32, 4, 1, False, False, False, None, (1.0,) * 16),  # the table is an argument
    BlockLayout("q5_k", 256, 32, 5, 2, True, True, True, 0, ()),
    BlockLayout("q6_k", 256, 16, 6, 2, True, False, False, 32, ()),
    BlockLayout("uint4_g128", 128, 128, 4, 4, False, False, True, 0, ()),
    BlockLayout("e4m3_g128", 128, 128, 8, 4, False, False, False, None, ()),
    BlockLayout("nf4_nested_4096", 4096, 64, 4, 8, True, False, False, None, (1.0,) * 16, bytes(1024)),
)


def variants(arch: str) -> Iterator[Variant]:
    """Kernels of formats that differ most, for the matrices of an 8 B model."""
    for dtype, layout in itertools.product(DTYPES, _EXAMPLES):
        if dtype == "bfloat16" and int(arch[3:].rstrip("af")) < 80:
            continue
        for which in ("unpack", "embedding"):
            yield Variant(_kernel(which, layout, dtype), 32 * _WARPS)
        yield from packed_gemm.block_variants(arch, _block_defines(layout), dtype)
        limits = DeviceLimits(100, smem_per_block_optin(arch))
        for tokens in (1, 16):
            itemsize = 4 if dtype == "float32" else 2
            few = select_few(tokens, 14336, 4096, itemsize, False, limits, least_rows=_FEW_ROWS)
            yield Variant(_few_kernel(layout, few, tokens, dtype, dtype, 1), few.threads)
            if layout.has_integers:
                config = int8_config(tokens, 14336, 4096 // layout.block, limits.sms)
                yield Variant(_int8_kernel(layout, config, dtype), 32 * config.warps)
        yield Variant(_tokens_kernel(dtype, layout.block, _summed(layout), False), 32 * _WARPS)
