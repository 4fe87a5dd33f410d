"""Packing and unpacking trits on the GPU: the launches, for the formats whose layout is a line of units per row.

trits (N, K) int8 have unit stride on the last axis; packed is contiguous. What is wrong with the input is told by
flags, one per block; the CUDA C++ kernels are ``cuda/ternary_pack.cu``, their readable twins
``numba_cuda/ternary_pack.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops.kernels.arguments import alignment, row_stride
from gpu_ops.kernels.jit import CudaKernel, Variant

__all__ = ["LAYOUTS", "pack", "unpack", "variants"]


@dataclass(frozen=True)
class Layout:
    """How rows are lines of units, as ``cuda/ternary_pack.cu`` draws it."""

    macro: str
    columns: int  # of a unit
    packed_bytes: int  # of an access to packed
    rows: int = 1  # of a line
    pad_units: int = 1  # lines are whole multiples of so many units


LAYOUTS = {
    "w2": Layout("kW2", 16, 4, pad_units=4),
    "hf_bitnet": Layout("kHfBitnet", 16, 16, rows=4),
    "planes": Layout("kPlanes", 16, 2, pad_units=2),
    "base3": Layout("kBase3", 5, 1),
}

_THREADS = 256
_BLOCKS_PER_SM = 16


def pack(device: Any, backend: str, trits: Any, packed: Any, format: str) -> Any:
    """Fill ``packed``; flags that are not 0 where a trit is none."""
    return _launch(device, backend, "pack", trits, packed, format)


def unpack(device: Any, backend: str, packed: Any, trits: Any, format: str) -> Any:
    """Fill ``trits``; flags that are not 0 where ``packed`` is what no encoder writes."""
    return _launch(device, backend, "unpack", trits, packed, format)


def variants(arch: str) -> Iterator[Variant]:
    """Every CUDA C++ kernel that ``pack`` and ``unpack`` launch."""
    for format in LAYOUTS:
        for which in ("pack", "unpack"):
            yield Variant(_kernel(which, format), _THREADS)


# Shape of ternary_pack.cu
_SHAPE = np.dtype(
    [(name, np.int64) for name in ("stride", "pitch")]
    + [(name, np.int32) for name in ("lines", "n", "k", "units", "whole", "packed_whole")]
)


def _launch(device: Any, backend: str, which: str, trits: Any, packed: Any, format: str) -> Any:
    n, k = trits.shape
    layout = LAYOUTS[format]
    lines = -(-n // layout.rows)
    pitch = packed.size // lines
    blocks = min(lines, _BLOCKS_PER_SM * device.sms)
    flags = device.empty((blocks,), np.int32, "flags")
    packed = packed.reshape(-1)
    arrays = (trits, packed) if which == "pack" else (packed, trits)
    if backend == "numba":
        from gpu_ops.kernels.numba_cuda import ternary_pack as twins

        kernel = (twins.pack_kernel if which == "pack" else twins.unpack_kernel)(format)
        args = (*arrays, flags, np.int64(lines), np.int64(pitch))
        device.launch(kernel, (blocks, 1, 1), (twins.THREADS, 1, 1), args)
        return flags
    shape = np.zeros((), _SHAPE)
    shape["stride"], shape["pitch"], shape["lines"] = row_stride(trits), pitch, lines
    shape["n"], shape["k"] = n, k
    unit_columns = layout.columns * layout.pad_units
    shape["units"] = -(-k // unit_columns) * layout.pad_units
    shape["whole"] = alignment((trits,), n) == 16
    whole_lines = pitch % layout.packed_bytes == 0 or lines == 1
    shape["packed_whole"] = whole_lines and alignment((packed,), 1) % layout.packed_bytes == 0
    device.launch(_kernel(which, format), (blocks, 1, 1), (_THREADS, 1, 1), (*arrays, flags, shape[()]))
    return flags


def _kernel(which: str, format: str) -> CudaKernel:
    return CudaKernel("ternary_pack", f"ternary_{which}", (("FORMAT", LAYOUTS[format].macro),))
