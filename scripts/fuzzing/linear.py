"""Trials of the linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, FLOAT64, Array, Maths
from scripts.fuzzing.trial import BACKWARD, Trial


def forward(draw: Draw) -> Trial:
    dtype, limit = draw.dtype(), 33 if draw.small else 384
    lead, cols, rows = draw.pick((), (1,), (3,), (2, 9), (70,)), draw.length(limit), draw.length(limit)
    inputs = {"x": draw.array((*lead, cols), dtype), "weight": draw.array((rows, cols), dtype, cols**-0.5)}
    if draw.chance(0.5):
        inputs["bias"] = draw.array((rows,), dtype)
    if draw.chance(0.5):
        inputs["residual"] = draw.array((*lead, rows), dtype)
    arguments: dict[str, Any] = dict(inputs)
    if draw.chance(0.3):
        arguments["out"] = draw.out((*lead, rows), dtype, rows=True)

    def formula(m: Maths) -> tuple[Array, ...]:
        y = m.matmul(m.load(inputs["x"]).reshape(-1, cols), m.load(inputs["weight"]).T).reshape(*lead, rows)
        for name in ("bias", "residual"):
            y = m.r(y + m.load(inputs[name])) if name in inputs else y
        return (y,)

    return Trial("linear", arguments, draw, dtype, (dtype,), formula, linked=(("x", -1), ("weight", 1)))


def backward(draw: Draw) -> Trial:
    """Gradients, some of them added to existing values."""
    dtype, tokens, limit = draw.dtype(), draw.length(130), 33 if draw.small else 129
    cols, rows = draw.length(limit), draw.length(limit)
    sum_dtype = FLOAT64 if dtype == np.float64 else FLOAT32
    inputs = {
        "dy": draw.array((tokens, rows), dtype),
        "x": draw.array((tokens, cols), dtype),
        "weight": draw.array((rows, cols), dtype, cols**-0.5),
    }
    arguments: dict[str, Any] = dict(inputs)
    only = draw.pick(None, None, None, "dx", "weights")
    has_bias = only != "dx" and draw.chance(0.5)
    if has_bias:
        arguments["has_bias"] = True
    if only:
        arguments["only"] = only
    sums = {
        name: draw.values(shape, sum_dtype) for name, shape in (("dweight", (rows, cols)), ("dbias", (rows,)))
    }
    wanted = [name for name in sums if only != "dx" and (has_bias or name == "dweight")]
    added = [name for name in wanted if draw.chance(0.3)]
    arguments |= {name: draw.place(sums[name], written=True) for name in added}

    def formula(m: Maths) -> tuple[Array, ...]:
        dy, x, weight = (m.load(array) for array in inputs.values())
        grads = {"dweight": m.matmul(dy.T, x), "dbias": m.sum(dy, axis=0)[0]}
        for name in added:
            grads[name] = grads[name] + sums[name]
        return (*[m.matmul(dy, weight)] * (only != "weights"), *(grads[name] for name in wanted))

    results = (*[dtype] * (only != "weights"), *[sum_dtype] * len(wanted))
    linked = (("dy", 1), ("x", 1))
    return Trial("linear_backward", arguments, draw, dtype, results, formula, BACKWARD, linked=linked)


TRIALS = (forward, backward)
