"""Rows of a table by index on the CPU, and the gradient of the table.

forward    x[i] = scale weight[ids[i]]; one task is a run of rows
backward   dweight[ids[i]] += scale dx[i] in the order of i; one task is a stripe of columns of all rows: no two
           threads add to the same number, and the order is that of one thread
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import bits, load, read_row, store, write_row
from gpu_ops.kernels.common.cpu.jit import Kernel, compute, inner, kernel, read, types, write
from gpu_ops.kernels.common.cpu.parallel import claim, items_per_task, launch, thread_count

Array = np.ndarray[Any, Any]

STRIPE = 64  # columns, or a multiple: four lines of float32


def config(rows: int, cols: int) -> str:
    return f"{items_per_task(rows, cols)} rows per task"


def stripe(cols: int) -> int:
    """Columns of a task, for two per thread: a wide stripe takes few entries of the TLB."""
    return STRIPE * max(-(-cols // (2 * STRIPE * thread_count())), 1)


def config_backward(cols: int) -> str:
    return f"{stripe(cols)} columns per task"


def forward(ids: Array, weight: Array, x: Array, *, scale: float) -> None:
    """Gather rows. ids int64 (rows,), weight (num_embeddings, cols), x (rows, cols)."""
    chunk = items_per_task(*x.shape)
    launch(FORWARD[weight.dtype], -(-len(ids) // chunk), chunk, ids, bits(weight), bits(x), scale)


def backward(dx: Array, ids: Array, dweight: Array, *, scale: float) -> None:
    """Add the gradient to dweight."""
    width = stripe(dweight.shape[1])
    launch(BACKWARD[dx.dtype], -(-dweight.shape[1] // width), width, bits(dx), ids, dweight, scale)


@inner
def scaled(to, row, scale):
    if scale == 1:
        for j in range(len(to)):
            to[j] = row[j]
    else:
        for j in range(len(to)):
            store(to, j, load(row, j) * scale)


@inner
def add(to, row, start, end, scale):
    for j in range(start, end):
        to[j] += load(row, j) * scale


def _kernel_forward() -> Kernel:
    def embedding_forward(state, n_tasks, chunk, ids, weight, x, scale):
        task = claim(state)
        while task < n_tasks:
            for r in range(task * chunk, min((task + 1) * chunk, len(ids))):
                scaled(write_row(x, (r,)), read_row(weight, (ids[r],)), scale)
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        return types.int64, read("int64", 1), read(t, 2), write(t, 2), compute(t)

    return kernel(signature)(embedding_forward)


def _kernel_backward() -> Kernel:
    def embedding_backward(state, n_tasks, width, dx, ids, dweight, scale):
        task = claim(state)
        while task < n_tasks:
            start, end = task * width, min((task + 1) * width, dweight.shape[1])
            for i in range(len(ids)):
                add(write_row(dweight, (ids[i],)), read_row(dx, (i,)), start, end, scale)
            task = claim(state)

    def signature(t: str) -> tuple[types.Type, ...]:
        c = compute(t)
        return types.int64, read(t, 2), read("int64", 1), write(c.name, 2), c

    return kernel(signature)(embedding_backward)


FORWARD, BACKWARD = _kernel_forward(), _kernel_backward()
