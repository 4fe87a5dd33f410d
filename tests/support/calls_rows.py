"""Rows of the table of calls (calls.py): norms, softmax, sampling, dropout, SwiGLU, linear, the gated MLP."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from tests.support.call_maker import Maker

ROWS = "batch rows width"


def rmsnorm(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    return new.normal(x=axes, weight=axes.split()[-1])


def layernorm(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    return new.normal(x=axes, weight=axes.split()[-1], bias=axes.split()[-1])


def rmsnorm_backward(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    arrays = new.normal(dy=axes, x=axes, weight=axes.split()[-1])
    _, rstd = gpu_ops.rmsnorm(arrays["x"], arrays["weight"], return_rstd=True, backend="reference")
    new.axes["rstd"] = new.axes["x"][:-1]
    return {**arrays, "rstd": rstd}


def layernorm_backward(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    arrays = new.normal(dy=axes, x=axes, weight=axes.split()[-1])
    x, weight = arrays["x"], arrays["weight"]
    _, mean, rstd = gpu_ops.layernorm(x, weight, return_stats=True, backend="reference")
    new.axes["mean"] = new.axes["rstd"] = new.axes["x"][:-1]
    return {**arrays, "mean": mean, "rstd": rstd}


def residual(new: Maker, name: str = "residual", **options: Any) -> dict[str, Any]:
    return {**new.normal(**{name: ROWS}), **options}


def split(new: Maker, *names: str, axes: str = "rows cols") -> dict[str, Any]:
    return new.normal(**dict.fromkeys(names, axes))


def packed(new: Maker, backward: bool = False) -> dict[str, Any]:
    """Gate and up side by side in one array."""
    new.sizes["packed"] = 2 * new.sizes["cols"]
    return {**(new.normal(dy="rows cols") if backward else {}), **new.normal(gate="rows packed")}


def mlp(new: Maker, *gradient: str, rows: str = "rows") -> dict[str, Any]:
    return {
        **new.normal(**dict.fromkeys(gradient, f"{rows} hidden_out")),
        **new.normal(x=f"{rows} hidden", w_gate="ffn hidden", w_up="ffn hidden", w_down="hidden_out ffn"),
    }


def linear(new: Maker, *gradient: str, rows: str = "rows") -> dict[str, Any]:
    return {
        **new.normal(**dict.fromkeys(gradient, f"{rows} hidden_out")),
        **new.normal(x=f"{rows} hidden", weight="hidden_out hidden"),
    }


def kept(new: Maker) -> Any:
    """Backward of a call that kept gate and up."""
    arrays = mlp(new, "dy", rows="batch rows")
    _, gate_up = gpu_ops.swiglu_mlp(*list(arrays.values())[1:], keep="gate_up", backend="reference")
    new.axes["gate_up"] = ("batch", "rows", "gate_up")
    return arrays, {"gate_up": gate_up}


def added(new: Maker, **axes: str) -> dict[str, Any]:
    """Gradients of an earlier part of a batch."""
    return new.normal(new.wide, **axes)


def mask(new: Maker, axes: str = "batch 1 width") -> dict[str, Any]:
    """Mask in which half of the elements are visible, including the middle of each row."""
    made = new.integers(0, 2, bool, mask=axes)
    made["mask"][..., made["mask"].shape[-1] // 2 :][..., :1] = True
    return made


def only(make: Any, *arguments: Any, **options: Any) -> Any:
    """Row of the table with options that are no arrays."""
    return lambda new: (make(new, *arguments), options)


def sampled(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call with every option in an array."""
    arrays, each = new.normal(logits="rows width"), "rows"
    numbers = {
        **new.normal(np.float32, temperature=each, repetition_penalty=each),
        **new.normal(np.float32, frequency_penalty=each, presence_penalty=each),
    }
    numbers |= {name: abs(numbers[name]) + np.float32(0.1) for name in ("temperature", "repetition_penalty")}
    numbers |= {n: np.exp(-abs(x)) for n, x in new.normal(np.float32, top_p=each, min_p=each).items()}
    numbers["min_p"] *= np.float32(0.1)
    by_token = {**new.normal(new.wide, bias="width"), **new.integers(-1, 3, np.int32, counts="rows width")}
    counters = new.integers(0, 2**62, np.int64, seed=each, step=each)
    numbers |= new.integers(0, 9, np.int32, top_k=each)
    return arrays, {**numbers, **by_token, **counters, "return_logprob": True}


VARIANTS: dict[str, Any] = {
    "rmsnorm": only(rmsnorm),
    "rmsnorm sum": lambda new: (rmsnorm(new, ROWS), residual(new, return_rstd=True)),
    "rmsnorm alone": lambda new: (rmsnorm(new, ROWS), residual(new, return_sum=False)),
    "rmsnorm llama": only(rmsnorm, casting="llama", weight_offset=1.0, return_rstd=True),
    "rmsnorm_backward": only(rmsnorm_backward),
    "rmsnorm_backward sum": lambda new: (rmsnorm_backward(new, ROWS), residual(new, "dresidual")),
    "rmsnorm_backward added": lambda new: (rmsnorm_backward(new), added(new, dweight="cols")),
    "rmsnorm_quant_int8": only(rmsnorm),
    "rmsnorm_quant_int8 sum": lambda new: (rmsnorm(new, ROWS), residual(new)),
    "layernorm": only(layernorm),
    "layernorm sum": lambda new: (layernorm(new, ROWS), residual(new, return_stats=True)),
    "layernorm_backward": only(layernorm_backward),
    "layernorm_backward sum": lambda new: (layernorm_backward(new, ROWS), residual(new, "dresidual")),
    "layernorm_backward added": lambda new: (
        layernorm_backward(new),
        added(new, dweight="cols", dbias="cols"),
    ),
    "softmax": only(split, "x"),
    "softmax mask": lambda new: (split(new, "x", axes=ROWS), {"scale": 0.5, **mask(new)}),
    "softmax bias": lambda new: (split(new, "x", axes=ROWS), new.normal(mask="rows width")),
    "softmax_backward": only(split, "dy", "y"),
    "sample": lambda new: (
        new.normal(logits="rows cols"),
        {"seed": 5, "top_k": 40, "top_p": 0.9, "return_logprob": True},
    ),
    "sample arrays": sampled,
    "dropout": lambda new: ({**split(new, "x"), "p": 0.3}, {"seed": 5}),
    "dropout array": lambda new: (
        {**split(new, "x", axes=ROWS), "p": 0.5},
        {"offset": 2**33 + 1, **new.integers(0, 99, np.int64, seed="1")},
    ),
    "dropout_backward": lambda new: ({**split(new, "dy"), "p": 0.3}, {"seed": 5}),
    "swiglu": only(split, "gate", "up"),
    "swiglu vector": lambda new: (split(new, "gate", "up", axes="cols"), {}),
    "swiglu packed": only(packed),
    "swiglu gelu": lambda new: (split(new, "gate", "up", axes=ROWS), {"activation": "gelu_tanh"}),
    "swiglu_backward": only(split, "dy", "gate", "up"),
    "swiglu_backward packed": only(packed, True),
    "swiglu_backward gelu": lambda new: (split(new, "dy", "gate", "up", axes=ROWS), {"activation": "gelu"}),
    "linear": only(linear),
    "linear bias": lambda new: (
        {**linear(new, rows="batch rows"), **new.normal(bias="hidden_out")},
        new.normal(residual="batch rows hidden_out"),
    ),
    "linear_backward": only(linear, "dy", has_bias=True),
    "linear_backward dx": only(linear, "dy", only="dx"),
    "linear_backward weights": only(linear, "dy", only="weights", has_bias=True),
    "linear_backward added": lambda new: (
        linear(new, "dy"),
        {"has_bias": True, **added(new, dweight="hidden_out hidden", dbias="hidden_out")},
    ),
    "swiglu_mlp": only(mlp),
    "swiglu_mlp gelu": lambda new: (mlp(new, rows="batch rows"), {"activation": "gelu"}),
    "swiglu_mlp keep": only(mlp, keep="gate_up"),
    "swiglu_mlp_backward": only(mlp, "dy"),
    "swiglu_mlp_backward kept": kept,
    "swiglu_mlp_backward added": lambda new: (
        mlp(new, "dy"),
        added(new, dw_gate="ffn hidden", dw_up="ffn hidden", dw_down="hidden_out ffn"),
    ),
}
