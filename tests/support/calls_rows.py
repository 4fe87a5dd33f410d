"""Rows of the table of calls (calls.py): all ops but attention and RoPE."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpu_ops
from gpu_ops import TernaryMatrix
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


IGNORED = -100


def indices(new: Maker, name: str, axes: str, end: int, dtype: Any = np.int64) -> dict[str, Any]:
    """Integers in [0, end); ignored targets if that range is empty."""
    made = new.integers(0, max(end, 1), dtype, **{name: axes})
    if not end:
        made[name][...] = IGNORED
    return made


def logits(new: Maker, axes: str = "rows cols") -> dict[str, Any]:
    leading, _, vocab = axes.rpartition(" ")
    arrays = {**new.normal(logits=axes), **indices(new, "targets", leading, new.sizes[vocab])}
    arrays["targets"][2:3] = IGNORED
    return arrays


def weighted(new: Maker) -> dict[str, Any]:
    """Options of class weights, in the dtype of the loss, and others that change a kernel."""
    return {**new.normal(new.wide, class_weight="width"), "label_smoothing": 0.1, "softcap": 5.0}


def gradient(new: Maker, axes: str = "rows cols", **options: Any) -> dict[str, Any]:
    arrays, leading = logits(new, axes), axes.rpartition(" ")[0]
    _, lse = gpu_ops.cross_entropy(*arrays.values(), return_lse=True, backend="reference", **options)
    new.axes["lse"] = tuple(leading.split())
    return {**arrays, "lse": lse}


def of_rows(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = gradient(new)
    return {**new.normal(new.wide, dloss="rows"), **arrays}, {"reduction": "none"}


def of_mean(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    options = weighted(new)
    arrays = gradient(new, "batch rows width", **options)
    return {**new.normal(new.wide, dloss=""), **arrays}, options


def head(new: Maker, axes: str = "rows") -> dict[str, Any]:
    arrays = {
        **new.normal(x=f"{axes} hidden", weight="width hidden"),
        **indices(new, "targets", axes, new.sizes["width"]),
    }
    arrays["targets"][2:3] = IGNORED
    return arrays


def differentiated(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call with every result, in two or more chunks of 17 rows."""
    options = {"reduction": "none", "grads": True, "return_lse": True, "chunk": 16}
    return head(new), {**new.normal(bias="width"), **options}


def table(new: Maker) -> dict[str, Any]:
    return {**indices(new, "ids", "rows", new.sizes["N"]), **new.normal(weight="N width")}


def gradient_of_table(new: Maker) -> dict[str, Any]:
    arrays = {**new.normal(dx="rows cols"), **indices(new, "ids", "rows", new.sizes["N"], np.int32)}
    return {**arrays, "num_embeddings": new.sizes["N"]}


LOSS_VARIANTS: dict[str, Any] = {
    "cross_entropy": lambda new: (logits(new), {"reduction": "none", "return_lse": True}),
    "cross_entropy mean": lambda new: (logits(new, "batch rows width"), weighted(new)),
    "cross_entropy_backward": of_rows,
    "cross_entropy_backward mean": of_mean,
    "linear_cross_entropy": differentiated,
    "linear_cross_entropy mean": lambda new: (head(new, "batch rows"), weighted(new)),
    "embedding": lambda new: (table(new), {"scale": 0.5}),
    "embedding_backward": lambda new: (gradient_of_table(new), {"scale": 0.5}),
    "global_norm": lambda new: (new.normal(arrays="rows cols"), {}),
    "embedding_backward added": lambda new: (
        gradient_of_table(new),
        new.normal(new.wide, dweight="N cols"),
    ),
}


def matrix(new: Maker, group_size: int | None = None, rows: str = "N") -> TernaryMatrix:
    w = new.rng.standard_normal((new.sizes[rows], new.sizes["K"]), dtype=np.float32)
    return gpu_ops.ternary_quantize(w, group_size=group_size, backend="reference")


def trits(new: Maker) -> Any:
    new.axes["trits"] = ("N", "K")
    return new.rng.integers(-1, 2, (new.sizes["N"], new.sizes["K"])).astype(np.int8)


def unpack(new: Maker) -> dict[str, Any]:
    packed = gpu_ops.ternary_pack(trits(new), "base3", backend="reference")
    new.axes["packed"] = ("N", "bytes")
    return {"packed": packed, "shape": (new.sizes["N"], new.sizes["K"]), "format": "base3"}


TERNARY_VARIANTS: dict[str, Any] = {
    "ternary_quantize": lambda new: (new.normal(w="N K"), {}),
    "ternary_quantize twn": lambda new: (new.normal(w="N K"), {"method": "twn", "group_size": 64}),
    "ternary_pack": lambda new: ({"trits": trits(new), "format": "base3"}, {}),
    "ternary_unpack": lambda new: (unpack(new), {}),
    "ternary_matmul": lambda new: ({**new.normal(x="rows K"), "w": matrix(new)}, {}),
    "ternary_matmul base3": lambda new: (
        {**new.normal(x="batch rows K"), "w": matrix(new, 64).to("base3")},
        {"activations": "native"},
    ),
    "ternary_matmul given": lambda new: (
        {**new.integers(-128, 128, np.int8, x="batch rows K"), "w": matrix(new, 64)},
        {**new.normal(new.wide, x_scale="batch rows"), "out_dtype": new.dtype},
    ),
    "ternary_matmul both": lambda new: ({"x": matrix(new, rows="rows"), "w": matrix(new).to("base3")}, {}),
    "ternary_matmul_backward": lambda new: (
        {**new.normal(dy="rows N", x="rows K"), "w": matrix(new)},
        {},
    ),
    "ternary_matmul_backward dx": lambda new: (
        {**new.normal(dy="rows N", x="rows K"), "w": matrix(new, 64)},
        {"only": "dx"},
    ),
    "ternary_matmul_backward native": lambda new: (
        {**new.normal(dy="batch rows N", x="batch rows K"), "w": matrix(new, 64).to("base3")},
        {"activations": "native"},
    ),
}


def packed(new: Maker, format: str) -> gpu_ops.PackedMatrix:
    w = new.rng.standard_normal((new.sizes["N"], new.sizes["K"]), dtype=np.float32)
    weight = gpu_ops.quantize(w, format, dtype=new.dtype)
    gpu_ops.linear(np.zeros((1, w.shape[1]), np.float32), weight)  # replaces its arrays, which laws compare
    return weight


PACKED_VARIANTS: dict[str, Any] = {
    "linear packed": lambda new: (
        {**new.normal(x="batch rows K"), "weight": packed(new, "q5_1"), **new.normal(bias="N")},
        new.normal(residual="batch rows N"),
    ),
    "embedding packed": lambda new: (
        {**new.integers(0, new.sizes["N"], np.int32, ids="batch rows"), "weight": packed(new, "nf4")},
        {"scale": 0.5},
    ),
}


def step(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """AdamW step; 16-bit parameters have a master copy."""
    state_dtype = np.float64 if new.dtype == np.float64 else np.float32
    arrays = {**new.normal(params="cols", grads="cols"), **new.normal(state_dtype, m="cols", v="cols")}
    arrays["v"] *= arrays["v"]
    options = {"step": 3, "lr": 0.01, "weight_decay": 0.1}
    if new.dtype.itemsize == 2:
        options["master"] = arrays["params"].astype(np.float32)
        new.axes["master"] = ("cols",)
    return arrays, options


def numbers_in_arrays(new: Maker) -> tuple[dict[str, Any], dict[str, Any]]:
    """AdamW step with numbers in arrays and a mask; bfloat16 parameters are rounded stochastically."""
    arrays, options = step(new)
    numbers = {"lr": np.array(0.01), "grad_scale": np.array(0.5), "skip": np.zeros((), np.float32)}
    new.axes |= dict.fromkeys(numbers, ())
    options |= {**numbers, **new.integers(0, 2, np.uint8, decay_mask="cols")}
    if new.dtype.name == "bfloat16":
        options |= {"rounding": "stochastic", "seed": 5, "master": None}
    return arrays, options


TRAINING_VARIANTS: dict[str, Any] = {"adamw_step": step, "adamw_step arrays": numbers_in_arrays}
