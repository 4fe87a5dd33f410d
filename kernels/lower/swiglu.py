"""Gated activations on the GPU: which accesses, how many threads, and the launch. ``select_config`` needs no GPU.

Arrays are (rows, cols) with unit stride on the last axis. The CUDA C++ kernels are ``cuda/swiglu.cu``, their readable
twins ``numba_cuda/swiglu.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.lower.arguments import ACTIVATIONS, DTYPES, alignment, row_stride, side_by_side

__all__ = ["GatedConfig", "backward", "forward", "select_config", "variants"]

Pass = Literal["forward", "backward"]


_THREADS = 128
_MAX_GRID_Y = 65535

# Bytes that divide the address of every row | bytes per access, None: one element | accesses per thread and array.
# With two inputs or three, a thread has 4 to 12 loads on their way.
_PLANS = (
    # 64 bytes of a thread's inputs forward, 96 backward; 9 blocks of at most 56 registers on an SM
    (16, 16, 2),
    (1, None, 4),  # neighbours share sectors; as many registers as one vector of floats per array
)


@dataclass(frozen=True)
class GatedConfig:
    """How rows are laid out on threads, as ``cuda/swiglu.cu`` draws it."""

    vec: int  # elements per access
    vecs: int  # accesses per thread and array
    threads_per_row: int
    rows_per_block: int
    grid: tuple[int, int, int]  # chunks of a row; groups of rows, on two axes


def select_config(rows: int, cols: int, itemsize: int, *, alignment: int) -> GatedConfig:
    """The kernel for a problem; ``alignment``: bytes that divide every address and row stride."""
    width, vecs = next((width, vecs) for least, width, vecs in _PLANS if alignment >= least)
    vec = width // itemsize if width else 1
    # A power of two that covers a short row; at least vec, for the elements at the end that fill no vector.
    threads_per_row = min(max(_power_of_two(-(-cols // (vec * vecs))), vec), _THREADS)
    rows_per_block = _THREADS // threads_per_row
    groups = -(-rows // rows_per_block)
    grid = (-(-cols // (vec * vecs * threads_per_row)), min(groups, _MAX_GRID_Y), -(-groups // _MAX_GRID_Y))
    return GatedConfig(vec, vecs, threads_per_row, rows_per_block, grid)


def forward(device: Any, backend: str, gate: Any, up: Any, y: Any, *, activation: str) -> None:
    """``y = act(gate) * up``; ``y`` may be ``gate``."""
    _launch(device, backend, "forward", activation, (gate, up, y))


def backward(
    device: Any, backend: str, dy: Any, gate: Any, up: Any, dgate: Any, dup: Any, *, activation: str
) -> None:
    """``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``; they may be ``gate`` and ``up``."""
    _launch(device, backend, "backward", activation, (dy, gate, up, dgate, dup))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``forward`` and ``backward`` launch."""
    for (dtype, itemsize), activation in itertools.product(
        (("float16", 2), ("bfloat16", 2), ("float32", 4)), ACTIVATIONS
    ):
        for aligned_to in (16, itemsize):
            config = select_config(1, 1 << 20, itemsize, alignment=aligned_to)
            for which in ("forward", "backward"):
                yield Variant(_kernel(which, config, dtype, activation), _THREADS)


def _launch(device: Any, backend: str, which: Pass, activation: str, arrays: tuple[Any, ...]) -> None:
    rows, cols = arrays[0].shape
    if rows * cols == 0:
        return
    dtype = arrays[0].dtype
    if side_by_side(arrays):
        rows, cols = 1, rows * cols
    if backend == "numba":
        arrays = tuple(a.reshape(rows, cols) for a in arrays)
        grid = (-(-cols // _TWIN_THREADS), min(rows, _MAX_GRID_Y), 1)
        device.launch(_twin(which, dtype.name, activation), grid, (_TWIN_THREADS, 1, 1), arrays)
        return
    config = select_config(rows, cols, dtype.itemsize, alignment=alignment(arrays, rows))
    args = (*arrays, np.int64(rows), np.int64(cols), *map(row_stride, arrays))
    block = (config.threads_per_row, config.rows_per_block, 1)
    device.launch(_kernel(which, config, dtype.name, activation), config.grid, block, args)


_TWIN_THREADS = 256


def _kernel(which: Pass, config: GatedConfig, dtype: str, activation: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype],
        "ACTIVATION": ACTIVATIONS[activation],
        "VEC": config.vec,
        "VECS": config.vecs,
    }
    return CudaKernel("swiglu", f"swiglu_{which}", tuple(defines.items()))


def _twin(which: Pass, dtype: str, activation: str) -> NumbaKernel:
    from gpu_ops.kernels.numba_cuda import swiglu as twins

    return twins.kernel(which, dtype, activation)


def _power_of_two(n: int) -> int:
    """The least that is not below ``n``."""
    return 1 << (n - 1).bit_length()
