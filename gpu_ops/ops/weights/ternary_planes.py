"""Product of two ternary matrices, and the choice of the chunks of w that it visits.

If few chunks of 128 weights of w have a nonzero, the others are skipped. The rules, in order:

1. on the CPU fewer than 16 rows of x       all chunks: with skipping, vector lanes are along the rows
2. more than a quarter of them occupied     all chunks
3. otherwise                                the occupied ones, from lists made once for each w
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpu_ops.core.arrays import Array, store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.device import HOST, CudaDevice
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.ternary_matrix import TernaryMatrix
from gpu_ops.kernels.program import Builder, Spec, lower_module, lowers

__all__ = ["bind_product", "take_matrix"]

lower_module("ternary_product", "gpu_ops.kernels.weights.ternary_planes")

_FEW_ROWS = 16
_MOST_OCCUPIED = 0.25


@dataclass(frozen=True)
class _Occupied:
    """Chunks with a nonzero in each row of a matrix: row r has chunks[starts[r] : starts[r + 1]]."""

    starts: Array
    chunks: Array
    share: float
    _on_cuda: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def skips(self) -> bool:
        """Whether so few chunks are occupied that the others are skipped."""
        return self.share <= _MOST_OCCUPIED

    @classmethod
    def of(cls, w: TernaryMatrix) -> _Occupied:
        """The chunks of ``w``, made at the first call with it and kept as long as it lives."""
        occupied = _made.get(w)
        if occupied is None:
            bits = np.unpackbits(w.chunk_bitmap(), axis=1, count=-(-w.shape[1] // 128), bitorder="little")
            rows, chunks = np.nonzero(bits)
            starts = np.searchsorted(rows, np.arange(len(bits) + 1))
            share = len(chunks) / max(bits.size, 1)
            occupied = _made.setdefault(w, cls(starts.astype(np.int64), chunks.astype(np.int32), share))
        return occupied

    def on(self, device: Any) -> tuple[Array, Array]:
        """Both arrays in memory that ``device`` reads."""
        if not isinstance(device, CudaDevice):
            return self.starts, self.chunks
        held = self._on_cuda.get(device.ordinal)
        if held is None:
            copies = device.upload(self.starts), device.upload(self.chunks)
            held = self._on_cuda.setdefault(device.ordinal, copies)
        return held


_made: WeakKeyDictionary[TernaryMatrix, _Occupied] = WeakKeyDictionary()


def take_matrix(call: Call, name: str, matrix: TernaryMatrix, *, row_scales: bool = False) -> None:
    """Read a ternary argument: the matrix itself, and its codes and scale in w2 for the kernels."""
    convert = _with_row_scales(call.op, name, matrix) if row_scales else matrix.to("w2")
    call.provide(name, None, name, _itself)
    call.provide(f"{name}.codes", convert.layouts[0], name, _codes)
    call.provide(f"{name}.scale", convert.layouts[1], name, _scale)
    for array in matrix.call_arrays:
        call.hold(name, array)


def _itself(w: TernaryMatrix, device: Any) -> TernaryMatrix:
    return w


def _codes(w: TernaryMatrix, device: Any) -> Array:
    return w.to("w2").on(device)[0]


def _scale(w: TernaryMatrix, device: Any) -> Array:
    return w.to("w2").on(device)[1]


def bind_product(call: Call, x: TernaryMatrix, w: TernaryMatrix, out: Any) -> Bound:
    """Bind ``y = x @ w.T`` in float32: integer sums, then the product of the scales."""
    (m, k), n = x.shape, w.shape[0]
    if k != w.shape[1]:
        raise ShapeError(
            f"{call.op}: x has shape {x.shape}, expected (M, K={w.shape[1]}) for w of shape {w.shape}"
        )
    for name, matrix in (("x", x), ("w", w)):
        take_matrix(call, name, matrix, row_scales=True)
    call.provide("w.occupied", None, "w", functools.partial(_occupied, rows=m))
    call.write("y", (m, n), np.float32, out, rows=True)
    call.option(k=k)
    return call.bind(
        lowered_as="ternary_product",
        problem=f"({m} x {k}) {x.format} x ({n} x {k}) {w.format}, both ternary",
        unsupported={"raw": f"K={k} is beyond 31 bits"} if k >> 31 else {},
        check_values=_check_values,
        flops=2.0 * m * n * k,
    )


def _occupied(w: TernaryMatrix, device: Any, *, rows: int) -> tuple[_Occupied, tuple[Array, Array]] | None:
    """The chunks of w, and both lists in memory that ``device`` reads; None if all chunks are visited."""
    if device is HOST and rows < _FEW_ROWS:
        return None
    occupied = _Occupied.of(w.to("w2"))
    return occupied, occupied.on(device)


def _check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hook that determines from the values of w whether chunks are skipped. Some formats hold scales as values."""
    for name in ("x", "w"):
        _with_row_scales("ternary_matmul", name, views[name])
    occupied = views.get("w.occupied")
    if occupied is None or backend == "reference":
        return {}, {}
    chunks, lists = occupied
    share = f"{chunks.share:.1%} of the chunks of w are occupied"
    if not chunks.skips:
        return {"share": share}, {}
    sizes = {"starts": len(chunks.starts), "chunks": len(chunks.chunks)}
    return {"share": share, **sizes}, dict(zip(("w.starts", "w.chunks"), lists, strict=True))


@lowers("ternary_product", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.weights.ternary import ternary_product

    def run(views: Mapping[str, Any]) -> None:
        a2, w2 = (views[name].to("w2") for name in ("x", "w"))
        store(views, ("y",), ternary_product(a2.trits(), a2.scale, w2.trits(), w2.scale))

    builder.call(run, "NumPy, exact integers")


def _with_row_scales(name: str, argument: str, matrix: TernaryMatrix) -> TernaryMatrix:
    """The matrix in w2, whose scale must be per tensor or row."""
    w2 = matrix.to("w2")
    if w2.scale.ndim == 2 and w2.scale.shape[1] > 1:
        raise OptionError(
            f"{name}: {argument} has a scale per group of {w2.group_size}; between two ternary matrices sums run "
            "over all of K, so scales are per tensor or row: ternary_quantize(..., group_size=-1), or pass x as an "
            "array, x.dequantize()"
        )
    return w2
