"""Gated activations of rows, as LLVM IR: ``y = act(gate) * up`` and its gradient (ir/rows.py)."""

from __future__ import annotations

from collections.abc import Callable

from numba.core import types

from gpu_ops.kernels.numba_cpu.ir import activations
from gpu_ops.kernels.numba_cpu.ir.activations import DOUBLE, HALF, SINGLE, Lanes
from gpu_ops.kernels.numba_cpu.ir.rows import Chunk, Step, map_rows


def _by_lanes(step: Callable[[list[Lanes]], tuple[Lanes, ...]]) -> Step:
    """A step on vectors as one on chunks."""

    def on_chunks(operands: list[Chunk], _: list[Chunk]) -> tuple[Chunk, ...]:
        b, row = operands[0].b, operands[0].row
        kind = DOUBLE if row.dtype == types.float64 else HALF if row.dtype.bitwidth == 16 else SINGLE
        parts = zip(*(chunk.parts for chunk in operands), strict=True)
        results = [step([Lanes(b, x, kind) for x in part]) for part in parts]
        return tuple(Chunk(b, row, [y.value for y in result]) for result in zip(*results, strict=True))

    return on_chunks


def _forward(act: Callable[[Lanes], Lanes]) -> Step:
    """y = act(gate) * up"""
    return _by_lanes(lambda operands: (act(operands[0]) * operands[1],))


def _backward(act: Callable[[Lanes], tuple[Lanes, Lanes]], *, hidden: bool) -> Step:
    """dgate = dy * up * act'(gate), dup = dy * act(gate), and h = act(gate) * up where asked."""

    def step(operands: list[Lanes]) -> tuple[Lanes, ...]:
        dy, gate, up = operands
        value, slope = act(gate)
        # dy * up could be infinite where the slope is 0
        return dy * slope * up, dy * value, *((value * up,) if hidden else ())

    return _by_lanes(step)


forward = {name: map_rows(_forward(act)) for name, act in activations.FORWARD.items()}
backward = {
    name: map_rows(_backward(act, hidden=False), streamed=2) for name, act in activations.BACKWARD.items()
}
backward_hidden = {
    name: map_rows(_backward(act, hidden=True), streamed=3) for name, act in activations.BACKWARD.items()
}
