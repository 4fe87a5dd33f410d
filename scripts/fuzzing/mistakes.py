"""Invalid calls, and calls that differ in one argument from a valid one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.errors import GpuOpsError
from scripts.fuzzing.draw import Draw
from scripts.fuzzing.maths import DTYPES, Array
from scripts.fuzzing.trial import Trial, flat, same_bytes

PENALTIES = ("repetition", "frequency", "presence")
NAN, INF = float("nan"), float("inf")
RESULTS = ("out", "residual_out", "grads", "k_cache", "v_cache")
NUMBERS_TOO = ("temperature", "top_p", "min_p", "dloss", *(f"{x}_penalty" for x in PENALTIES))
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "device": ("gpu", 0, "cuda:0"),
    "backend": ("cpp", 1, b"numba"),
    "causal": ("yes", 2, None),
    "window_size": ((1,), (-2, 0), ("a", 1), 5, (1.5, 2), None),
    "softmax_scale": (NAN, INF, "x", 1j),
    "softcap": (-1.0, NAN, "x"),
    "q_start": (-1, 1.5, True, 1 << 31, "x"),
    "k_start": (-1, 0.0, "x"),
    "dropout_p": (-0.1, 1.0, NAN, "x"),
    "p": (-0.1, 1.0, NAN, "x"),
    "offset": (-1, 1 << 63, 1.5, True, "x"),
    "seed": (-1, 1 << 64, 1.5, True, "x"),
    "step": (-1, 1.5, "x", None),
    "lr": (-1.0, NAN, "x", None),
    "betas": (0.9, (0.9,), (0.9, 1.0), ("x", 0.9)),
    "weight_decay": (-0.1, INF, "x"),
    "grad_scale": (NAN, "x"),
    "rounding": ("up", None, 1),
    "layout": ("sbhd", None, 1),
    "return_lse": ("yes", 2),
    "num_splits": (-1, 1.5, "x"),
    "eps": (-1.0, NAN, "x", INF),
    "casting": ("fp16", None),
    "weight_offset": (NAN, "x"),
    "activation": ("relu", None, 3),
    "scale": (NAN, "x", INF),
    "theta": (0.0, -1.0, NAN, "x"),
    "rotary_dim": (3, 0, 100000, 2.5, "x"),
    "interleaved": ("yes", 2),
    "scaling": ("yarn", 2.0, {"factor": 2}),
    "format": ("q4_0", 4, None),
    "shape": ((3,), (-1, 4), "x", (2.5, 4)),
    "method": ("mean", None),
    "group_size": (0, -2, 1.5, "x"),
    "activations": ("int4", None),
    "w": (None, "x", np.zeros((4, 4), np.int32)),
    "block_mask": (True, "x"),
}


def parameters(trial: Trial) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(gpu_ops, trial.op)).parameters)


def mistake(draw: Draw, trial: Trial) -> tuple[str, dict[str, Any]]:
    """Mistake in words, and the arguments that cause it."""
    known, arguments = parameters(trial), trial.arguments
    floats = [
        n
        for n, x in arguments.items()
        if isinstance(x, np.ndarray) and x.ndim and x.dtype in DTYPES and n not in RESULTS
    ]
    linked = [(n, axis) for n, axis in trial.linked if n in arguments and arguments[n].ndim > 0]
    ways = ["option"] * 2 + ["dtype", "no array"] * bool(floats) + ["length"] * 2 * bool(linked)
    # for a gradient it is an input
    is_result = "out" in known and known["out"].kind is inspect.Parameter.KEYWORD_ONLY
    ways += ["out"] * 2 * (is_result and isinstance(arguments.get("out"), np.ndarray))
    match draw.pick(*ways):
        case "option":
            name = draw.pick(*(n for n in WRONG_OPTIONS if n in known))
            return f"wrong {name}", {name: draw.pick(*WRONG_OPTIONS[name])}
        case "dtype":
            name = draw.pick(*floats)
            wrong = draw.pick(np.int32, np.complex64, object, np.longdouble, ">f4")
            with np.errstate(all="ignore"):
                return f"dtype of {name}", {
                    name: np.nan_to_num(arguments[name].astype(np.float64)).astype(wrong)
                }
        case "no array":
            name = draw.pick(*floats)
            others = [1.5] * (name not in NUMBERS_TOO) + [arguments[name].tolist()] * (
                arguments[name].size > 0
            )
            return f"{name} is no array", {name: draw.pick("x", object(), *others)}
        case "length":
            name, axis = draw.pick(*linked)
            x = arguments[name]
            longer = x.shape[axis] < 2
            shape = list(x.shape)
            shape[axis] += 1 if longer else -1
            return f"length of {name}", {name: np.ones(shape, x.dtype)}
        case _:
            return wrong_out(draw, arguments["out"])


def wrong_out(draw: Draw, out: Array) -> tuple[str, dict[str, Any]]:
    frozen = out.view()
    frozen.flags.writeable = False
    longer = np.ones((out.shape[0] + 1, *out.shape[1:]) if out.ndim else 2, out.dtype)
    whole = np.zeros(out.shape, np.int16 if out.dtype.itemsize == 2 else np.int64)
    return draw.pick(
        ("read-only out", {"out": frozen}),
        ("shape of out", {"out": longer}),
        ("axes of out", {"out": np.ones((1, *out.shape), out.dtype)}),
        ("dtype of out", {"out": whole}),
        ("out is a list", {"out": out.tolist()}),
    )


def judge_mistake(draw: Draw, trial: Trial) -> tuple[str | None, dict[str, Any]]:
    """Check that a call raises a typed error and writes nothing."""
    what, changed = mistake(draw, trial)
    before = [buffer.copy() for buffer in draw.buffers + trial.draw.buffers]
    try:
        trial.call(changed)
    except GpuOpsError as error:
        if len(str(error)) > 1000:
            return f"{what}: the message has {len(str(error))} characters", changed
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}", changed
    else:
        return f"{what}: accepted", changed
    if not same_bytes(draw.buffers + trial.draw.buffers, before):
        return f"{what}: refused, but something was written", changed
    return None, changed


def change(draw: Draw, trial: Trial) -> dict[str, Any]:
    """Change one argument, to a valid or an invalid value."""
    known = parameters(trial)
    options = [name for name in known if name not in ("device", "backend", "workspace")]
    name = draw.pick(*trial.arguments) if draw.chance(0.7) else draw.pick(*options)
    value = trial.arguments[name] if name in trial.arguments else known[name].default
    if isinstance(value, np.ndarray):
        return {name: changed_array(draw, trial, value)}
    if isinstance(value, bool):
        return {name: draw.pick(not value, 1, 0, np.bool_(value), "yes", None)}
    if isinstance(value, int | float):
        return {
            name: draw.pick(
                value + 1, -value, np.float32(value), True, None, NAN, 10**400, np.array(value), "1"
            )
        }
    if isinstance(value, str):
        return {
            name: draw.pick("bhsd", "gelu", "llama", "native", "planes", value.upper(), value.encode(), None)
        }
    if isinstance(value, tuple):
        return {name: draw.pick(list(value), value[::-1], value[:-1], (*value, 1), value[0], None)}
    return {name: draw.pick(None, 1, 2.5, True, "x", (), (1, 2), np.ones(3, np.float32))}


def changed_array(draw: Draw, trial: Trial, given: Array) -> Any:
    x = np.atleast_1d(given)
    ways: list[Callable[[], Any]] = [
        lambda: x.astype(np.float64).astype(draw.pick(*DTYPES, np.dtype(np.int32), np.dtype(bool))),
        lambda: x[None],
        lambda: x.reshape(-1),
        lambda: x.T,
        lambda: x[..., ::-1],
        lambda: x[:-1],
        lambda: x[..., 1:],
        lambda: x[:0],
        lambda: x.copy("F"),
        lambda: x.astype(x.dtype.newbyteorder()) if x.dtype.kind in "fi" else x,
        lambda: draw.pick(*(y for y in trial.arguments.values() if isinstance(y, np.ndarray))),
        lambda: None,
        lambda: draw.place(np.array(x)),
        lambda: x.view(np.ma.MaskedArray) if x.dtype.kind in "fi" else x,
        lambda: np.broadcast_to(x[:1], x.shape) if x.size else x,
    ]
    with np.errstate(all="ignore"):
        return draw.pick(*ways)()


def outcome(trial: Trial, changed: dict[str, Any]) -> tuple[Any, ...]:
    """Outcome of a call in comparable form."""
    try:
        results = flat(trial.call(changed))
    except GpuOpsError as error:
        return "refused", type(error).__name__, str(error)
    parts = []
    for result in results:
        matrix = isinstance(result, gpu_ops.TernaryMatrix)
        arrays = (result.trits(), result.scale) if matrix else (result,)
        parts += [(str(a.dtype), a.shape, a.tobytes()) if isinstance(a, np.ndarray) else a for a in arrays]
    return "accepted", *parts
