"""SwiGLU: the activation forward and backward, and the whole MLP.

``python perf/bench_swiglu.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: tokens)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.gemm import swiglu as reference
from gpu_ops.reference.gemm.swiglu import Activation
from perf.build import backends, calls, made_by, normal, sample_rows, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

HIDDEN, FFN = 4096, 14336  # Llama-3-8B
EMULATED = 512, 1536  # sizes of the MLP on the emulator, which takes an hour for a teraflop
SAMPLED = 16
SMALL = (33, 320)
SMALL_MLP = (5, 512, 1344)
WEIGHTS = ("w_gate", "w_up", "w_down")


TOUR = (("forward", "bfloat16"), ("backward", "bfloat16"))  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    tokens = config.seqlens or ((1024,) if config.quick else (512, 4096))
    mlp_tokens = config.seqlens or ((64,) if config.quick else (1, 128, 512))
    sizes = EMULATED if config.device == "emulator" else (HIDDEN, FFN)
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for count in tokens:
            result += [forward(count, dtype), backward(count, dtype)]
            if not config.quick:
                result.append(forward_out(count, dtype))
            if config.device != "cpu":
                result.append(forward_packed(count, dtype))
                for activation in ("gelu", "gelu_tanh"):
                    result += [build(count, dtype, activation) for build in (forward, backward)]
        result += [mlp((count, *sizes), dtype) for count in mlp_tokens]
        if not config.quick:
            for build in (mlp_backward, mlp_backward_kept):
                result += [build((count, *sizes), dtype) for count in mlp_tokens if count > 1]
    return result


def forward(tokens: int, dtype: str, activation: Activation = "silu") -> Case:
    return Case(
        op="swiglu",
        name="forward" if activation == "silu" else f"forward, {activation}",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=10.0 * tokens * FFN,
        bytes=3.0 * tokens * FFN * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, FFN), SMALL, DTYPES[dtype], ("gate", "up")),
        **calls(gpu_ops.swiglu, reference.swiglu, ("gate", "up"), activation=activation),
        naive=naive_call if activation == "silu" else None,
        torch=functools.partial(torch_forward, activation),
        sample=functools.partial(sample_rows, SAMPLED, ()),
    )


def forward_packed(tokens: int, dtype: str) -> Case:
    """Gate and up side by side in one array, as one matrix product writes them."""

    def packed(rng: np.random.Generator, rows: int, width: int) -> Inputs:
        return {"packed": normal(rng, (rows, 2 * width), DTYPES[dtype])}

    def halves(x: Inputs) -> Inputs:
        half = x["packed"].shape[-1] // 2
        return {"gate": x["packed"][:, :half], "up": x["packed"][:, half:]}

    return replace(
        forward(tokens, dtype),
        name="forward, packed",
        **made_by(packed, (tokens, FFN), SMALL),
        **calls(gpu_ops.swiglu, reference.swiglu, ("packed",)),
        naive=lambda x: naive_call(halves(x)),
        torch=lambda x: torch_forward("silu", halves(x)),
    )


def forward_out(tokens: int, dtype: str) -> Case:
    """Forward with ``out=``, so that no contender has page faults of fresh memory."""
    case = forward(tokens, dtype)

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(case.ours(x, **how), out=np.zeros_like(x["gate"]))

    def torch(x: Inputs) -> Call:
        import torch

        gate, up = torch_view(x["gate"]), torch_view(x["up"])
        out = torch.zeros_like(gate)
        silu = torch.ops.aten.silu.out
        return lambda: silu(gate, out=out).mul_(up)

    return replace(
        case,
        name="forward, out=",
        **backends(ours),
        naive=lambda x: naive_call(x, out=np.zeros_like(x["gate"])),
        torch=torch,
    )


def backward(tokens: int, dtype: str, activation: Activation = "silu") -> Case:
    names = ("dy", "gate", "up")
    return Case(
        op="swiglu",
        name="backward" if activation == "silu" else f"backward, {activation}",
        shape=f"{tokens} x {FFN}",
        dtype=dtype,
        flops=20.0 * tokens * FFN,
        bytes=5.0 * tokens * FFN * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, FFN), SMALL, DTYPES[dtype], ("gate", "up", "dy")),
        **calls(gpu_ops.swiglu_backward, reference.swiglu_backward, names, activation=activation),
        naive=naive_backward if activation == "silu" else None,
        torch=lambda x: torch_gradient(torch_glu(activation), x, ("gate", "up")),
        sample=functools.partial(sample_rows, SAMPLED, ()),
        backward=True,
    )


def mlp(sizes: tuple[int, int, int], dtype: str) -> Case:
    tokens, hidden, ffn = sizes
    return Case(
        op="swiglu",
        name="mlp",
        shape=f"{tokens} x {hidden} x {ffn}",
        dtype=dtype,
        flops=6.0 * tokens * hidden * ffn,
        bytes=(3.0 * hidden * ffn + 2.0 * tokens * hidden) * DTYPES[dtype].itemsize,
        **made_by(mlp_data, sizes, SMALL_MLP, DTYPES[dtype], ("x",)),
        **calls(gpu_ops.swiglu_mlp, reference.swiglu_mlp, ("x", *WEIGHTS)),
        naive=naive_mlp,
        torch=lambda x: functools.partial(torch_mlp(), *(torch_view(x[name]) for name in ("x", *WEIGHTS))),
        bandwidth="read",
    )


def mlp_backward(sizes: tuple[int, int, int], dtype: str) -> Case:
    names, forward = ("x", *WEIGHTS), mlp(sizes, dtype)
    return replace(
        forward,
        name="mlp backward",
        # recomputes gate and up, then two matmuls for each of the three weights
        flops=16.0 * math.prod(sizes),
        bytes=2 * forward.bytes,
        **made_by(mlp_data, sizes, SMALL_MLP, DTYPES[dtype], ("x", "dy")),
        **calls(gpu_ops.swiglu_mlp_backward, reference.swiglu_mlp_backward, ("dy", *names)),
        naive=None,
        torch=lambda x: torch_gradient(torch_mlp(), x, names),
        bandwidth="copy",
        backward=True,
        note="torch keeps gate, up and the activation from its forward pass; ours recomputes them",
    )


def mlp_backward_kept(sizes: tuple[int, int, int], dtype: str) -> Case:
    """Backward with gate and up kept from the forward pass, as torch does."""

    def kept(rng: np.random.Generator, tokens: int, hidden: int, ffn: int) -> Inputs:
        arrays = mlp_data(rng, tokens, hidden, ffn, DTYPES[dtype], ("x", "dy"))
        return arrays | {"gate_up": normal(rng, (tokens, 2 * ffn), DTYPES[dtype])}

    names, case = ("dy", "x", *WEIGHTS), mlp_backward(sizes, dtype)
    return replace(
        case,
        name="mlp backward, kept",
        flops=12.0 * math.prod(sizes),
        bytes=case.bytes + 2.0 * sizes[0] * sizes[2] * DTYPES[dtype].itemsize,
        **made_by(kept, sizes, SMALL_MLP),
        **calls(gpu_ops.swiglu_mlp_backward, reference.swiglu_mlp_backward, names, ("gate_up",)),
        note="torch keeps the activation too",
    )


def data(
    rng: np.random.Generator, tokens: int, width: int, dtype: np.dtype[Any], names: tuple[str, ...]
) -> Inputs:
    return {name: normal(rng, (tokens, width), dtype) for name in names}


def mlp_data(
    rng: np.random.Generator, tokens: int, hidden: int, ffn: int, dtype: np.dtype[Any], names: tuple[str, ...]
) -> Inputs:
    """Weights scaled to keep activations around 1, as in a trained model."""
    return data(rng, tokens, hidden, dtype, names) | {
        "w_gate": normal(rng, (ffn, hidden), dtype, hidden**-0.5),
        "w_up": normal(rng, (ffn, hidden), dtype, hidden**-0.5),
        "w_down": normal(rng, (hidden, ffn), dtype, ffn**-0.5),
    }


def naive_call(x: Inputs, out: np.ndarray | None = None) -> Call:
    return functools.partial(naive_forward, x["gate"], x["up"], out)


def naive_forward(gate: np.ndarray, up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    gate32, up32 = to_float32(gate, up)
    y = np.negative(gate32, out=out if gate32 is gate else None)
    np.exp(y, out=y)
    y += np.float32(1)
    np.divide(gate32, y, out=y)
    y *= up32
    if out is not None and out is not y:
        out[...] = y
        return out
    return y.astype(gate.dtype, copy=False)


def naive_backward(x: Inputs) -> Call:
    """Gradients with s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s))."""

    def call() -> tuple[np.ndarray, np.ndarray]:
        dtype = x["gate"].dtype
        dy, gate, up = to_float32(x["dy"], x["gate"], x["up"])
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

    return call


def naive_mlp(x: Inputs) -> Call:
    """MLP with float32 weights: NumPy has no 16-bit matmul, so a user keeps them converted (not timed)."""
    w_gate, w_up, w_down = (weight.T for weight in to_float32(*(x[name] for name in WEIGHTS)))

    def call() -> np.ndarray:
        (rows,) = to_float32(x["x"])
        return (naive_forward(rows @ w_gate, rows @ w_up) @ w_down).astype(x["x"].dtype, copy=False)

    return call


def torch_glu(activation: Activation) -> Any:
    """``act(gate) * up`` of tensors."""
    from torch.nn import functional

    approximate = "none" if activation == "gelu" else "tanh"
    act = (
        functional.silu
        if activation == "silu"
        else functools.partial(functional.gelu, approximate=approximate)
    )
    return lambda gate, up: act(gate) * up


def torch_forward(activation: Activation, x: Inputs) -> Call:
    return functools.partial(torch_glu(activation), torch_view(x["gate"]), torch_view(x["up"]))


def torch_mlp() -> Any:
    """The MLP of tensors (rows, w_gate, w_up, w_down)."""
    from torch.nn.functional import linear, silu

    return lambda rows, gate, up, down: linear(silu(linear(rows, gate)) * linear(rows, up), down)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("swiglu")
