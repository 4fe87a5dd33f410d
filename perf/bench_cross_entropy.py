"""Cross-entropy: the loss of each row, its gradient.

``python perf/bench_cross_entropy.py --device cpu --dtype float32 --seqlen 512 2048`` (seqlen: rows of 32000)
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
from gpu_ops.reference.loss import cross_entropy as reference
from perf.build import calls, made_by, normal, sample_rows, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

VOCAB = 32000


TOUR = (("forward", "float32"), ("backward", "float32"))  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((256,) if config.quick else (512, 2048)):
            result += [forward(rows, dtype), backward(rows, dtype)]
    return result


def forward(rows: int, dtype: str) -> Case:
    return Case(
        op="cross_entropy",
        name="forward",
        shape=f"{rows} x {VOCAB}",
        dtype=dtype,
        flops=4.0 * rows * VOCAB,
        bytes=1.0 * rows * VOCAB * DTYPES[dtype].itemsize,
        **made_by(data, (rows, VOCAB), (37, 512), dtype, ("logits", "targets")),
        **calls(gpu_ops.cross_entropy, reference.cross_entropy, ("logits", "targets"), reduction="none"),
        naive=lambda x: functools.partial(naive, x["logits"], x["targets"]),
        torch=lambda x: functools.partial(torch_loss, torch_view(x["logits"]), torch_view(x["targets"])),
        sample=functools.partial(sample_rows, 32, ()),
    )


def backward(rows: int, dtype: str) -> Case:
    names = ("dloss", "logits", "targets", "lse")
    return replace(
        forward(rows, dtype),
        name="backward",
        bytes=2.0 * rows * VOCAB * DTYPES[dtype].itemsize,
        **made_by(data, (rows, VOCAB), (37, 512), dtype, names),
        **calls(gpu_ops.cross_entropy_backward, reference.cross_entropy_backward, names, reduction="none"),
        naive=lambda x: functools.partial(naive_backward, **x),
        torch=torch_backward,
        backward=True,
    )


def data(rng: np.random.Generator, rows: int, vocab: int, dtype: str, names: tuple[str, ...]) -> Inputs:
    made = {"logits": normal(rng, (rows, vocab), DTYPES[dtype]), "targets": rng.integers(0, vocab, rows)}
    if "lse" in names:
        made["lse"] = np.log(np.exp(made["logits"].astype(np.float32)).sum(axis=-1))
        made["dloss"] = rng.standard_normal(rows, dtype=np.float32)
    return {name: made[name] for name in names}


def naive(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    (x,) = to_float32(logits)
    row_max = x.max(axis=-1)
    lse = row_max + np.log(np.exp(x - row_max[:, None]).sum(axis=-1))
    return lse - x[np.arange(len(x)), targets]


def naive_backward(dloss: np.ndarray, logits: np.ndarray, targets: np.ndarray, lse: np.ndarray) -> np.ndarray:
    (x,) = to_float32(logits)
    p = np.exp(x - lse[:, None])
    p[np.arange(len(p)), targets] -= 1
    p *= dloss[:, None]
    return p.astype(logits.dtype, copy=False)


def torch_loss(logits: Any, targets: Any) -> Any:
    """Loss in float32, as models compute it: in bfloat16 its third digit would be off."""
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def torch_backward(x: Inputs) -> Call:
    import torch

    leaf = torch_view(x["logits"]).requires_grad_()
    loss = torch_loss(leaf, torch_view(x["targets"]))
    return functools.partial(torch.autograd.grad, loss, leaf, torch_view(x["dloss"]), retain_graph=True)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("cross_entropy")
