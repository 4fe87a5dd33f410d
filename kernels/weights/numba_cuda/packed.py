"""Packed weights for Numba: the readable twin of packed_unpack.cu, packed_tokens.cu and packed_int8.cu.

The panels come as one buffer in four types: a block's fields have 1, 2 and 4 bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, BlockLayout

__all__ = ["UNIT", "embedding", "int8_products", "quantize_tokens", "reorder", "unpack"]

UNIT = 32
_BUFFERS = "uint8[:], float16[:], uint32[:], float32[:], float32[:]"


class _Fields(NamedTuple):
    """Device functions of the fields of a block that starts at byte ``start``, for row ``row`` of its panel."""

    scale: Any  # of the block, float32
    minimum: Any
    run_scale: Any  # int32; of weight k
    run_minimum: Any
    value: Any  # of the code of weight k, float32; its zero point is subtracted


@cache
def _fields_of(layout: BlockLayout) -> _Fields:
    lanes, block, run = GPU_LANES, layout.block, layout.run
    low_bits, high_bits = layout.planes
    minimums = layout.scale_bytes * lanes
    run_scales = minimums + 2 * layout.has_minimum * lanes
    run_minimums = run_scales + layout.has_run_scales * layout.runs * lanes
    low = run_minimums + layout.has_run_minimums * layout.runs * lanes
    high = low + block * low_bits // 8 * lanes
    scale_bytes, offset, is_table = layout.scale_bytes, layout.offset or 0, layout.offset is None
    has_run_scales, has_run_minimums = layout.has_run_scales, layout.has_run_minimums
    has_minimum, has_zeros = layout.has_minimum, layout.has_zeros

    @cuda.jit(device=True)
    def scale(data, halves, floats, start, row):
        if scale_bytes >= 4:
            return floats[start // 4 + row]
        if scale_bytes == 2:
            return float32(halves[start // 2 + row])
        e = uint32(data[start + row])
        normal, denormal = (e - uint32(1)) << uint32(23), uint32(0x00200000) << (e & uint32(1))
        return libdevice.int_as_float(int32(normal if e > uint32(1) else denormal))

    @cuda.jit(device=True)
    def minimum(halves, start, row):
        return float32(halves[(start + minimums) // 2 + row]) if has_minimum else float32(0)

    @cuda.jit(device=True)
    def run_scale(data, start, k, row):
        return (
            int32(np.int8(data[start + run_scales + k // run * lanes + row])) if has_run_scales else int32(1)
        )

    @cuda.jit(device=True)
    def run_minimum(data, start, k, row):
        return int32(data[start + run_minimums + k // run * lanes + row]) if has_run_minimums else int32(1)

    @cuda.jit(device=True)
    def part(words, start, bits, k, row):
        """Bits of a plane that belong to weight k."""
        parts = 8 // bits
        step = k // 4
        word = words[start // 4 + step // parts * lanes + row]
        return word >> uint32(bits * (step % parts) + 8 * (k % 4)) & uint32((1 << bits) - 1)

    @cuda.jit(device=True)
    def value(data, words, values, start, k, row):
        code = part(words, start + low, low_bits, k, row)
        if high_bits:
            code |= part(words, start + high, high_bits, k, row) << uint32(low_bits)
        result = values[code] if is_table else float32(int32(code) - int32(offset))
        if has_zeros:
            result -= float32(run_minimum(data, start, k, row))
        return result

    return _Fields(scale, minimum, run_scale, run_minimum, value)


@cache
def _weight_of(layout: BlockLayout) -> Any:
    """Device function: weight ``k`` of row ``row`` in the block that starts at byte ``start``."""
    scale, minimum, run_scale, run_minimum, value = _fields_of(layout)
    has_run_scales, has_minimum = layout.has_run_scales, layout.has_minimum
    has_run_minimums = layout.has_run_minimums
    is_nested, lanes, codes = layout.is_nested, GPU_LANES, 1 << layout.bits

    @cuda.jit(device=True)
    def weight_of(data, halves, words, floats, values, start, k, row):
        factor = scale(data, halves, floats, start, row)
        if is_nested:
            step = values[codes + (run_scale(data, start, k, row) & 255)]
            factor = libdevice.fadd_rn(libdevice.fmul_rn(step, factor), floats[start // 4 + lanes + row])
        elif has_run_scales:
            factor *= float32(run_scale(data, start, k, row))
        weight = libdevice.fmul_rn(factor, value(data, words, values, start, k, row))
        if has_minimum:
            offset = minimum(halves, start, row)
            if has_run_minimums:
                offset *= float32(run_minimum(data, start, k, row))
            weight = libdevice.fadd_rn(weight, -offset)
        return weight

    return weight_of


@cache
def unpack(layout: BlockLayout, dtype: str) -> NumbaKernel:
    """Kernel: w = the rows of the panels; stored column k is ``columns[k]`` of w, or k if there are none.
    blockDim = 32 weights; grid = (rows, units)."""
    _, store, number, element, _ = functions(dtype)
    weight_of, lanes, block = _weight_of(layout), GPU_LANES, layout.block
    block_bytes = layout.row_bytes * lanes

    def packed_unpack(data, halves, words, floats, values, columns, w):
        row, k = cuda.blockIdx.x, cuda.blockIdx.y * UNIT + cuda.threadIdx.x
        start = (row // lanes * (w.shape[1] // block) + k // block) * block_bytes
        weight = weight_of(data, halves, words, floats, values, start, k % block, row % lanes)
        w[row, columns[k] if columns.size else k] = store(number(weight))

    return NumbaKernel(
        packed_unpack, f"void({_BUFFERS}, int32[:], {element}[:, :])", f"packed_unpack_{layout.name}_{dtype}"
    )


@cache
def embedding(layout: BlockLayout, dtype: str, index: str) -> NumbaKernel:
    """Kernel: x[t] = factor * row ids[t] of a table of ``total`` rows, those from ``first`` here. blockDim = 32
    weights; grid = (tokens, units)."""
    _, store, number, element, _ = functions(dtype)
    weight_of, lanes, block = _weight_of(layout), GPU_LANES, layout.block
    block_bytes = layout.row_bytes * lanes

    def packed_embedding(data, halves, words, floats, values, ids, x, factor, first, rows, total):
        token, k = cuda.blockIdx.x, cuda.blockIdx.y * UNIT + cuda.threadIdx.x
        row = ids[token] - first
        if ids[token] < 0 or ids[token] >= total:
            x[token, k] = store(number(np.nan))
        elif 0 <= row < rows:
            start = (row // lanes * (x.shape[1] // block) + k // block) * block_bytes
            weight = weight_of(data, halves, words, floats, values, start, k % block, row % lanes)
            x[token, k] = store(number(weight) * number(factor))

    signature = f"void({_BUFFERS}, {index}[:], {element}[:, :], float64, int64, int64, int64)"
    return NumbaKernel(packed_embedding, signature, f"packed_embedding_{layout.name}_{dtype}_{index}")


@cache
def reorder(dtype: str) -> NumbaKernel:
    """Kernel: column k of the result is column ``columns[k]`` of x. blockDim = 32; grid = (tokens, column groups)."""
    element = functions(dtype).element

    def packed_reorder(x, columns, result):
        token, k = cuda.blockIdx.x, cuda.blockIdx.y * UNIT + cuda.threadIdx.x
        if k < x.shape[1]:
            result[token, k] = x[token, columns[k]]

    signature = f"void({element}[:, :], int32[:], {element}[:, :])"
    return NumbaKernel(packed_reorder, signature, f"packed_reorder_{dtype}")


@cache
def quantize_tokens(dtype: str, block: int, summed: int) -> NumbaKernel:
    """Kernel: q, scales and sums as in packed_tokens.cu. blockDim = 1; grid = (tokens, blocks of K)."""
    load, _, _, element, _ = functions(dtype)

    def packed_quantize(x, columns, q, scales, sums):
        token, index = cuda.blockIdx.x, cuda.blockIdx.y
        absmax, finite = float32(0), True
        for k in range(index * block, (index + 1) * block):
            size = abs(float32(load(x[token, columns[k] if columns.size else k])))
            finite = finite and size < np.inf
            absmax = max(absmax, size)
        usable = finite and absmax >= float32(2.0**-100)
        factor = libdevice.fdiv_rn(float32(127), absmax) if usable else float32(0)
        scale = libdevice.fdiv_rn(absmax, float32(127)) if usable else float32(0)
        scales[token, index] = scale if finite else float32(np.nan)
        for first in range(index * block, (index + 1) * block, summed):
            total = int32(0)
            for k in range(first, first + summed):
                value = float32(load(x[token, columns[k] if columns.size else k]))
                code = int32(libdevice.rintf(libdevice.fmul_rn(value, factor))) if usable else int32(0)
                q[token, k] = code
                total += code
            sums[token, first // summed] = total

    signature = f"void({element}[:, :], int32[:], int8[:, :], float32[:, :], int32[:, :])"
    return NumbaKernel(packed_quantize, signature, f"packed_quantize_{dtype}_{block}_{summed}")


@cache
def int8_products(layout: BlockLayout, dtype: str) -> NumbaKernel:
    """Kernel: y = products of int8 tokens with the rows, plus the residual and the bias if there are any. Sums of a
    block are integers. blockDim = 32 rows; grid = (tokens, panels)."""
    load, store, compute, element, _ = functions(dtype)
    scale, minimum, run_scale, run_minimum, value = _fields_of(layout)
    lanes, block, block_bytes = GPU_LANES, layout.block, layout.row_bytes * GPU_LANES
    has_minimum = layout.has_minimum

    def packed_int8(q, scales, data, halves, words, floats, values, residual, bias, y):
        token, panel, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        row = panel * lanes + lane
        if row >= y.shape[1]:
            return
        total = float32(0)
        for index in range(scales.shape[1]):
            start, first = (panel * scales.shape[1] + index) * block_bytes, index * block
            products, lows = int32(0), int32(0)
            for k in range(block):
                x = int32(q[token, first + k])
                weight = int32(value(data, words, values, start, k, lane))
                products += x * weight * run_scale(data, start, k, lane)
                if has_minimum:
                    lows += x * run_minimum(data, start, k, lane)
            x_scale = scales[token, index]
            factor = libdevice.fmul_rn(scale(data, halves, floats, start, lane), x_scale)
            total = libdevice.fmaf_rn(factor, float32(products), total)
            if has_minimum:
                factor = libdevice.fmul_rn(-minimum(halves, start, lane), x_scale)
                total = libdevice.fmaf_rn(factor, float32(lows), total)
        result = compute(total)
        if residual.size:
            result += load(residual[token, row])
        if bias.size:
            result += load(bias[0, row])
        y[token, row] = store(result)

    rows = f"{element}[:, :]"
    signature = f"void(int8[:, :], float32[:, :], {_BUFFERS}, {rows}, {rows}, {rows})"
    return NumbaKernel(packed_int8, signature, f"packed_int8_{layout.name}_{dtype}")
