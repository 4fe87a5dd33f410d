"""Dropout with p = 0.1: forward, backward.

``python perf/bench_dropout.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of 4096)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.rows import dropout as reference
from perf.build import backends, calls, made_by, normal, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

COLS, P, SAMPLED = 4096, 0.1, 32


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((2048,) if config.quick else (512, 4096)):
            result += [forward(rows, dtype), backward(rows, dtype)]
            if not config.quick:
                result.append(forward_out(rows, dtype))
    return result


def forward(rows: int, dtype: str) -> Case:
    return Case(
        op="dropout",
        name="forward",
        shape=f"{rows} x {COLS}",
        dtype=dtype,
        flops=2.0 * rows * COLS,
        bytes=2.0 * rows * COLS * DTYPES[dtype].itemsize,
        **made_by(data, (rows, COLS), (37, 512), dtype, ("x",)),
        **calls(gpu_ops.dropout, reference.dropout, ("x", "p"), ("seed", "offset")),
        naive=lambda x: functools.partial(naive, x["x"], np.random.default_rng(0)),
        torch=lambda x: functools.partial(torch_dropout(), torch_view(x["x"])),
        sample=last_rows,
        note="NumPy and torch draw masks of their own",
    )


def forward_out(rows: int, dtype: str) -> Case:
    """Forward with ``out=``, which avoids page faults of fresh memory; torch has no such argument."""
    case = forward(rows, dtype)

    def ours(x: Inputs, **how: str) -> Call:
        return functools.partial(case.ours(x, **how), out=np.zeros_like(x["x"]))

    return replace(case, name="forward, out=", **backends(ours), naive=None, torch=None)


def backward(rows: int, dtype: str) -> Case:
    return replace(
        forward(rows, dtype),
        name="backward",
        **made_by(data, (rows, COLS), (37, 512), dtype, ("dy", "x")),
        **calls(gpu_ops.dropout_backward, reference.dropout_backward, ("dy", "p"), ("seed", "offset")),
        naive=lambda x: functools.partial(naive, x["dy"], np.random.default_rng(0)),
        torch=lambda x: torch_gradient(torch_dropout(), x, ("x",)),
        sample=last_rows,
        backward=True,
        note="torch keeps the mask of its forward pass; ours and NumPy draw one",
    )


def data(rng: np.random.Generator, rows: int, cols: int, dtype: str, names: tuple[str, ...]) -> Inputs:
    arrays = {name: normal(rng, (rows, cols), DTYPES[dtype]) for name in names}
    return {**arrays, "p": P, "seed": 1, "offset": 0}


def last_rows(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """Sample for ``Case.sample``: the elements of the last rows keep their numbers."""
    part = {name: array[-SAMPLED:] for name, array in x.items() if hasattr(array, "shape")}
    rows = len(next(iter(part.values())))
    return {**x, **part, "offset": max(len(result) - rows, 0) * result.shape[1]}, result[-rows:]


def naive(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    (x32,) = to_float32(x)
    y = x32 * (rng.random(x.shape, np.float32) >= P)
    y *= np.float32(1 / (1 - P))
    return y.astype(x.dtype, copy=False)


def torch_dropout() -> Any:
    from torch.nn.functional import dropout

    return functools.partial(dropout, p=P)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("dropout")
