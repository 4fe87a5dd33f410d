"""Products with packed weights on the CPU, read from panels (:mod:`gpu_ops.kernels.weights.packed_panels`).

native    few tokens    the bits of ``linear`` with the unpacked matrix, in the order of linear_few.py: float32 is
                        unpacked in registers, 16-bit floats 128 steps of K at a time into L1 and rounded there, if
                        they are not stored so
          many tokens   packed_gemm.py; for tile registers and float64 BLOCK rows are unpacked into an array of x's
                        dtype, which ``linear`` multiplies
int8                    x is quantised per block; sums of a block are exact integers (packed_ir.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.gemm import copy_transposed, one_row_in_place, rows_in_place
from gpu_ops.kernels.common.cpu.codegen.memory import SKEW, lanes, round_up, scratch
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, MR
from gpu_ops.kernels.common.cpu.dtype import (
    aligned_empty,
    all_bits,
    bits,
    load,
    magnitude,
    of_magnitude,
    read_row,
    store,
    write_row,
)
from gpu_ops.kernels.common.cpu.jit import (
    FLOATS,
    Kernel,
    device_function,
    kernel,
    read,
    types,
    write,
)
from gpu_ops.kernels.common.cpu.packing import SUM_STEPS, in_registers, pack_a, packed, steps
from gpu_ops.kernels.common.cpu.parallel import TASKS_PER_THREAD, claim, launcher, thread_count
from gpu_ops.kernels.gemm.cpu import linear as dense
from gpu_ops.kernels.gemm.cpu.gemm import finish_row
from gpu_ops.kernels.gemm.cpu.linear_few import is_few
from gpu_ops.kernels.gemm.cpu.swiglu_mlp_tile import sum_of
from gpu_ops.kernels.recording import on_host
from gpu_ops.kernels.weights.cpu import packed_gemm
from gpu_ops.kernels.weights.cpu.packed_gemm import named, read_as, weights_of
from gpu_ops.kernels.weights.cpu.packed_ir import LANES, UNIT, dot_of, summed_steps, sums_of, unpack_of
from gpu_ops.kernels.weights.cpu.ternary_ir import describe
from gpu_ops.kernels.weights.packed_panels import BlockLayout, PackedShape

Array = np.ndarray[Any, Any]

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
BLOCK = 512  # rows that are unpacked at a time for many tokens
TOKENS = 4  # whose sums are in registers
MAX_GROUP = 8  # panels of a task
PANELS_AT_ONCE = 1 if LANES == 16 else 4  # of plain floats: sums of one panel of AVX2 wait for each other
MIN_ABSMAX = 2.0**-100  # of a block: smaller activations count as zeros, as 127 / absmax may overflow


Parts = Sequence[tuple[BlockLayout, int, Array]]
"""Layout, rows and panels of runs of rows."""
Addends = tuple["Array | None", "Array | None"]
"""An array like y, and one row."""


def config(tokens: int, dtype: str, formats: Sequence[tuple[int, str]], activations: str) -> str:
    """Description of what :func:`forward` does."""
    names = " and ".join(dict.fromkeys(name for _, name in formats))
    if activations == "int8":
        return (
            f"int8 activations, {describe()}: {LANES} rows x {1 if tokens == 1 else TOKENS} tokens, {names}"
        )
    if is_few(tokens, dtype) and dtype != "float64":
        if all(read_as(name, dtype) for _, name in formats):
            return f"{names} unpacked in registers"
        return f"{names} unpacked in L1, {SUM_STEPS} steps of K at a time"
    if _multiplies_panels(dtype):
        return f"{names} unpacked in L2, {MAX_LANES} rows at a time"
    return f"{names} unpacked {BLOCK} rows at a time, one matrix product each"


def scratch_bytes(tokens: int, shape: PackedShape, dtype: str, activations: str) -> int:
    """Scratch bytes of :func:`forward`."""
    rows, cols, parts, _ = shape
    if activations == "int8":
        kinds = {(layout.block, summed_steps(layout)) for _, layout in parts}
        return sum(_padded(tokens) * (cols + 4 * (cols // n) + 4 * (cols // s)) for n, s in kinds)
    if _multiplies_panels(dtype):
        return packed_gemm.scratch_bytes(tokens, cols, dtype)
    return (
        min(rows, BLOCK) * cols * _ITEMSIZE[dtype]
        + dense.scratch_bytes(tokens, min(rows, BLOCK), cols, dtype)[0]
    )


def backward_scratch_bytes(tokens: int, rows: int, cols: int, dtype: str) -> int:
    return rows * cols * _ITEMSIZE[dtype] + dense.scratch_bytes(tokens, rows, cols, dtype)[1]


def forward(x: Array, parts: Parts, addends: Addends, y: Array, activations: str) -> None:
    """Compute y (tokens, rows)."""
    rounded: dict[tuple[int, int], Rounded] = {}
    first = 0
    for layout, rows, panels in parts:
        part = slice(first, first + rows)
        more, out = (addends, y) if len(parts) == 1 else (_columns(addends, part), y[:, part])
        first += rows
        if activations == "native":
            linear(layout, x, panels, more, out)
            continue
        key = layout.block, summed_steps(layout)
        if key not in rounded:
            rounded[key] = quantized(x, *key)
        nanoseconds = panels.nbytes / 8 * max(1, len(x) / 4)
        _multiply(_int8_kernel(layout), panels, rounded[key], len(x), more, out, nanoseconds)


def _multiplies_panels(dtype: str) -> bool:
    """Whether micro-kernels multiply panels; tile registers need rows, and vectors of float64 are shorter."""
    return dtype != "float64" and not in_registers(packed(dtype))


def _columns(addends: Addends, part: slice) -> Addends:
    residual, row = addends
    return None if residual is None else residual[:, part], None if row is None else row[:, part]


def linear(layout: BlockLayout, x: Array, panels: Array, addends: Addends, y: Array) -> None:
    """Compute y with the bits of the unpacked matrix."""
    dtype = x.dtype.name
    if is_few(len(x), dtype) and dtype != "float64":
        _few(layout, x, panels, addends, y)
        return
    if _multiplies_panels(dtype):
        packed_gemm.forward(layout, x, panels, addends, y)
        return
    for first in range(0, y.shape[1], BLOCK):
        part = slice(first, min(first + BLOCK, y.shape[1]))
        weight = aligned_empty((part.stop - first, x.shape[1]), x.dtype)
        dequantize(layout, panels[first // LANES :], weight)
        residual, row = _columns(addends, part)
        dense.forward(x, weight, None if row is None else row[0], residual, y[:, part])


def backward_input(dy: Array, matrix: Any, dx: Array) -> None:
    """Compute dx = dy matrix."""
    dense.backward_input(dy, unpacked(matrix, dy.dtype), dx)


def unpacked(matrix: Any, dtype: np.dtype[Any]) -> Array:
    """The weights of a packed matrix, its columns in the order of the input features."""
    weight = aligned_empty(matrix.shape, dtype)
    return rows_of(matrix, 0, weight)


def rows_of(matrix: Any, start: int, weight: Array) -> Array:
    """The weights of rows from ``start`` on, in ``weight``, or in another array if columns change their places."""
    end, first = start + len(weight), 0
    for layout, rows, panels in matrix.panels(LANES):
        begin, stop = max(start, first), min(end, first + rows)
        if begin < stop:
            panel, skipped = divmod(begin - first, LANES)
            target = weight[begin - start : stop - start]
            if skipped:  # rows before the first one, in its panel
                head = aligned_empty((min(LANES, skipped + len(target)), weight.shape[1]), weight.dtype)
                dequantize(layout, panels[panel:], head)
                count, panel = len(head) - skipped, panel + 1
                target[:count], target = head[skipped:], target[count:]
            dequantize(layout, panels[panel:], target)
        first += rows
    return weight if matrix.columns is None else np.take(weight, np.argsort(matrix.columns), axis=1)


def dequantize(layout: BlockLayout, panels: Array, weight: Array) -> None:
    """Unpack the first rows into ``weight``."""
    run = launcher(weight.size / 4)
    run(_rows_kernel(layout)[weight.dtype], -(-len(weight) // MAX_LANES), panels, bits(weight))


def embedding(ids: Array, parts: Parts, scale: float, x: Array) -> None:
    """Compute the rows ``scale * weight[ids]``."""
    first, scale = 0, scale if x.dtype == np.float64 else float(np.float32(scale))
    for layout, rows, panels in parts:
        launcher(x.size)(
            _embedding_kernel(layout)[x.dtype], len(ids), ids, panels, first, rows, scale, bits(x)
        )
        first += rows


def _few(layout: BlockLayout, x: Array, panels: Array, addends: Addends, y: Array) -> None:
    stored = read_as(layout.name, x.dtype.name)
    if stored is not None:
        rows = np.zeros((_padded(len(x)), x.shape[1]), x.dtype if stored == "uint32" else stored)
        on_host(np.copyto, rows[: len(x)], x)
        tokens = (rows.view(stored),)
        _multiply(_sums_kernel(layout, stored), panels, tokens, len(x), addends, y, panels.nbytes / 4)
        return
    absent, step = np.empty((0, 0), y.dtype), np.zeros((1, 1), packed(x.dtype.name))
    a, b, y_bits, x_bits = all_bits(*(absent if array is None else array for array in addends), y, x)
    group = 4 if len(x) == 1 else 2
    tasks = -(-y.shape[1] // (group * MAX_LANES))
    run = launcher(panels.nbytes / 4)
    run(_few_kernel(layout)[x.dtype], tasks, group, x_bits, panels, step, (a, b), y_bits)


def _padded(tokens: int) -> int:
    """Tokens that the micro-kernels read."""
    return 1 if tokens == 1 else -(-tokens // TOKENS) * TOKENS


def _multiply(
    kernel: Kernel,
    panels: Array,
    x: tuple[Array, ...],
    tokens: int,
    addends: Addends,
    y: Array,
    nanoseconds: float,
) -> None:
    """Run a kernel of :func:`_products` on groups of panels."""
    absent = np.empty((0, 0), y.dtype)
    a, b, y_bits = all_bits(*(absent if array is None else array for array in addends), y)
    group = max(1, min(MAX_GROUP, len(panels) // (thread_count() * TASKS_PER_THREAD)))
    run = launcher(nanoseconds)
    run(kernel[y.dtype], -(-len(panels) // group), group, tokens, panels, x, (a, b), y_bits)


@cache
def _few_kernel(layout: BlockLayout) -> Kernel:
    weights = weights_of(layout)

    def signature(t: str) -> tuple[types.Type, ...]:
        addends = types.UniTuple(read(t, 2), 2)
        return types.int64, read(t, 2), read("uint8", 2), write(packed(t), 2), addends, write(t, 2)

    def packed_few(state, n_tasks, group, x, panels, step, addends, y):
        tokens, n = y.shape
        width, k_all = lanes(step), steps(step, x.shape[1])
        rows = scratch(MR, round_up(k_all, MAX_LANES) + SKEW, step[0, 0])
        pack_a(rows, x, False, 0, tokens, 0, k_all)
        unpacked = scratch(1, 2 * SUM_STEPS * width, np.float32(0))[0]
        panel = scratch(1, SUM_STEPS * width, step[0, 0])[0]
        c = scratch(MR, width, sum_of(step))
        ldx = rows.shape[1]
        task = claim(state)
        while task < n_tasks:
            for r in range(task * group * width, min(n, (task + 1) * group * width), width):
                for kk in range(0, max(1, k_all), SUM_STEPS):
                    k = min(SUM_STEPS, k_all - kk)
                    weights(panel, unpacked, panels, x, r, kk, k)
                    if tokens == 1:
                        one_row_in_place(c, 0, width, rows, kk, ldx, panel, 0, 0, 0, panel, 0, k, kk > 0)
                    else:
                        rows_in_place(c, 0, width, rows, kk, ldx, panel, 0, 0, 0, panel, 0, k, kk > 0)
                for t in range(tokens):
                    finish_row(c[t], t, r, min(width, n - r), y, c, addends, False, True)
            task = claim(state)

    return named(packed_few, layout, signature, ("float16", "bfloat16"))


@cache
def _rows_kernel(layout: BlockLayout) -> Kernel:
    unpack = unpack_of(layout)

    def packed_rows(state, n_tasks, panels, weight):
        n, k_all = weight.shape
        width = MAX_LANES
        unpacked = scratch(1, SUM_STEPS * width, np.float32(0))[0]
        transposed = scratch(width, SUM_STEPS + SKEW, np.float32(0))
        task = claim(state)
        while task < n_tasks:
            r = task * width
            for kk in range(0, k_all, SUM_STEPS):
                k = min(SUM_STEPS, k_all - kk)
                for lane in range(0, width, LANES):
                    if r + lane < n:
                        start = (r + lane) // LANES * panels.shape[1]
                        unpack(panels, start, kk // UNIT, k // UNIT, unpacked, lane, width)
                for i in range(0, k, width):
                    copy_transposed(transposed, i, transposed.shape[1], unpacked, i * width, width)
                for j in range(min(width, n - r)):
                    row = write_row(weight, (r + j,))
                    for i in range(k):
                        store(row, kk + i, transposed[j, i])
            task = claim(state)

    return named(packed_rows, layout, lambda t: (read("uint8", 2), write(t, 2)))


@cache
def _embedding_kernel(layout: BlockLayout) -> Kernel:
    unpack = unpack_of(layout)

    def signature(t: str) -> tuple[types.Type, ...]:
        return (
            *(read("int64", 1), read("uint8", 2), types.int64, types.int64, types.float64),
            write(t, 2),
        )

    def packed_embedding(state, n_tasks, ids, panels, first, rows, scale, x):
        """Rows of ids from ``first`` on; those of other parts are left alone."""
        unpacked = scratch(1, SUM_STEPS * LANES, np.float32(0))[0]
        task = claim(state)
        while task < n_tasks:
            r = ids[task] - first
            if (r >= 0) & (r < rows):
                target = write_row(x, (task,))
                for kk in range(0, x.shape[1], SUM_STEPS):
                    k = min(SUM_STEPS, x.shape[1] - kk)
                    unpack(panels, r // LANES * panels.shape[1], kk // UNIT, k // UNIT, unpacked, 0, LANES)
                    for i in range(k):
                        store(target, kk + i, np.float64(unpacked[i * LANES + r % LANES]) * scale)
            task = claim(state)

    return named(packed_embedding, layout, signature)


Rounded = tuple[Array, Array, Array]
"""int8 tokens, their scales per block, and sums of some of their steps."""


def quantized(x: Array, block: int, summed: int) -> Rounded:
    """x as int8, with tokens of zeros up to what the micro-kernels read."""
    count, cols = _padded(len(x)), x.shape[1]
    q = aligned_empty((count, cols), np.dtype(np.int8))
    scales = aligned_empty((count, cols // block), np.dtype(np.float32))
    sums = aligned_empty((count, cols // summed), np.dtype(np.int32))
    launcher(x.size / 2)(packed_quantize[x.dtype], count, bits(x), block, summed, q, scales, sums)
    return q, scales, sums


@kernel(
    lambda t: (
        *(read(t, 2), types.int64, types.int64, write("int8", 2), write("float32", 2), write("int32", 2)),
    ),
    fastmath=frozenset(),
)
def packed_quantize(state, n_tasks, x, block, summed, q, scales, sums):
    """q = rint(x * 127 / absmax) per block; scales = absmax / 127, NaN if a block is not finite; sums of q."""
    values = np.empty(block, np.float32)
    t = claim(state)
    while t < n_tasks:
        codes, block_scales, part_sums = write_row(q, (t,)), write_row(scales, (t,)), write_row(sums, (t,))
        if t < len(x):
            row = read_row(x, (t,))
            for i in range(len(block_scales)):
                first = i * block
                largest = magnitude(np.float32(0))
                for j in range(block):
                    values[j] = np.float32(load(row, first + j))
                    largest = max(largest, magnitude(values[j]))
                absmax = of_magnitude(largest)
                factor, scale = np.float32(0), np.float32(0)
                if not absmax < np.inf:
                    scale = np.float32(np.nan)
                elif absmax >= np.float32(MIN_ABSMAX):
                    scale, factor = absmax / np.float32(127), np.float32(127) / absmax
                block_scales[i] = scale
                if factor > 0:
                    for j in range(block):
                        codes[first + j] = np.int8(np.int32(np.rint(values[j] * factor)))
                else:
                    for j in range(block):
                        codes[first + j] = 0
            for i in range(len(part_sums)):
                total = np.int32(0)
                for j in range(summed):
                    total += np.int32(codes[i * summed + j])
                part_sums[i] = total
        else:  # tokens that fill up a tile
            codes[:] = 0
            block_scales[:] = 0
            part_sums[:] = 0
        t = claim(state)


Micro = Callable[..., None]
"""Compiled function ``(panels, start, x, t, c, at)``: products of a panel and tokens from ``t`` on."""


@cache
def _sums_kernel(layout: BlockLayout, step: str) -> Kernel:
    per_unit = UNIT // 2 if step == "uint32" else UNIT
    dtypes = "float32", *((layout.name,) if layout.bits == 16 else ())
    variants = tuple(dtype for dtype in dtypes if packed(dtype) == step)

    def micro(tokens: int, count: int) -> Micro:
        sums = sums_of(layout, tokens, count)

        @device_function
        def multiply(panels, start, x, t, c, at):
            rows = x[0]
            sums(panels, start, rows.shape[1] // per_unit, rows, t * rows.shape[1], c, at)

        return multiply

    at_once = PANELS_AT_ONCE if layout.is_plain else 1
    return _products(f"packed_sums_{step}", layout, micro, (read(step, 2),), variants, at_once)


@cache
def _int8_kernel(layout: BlockLayout) -> Kernel:
    def micro(tokens: int, count: int) -> Micro:
        dot = dot_of(layout, tokens)

        @device_function
        def multiply(panels, start, x, t, c, at):
            q, scales, sums = x
            blocks = scales.shape[1]
            q0, sums0 = t * q.shape[1], t * sums.shape[1]
            dot(panels, start, blocks, q, q0, scales, t * blocks, sums, sums0, c, at)

        return multiply

    inputs = read("int8", 2), read("float32", 2), read("int32", 2)
    return _products("packed_int8", layout, micro, inputs, FLOATS)


def _products(
    name: str,
    layout: BlockLayout,
    micro: Callable[[int, int], Micro],
    inputs: tuple[types.Type, ...],
    variants: tuple[str, ...],
    at_once: int = 1,
) -> Kernel:
    """Kernel of products of groups of panels, ``at_once`` of them with one token. ``inputs``: types of the tokens'
    arrays; ``micro``: of a number of tokens and of panels."""
    one_token, some_tokens = micro(1, 1), micro(TOKENS, 1)
    several_panels = one_token if at_once == 1 else micro(1, at_once)

    def signature(t: str) -> tuple[types.Type, ...]:
        addends = types.UniTuple(read(t, 2), 2)
        return types.int64, types.int64, read("uint8", 2), types.Tuple(inputs), addends, write(t, 2)

    def products(state, n_tasks, group, tokens, panels, x, addends, y):
        n, stride = y.shape[1], panels.shape[1]
        c = scratch(TOKENS, group * LANES, np.float32(0))
        task = claim(state)
        while task < n_tasks:
            first = task * group
            count, r = min(group, len(panels) - first), first * LANES
            for t in range(0, tokens, 1 if tokens == 1 else TOKENS):
                p = 0
                while p < count:
                    start, done = (first + p) * stride, 1
                    if tokens > 1:
                        some_tokens(panels, start, x, t, c, p * LANES)
                    elif count - p >= at_once:
                        several_panels(panels, start, x, t, c, p * LANES)
                        done = at_once
                    else:
                        one_token(panels, start, x, t, c, p * LANES)
                    p += done
                for i in range(min(TOKENS, tokens - t)):
                    finish_row(c[i], t + i, r, min(count * LANES, n - r), y, c, addends, False, True)
            task = claim(state)

    products.__name__ = name
    return named(products, layout, signature, variants)
