"""SwiGLU: the activation forward and backward, and the whole MLP.

``python perf/bench_swiglu.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: tokens)
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: the repository root takes perf/'s place on the path
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
from dataclasses import replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.swiglu import Activation
from gpu_ops.reference.swiglu import swiglu as reference_swiglu
from gpu_ops.reference.swiglu import swiglu_backward as reference_backward
from gpu_ops.reference.swiglu import swiglu_mlp as reference_mlp
from gpu_ops.reference.swiglu import swiglu_mlp_backward as reference_mlp_backward
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

HIDDEN, FFN = 4096, 14336  # Llama-3-8B
EMULATED = 512, 1536  # of the MLP: the emulator takes an hour for a teraflop
SAMPLED = 16
SMALL = (33, 320)


def cases(config: Config) -> list[Case]:
    tokens = config.seqlens or ((1024,) if config.quick else (512, 4096))
    mlp_tokens = config.seqlens or ((64,) if config.quick else (1, 128, 512))
    sizes = EMULATED if config.device == "emulator" else (HIDDEN, FFN)
    found = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for count in tokens:
            found += [forward(count, dtype), backward(count, dtype)]
            if not config.quick:
                found.append(forward_out(count, dtype))
            if config.device != "cpu":
                found.append(forward_packed(count, dtype))
                for activation in ("gelu", "gelu_tanh"):
                    found += [build(count, dtype, activation) for build in (forward, backward)]
        found += [mlp(count, dtype, sizes) for count in mlp_tokens]
        if not config.quick:
            found += [mlp_backward(count, dtype, sizes) for count in mlp_tokens if count > 1]
    return found


def forward(tokens: int, dtype: str, activation: Activation = "silu") -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.swiglu, x["gate"], x["up"], activation=activation, **how)

    return Case(
        op="swiglu",
        name="forward" if activation == "silu" else f"forward, {activation}",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=10.0 * tokens * FFN,
        bytes=3.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(data, tokens, FFN, DTYPES[dtype]),
        make_small=maker(data, *SMALL, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=(lambda x: functools.partial(naive_forward, x["gate"], x["up"]))
        if activation == "silu"
        else None,
        torch=functools.partial(torch_forward, activation=activation),
        reference=lambda x, precision: reference_swiglu(
            x["gate"], x["up"], activation=activation, precision=precision
        ),
        sample=sample_rows,
    )


def forward_packed(tokens: int, dtype: str) -> Case:
    """Gate and up side by side in one array, as one matrix product leaves them."""

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.swiglu, x["packed"], **how)

    def halves(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        half = x["packed"].shape[-1] // 2
        return x["packed"][:, :half], x["packed"][:, half:]

    def packed(rng: np.random.Generator, rows: int, width: int) -> Inputs:
        return {"packed": normal(rng, (rows, 2 * width), DTYPES[dtype])}

    return Case(
        op="swiglu",
        name="forward, packed",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=10.0 * tokens * FFN,
        bytes=3.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(packed, tokens, FFN),
        make_small=maker(packed, *SMALL),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=lambda x: functools.partial(naive_forward, *halves(x)),
        torch=lambda x: torch_forward(dict(zip(("gate", "up"), halves(x), strict=True))),
        reference=lambda x, precision: reference_swiglu(x["packed"], precision=precision),
        sample=sample_rows,
    )


def forward_out(tokens: int, dtype: str) -> Case:
    """Into a buffer that exists: without the page faults of a fresh result on any side."""

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.swiglu, x["gate"], x["up"], out=np.zeros_like(x["gate"]), **how)

    def naive(x: Inputs) -> Call:
        return functools.partial(naive_forward, x["gate"], x["up"], np.zeros_like(x["gate"]))

    def torch(x: Inputs) -> Call:
        import torch

        gate, up = torch_view(x["gate"]), torch_view(x["up"])
        out = torch.zeros_like(gate)
        silu = torch.ops.aten.silu.out
        return lambda: silu(gate, out=out).mul_(up)

    return replace(
        forward(tokens, dtype),
        name="forward, out=",
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch,
    )


def backward(tokens: int, dtype: str, activation: Activation = "silu") -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        arguments = (x["dy"], x["gate"], x["up"])
        return functools.partial(gpu_ops.swiglu_backward, *arguments, activation=activation, **how)

    def naive(x: Inputs) -> Call:
        return functools.partial(naive_backward, x["dy"], x["gate"], x["up"])

    return Case(
        op="swiglu",
        name="backward" if activation == "silu" else f"backward, {activation}",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=20.0 * tokens * FFN,
        bytes=5.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(data, tokens, FFN, DTYPES[dtype], dy=True),
        make_small=maker(data, *SMALL, DTYPES[dtype], dy=True),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive if activation == "silu" else None,
        torch=functools.partial(torch_backward, activation=activation),
        reference=lambda x, precision: reference_backward(
            x["dy"], x["gate"], x["up"], activation=activation, precision=precision
        ),
        sample=sample_rows,
        backward=True,
    )


def mlp(tokens: int, dtype: str, sizes: tuple[int, int]) -> Case:
    hidden, ffn = sizes

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.swiglu_mlp, x["x"], x["w_gate"], x["w_up"], x["w_down"], **how)

    return Case(
        op="swiglu",
        name="mlp",
        shape=f"{tokens} x {hidden} x {ffn}",
        dtype=dtype,
        flops=6.0 * tokens * hidden * ffn,
        bytes=mlp_bytes(tokens, dtype, sizes),
        make=maker(mlp_data, tokens, hidden, ffn, DTYPES[dtype]),
        make_small=maker(mlp_data, 5, 512, 1344, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive_mlp,
        torch=torch_mlp,
        reference=lambda x, precision: reference_mlp(
            x["x"], x["w_gate"], x["w_up"], x["w_down"], precision=precision
        ),
        bandwidth="read",
    )


def mlp_backward(tokens: int, dtype: str, sizes: tuple[int, int]) -> Case:
    hidden, ffn = sizes

    def call(function: Any, x: Inputs, **options: Any) -> Any:
        return function(x["dy"], x["x"], x["w_gate"], x["w_up"], x["w_down"], **options)

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(call, gpu_ops.swiglu_mlp_backward, x, **how)

    return Case(
        op="swiglu",
        name="mlp backward",
        shape=f"{tokens} x {hidden} x {ffn}",
        dtype=dtype,
        # gate and up once more, then two matmuls for each of the three weights
        flops=16.0 * tokens * hidden * ffn,
        bytes=2 * mlp_bytes(tokens, dtype, sizes),
        make=maker(mlp_data, tokens, hidden, ffn, DTYPES[dtype], dy=True),
        make_small=maker(mlp_data, 5, 512, 1344, DTYPES[dtype], dy=True),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        torch=torch_mlp_backward,
        reference=lambda x, precision: call(reference_mlp_backward, x, precision=precision),
        backward=True,
        note="torch keeps gate, up and the activation from its forward pass; ours computes them again",
    )


def mlp_bytes(tokens: int, dtype: str, sizes: tuple[int, int]) -> float:
    hidden, ffn = sizes
    return (3.0 * hidden * ffn + 2.0 * tokens * hidden) * DTYPES[dtype].itemsize


def data(
    rng: np.random.Generator, tokens: int, width: int, dtype: np.dtype[Any], *, dy: bool = False
) -> Inputs:
    names = ("gate", "up", "dy") if dy else ("gate", "up")
    return {name: normal(rng, (tokens, width), dtype) for name in names}


def mlp_data(
    rng: np.random.Generator, tokens: int, hidden: int, ffn: int, dtype: np.dtype[Any], *, dy: bool = False
) -> Inputs:
    """Weights scaled so that activations stay of the order of one, as in a trained model."""
    found = {
        "x": normal(rng, (tokens, hidden), dtype),
        "w_gate": normal(rng, (ffn, hidden), dtype, hidden**-0.5),
        "w_up": normal(rng, (ffn, hidden), dtype, hidden**-0.5),
        "w_down": normal(rng, (hidden, ffn), dtype, ffn**-0.5),
    }
    if dy:
        found["dy"] = normal(rng, (tokens, hidden), dtype)
    return found


def sample_rows(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Rows are independent: the last ones."""
    rows = slice(-SAMPLED, None)
    part = {name: array[rows] for name, array in x.items()}
    return part, tuple(r[rows] for r in result) if isinstance(result, tuple) else result[rows]


def naive_forward(gate: np.ndarray, up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    wide = gate.astype(np.float32, copy=False)
    y = np.negative(wide, out=out if wide is gate else None)
    np.exp(y, out=y)
    y += np.float32(1)
    np.divide(wide, y, out=y)
    y *= up.astype(np.float32, copy=False)
    if out is not None and out is not y:
        out[...] = y
        return out
    return y.astype(gate.dtype, copy=False)


def naive_backward(dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s))."""
    dtype = gate.dtype
    dy, gate, up = (a.astype(np.float32, copy=False) for a in (dy, gate, up))
    s = np.exp(-gate)
    s += np.float32(1)
    np.reciprocal(s, out=s)
    dup = gate * s
    dgate = gate - dup
    dgate += np.float32(1)
    dgate *= s
    dgate *= up
    dgate *= dy
    dup *= dy
    return dgate.astype(dtype, copy=False), dup.astype(dtype, copy=False)


def naive_mlp(x: Inputs) -> Call:
    """float32 weights: NumPy has no 16-bit matmul, so a user keeps them converted (not timed)."""
    dtype = x["x"].dtype
    w_gate, w_up, w_down = (x[name].astype(np.float32, copy=False).T for name in ("w_gate", "w_up", "w_down"))

    def call() -> np.ndarray:
        rows = x["x"].astype(np.float32, copy=False)
        return (naive_forward(rows @ w_gate, rows @ w_up) @ w_down).astype(dtype, copy=False)

    return call


def torch_forward(x: Inputs, activation: Activation = "silu") -> Call:
    gate, up, act = torch_view(x["gate"]), torch_view(x["up"]), torch_activation(activation)
    return lambda: act(gate) * up


def torch_backward(x: Inputs, activation: Activation = "silu") -> Call:
    import torch

    gate, up, dy = (torch_view(x[name]) for name in ("gate", "up", "dy"))
    gate.requires_grad_()
    up.requires_grad_()
    y = torch_activation(activation)(gate) * up
    return lambda: torch.autograd.grad(y, (gate, up), dy, retain_graph=True)


def torch_activation(activation: Activation) -> Any:
    from torch.nn import functional

    if activation == "silu":
        return functional.silu
    return functools.partial(functional.gelu, approximate="none" if activation == "gelu" else "tanh")


def torch_mlp(x: Inputs) -> Call:
    import torch

    rows, w_gate, w_up, w_down = (torch_view(x[name]) for name in ("x", "w_gate", "w_up", "w_down"))
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    return lambda: linear(silu(linear(rows, w_gate)) * linear(rows, w_up), w_down)


def torch_mlp_backward(x: Inputs) -> Call:
    import torch

    names = ("x", "w_gate", "w_up", "w_down")
    inputs = tuple(torch_view(x[name]).requires_grad_() for name in names)
    rows, w_gate, w_up, w_down = inputs
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    y = linear(silu(linear(rows, w_gate)) * linear(rows, w_up), w_down)
    dy = torch_view(x["dy"])
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("swiglu")
