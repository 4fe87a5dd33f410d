"""Products of packed weights and many tokens on the CPU.

A panel of weights, one step of K after the other, is an operand (k, m) of the micro-kernels. A task unpacks a block
of K of MAX_LANES rows into a core's caches, and multiplies it by all tokens, which are packed once per product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.build import address, load_vector, store_vector
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, scratch
from gpu_ops.kernels.common.cpu.codegen.numba_api import intrinsic, ir
from gpu_ops.kernels.common.cpu.codegen.rows import bfloat16_pairs
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES
from gpu_ops.kernels.common.cpu.dtype import all_bits, read_row, rounded
from gpu_ops.kernels.common.cpu.jit import (
    FLOATS,
    Kernel,
    device_function,
    generic,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.packing import (
    SUM_STEPS,
    elements,
    pack,
    packed,
    panel_bytes,
    panel_shape,
    steps,
)
from gpu_ops.kernels.common.cpu.parallel import claim, launch, thread_count
from gpu_ops.kernels.gemm.cpu.gemm import COLUMNS, Region, finish, products
from gpu_ops.kernels.gemm.cpu.linear import TOKENS, spans
from gpu_ops.kernels.gemm.cpu.swiglu_mlp_tile import sum_of
from gpu_ops.kernels.weights.cpu.packed_ir import LANES, UNIT, unpack_of
from gpu_ops.kernels.weights.packed_panels import BlockLayout

Array = np.ndarray[Any, Any]


def named(
    function: Callable[..., None], layout: BlockLayout, signature: Any, variants: tuple[str, ...] = FLOATS
) -> Kernel:
    """Kernel of a layout: its name tells the layouts apart in the cache."""
    function.__name__ = f"{function.__name__}_{layout.name}"
    return kernel(signature, variants)(function)


def read_as(format: str, dtype: str) -> str | None:
    """Type of the steps of K that products with x of this dtype read from panels; None if weights are rounded."""
    return packed(dtype) if dtype in ("float32", format) else None


@cache
def weights_of(layout: BlockLayout) -> Any:
    """Device function ``(panel, unpacked, panels, x, r, kk, k)``: panel of k steps of K from kk, of MAX_LANES rows
    from r, rounded to the dtype of x. ``unpacked``: float32 scratch for SUM_STEPS steps."""
    unpack = unpack_of(layout)

    @device_function
    def unpack_rows(panels, r, first, units, target, at, width):
        for lane in range(0, width, LANES):
            start = (r + lane) // LANES
            if start < len(panels):
                unpack(panels, start * panels.shape[1], first, units, target, at + lane, width)

    @generic
    def weights(panel, unpacked, panels, x, r, kk, k):
        def exact(panel, unpacked, panels, x, r, kk, k):
            unpack_rows(panels, r, kk // UNIT, k // UNIT, panel, 0, lanes(panel))

        def in_parts(panel, unpacked, panels, x, r, kk, k):
            width = lanes(panel)
            for i in range(0, k, SUM_STEPS):
                part = min(SUM_STEPS, k - i)
                first, units = elements(panel, kk + i) // UNIT, elements(panel, part) // UNIT
                unpack_rows(panels, r, first, units, unpacked, 0, width)
                factors(panel[i * width :], unpacked, x, part)

        dtype = {types.float32: "float32", types.uint16: "bfloat16", types.int16: "float16"}[x.dtype]
        return exact if read_as(layout.name, dtype) == "float32" else in_parts

    return weights


@intrinsic
def store_pairs(typingctx, panel, at, weights, first, second):
    """``MAX_LANES`` words of two bfloat16: float32 weights from ``first`` on, and in the high halves from ``second``
    on. A loop over elements took six times as long."""

    def codegen(context, b, sig, args):
        rows = [
            load_vector(
                b, address(context, b, weights, args[2], start), ir.VectorType(ir.FloatType(), MAX_LANES)
            )
            for start in args[3:]
        ]
        store_vector(b, bfloat16_pairs(b, *rows), address(context, b, panel, args[0], args[1]))
        return context.get_dummy_value()

    i = types.int64
    return types.void(panel, i, weights, i, i), codegen


@generic
def factors(panel, unpacked, x, k):
    """Panel of k steps from float32 weights, rounded to the dtype of x."""

    def pair(panel, unpacked, x, k):
        width = lanes(panel)
        for i in range(k):
            store_pairs(panel, i * width, unpacked, 2 * i * width, (2 * i + 1) * width)

    def round_each(panel, unpacked, x, k):
        row = read_row(x, (0,))
        for i in range(k * lanes(panel)):
            panel[i] = rounded(row, unpacked[i])

    return pair if panel.dtype == types.uint32 else round_each


def scratch_bytes(tokens: int, cols: int, dtype: str) -> int:
    """Scratch bytes of :func:`forward`."""
    step, n, nr = packed(dtype), min(tokens, TOKENS), 2 * MAX_LANES
    block = panel_shape(cols, n, step)[1][1] // nr
    tile = MAX_LANES * (min(COLUMNS, -(-n // nr) * nr) + SKEW + MAX_LANES)
    of_one = 4 * (tile + MAX_LANES * (block + 2 * SUM_STEPS))
    return panel_bytes(cols, n, step) + thread_count() * of_one


def forward(
    layout: BlockLayout, x: Array, panels: Array, addends: tuple[Array | None, Array | None], y: Array
) -> None:
    """Compute y (tokens, rows), with the bits of the unpacked matrix."""
    residual, row = addends
    absent = np.empty((0, 0), y.dtype)
    for t in spans(len(x)):
        operand = pack(x[t], packed(x.dtype.name), trans=True)
        parts = (y[t], absent if residual is None else residual[t], absent if row is None else row)
        out, *more = all_bits(*parts)
        tasks = -(-y.shape[1] // MAX_LANES)
        launch(
            _kernel(layout)[x.dtype],
            tasks,
            panels.view(operand.array.dtype) if _is_operand(layout, x.dtype.name) else operand.array[:0],
            operand.array,
            operand.blocks,
            operand.depth,
            panels,
            tuple(more),
            out,
        )
        del operand  # before the next one is made


def _is_operand(layout: BlockLayout, dtype: str) -> bool:
    """Whether panels are operands as they are stored."""
    stored = packed(dtype) == ("float32" if layout.bits == 32 else "uint32")
    return layout.name == dtype and stored and LANES == MAX_LANES


@device_function(refcount=True)
def region(panels, r, k0, k, k_all):
    """Bytes of k steps of K from k0 of the panels of MAX_LANES rows from r, to prefetch."""
    index, size = r // LANES, panels.shape[1]
    rows = max(0, min(MAX_LANES // LANES, len(panels) - index))
    steps_all = max(1, k_all)
    return Region(panels, index, rows, size * k0 // steps_all, size * k // steps_all)


@cache
def _kernel(layout: BlockLayout) -> Kernel:
    weights = weights_of(layout)

    def signature(t: str) -> tuple[types.Type, ...]:
        operand = write(packed(t), 2), types.int64, types.int64
        return write(packed(t), 2), *operand, read("uint8", 2), types.UniTuple(read(t, 2), 2), write(t, 2)

    def packed_gemm(state, n_tasks, words, x, blocks, depth, panels, addends, y):
        tokens, n = y.shape
        width, nr = lanes(x), 2 * lanes(x)
        across, block, k_all = x.shape[0] // blocks, x.shape[1] // nr, steps(x, depth)
        columns = min(COLUMNS, (tokens + nr - 1) // nr * nr)
        c, total = scratch(width, columns + SKEW, sum_of(x)), np.empty((0, 0), np.float32)
        panel = scratch(1, block * width, x[0, 0])[0]
        unpacked = scratch(1, 2 * SUM_STEPS * width, np.float32(0))[0]
        task = claim(state)
        while task < n_tasks:
            following = claim(state)
            r = task * width
            m = min(width, n - r)
            for first in range(0, tokens, columns):
                count = min(columns, tokens - first)
                for b in range(blocks):
                    k = min(block, k_all - b * block)
                    at = b * across + first // nr
                    if b + 1 < blocks:
                        ahead = region(panels, r, (b + 1) * block, block, k_all)
                    else:
                        ahead = region(panels, following * width, 0, block, k_all)
                    if len(words) > 0:
                        start = task * words.shape[1] + b * block * width
                        products(c, words, start, width, True, x, at, m, count, k, b > 0, ahead)
                    else:
                        weights(panel, unpacked, panels, y, r, b * block, k)
                        products(c, panel, 0, width, True, x, at, m, count, k, b > 0, ahead)
                finish(c, r, m, first, count, y, True, total, addends, False, True)
            task = following

    return named(packed_gemm, layout, signature, ("float32", "float16", "bfloat16"))
