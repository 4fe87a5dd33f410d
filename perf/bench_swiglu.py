"""SwiGLU: the activation forward and backward, and the whole MLP.

``python perf/bench_swiglu.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: tokens)
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: the repository root takes perf/'s place on the path
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.swiglu import swiglu as reference_swiglu
from gpu_ops.reference.swiglu import swiglu_backward as reference_backward
from gpu_ops.reference.swiglu import swiglu_mlp as reference_mlp
from gpu_ops.reference.swiglu import swiglu_mlp_backward as reference_mlp_backward
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

HIDDEN, FFN = 4096, 14336  # Llama-3-8B
SAMPLED = 16
SMALL = (33, 320)


def cases(config: Config) -> list[Case]:
    tokens = config.seqlens or ((1024,) if config.quick else (512, 4096))
    mlp_tokens = config.seqlens or ((64,) if config.quick else (1, 128, 512))
    found = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for count in tokens:
            found += [forward(count, dtype), backward(count, dtype)]
            if not config.quick:
                found.append(forward_out(count, dtype))
        found += [mlp(count, dtype) for count in mlp_tokens]
        if not config.quick:
            found += [mlp_backward(count, dtype) for count in mlp_tokens if count > 1]
    return found


def forward(tokens: int, dtype: str) -> Case:
    return Case(
        op="swiglu",
        name="forward",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=10.0 * tokens * FFN,
        bytes=3.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(data, tokens, FFN, DTYPES[dtype]),
        make_small=maker(data, *SMALL, DTYPES[dtype]),
        ours=lambda x: functools.partial(gpu_ops.swiglu, x["gate"], x["up"]),
        naive=lambda x: functools.partial(naive_forward, x["gate"], x["up"]),
        torch=torch_forward,
        reference=lambda x, precision: reference_swiglu(x["gate"], x["up"], precision=precision),
        sample=sample_rows,
    )


def forward_out(tokens: int, dtype: str) -> Case:
    """Into a buffer that exists: without the page faults of a fresh result on any side."""

    def ours(x: Inputs) -> Call:
        return functools.partial(gpu_ops.swiglu, x["gate"], x["up"], out=np.zeros_like(x["gate"]))

    def naive(x: Inputs) -> Call:
        return functools.partial(naive_forward, x["gate"], x["up"], np.zeros_like(x["gate"]))

    def torch(x: Inputs) -> Call:
        import torch

        gate, up = torch_view(x["gate"]), torch_view(x["up"])
        out = torch.zeros_like(gate)
        silu = torch.ops.aten.silu.out
        return lambda: silu(gate, out=out).mul_(up)

    return Case(
        op="swiglu",
        name="forward, out=",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=10.0 * tokens * FFN,
        bytes=3.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(data, tokens, FFN, DTYPES[dtype]),
        make_small=maker(data, *SMALL, DTYPES[dtype]),
        ours=ours,
        naive=naive,
        torch=torch,
        reference=lambda x, precision: reference_swiglu(x["gate"], x["up"], precision=precision),
        sample=sample_rows,
    )


def backward(tokens: int, dtype: str) -> Case:
    return Case(
        op="swiglu",
        name="backward",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=20.0 * tokens * FFN,
        bytes=5.0 * tokens * FFN * DTYPES[dtype].itemsize,
        make=maker(data, tokens, FFN, DTYPES[dtype], dy=True),
        make_small=maker(data, *SMALL, DTYPES[dtype], dy=True),
        ours=lambda x: functools.partial(gpu_ops.swiglu_backward, x["dy"], x["gate"], x["up"]),
        naive=lambda x: functools.partial(naive_backward, x["dy"], x["gate"], x["up"]),
        torch=torch_backward,
        reference=lambda x, precision: reference_backward(x["dy"], x["gate"], x["up"], precision=precision),
        sample=sample_rows,
        backward=True,
    )


def mlp(tokens: int, dtype: str) -> Case:
    return Case(
        op="swiglu",
        name="mlp",
        shape=f"{tokens} x {HIDDEN} x {FFN}",
        dtype=dtype,
        flops=6.0 * tokens * HIDDEN * FFN,
        bytes=mlp_bytes(tokens, dtype),
        make=maker(mlp_data, tokens, HIDDEN, FFN, DTYPES[dtype]),
        make_small=maker(mlp_data, 5, 512, 1344, DTYPES[dtype]),
        ours=lambda x: functools.partial(gpu_ops.swiglu_mlp, x["x"], x["w_gate"], x["w_up"], x["w_down"]),
        naive=naive_mlp,
        torch=torch_mlp,
        reference=lambda x, precision: reference_mlp(
            x["x"], x["w_gate"], x["w_up"], x["w_down"], precision=precision
        ),
        bandwidth="read",
    )


def mlp_backward(tokens: int, dtype: str) -> Case:
    def call(function: Any, x: Inputs, **options: Any) -> Any:
        return function(x["dy"], x["x"], x["w_gate"], x["w_up"], x["w_down"], **options)

    return Case(
        op="swiglu",
        name="mlp backward",
        shape=f"{tokens} x {HIDDEN} x {FFN}",
        dtype=dtype,
        # gate and up once more, then two matmuls for each of the three weights
        flops=16.0 * tokens * HIDDEN * FFN,
        bytes=2 * mlp_bytes(tokens, dtype),
        make=maker(mlp_data, tokens, HIDDEN, FFN, DTYPES[dtype], dy=True),
        make_small=maker(mlp_data, 5, 512, 1344, DTYPES[dtype], dy=True),
        ours=lambda x: functools.partial(call, gpu_ops.swiglu_mlp_backward, x),
        torch=torch_mlp_backward,
        reference=lambda x, precision: call(reference_mlp_backward, x, precision=precision),
        backward=True,
        note="torch keeps gate, up and the activation from its forward pass; ours computes them again",
    )


def mlp_bytes(tokens: int, dtype: str) -> float:
    return (3.0 * HIDDEN * FFN + 2.0 * tokens * HIDDEN) * DTYPES[dtype].itemsize


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


def torch_forward(x: Inputs) -> Call:
    import torch

    gate, up = torch_view(x["gate"]), torch_view(x["up"])
    return lambda: torch.nn.functional.silu(gate) * up


def torch_backward(x: Inputs) -> Call:
    import torch

    gate, up, dy = (torch_view(x[name]) for name in ("gate", "up", "dy"))
    gate.requires_grad_()
    up.requires_grad_()
    y = torch.nn.functional.silu(gate) * up
    return lambda: torch.autograd.grad(y, (gate, up), dy, retain_graph=True)


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
