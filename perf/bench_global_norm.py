"""The norm over all elements of arrays: one large array, and those of a model.

``python perf/bench_global_norm.py --device cpu --dtype float32 --seqlen 8192`` (seqlen: rows of 1024 elements)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools

import numpy as np

import gpu_ops
from gpu_ops.reference.rows import global_norm as reference
from perf.build import calls, made_by, normal, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

COLS = 1024
LAYERS = 8


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((8192,) if config.quick else (8192, 65536)):
            result += [norm(rows, dtype, "one array", 1), norm(rows, dtype, "layers", LAYERS)]
    return result


def norm(rows: int, dtype: str, name: str, layers: int) -> Case:
    return Case(
        op="global_norm",
        name=name,
        shape=f"{rows} x {COLS}",
        dtype=dtype,
        flops=2.0 * rows * COLS,
        bytes=1.0 * rows * COLS * DTYPES[dtype].itemsize,
        bandwidth="read",
        **made_by(data, (rows, layers), (64, layers), dtype),
        **calls(gpu_ops.global_norm, reference.global_norm, ("arrays",)),
        naive=naive,
        torch=torch_norm,
    )


def data(rng: np.random.Generator, rows: int, layers: int, dtype: str) -> Inputs:
    """Layers of a matrix and a row each."""
    each = [rows // layers - 1, 1] * layers
    return {"arrays": [normal(rng, (n, COLS), DTYPES[dtype]) for n in each]}


def naive(x: Inputs) -> Call:
    def run() -> np.ndarray:
        flat = (to_float32(a.ravel())[0] for a in x["arrays"])
        norm = np.sqrt(sum(np.dot(a, a) for a in flat))
        return norm, np.float32(not np.isfinite(norm))

    return run


def torch_norm(x: Inputs) -> Call:
    import torch

    return functools.partial(torch.nn.utils.get_total_norm, [torch_view(a) for a in x["arrays"]])


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("global_norm")
