"""Merging attention over two sets of keys on the CPU: one task is a run of rows.

lse = ln(e^lse1 + e^lse2)      out = e^(lse1 - lse) out1 + e^(lse2 - lse) out2

A row is one query of one head. It is summed in scratch first: the result may be out1, and LLVM makes no vector code
of a loop whose arrays may overlap.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.codegen.exp2 import LOG2E
from gpu_ops.kernels.common.cpu.dtype import all_bits, like, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.fastmath import exp2
from gpu_ops.kernels.common.cpu.jit import compute, inner, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch

Array = np.ndarray[Any, Any]

_LSE = ("float32", "float64")
# dtypes of out, lse1, lse2, lse
VARIANTS = tuple((t, lse, lse, lse) for t in ("float32", "bfloat16", "float16") for lse in _LSE)
VARIANTS = (*VARIANTS, ("float64",) * 4)


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def merge(out1: Array, lse1: Array, out2: Array, lse2: Array, out: Array, lse: Array) -> None:
    """Fill out (outer, middle, inner, cols) and lse (outer, middle, inner); they may be out1 and lse1."""
    if out.size:
        rows = math.prod(out.shape[:3])
        chunk = items_per_task(rows, out.shape[3])
        compiled = attention_merge[out.dtype, lse1.dtype, lse2.dtype, lse.dtype]
        a, b, c = all_bits(out1, out2, out)
        launch(compiled, -(-rows // chunk), chunk, a, lse1, b, lse2, c, lse, 0.0)


@inner
def weights_of(a, b):
    """Weights of two parts, and the log of e^a + e^b."""
    difference = b - a if a > b else a - b
    smaller = 1.0 if a == b else exp2(difference * LOG2E)
    larger = 1.0 / (1.0 + smaller)
    top = a if a > b else b
    return (
        larger if a >= b else smaller * larger,
        larger if b >= a else smaller * larger,
        top + np.log(1.0 + smaller),
    )


@inner
def weighted(t, x, weight):
    for j in range(len(t)):
        t[j] = weight * load(x, j)


@inner
def add_weighted(t, x, weight):
    for j in range(len(t)):
        t[j] += weight * load(x, j)


@inner
def stored(target, t):
    for j in range(len(t)):
        store(target, j, t[j])


@kernel(
    lambda t, lse1, lse2, lse: (
        types.int64,
        read(t, 4),
        read(lse1, 3),
        read(t, 4),
        read(lse2, 3),
        write(t, 4),
        write(lse, 3),
        compute(t),
    ),
    variants=VARIANTS,
)
def attention_merge(state, n_tasks, chunk, out1, lse1, out2, lse2, out, lse, zero):
    outer, middle, innermost, cols = out.shape
    rows, t = outer * middle * innermost, np.full(cols, zero)
    task = claim(state)
    while task < n_tasks:
        for r in range(task * chunk, min((task + 1) * chunk, rows)):
            i, j, k = place = r // (middle * innermost), r // innermost % middle, r % innermost
            a, b = np.float64(lse1[i, j, k]), np.float64(lse2[i, j, k])
            weight1, weight2, lse[i, j, k] = weights_of(a, b)
            t[:] = 0
            if a != -np.inf:
                weighted(t, read_row(out1, place), like(zero, weight1))
            if b != -np.inf:
                add_weighted(t, read_row(out2, place), like(zero, weight2))
            stored(write_row(out, place), t)
        task = claim(state)
