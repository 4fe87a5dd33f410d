"""Trials of the attention functions, and their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array, Maths, nearest
from scripts.fuzzing.trial import BACKWARD, Trial

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


def computing(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of lse, statistics and sums over tokens."""
    return FLOAT64 if dtype == np.float64 else FLOAT32


def dims(draw: Draw) -> tuple[int, int, int, int, int]:
    """Sizes batch, heads, heads_kv, head_dim, head_dim_v."""
    heads_kv = draw.pick(1, 1, 2, 3)
    head_dim = draw.pick(8, 16, 32) if draw.small else draw.pick(1, 3, 8, 16, 24, 32, 64, 64, 80, 128)
    head_dim_v = (
        head_dim if draw.chance(0.85) else draw.pick(8, 16) if draw.small else draw.pick(1, 8, 40, 64)
    )
    return draw.pick(1, 1, 2, 3), heads_kv * draw.pick(1, 1, 2, 4), heads_kv, head_dim, head_dim_v


def options_of(draw: Draw, batch: int, heads: int) -> Options:
    options: Options = {}
    if draw.chance(0.4):
        options["causal"] = True
    if draw.chance(0.25):
        options["window_size"] = (draw.pick(-1, 0, 1, 5, 40), draw.pick(-1, 0, 3, 40))
    if draw.chance(0.2):
        options["softmax_scale"] = draw.pick(0.05, 0.3, 1.0, -0.2)
    if draw.chance(0.2):
        options["softcap"] = draw.pick(0.5, 5.0, 30.0)
    if draw.chance(0.2):
        options["sinks"] = draw.array((heads,), np.float32)
    if draw.chance(0.2):
        shape = (heads,) if draw.chance(0.5) else (batch, heads)
        options["alibi_slopes"] = draw.place(np.abs(draw.values(shape, np.float32, 0.2)))
    return options


def dense_options(draw: Draw, dtype: Any, shape: tuple[int, int, int, int]) -> Options:
    """Options bias, block_mask and positions, which only :func:`attention` has."""
    options: Options = {}
    if draw.chance(0.2):
        options["q_start"], options["k_start"] = draw.pick(0, 5, 40, 1000), draw.pick(0, 7, 60, 1030)
    if draw.chance(0.2):
        cut = tuple(n if draw.chance(0.6) else 1 for n in shape)[draw.pick(0, 0, 1, 2) :]
        bias = draw.values(cut, draw.pick(dtype, FLOAT32))
        if draw.chance(0.4):
            bias[draw.rng.random(cut) < 0.3] = -np.inf
        options["bias"] = draw.place(bias)
    if draw.chance(0.15):
        block_q, block_k = draw.pick(1, 4, 16, 64), draw.pick(1, 4, 16, 64)
        blocks = (-(-shape[2] // block_q), -(-shape[3] // block_k))
        lead = draw.pick((), (1, shape[1]), (shape[0], shape[1]))
        grid = draw.rng.random((*lead, *blocks)) < draw.pick(0.3, 0.7)
        options["block_mask"] = gpu_ops.BlockMask(grid, block_q, block_k)
    return options


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
    of_out = draw.pick(dtype, dtype, computing(dtype))
    inputs = {
        name: draw.array((batch, s, h, d), t)
        for name, s, h, d, t in (
            ("dout", sq, heads, head_dim_v, of_out),
            ("q", sq, heads, head_dim, dtype),
            ("k", sk, heads_kv, head_dim, dtype),
            ("v", sk, heads_kv, head_dim_v, dtype),
        )
    }
    options = options_of(draw, batch, heads) | dense_options(draw, dtype, (batch, heads, sq, sk))
    m = Maths(dtype, False)
    with np.errstate(all="ignore"):
        out, lse = forward(m, *(heads_first(m.load(inputs[name])) for name in ("q", "k", "v")), options)
    out = draw.place(nearest(heads_first(out), of_out))
    lse = draw.place(lse.astype(computing(dtype)))
    results: tuple[Any, ...] = (dtype,) * 3
    arguments = {**inputs, "out": out, "lse": lse, **options}
    extra = draw.chance(0.4)
    if extra:
        arguments["return_extra"] = True
        results += tuple(options["bias"].dtype for _ in "b" if "bias" in options)
        results += tuple(computing(dtype) for _ in "s" if "sinks" in options)
    if draw.chance(0.3):
        arguments["grads"] = tuple(draw.out(inputs[name].shape, dtype) for name in "qkv")

    def formula(m: Maths) -> tuple[Array, ...]:
        # a variant's lse and out must be those of its inputs
        x = {name: heads_first(m.load(array)) for name, array in inputs.items()}
        w = Maths(dtype, False, m.variant)
        made, sums = forward(w, *(heads_first(w.load(inputs[name])) for name in ("q", "k", "v")), options)
        x["out"], x["dout"] = m.r(nearest(made, of_out).astype(m.wide)), m.r(x["dout"])
        grads = backward(m, x, sums.astype(computing(dtype)).astype(m.wide), options)
        return (*(heads_first(grad) for grad in grads[:3]), *(grads[3:] if extra else ()))

    linked = (("v", 1), ("k", 3), ("dout", 1), ("out", 2), ("lse", 2))
    return Trial("attention_backward", arguments, draw, dtype, results, formula, BACKWARD, linked=linked)


def starts(draw: Draw, batch: int, limit: int) -> Array:
    return np.cumsum([0, *(draw.length(limit, 0.15) for _ in range(batch))]).astype(np.int32)


def packed(draw: Draw, limit: int) -> tuple[dict[str, Array], Array, Array, Options]:
    """Arrays q, k and v of packed sequences, starts of the sequences, and options."""
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    cu_q, cu_k = starts(draw, batch, limit), starts(draw, batch, limit)
    arrays = {
        "q": draw.array((cu_q[-1], heads, head_dim), dtype),
        "k": draw.array((cu_k[-1], heads_kv, head_dim), dtype),
        "v": draw.array((cu_k[-1], heads_kv, head_dim_v), dtype),
    }
    return arrays, cu_q, cu_k, options_of(draw, batch, heads)


def in_pages(draw: Draw, caches: dict[str, list[Array]]) -> dict[str, Array]:
    """Caches by name, each the keys or values of every sequence, in shuffled pages; unused slots are NaN."""
    used = np.array([len(x) for x in next(iter(caches.values()))], np.int32)
    page, batch = draw.pick(1, 4, 16, 64), len(used)
    width = -(-int(used.max(initial=0)) // page) + draw.pick(0, 1)
    count = batch * width + draw.pick(0, 3)
    table = draw.rng.permutation(count)[: batch * width].reshape(batch, width).astype(np.int32)
    pages = {}
    for name, sequences in caches.items():
        stored = np.full((count, page, *sequences[0].shape[1:]), np.nan, sequences[0].dtype)
        for b, x in enumerate(sequences):
            j = np.arange(len(x))
            stored[table[b, j // page], j % page] = x
        pages[name] = draw.place(stored)
    table[np.arange(width)[None] * page >= used[:, None]] = -1
    return {**pages, "seqused_k": draw.place(used), "block_table": draw.place(table)}


def attention_varlen(draw: Draw) -> Trial:
    arrays, cu_q, cu_k, options = packed(draw, 17 if draw.small else 100)
    arguments = {**arrays, "cu_seqlens_q": draw.place(cu_q)}
    if paged := len(cu_q) > 1 and draw.chance(0.4):
        arguments |= in_pages(draw, {name: np.split(arrays[name], cu_k[1:-1]) for name in ("k", "v")})
    else:
        arguments["cu_seqlens_k"] = draw.place(cu_k)
    arguments |= {**options, "return_lse": True}
    if draw.chance(0.3):
        arguments["max_seqlen_q"] = int(np.diff(cu_q).max(initial=0)) + draw.pick(0, 0, 7)
    dtype = arrays["q"].dtype
    results = (dtype, computing(dtype))

    def formula(m: Maths) -> tuple[Array, ...]:
        return varlen_forward(m, arrays, cu_q, cu_k, options)

    linked = (("v", 0), ("k", 3 if paged else 2))
    return Trial("attention_varlen", arguments, draw, dtype, results, formula, linked=linked)


def attention_varlen_backward(draw: Draw) -> Trial:
    arrays, cu_q, cu_k, options = packed(draw, 17 if draw.small else 64)
    dtype = arrays["q"].dtype
    of_out = draw.pick(dtype, dtype, computing(dtype))
    arrays = {"dout": draw.array((*arrays["q"].shape[:2], arrays["v"].shape[2]), of_out), **arrays}
    with np.errstate(all="ignore"):
        out, lse = varlen_forward(Maths(dtype, False), arrays, cu_q, cu_k, options)
    arguments = {
        **arrays,
        "out": draw.place(nearest(out, of_out)),
        "lse": draw.place(lse.astype(computing(dtype))),
    }
    arguments |= {"cu_seqlens_q": draw.place(cu_q), "cu_seqlens_k": draw.place(cu_k), **options}
    extra = "sinks" in options and draw.chance(0.5)
    if extra:
        arguments["return_extra"] = True
    if draw.chance(0.3):
        arguments["grads"] = tuple(draw.out(arrays[name].shape, dtype) for name in "qkv")

    def formula(m: Maths) -> tuple[Array, ...]:
        w = Maths(dtype, False, m.variant)  # a variant's lse and out must be those of its inputs
        parts = []
        for b, (x, y) in enumerate(
            zip(by_sequence(m, arrays, cu_q, cu_k), by_sequence(w, arrays, cu_q, cu_k), strict=True)
        ):
            made, sums = forward(w, y["q"], y["k"], y["v"], of_sequence(options, b))
            x["out"], x["dout"] = m.r(nearest(made, of_out).astype(m.wide)), m.r(x["dout"])
            parts.append(
                backward(m, x, sums.astype(computing(dtype)).astype(m.wide), of_sequence(options, b))
            )
        grads = [together([part[i] for part in parts]) for i in range(3)]
        return (*grads, sum(part[3] for part in parts)) if extra else tuple(grads)

    results = (dtype,) * 3 + ((computing(dtype),) if extra else ())
    linked = (("v", 0), ("k", 2), ("dout", 0), ("out", 1), ("lse", 1))
    return Trial(
        "attention_varlen_backward", arguments, draw, dtype, results, formula, BACKWARD, linked=linked
    )


def attention_decode(draw: Draw) -> Trial:
    dtype = draw.dtype()
    batch, heads, heads_kv, head_dim, head_dim_v = dims(draw)
    sq, capacity = draw.pick(1, 1, 1, 2, 5), draw.length(40 if draw.small else 384)
    used = draw.rng.integers(0, capacity + 1, batch).astype(np.int32)
    options = options_of(draw, batch, heads)
    q = draw.array((batch, sq, heads, head_dim), dtype)
    dense = [draw.values((batch, capacity, heads_kv, d), dtype) for d in (head_dim, head_dim_v)]
    arguments: dict[str, Any] = {"q": q}
    caches = dict(zip(("k_cache", "v_cache"), dense, strict=True))
    if batch and draw.chance(0.5):
        sequences = {
            name: [x[:n] for x, n in zip(cache, used, strict=True)] for name, cache in caches.items()
        }
        arguments |= in_pages(draw, sequences)
    else:
        for name, cache in caches.items():
            in_use = np.arange(capacity) < used[:, None]
            arguments[name] = draw.place(np.where(in_use[..., None, None], cache, cache.dtype.type(np.nan)))
        arguments["seqused_k"] = draw.place(used)
    if draw.chance(0.2):
        arguments["num_splits"] = draw.pick(1, 2, 3, 7)
    arguments |= {**options, "return_lse": True}

    def formula(m: Maths) -> tuple[Array, ...]:
        x, y, z = (heads_first(m.load(array)) for array in (q, *dense))
        pairs = []
        for b in range(batch):
            keys = (array[b : b + 1, :, : used[b]] for array in (y, z))
            pairs.append(forward(m, x[b : b + 1], *keys, of_sequence(options, b)))
        return heads_first(np.concatenate([out for out, _ in pairs])), np.concatenate(
            [lse for _, lse in pairs]
        )

    results = (dtype, computing(dtype))
    linked = (("v_cache", 2), ("k_cache", 3), ("seqused_k", 0))
    return Trial("attention_decode", arguments, draw, dtype, results, formula, linked=linked)


def attention_merge(draw: Draw) -> Trial:
    """Merge of parts that saw keys or none."""
    dtype = draw.dtype()
    batch, heads, _, _, dim = dims(draw)
    shape = (batch, draw.length(9 if draw.small else 70), heads, dim)
    arguments: dict[str, Any] = {}
    for i in "12":
        lse = draw.values((batch, heads, shape[1]), computing(dtype), draw.pick(1.0, 5.0))
        lse[draw.rng.random(lse.shape) < draw.pick(0.0, 0.3)] = -np.inf
        arguments |= {f"out{i}": draw.array(shape, dtype), f"lse{i}": draw.place(lse)}
    given = {name: np.array(x) for name, x in arguments.items()}

    def formula(m: Maths) -> tuple[Array, ...]:
        def single(x: Array) -> Array:  # a step in lse's dtype
            return x.astype(computing(dtype)).astype(m.wide) if m.textbook else x

        logs = [m.load(given[f"lse{i}"]) for i in "12"]
        top = np.maximum(*logs)
        finite = np.where(np.isinf(top), 0, top)
        shares = [np.where(lse == top, 1, single(np.exp(single(lse - finite)))) for lse in logs]
        total = single(shares[0] + shares[1])
        out = np.zeros(shape)
        for share, lse, i in zip(shares, logs, "12", strict=True):
            weight = np.where(np.isinf(lse), 0, m.r(share / total)).swapaxes(1, 2)[..., None]
            out = m.r(out + m.r(weight * m.load(given[f"out{i}"])))
        return out, single(top + single(np.log(total)))

    linked = (("out2", 3), ("lse1", 1), ("lse2", 2))
    return Trial("attention_merge", arguments, draw, dtype, (dtype, computing(dtype)), formula, linked=linked)


TRIALS = (
    attention_merge,
    attention,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_decode,
)
