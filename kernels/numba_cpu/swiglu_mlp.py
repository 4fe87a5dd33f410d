"""The gated MLP on the CPU: matrix products in blocks, the activation applied to tiles while they are in the cache.

forward    h = act(x @ w_gate.T) * (x @ w_up.T), y = h @ w_down.T
backward   gate, up and dh = dy @ w_down tile by tile, from them dgate, dup and h; then a matmul for each
           weight's gradient and two for dx

gate, up and dh exist as tiles only, and h, dgate and dup as blocks: TOKENS tokens by a block of ffn columns are
in flight, stored (ffn, tokens) as the products take them; y or dx adds up over the blocks. Everything between the
first read and the last write is float32. A few tokens are bound by reading the weights, so they take a kernel
that reads each weight once and widens it in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba import njit

from gpu_ops.kernels.numba_cpu import swiglu
from gpu_ops.kernels.numba_cpu.dtype import bits, load, read_row, write_row
from gpu_ops.kernels.numba_cpu.gemm import (
    BLOCK_K,
    matmul,
    multiply,
    pack_a,
    pack_b,
    tile_scratch,
    tile_shape,
    tile_size,
)
from gpu_ops.kernels.numba_cpu.ir.memory import scratch
from gpu_ops.kernels.numba_cpu.jit import REASSOC, compute, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

TOKENS = 1024  # a block of weights is packed once per so many tokens at most
SCRATCH = 1 << 21  # elements of one block: 8 MiB of float32
FEW = 8  # tokens up to which one pass over the weights is faster, measured: tiles win from 12 on
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def config(tokens: int, hidden: int, ffn: int, dtype: DType, *, gradients: bool = False) -> str:
    if not gradients and tokens <= FEW:
        return "one pass over the weights, all tokens at once"
    step, block = _steps(tokens, ffn, _kept(tokens, hidden, dtype) if gradients else 1)
    rows, columns = tile_shape(block, step)
    return f"blocks of {step} tokens x {block} of ffn, tiles of {columns} x {rows}"


def _kept(tokens: int, hidden: int, dtype: DType) -> int:
    """Length of the rows of the sums that the backward keeps per block: for 16-bit weights' gradients."""
    return hidden if dtype.itemsize == 2 and tokens > TOKENS else 1


def _steps(tokens: int, ffn: int, kept: int) -> tuple[int, int]:
    """Tokens and ffn columns in flight."""
    step = max(1, min(tokens, TOKENS))
    block = SCRATCH // max(step, kept)
    return step, max(1, min(ffn, max(block, 64)))


def _spans(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _wide(dtype: DType) -> DType:
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def forward(x: Array, weights: Sequence[Array], y: Array, *, activation: str) -> None:
    """x (tokens, hidden) and y (tokens, hidden_out); w_gate, w_up, w_down are (out_features, in_features)."""
    w_gate, w_up, w_down = weights
    (tokens, hidden), ffn, wide = x.shape, len(w_gate), _wide(x.dtype)
    if ffn == 0 or hidden == 0:
        y[...] = 0
        return
    if tokens <= FEW:
        with np.errstate(all="ignore"):  # a value too large for the dtype becomes inf, as in the kernels
            xw = x.astype(wide, copy=False)
            h = linear(xw, w_gate)
            swiglu.forward(h, linear(xw, w_up), h, activation=activation)
            y[...] = linear(h, w_down)
        return
    step, block = _steps(tokens, ffn, 1)
    h_block = np.empty((block, step), wide)
    sums = None
    if block < ffn and wide != y.dtype:
        sums = np.empty((step, y.shape[1]), wide)
    for t in _spans(tokens, step):
        xt, yt = x[t], y[t]
        total = None if sums is None else sums[: len(xt)]
        for f in _spans(ffn, block):
            wg, wu = w_gate[f], w_up[f]
            h = h_block[: len(wg), : len(xt)]
            tile = tile_shape(*h.shape)
            launch(
                mlp_hidden[x.dtype],
                _tasks(h, tile),
                tile,
                ACTIVATIONS.index(activation),
                *map(bits, (xt, wg, wu)),
                h,
            )
            matmul(
                w_down[:, f],
                h,
                yt,
                trans_out=True,
                total=total,
                first=f.start == 0,
                last=f.stop == ffn,
            )


def backward(
    dy: Array,
    x: Array,
    weights: Sequence[Array],
    dx: Array,
    dweights: Sequence[Array],
    *,
    activation: str,
) -> None:
    """Fills dx and the weights' gradients. Blocks of ffn outside: each adds up its own gradients over the tokens."""
    w_gate, w_up, w_down = weights
    dw_gate, dw_up, dw_down = dweights
    (tokens, hidden), ffn, wide = x.shape, len(w_gate), _wide(x.dtype)
    if tokens == 0 or ffn == 0 or hidden == 0 or len(w_down) == 0:
        for gradient in (dx, *dweights):
            gradient[...] = 0
        return
    step, block = _steps(tokens, ffn, _kept(tokens, max(hidden, len(w_down)), x.dtype))
    blocks = [np.empty((block, step), wide) for _ in range(3)]
    dx_total = dx if wide == dx.dtype else np.empty(dx.shape, wide)
    for f in _spans(ffn, block):
        wg, wu, wd = w_gate[f], w_up[f], w_down[:, f]
        targets = (dw_gate[f], dw_up[f], dw_down[:, f])
        totals: Sequence[Array | None] = (None,) * 3
        if step < tokens and wide != x.dtype:
            totals = [np.empty(w.shape, wide) for w in targets]
        for t in _spans(tokens, step):
            xt, dyt = x[t], dy[t]
            dgate, dup, h = (b[: len(wg), : len(xt)] for b in blocks)
            tile = tile_shape(*h.shape)
            launch(
                mlp_hidden_backward[x.dtype],
                _tasks(h, tile),
                tile,
                ACTIVATIONS.index(activation),
                *map(bits, (dyt, xt, wg, wu, wd)),
                dgate,
                dup,
                h,
            )
            ends = {"first": t.start == 0, "last": t.stop == tokens}
            matmul(dgate, xt, targets[0], total=totals[0], **ends)
            matmul(dup, xt, targets[1], total=totals[1], **ends)
            matmul(h, dyt, targets[2], trans_out=True, total=totals[2], **ends)
            matmul(dgate, wg, dx[t], trans_a=True, total=dx_total[t], first=f.start == 0, last=False)
            matmul(dup, wu, dx[t], trans_a=True, total=dx_total[t], first=False, last=f.stop == ffn)


def _tasks(h: Array, tile: tuple[int, int]) -> int:
    return -(-h.shape[0] // tile[0]) * -(-h.shape[1] // tile[1])


# --- tiles of gate, up and dh, and what becomes of them ----------------------------------------------


@njit
def gate_tile(activation, gate, up, h, f0, m, t0, n):
    for i in range(m):
        rg, ru = gate[i], up[i]
        rh = write_row(h, (f0 + i,))[t0 : t0 + n]
        if activation == 0:
            for j in range(n):
                rh[j] = swiglu.silu(rg[j]) * ru[j]
        elif activation == 1:
            for j in range(n):
                rh[j] = swiglu.gelu(rg[j]) * ru[j]
        else:
            for j in range(n):
                rh[j] = swiglu.gelu_tanh(rg[j]) * ru[j]


@njit
def gate_tile_backward(activation, gate, up, dh, m, n):
    """gate, up and dh become dgate, dup and h."""
    for i in range(m):
        rg, ru, rd = gate[i], up[i], dh[i]
        for j in range(n):
            if activation == 0:
                act, slope = swiglu.silu_backward(rg[j])
            elif activation == 1:
                act, slope = swiglu.gelu_backward(rg[j])
            else:
                act, slope = swiglu.gelu_tanh_backward(rg[j])
            d, u = rd[j], ru[j]
            rg[j] = d * u * slope
            ru[j] = d * act
            rd[j] = act * u


@njit
def put(to, tile, f0, m, t0, n):
    for i in range(m):
        row = write_row(to, (f0 + i,))[t0 : t0 + n]
        source = tile[i]
        for j in range(n):
            row[j] = source[j]


def _forward_signature(t: str) -> tuple[types.Type, ...]:
    pair = types.UniTuple(types.int64, 2)
    return pair, types.int64, *(read(t, 2),) * 3, write(compute(t).name, 2)


@kernel(_forward_signature)
def mlp_hidden(state, n_tasks, tile, activation, x, w_gate, w_up, h):
    """h (ffn, tokens) = act(w_gate x.T) * (w_up x.T)"""
    (ffn, tokens), hidden = h.shape, x.shape[1]
    rows, columns = tile
    across = (tokens + columns - 1) // columns
    wide = h.dtype.type(0)
    gate, up = scratch(rows, columns, wide), scratch(rows, columns, wide)
    a, b, on_way = tile_scratch(columns, wide)
    task = claim(state)
    while task < n_tasks:
        f0, m = tile_size(task // across, rows, ffn)
        t0, n = tile_size(task % across, columns, tokens)
        for k0 in range(0, max(hidden, 1), BLOCK_K):
            k = min(BLOCK_K, hidden - k0)
            pack_b(b, on_way, x, True, t0, n, k0, k)
            pack_a(a, w_gate, False, f0, m, k0, k)
            multiply(gate, a, False, b, m, n, k, k0 > 0)
            pack_a(a, w_up, False, f0, m, k0, k)
            multiply(up, a, False, b, m, n, k, k0 > 0)
        gate_tile(activation, gate, up, h, f0, m, t0, n)
        task = claim(state)


def _backward_signature(t: str) -> tuple[types.Type, ...]:
    pair = types.UniTuple(types.int64, 2)
    return pair, types.int64, *(read(t, 2),) * 5, *(write(compute(t).name, 2),) * 3


@kernel(_backward_signature)
def mlp_hidden_backward(state, n_tasks, tile, activation, dy, x, w_gate, w_up, w_down, dgate, dup, h):
    """dgate, dup and h, all (ffn, tokens), from gate, up and dh = w_down.T dy.T"""
    (ffn, tokens), hidden, hidden_out = h.shape, x.shape[1], dy.shape[1]
    rows, columns = tile
    across = (tokens + columns - 1) // columns
    wide = h.dtype.type(0)
    gate, up, dh = scratch(rows, columns, wide), scratch(rows, columns, wide), scratch(rows, columns, wide)
    a, b, on_way = tile_scratch(columns, wide)
    task = claim(state)
    while task < n_tasks:
        f0, m = tile_size(task // across, rows, ffn)
        t0, n = tile_size(task % across, columns, tokens)
        for k0 in range(0, max(hidden, 1), BLOCK_K):
            k = min(BLOCK_K, hidden - k0)
            pack_b(b, on_way, x, True, t0, n, k0, k)
            pack_a(a, w_gate, False, f0, m, k0, k)
            multiply(gate, a, False, b, m, n, k, k0 > 0)
            pack_a(a, w_up, False, f0, m, k0, k)
            multiply(up, a, False, b, m, n, k, k0 > 0)
        for k0 in range(0, max(hidden_out, 1), BLOCK_K):
            k = min(BLOCK_K, hidden_out - k0)
            pack_b(b, on_way, dy, True, t0, n, k0, k)
            pack_a(a, w_down, True, f0, m, k0, k)
            multiply(dh, a, True, b, m, n, k, k0 > 0)
        gate_tile_backward(activation, gate, up, dh, m, n)
        put(dgate, gate, f0, m, t0, n)
        put(dup, up, f0, m, t0, n)
        put(h, dh, f0, m, t0, n)
        task = claim(state)


# --- a few tokens ----------------------------------------------------------------------------------


def linear(x: Array, w: Array) -> Array:
    """``x @ w.T`` for a few rows of x: every weight is read from memory once."""
    if len(x) == 1 and x.dtype == w.dtype:
        return np.matmul(x, w.T)  # one row: NumPy's matrix-vector product, measured 22 ms against 30 ms here
    y = np.empty((len(x), len(w)), x.dtype)
    chunk = items_per_task(*w.shape)
    launch(linear_rows[w.dtype], -(-len(w) // chunk), chunk, x, bits(w), y)
    return y


def _linear_signature(t: str) -> tuple[types.Type, ...]:
    wide = compute(t).name
    return types.int64, read(wide, 2), read(t, 2), write(wide, 2)


@kernel(_linear_signature, fastmath=REASSOC)
def linear_rows(state, n_tasks, chunk, x, w, y):
    tokens, cols = x.shape
    task = claim(state)
    while task < n_tasks:
        stop = min(len(w), (task + 1) * chunk)
        for r in range(task * chunk, stop, 4):
            # four rows at once: four streams from memory, and x is read once for them; the last ones may repeat
            r1, r2, r3 = min(r + 1, stop - 1), min(r + 2, stop - 1), min(r + 3, stop - 1)
            w0, w1, w2, w3 = read_row(w, (r,)), read_row(w, (r1,)), read_row(w, (r2,)), read_row(w, (r3,))
            for t in range(tokens):
                row = read_row(x, (t,))
                s0 = s1 = s2 = s3 = y.dtype.type(0.0)
                for i in range(cols):
                    v = row[i]
                    s0 += v * load(w0, i)
                    s1 += v * load(w1, i)
                    s2 += v * load(w2, i)
                    s3 += v * load(w3, i)
                y[t, r], y[t, r1], y[t, r2], y[t, r3] = s0, s1, s2, s3
        task = claim(state)
