"""Memory that the threads of a matrix product allocate: :mod:`.gemm`."""

from __future__ import annotations

import math

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.memory import SKEW
from gpu_ops.kernels.common.cpu.codegen.target import MAX_LANES, VECTOR_BYTES
from gpu_ops.kernels.common.cpu.packing import in_registers, panel_shape, room_shape
from gpu_ops.kernels.common.cpu.parallel import launch, most_threads
from gpu_ops.kernels.gemm.cpu.gemm import tile_shape


def private_bytes(m: int, n: int, depth: int, kind: str, *, trans_a: bool = False) -> int:
    """Scratch of all threads of a product, (m, depth) by (depth, n)."""
    rows, columns = tile_shape(m, n, kind)
    of_one = tile_bytes(rows, columns, kind) + room_bytes(kind, depth, n, rows, trans=trans_a)
    return most_threads(launch, -(-m // rows) * -(-n // columns)) * of_one


def tile_bytes(rows: int, columns: int, kind: str) -> int:
    """Bytes of a tile of sums, and of a few of its columns transposed into rows."""
    height, itemsize = -(-rows // MAX_LANES) * MAX_LANES, 8 if kind == "float64" else 4
    return height * ((columns + SKEW) * itemsize + VECTOR_BYTES)


def room_bytes(kind: str, depth: int, n: int, rows: int, *, trans: bool) -> int:
    """Bytes of packed rows of A, for a product with B of (depth, n)."""
    itemsize = np.dtype(kind).itemsize
    block = panel_shape(depth, n, kind)[1][1] // (2 * VECTOR_BYTES // itemsize)
    return math.prod(room_shape.py_func(in_registers(kind), rows, block, trans)) * itemsize
