"""QK-norm, RoPE and the cache write in one pass: a prompt, and a decode step of many sequences, paged.

``python perf/bench_rope_append_kv.py --device cpu --dtype bfloat16 --seqlen 512 4096`` (seqlen: tokens of the prompt)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.rope.rope_append_kv import rope_append_kv as definition
from perf.build import backends, made_by, normal
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

NHEADS, NHEADS_KV, HEAD_DIM = 32, 8, 128  # Qwen3-8B, which normalises the heads of q and k
THETA = 1e6
PAGE_SIZE = 16
DECODE_BATCH = 64
SMALL = 45


TOUR = (("prompt", "bfloat16"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    seqlens = config.seqlens or ((2048,) if config.quick else (512, 4096))
    return [
        case(name, seqlen, dtype)
        for dtype in config.dtypes or ("float32", "bfloat16")
        for seqlen in seqlens
        for name in (("prompt",) if config.quick else ("prompt", "prompt, three steps", "decode"))
    ]


def case(name: str, seqlen: int, dtype: str) -> Case:
    """Case. ``decode``: one new token for each of many sequences of ``seqlen`` keys; else a prompt of ``seqlen``."""
    batch, new, used = (DECODE_BATCH, 1, seqlen) if name == "decode" else (1, seqlen, 0)

    def ours(x: Inputs, **how: str) -> Call:
        out = np.empty_like(x["q"])

        def call() -> Any:
            gpu_ops.rope_append_kv(**x, theta=THETA, out=out, **how)
            return out, x["k_cache"], x["v_cache"]

        return call

    return Case(
        op="rope_append_kv",
        name=name,
        shape=f"B{batch} S{new} used {used} H{NHEADS}/{NHEADS_KV} D{HEAD_DIM}",
        dtype=dtype,
        flops=10.0 * batch * new * (NHEADS + NHEADS_KV) * HEAD_DIM,
        bytes=2.0 * batch * new * (NHEADS + 2 * NHEADS_KV) * HEAD_DIM * DTYPES[dtype].itemsize,
        **made_by(
            data, (batch, new, used), (min(batch, 3), min(new, SMALL), min(used, SMALL)), DTYPES[dtype]
        ),
        **backends(three_steps if name == "prompt, three steps" else ours),
        naive=naive,
        reference=lambda x, precision: definition(**x, theta=THETA, precision=precision),
        by_bytes=True,
        note="naive gets its cos and sin tables ready-made",
    )


def data(rng: np.random.Generator, batch: int, new: int, used: int, dtype: np.dtype[Any]) -> Inputs:
    """Paged cache with only the pages of the new tokens: the op touches no others."""
    first, end = used // PAGE_SIZE, -(-(used + new) // PAGE_SIZE)
    pages = rng.permutation(batch * (end - first))
    table = np.full((batch, end), -1, np.int32)
    table[:, first:] = pages.reshape(batch, -1)
    inputs = {
        name: normal(rng, (batch, new, heads, HEAD_DIM), dtype)
        for name, heads in (("q", NHEADS), ("k", NHEADS_KV), ("v", NHEADS_KV))
    }
    for name in ("k_cache", "v_cache"):
        inputs[name] = np.zeros((len(pages), PAGE_SIZE, NHEADS_KV, HEAD_DIM), dtype)
    return {
        **inputs,
        "seqused_k": np.full(batch, used, np.int32),
        "block_table": table,
        **{name: normal(rng, (HEAD_DIM,), dtype) for name in ("q_weight", "k_weight")},
    }


def places(x: Inputs) -> tuple[Any, Any, Any]:
    """Position, page and row of every token."""
    count = functools.partial(np.arange, like=x["seqused_k"])  # on the device of the inputs
    positions = x["seqused_k"][:, None] + count(x["q"].shape[1])
    pages = x["block_table"][count(len(positions))[:, None], positions // PAGE_SIZE]
    return positions, pages, positions % PAGE_SIZE


def three_steps(x: Inputs, **how: str) -> Call:
    """Same result from rmsnorm, rope and assignments."""
    positions, pages, rows = places(x)
    q, k = np.empty_like(x["q"]), np.empty_like(x["k"])

    def call() -> Any:
        gpu_ops.rmsnorm(x["q"], x["q_weight"], out=q, **how)
        gpu_ops.rmsnorm(x["k"], x["k_weight"], out=k, **how)
        gpu_ops.rope(q, k, positions=positions, theta=THETA, out=(q, k), **how)
        x["k_cache"][pages, rows], x["v_cache"][pages, rows] = k, x["v"]
        return q, x["k_cache"], x["v_cache"]

    return call


def naive(x: Inputs) -> Call:
    positions, pages, rows = places(x)
    pairs = np.arange(0, HEAD_DIM, 2, like=positions)
    angles = positions[:, :, None, None] * THETA ** (-pairs / HEAD_DIM)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = HEAD_DIM // 2

    def turned(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x32 = heads.astype(np.float32, copy=False)
        x32 = x32 / np.sqrt(np.mean(np.square(x32), axis=-1, keepdims=True) + 1e-6) * weight
        first, second = x32[..., :half], x32[..., half:]
        out = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
        return out.astype(heads.dtype, copy=False)

    weights = {name: x[name].astype(np.float32) for name in ("q_weight", "k_weight")}

    def call() -> Any:
        q = turned(x["q"], weights["q_weight"])
        x["k_cache"][pages, rows] = turned(x["k"], weights["k_weight"])
        x["v_cache"][pages, rows] = x["v"]
        return q, x["k_cache"], x["v_cache"]

    return call


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("rope_append_kv")
