"""RMSNorm: forward, forward with residual and with or without its sum, backward.

``python perf/bench_rmsnorm.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of hidden 4096)
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
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.rmsnorm import rmsnorm as reference_rmsnorm
from gpu_ops.reference.rmsnorm import rmsnorm_backward as reference_backward
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

EPS = 1e-6
HIDDEN = 4096  # Llama-3-8B
SAMPLED = 32
SMALL = (37, 512)


def cases(config: Config) -> list[Case]:
    rows = config.seqlens or ((2048,) if config.quick else (512, 4096))
    out = () if config.quick else (forward_out, residual_out)
    return [
        build(n, HIDDEN, dtype)
        for dtype in config.dtypes or ("float32", "bfloat16")
        for n in rows
        for build in (forward, *out, forward_residual, last_norm, backward)
    ]


def forward(rows: int, hidden: int, dtype: str) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.rmsnorm, x["x"], x["weight"], eps=EPS, **how)

    return Case(
        op="rmsnorm",
        name="forward",
        shape=f"{rows} x {hidden}",
        dtype=dtype,
        flops=4.0 * rows * hidden,
        bytes=traffic(rows, hidden, dtype, matrices=2),
        make=maker(data, rows, hidden, DTYPES[dtype]),
        make_small=maker(data, *SMALL, DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=lambda x: functools.partial(naive_forward, x["x"], x["weight"]),
        torch=torch_forward,
        reference=lambda x, precision: reference_rmsnorm(x["x"], x["weight"], eps=EPS, precision=precision),
        sample=sample_rows,
    )


def forward_out(rows: int, hidden: int, dtype: str) -> Case:
    """Into a buffer that exists: without the page faults of a fresh result on any side."""

    def ours(x: Inputs, **how: str) -> Call:
        out = np.zeros_like(x["x"])
        return functools.partial(gpu_ops.rmsnorm, x["x"], x["weight"], eps=EPS, out=out, **how)

    def naive(x: Inputs) -> Call:
        return functools.partial(naive_forward, x["x"], x["weight"], np.zeros_like(x["x"]))

    return replace(
        forward(rows, hidden, dtype),
        name="forward, out=",
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch_out,
        note="torch: step by step, since its rms_norm takes no out=",
    )


def residual_out(rows: int, hidden: int, dtype: str) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        given = {name: np.zeros_like(x["x"]) for name in ("out", "residual_out")}
        return functools.partial(
            gpu_ops.rmsnorm, x["x"], x["weight"], eps=EPS, residual=x["residual"], **given, **how
        )

    return replace(
        forward_residual(rows, hidden, dtype),
        name="forward + residual, out=",
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=None,
        torch=torch_out,
        note="torch: step by step, since its rms_norm takes no out=",
    )


def forward_residual(rows: int, hidden: int, dtype: str) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(gpu_ops.rmsnorm, x["x"], x["weight"], eps=EPS, residual=x["residual"], **how)

    def naive(x: Inputs) -> Call:
        def call() -> tuple[np.ndarray, np.ndarray]:
            total = x["x"] + x["residual"]
            return naive_forward(total, x["weight"]), total

        return call

    return Case(
        op="rmsnorm",
        name="forward + residual",
        shape=f"{rows} x {hidden}",
        dtype=dtype,
        flops=5.0 * rows * hidden,
        bytes=traffic(rows, hidden, dtype, matrices=4),
        make=maker(data, rows, hidden, DTYPES[dtype], residual=True),
        make_small=maker(data, *SMALL, DTYPES[dtype], residual=True),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        torch=torch_residual,
        reference=lambda x, precision: reference_rmsnorm(
            x["x"], x["weight"], eps=EPS, residual=x["residual"], precision=precision
        ),
        sample=sample_rows,
    )


def last_norm(rows: int, hidden: int, dtype: str) -> Case:
    """Of a model, which has no use for x + residual: three arrays move rather than four."""

    def ours(x: Inputs, **how: str) -> Call:
        given = {"eps": EPS, "residual": x["residual"], "return_sum": False}
        return functools.partial(gpu_ops.rmsnorm, x["x"], x["weight"], **given, **how)

    def first(call: Call) -> Call:
        return lambda: call()[0]

    both = forward_residual(rows, hidden, dtype)
    return replace(
        both,
        name="forward + residual, no sum",
        bytes=traffic(rows, hidden, dtype, matrices=3),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=lambda x: first(both.naive(x)),
        torch=lambda x: first(both.torch(x)),
        reference=lambda x, precision: both.reference(x, precision)[0],
    )


def backward(rows: int, hidden: int, dtype: str) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        _, rstd = gpu_ops.rmsnorm(x["x"], x["weight"], eps=EPS, return_rstd=True, **how)
        return functools.partial(gpu_ops.rmsnorm_backward, x["dy"], x["x"], x["weight"], rstd, **how)

    def naive(x: Inputs) -> Call:
        wide = x["x"].astype(np.float32, copy=False)
        rstd = 1 / np.sqrt(np.einsum("ij,ij->i", wide, wide) / wide.shape[-1] + EPS).astype(np.float32)
        return functools.partial(naive_backward, x["dy"], x["x"], x["weight"], rstd)

    def against(x: Inputs, precision: Precision) -> Any:
        _, rstd = reference_rmsnorm(x["x"], x["weight"], eps=EPS, return_rstd=True, precision=precision)
        return reference_backward(x["dy"], x["x"], x["weight"], rstd, precision=precision)

    return Case(
        op="rmsnorm",
        name="backward",
        shape=f"{rows} x {hidden}",
        dtype=dtype,
        flops=8.0 * rows * hidden,
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


def traffic(rows: int, hidden: int, dtype: str, *, matrices: int) -> float:
    """Bytes of so many (rows, hidden) matrices read or written, and of the weight."""
    return DTYPES[dtype].itemsize * float(matrices * rows * hidden + hidden)


def data(
    rng: np.random.Generator,
    rows: int,
    hidden: int,
    dtype: np.dtype[Any],
    *,
    residual: bool = False,
    dy: bool = False,
) -> Inputs:
    found = {"x": normal(rng, (rows, hidden), dtype), "weight": normal(rng, (hidden,), dtype)}
    if residual:
        found["residual"] = normal(rng, (rows, hidden), dtype)
    if dy:
        found["dy"] = normal(rng, (rows, hidden), dtype)
    return found


def sample_rows(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Rows are independent: the last ones."""
    rows = slice(-SAMPLED, None)
    part = {name: array if name == "weight" else array[rows] for name, array in x.items()}
    return part, tuple(r[rows] for r in result) if isinstance(result, tuple) else result[rows]


def naive_forward(x: np.ndarray, weight: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    wide = x.astype(np.float32, copy=False)
    mean_square = np.einsum("ij,ij->i", wide, wide)[:, None] / np.float32(x.shape[-1])
    y = np.multiply(wide, 1 / np.sqrt(mean_square + np.float32(EPS)), out=out if wide is x else None)
    y *= weight.astype(np.float32, copy=False)
    if out is not None and out is not y:
        out[...] = y
        return out
    return y.astype(x.dtype, copy=False)


def naive_backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, rstd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """dx = rstd * (w dy - xhat * mean(w dy xhat)), dweight = sum over rows of dy xhat."""
    dtype = x.dtype
    dy, x, weight = (a.astype(np.float32, copy=False) for a in (dy, x, weight))
    xhat = x * rstd[:, None]
    dweight = np.einsum("ij,ij->j", dy, xhat)
    wdy = dy * weight
    xhat *= np.einsum("ij,ij->i", wdy, xhat)[:, None] / np.float32(x.shape[-1])
    wdy -= xhat
    wdy *= rstd[:, None]
    return wdy.astype(dtype, copy=False), dweight


def torch_forward(x: Inputs) -> Call:
    import torch

    rows, weight = torch_view(x["x"]), torch_view(x["weight"])
    return lambda: torch.nn.functional.rms_norm(rows, weight.shape, weight, EPS)


def torch_out(x: Inputs) -> Call:
    """With a residual where there is one."""
    import torch

    rows, weight = torch_view(x["x"]), torch_view(x["weight"])
    residual = torch_view(x["residual"]) if "residual" in x else None
    out, work, total = (torch.zeros_like(rows) for _ in range(3))

    def call() -> Any:
        source = rows if residual is None else torch.add(rows, residual, out=total)
        torch.mul(source, source, out=work)
        rstd = torch.rsqrt(work.mean(-1, keepdim=True) + EPS)
        return torch.mul(source, rstd, out=out).mul_(weight), source

    return call


def torch_residual(x: Inputs) -> Call:
    import torch

    rows, residual, weight = (torch_view(x[name]) for name in ("x", "residual", "weight"))

    def call() -> Any:
        total = rows + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, EPS), total

    return call


def torch_backward(x: Inputs) -> Call:
    import torch

    rows, weight, dy = (torch_view(x[name]) for name in ("x", "weight", "dy"))
    rows.requires_grad_()
    weight.requires_grad_()
    y = torch.nn.functional.rms_norm(rows, weight.shape, weight, EPS)
    return lambda: torch.autograd.grad(y, (rows, weight), dy, retain_graph=True)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("rmsnorm")
