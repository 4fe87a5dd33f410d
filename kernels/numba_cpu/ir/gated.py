"""Gated activations of rows, as LLVM IR: chunk by chunk of VECTOR_BYTES, streamed past the caches where asked.

    gate  | chunk | chunk | ...        a chunk is one or two vectors (decode_rows.py)
    up    | chunk | chunk | ...
    y     | chunk | chunk | ...        the last chunk, if it is not whole, by way of a buffer

All operands of a chunk are read before its results are stored, so a result may be an operand's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from gpu_ops.kernels.numba_cpu.ir import activations
from gpu_ops.kernels.numba_cpu.ir.activations import DOUBLE, HALF, SINGLE, Lanes
from gpu_ops.kernels.numba_cpu.ir.build import address, number, prefetch
from gpu_ops.kernels.numba_cpu.ir.decode_rows import Rows
from gpu_ops.kernels.numba_cpu.ir.memory import LINE_BYTES, past_line
from gpu_ops.kernels.numba_cpu.ir.narrow import narrow
from gpu_ops.kernels.numba_cpu.ir.target import VECTOR_BYTES

AHEAD = 1 << 10  # bytes

Step = Callable[[list[Lanes]], tuple[Lanes, ...]]


def _rows(step: Step) -> Any:
    """Codegen: results[first : first + count] = step(operands), element by element."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        results, operands, first, count, streaming = args
        element = sig.args[0][0].dtype
        row = Rows(element)
        kind = DOUBLE if element == types.float64 else HALF if element.bitwidth == 16 else SINGLE
        pointers = [
            [address(context, b, t, b.extract_value(arrays, i), first) for i, t in enumerate(types_)]
            for types_, arrays in zip(sig.args[:2], (results, operands), strict=True)
        ]
        buffers = [
            [cgutils.alloca_once(b, p.type.pointee, row.elements) for p in group] for group in pointers
        ]
        size = element.bitwidth // 8
        chunks = b.udiv(b.add(count, number(row.elements - 1)), number(row.elements))
        with cgutils.for_range(b, chunks) as loop:
            at = b.mul(loop.index, number(row.elements))
            left = b.sub(count, at)
            whole = b.icmp_signed(">=", left, number(row.elements))
            here = [[b.gep(p, [at]) for p in group] for group in pointers]
            with b.if_then(b.not_(whole), likely=False):
                for p, buffer in zip(here[1], buffers[1], strict=True):
                    cgutils.raw_memcpy(b, buffer, p, left, size)
            targets, sources = (
                [b.select(whole, p, buffer) for p, buffer in zip(*group, strict=True)]
                for group in zip(here, buffers, strict=True)
            )
            for p in here[1]:
                prefetch(b, b.gep(p, [number(AHEAD // size)]))
            parts = zip(*(row.load(b, p) for p in sources), strict=True)
            values = [step([Lanes(b, v, kind) for v in part]) for part in parts]
            vectors = [narrow(b, element, [v.value for v in each]) for each in zip(*values, strict=True)]
            with b.if_else(b.and_(streaming, whole)) as (past, plain):
                with past:
                    for v, p in zip(vectors, targets, strict=True):
                        store = b.store(v, b.bitcast(p, v.type.as_pointer()), align=VECTOR_BYTES)
                        store.set_metadata("nontemporal", b.module.add_metadata([ir.IntType(32)(1)]))
                with plain:
                    for v, p in zip(vectors, targets, strict=True):
                        b.store(v, b.bitcast(p, v.type.as_pointer()), align=size)
            with b.if_then(b.not_(whole), likely=False):
                for p, buffer in zip(here[0], buffers[0], strict=True):
                    cgutils.raw_memcpy(b, p, buffer, left, size)
        return context.get_dummy_value()

    @intrinsic
    def rows(typingctx, results, operands, first, count, streaming):
        return types.void(results, operands, types.int64, types.int64, types.boolean), codegen

    @njit
    def whole_lines(results, operands, streaming):
        """All of them; ``streaming``: from the first line on, if the results begin their lines at one place."""
        count, head = len(results[0]), 0
        if streaming:
            line, past = LINE_BYTES // results[0].itemsize, past_line(results[0])
            for y in results:
                streaming = streaming and past_line(y) == past
            head = min((line - past) % line, count)
        for part in range(2):
            first, stop = (head, count) if part else (0, head)
            rows(results, operands, first, stop - first, streaming and part == 1)

    return whole_lines


def _forward(act: Callable[[Lanes], Lanes]) -> Step:
    """y = act(gate) * up"""
    return lambda operands: (act(operands[0]) * operands[1],)


def _backward(act: Callable[[Lanes], tuple[Lanes, Lanes]], *, hidden: bool) -> Step:
    """dgate = dy * up * act'(gate), dup = dy * act(gate), and h = act(gate) * up where asked."""

    def step(operands: list[Lanes]) -> tuple[Lanes, ...]:
        dy, gate, up = operands
        value, slope = act(gate)
        return dy * up * slope, dy * value, *((value * up,) if hidden else ())

    return step


forward = {name: _rows(_forward(act)) for name, act in activations.FORWARD.items()}
backward = {name: _rows(_backward(act, hidden=False)) for name, act in activations.BACKWARD.items()}
backward_hidden = {name: _rows(_backward(act, hidden=True)) for name, act in activations.BACKWARD.items()}
