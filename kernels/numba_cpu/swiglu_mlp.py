"""The gated MLP on the CPU: matmuls by NumPy's BLAS in blocks, activations by the fused kernels between them.

forward    y = (act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T
backward   gate and up again, dh = dy @ w_down, then dgate, dup, and two matmuls for each weight

Nothing of size (tokens, ffn) exists: TOKENS tokens by a block of ffn columns are in flight, and y or dx adds up
over the blocks. 16-bit operands are widened one block at a time into float32 scratch; everything between the
first read and the last write is float32. A few tokens are bound by reading the weights, so they take a kernel
that reads each weight once and widens it in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cpu import swiglu
from gpu_ops.kernels.numba_cpu.dtype import bits, load, read_row, store, write_row
from gpu_ops.kernels.numba_cpu.jit import REASSOC, kernel, read, types, write
from gpu_ops.kernels.numba_cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

TOKENS = 1024  # a block of weights is packed by BLAS (and widened by us) once per so many tokens
SCRATCH = 1 << 21  # elements of one scratch matrix: 8 MiB of float32
HALF = ("float16", "bfloat16")
DType = np.dtype[Any]


def config(tokens: int, hidden: int, ffn: int, dtype: DType, *, gradients: bool = False) -> str:
    if not gradients and _few(tokens, dtype):
        return "one pass over the weights, all tokens at once"
    step, block = _steps(tokens, hidden, ffn, dtype)
    return f"BLAS on blocks of {step} tokens x {block} of ffn"


def _few(tokens: int, dtype: DType) -> bool:
    """Where :func:`linear` beats BLAS, measured: up to 2x at 2 to 8 tokens, 3x where BLAS needs widened weights."""
    return tokens <= 16 if dtype.itemsize == 2 else 2 <= tokens <= 8


def _steps(tokens: int, hidden: int, ffn: int, dtype: DType) -> tuple[int, int]:
    """Tokens and ffn columns in flight."""
    step = max(1, min(tokens, TOKENS))
    # a widened block of a weight must fit in the scratch as well
    block = SCRATCH // max(step, hidden if dtype.itemsize == 2 else 1, 1)
    return step, max(1, min(ffn, max(block, 64)))


def _spans(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def forward(x: Array, weights: Sequence[Array], y: Array, *, activation: str) -> None:
    """x (tokens, hidden) and y (tokens, hidden_out); w_gate, w_up, w_down are (out_features, in_features)."""
    w_gate, w_up, w_down = weights
    tokens, hidden = x.shape
    ffn = len(w_gate)
    if ffn == 0 or hidden == 0:
        y[...] = 0
        return
    if _few(tokens, x.dtype):
        wide = widened(x)
        h = activate(linear(wide, w_gate), linear(wide, w_up), activation)
        narrow(linear(h, w_down), y)
        return
    step, block = _steps(tokens, hidden, ffn, x.dtype)
    for t in _spans(tokens, step):
        xt = widened(x[t])
        total = y[t] if y.dtype == xt.dtype else np.empty(y[t].shape, xt.dtype)
        spare = np.empty(total.shape, xt.dtype) if block < ffn else total
        for f in _spans(ffn, block):
            h = activate(matmul(xt, widened(w_gate[f]).T), matmul(xt, widened(w_up[f]).T), activation)
            add_matmul(total, h, widened(w_down[:, f]).T, spare, first=f.start == 0)
        if total.dtype != y.dtype:
            narrow(total, y[t])


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
    (tokens, hidden), ffn = x.shape, len(w_gate)
    if tokens == 0 or ffn == 0 or hidden == 0 or len(w_down) == 0:
        for gradient in (dx, *dweights):
            gradient[...] = 0
        return
    step, block = _steps(tokens, hidden, ffn, x.dtype)
    compute = np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype
    same = compute == x.dtype
    total_dx = dx if same else np.empty(dx.shape, compute)
    spare_dx = np.empty((step, hidden), compute)
    for f in _spans(ffn, block):
        targets = [dw_gate[f], dw_up[f], dw_down[:, f]]
        totals = targets if same else [np.empty(w.shape, compute) for w in targets]
        spares = [np.empty(w.shape, compute) for w in targets] if step < tokens else totals
        wg, wu, wd = widened(w_gate[f]), widened(w_up[f]), widened(w_down[:, f])
        for t in _spans(tokens, step):
            xt, dyt = widened(x[t]), widened(dy[t])
            gate, up, dh = matmul(xt, wg.T), matmul(xt, wu.T), matmul(dyt, wd)
            h = np.empty_like(gate)
            swiglu.forward(gate, up, h, activation=activation, in_place=False)
            swiglu.backward(
                dh, gate, up, gate, up, activation=activation, in_place=True
            )  # gate and up are their gradients from here on
            first = t.start == 0
            add_matmul(totals[0], gate.T, xt, spares[0], first=first)
            add_matmul(totals[1], up.T, xt, spares[1], first=first)
            add_matmul(totals[2], dyt.T, h, spares[2], first=first)
            add_matmul(total_dx[t], gate, wg, spare_dx[: len(xt)], first=f.start == 0)
            add_matmul(total_dx[t], up, wu, spare_dx[: len(xt)], first=False)
        if not same:
            for total, target in zip(totals, targets, strict=True):
                narrow(total, target)
    if not same:
        narrow(total_dx, dx)


def matmul(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):  # inf and NaN are values here, as in the kernels
        return np.matmul(a, b)


def add_matmul(total: Array, a: Array, b: Array, spare: Array, *, first: bool) -> None:
    """``total += a @ b``, or ``=`` the first time; NumPy's matmul cannot add, so it goes through ``spare``."""
    with np.errstate(all="ignore"):
        if first:
            np.matmul(a, b, out=total)
        else:
            np.add(total, np.matmul(a, b, out=spare), out=total)


def activate(gate: Array, up: Array, activation: str) -> Array:
    """``act(gate) * up``, over gate."""
    swiglu.forward(gate, up, gate, activation=activation, in_place=True)
    return gate


def widened(x: Array) -> Array:
    """float16 and bfloat16 as float32, else ``x`` itself."""
    if x.dtype.itemsize != 2:
        return x
    wide = np.empty(x.shape, np.float32)
    chunk = items_per_task(*x.shape)
    launch(widen_rows[x.dtype], -(-len(x) // chunk), chunk, bits(x), wide)
    return wide


def narrow(wide: Array, x: Array) -> None:
    """float32 into float16 or bfloat16, rounded to nearest even; a plain copy for other dtypes."""
    if x.dtype == wide.dtype:
        x[...] = wide
        return
    chunk = items_per_task(*x.shape)
    launch(narrow_rows[x.dtype], -(-len(x) // chunk), chunk, wide, bits(x))


def linear(x: Array, w: Array) -> Array:
    """``x @ w.T`` for a few rows of x: every weight is read from memory once."""
    y = np.empty((len(x), len(w)), x.dtype)
    chunk = items_per_task(*w.shape)
    launch(linear_rows[w.dtype], -(-len(w) // chunk), chunk, x, bits(w), y)
    return y


@kernel(lambda t: (types.int64, read(t, 2), write("float32", 2)), HALF)
def widen_rows(state, n_tasks, chunk, x, wide):
    rows, cols = x.shape
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rx, rw = read_row(x, (r,)), write_row(wide, (r,))
            for i in range(cols):
                rw[i] = load(rx, i)
        task = claim(state)


@kernel(lambda t: (types.int64, read("float32", 2), write(t, 2)), HALF)
def narrow_rows(state, n_tasks, chunk, wide, x):
    rows, cols = x.shape
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(rows, (task + 1) * chunk)):
            rw, rx = read_row(wide, (r,)), write_row(x, (r,))
            for i in range(cols):
                store(rx, i, rw[i])
        task = claim(state)


def _linear_signature(t: str) -> tuple[types.Type, ...]:
    wide = "float64" if t == "float64" else "float32"
    return types.int64, read(wide, 2), read(t, 2), write(wide, 2)


@kernel(_linear_signature, fastmath=REASSOC)
def linear_rows(state, n_tasks, chunk, x, w, y):
    tokens, cols = x.shape
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min(len(w), (task + 1) * chunk)):
            rw = read_row(w, (r,))
            t = 0
            while t + 4 <= tokens:  # four at once: each weight is widened once for four sums
                x0, x1, x2, x3 = (
                    read_row(x, (t,)),
                    read_row(x, (t + 1,)),
                    read_row(x, (t + 2,)),
                    read_row(x, (t + 3,)),
                )
                s0 = s1 = s2 = s3 = y.dtype.type(0.0)
                for i in range(cols):
                    v = load(rw, i)
                    s0 += x0[i] * v
                    s1 += x1[i] * v
                    s2 += x2[i] * v
                    s3 += x3[i] * v
                y[t, r], y[t + 1, r], y[t + 2, r], y[t + 3, r] = s0, s1, s2, s3
                t += 4
            while t < tokens:
                x0 = read_row(x, (t,))
                s0 = y.dtype.type(0.0)
                for i in range(cols):
                    s0 += x0[i] * load(rw, i)
                y[t, r] = s0
                t += 1
        task = claim(state)
