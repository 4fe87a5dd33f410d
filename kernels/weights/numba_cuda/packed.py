"""Unpacking of packed weights for Numba: the readable twin of packed_unpack.cu.

The panels come as one buffer in four types: a block's fields have 1, 2 and 4 bytes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint32
from numba.cuda import libdevice

from gpu_ops.kernels.common.numba_cuda.dtype import functions
from gpu_ops.kernels.compiler.jit import NumbaKernel
from gpu_ops.kernels.weights.packed_panels import GPU_LANES, BlockLayout

__all__ = ["UNIT", "embedding", "unpack"]

UNIT = 32
_BUFFERS = "uint8[:], float16[:], uint32[:], float32[:], float32[:]"


@cache
def _weight_of(layout: BlockLayout) -> object:
    """Device function: weight ``k`` of row ``row`` in the block that starts at byte ``start``."""
    lanes, block, run = GPU_LANES, layout.block, layout.run
    low_bits, high_bits = layout.planes
    minimums = layout.scale_bytes * lanes
    run_scales = minimums + 2 * layout.has_minimum * lanes
    run_minimums = run_scales + layout.has_run_scales * layout.runs * lanes
    low = run_minimums + layout.has_run_minimums * layout.runs * lanes
    high = low + block * low_bits // 8 * lanes
    scale_bytes, offset, is_table = layout.scale_bytes, layout.offset or 0, layout.offset is None
    has_run_scales, has_minimum, has_zeros = layout.has_run_scales, layout.has_minimum, layout.has_zeros
    has_run_minimums = layout.has_run_minimums and has_minimum

    @cuda.jit(device=True)
    def part(words, start, bits, k, row):
        """Bits of a plane that belong to weight k."""
        parts = 8 // bits
        step = k // 4
        word = words[start // 4 + step // parts * lanes + row]
        return word >> uint32(bits * (step % parts) + 8 * (k % 4)) & uint32((1 << bits) - 1)

    @cuda.jit(device=True)
    def weight_of(data, halves, words, floats, values, start, k, row):
        if scale_bytes == 4:
            scale = floats[start // 4 + row]
        elif scale_bytes == 2:
            scale = float32(halves[start // 2 + row])
        else:
            e = uint32(data[start + row])
            normal, denormal = (e - uint32(1)) << uint32(23), uint32(0x00200000) << (e & uint32(1))
            scale = libdevice.int_as_float(int32(normal if e > uint32(1) else denormal))
        if has_run_scales:
            scale *= float32(np.int8(data[start + run_scales + k // run * lanes + row]))
        code = part(words, start + low, low_bits, k, row)
        if high_bits:
            code |= part(words, start + high, high_bits, k, row) << uint32(low_bits)
        value = values[code] if is_table else float32(int32(code) - int32(offset))
        if has_zeros:
            value -= float32(data[start + run_minimums + k // run * lanes + row])
        weight = libdevice.fmul_rn(scale, value)
        if has_minimum:
            minimum = float32(halves[(start + minimums) // 2 + row])
            if has_run_minimums:
                minimum *= float32(data[start + run_minimums + k // run * lanes + row])
            weight = libdevice.fadd_rn(weight, -minimum)
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
