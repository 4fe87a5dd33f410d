"""Formulas of attention and of its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.fuzzing.maths import Array, Maths

Options = dict[str, Any]


def distances(options: Options, sq: int, sk: int) -> Array:
    """Distance of each key to the left of each query."""
    offset = options["q_start"] - options["k_start"] if "q_start" in options else sk - sq
    return np.arange(sq)[:, None] + offset - np.arange(sk)[None, :]


def visible(options: Options, batch: int, heads: int, sq: int, sk: int) -> Array:
    """Visible pairs, bool (batch, heads, sq, sk)."""
    distance = distances(options, sq, sk)
    seen = np.ones((batch, heads, sq, sk), bool)
    left, right = options.get("window_size", (-1, -1))
    if options.get("causal"):
        seen &= distance >= 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    if "bias" in options:
        seen &= options["bias"] != -np.inf
    if "block_mask" in options:
        mask = options["block_mask"]
        rows, columns = np.arange(sq) // mask.block_q, np.arange(sk) // mask.block_k
        blocks = (-(-sq // mask.block_q), -(-sk // mask.block_k))
        grid = np.broadcast_to(mask.visible, (*mask.visible.shape[:-2], *blocks))
        seen &= grid[..., rows[:, None], columns[None, :]]
    return seen


def scores(m: Maths, q: Array, k: Array, options: Options, seen: Array) -> tuple[Array, Array]:
    """Scores of (batch, heads, seqlen, head_dim) arrays, and the slope of the softcap."""
    sq, head_dim = q.shape[2:]
    sk = k.shape[2]
    s = m.r(m.matmul(q, k.swapaxes(-1, -2)) * m.wide(options.get("softmax_scale", head_dim**-0.5)))
    slope = np.ones_like(s)
    if cap := options.get("softcap", 0.0):
        t = m.r(np.tanh(m.r(s / m.wide(cap))))
        s, slope = m.r(t * m.wide(cap)), m.r(1 - m.r(t * t))
    if "alibi_slopes" in options:
        slopes = m.load(options["alibi_slopes"])
        slopes = (slopes if slopes.ndim == 2 else slopes[None])[:, :, None, None]
        s = m.r(s - m.r(slopes * np.abs(distances(options, sq, sk))))
    if "bias" in options:
        bias = m.load(options["bias"])
        s = m.r(s + np.where(np.isinf(bias), 0, bias))
    return np.where(seen, s, -np.inf), slope


def forward(m: Maths, q: Array, k: Array, v: Array, options: Options) -> tuple[Array, Array]:
    """Results out and lse of loaded (batch, heads, seqlen, head_dim) arrays; k and v may have fewer heads."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    seen = visible(options, *q.shape[:3], k.shape[2])
    s, _ = scores(m, q, k, options, seen)
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    sink = None
    if "sinks" in options:
        sink = m.load(options["sinks"])[None, :, None, None]
        top = np.maximum(top, sink)
    top = np.where(top == -np.inf, 0, top)
    weights = np.where(seen, m.r(np.exp(m.r(s - top))), 0)
    total = m.sum(weights)
    if sink is not None:
        total = m.r(total + m.r(np.exp(m.r(sink - top))))
    shown = m.r(weights / np.where(total == 0, 1, total))
    lse = np.where(total == 0, -np.inf, m.r(top + m.r(np.log(np.where(total == 0, 1, total)))))
    return m.matmul(shown, v), lse[..., 0]


def backward(m: Maths, x: dict[str, Array], lse: Array, options: Options) -> tuple[Array, ...]:
    """Gradients dq, dk, dv and, where given, dbias and dsinks, of (batch, heads, seqlen, head_dim) arrays."""
    q, dout, out = x["q"], x["dout"], x["out"]
    heads_kv = x["k"].shape[1]
    groups = q.shape[1] // heads_kv
    k, v = (np.repeat(x[name], groups, axis=1) for name in ("k", "v"))
    scale = m.wide(options.get("softmax_scale", q.shape[-1] ** -0.5))
    seen = visible(options, *q.shape[:3], k.shape[2])
    s, slope = scores(m, q, k, options, seen)
    lse = lse[..., None]
    probs = np.where(seen, m.r(np.exp(m.r(np.where(seen, s - lse, 0)))), 0)
    delta = m.sum(m.r(dout * out))
    ds = m.r(probs * m.r(m.matmul(dout, v.swapaxes(-1, -2)) - delta))
    inner = m.r(m.r(ds * slope) * scale)

    def grouped(y: Array) -> Array:
        return m.sum(y.reshape(y.shape[0], heads_kv, groups, *y.shape[2:]), axis=2)[:, :, 0]

    grads = [m.matmul(inner, k), grouped(m.matmul(inner.swapaxes(-1, -2), q))]
    grads.append(grouped(m.matmul(probs.swapaxes(-1, -2), dout)))
    if "bias" in options:
        dbias = ds
        shape = options["bias"].shape
        for axis in range(4):
            if axis < 4 - len(shape) or shape[axis - 4 + len(shape)] == 1:
                dbias = m.sum(dbias, axis=axis)
        grads.append(dbias.reshape(shape))
    if "sinks" in options:
        sink = m.load(options["sinks"])[None, :, None, None]
        share = np.where(lse == -np.inf, 0, m.r(np.exp(m.r(sink - lse))))
        grads.append(-m.sum(m.sum(m.r(share * delta), axis=2), axis=0)[0, :, 0, 0])
    return tuple(grads)


def heads_first(x: Array, layout: str = "bshd") -> Array:
    return x.swapaxes(1, 2) if layout == "bshd" else x


def of_sequence(options: Options, b: int) -> Options:
    """Options of sequence b only."""
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.ndim == 1 else {**options, "alibi_slopes": slopes[b]}


def by_sequence(m: Maths, given: dict[str, Array], cu_q: Array, cu_k: Array) -> list[dict[str, Array]]:
    """Loaded arrays, (1, heads, seqlen, head_dim), of each sequence."""
    loaded = {name: m.load(x).swapaxes(0, 1)[None] for name, x in given.items()}
    sequences = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        sequences.append({name: x[:, :, keys if name in "kv" else rows] for name, x in loaded.items()})
    return sequences


def together(parts: list[Array]) -> Array:
    """Pack sequences into (total, heads, head_dim)."""
    return np.concatenate(parts, 2)[0].swapaxes(0, 1)


def varlen_forward(
    m: Maths, given: dict[str, Array], cu_q: Array, cu_k: Array, options: Options
) -> tuple[Array, Array]:
    """Results out (total_q, heads, head_dim_v) and lse (heads, total_q)."""
    parts = [
        forward(m, x["q"], x["k"], x["v"], of_sequence(options, b))
        for b, x in enumerate(by_sequence(m, given, cu_q, cu_k))
    ]
    return together([out for out, _ in parts]), np.concatenate([lse for _, lse in parts], 2)[0]
