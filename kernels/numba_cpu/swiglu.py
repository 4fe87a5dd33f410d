"""Gated activations on the CPU, ``y = act(gate) * up``: one pass, forward and backward.

Bytes per element: forward reads 2 and writes 1, backward reads 3 and writes 2; 20 (silu) to 40 flops,
which vector code (codegen/glu.py) hides behind the memory. Results too large for a cache are streamed past it, unless
they are in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codegen.glu import backward as BACKWARD_ROWS
from .codegen.glu import forward as FORWARD_ROWS
from .codegen.stream import fence, past_line, stays_in_cache
from .dtype import bits, read_row, write_row
from .jit import Kernel, inner, kernel, read, types, write
from .parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

# A longer row is cut into blocks of this many elements, so that one row too keeps every core busy.
BLOCK = 1 << 13
AHEAD = 1 << 12  # bytes of a row; 1 KB was 5 % slower in bfloat16


def config(rows: int, cols: int) -> str:
    n_blocks, chunk = _blocks(rows, cols)
    return f"{n_blocks} blocks of at most {min(cols, BLOCK)} elements, {min(n_blocks, chunk)} per task"


def forward(gate: Array, up: Array, y: Array, *, activation: str) -> None:
    """``y = act(gate) * up``, all (rows, cols); y may be gate's memory."""
    streaming = not (stays_in_cache(y.nbytes) or _same_memory(y, gate))
    gate, up, y = _long_rows(gate, up, y)
    n_blocks, chunk = _blocks(*gate.shape)
    n_tasks = -(-n_blocks // chunk)
    launch(FORWARD[activation][gate.dtype], n_tasks, chunk, bits(gate), bits(up), bits(y), streaming)


def backward(
    dy: Array,
    gate: Array,
    up: Array,
    dgate: Array,
    dup: Array,
    *,
    activation: str,
) -> None:
    """``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``, all (rows, cols).

    dgate may be gate's memory and dup up's.
    """
    small = stays_in_cache(dgate.nbytes + dup.nbytes)
    streaming = not (small or _same_memory(dgate, gate) or _same_memory(dup, up))
    arrays = _long_rows(dy, gate, up, dgate, dup)
    n_blocks, chunk = _blocks(*arrays[0].shape)
    n_tasks = -(-n_blocks // chunk)
    launch(BACKWARD[activation][gate.dtype], n_tasks, chunk, *map(bits, arrays), streaming)


def _same_memory(a: Array, b: Array) -> bool:
    return a.ctypes.data == b.ctypes.data  # the caller allows no other overlap


def _long_rows(*arrays: Array) -> tuple[Array, ...]:
    """One long row when nothing lies between the rows: short rows would leave vectors half empty."""
    if len(arrays[0]) > 1 and all(x.flags.c_contiguous for x in arrays):
        return tuple(x.reshape(1, -1) for x in arrays)
    return arrays


def _blocks(rows: int, cols: int) -> tuple[int, int]:
    """The number of blocks, and how many of them one task takes."""
    n_blocks = rows * -(-cols // BLOCK)
    return n_blocks, items_per_task(n_blocks, min(cols, BLOCK))


@inner
def block_of(row, k, count):
    """Where block k of ``count`` starts and stops in a row: where lines do, so that blocks share none."""
    past = past_line(row)
    return max(k * BLOCK - past, 0), len(row) if k == count - 1 else (k + 1) * BLOCK - past


def _forward_kernel(name: str) -> Kernel:
    gated = FORWARD_ROWS[name]

    def forward(state, n_tasks, chunk, gate, up, y, streaming):
        rows, cols = gate.shape
        blocks_per_row = (cols + BLOCK - 1) // BLOCK
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
                r, y_row = b // blocks_per_row, write_row(y, (b // blocks_per_row,))
                start, stop = block_of(y_row, b % blocks_per_row, blocks_per_row)
                coming = min(start + AHEAD // gate.itemsize, cols)
                inputs = (read_row(gate, (r,)), read_row(up, (r,)))
                operands = (inputs[0][start:stop], inputs[1][start:stop])
                following = (inputs[0][coming:], inputs[1][coming:])
                gated((y_row[start:stop],), operands, (), following, (), streaming)
            if streaming:
                fence()
            task = claim(state)

    forward.__name__ = f"swiglu_forward_{name}"
    return kernel(lambda t: (types.int64, read(t, 2), read(t, 2), write(t, 2), types.boolean))(forward)


def _backward_kernel(name: str) -> Kernel:
    gated = BACKWARD_ROWS[name]

    def backward(state, n_tasks, chunk, dy, gate, up, dgate, dup, streaming):
        rows, cols = gate.shape
        blocks_per_row = (cols + BLOCK - 1) // BLOCK
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
                r, gate_row = b // blocks_per_row, write_row(dgate, (b // blocks_per_row,))
                start, stop = block_of(gate_row, b % blocks_per_row, blocks_per_row)
                coming = min(start + AHEAD // gate.itemsize, cols)
                inputs = (read_row(dy, (r,)), read_row(gate, (r,)), read_row(up, (r,)))
                operands = (inputs[0][start:stop], inputs[1][start:stop], inputs[2][start:stop])
                following = (inputs[0][coming:], inputs[1][coming:], inputs[2][coming:])
                results = (gate_row[start:stop], write_row(dup, (r,))[start:stop])
                gated(results, operands, (), following, (), streaming)
            if streaming:
                fence()
            task = claim(state)

    backward.__name__ = f"swiglu_backward_{name}"
    return kernel(lambda t: (types.int64, *(read(t, 2),) * 3, *(write(t, 2),) * 2, types.boolean))(backward)


FORWARD = {name: _forward_kernel(name) for name in FORWARD_ROWS}
BACKWARD = {name: _backward_kernel(name) for name in BACKWARD_ROWS}
