"""Launch of the gated MLP on each backend; on a GPU as matrix products (:mod:`.gemm`) whose epilogues do the rest.

forward    h = act(x w_gate^T) * (x w_up^T)                  gate and up never exist, or are kept for the backward
           y = h w_down^T
           ``TOKENS`` tokens at a time: h is all that is allocated, (TOKENS, ffn) whatever the number of tokens

backward   gate = x w_gate^T, up = x w_up^T                  unless they were kept
           dgate, dup, h from dh = dy w_down                 in the place of gate and up; dh never exists
           dw_gate = dgate^T x, dw_up = dup^T x, dw_down = dy^T h
           dx = dgate w_gate + dup w_up
           for a block of ffn at a time and all tokens: a weight's gradient is then one product, added up in
           registers. dx adds up over blocks, in float32

Tiles add up along K in one order, whatever their size: gate and up that are kept by one epilogue have the same
bits as those that another computes again.

Where cuBLAS multiplies (:mod:`.cublas`), up of a chunk, or dh of a block, takes one more buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpu_ops.kernels.common.arguments import as_rows, rows_of
from gpu_ops.kernels.gemm.args import (
    Gemm,
    Operand,
    gated,
    gated_backward,
    product,
    sum_of_products,
    two_products,
)
from gpu_ops.kernels.gemm.gemm import launch_numba, launch_raw
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers
from gpu_ops.kernels.weights.packed import weight_array

Multiply: TypeAlias = "Callable[[Builder, Gemm], None]"

# Tokens of the forward pass at a time: 16 rows of tiles, which share the weights in L2. With fewer,
# the weights are read more often.
TOKENS = 2048
# Elements of each of three buffers in the backward pass, 16 MiB in 16 bits, at least FFN columns: dx is read and
# written once per block, 8 bytes for 4 FFN flops. With 1024 the memory of an H100 needs half of that time.
SCRATCH = 1 << 23
FFN = 1024
_MULTIPLE = 128  # of tokens and columns: whole tiles


_WEIGHTS = ("w_gate", "w_up", "w_down")
_SUMS = ("dw_gate", "dw_up", "dw_down")  # over tokens


@lowers("swiglu_mlp", "cpu")
def _forward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import swiglu_mlp
    from gpu_ops.kernels.weights.cpu.packed import unpacked

    if _is_zero(spec, builder):
        return
    x, activation = rows_of(spec, "x"), spec["activation"]
    shapes = [spec[f"packed_{name}"] for name in _WEIGHTS]
    packed = [shape for shape in shapes if shape]
    (ffn, hidden), (hidden_out, _) = _shape(spec, "w_gate"), _shape(spec, "w_down")

    def run(views: Mapping[str, Any]) -> None:
        gate_up, weights = views.get("gate_up"), [views["w_gate"], views["w_up"], views["w_down"]]
        if packed:
            pairs = zip(weights, shapes, strict=True)
            weights = [unpacked(weight, x.dtype) if shape else weight for weight, shape in pairs]
        swiglu_mlp.forward(
            as_rows(views["x"]),
            tuple(weights),
            as_rows(views["y"]),
            activation=activation,
            gate_up=None if gate_up is None else as_rows(gate_up),
        )

    scratch = swiglu_mlp.scratch_bytes(
        len(x), (hidden, ffn, hidden_out), x.dtype, gradients=False, kept=False
    )
    scratch += sum(w.rows * w.cols * x.itemsize * (1 + w.reordered) for w in packed)
    builder.call(run, swiglu_mlp.config(len(x), hidden, ffn, x.dtype), scratch)


@lowers("swiglu_mlp_backward", "cpu")
def _backward_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.gemm.cpu import swiglu_mlp

    if _has_no_products(spec, builder):
        return
    x, (ffn, hidden), activation = rows_of(spec, "x"), spec.tensor("w_gate").shape, spec["activation"]
    added = [name in spec["added"] for name in _SUMS]

    def run(views: Mapping[str, Any]) -> None:
        gate_up = views.get("gate_up")
        swiglu_mlp.backward(
            as_rows(views["dy"]),
            as_rows(views["x"]),
            (views["w_gate"], views["w_up"], views["w_down"]),
            as_rows(views["dx"]),
            swiglu_mlp.Gradients([views[name] for name in _SUMS], added),
            activation=activation,
            gate_up=None if gate_up is None else as_rows(gate_up),
        )

    sizes, kept = (hidden, ffn, spec.tensor("w_down").shape[0]), spec.get("gate_up") is not None
    scratch = swiglu_mlp.scratch_bytes(len(x), sizes, x.dtype, gradients=True, kept=kept)
    builder.call(run, swiglu_mlp.config(len(x), hidden, ffn, x.dtype, gradients=True), scratch)


def _forward(spec: Spec, builder: Builder, multiply: Multiply, backend: str) -> None:
    if _is_zero(spec, builder):
        return
    x, y = rows_of(spec, "x"), rows_of(spec, "y")
    arrays = (weight_array(spec, name, builder, backend, x.dtype) for name in _WEIGHTS)
    w_gate, w_up, w_down = map(Operand, arrays)
    kept, activation = _kept(spec), spec["activation"]
    chunks = list(_spans(len(x), TOKENS))
    h_chunk = builder.empty((chunks[0].stop, w_gate.rows), x.dtype, "h")
    for t in chunks:
        h = h_chunk[: t.stop - t.start]
        halves = tuple(half[t] for half in kept)
        multiply(builder, gated(Operand(x[t]), w_gate, w_up, h, activation=activation, kept=halves))
        multiply(builder, product(Operand(h), w_down, y[t]))


def _backward(spec: Spec, builder: Builder, multiply: Multiply) -> None:
    if _has_no_products(spec, builder):
        return
    dy, x, dx = (rows_of(spec, name) for name in ("dy", "x", "dx"))
    w_gate, w_up, w_down = (spec.tensor(name) for name in _WEIGHTS)
    kept, tokens, ffn = _kept(spec), len(x), len(w_gate)
    blocks = list(_spans(ffn, max(FFN, SCRATCH // tokens)))
    buffers = [builder.empty((tokens, blocks[0].stop), x.dtype, name) for name in ("gate", "up", "h")]
    total = dx
    if len(blocks) > 1 and x.itemsize == 2:
        total = builder.empty(dx.shape, np.float32, "dx in float32")
    rows, x_across, dy_across = Operand(x), Operand(x, True), Operand(dy, True)
    for f in blocks:
        wg, wu, wd = w_gate[f], w_up[f], w_down[:, f]
        dgate, dup, h = (b[:, : f.stop - f.start] for b in buffers)
        halves = (kept[0][:, f], kept[1][:, f]) if kept else (dgate, dup)
        if not kept:
            multiply(builder, two_products((rows, rows), (Operand(wg), Operand(wu)), halves))
        dh = Operand(dy), Operand(wd, True)
        multiply(builder, gated_backward(*dh, halves, (dgate, dup, h), activation=spec["activation"]))
        for name, a, b, part in (
            ("dw_gate", Operand(dgate, True), x_across, (f,)),
            ("dw_up", Operand(dup, True), x_across, (f,)),
            ("dw_down", dy_across, Operand(h, True), (slice(None), f)),
        ):
            target = spec.tensor(name)[part]
            multiply(builder, product(a, b, target, total=target if name in spec["added"] else None))
        pairs = (Operand(dgate), Operand(dup)), (Operand(wg, True), Operand(wu, True))
        target = dx if f.stop == ffn else total
        multiply(builder, sum_of_products(*pairs, target, total=total if f.start else None))


def _kept(spec: Spec) -> tuple[Tensor, ...]:
    """Gate and up, (tokens, ffn), if they are arrays of the call."""
    if spec.get("gate_up") is None:
        return ()
    gate_up = rows_of(spec, "gate_up")
    ffn = gate_up.shape[1] // 2
    return gate_up[:, :ffn], gate_up[:, ffn:]


lowers("swiglu_mlp", "raw")(partial(_forward, multiply=launch_raw, backend="raw"))
lowers("swiglu_mlp", "numba")(partial(_forward, multiply=launch_numba, backend="numba"))
lowers("swiglu_mlp_backward", "raw")(partial(_backward, multiply=launch_raw))
lowers("swiglu_mlp_backward", "numba")(partial(_backward, multiply=launch_numba))


def _shape(spec: Spec, name: str) -> tuple[int, ...]:
    """Shape of a weight, packed or not."""
    shape = spec[f"packed_{name}"]
    return shape[:2] if shape else spec.tensor(name).shape


def _is_zero(spec: Spec, builder: Builder) -> bool:
    """Whether an axis is empty, which makes the results of the forward zero."""
    if spec.tensor("x").size and spec.tensor("w_gate").size:
        return False
    builder.zero(spec.tensor("y"))
    if spec.get("gate_up") is not None:
        builder.zero(spec.tensor("gate_up"))
    return True


def _has_no_products(spec: Spec, builder: Builder) -> bool:
    """Whether an axis is empty. Then the gradients are zero, and gradients that are added to stay unchanged."""
    if all(spec.tensor(name).size for name in ("x", "w_gate", "w_down")):
        return False
    for name in ("dx", *_SUMS):
        if name not in spec["added"]:
            builder.zero(spec.tensor(name))
    return True


def _spans(length: int, most: int) -> Iterator[slice]:
    """Equal parts (except the last) of whole tiles, each at most about ``most``."""
    parts = -(-length // most)
    step = -(-length // (parts * _MULTIPLE)) * _MULTIPLE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
