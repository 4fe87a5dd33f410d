"""Trials of rope, its gradient, and rope_append_kv."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import gpu_ops
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import Array, Maths
from scripts.fuzzing.trial import Trial


def frequencies(m: Maths, rotary: int, theta: float, scaling: tuple[Any, ...]) -> Array:
    """Frequencies inv_freq, with linear, ntk or llama3 scaling."""
    method, *numbers = scaling
    base = m.load(theta)  # an input like others: with one theta, rounded angles can be right by luck
    if method == "ntk" and rotary > 2:
        base = base * m.wide(numbers[0]) ** (m.wide(rotary) / (rotary - 2))
    result = base ** (-2 * np.arange(rotary // 2).astype(m.wide) / rotary)
    if method == "linear":
        return np.asarray(result / m.wide(numbers[0]))
    if method == "llama3":
        factor, original = numbers
        # over the original context: 1 and fewer, 4 and more
        turns = original * result / (2 * m.wide(math.pi))
        blend = np.clip((turns - 1) / 3, 0, 1)
        return np.asarray((1 - blend) * result / factor + blend * result)
    return np.asarray(result)


def scaling_of(draw: Draw) -> tuple[tuple[Any, ...], Any]:
    method = draw.pick("", "", "", "linear", "ntk", "llama3")
    if method == "llama3":
        return (method, 8.0, 64), gpu_ops.RopeScaling.llama3(8.0, 64)
    if method:
        return (method, 4.0), getattr(gpu_ops.RopeScaling, method)(4.0)
    return ("",), None


class Rotation:
    """Options of a rotation, and the rotation of loaded (..., tokens, heads, head_dim) arrays."""

    def __init__(self, draw: Draw, head_dim: int) -> None:
        self.arguments: dict[str, Any] = {}
        self.rotary, self.theta, self.interleaved = head_dim, 10000.0, draw.chance(0.4)
        if draw.chance(0.3) and head_dim > 2:
            self.rotary = self.arguments["rotary_dim"] = 2 * draw.integer(1, head_dim // 2)
        if draw.chance(0.3):
            self.theta = self.arguments["theta"] = draw.pick(500000.0, 100.0)
        if self.interleaved:
            self.arguments["interleaved"] = True
        self.scaling, made = scaling_of(draw)
        if made is not None:
            self.arguments["scaling"] = made

    def __call__(self, m: Maths, x: Array, positions: Array, sign: int = 1) -> Array:
        angles = positions.astype(m.wide)[..., None] * frequencies(m, self.rotary, self.theta, self.scaling)
        cos, sin = (m.r(f(angles))[..., None, :] for f in (np.cos, np.sin))
        sin = sign * sin
        half = self.rotary // 2
        first, second = slice(0, half), slice(half, self.rotary)
        if self.interleaved:
            first, second = slice(0, self.rotary, 2), slice(1, self.rotary, 2)
        y = x.copy()
        y[..., first] = m.r(m.r(x[..., first] * cos) - m.r(x[..., second] * sin))
        y[..., second] = m.r(m.r(x[..., second] * cos) + m.r(x[..., first] * sin))
        return y


def rope(draw: Draw) -> Trial:
    dtype, packed = draw.dtype(), draw.chance(0.25)
    batch, tokens, head_dim = draw.pick(1, 2, 3), draw.length(33 if draw.small else 130, 0.03), 0
    head_dim = draw.pick(2, 6, 8, 16, 64, 80, 128)
    layout = "bshd" if packed else draw.pick("bshd", "bshd", "bhsd")
    rotation = Rotation(draw, head_dim)
    back = draw.chance(0.25)
    arguments = dict(rotation.arguments)
    sign = -1 if back else 1
    if draw.chance(0.25):
        arguments["conjugate"], sign = True, -sign
    if layout != "bshd":
        arguments["layout"] = layout
    lead = (tokens,) if packed else (batch, tokens)
    positions = np.arange(tokens)
    match draw.pick("none", "none", "number", "vector", "matrix"):
        case "number":
            arguments["positions"] = draw.pick(0, 7, -3, 5000)
            positions = positions + arguments["positions"]
        case "vector":
            values = draw.rng.integers(-50, 4000, (tokens,)).astype(draw.pick(np.int32, np.int64))
            positions = arguments["positions"] = draw.place(values)
        case "matrix" if not packed:
            values = draw.rng.integers(-50, 4000, (draw.pick(1, batch), tokens)).astype(np.int64)
            positions = arguments["positions"] = draw.place(values)
    count, in_place = draw.pick(1, 2), draw.chance(0.2)
    arrays, held, outs = [], [], []
    for name in ("dq", "dk")[:count] if back else ("q", "k")[:count]:
        shape = (*lead, draw.pick(1, 2, 5), head_dim)
        if layout == "bhsd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        x = draw.place(draw.values(shape, dtype), written=in_place)
        arguments[name] = x
        arrays.append(x)
        held.append(np.array(x))
        outs.append(x)
    if in_place or draw.chance(0.25):
        if not in_place:
            outs = [draw.out(x.shape, dtype) for x in arrays]
        arguments["out"] = tuple(outs) if count == 2 else outs[0]

    def formula(m: Maths) -> tuple[Array, ...]:
        results = []
        for x in held:
            loaded = m.load(x)
            y = rotation(m, loaded.swapaxes(1, 2) if layout == "bhsd" else loaded, positions, sign)
            results.append(y.swapaxes(1, 2) if layout == "bhsd" else y)
        return tuple(results)

    linked = (("k", -1), ("dk", -1))
    return Trial(
        "rope_backward" if back else "rope", arguments, draw, dtype, (dtype,) * count, formula, linked=linked
    )


def rope_append_kv(draw: Draw) -> Trial:
    """Trial of rope_append_kv, which judges the caches as two more results."""
    dtype = draw.dtype()
    batch, tokens, heads_kv = draw.pick(1, 2, 3), draw.pick(1, 1, 2, 5), draw.pick(1, 2)
    heads, head_dim = heads_kv * draw.pick(1, 2, 4), draw.pick(8, 16, 64, 128)
    rotation = Rotation(draw, head_dim)
    q = draw.array((batch, tokens, heads, head_dim), dtype)
    k, v = (draw.array((batch, tokens, heads_kv, head_dim), dtype) for _ in range(2))
    capacity = draw.pick(8, 17, 40)
    used = draw.rng.integers(0, capacity - tokens + 1, batch).astype(np.int32)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, **rotation.arguments, "seqused_k": draw.place(used)}
    keys = used[:, None] + np.arange(tokens)
    at: tuple[Array, Array] = (np.arange(batch)[:, None] + 0 * keys, keys)
    shape: tuple[int, ...] = (batch, capacity, heads_kv, head_dim)
    if draw.chance(0.5):
        page = draw.pick(1, 4, 16)
        width = -(-capacity // page)
        table = (
            draw.rng.permutation(batch * width + 2)[: batch * width].reshape(batch, width).astype(np.int32)
        )
        arguments["block_table"] = draw.place(table)
        at = (table[np.arange(batch)[:, None], keys // page], keys % page)
        shape = (batch * width + 2, page, heads_kv, head_dim)
    caches = [draw.place(draw.values(shape, dtype), written=True) for _ in range(2)]
    before = [np.array(cache) for cache in caches]
    arguments["k_cache"], arguments["v_cache"] = caches
    weights = None
    if draw.chance(0.5):
        weights = [draw.array((head_dim,), dtype) for _ in range(2)]
        arguments["q_weight"], arguments["k_weight"] = weights

    def normed(m: Maths, x: Array, i: int) -> Array:
        if weights is None:
            return x
        rstd = m.r(1 / m.r(np.sqrt(m.r(m.mean(m.r(x * x)) + m.wide(1e-6)))))
        return m.r(m.r(x * rstd) * m.load(weights[i]))

    def formula(m: Maths) -> tuple[Array, ...]:
        return tuple(rotation(m, normed(m, m.load(x), i), keys) for i, x in enumerate((q, k)))

    def check(found: list[Any]) -> str | None:
        """Add the new rows of k as a result; check that those of v are exact and that no others changed."""
        new_k, new_v = (cache[at].copy() for cache in stored)
        for cache, old in zip(stored, before, strict=True):
            cache[at] = old[at]
        if any(cache.tobytes() != old.tobytes() for cache, old in zip(stored, before, strict=True)):
            return "changed a row of a cache that is not new"
        if new_v.tobytes() != np.array(v).tobytes():
            return "v_cache does not hold v"
        found.insert(1, new_k)
        return None

    stored: list[Array] = []
    trial = Trial("rope_append_kv", arguments, draw, dtype, (dtype, dtype), formula, check=check)
    trial.after = lambda: stored.__setitem__(slice(None), [np.array(cache) for cache in caches])
    trial.linked = (("v", 2), ("v_cache", 2), ("seqused_k", 0))
    return trial


TRIALS = (rope, rope, rope_append_kv)
