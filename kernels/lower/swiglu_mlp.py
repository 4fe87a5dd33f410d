"""The gated MLP on the GPU, as launches of matrix products (:mod:`.gemm`) whose epilogues do the rest.

forward    h = act(x w_gate^T) * (x w_up^T)                  gate and up never exist
           y = h w_down^T
           ``TOKENS`` tokens at a time: h is all that is allocated, (TOKENS, ffn) whatever the number of tokens

backward   gate = x w_gate^T, up = x w_up^T
           dgate, dup, h from dh = dy w_down                 in the place of gate and up; dh never exists
           dw_gate = dgate^T x, dw_up = dup^T x, dw_down = dy^T h
           dx = dgate w_gate + dup w_up
           for a block of ffn at a time and all tokens: a weight's gradient is then one product, added up in registers
           and rounded once. Only dx adds up over blocks, in float32

Where cuBLAS multiplies (:mod:`.gemm_library`), gate or up of a chunk, dh of a block, are one buffer more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.lower import gemm
from gpu_ops.kernels.lower.gemm import Operand

__all__ = ["backward", "forward", "scratch_bytes"]

Array = Any  # of the device: numpy.ndarray or cupy.ndarray

# Tokens of the forward at a time: 16 rows of tiles, which is how many share what L2 holds of the weights. Fewer, and
# the weights are read more often.
TOKENS = 2048
# Elements of each of three buffers in the backward, 16 MiB in 16 bits, but FFN columns at least: dx is read and
# written once per block, 8 bytes for 4 FFN flops. With 1024 the memory of an H100 needs half of that time.
SCRATCH = 1 << 23
FFN = 1024
_MULTIPLE = 128  # of tokens and columns: whole tiles


def forward(
    device: Any, backend: str, x: Array, weights: Sequence[Array], y: Array, *, activation: str
) -> None:
    """x (tokens, hidden), y (tokens, hidden_out); weights are (out_features, in_features). No axis is empty."""
    w_gate, w_up, w_down = map(Operand, weights)
    chunks = list(_spans(x.shape[0], TOKENS))
    h_chunk = device.empty((chunks[0].stop, w_gate.rows), x.dtype, "h")
    for t in chunks:
        xt, h = Operand(x[t]), h_chunk[: t.stop - t.start]
        gemm.gated(device, backend, xt, w_gate, w_up, h, activation=activation)
        gemm.product(device, backend, Operand(h), w_down, y[t])


def backward(
    device: Any,
    backend: str,
    dy: Array,
    x: Array,
    weights: Sequence[Array],
    dx: Array,
    dweights: Sequence[Array],
    *,
    activation: str,
) -> None:
    """Fills dx and the weights' gradients. No axis is empty."""
    w_gate, w_up, w_down = weights
    dw_gate, dw_up, dw_down = dweights
    tokens, ffn = x.shape[0], w_gate.shape[0]
    blocks = list(_spans(ffn, max(FFN, SCRATCH // tokens)))
    buffers = [device.empty((tokens, blocks[0].stop), x.dtype, name) for name in ("gate", "up", "h")]
    total = dx
    if len(blocks) > 1 and x.dtype.itemsize == 2:
        total = device.empty(dx.shape, np.float32, "dx in float32")
    rows, x_across, dy_across = Operand(x), Operand(x, True), Operand(dy, True)
    for f in blocks:
        wg, wu, wd = w_gate[f], w_up[f], w_down[:, f]
        gate, up, h = (b[:, : f.stop - f.start] for b in buffers)
        gemm.two_products(device, backend, (rows, rows), (Operand(wg), Operand(wu)), (gate, up))
        gemm.gated_backward(
            device, backend, Operand(dy), Operand(wd, True), gate, up, h, activation=activation
        )
        dgate_dup = (Operand(gate, True), Operand(up, True))
        gemm.two_products(device, backend, dgate_dup, (x_across, x_across), (dw_gate[f], dw_up[f]))
        gemm.product(device, backend, dy_across, Operand(h, True), dw_down[:, f])
        gemm.sum_of_products(
            device, backend, (Operand(gate), Operand(up)), (Operand(wg, True), Operand(wu, True)),
            dx if f.stop == ffn else total, total=total if f.start else None,
        )  # fmt: skip


def scratch_bytes(tokens: int, hidden: int, ffn: int, itemsize: int, *, gradients: bool = False) -> int:
    """What a call allocates beside its results, but for the parts of sums of small results."""
    if not gradients:
        chunk: int = next(_spans(tokens, TOKENS)).stop
        return chunk * ffn * itemsize
    block: int = next(_spans(ffn, max(FFN, SCRATCH // tokens))).stop
    return 3 * tokens * block * itemsize + (4 * tokens * hidden if block < ffn and itemsize == 2 else 0)


def _spans(length: int, most: int) -> Iterator[slice]:
    """Equal parts, but for the last, of whole tiles and about ``most`` at most."""
    parts = -(-length // most)
    step = -(-length // (parts * _MULTIPLE)) * _MULTIPLE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
