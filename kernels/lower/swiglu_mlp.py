"""How each backend runs the gated MLP; on a GPU as matrix products (:mod:`.gemm`) whose epilogues do the rest.

forward    h = act(x w_gate^T) * (x w_up^T)                  gate and up never exist
           y = h w_down^T
           ``TOKENS`` tokens at a time: h is all that is allocated, (TOKENS, ffn) whatever the number of tokens

backward   gate = x w_gate^T, up = x w_up^T
           dgate, dup, h from dh = dy w_down                 in the place of gate and up; dh never exists
           dw_gate = dgate^T x, dw_up = dup^T x, dw_down = dy^T h
           dx = dgate w_gate + dup w_up
           for a block of ffn at a time and all tokens: a weight's gradient is then one product, added up in registers
           and rounded once. Only dx adds up over blocks, in float32

Where cuBLAS multiplies (:mod:`.cublas`), up of a chunk, or dh of a block, takes one more buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpu_ops.kernels.lower.arguments import as_rows, rows_of
from gpu_ops.kernels.lower.gemm import launch_numba, launch_raw
from gpu_ops.kernels.lower.gemm_args import (
    Gemm,
    Operand,
    gated,
    gated_backward,
    product,
    sum_of_products,
    two_products,
)
from gpu_ops.kernels.program import Builder, Spec, lowers

Multiply: TypeAlias = "Callable[[Builder, Gemm], None]"

# Tokens of the forward at a time: 16 rows of tiles, which is how many share what L2 holds of the weights. Fewer, and
# the weights are read more often.
TOKENS = 2048
# Elements of each of three buffers in the backward, 16 MiB in 16 bits, but FFN columns at least: dx is read and
# written once per block, 8 bytes for 4 FFN flops. With 1024 the memory of an H100 needs half of that time.
SCRATCH = 1 << 23
FFN = 1024
_MULTIPLE = 128  # of tokens and columns: whole tiles


_WEIGHTS = ("w_gate", "w_up", "w_down")
_GRADIENTS = ("dx", "dw_gate", "dw_up", "dw_down")


@lowers("swiglu_mlp", "cpu")
def _forward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import swiglu_mlp

    if _without_products(spec, on, "y"):
        return
    x, (ffn, hidden), activation = rows_of(spec, "x"), spec.tensor("w_gate").shape, spec["activation"]

    def run(views: Mapping[str, Any]) -> None:
        swiglu_mlp.forward(
            as_rows(views["x"]),
            (views["w_gate"], views["w_up"], views["w_down"]),
            as_rows(views["y"]),
            activation=activation,
        )

    on.call(run, swiglu_mlp.config(len(x), hidden, ffn, x.dtype))


@lowers("swiglu_mlp_backward", "cpu")
def _backward_cpu(spec: Spec, on: Builder) -> None:
    from gpu_ops.kernels.numba_cpu import swiglu_mlp

    if _without_products(spec, on, *_GRADIENTS):
        return
    x, ffn, activation = rows_of(spec, "x"), len(spec.tensor("w_gate")), spec["activation"]

    def run(views: Mapping[str, Any]) -> None:
        swiglu_mlp.backward(
            as_rows(views["dy"]),
            as_rows(views["x"]),
            (views["w_gate"], views["w_up"], views["w_down"]),
            as_rows(views["dx"]),
            (views["dw_gate"], views["dw_up"], views["dw_down"]),
            activation=activation,
        )

    widest = max(x.shape[1], len(spec.tensor("w_down")))
    on.call(run, swiglu_mlp.config(len(x), widest, ffn, x.dtype, gradients=True))


def _forward(spec: Spec, on: Builder, multiply: Multiply) -> None:
    if _without_products(spec, on, "y"):
        return
    x, y = rows_of(spec, "x"), rows_of(spec, "y")
    w_gate, w_up, w_down = (Operand(spec.tensor(name)) for name in _WEIGHTS)
    chunks = list(_spans(len(x), TOKENS))
    h_chunk = on.empty((chunks[0].stop, w_gate.rows), x.dtype, "h")
    for t in chunks:
        h = h_chunk[: t.stop - t.start]
        multiply(on, gated(Operand(x[t]), w_gate, w_up, h, activation=spec["activation"]))
        multiply(on, product(Operand(h), w_down, y[t]))


def _backward(spec: Spec, on: Builder, multiply: Multiply) -> None:
    if _without_products(spec, on, *_GRADIENTS):
        return
    dy, x, dx = (rows_of(spec, name) for name in ("dy", "x", "dx"))
    w_gate, w_up, w_down = (spec.tensor(name) for name in _WEIGHTS)
    dw_gate, dw_up, dw_down = (spec.tensor(name) for name in _GRADIENTS[1:])
    tokens, ffn = len(x), len(w_gate)
    blocks = list(_spans(ffn, max(FFN, SCRATCH // tokens)))
    buffers = [on.empty((tokens, blocks[0].stop), x.dtype, name) for name in ("gate", "up", "h")]
    total = dx
    if len(blocks) > 1 and x.itemsize == 2:
        total = on.empty(dx.shape, np.float32, "dx in float32")
    rows, x_across, dy_across = Operand(x), Operand(x, True), Operand(dy, True)
    for f in blocks:
        wg, wu, wd = w_gate[f], w_up[f], w_down[:, f]
        gate, up, h = (b[:, : f.stop - f.start] for b in buffers)
        multiply(on, two_products((rows, rows), (Operand(wg), Operand(wu)), (gate, up)))
        dh = Operand(dy), Operand(wd, True)
        multiply(on, gated_backward(*dh, gate, up, h, activation=spec["activation"]))
        dgate_dup = (Operand(gate, True), Operand(up, True))
        multiply(on, two_products(dgate_dup, (x_across, x_across), (dw_gate[f], dw_up[f])))
        multiply(on, product(dy_across, Operand(h, True), dw_down[:, f]))
        pairs = (Operand(gate), Operand(up)), (Operand(wg, True), Operand(wu, True))
        target = dx if f.stop == ffn else total
        multiply(on, sum_of_products(*pairs, target, total=total if f.start else None))


lowers("swiglu_mlp", "raw")(partial(_forward, multiply=launch_raw))
lowers("swiglu_mlp", "numba")(partial(_forward, multiply=launch_numba))
lowers("swiglu_mlp_backward", "raw")(partial(_backward, multiply=launch_raw))
lowers("swiglu_mlp_backward", "numba")(partial(_backward, multiply=launch_numba))


def _without_products(spec: Spec, on: Builder, *results: str) -> bool:
    """Whether an axis is empty, which makes the results zero."""
    if all(spec.tensor(name).size for name in ("x", "w_gate", "w_down")):
        return False
    for name in results:
        on.zero(spec.tensor(name))
    return True


def _spans(length: int, most: int) -> Iterator[slice]:
    """Equal parts, but for the last, of whole tiles and about ``most`` at most."""
    parts = -(-length // most)
    step = -(-length // (parts * _MULTIPLE)) * _MULTIPLE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
