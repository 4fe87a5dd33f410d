"""Launch of a gated activation on each backend: vector width, threads.

Arrays are (rows, cols) with unit stride on the last axis. The CUDA C++ kernels are ``swiglu.cu``, their readable
twins ``numba_cuda/swiglu.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_ops.kernels.common.arguments import (
    ACTIVATIONS,
    DTYPES,
    alignment,
    as_rows,
    power_of_two,
    row_stride,
    rows_of,
    side_by_side,
)
from gpu_ops.kernels.compiler.jit import CudaKernel, NumbaKernel, Variant
from gpu_ops.kernels.program import MAX_GRID, Builder, Spec, Tensor, lowers

__all__ = ["GatedConfig", "launch_numba", "launch_raw", "select_config", "variants"]

Pass = Literal["forward", "backward"]


_THREADS = 128

# Bytes that divide the address of every row | bytes per access, None: one element | accesses per thread and array.
# With two or three inputs, a thread has 4 to 12 loads in flight.
_PLANS = (
    # 64 bytes of a thread's inputs forward, 96 backward; 9 blocks of at most 56 registers on an SM
    (16, 16, 2),
    (1, None, 4),  # neighbours share sectors; as many registers as one vector of floats per array
)


@dataclass(frozen=True)
class GatedConfig:
    """Assignment of rows to threads, as drawn in ``swiglu.cu``."""

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
    threads_per_row = min(max(power_of_two(-(-cols // (vec * vecs))), vec), _THREADS)
    rows_per_block = _THREADS // threads_per_row
    groups = -(-rows // rows_per_block)
    grid = (-(-cols // (vec * vecs * threads_per_row)), min(groups, MAX_GRID[1]), -(-groups // MAX_GRID[1]))
    return GatedConfig(vec, vecs, threads_per_row, rows_per_block, grid)


@lowers("swiglu", "cpu")
def forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import swiglu

    half, activation = _columns(spec), spec["activation"]
    rows = math.prod(spec.tensor("gate").shape[:-1])

    def run_split(views: Mapping[str, Any]) -> None:
        gate, up, y = as_rows(views["gate"]), as_rows(views["up"]), as_rows(views["y"])
        swiglu.forward(gate, up, y, activation=activation)

    def run_packed(views: Mapping[str, Any]) -> None:
        gate = as_rows(views["gate"])
        swiglu.forward(gate[:, :half], gate[:, half:], as_rows(views["y"]), activation=activation)

    builder.call(run_packed if spec.get("up") is None else run_split, swiglu.config(rows, half))


@lowers("swiglu_backward", "cpu")
def backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import swiglu

    half, activation = _columns(spec), spec["activation"]
    rows = math.prod(spec.tensor("gate").shape[:-1])

    def run_split(views: Mapping[str, Any]) -> None:
        arrays = [as_rows(views[name]) for name in ("dy", "gate", "up", "dgate", "dup")]
        swiglu.backward(*arrays, activation=activation)

    def run_packed(views: Mapping[str, Any]) -> None:
        gate, dgate = as_rows(views["gate"]), as_rows(views["dgate"])
        swiglu.backward(
            as_rows(views["dy"]),
            gate[:, :half],
            gate[:, half:],
            dgate[:, :half],
            dgate[:, half:],
            activation=activation,
        )

    builder.call(run_packed if spec.get("up") is None else run_split, swiglu.config(rows, half))


@lowers("swiglu", "raw")
def _forward_raw(spec: Spec, builder: Builder) -> None:
    launch_raw(builder, "forward", spec["activation"], (*_pair(spec, "gate", "up"), rows_of(spec, "y")))


@lowers("swiglu", "numba")
def _forward_numba(spec: Spec, builder: Builder) -> None:
    launch_numba(builder, "forward", spec["activation"], (*_pair(spec, "gate", "up"), rows_of(spec, "y")))


@lowers("swiglu_backward", "raw")
def _backward_raw(spec: Spec, builder: Builder) -> None:
    launch_raw(builder, "backward", spec["activation"], _backward_arrays(spec))


@lowers("swiglu_backward", "numba")
def _backward_numba(spec: Spec, builder: Builder) -> None:
    launch_numba(builder, "backward", spec["activation"], _backward_arrays(spec))


def _backward_arrays(spec: Spec) -> tuple[Tensor, ...]:
    return (rows_of(spec, "dy"), *_pair(spec, "gate", "up"), *_pair(spec, "dgate", "dup"))


def _columns(spec: Spec) -> int:
    """Columns of the result."""
    cols = spec.tensor("gate").shape[-1]
    return cols // 2 if spec.get("up") is None else cols


def _pair(spec: Spec, gate: str, up: str) -> tuple[Tensor, Tensor]:
    """Gate and up as rows; the halves of a packed array."""
    first = rows_of(spec, gate)
    if spec.get(up) is not None:
        return first, rows_of(spec, up)
    half = _columns(spec)
    return first[:, :half], first[:, half:]


def launch_raw(builder: Builder, which: Pass, activation: str, arrays: tuple[Tensor, ...]) -> None:
    """Forward (gate, up, y): ``y = act(gate) * up``; y may be gate.

    Backward (dy, gate, up, dgate, dup): ``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``; they may be
    gate and up.
    """
    rows, cols = arrays[0].shape
    if rows * cols == 0:
        return
    if side_by_side(arrays):
        rows, cols = 1, rows * cols
    dtype = arrays[0].dtype
    config = select_config(rows, cols, dtype.itemsize, alignment=alignment(arrays, rows))
    args = (*arrays, np.int64(rows), np.int64(cols), *map(row_stride, arrays))
    block = (config.threads_per_row, config.rows_per_block, 1)
    builder.launch(_kernel(which, config, dtype.name, activation), config.grid, block, args)


def launch_numba(builder: Builder, which: Pass, activation: str, arrays: tuple[Tensor, ...]) -> None:
    """Launch the Numba twin."""
    rows, cols = arrays[0].shape
    if rows * cols == 0:
        return
    if side_by_side(arrays):
        rows, cols = 1, rows * cols
    kernel = _twin(which, arrays[0].dtype.name, activation)
    grid = (-(-cols // _TWIN_THREADS), min(rows, MAX_GRID[1]), 1)
    builder.launch(kernel, grid, (_TWIN_THREADS, 1, 1), tuple(a.reshape(rows, cols) for a in arrays))


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that :func:`launch_raw` launches."""
    for (dtype, itemsize), activation in itertools.product(
        (("float16", 2), ("bfloat16", 2), ("float32", 4)), ACTIVATIONS
    ):
        for aligned_to in (16, itemsize):
            config = select_config(1, 1 << 20, itemsize, alignment=aligned_to)
            for which in ("forward", "backward"):
                yield Variant(_kernel(which, config, dtype, activation), _THREADS)


_TWIN_THREADS = 256


def _kernel(which: Pass, config: GatedConfig, dtype: str, activation: str) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": DTYPES[dtype],
        "ACTIVATION": ACTIVATIONS[activation],
        "VEC": config.vec,
        "VECS": config.vecs,
    }
    return CudaKernel("gemm/swiglu", f"swiglu_{which}", tuple(defines.items()))


def _twin(which: Pass, dtype: str, activation: str) -> NumbaKernel:
    from gpu_ops.kernels.gemm.numba_cuda import swiglu as twins

    return twins.kernel(which, dtype, activation)
