"""Softmax: forward, with a mask, backward.

``python perf/bench_softmax.py --device cpu --dtype float32 --seqlen 512 4096`` (seqlen: rows of 4096)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace

import numpy as np

import gpu_ops
from gpu_ops.reference.rows import softmax as reference
from perf.build import calls, made_by, normal, sample_rows, to_float32, torch_gradient, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

COLS = 4096


TOUR = (("forward", "float32"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((2048,) if config.quick else (512, 4096)):
            result += [forward(rows, dtype), forward(rows, dtype, ("mask",)), backward(rows, dtype)]
    return result


def forward(rows: int, dtype: str, masks: tuple[str, ...] = ()) -> Case:
    def torch(x: Inputs) -> Call:
        scores = torch_view(x["x"])
        if not masks:
            return functools.partial(scores.softmax, -1)
        hidden = torch_view(~x["mask"])
        return lambda: scores.masked_fill(hidden, float("-inf")).softmax(-1)

    return Case(
        op="softmax",
        name=", ".join(("forward", *masks)),
        shape=f"{rows} x {COLS}",
        dtype=dtype,
        flops=5.0 * rows * COLS,
        bytes=2.0 * rows * COLS * DTYPES[dtype].itemsize,
        **made_by(data, (rows, COLS), (37, 512), dtype, ("x", *masks)),
        **calls(gpu_ops.softmax, reference.softmax, ("x",), masks),
        naive=lambda x: functools.partial(naive, *x.values()),
        torch=torch,
        sample=functools.partial(sample_rows, 32, ("mask",)),
    )


def backward(rows: int, dtype: str) -> Case:
    return replace(
        forward(rows, dtype),
        name="backward",
        flops=4.0 * rows * COLS,
        bytes=3.0 * rows * COLS * DTYPES[dtype].itemsize,
        **made_by(data, (rows, COLS), (37, 512), dtype, ("x", "dy", "y")),
        **calls(gpu_ops.softmax_backward, reference.softmax_backward, ("dy", "y")),
        naive=lambda x: functools.partial(naive_backward, x["dy"], x["y"]),
        torch=lambda x: torch_gradient(lambda scores: scores.softmax(-1), x, ("x",)),
        backward=True,
    )


def data(rng: np.random.Generator, rows: int, cols: int, dtype: str, names: tuple[str, ...]) -> Inputs:
    """``mask`` hides every third column; ``y`` is the softmax of ``x``."""
    made = {name: normal(rng, (rows, cols), DTYPES[dtype]) for name in names if name in ("x", "dy")}
    if "mask" in names:
        made["mask"] = np.arange(cols) % 3 > 0
    return made | {"y": naive(made["x"])} if "y" in names else made


def naive(x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    (x32,) = to_float32(x)
    if mask is not None:
        x32 = np.where(mask, x32, np.float32(-np.inf))
    y = x32 - x32.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y.astype(x.dtype, copy=False)


def naive_backward(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    grads, weights = to_float32(dy, y)
    dx = grads - np.einsum("ij,ij->i", grads, weights)[:, None]
    dx *= weights
    return dx.astype(y.dtype, copy=False)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("softmax")
