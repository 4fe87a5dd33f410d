"""Trials of the row-wise ops: norms, softmax, dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.reference.philox import philox4x32
from scripts.fuzzing.attention import computing
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import FLOAT32, Array, Maths, nearest
from scripts.fuzzing.trial import BACKWARD, Trial

LEADS = ((), (1,), (3,), (7,), (2, 3), (33,), (130,), (0,), (2, 0))


def shape_of(draw: Draw) -> tuple[int, ...]:
    lead = draw.pick(*(LEADS[:5] if draw.small else LEADS))
    return (
        *lead,
        draw.length(129) if draw.small else draw.pick(1, 2, 7, 8, 16, 33, 64, 100, 128, 257, 512, 1000),
    )


def with_nan(draw: Draw, x: Array) -> Array:
    """Set an element to NaN in some trials."""
    values = np.array(x)
    if draw.chance(0.1) and values.size:
        values.reshape(-1)[draw.integer(0, values.size - 1)] = np.nan
    return values


def x_of(draw: Draw, shape: tuple[int, ...], dtype: Any, written: bool = False) -> Array:
    return draw.place(
        with_nan(draw, draw.values(shape, dtype, draw.pick(0.02, 1.0, 1.0, 6.0))), written, rows=written
    )


def added(x: Array, residual: Array | None, dtype: np.dtype[Any]) -> Array:
    """Sum x + residual, rounded once."""
    if residual is None:
        return x
    with np.errstate(all="ignore"):
        total = x + residual if dtype.itemsize > 2 else x.astype(np.float64) + residual.astype(np.float64)
    return nearest(np.asarray(total), dtype)


def norm(draw: Draw) -> Trial:
    """Trial of rmsnorm or layernorm."""
    rms = draw.chance(0.6)
    dtype, shape = draw.dtype(), shape_of(draw)
    in_place = draw.chance(0.15)
    x = x_of(draw, shape, dtype, in_place)
    weight = draw.array(shape[-1:], dtype)
    arguments: dict[str, Any] = {"x": x, "weight": weight}
    eps = draw.pick(1e-6, 1e-5, 1e-2)
    bias = residual = None
    offset, llama = 0.0, False
    if draw.chance(0.5):
        arguments["eps"] = eps
    else:
        eps = 1e-6 if rms else 1e-5
    if rms and draw.chance(0.3):
        offset = arguments["weight_offset"] = draw.pick(1.0, 0.5)
    if rms and draw.chance(0.4):
        arguments["casting"] = draw.pick("fp32", "llama", "gemma")
        llama = arguments["casting"] == "llama"
    if not rms and draw.chance(0.6):
        bias = arguments["bias"] = draw.array(shape[-1:], dtype)
    results: tuple[Any, ...] = (dtype,)
    with_sum = False
    if draw.chance(0.4):
        residual = arguments["residual"] = x_of(draw, shape, dtype)
        with_sum = draw.chance(0.7)
        if not with_sum:
            arguments["return_sum"] = False
        results += (dtype,) * with_sum
    with_stats = draw.chance(0.5)
    if with_stats:
        arguments["return_rstd" if rms else "return_stats"] = True
        results += (computing(dtype),) * (1 if rms else 2)
    if in_place:
        arguments["out"] = x
    elif draw.chance(0.3):
        arguments["out"] = draw.out(shape, dtype, rows=True)
    if residual is not None and with_sum and draw.chance(0.3):
        arguments["residual_out"] = draw.out(shape, dtype, rows=True)
    original = np.array(x)

    def formula(m: Maths) -> tuple[Array, ...]:
        total = added(original, residual, dtype)
        s = m.load(total)
        mean = None if rms else m.mean(s)
        centred = s if mean is None else m.r(s - mean)
        variance = m.mean(m.r(centred * centred))
        rstd = m.r(1 / m.r(np.sqrt(m.r(variance + m.wide(eps)))))
        gain = m.r(m.load(weight) + m.wide(offset))
        n = m.r(centred * rstd)
        if llama and not m.textbook:
            n, gain = (nearest(array, dtype).astype(m.wide) for array in (n, gain))
        y = m.r(n * gain)
        if bias is not None:
            y = m.r(y + m.load(bias))
        outputs = [y]
        if with_sum:
            outputs.append(total.astype(m.wide))
        if with_stats:
            outputs += [array[..., 0] for array in (mean, rstd) if array is not None]
        return tuple(outputs)

    linked = (("x", -1), ("residual", 0), ("bias", 0))
    return Trial("rmsnorm" if rms else "layernorm", arguments, draw, dtype, results, formula, linked=linked)


def norm_backward(draw: Draw) -> Trial:
    rms = draw.chance(0.6)
    dtype, shape = draw.dtype(), shape_of(draw)
    dy, x, weight = draw.array(shape, dtype), draw.array(shape, dtype), draw.array(shape[-1:], dtype)
    x64 = x.astype(np.float64)
    with np.errstate(all="ignore"):
        mean = (0 * x64 if rms else x64).mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(np.square(x64 - mean).mean(-1, keepdims=True) + 1e-5)
    stats = [draw.place(array[..., 0].astype(computing(dtype))) for array in (mean, rstd)]
    arguments: dict[str, Any] = {"dy": dy, "x": x, "weight": weight, "mean": stats[0], "rstd": stats[1]}
    offset, dresidual = 0.0, None
    if rms:
        del arguments["mean"]
        if draw.chance(0.3):
            offset = arguments["weight_offset"] = 1.0
    if draw.chance(0.4):
        dresidual = arguments["dresidual"] = draw.array(shape, dtype)
    if draw.chance(0.3):
        arguments["out"] = draw.out(shape, dtype, rows=True)
    names = ("dweight",) if rms else ("dweight", "dbias")
    before = {n: draw.values(shape[-1:], computing(dtype)) for n in names if draw.chance(0.3)}
    arguments |= {n: draw.place(array, written=True) for n, array in before.items()}

    def formula(m: Maths) -> tuple[Array, ...]:
        # unchanged statistics for every variant: the formula holds for any statistics
        at, scale = (array[..., None].astype(m.wide) for array in stats)
        g = m.load(dy)
        n = m.r((m.load(x) - (0 if rms else at)) * scale)
        d = m.r(g * m.r(m.load(weight) + m.wide(offset)))
        inner = m.r(d - m.r(n * m.mean(m.r(d * n))))
        if not rms:
            inner = m.r(inner - m.mean(d))
        dx = m.r(scale * inner)
        if dresidual is not None:
            dx = m.r(dx + m.load(dresidual))
        cols = shape[-1]
        sums = (m.sum(array.reshape(-1, cols), axis=0)[0] for array in (m.r(g * n), g))
        return dx, *(total + before.get(n, 0) for n, total in zip(names, sums, strict=False))

    results = (dtype,) + (computing(dtype),) * (1 if rms else 2)
    name = "rmsnorm_backward" if rms else "layernorm_backward"
    return Trial(name, arguments, draw, dtype, results, formula, BACKWARD, linked=(("x", -1), ("weight", 0)))


def quantised_norm(draw: Draw) -> Trial:
    """Trial of rmsnorm_quant_int8: codes are within half a step, and the sum is exactly that of the codes."""
    dtype, shape = draw.dtype(), shape_of(draw)
    x, weight = draw.array(shape, dtype, draw.pick(0.02, 1.0, 6.0)), draw.array(shape[-1:], dtype)
    arguments: dict[str, Any] = {"x": x, "weight": weight}
    residual = None
    if draw.chance(0.4):
        residual = arguments["residual"] = draw.array(shape, dtype)

    def check(found: list[Any]) -> str | None:
        q, scale, rowsum = found[:3]
        if [str(array.dtype) for array in (q, rowsum)] != ["int8", "int32"] or scale.dtype != computing(
            dtype
        ):
            return f"dtypes {q.dtype}, {scale.dtype}, {rowsum.dtype}"
        total = added(x, residual, dtype)
        if residual is not None and found[3].tobytes() != np.ascontiguousarray(total).tobytes():
            return "result 3 is not x + residual"
        s = total.astype(np.float64)
        y = s / np.sqrt(np.square(s).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        absmax = np.maximum(np.abs(y).max(-1), 1e-5)
        if not np.allclose(scale, absmax / 127, rtol=1e-5 if dtype.itemsize < 8 else 1e-13, atol=0):
            return "result 1: scale is not absmax / 127"
        if not np.array_equal(rowsum, q.astype(np.int32).sum(-1)):
            return "result 2 is not the sum of the codes"
        off = np.abs(q - y * (127 / absmax[..., None]))
        return None if off.size == 0 or off.max() < 0.501 else f"result 0: a code is off by {off.max():.3f}"

    return Trial("rmsnorm_quant_int8", arguments, draw, dtype, check=check, linked=(("weight", 0),))


def softmax(draw: Draw) -> Trial:
    dtype, shape = draw.dtype(), shape_of(draw)
    if draw.chance(0.35):
        y, dy = draw.place(np.abs(draw.values(shape, dtype, 0.1))), draw.array(shape, dtype)
        scale = draw.pick(1.0, 0.3, -2.0)

        def slope(m: Maths) -> tuple[Array, ...]:
            p, g = m.load(y), m.load(dy)
            return (m.r(m.wide(scale) * m.r(p * m.r(g - m.sum(m.r(g * p))))),)

        backward_arguments = {"dy": dy, "y": y, "scale": scale}
        return Trial(
            "softmax_backward",
            backward_arguments,
            draw,
            dtype,
            (dtype,),
            slope,
            BACKWARD,
            linked=(("y", -1),),
        )
    in_place = draw.chance(0.2)
    x = x_of(draw, shape, dtype, in_place)
    arguments: dict[str, Any] = {"x": x}
    scale = 1.0
    if draw.chance(0.4):
        scale = arguments["scale"] = draw.pick(0.125, -1.0, 3.0)
    shown = np.ones(shape, bool)
    bias = None
    if draw.chance(0.5):
        cut = tuple(n if draw.chance(0.7) else 1 for n in shape)[draw.pick(*range(len(shape))) :]
        hidden = draw.rng.random(cut) < 0.3
        if draw.chance(0.5):
            arguments["mask"] = draw.place(~hidden)
        else:
            bias = draw.values(cut, draw.pick(dtype, FLOAT32))
            bias[hidden] = -np.inf
            bias = arguments["mask"] = draw.place(bias)
        shown = np.broadcast_to(~hidden, shape)
    if in_place:
        arguments["out"] = x
    elif draw.chance(0.3):
        arguments["out"] = draw.out(shape, dtype, rows=True)
    given_x, adds = np.array(x), bias is not None

    def formula(m: Maths) -> tuple[Array, ...]:
        t = m.r(m.load(given_x) * m.wide(scale))
        if bias is not None:
            t = m.r(t + m.load(bias))
        nan = np.isnan(t) if adds else np.isnan(t) & shown
        t = np.where(shown, t, -np.inf)
        top = np.max(t, axis=-1, keepdims=True, initial=-np.inf)
        e = np.where(shown, m.r(np.exp(m.r(t - np.where(top == -np.inf, 0, top)))), 0)
        total = m.sum(e)
        y = m.r(e / np.where(total == 0, 1, total))
        return (np.where(nan.any(-1, keepdims=True), np.nan, y),)

    return Trial("softmax", arguments, draw, dtype, (dtype,), formula)


def dropout(draw: Draw) -> Trial:
    dtype, shape, p = draw.dtype(), shape_of(draw), draw.pick(0.0, 0.1, 0.5, 0.99)
    name, in_place = draw.pick("x", "dy"), draw.chance(0.2)
    x = x_of(draw, shape, dtype, in_place)
    seed, offset = int(draw.rng.integers(1 << 63)), draw.pick(0, 1, 6, 1 << 34, (1 << 63) - 1)
    arguments: dict[str, Any] = {name: x, "p": p, "seed": draw.pick(seed, np.array([seed])), "offset": offset}
    if in_place:
        arguments["out"] = x
    elif draw.chance(0.3):
        arguments["out"] = draw.out(shape, dtype, rows=True)
    held = np.array(x)
    places = np.arange(x.size, dtype=np.uint64) + np.uint64(offset)
    groups = places // np.uint64(4)
    counter = groups % np.uint64(2**32), groups // np.uint64(2**32), 0, 2**32 - 1
    words = np.take_along_axis(
        philox4x32(counter, (seed % 2**32, seed >> 32)), (places % np.uint64(4))[:, None].astype(int), 1
    )
    kept = (words[:, 0] / 2**32 >= p).reshape(shape)

    def formula(m: Maths) -> tuple[Array, ...]:
        return (m.r(m.load(held) * m.r(kept / (1 - m.wide(p)))),)

    return Trial("dropout" if name == "x" else "dropout_backward", arguments, draw, dtype, (dtype,), formula)


TRIALS = (norm, norm, norm_backward, quantised_norm, softmax, dropout)
