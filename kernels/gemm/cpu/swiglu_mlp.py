"""Gated MLP on the CPU: matrix products in blocks, with the activation applied to tiles while they are in the cache.

forward    h = act(x @ w_gate.T) * (x @ w_up.T), y = h @ w_down.T
backward   gate, up and dh = dy @ w_down tile by tile, from them dgate, dup and h; then a matmul for each
           weight's gradient and two for dx

gate, up and dh exist as tiles only, and h, dgate and dup as blocks: TOKENS tokens by a block of ffn columns are
in flight, in the order in which the products read them; y or dx adds up over the blocks. Everything between the
first read and the last write is float32, except gate and up of a backward, which are rounded as the forward stores
them; where the CPU multiplies bfloat16, h, dgate and dup are rounded to it once. A few tokens are bound by reading
the weights: see swiglu_mlp_few.py.

The forward may keep gate and up, and the backward use them. Both cut tokens and K alike, so a backward that computes
them again adds up in the same order: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import aligned_empty, bits
from gpu_ops.kernels.common.cpu.packing import Panels, pack, packed, panel_bytes
from gpu_ops.kernels.common.cpu.parallel import launch, most_threads
from gpu_ops.kernels.gemm.cpu import swiglu_mlp_few
from gpu_ops.kernels.gemm.cpu.gemm import matmul, private_bytes, room_bytes, tile_bytes, tile_shape
from gpu_ops.kernels.gemm.cpu.swiglu_mlp_tile import ACTIVATIONS, Plan, mlp_hidden, mlp_hidden_backward

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

TOKENS = 1024  # at most; a block of weights is packed once for them
SCRATCH = 1 << 23  # elements of one block: 32 MiB of float32
FEW = 8  # tokens up to which one pass over the weights is faster,
FEW_PRODUCTS = 1 << 19  # also of more tokens, if the products are as small


def config(tokens: int, hidden: int, ffn: int, dtype: DType, *, gradients: bool = False) -> str:
    if not gradients and _few(tokens, hidden, ffn):
        return "one pass over the weights, all tokens at once"
    step, block = _steps(tokens, ffn, gradients)
    rows, columns = tile_shape(block, step, packed(dtype.name))
    return f"blocks of {step} tokens x {block} of ffn, tiles of {columns} x {rows}"


def _few(tokens: int, hidden: int, ffn: int) -> bool:
    return tokens <= FEW or tokens * hidden * ffn <= FEW_PRODUCTS


def _steps(tokens: int, ffn: int, gradients: bool) -> tuple[int, int]:
    """Tokens and ffn columns in flight, columns in equal blocks of even size. Gradients have four such blocks."""
    step = max(1, min(tokens, TOKENS))
    limit = max(SCRATCH // (4 * step if gradients else step), 64)
    parts = max(1, -(-ffn // limit))
    return step, max(1, min(ffn, -(-ffn // (64 * parts)) * 64))


def _spans(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _wide(dtype: DType) -> DType:
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def scratch_bytes(
    tokens: int, sizes: tuple[int, int, int], dtype: DType, *, gradients: bool, kept: bool
) -> int:
    """Scratch bytes of a call. ``sizes``: hidden, ffn, hidden_out. ``kept``: gate and up are passed."""
    (hidden, ffn, out), itemsize, element = sizes, _wide(dtype).itemsize, packed(dtype.name)
    few = _few(tokens, hidden, ffn)
    if few and not gradients:
        return tokens * ffn * itemsize
    step, block = _steps(tokens, ffn, gradients)
    rounds = itemsize != dtype.itemsize
    x, h = panel_bytes(hidden, step, element), panel_bytes(block, step, element)
    tile, columns = tile_shape(block, step, element)
    threads = most_threads(launch, -(-block // tile) * -(-step // columns))
    c, of_x = tile_bytes(tile, columns, element), room_bytes(element, hidden, step, tile, trans=False)
    if not gradients:
        private = max(threads * (2 * c + of_x), private_bytes(out, step, block, element))
        return x + h + private + (step * out * itemsize if block < ffn and rounds else 0)
    made_again = 2 * tokens * ffn * dtype.itemsize if few and not kept else 0
    lasting = 3 * block * step * (dtype.itemsize if element == "uint32" else itemsize) + 2 * h
    lasting += tokens * hidden * itemsize if rounds else 0
    of_dy = room_bytes(element, out, step, tile, trans=True)
    at_once = (
        panel_bytes(out, step, element) + (0 if few or kept else x) + threads * (3 * c + of_x + of_dy),
        panel_bytes(step, hidden, element) + private_bytes(block, hidden, step, element),
        h + private_bytes(out, block, step, element, trans_a=True),
        private_bytes(hidden, step, block, element, trans_a=True),
    )
    return made_again + max(lasting + max(at_once), tokens * ffn * itemsize if made_again else 0)


def forward(
    x: Array, weights: Sequence[Array], y: Array, *, activation: str, gate_up: Array | None = None
) -> None:
    """x (tokens, hidden) and y (tokens, hidden_out); w_gate, w_up, w_down are (out_features, in_features).

    ``gate_up`` (tokens, 2 * ffn) receives gate and up.
    """
    w_gate, w_up, w_down = weights
    (tokens, hidden), ffn, sum_dtype = x.shape, len(w_gate), _wide(x.dtype)
    kept = _halves(gate_up, x.dtype)
    if _few(tokens, hidden, ffn):
        swiglu_mlp_few.forward(x, weights, y, activation=activation, kept=kept)
        return
    step, block = _steps(tokens, ffn, False)
    total = None
    if block < ffn and sum_dtype != y.dtype:
        total = aligned_empty((step, y.shape[1]), sum_dtype)
    element = packed(x.dtype.name)
    for t in _spans(tokens, step):
        xt, yt = pack(x[t], element, trans=True), y[t]
        for f in _spans(ffn, block):
            wg, wu = w_gate[f], w_up[f]
            h = Panels.empty(len(wg), xt.n, element)
            rows, columns = tile_shape(h.depth, h.n, element)
            plan = Plan(rows, columns, ACTIVATIONS.index(activation), h.n, xt.blocks, 0, h.blocks)
            tasks = -(-h.depth // rows) * -(-h.n // columns)
            stored = (bits(half[t, f]) for half in kept)
            launch(mlp_hidden[x.dtype], tasks, plan, xt.array, bits(wg), bits(wu), h.array, *stored)
            ends = {"first": f.start == 0, "last": f.stop == ffn}
            matmul(w_down[:, f], h, yt, trans_out=True, total=None if total is None else total[: h.n], **ends)
            del h  # before the next h is made
        del xt


def _halves(gate_up: Array | None, dtype: DType) -> tuple[Array, Array]:
    """Gate and up, or stand-ins without rows."""
    if gate_up is None:
        return (np.empty((0, 0), dtype),) * 2
    ffn = gate_up.shape[1] // 2
    return gate_up[:, :ffn], gate_up[:, ffn:]


@dataclass(frozen=True)
class Gradients:
    """Float32 (float64) ``dw_gate, dw_up, dw_down``, and for each whether the gradient is added to it."""

    weights: Sequence[Array]
    added: Sequence[bool]

    def add(self, i: int, where: Any, a: Array, b: Panels, *, first: bool, trans_a: bool = False) -> None:
        """Add a product to part of gradient i; ``first``: it is the product of the first tokens."""
        matmul(a, b, self.weights[i][where], trans_a=trans_a, first=first and not self.added[i])


def backward(
    dy: Array,
    x: Array,
    weights: Sequence[Array],
    dx: Array,
    gradients: Gradients,
    *,
    activation: str,
    gate_up: Array | None = None,
) -> None:
    """Fill dx and the weights' gradients. The outer loop is over blocks of ffn, which sum gradients over tokens."""
    w_gate, w_up, w_down = weights
    (tokens, hidden), ffn, sum_dtype = x.shape, len(w_gate), _wide(x.dtype)
    if gate_up is None and _few(tokens, hidden, ffn):
        gate_up = np.empty((tokens, 2 * ffn), x.dtype)
        swiglu_mlp_few.hidden(x, weights, activation=activation, kept=_halves(gate_up, x.dtype))
    kept = _halves(gate_up, x.dtype)
    step, block = _steps(tokens, ffn, True)
    element = packed(x.dtype.name)
    held = x.dtype if element == "uint32" else sum_dtype  # of dgate, dup and h
    blocks = [aligned_empty((block, step), held) for _ in range(3)]
    dx_total = dx if sum_dtype == dx.dtype else aligned_empty(dx.shape, sum_dtype)
    for f in _spans(ffn, block):
        wg, wu, wd = w_gate[f], w_up[f], w_down[:, f]
        for t in _spans(tokens, step):
            n, first = t.stop - t.start, t.start == 0
            dyt = pack(dy[t], element, trans=True)
            xt = dyt if gate_up is not None else pack(x[t], element, trans=True)
            dgate, dup, h = (b[: len(wg), :n] for b in blocks)
            dgate_panels, dup_panels = (Panels.empty(len(wg), n, element) for _ in range(2))
            rows, columns = tile_shape(len(h), n, element)
            cut = xt.blocks, dyt.blocks, dup_panels.blocks
            plan = Plan(rows, columns, ACTIVATIONS.index(activation), n, *cut)
            inputs = map(bits, (wg, wu, wd, *(half[t, f] for half in kept)))
            arrays = dyt.array, xt.array, *inputs, *map(bits, (dgate, dup, h))
            tasks = -(-len(h) // rows) * -(-n // columns)
            run = mlp_hidden_backward[x.dtype]
            launch(run, tasks, plan, *arrays, dgate_panels.array, dup_panels.array)
            del xt, dyt, arrays  # before the next arrays are made
            xt = pack(x[t], element, trans=False)
            gradients.add(0, f, dgate, xt, first=first)
            gradients.add(1, f, dup, xt, first=first)
            del xt
            ht = pack(h, element, trans=True)
            gradients.add(2, (slice(None), f), dy[t], ht, first=first, trans_a=True)
            del ht
            add_dx = partial(matmul, trans_a=True, trans_out=True, total=dx_total[t])
            add_dx(wg, dgate_panels, dx[t], first=f.start == 0, last=False)
            add_dx(wu, dup_panels, dx[t], first=False, last=f.stop == ffn)
            del dgate_panels, dup_panels
