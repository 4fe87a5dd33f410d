"""Ternary x ternary on the GPU: host functions of ``cuda/ternary_planes.cu`` and ``numba_cuda/ternary_planes.py``.

Codes (rows, bytes) are w2, scales (1 or rows, 1) float32, both contiguous; y (m, n) float32 has unit stride on the
last axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.lower.arguments import row_stride

__all__ = ["matmul", "variants"]

_ROWS = (1, 4)  # of x that a warp meets with a row of w
_THREADS = 256


def matmul(
    device: Any,
    backend: str,
    a: Any,
    a_scale: Any,
    w: Any,
    w_scale: Any,
    k: int,
    occupied: tuple[Any, Any] | None,
    y: Any,
) -> None:
    """``y = (a_scale * a) @ (w_scale * w).T``; ``occupied``: the chunks of w to visit, None for all.

    y is left alone where an axis is empty.
    """
    m, n = y.shape
    if 0 in (m, n, k):
        return
    skip = occupied is not None
    # stand-ins: no kernel without skipping touches them
    starts, chunks = occupied or (device.empty((1,), np.int64), device.empty((1,), np.int32))
    if backend == "numba":
        from gpu_ops.kernels.numba_cuda import ternary_planes as twins

        grid = (-(-n // twins.TILE), min(-(-m // twins.TILE), 65535), 1)
        words = (a.view(np.uint64), a_scale, w.view(np.uint64), w_scale)
        device.launch(
            twins.matmul_kernel(skip), grid, (twins.TILE, twins.TILE, 1), (*words, starts, chunks, y)
        )
        return
    rows = _ROWS[0] if m == 1 else _ROWS[1]
    sizes = (row_stride(y), *map(np.int32, (a.shape[1], m, n, a_scale.shape[0] > 1, w_scale.shape[0] > 1)))
    grid = (-(-n // (_THREADS // 32)) * -(-m // rows), 1, 1)
    args = (a, a_scale, w, w_scale, starts, chunks, y, *sizes)
    device.launch(_kernel(rows, skip), grid, (_THREADS, 1, 1), args)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``matmul`` launches."""
    for rows in _ROWS:
        for skip in (False, True):
            yield Variant(_kernel(rows, skip), _THREADS)


def _kernel(rows: int, skip: bool) -> CudaKernel:
    return CudaKernel("ternary_planes", "ternary_planes", (("ROWS", rows), ("SKIP", int(skip))))
