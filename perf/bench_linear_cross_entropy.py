"""Cross-entropy of a linear layer with its gradients: a language model's head.

``python perf/bench_linear_cross_entropy.py --device cpu --dtype float32 --seqlen 512 2048`` (seqlen: rows of 256)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.loss import linear_cross_entropy as reference
from perf.bench_cross_entropy import naive_backward as naive_gradient
from perf.build import calls, made_by, normal, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

HIDDEN, VOCAB = 256, 8192
NAMES = ("x", "weight", "targets")


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((256,) if config.quick else (512, 2048)):
            result.append(gradients(rows, dtype))
    return result


def gradients(rows: int, dtype: str) -> Case:
    size = DTYPES[dtype].itemsize
    return Case(
        op="linear_cross_entropy",
        name="gradients",
        shape=f"{rows} x {HIDDEN} -> {VOCAB}",
        dtype=dtype,
        flops=6.0 * rows * HIDDEN * VOCAB,
        bytes=(2.0 * rows + VOCAB) * HIDDEN * size + 4.0 * VOCAB * HIDDEN,
        **made_by(data, (rows, HIDDEN, VOCAB), (37, 64, 512), dtype),
        **calls(gpu_ops.linear_cross_entropy, reference.linear_cross_entropy, NAMES, grads=True),
        naive=lambda x: functools.partial(naive, **x),
        torch=torch_gradients,
        backward=True,
        note="our loss and dweight are float32, torch's have the weight's dtype",
    )


def data(rng: np.random.Generator, rows: int, hidden: int, vocab: int, dtype: str) -> Inputs:
    x, weight = (
        normal(rng, (rows, hidden), DTYPES[dtype]),
        normal(rng, (vocab, hidden), DTYPES[dtype], hidden**-0.5),
    )
    return {"x": x, "weight": weight, "targets": rng.integers(0, vocab, rows)}


def naive(x: np.ndarray, weight: np.ndarray, targets: np.ndarray) -> tuple[Any, ...]:
    x32, w = to_float32(x, weight)
    logits = x32 @ w.T
    row_max = logits.max(axis=-1)
    lse = row_max + np.log(np.exp(logits - row_max[:, None]).sum(axis=-1))
    loss = np.mean(lse - logits[np.arange(len(x)), targets], dtype=np.float64).astype(np.float32)
    dlogits = naive_gradient(np.full(len(x), 1 / len(x), np.float32), logits, targets, lse)
    return loss, (dlogits @ w).astype(x.dtype, copy=False), dlogits.T @ x32


def torch_gradients(x: Inputs) -> Call:
    """Gradients of a float32 loss, as models compute it; forward and backward are timed."""
    import torch

    leaves = [torch_view(x[name]).requires_grad_() for name in ("x", "weight")]
    targets = torch_view(x["targets"])

    def call() -> Any:
        logits = torch.nn.functional.linear(*leaves).float()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return loss, *torch.autograd.grad(loss, leaves)

    return call


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("linear_cross_entropy")
