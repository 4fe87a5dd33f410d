"""AdamW: one step of parameters in one array, in place.

``python perf/bench_adamw.py --device cpu --dtype float32 --seqlen 8192`` (seqlen: parameters, in thousands of 1024)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools

import numpy as np

import gpu_ops
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.rows import adamw as reference
from perf.build import backends, made_by, normal, on_host, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

OPTIONS = {"step": 100, "lr": 1e-3, "weight_decay": 0.01}
CHANGED = ("params", "m", "v", "master")


TOUR = (("step", "float32"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for size in config.seqlens or ((2048,) if config.quick else (8192, 32768)):
        for dtype in config.dtypes or ("float32", "bfloat16"):
            result.append(case(1024 * size, dtype, "nearest"))
            if dtype == "bfloat16":
                result.append(case(1024 * size, dtype, "stochastic"))
    return result


def case(size: int, dtype: str, rounding: str) -> Case:
    """16-bit parameters have a master copy, unless rounding is stochastic."""
    has_master = dtype in ("float16", "bfloat16") and rounding == "nearest"
    width = DTYPES[dtype].itemsize
    master_width = max(width, 4)
    name = "with master" if has_master else "step" if rounding == "nearest" else "stochastic"
    # read: gradients, moments and weights; written: moments, weights and the rounded copy
    moved = width + 4 * master_width + (2 * master_width + width if has_master else 2 * width)
    return Case(
        op="adamw",
        name=name,
        shape=f"{size >> 10} x 1024",
        dtype=dtype,
        flops=15.0 * size,
        bytes=float(moved) * size,
        by_bytes=True,
        **made_by(data, (size,), (3000,), dtype, has_master),
        **backends(functools.partial(ours, rounding=rounding)),
        reference=functools.partial(new_values, rounding=rounding),
        naive=lambda x: functools.partial(naive, **copied(x)),
        torch=None if has_master or rounding == "stochastic" else torch_step,
        backward=rounding == "stochastic",
    )


def data(rng: np.random.Generator, size: int, dtype: str, has_master: bool) -> Inputs:
    master_dtype = DTYPES["float64" if dtype == "float64" else "float32"]
    params, m = normal(rng, (size,), master_dtype), normal(rng, (size,), master_dtype, 0.1)
    made = {
        "params": params.astype(DTYPES[dtype]),
        "grads": normal(rng, (size,), DTYPES[dtype], 0.1),
        "m": m,
        "v": m * m + 1e-4,
    }
    return made | ({"master": params} if has_master else {})


def ours(x: Inputs, *, rounding: str, **how: str) -> Call:
    mine = copied(x)

    def call() -> tuple[np.ndarray, ...]:
        gpu_ops.adamw_step(**mine, **OPTIONS, rounding=rounding, **how)
        return tuple(mine[name] for name in CHANGED if name in x)

    return call


def copied(x: Inputs) -> Inputs:
    """Copy the arrays: each contender changes its own."""
    return {name: array.copy() for name, array in x.items()}


def new_values(x: Inputs, precision: Precision, *, rounding: str) -> tuple[np.ndarray, ...]:
    arrays = {name: on_host(array) for name, array in x.items()}
    return reference.adamw_step(**arrays, **OPTIONS, rounding=rounding, precision=precision)


def naive(
    params: np.ndarray, grads: np.ndarray, m: np.ndarray, v: np.ndarray, master: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """AdamW as one would write it in NumPy."""
    (g,), weights = to_float32(grads), params.astype(np.float32) if master is None else master
    m[...] = 0.9 * m + 0.1 * g
    v[...] = 0.999 * v + 0.001 * g * g
    weights -= 1e-3 * 0.01 * weights
    weights -= 1e-3 / (1 - 0.9**100) * m / (np.sqrt(v / (1 - 0.999**100)) + 1e-8)
    params[...] = weights
    return (params, m, v) if master is None else (params, m, v, master)


def torch_step(x: Inputs) -> Call:
    """torch's fused optimiser, which holds its own m and v."""
    import torch

    weights = torch_view(x["params"]).clone()
    weights.grad = torch_view(x["grads"])
    return torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.01, fused=True).step


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("adamw")
