"""Trials of SwiGLU and the gated MLP."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.fuzzing.attention import computing
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import Array, Maths
from scripts.fuzzing.rows import shape_of, x_of
from scripts.fuzzing.trial import BACKWARD, Trial


def activate(m: Maths, g: Array, name: str) -> tuple[Array, Array]:
    """act(g) and its derivative."""
    if name == "gelu":
        c = m.r(0.5 * m.r(1 + m.erf(m.r(g / np.sqrt(m.wide(2))))))
        dc = m.r(m.r(np.exp(m.r(-0.5 * g * g))) / np.sqrt(2 * m.wide(np.pi)))
        return m.r(g * c), m.r(c + m.r(g * dc))
    if name == "relu2":
        positive = np.where(g < 0, 0, g)
        return m.r(positive * positive), m.r(2 * positive)
    z, slope = g, m.wide(1)
    if name == "gelu_tanh":
        root = np.sqrt(m.wide(2) / np.arccos(m.wide(-1)))
        z = m.r(2 * root * m.r(g + m.r(m.wide(0.044715) * m.r(g**3))))
        slope = m.r(2 * root * m.r(1 + m.r(3 * m.wide(0.044715) * m.r(g * g))))
    c = m.r(1 / m.r(1 + m.r(np.exp(-z))))
    return m.r(g * c), m.r(c + m.r(m.r(g * slope) * m.r(c * m.r(1 - c))))


def swiglu(draw: Draw) -> Trial:
    dtype, shape = draw.dtype(), shape_of(draw)
    back, packed = draw.chance(0.4), draw.chance(0.4)
    name = draw.pick("silu", "silu", "gelu", "gelu_tanh", "relu2")
    d = shape[-1]
    whole = (*shape[:-1], 2 * d)
    in_place = not back and not packed and draw.chance(0.2)
    gate = x_of(draw, whole if packed else shape, dtype, in_place)
    arguments: dict[str, Any] = {"gate": gate}
    if not packed:
        arguments["up"] = draw.array(shape, dtype)
    if name != "silu" or draw.chance(0.3):
        arguments["activation"] = name
    dy = None
    if back:
        dy = arguments["dy"] = draw.array(shape, dtype)
        if draw.chance(0.3):
            outs = tuple(draw.out(gate.shape, dtype, rows=True) for _ in range(1 if packed else 2))
            arguments["out"] = outs[0] if packed else outs
    elif in_place:
        arguments["out"] = gate
    elif draw.chance(0.3):
        arguments["out"] = draw.out(shape, dtype, rows=True)
    held, up = np.array(gate), arguments.get("up")

    def formula(m: Maths) -> tuple[Array, ...]:
        loaded = m.load(held)
        g, u = (loaded[..., :d], loaded[..., d:]) if up is None else (loaded, m.load(up))
        act, slope = activate(m, g, name)
        if dy is None:
            return (m.r(act * u),)
        grad = m.load(dy)
        grads = m.r(m.r(grad * u) * slope), m.r(grad * act)
        return (np.concatenate(grads, -1),) if packed else grads

    results = (dtype,) * (2 if back and not packed else 1)
    op, factor = ("swiglu_backward", BACKWARD) if back else ("swiglu", 2.0)
    return Trial(op, arguments, draw, dtype, results, formula, factor, linked=(("up", -1), ("dy", -1)))


def mlp(draw: Draw) -> Trial:
    dtype = draw.dtype()
    limit = 33 if draw.small else 130
    tokens, hidden, ffn, hidden_out = (draw.length(limit) for _ in range(4))
    back, name = draw.chance(0.4), draw.pick("silu", "gelu", "gelu_tanh", "relu2")
    shapes = {
        "x": (tokens, hidden),
        "w_gate": (ffn, hidden),
        "w_up": (ffn, hidden),
        "w_down": (hidden_out, ffn),
    }
    inputs = {n: draw.array(s, dtype, 1.0 if n == "x" else s[1] ** -0.5) for n, s in shapes.items()}
    arguments: dict[str, Any] = {**inputs, "activation": name}
    sum_dtype, keep, before = computing(dtype), draw.chance(0.4), dict[str, Array]()
    if back:
        inputs["dy"] = arguments["dy"] = draw.array((tokens, hidden_out), dtype)
        before = {
            f"d{n}": draw.values(shapes[n], sum_dtype)
            for n in ("w_gate", "w_up", "w_down")
            if draw.chance(0.3)
        }
        arguments |= {n: draw.place(array, written=True) for n, array in before.items()}
    if keep and back:
        inputs["gate_up"] = arguments["gate_up"] = draw.array((tokens, 2 * ffn), dtype)
    elif keep:
        arguments["keep"] = "gate_up"

    def formula(m: Maths) -> tuple[Array, ...]:
        a = {n: m.load(array) for n, array in inputs.items()}
        if "gate_up" in a:
            gate, up = a["gate_up"][:, :ffn], a["gate_up"][:, ffn:]
        else:
            gate, up = (m.matmul(a["x"], a[n].T) for n in ("w_gate", "w_up"))
        act, slope = activate(m, gate, name)
        h = m.r(act * up)
        if not back:
            y = m.matmul(h, a["w_down"].T)
            return (y, np.concatenate([gate, up], axis=-1)) if keep else (y,)
        dh = m.matmul(a["dy"], a["w_down"])
        dgate, dup = m.r(m.r(dh * up) * slope), m.r(dh * act)
        dx = m.r(m.matmul(dgate, a["w_gate"]) + m.matmul(dup, a["w_up"]))
        sums = {"dw_gate": m.matmul(dgate.T, a["x"]), "dw_up": m.matmul(dup.T, a["x"])}
        sums["dw_down"] = m.matmul(a["dy"].T, h)
        return dx, *(total + before.get(n, 0) for n, total in sums.items())

    results = (dtype, *(sum_dtype,) * 3) if back else (dtype,) * (1 + keep)
    op, factor = ("swiglu_mlp_backward", BACKWARD) if back else ("swiglu_mlp", 2.0)
    return Trial(op, arguments, draw, dtype, results, formula, factor, linked=(("w_up", 0), ("w_down", 1)))


TRIALS = (swiglu, mlp)
