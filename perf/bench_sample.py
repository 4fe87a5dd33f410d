"""Sampling from a vocabulary of 128256 tokens: all of them, and the usual filters.

``python perf/bench_sample.py --device cpu --dtype float32 --seqlen 1 64`` (seqlen: rows of logits)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.sampling import sample as reference
from perf.build import calls, made_by, normal, sample_rows, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

VOCAB = 128256
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


TOUR = (("top_k, top_p", "float32"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for rows in config.seqlens or ((8,) if config.quick else (1, 64)):
            result += [case(name, rows, dtype) for name in (["top_k, top_p"] if config.quick else FILTERS)]
    return result


def case(name: str, rows: int, dtype: str) -> Case:
    return Case(
        op="sample",
        name=name,
        shape=f"{rows} of {VOCAB}",
        dtype=dtype,
        flops=2.0 * rows * VOCAB,
        bytes=1.0 * rows * VOCAB * DTYPES[dtype].itemsize,
        **made_by(data, (rows, VOCAB), (5, 1000), dtype),
        **calls(gpu_ops.sample, reference.sample, ("logits",), ("seed",), **FILTERS[name]),
        naive=lambda x: functools.partial(naive, x["logits"], x["number"], **FILTERS[name]),
        torch=lambda x: torch_sample(x, **FILTERS[name]),
        bandwidth="read",
        by_bytes=True,
        sample=functools.partial(sample_rows, 4, ()),
        note="NumPy and torch sort, as most samplers do, and get the same random numbers",
    )


def data(rng: np.random.Generator, rows: int, vocab: int, dtype: str) -> Inputs:
    seed = np.arange(rows)
    number = np.array([reference.random_number(int(s), 0) / 2.0**64 for s in seed], np.float32)
    return {"logits": normal(rng, (rows, vocab), DTYPES[dtype], 3.0), "seed": seed, "number": number}


def naive(
    logits: np.ndarray, number: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    (z,) = to_float32(logits)
    if temperature == 0:
        return z.argmax(axis=-1).astype(np.int32)
    p = np.exp((z - z.max(axis=-1, keepdims=True)) / np.float32(temperature))
    if top_k or top_p < 1:
        order = np.argsort(-z, axis=-1, kind="stable")
        ordered = np.take_along_axis(p, order, -1)
        ordered[:, top_k or ordered.shape[1] :] = 0
        before = np.cumsum(ordered, axis=-1) - ordered
        ordered[before >= np.float32(top_p) * ordered.sum(axis=-1, keepdims=True)] = 0
        np.put_along_axis(p, order, ordered, -1)
    up_to = np.cumsum(p, axis=-1)
    return (up_to <= (number * up_to[:, -1])[:, None]).sum(axis=-1).astype(np.int32)


def torch_sample(x: Inputs, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Call:
    import torch

    logits, number = torch_view(x["logits"]), torch_view(x["number"])

    def run() -> Any:
        z = logits.float()
        if temperature == 0:
            return z.argmax(dim=-1)
        p = torch.softmax(z / temperature, dim=-1)
        if top_k or top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            ordered[:, top_k or ordered.shape[1] :] = 0
            before = ordered.cumsum(dim=-1) - ordered
            ordered[before >= top_p * ordered.sum(dim=-1, keepdim=True)] = 0
            p = torch.zeros_like(p).scatter_(-1, order, ordered)
        up_to = p.cumsum(dim=-1)
        return torch.searchsorted(up_to, (number * up_to[:, -1])[:, None], right=True)[:, 0]

    return run


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("sample")
