"""The product of two ternary matrices: which chunks of w are visited, and how :func:`ternary_matmul` plans it.

Where few chunks of 128 weights of w hold anything, the others are skipped. The rule, in order:

1. on the CPU fewer than 16 rows of x       all chunks: skipping has its vector lanes along them
2. more than a quarter of them occupied     all chunks
3. else                                     the occupied ones, from lists made once for each w
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpu_ops.core.arrays import Array, Arrays, as_rows
from gpu_ops.core.device import CudaDevice, Device, EmulatorDevice, current_device, host_function
from gpu_ops.core.dispatch import Plan, choose
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.formats.ternary_matrix import TernaryMatrix

__all__ = ["plan_product"]

_FEW_ROWS = 16
_MOST_OCCUPIED = 0.25


@dataclass(frozen=True)
class _Occupied:
    """The chunks of each row of a matrix that hold a nonzero: row r has chunks[starts[r] : starts[r + 1]]."""

    starts: Array
    chunks: Array
    share: float
    _on_cuda: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def skips(self) -> bool:
        """Whether so few that the others are skipped."""
        return self.share <= _MOST_OCCUPIED

    @classmethod
    def of(cls, w: TernaryMatrix) -> _Occupied:
        """Made at the first call with ``w``, and kept as long as it lives."""
        found = _made.get(w)
        if found is None:
            bits = np.unpackbits(w.chunk_bitmap(), axis=1, count=-(-w.shape[1] // 128), bitorder="little")
            rows, chunks = np.nonzero(bits)
            starts = np.searchsorted(rows, np.arange(len(bits) + 1))
            share = len(chunks) / max(bits.size, 1)
            found = _made.setdefault(w, cls(starts.astype(np.int64), chunks.astype(np.int32), share))
        return found

    def on(self, device: Device | None) -> tuple[Array, Array]:
        """Both arrays, where the kernels of ``device`` read them."""
        if isinstance(device, CudaDevice):
            held = self._on_cuda.get(device.ordinal)
            if held is None:
                import cupy

                # blocking: later calls may come on other streams
                copies = (cupy.asarray(self.starts, blocking=True), cupy.asarray(self.chunks, blocking=True))
                held = self._on_cuda.setdefault(device.ordinal, copies)
            return held
        if isinstance(device, EmulatorDevice):
            device.name("w.starts", self.starts)
            device.name("w.chunks", self.chunks)
        return self.starts, self.chunks


_made: WeakKeyDictionary[TernaryMatrix, _Occupied] = WeakKeyDictionary()


def plan_product(
    name: str, x: TernaryMatrix, w: TernaryMatrix, out: Any, device: str | None, backend: str | None
) -> Plan:
    """``y = x @ w.T`` in float32: integer sums, then the product of the scales."""
    arrays = Arrays(name)
    (m, k), n = x.shape, w.shape[0]
    if k != w.shape[1]:
        raise ShapeError(
            f"{name}: x has shape {x.shape}, expected (M, K={w.shape[1]}) for w of shape {w.shape}"
        )
    a2, w2 = (_with_row_scales(name, argument, matrix) for argument, matrix in (("x", x), ("w", w)))
    out_ = arrays.write("out", out, (m, n), np.float32, rows=True)
    choice = choose(
        name, device, backend, arrays, cannot={"raw": f"K={k} is beyond 31 bits"} if k >> 31 else {}
    )
    alone = choice.copies and out is None  # no argument is an array that could be copied: only the result is
    if alone:
        choice = replace(choice, copies=False)
    few_rows = choice.device == "cpu" and m < _FEW_ROWS
    chunks = _Occupied.of(w2) if not few_rows and choice.backend != "reference" else None
    skips = chunks is not None and chunks.skips

    def compute(on: Device | None) -> Array:
        if choice.backend == "reference":
            from gpu_ops.reference import ternary as reference

            y: Array = reference.ternary_product(a2.trits(), a2.scale, w2.trits(), w2.scale)
            if out_ is not None:
                out_[...] = y
            return y
        new = np.empty if on is None else on.empty
        y = new((m, n), np.float32) if out_ is None else out_
        if not y.size:
            return y
        if isinstance(on, EmulatorDevice):
            on.name("x.codes", a2.codes)
        occupied = chunks.on(on) if chunks is not None and skips else None
        multiply = host_function("ternary_planes.matmul", on, choice.backend)
        multiply(*a2.on(on), *w2.on(on), k, occupied, as_rows(y))
        return y

    def filled(on: Device | None) -> Array:
        y = compute(on)
        if on is not None and k == 0:  # no kernel has run
            y.fill(0)
        return y

    def run() -> Any:
        if alone:
            import cupy

            return cupy.asnumpy(filled(current_device(choice.device)))
        with arrays.on(choice) as on:
            y = filled(on)
            return arrays.give(y) if out is None else out

    def config() -> str:
        if choice.backend == "reference":
            return "NumPy, exact integers"
        if choice.device != "cpu":
            text = arrays.launches(choice, compute)
        else:
            from gpu_ops.kernels.numba_cpu import ternary_planes as kernels

            text = kernels.config(skips)
        share = (
            f"\n            {chunks.share:.1%} of the chunks of w are occupied" if chunks is not None else ""
        )
        return text + share

    def again() -> Callable[..., Any]:
        from gpu_ops.kernels.numba_cpu.ternary_planes import matmul

        def multiply(x: TernaryMatrix, w: TernaryMatrix, *, out: Any = None, **_: Any) -> Any:
            # blocks of some formats embed scales: what w2 has of them goes by values
            a2, w2 = _with_row_scales(name, "x", x), _with_row_scales(name, "w", w)
            chunks = None if few_rows else _Occupied.of(w2)
            occupied = chunks.on(None) if chunks is not None and chunks.skips else None
            y = np.empty((m, n), np.float32) if out is None else out
            matmul(*a2.on(None), *w2.on(None), k, occupied, y)
            return y

        return multiply

    problem = f"({m} x {k}) {x.format} x ({n} x {k}) {w.format}, both ternary"
    return Plan(name, choice, problem, config, run, again=again if choice.compiled else None)


def _with_row_scales(name: str, argument: str, matrix: TernaryMatrix) -> TernaryMatrix:
    """The matrix in w2, its scale per tensor or row."""
    w2 = matrix.to("w2")
    if w2.scale.ndim == 2 and w2.scale.shape[1] > 1:
        raise OptionError(
            f"{name}: {argument} has a scale per group of {w2.group_size}; between two ternary matrices sums run "
            "over all of K, so scales are per tensor or row: ternary_quantize(..., group_size=-1), or pass x as an "
            "array, x.dequantize()"
        )
    return w2
