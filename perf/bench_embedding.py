"""Embedding: rows of a table of 32000, the gradient of the table.

``python perf/bench_embedding.py --device cpu --dtype float32 --seqlen 512 8192`` (seqlen: tokens of 1024 numbers)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace

import numpy as np

import gpu_ops
from gpu_ops.reference.rows import embedding as reference
from perf.build import calls, made_by, normal, sample_rows, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

VOCAB, DIM = 32000, 1024


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for tokens in config.seqlens or ((2048,) if config.quick else (512, 8192)):
            result += [forward(tokens, dtype), backward(tokens, dtype)]
    return result


def forward(tokens: int, dtype: str) -> Case:
    return Case(
        op="embedding",
        name="forward",
        shape=f"{tokens} of {VOCAB} x {DIM}",
        dtype=dtype,
        flops=1.0 * tokens * DIM,
        bytes=2.0 * tokens * DIM * DTYPES[dtype].itemsize,
        **made_by(data, (tokens, VOCAB, DIM), (37, 50, 64), dtype, ("ids", "weight")),
        **calls(gpu_ops.embedding, reference.embedding, ("ids", "weight")),
        naive=lambda x: functools.partial(naive, x["ids"], x["weight"]),
        torch=torch_rows,
        sample=functools.partial(sample_rows, 32, ("weight",)),
    )


def backward(tokens: int, dtype: str) -> Case:
    names = ("dx", "ids", "num_embeddings")
    return replace(
        forward(tokens, dtype),
        name="backward",
        bytes=1.0 * tokens * DIM * DTYPES[dtype].itemsize + 4.0 * VOCAB * DIM,
        **made_by(data, (tokens, VOCAB, DIM), (37, 50, 64), dtype, names),
        **calls(gpu_ops.embedding_backward, reference.embedding_backward, names),
        naive=lambda x: functools.partial(naive_backward, **x),
        torch=torch_gradient_of_table,
        backward=True,
        sample=None,
    )


def data(
    rng: np.random.Generator, tokens: int, vocab: int, dim: int, dtype: str, names: tuple[str, ...]
) -> Inputs:
    """Ids distributed like words: low ids are frequent."""
    made = {"ids": (vocab * rng.random(tokens) ** 4).astype(np.int64), "num_embeddings": vocab}
    if "dx" in names:
        made["dx"] = normal(rng, (tokens, dim), DTYPES[dtype])
    else:
        made["weight"] = normal(rng, (vocab, dim), DTYPES[dtype])
    return {name: made[name] for name in names}


def naive(ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight[ids]


def naive_backward(dx: np.ndarray, ids: np.ndarray, num_embeddings: int) -> np.ndarray:
    dweight = np.zeros((num_embeddings, dx.shape[1]), np.float32)
    np.add.at(dweight, ids, *to_float32(dx))
    return dweight


def torch_rows(x: Inputs) -> Call:
    import torch

    return functools.partial(torch.nn.functional.embedding, torch_view(x["ids"]), torch_view(x["weight"]))


def torch_gradient_of_table(x: Inputs) -> Call:
    """Gradient in float32: sums in bfloat16 are off by a tenth."""
    import torch

    backward = torch.ops.aten.embedding_dense_backward
    dx, ids = torch_view(x["dx"]), torch_view(x["ids"])
    return lambda: backward(dx.float(), ids, x["num_embeddings"], -1, False)


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("embedding")
