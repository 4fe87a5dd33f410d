"""This CPU's peak rates, measured with our own compiled loops on the threads that gpu_ops uses.

==============  ==================================================================================================
multiply_add    the GEMM micro-kernel with strides of 0: its data fits registers and one cache line
dot_bfloat16    the same with bfloat16 pairs, where the CPU multiplies them. Tile registers (AMX) get random numbers
                from the L1 cache, because a CPU multiplies zeros at a higher clock
read            eight vectors at a time into eight accumulators
copy            with plain and with non-temporal stores; the latter do not read the lines that they overwrite
==============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.common.cpu.codegen.build import address, load_vector, number, store_vector
from gpu_ops.kernels.common.cpu.codegen.gemm import gemm_columns, gemm_rows
from gpu_ops.kernels.common.cpu.codegen.memory import lanes
from gpu_ops.kernels.common.cpu.codegen.target import DOT_BFLOAT16, MR, TILES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.codegen.tiles import TILE, close_tiles, open_tiles
from gpu_ops.kernels.common.cpu.dtype import aligned_empty
from gpu_ops.kernels.common.cpu.parallel import claim, launch, thread_count
from perf.stats import best

Array = np.ndarray[Any, Any]

STEPS, TASKS = 1 << 15, 32  # micro-kernel steps per task (about 70 us), tasks per thread
TILE_STEPS = 128  # both operands fit the L1 cache
VECTORS = 8  # in flight: a block
WORDS = VECTORS * VECTOR_BYTES // 8  # 8-byte words per block
CHUNK = 1 << 14  # blocks per task: 8 MiB


@dataclass(frozen=True)
class Peaks:
    """Bytes per second (copy counts reads and writes) and float operations per second."""

    multiply_add: float
    dot_bfloat16: float | None
    read: float
    copy: float
    copy_non_temporal: float


def measure(buffer: int, repetitions: int) -> Peaks:
    """Measure reading ``buffer`` bytes, and copying one half of them onto the other."""

    def rate(loop: Loop) -> float:
        return loop.amount / best(loop.call, repetitions)

    return Peaks(
        rate(arithmetic(np.dtype(np.float32))),
        rate(arithmetic(np.dtype(np.uint32))) if DOT_BFLOAT16 else None,
        rate(reading(buffer)),
        rate(copying(buffer, non_temporal=False)),
        rate(copying(buffer, non_temporal=True)),
    )


@dataclass(frozen=True)
class Loop:
    """A call with its operations or bytes."""

    call: Callable[[], None]
    amount: float


@cache
def pacemaker(kind: str, buffer: int, *, half: bool = False) -> Loop:
    """Loop that runs at the limit ``kind`` (limits.py), to be timed in turns with a case."""
    if kind == "matmul":
        return arithmetic(np.dtype(np.uint32 if half and DOT_BFLOAT16 else np.float32))
    return reading(buffer) if kind == "read" else copying(buffer, non_temporal=True)


def arithmetic(dtype: np.dtype[Any]) -> Loop:
    result, n_tasks = np.zeros(1, np.float32), TASKS * thread_count()
    per_step = 4 if dtype == np.uint32 else 2
    if TILES and dtype == np.uint32:
        numbers = np.random.default_rng(0).standard_normal((2 * TILE, 2 * TILE_STEPS), np.float32)
        a = aligned_empty((2 * TILE, TILE_STEPS), dtype)
        a.view(np.uint16)[:] = numbers.view(np.uint32) >> 16  # as bfloat16
        operations = n_tasks * STEPS * (2 * TILE) ** 2 * per_step
        return Loop(lambda: launch(multiply_tiles, n_tasks, a, a.reshape(TILE_STEPS, -1), result), operations)
    operand = np.zeros(2 * VECTOR_BYTES, dtype)
    operations = n_tasks * STEPS * MR * 2 * (VECTOR_BYTES // 4) * per_step
    return Loop(lambda: launch(multiply, n_tasks, operand, result), operations)


def reading(buffer: int) -> Loop:
    data, seen = words(buffer), np.zeros(1, np.uint64)
    return Loop(lambda: launch(read, tasks(data), data, seen), data.nbytes)


def copying(buffer: int, *, non_temporal: bool) -> Loop:
    """Loop that copies one half of the buffer onto the other."""
    source, target = np.split(words(buffer), 2)
    return Loop(lambda: launch(copy, tasks(source), target, source, non_temporal), 2 * source.nbytes)


@cache
def words(buffer: int) -> Array:
    count = buffer // (16 * WORDS) * 2 * WORDS
    data = np.ones(count + VECTOR_BYTES // 8, np.uint64)
    return data[-data.ctypes.data % VECTOR_BYTES // 8 :][:count]  # aligned to a vector


def tasks(data: Array) -> int:
    return -(-data.size // (WORDS * CHUNK))


@njit(nogil=True)
def multiply(state, n_tasks, operand, result):
    c = np.empty((MR, 2 * lanes(result)), np.float32)
    while claim(state) < n_tasks:
        gemm_columns(c, 0, c.shape[1], operand, 0, 0, operand, 0, 0, MR, c.shape[1], STEPS, False)
        result[0] = c[0, 0]


@njit(nogil=True)
def multiply_tiles(state, n_tasks, a, b, result):
    (m, k), n, c = a.shape, b.shape[1], np.zeros((a.shape[0], b.shape[1]), np.float32)
    open_tiles()
    while claim(state) < n_tasks:
        for _ in range(STEPS // k):
            gemm_rows(c, 0, n, a, 0, k, b, 0, n, m, n, k, True)
        result[0] = c[0, 0]
    close_tiles()


@njit(nogil=True)
def read(state, n_tasks, data, seen):
    task = claim(state)
    while task < n_tasks:
        seen[0] |= read_blocks(data, task * CHUNK * WORDS, min(CHUNK, data.size // WORDS - task * CHUNK))
        task = claim(state)


@njit(nogil=True)
def copy(state, n_tasks, target, source, non_temporal):
    task = claim(state)
    while task < n_tasks:
        start, blocks = task * CHUNK * WORDS, min(CHUNK, source.size // WORDS - task * CHUNK)
        if non_temporal:
            stream_blocks(target, source, start, blocks)
        else:
            copy_blocks(target, source, start, blocks)
        task = claim(state)


_LANES = VECTOR_BYTES // 8
_VECTOR = ir.VectorType(ir.IntType(64), _LANES)


@intrinsic
def read_blocks(typingctx, data, start, blocks):
    """Read blocks of VECTORS vectors. Returns bits of the data, or the compiler would drop the loop."""

    def codegen(context, b, sig, args):
        base = address(context, b, sig.args[0], args[0], args[1])
        sums = [cgutils.alloca_once_value(b, ir.Constant(_VECTOR, [0] * _LANES)) for _ in range(VECTORS)]
        with cgutils.for_range(b, args[2]) as loop:
            block = b.gep(base, [b.mul(loop.index, number(WORDS))])
            for i, total in enumerate(sums):
                value = load_vector(b, b.gep(block, [number(i * _LANES)]), _VECTOR)
                b.store(b.or_(b.load(total), value), total)
        total = b.load(sums[0])
        for more in sums[1:]:
            total = b.or_(total, b.load(more))
        return b.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.uint64(data, types.int64, types.int64), codegen


def _copy(non_temporal: bool) -> Any:
    @intrinsic
    def blocks_of(typingctx, target, source, start, blocks):
        def codegen(context, b, sig, args):
            destination, base = (address(context, b, sig.args[i], args[i], args[2]) for i in range(2))
            with cgutils.for_range(b, args[3]) as loop:
                at = b.mul(loop.index, number(WORDS))
                for i in range(VECTORS):
                    offset = b.add(at, number(i * _LANES))
                    value = load_vector(b, b.gep(base, [offset]), _VECTOR)
                    if non_temporal:
                        pointer = b.bitcast(b.gep(destination, [offset]), _VECTOR.as_pointer())
                        store = b.store(value, pointer, align=VECTOR_BYTES)
                        store.set_metadata("nontemporal", b.module.add_metadata([ir.IntType(32)(1)]))
                    else:
                        store_vector(b, value, b.gep(destination, [offset]))
            return context.get_dummy_value()

        return types.void(target, source, types.int64, types.int64), codegen

    return blocks_of


copy_blocks, stream_blocks = _copy(False), _copy(True)
