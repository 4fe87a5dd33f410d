"""The linear layer: forward, with a bias and a residual, backward.

``python perf/bench_linear.py --device cpu --dtype float32 --seqlen 16 1024`` (seqlen: tokens, of 1024 to 4096)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace

import numpy as np

import gpu_ops
from gpu_ops.reference.gemm import linear as reference
from perf.build import calls, made_by, normal, sample_rows, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

IN, OUT = 1024, 4096
SMALL = (37, 96, 80)


TOUR = (("forward", "float32"), ("forward", "bfloat16"))  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for tokens in config.seqlens or ((256,) if config.quick else (1, 16, 1024)):
            result += [forward(tokens, dtype), forward(tokens, dtype, addends=True)]
            result += [backward(tokens, dtype)] if tokens > 1 else []
    return result


def forward(tokens: int, dtype: str, addends: bool = False) -> Case:
    names = ("x", "weight", *(("bias",) if addends else ()))
    keywords = ("residual",) if addends else ()

    def torch(x: Inputs) -> Call:
        from torch.nn.functional import linear

        tensors = [torch_view(x[name]) for name in names]
        if not addends:
            return functools.partial(linear, *tensors)
        residual = torch_view(x["residual"])
        return lambda: linear(*tensors) + residual

    return Case(
        op="linear",
        name="forward, bias, residual" if addends else "forward",
        shape=f"{tokens} x {IN} -> {OUT}",
        dtype=dtype,
        flops=2.0 * tokens * IN * OUT,
        bytes=(IN * OUT + tokens * (IN + (2 if addends else 1) * OUT)) * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, IN, OUT), SMALL, dtype, (*names, *keywords)),
        **calls(gpu_ops.linear, reference.linear, names, keywords),
        naive=lambda x: functools.partial(naive, **x),
        torch=torch,
        bandwidth="read",
        sample=functools.partial(sample_rows, 32, ("weight", "bias")),
    )


def backward(tokens: int, dtype: str) -> Case:
    from_torch = ("x", "weight")

    def torch(x: Inputs) -> Call:
        from torch.nn.functional import linear

        return torch_gradient(linear, x, from_torch)

    return replace(
        forward(tokens, dtype),
        name="backward",
        flops=4.0 * tokens * IN * OUT,
        bytes=(2.0 * IN * OUT + tokens * (2 * IN + OUT)) * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, IN, OUT), SMALL, dtype, ("dy", *from_torch)),
        **calls(gpu_ops.linear_backward, reference.linear_backward, ("dy", *from_torch)),
        naive=lambda x: functools.partial(naive_backward, **x),
        torch=torch,
        sample=None,
        bandwidth="copy",
        backward=True,
        note="our dweight is float32, torch's has the weight's dtype",
    )


def data(
    rng: np.random.Generator, tokens: int, cols: int, rows: int, dtype: str, names: tuple[str, ...]
) -> Inputs:
    shapes = {"x": (tokens, cols), "weight": (rows, cols), "bias": (rows,)}
    shapes |= dict.fromkeys(("residual", "dy"), (tokens, rows))
    scale = {"weight": cols**-0.5}
    return {name: normal(rng, shapes[name], DTYPES[dtype], scale.get(name, 1.0)) for name in names}


def naive(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, residual: np.ndarray | None = None
) -> np.ndarray:
    x32, w = to_float32(x, weight)
    y = x32 @ w.T
    for addend in (bias, residual):
        if addend is not None:
            y += addend.astype(np.float32, copy=False)
    return y.astype(x.dtype, copy=False)


def naive_backward(dy: np.ndarray, x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gradient, x32, w = to_float32(dy, x, weight)
    return (gradient @ w).astype(x.dtype, copy=False), gradient.T @ x32


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("linear")
