"""Trials of the optimiser."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import BFLOAT16, FLOAT32, FLOAT64, Array, Maths
from scripts.fuzzing.trial import BACKWARD, Trial


def adamw_step(draw: Draw) -> Trial:
    """Trial of adamw_step, which judges the arrays it changes as results. Stochastic rounding is off by up to a unit
    of bfloat16."""
    dtype, size = draw.dtype(), draw.length(384)
    state_dtype = FLOAT64 if dtype == np.float64 else FLOAT32
    grads = draw.array((size,), draw.pick(dtype, state_dtype))
    values = {
        name: draw.values((size,), array_dtype)
        for name, array_dtype in (("params", dtype), ("m", state_dtype), ("v", state_dtype))
    }
    values["v"] = values["v"] ** 2 + state_dtype.type(1e-4)
    is_stochastic = dtype == BFLOAT16 and draw.chance(0.5)
    if dtype.itemsize == 2 and not is_stochastic:
        values["master"] = draw.values((size,), state_dtype)
    changed = {name: whole(draw, x) for name, x in values.items()}
    step, lr, decay, scale = (
        draw.pick(1, 2, 30, 5000),
        draw.pick(0.1, 1e-3),
        draw.pick(0.0, 0.1),
        draw.pick(1.0, 0.3),
    )
    numbers: dict[str, Any] = {"step": step, "lr": lr, "grad_scale": scale}
    if draw.chance(0.3):
        numbers = {name: np.array(value) for name, value in numbers.items()}
    arguments = {"grads": grads, **changed, **numbers, "weight_decay": decay}
    if is_stochastic:
        arguments |= {"rounding": "stochastic", "seed": draw.integer(0, 2**40)}
    mask = draw.rng.random(size) < 0.5 if draw.chance(0.4) else np.ones(size, bool)
    if not mask.all():
        arguments["decay_mask"] = draw.place(mask)
    beta1, beta2 = arguments["betas"] = draw.pick((0.9, 0.999), (0.0, 0.5))

    def formula(m: Maths) -> tuple[Array, ...]:
        # states and steps are wide for all parameters
        r = m.r if dtype == state_dtype else Maths(state_dtype, m.textbook).r
        g = r(m.load(grads) * scale)
        first = r(r(beta1 * m.load(values["m"])) + r((1 - beta1) * g))
        second = r(r(beta2 * np.abs(m.load(values["v"]))) + r((1 - beta2) * r(g * g)))
        weights = m.load(values.get("master", values["params"]))
        size = r(r(np.sqrt(r(second / (1 - beta2**step)))) + 1e-8)
        update = r(r(lr * first / (1 - beta1**step)) / size)
        new = r(r(weights - r(np.where(mask, lr * decay, 0.0) * weights)) - update)
        parts = {"params": m.r(new), "m": first, "v": second, "master": new}
        return tuple(parts[name] for name in values)

    updated: list[Array] = []
    dtypes = tuple(x.dtype for x in values.values())
    factor = 2 * BACKWARD if is_stochastic else BACKWARD
    trial = Trial("adamw_step", arguments, draw, dtype, dtypes, formula, factor)
    trial.check = lambda results: results.__setitem__(slice(None), updated)
    trial.after = lambda: updated.extend(x.copy() for x in changed.values())
    trial.linked = tuple((name, 0) for name in ("grads", *changed))
    return trial


def whole(draw: Draw, values: Array) -> Array:
    """Contiguous array that is written, in a separate buffer."""
    before = draw.pick(0, 1, 4)
    buffer = np.empty(before + values.size + 3, values.dtype)
    buffer.view(np.uint8).fill(0xFF)
    view = buffer[before : before + values.size]
    view[...] = values
    draw.buffers.append(buffer)
    draw.written.append(view)
    return view


TRIALS = (adamw_step,)
