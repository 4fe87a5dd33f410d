"""Gated activations on the CPU, ``y = act(gate) * up``: one pass, forward and backward.

Bytes per element: forward reads 2 and writes 1, backward reads 3 and writes 2; 20 (silu) to 40 flops,
which vector code (cpu/glu_ir.py) hides behind the memory. Results too large for a cache are streamed past it, unless
they are in place.
"""

from __future__ import annotations

from gpu_ops.kernels.common.cpu.blocks import Array, block_of, blocks_of, long_rows, same_memory
from gpu_ops.kernels.common.cpu.blocks import config as config_of
from gpu_ops.kernels.common.cpu.codegen.stream import fence, stays_in_cache
from gpu_ops.kernels.common.cpu.dtype import bits, read_row, write_row
from gpu_ops.kernels.common.cpu.jit import Kernel, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, launch
from gpu_ops.kernels.gemm.cpu.glu_ir import backward as BACKWARD_ROWS
from gpu_ops.kernels.gemm.cpu.glu_ir import forward as FORWARD_ROWS

BLOCK = 1 << 13  # elements
AHEAD = 1 << 12  # bytes of a row to prefetch; 1 KB was 5 % slower in bfloat16


def config(rows: int, cols: int) -> str:
    return config_of(rows, cols, BLOCK)


def forward(gate: Array, up: Array, y: Array, *, activation: str) -> None:
    """``y = act(gate) * up``, all (rows, cols); y may be gate's memory."""
    streaming = not (stays_in_cache(y.nbytes) or same_memory(y, gate))
    gate, up, y = long_rows(gate, up, y)
    n_blocks, chunk = blocks_of(gate.shape, BLOCK)
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
    streaming = not (small or same_memory(dgate, gate) or same_memory(dup, up))
    arrays = long_rows(dy, gate, up, dgate, dup)
    n_blocks, chunk = blocks_of(arrays[0].shape, BLOCK)
    n_tasks = -(-n_blocks // chunk)
    launch(BACKWARD[activation][gate.dtype], n_tasks, chunk, *map(bits, arrays), streaming)


def _forward_kernel(name: str) -> Kernel:
    gated = FORWARD_ROWS[name]

    def forward(state, n_tasks, chunk, gate, up, y, streaming):
        rows, cols = gate.shape
        blocks_per_row = (cols + BLOCK - 1) // BLOCK
        task = claim(state)
        while task < n_tasks:
            for b in range(task * chunk, min((task + 1) * chunk, rows * blocks_per_row)):
                r, y_row = b // blocks_per_row, write_row(y, (b // blocks_per_row,))
                start, stop = block_of(y_row, b % blocks_per_row, blocks_per_row, BLOCK)
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
                start, stop = block_of(gate_row, b % blocks_per_row, blocks_per_row, BLOCK)
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
