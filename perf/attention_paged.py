"""Ragged queries over pages: a chunk of a prompt beside sequences that decode, as a server batches them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference import attention as reference
from perf import attention_peers as peers
from perf.attention_grids import Shape
from perf.build import calls, made_by, normal
from perf.case import DTYPES, Call, Case, Inputs

PAGE_SIZE = 16  # vLLM's


@dataclass(frozen=True)
class Batch:
    """One sequence of ``chunk`` new queries and ``decoding`` ones of a single query, over ``seqlen_k`` keys each."""

    chunk: int
    decoding: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"H{self.nheads}/{self.nheads_kv} D{self.head_dim}"
        return f"Sq{self.chunk} + {self.decoding} x Sq1 Sk{self.seqlen_k} {heads} pages of {PAGE_SIZE}"

    @property
    def parts(self) -> tuple[Shape, Shape]:
        heads = self.nheads, self.nheads_kv, self.head_dim
        return Shape(1, self.chunk, self.seqlen_k, *heads), Shape(self.decoding, 1, self.seqlen_k, *heads)


def mixed(batch: Batch, dtype: str, device: str) -> Case:
    small = replace(
        batch,
        chunk=min(batch.chunk, 70),
        decoding=3,
        seqlen_k=min(batch.seqlen_k, 160),
        nheads=batch.nheads // batch.nheads_kv,
        nheads_kv=1,
    )
    lengths = ("block_table", "seqused_k")
    names = ("q", "k", "v", "cu_seqlens_q")
    return Case(
        op="attention",
        name="mixed",
        shape=str(batch),
        dtype=dtype,
        flops=sum(part.flops(causal=True) for part in batch.parts),
        bytes=sum(part.nbytes(DTYPES[dtype].itemsize) for part in batch.parts),
        **made_by(data, (batch,), (small,), DTYPES[dtype]),
        **calls(gpu_ops.attention_varlen, reference.attention_varlen, names, lengths, causal=True),
        naive=None if device == "cuda" else naive,
        note="naive gathers the pages of a sequence, then computes it head by head",
    )


def data(rng: np.random.Generator, batch: Batch, dtype: np.dtype[Any]) -> Inputs:
    """Shuffled pages, all of which are in use."""
    sequences = 1 + batch.decoding
    queries = [batch.chunk, *[1] * batch.decoding]
    each = -(-batch.seqlen_k // PAGE_SIZE)
    pages = (sequences * each, PAGE_SIZE, batch.nheads_kv, batch.head_dim)
    return {
        "q": normal(rng, (sum(queries), batch.nheads, batch.head_dim), dtype),
        "k": normal(rng, pages, dtype),
        "v": normal(rng, pages, dtype),
        "cu_seqlens_q": np.cumsum([0, *queries], dtype=np.int32),
        "block_table": rng.permutation(sequences * each).astype(np.int32).reshape(sequences, each),
        "seqused_k": np.full(sequences, batch.seqlen_k, np.int32),
    }


def naive(x: Inputs) -> Call:
    starts, used = x["cu_seqlens_q"].tolist(), x["seqused_k"].tolist()

    def keys(cache: np.ndarray, b: int) -> np.ndarray:
        return cache[x["block_table"][b]].reshape(1, -1, *cache.shape[2:])[:, : used[b]]

    queries = [x["q"][None, starts[b] : starts[b + 1]] for b in range(len(used))]
    masks = [peers.causal_bias(q, keys(x["k"], b)) for b, q in enumerate(queries)]

    def call() -> np.ndarray:
        found = [
            peers.naive_forward(q, keys(x["k"], b), keys(x["v"], b), masks[b])[0]
            for b, q in enumerate(queries)
        ]
        return np.concatenate(found)

    return call
