"""LayerNorm with a bias: forward, forward with residual, backward.

``python perf/bench_layernorm.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of hidden 4096)
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
from gpu_ops.reference.layernorm import layernorm as reference_layernorm
from gpu_ops.reference.layernorm import layernorm_backward as reference_backward
from gpu_ops.reference.precision import Precision
from perf import bench_rmsnorm
from perf.bench_rmsnorm import HIDDEN, SMALL, traffic
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

EPS = 1e-5


def cases(config: Config) -> list[Case]:
    rows = config.seqlens or ((2048,) if config.quick else (512, 4096))
    return [
        build(n, HIDDEN, dtype)
        for dtype in config.dtypes or ("float32", "bfloat16")
        for n in rows
        for build in (forward, functools.partial(forward, residual=True), backward)
    ]


def forward(rows: int, hidden: int, dtype: str, residual: bool = False) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(
            gpu_ops.layernorm, x["x"], x["weight"], x["bias"], eps=EPS, residual=x.get("residual"), **how
        )

    def naive(x: Inputs) -> Call:
        def call() -> Any:
            total = x["x"] + x["residual"] if residual else x["x"]
            y = naive_forward(total, x["weight"], x["bias"])
            return (y, total) if residual else y

        return call

    def against(x: Inputs, precision: Precision) -> Any:
        return reference_layernorm(
            x["x"], x["weight"], x["bias"], eps=EPS, residual=x.get("residual"), precision=precision
        )

    return Case(
        op="layernorm",
        name="forward + residual" if residual else "forward",
        shape=f"{rows} x {hidden}",
        dtype=dtype,
        flops=(8.0 if residual else 7.0) * rows * hidden,
        bytes=traffic(rows, hidden, dtype, matrices=4 if residual else 2),
        make=maker(data, rows, hidden, DTYPES[dtype], residual=residual),
        make_small=maker(data, *SMALL, DTYPES[dtype], residual=residual),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch_forward,
        reference=against,
        sample=sample_rows,
    )


def backward(rows: int, hidden: int, dtype: str) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        _, mean, rstd = gpu_ops.layernorm(x["x"], x["weight"], eps=EPS, return_stats=True, **how)
        return functools.partial(gpu_ops.layernorm_backward, x["dy"], x["x"], x["weight"], mean, rstd, **how)

    def naive(x: Inputs) -> Call:
        wide = x["x"].astype(np.float32, copy=False)
        mean = wide.mean(axis=-1)
        rstd = 1 / np.sqrt(wide.var(axis=-1) + np.float32(EPS))
        return functools.partial(naive_backward, x["dy"], x["x"], x["weight"], mean, rstd)

    def against(x: Inputs, precision: Precision) -> Any:
        _, *stats = reference_layernorm(x["x"], x["weight"], eps=EPS, return_stats=True, precision=precision)
        return reference_backward(x["dy"], x["x"], x["weight"], *stats, precision=precision)

    return Case(
        op="layernorm",
        name="backward",
        shape=f"{rows} x {hidden}",
        dtype=dtype,
        flops=12.0 * rows * hidden,
        bytes=traffic(rows, hidden, dtype, matrices=3),
        make=maker(data, rows, hidden, DTYPES[dtype], dy=True),
        make_small=maker(data, *SMALL, DTYPES[dtype], dy=True),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch_backward,
        reference=against,
        backward=True,
    )


def data(rng: np.random.Generator, rows: int, hidden: int, dtype: np.dtype[Any], **more: bool) -> Inputs:
    found = bench_rmsnorm.data(rng, rows, hidden, dtype, **more)
    return {**found, "bias": normal(rng, (hidden,), dtype)}


def sample_rows(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Rows are independent: the last ones."""
    part, some = bench_rmsnorm.sample_rows({name: a for name, a in x.items() if name != "bias"}, result)
    return {**part, "bias": x["bias"]}, some


def naive_forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    dtype = x.dtype
    x, weight, bias = (a.astype(np.float32, copy=False) for a in (x, weight, bias))
    y = x - x.mean(axis=-1, keepdims=True)
    y *= 1 / np.sqrt(np.einsum("ij,ij->i", y, y)[:, None] / np.float32(x.shape[-1]) + np.float32(EPS))
    y *= weight
    y += bias
    return y.astype(dtype, copy=False)


def naive_backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray, rstd: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)); dweight, dbias: sums of dy xhat, of dy."""
    dtype = x.dtype
    dy, x, weight = (a.astype(np.float32, copy=False) for a in (dy, x, weight))
    xhat = (x - mean[:, None]) * rstd[:, None]
    dweight, dbias = np.einsum("ij,ij->j", dy, xhat), dy.sum(axis=0)
    wdy = dy * weight
    xhat *= np.einsum("ij,ij->i", wdy, xhat)[:, None] / np.float32(x.shape[-1])
    wdy -= wdy.mean(axis=-1, keepdims=True)
    wdy -= xhat
    wdy *= rstd[:, None]
    return wdy.astype(dtype, copy=False), dweight, dbias


def torch_forward(x: Inputs) -> Call:
    import torch

    rows, weight, bias = (torch_view(x[name]) for name in ("x", "weight", "bias"))
    residual = torch_view(x["residual"]) if "residual" in x else None

    def call() -> Any:
        total = rows if residual is None else rows + residual
        y = torch.nn.functional.layer_norm(total, weight.shape, weight, bias, EPS)
        return y if residual is None else (y, total)

    return call


def torch_backward(x: Inputs) -> Call:
    import torch

    leaves = [torch_view(x[name]).requires_grad_() for name in ("x", "weight", "bias")]
    y = torch.nn.functional.layer_norm(leaves[0], leaves[1].shape, *leaves[1:], EPS)
    return lambda: torch.autograd.grad(y, leaves, torch_view(x["dy"]), retain_graph=True)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("layernorm")
