"""Trials of the attention functions."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array, Maths, nearest
from scripts.fuzzing.trial import BACKWARD, Trial

Options = dict[str, Any]


def computing(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of lse, statistics and sums over tokens."""
    return FLOAT64 if dtype == np.float64 else FLOAT32


def distances(options: Options, sq: int, sk: int) -> Array:
    """How far each key lies to the left of each query."""
    offset = options["q_start"] - options["k_start"] if "q_start" in options else sk - sq
    return np.arange(sq)[:, None] + offset - np.arange(sk)[None, :]


def visible(options: Options, batch: int, heads: int, sq: int, sk: int) -> Array:
    """Bool (batch, heads, sq, sk)."""
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
    """Of (batch, heads, seqlen, head_dim) arrays: the scores, and the slope of the softcap."""
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
    """out and lse of (batch, heads, seqlen, head_dim) arrays that are loaded; k and v may have fewer heads."""
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
    """dq, dk, dv and, where given, dbias and dsinks, of (batch, heads, seqlen, head_dim) arrays."""
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

    found = [m.matmul(inner, k), grouped(m.matmul(inner.swapaxes(-1, -2), q))]
    found.append(grouped(m.matmul(probs.swapaxes(-1, -2), dout)))
    if "bias" in options:
        dbias = ds
        shape = options["bias"].shape
        for axis in range(4):
            if axis < 4 - len(shape) or shape[axis - 4 + len(shape)] == 1:
                dbias = m.sum(dbias, axis=axis)
        found.append(dbias.reshape(shape))
    if "sinks" in options:
        sink = m.load(options["sinks"])[None, :, None, None]
        share = np.where(lse == -np.inf, 0, m.r(np.exp(m.r(sink - lse))))
        found.append(-m.sum(m.sum(m.r(share * delta), axis=2), axis=0)[0, :, 0, 0])
    return tuple(found)


def heads_first(x: Array, layout: str = "bshd") -> Array:
    return x.swapaxes(1, 2) if layout == "bshd" else x


def dims(draw: Draw) -> tuple[int, int, int, int, int]:
    """batch, heads, heads_kv, head_dim, head_dim_v."""
    heads_kv = draw.pick(1, 1, 2, 3)
    head_dim = draw.pick(8, 16, 32) if draw.small else draw.pick(1, 3, 8, 16, 24, 32, 64, 64, 80, 128)
    head_dim_v = (
        head_dim if draw.chance(0.85) else draw.pick(8, 16) if draw.small else draw.pick(1, 8, 40, 64)
    )
    return draw.pick(1, 1, 2, 3), heads_kv * draw.pick(1, 1, 2, 4), heads_kv, head_dim, head_dim_v


def options_of(draw: Draw, batch: int, heads: int) -> Options:
    found: Options = {}
    if draw.chance(0.4):
        found["causal"] = True
    if draw.chance(0.25):
        found["window_size"] = (draw.pick(-1, 0, 1, 5, 40), draw.pick(-1, 0, 3, 40))
    if draw.chance(0.2):
        found["softmax_scale"] = draw.pick(0.05, 0.3, 1.0, -0.2)
    if draw.chance(0.2):
        found["softcap"] = draw.pick(0.5, 5.0, 30.0)
    if draw.chance(0.2):
        found["sinks"] = draw.array((heads,), np.float32)
    if draw.chance(0.2):
        shape = (heads,) if draw.chance(0.5) else (batch, heads)
        found["alibi_slopes"] = draw.place(np.abs(draw.values(shape, np.float32, 0.2)))
    return found


def dense_options(draw: Draw, dtype: Any, shape: tuple[int, int, int, int]) -> Options:
    """bias, block_mask and positions, which only :func:`attention` has."""
    found: Options = {}
    if draw.chance(0.2):
        found["q_start"], found["k_start"] = draw.pick(0, 5, 40, 1000), draw.pick(0, 7, 60, 1030)
    if draw.chance(0.2):
        cut = tuple(n if draw.chance(0.6) else 1 for n in shape)[draw.pick(0, 0, 1, 2) :]
        bias = draw.values(cut, draw.pick(dtype, FLOAT32))
        if draw.chance(0.4):
            bias[draw.rng.random(cut) < 0.3] = -np.inf
        found["bias"] = draw.place(bias)
    if draw.chance(0.15):
        block_q, block_k = draw.pick(1, 4, 16, 64), draw.pick(1, 4, 16, 64)
        blocks = (-(-shape[2] // block_q), -(-shape[3] // block_k))
        lead = draw.pick((), (1, shape[1]), (shape[0], shape[1]))
        grid = draw.rng.random((*lead, *blocks)) < draw.pick(0.3, 0.7)
        found["block_mask"] = gpu_ops.BlockMask(grid, block_q, block_k)
    return found


def attention(draw: Draw) -> Trial:
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    limit = 33 if draw.small else 200
    sq, sk = draw.length(limit, 0.02), draw.length(limit, 0.02)
    layout = draw.pick("bshd", "bhsd")
    q, k, v = (
        draw.array((batch, s, h, d) if layout == "bshd" else (batch, h, s, d), dtype)
        for s, h, d in ((sq, heads, head_dim), (sk, heads_kv, head_dim), (sk, heads_kv, head_dim_v))
    )
    options = options_of(draw, batch, heads) | dense_options(draw, dtype, (batch, heads, sq, sk))
    arguments = {"q": q, "k": k, "v": v, **options}
    if layout == "bhsd" or draw.chance(0.2):
        arguments["layout"] = layout
    with_lse = draw.chance(0.5)
    results: tuple[Any, ...] = (dtype,)
    if with_lse:
        arguments["return_lse"] = True
        results = (dtype, computing(dtype))
    if draw.chance(0.3):
        shape = (batch, sq, heads, head_dim_v) if layout == "bshd" else (batch, heads, sq, head_dim_v)
        out = draw.out(shape, dtype)
        pair = with_lse and draw.chance(0.5)
        arguments["out"] = (out, draw.out((batch, heads, sq), computing(dtype))) if pair else out

    def formula(m: Maths) -> tuple[Array, ...]:
        out, lse = forward(m, *(heads_first(m.load(x), layout) for x in (q, k, v)), options)
        return (heads_first(out, layout), lse)[: len(results)]

    axis = 1 if layout == "bshd" else 2
    linked = (("v", axis), ("k", 3), ("v", 3 - axis), ("q", 0))
    return Trial("attention", arguments, draw, dtype, results, formula, linked=linked)


def attention_backward(draw: Draw) -> Trial:
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    sq, sk = draw.length(130), draw.length(130)
    given = {
        name: draw.array((batch, s, h, d), dtype)
        for name, s, h, d in (
            ("dout", sq, heads, head_dim_v),
            ("q", sq, heads, head_dim),
            ("k", sk, heads_kv, head_dim),
            ("v", sk, heads_kv, head_dim_v),
        )
    }
    options = options_of(draw, batch, heads) | dense_options(draw, dtype, (batch, heads, sq, sk))
    m = Maths(dtype, False)
    with np.errstate(all="ignore"):
        out, lse = forward(m, *(heads_first(m.load(given[name])) for name in ("q", "k", "v")), options)
    out = draw.place(nearest(heads_first(out), dtype))
    lse = draw.place(lse.astype(computing(dtype)))
    results: tuple[Any, ...] = (dtype,) * 3
    arguments = {**given, "out": out, "lse": lse, **options}
    extra = draw.chance(0.4)
    if extra:
        arguments["return_extra"] = True
        results += tuple(options["bias"].dtype for _ in "b" if "bias" in options)
        results += tuple(computing(dtype) for _ in "s" if "sinks" in options)
    if draw.chance(0.3):
        arguments["grads"] = tuple(draw.out(given[name].shape, dtype) for name in "qkv")

    def formula(m: Maths) -> tuple[Array, ...]:
        # a variant's lse and out must be those of its inputs
        x = {name: heads_first(m.load(array)) for name, array in given.items()}
        w = Maths(dtype, False, m.variant)
        made, sums = forward(w, *(heads_first(w.load(given[name])) for name in ("q", "k", "v")), options)
        x["out"] = m.r(nearest(made, dtype).astype(m.wide))
        found = backward(m, x, sums.astype(computing(dtype)).astype(m.wide), options)
        return (*(heads_first(one) for one in found[:3]), *(found[3:] if extra else ()))

    linked = (("v", 1), ("k", 3), ("dout", 1), ("out", 2), ("lse", 2))
    return Trial("attention_backward", arguments, draw, dtype, results, formula, BACKWARD, linked=linked)


def starts(draw: Draw, batch: int, limit: int) -> Array:
    return np.cumsum([0, *(draw.length(limit, 0.15) for _ in range(batch))]).astype(np.int32)


def attention_varlen(draw: Draw) -> Trial:
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    limit = 17 if draw.small else 100
    cu_q, cu_k = starts(draw, batch, limit), starts(draw, batch, limit)
    q = draw.array((cu_q[-1], heads, head_dim), dtype)
    k, v = (draw.array((cu_k[-1], heads_kv, d), dtype) for d in (head_dim, head_dim_v))
    options = options_of(draw, batch, heads)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": draw.place(cu_q), "cu_seqlens_k": draw.place(cu_k)}
    arguments |= {**options, "return_lse": True}
    if draw.chance(0.3):
        arguments["max_seqlen_q"] = int(np.diff(cu_q).max(initial=0)) + draw.pick(0, 0, 7)

    def formula(m: Maths) -> tuple[Array, ...]:
        x, y, z = (m.load(one).swapaxes(0, 1)[None] for one in (q, k, v))
        outs, sums = [np.empty((1, heads, 0, head_dim_v))], [np.empty((1, heads, 0))]
        for b in range(batch):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            of_sequence = dict(options)
            if options.get("alibi_slopes", np.empty(0)).ndim == 2:
                of_sequence["alibi_slopes"] = options["alibi_slopes"][b]
            out, lse = forward(m, x[:, :, rows], y[:, :, keys], z[:, :, keys], of_sequence)
            outs.append(out)
            sums.append(lse)
        return np.concatenate(outs, 2)[0].swapaxes(0, 1), np.concatenate(sums, 2)[0]

    results = (dtype, computing(dtype))
    return Trial("attention_varlen", arguments, draw, dtype, results, formula, linked=(("v", 0), ("k", 2)))


def attention_decode(draw: Draw) -> Trial:
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    sq, capacity = draw.pick(1, 1, 1, 2, 5), draw.length(40 if draw.small else 384)
    used = draw.rng.integers(0, capacity + 1, batch).astype(np.int32)
    options = options_of(draw, batch, heads)
    q = draw.array((batch, sq, heads, head_dim), dtype)
    dense = [draw.values((batch, capacity, heads_kv, d), dtype) for d in (head_dim, head_dim_v)]
    arguments: dict[str, Any] = {"q": q}
    if paged := draw.chance(0.5):
        page = draw.pick(1, 4, 16, 64)
        width = -(-capacity // page)
        count = batch * width + draw.pick(0, 3)
        table = draw.rng.permutation(count)[: batch * width].reshape(batch, width).astype(np.int32)
    for name, cache in zip(("k_cache", "v_cache"), dense, strict=True):
        stored = np.full(cache.shape, np.nan, dtype)
        if paged:
            stored = np.full((count, page, *cache.shape[2:]), np.nan, dtype)
        for b in range(batch):
            for j in range(used[b]):
                at = (table[b, j // page], j % page) if paged else (b, j)
                stored[at] = cache[b, j]
        arguments[name] = draw.place(stored)
    arguments["seqused_k"] = draw.place(used)
    if paged:
        table[np.arange(width)[None] * page >= used[:, None]] = -1
        arguments["block_table"] = draw.place(table)
    if draw.chance(0.2):
        arguments["num_splits"] = draw.pick(1, 2, 3, 7)
    arguments |= {**options, "return_lse": True}

    def formula(m: Maths) -> tuple[Array, ...]:
        x, y, z = (heads_first(m.load(one)) for one in (q, *dense))
        found = []
        for b in range(batch):
            of_sequence = dict(options)
            if options.get("alibi_slopes", np.empty(0)).ndim == 2:
                of_sequence["alibi_slopes"] = options["alibi_slopes"][b]
            found.append(
                forward(m, x[b : b + 1], *(one[b : b + 1, :, : used[b]] for one in (y, z)), of_sequence)
            )
        return heads_first(np.concatenate([out for out, _ in found])), np.concatenate(
            [lse for _, lse in found]
        )

    results = (dtype, computing(dtype))
    linked = (("v_cache", 2), ("k_cache", 3), ("seqused_k", 0))
    return Trial("attention_decode", arguments, draw, dtype, results, formula, linked=linked)


TRIALS = (attention, attention, attention_backward, attention_varlen, attention_decode)
