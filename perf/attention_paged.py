"""Attention over plain and quantized pages: one new query; a chunk of a prompt batched with decoding sequences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.attention import forward as reference
from gpu_ops.reference.attention.quantized_pages import dequantize
from perf import attention_peers as peers
from perf.attention_grids import DECODE_BATCHES, DECODE_LENGTHS, Shape
from perf.build import calls, made_by, normal
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

PAGE_SIZE = 16  # vLLM's
QUANTIZED = ("int8", "float8_e4m3fn")
LENGTHS = ("block_table", "seqused_k")
SCALES = ("k_scale", "v_scale")


def grid(config: RunOptions) -> list[Case]:
    """One new query over pages of its dtype and over quantized ones, by batch and length."""
    return [
        decode(Shape(batch, 1, length, 32, 8, 128), dtype, codes, config.device)
        for dtype in config.dtypes or ("bfloat16", "float16")
        for batch, length in itertools.product(DECODE_BATCHES, config.seqlens or DECODE_LENGTHS)
        for codes in ("", *QUANTIZED)
    ]


def decode(shape: Shape, dtype: str, codes: str, device: str) -> Case:
    """Case of one new query. ``codes``: dtype of quantized pages; empty: pages of ``dtype``."""
    small = Shape(1, 1, 160, shape.nheads // shape.nheads_kv, 1, shape.head_dim)
    itemsize = DTYPES[dtype].itemsize
    queries = 2 * shape.batch * shape.nheads * shape.head_dim * itemsize
    keys = 2 * shape.batch * shape.seqlen_k * shape.nheads_kv
    return Case(
        op="attention",
        name=f"decode pages of {codes or dtype}",
        shape=f"{shape} pages of {PAGE_SIZE}",
        dtype=dtype,
        flops=shape.flops(causal=False),
        bytes=queries + keys * (shape.head_dim + 4 if codes else shape.head_dim * itemsize),
        **made_by(pages, (shape,), (small,), DTYPES[dtype], codes),
        **calls(
            gpu_ops.attention_decode,
            reference.attention_decode,
            "qkv",
            (*LENGTHS, *(SCALES if codes else ())),
        ),
        naive=None if device == "cuda" else naive_decode,
        bandwidth="copy" if device == "cuda" else "read",
        by_bytes=True,
        sample=last_sequence,
        note="naive gathers the pages of a sequence, in float32",
    )


def pages(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any], codes: str) -> Inputs:
    """Shuffled pages, all in use. Codes are uniform without NaN; scales give numbers around 1."""
    each = -(-shape.seqlen_k // PAGE_SIZE)
    count = shape.batch * each
    size = (count, PAGE_SIZE, shape.nheads_kv, shape.head_dim)
    inputs = {"q": normal(rng, (shape.batch, 1, shape.nheads, shape.head_dim), dtype)}
    for name in "kv":
        if codes == "int8":
            inputs[name] = rng.integers(-127, 128, size, np.int8)
        elif codes:
            inputs[name] = rng.integers(0, 256, size, np.uint8) & np.uint8(0xF7)
        else:
            inputs[name] = normal(rng, size, dtype)
        if codes:
            middle = 0.01 if codes == "int8" else 0.05
            inputs[f"{name}_scale"] = rng.uniform(middle / 2, middle * 2, size[:3]).astype(np.float32)
    return inputs | {
        "block_table": rng.permutation(count).astype(np.int32).reshape(shape.batch, each),
        "seqused_k": np.full(shape.batch, shape.seqlen_k, np.int32),
    }


def gathered(x: Inputs, name: str, b: int) -> np.ndarray:
    """Keys or values of a sequence, (1, seqlen_k, nheads_kv, head_dim)."""
    table, used = x["block_table"][b], int(x["seqused_k"][b])
    rows = x[name][table]
    if f"{name}_scale" in x:
        rows = dequantize(rows, x[f"{name}_scale"][table]).astype(np.float32)
    return rows.reshape(1, -1, *rows.shape[2:])[:, :used]


def naive_decode(x: Inputs) -> Call:
    def call() -> np.ndarray:
        outputs = [
            peers.naive_forward(x["q"][b : b + 1], gathered(x, "k", b), gathered(x, "v", b), None)
            for b in range(len(x["q"]))
        ]
        return np.concatenate(outputs)

    return call


def last_sequence(x: Inputs, out: Any) -> tuple[Inputs, Any]:
    """Last group of heads of the last sequence, over the pages of that sequence only."""
    group = slice(-(x["q"].shape[2] // x["k"].shape[2]), None)
    table = x["block_table"][-1]
    part = {"q": x["q"][-1:, :, group], "seqused_k": x["seqused_k"][-1:]}
    part |= {name: x[name][table][:, :, -1:] for name in ("k", "v", *SCALES) if name in x}
    return part | {"block_table": np.arange(len(table), dtype=np.int32)[None]}, out[-1:, :, group]


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
    names = ("q", "k", "v", "cu_seqlens_q")
    return Case(
        op="attention",
        name="mixed",
        shape=str(batch),
        dtype=dtype,
        flops=sum(part.flops(causal=True) for part in batch.parts),
        bytes=sum(part.nbytes(DTYPES[dtype].itemsize) for part in batch.parts),
        **made_by(data, (batch,), (small,), DTYPES[dtype]),
        **calls(gpu_ops.attention_varlen, reference.attention_varlen, names, LENGTHS, causal=True),
        naive=None if device == "cuda" else naive,
        note="naive gathers the pages of a sequence, then computes it head by head",
    )


def data(rng: np.random.Generator, batch: Batch, dtype: np.dtype[Any]) -> Inputs:
    """Shuffled pages, all in use."""
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
    starts = x["cu_seqlens_q"].tolist()
    queries = [x["q"][None, first:end] for first, end in itertools.pairwise(starts)]
    masks = [peers.causal_bias(q, gathered(x, "k", b)) for b, q in enumerate(queries)]

    def call() -> np.ndarray:
        outputs = [
            peers.naive_forward(q, gathered(x, "k", b), gathered(x, "v", b), masks[b])[0]
            for b, q in enumerate(queries)
        ]
        return np.concatenate(outputs)

    return call
