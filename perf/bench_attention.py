"""Attention: forward, backward, decode and both over pages, against the plain formula and torch's SDPA.

``python perf/bench_attention.py --device cpu --dtype bfloat16 --seqlen 512 2048 8192``
``python perf/bench_attention.py --device cuda --grid field`` (or ``gqa``, ``decode``: perf/attention_grids.py;
``options``: perf/attention_options.py; ``pages``: perf/attention_paged.py)
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import replace
from typing import Any

import gpu_ops
from gpu_ops.reference.attention import forward as reference
from perf import attention_grids, attention_options, attention_paged
from perf import attention_peers as peers
from perf.attention_grids import Shape
from perf.attention_options import CAUSAL, PLAIN, data
from perf.attention_paged import Batch, mixed
from perf.build import calls, made_by
from perf.case import DTYPES, Case, Inputs, RunOptions, nbytes

GRIDS = (*attention_grids.GRIDS, "options", "pages")
SAMPLED = 64
"""How many query rows at the end of the sequence the reference recomputes in float64."""
WHOLE = 256 << 20
"""The reference recomputes decoding over at most this many bytes as a whole; beyond, one group of heads."""


TOUR = (
    ("forward causal", "float32"),
    ("backward causal", "float32"),
    ("decode", "float32"),
    ("forward causal", "bfloat16"),
)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    if config.grid:
        return grid(config)
    dtypes = config.dtypes or ("float32", "bfloat16")
    if config.quick:
        lengths, caches = config.seqlens or (2048,), [(1, 4096)]
        heads = [(32, 8, 128)]  # Llama-3-8B
    else:
        lengths, caches = config.seqlens or (512, 2048, 8192), [(1, 4096), (1, 16384), (8, 16384)]
        heads = [(8, 8, 64), (32, 8, 128)]
    if config.device == "emulator":
        heads = [(8, 2, 64)]  # the emulator takes seconds where a GPU takes microseconds
    if config.seqlens:
        caches = [(1, length) for length in config.seqlens]
    on = config.device
    result: list[Case] = []
    for dtype in dtypes:
        for head in heads:
            for seqlen in lengths:
                # a quarter of the heads for long sequences: all heads would take NumPy minutes
                group = (8, 2, 128) if head[0] == 32 and seqlen > 4096 else head
                length = 1024 if config.quick and not config.seqlens else seqlen
                for causal in (True,) if config.quick else (False, True):
                    result.append(forward(Shape(1, seqlen, seqlen, *group), dtype, causal, on))
                    result.append(backward(Shape(1, length, length, *group), dtype, causal, on))
        cached = heads[0] if on == "emulator" else (32, 8, 128)
        result += [decode(Shape(batch, 1, length, *cached), dtype, on) for batch, length in caches]
        longest = caches[0][1]
        if dtype != "float32":
            cache = Shape(1, 1, longest, *cached)
            result += [attention_paged.decode(cache, dtype, codes, on) for codes in attention_paged.QUANTIZED]
        result.append(mixed(Batch(min(longest, 512), 15, longest, *cached), dtype, on))
    return result


def grid(config: RunOptions) -> list[Case]:
    if config.grid == "options":
        return attention_options.cases(config)
    if config.grid == "pages":
        return attention_paged.grid(config)
    problems = attention_grids.GRIDS[config.grid](config.dtypes or attention_grids.DTYPES, config.seqlens)
    return [
        decode(p.shape, p.dtype, config.device)
        if p.kind == "decode"
        else KINDS[p.kind](p.shape, p.dtype, p.causal, config.device)
        for p in problems
    ]


def forward(shape: Shape, dtype: str, causal: bool, device: str) -> Case:
    case = attention_options.case(CAUSAL if causal else PLAIN, shape, shape.small, dtype)
    torch = functools.partial(peers.torch_forward, functools.partial(peers.torch_sdpa, causal))
    return replace(
        case,
        naive=functools.partial(peers.device_forward, causal) if device == "cuda" else case.naive,
        torch=torch,
        peers=peers.sdpa_peers(torch),
        sample=sample_last_rows,
    )


def backward(shape: Shape, dtype: str, causal: bool, device: str) -> Case:
    case = attention_options.case(CAUSAL if causal else PLAIN, shape, shape.small, dtype, backward=True)
    torch = functools.partial(peers.torch_backward, functools.partial(peers.torch_sdpa, causal))
    return replace(
        case,
        naive=functools.partial(peers.device_backward, causal) if device == "cuda" else case.naive,
        torch=torch,
        peers=peers.sdpa_peers(torch),
        note="naive recomputes the scores, as ours does",
    )


KINDS = {"forward": forward, "backward": backward}


def decode(shape: Shape, dtype: str, device: str) -> Case:
    small = Shape(1, 1, 160, shape.nheads // shape.nheads_kv, 1, shape.head_dim)
    return Case(
        op="attention",
        name="decode",
        shape=str(shape),
        dtype=dtype,
        flops=shape.flops(causal=False),
        bytes=shape.nbytes(DTYPES[dtype].itemsize),
        **made_by(data, (shape,), (small,), DTYPES[dtype], ("seqused_k",)),
        **calls(gpu_ops.attention_decode, reference.attention_decode, "qkv", ("seqused_k",)),
        naive=peers.device_decode if device == "cuda" else peers.naive_decode,
        torch=peers.torch_decode,
        peers=peers.sdpa_peers(peers.torch_decode),
        bandwidth="copy" if device == "cuda" else "read",
        by_bytes=True,
        sample=sample_group,
        note="torch: the query heads of a group folded into the sequence axis, faster than enable_gqa",
    )


def sample_group(x: Inputs, out: Any) -> tuple[Inputs, Any]:
    """Whole result of a small problem; last group of heads of the last sequence of a large one."""
    if nbytes(x) <= WHOLE:
        return x, out
    group = slice(-(x["q"].shape[2] // x["k"].shape[2]), None)
    part = {"q": x["q"][-1:, :, group], "k": x["k"][-1:, :, -1:], "v": x["v"][-1:, :, -1:]}
    return part | {"seqused_k": x["seqused_k"][-1:]}, out[-1:, :, group]


def sample_last_rows(x: Inputs, out: Any) -> tuple[Inputs, Any]:
    """Last queries of one group of heads. Causal is bottom-right aligned, so they see the same keys without the
    earlier queries."""
    group = x["q"].shape[2] // x["k"].shape[2]
    rows = slice(-SAMPLED, None)
    part = {"q": x["q"][-1:, rows, -group:], "k": x["k"][-1:, :, -1:], "v": x["v"][-1:, :, -1:]}
    return part, out[-1:, rows, -group:]


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("attention")
