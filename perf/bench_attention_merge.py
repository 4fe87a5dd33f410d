"""Merging two results of attention: the step that ring attention adds.

``python perf/bench_attention_merge.py --device cpu --dtype float32 --seqlen 2048`` (seqlen: queries)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools

import numpy as np

import gpu_ops
from gpu_ops.reference.attention.merge import attention_merge as definition
from perf.build import backends, made_by, normal, to_float32, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

HEADS, HEAD_DIM = 32, 128
NAMES = ("out1", "lse1", "out2", "lse2")


def cases(config: RunOptions) -> list[Case]:
    seqlens = config.seqlens or ((2048,) if config.quick else (512, 4096))
    return [
        case(seqlen, dtype, in_place)
        for dtype in config.dtypes or ("float32", "bfloat16")
        for seqlen in seqlens
        for in_place in (False, True)
    ]


def case(seqlen: int, dtype: str, in_place: bool) -> Case:
    rows = seqlen * HEADS
    return Case(
        op="attention_merge",
        name="in place" if in_place else "merge",
        shape=f"{seqlen} x {HEADS} x {HEAD_DIM}",
        dtype=dtype,
        flops=4.0 * rows * HEAD_DIM,
        bytes=3.0 * rows * (HEAD_DIM * DTYPES[dtype].itemsize + 4),
        **made_by(data, (seqlen, HEADS, HEAD_DIM), (37, 2, 64), dtype),
        **backends(functools.partial(ours, in_place)),
        reference=lambda x, precision: definition(*(x[name] for name in NAMES), precision=precision),
        naive=lambda x: functools.partial(naive, *(x[name] for name in NAMES)),
        torch=torch,
    )


def ours(in_place: bool, x: Inputs, **how: str) -> Call:
    """Merge in place into copies, so that the reference sees unchanged inputs."""
    arrays = tuple(x[name] for name in NAMES)
    if not in_place:
        return functools.partial(gpu_ops.attention_merge, *arrays, **how)
    buffers = arrays[0].copy(), arrays[1].copy()
    return functools.partial(gpu_ops.attention_merge, *buffers, *arrays[2:], out=buffers, **how)


def data(rng: np.random.Generator, seqlen: int, heads: int, head_dim: int, dtype: str) -> Inputs:
    made: Inputs = {}
    for i in "12":
        made[f"out{i}"] = normal(rng, (1, seqlen, heads, head_dim), DTYPES[dtype])
        made[f"lse{i}"] = normal(rng, (1, heads, seqlen), DTYPES["float32"])
    return made


def naive(
    out1: np.ndarray, lse1: np.ndarray, out2: np.ndarray, lse2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    first, second = to_float32(out1, out2)
    lse = np.logaddexp(lse1, lse2)
    weight1, weight2 = (np.exp(x - lse).swapaxes(1, 2)[..., None] for x in (lse1, lse2))
    return (weight1 * first + weight2 * second).astype(out1.dtype, copy=False), lse


def torch(x: Inputs) -> Call:
    import torch as t

    first, lse1, second, lse2 = (torch_view(x[name]) for name in NAMES)

    def merge() -> tuple[t.Tensor, t.Tensor]:
        weight = t.sigmoid(lse2 - lse1).transpose(1, 2)[..., None]
        return t.lerp(first.float(), second.float(), weight).to(first.dtype), t.logaddexp(lse1, lse2)

    return merge


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("attention_merge")
