"""RoPE on q and k together: half-split and interleaved pairs, forward; backward is the same kernel.

``python perf/bench_rope.py --device cpu --dtype bfloat16 --seqlen 512 4096``; ``--device cuda`` measures the CUDA C++
kernel and its Numba twin, ``--device emulator`` counts what they move.
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: the repository root takes perf/'s place on the path
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.precision import Precision
from gpu_ops.reference.rope import rope as reference_rope
from gpu_ops.reference.rope import rope_backward as reference_backward
from perf.case import DTYPES, Call, Case, Config, Inputs, maker, normal, torch_view

NHEADS, NHEADS_KV, HEAD_DIM = 32, 8, 128  # Llama-3-8B
THETA = 500000.0
SMALL = 45


def cases(config: Config) -> list[Case]:
    seqlens = config.seqlens or ((2048,) if config.quick else (512, 4096))
    found = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for seqlen in seqlens:
            found.append(case("half-split", seqlen, dtype))
            if not config.quick:
                found += [case(name, seqlen, dtype) for name in ("half-split, in place", "interleaved")]
            found.append(case("backward", seqlen, dtype))
    return found


def case(name: str, seqlen: int, dtype: str) -> Case:
    interleaved, in_place, backward = (
        name == "interleaved",
        name == "half-split, in place",
        name == "backward",
    )
    options: dict[str, Any] = {"theta": THETA, "interleaved": interleaved}
    function = gpu_ops.rope_backward if backward else gpu_ops.rope
    sign = -1.0 if backward else 1.0

    def ours(x: Inputs, **how: str) -> Call:
        if not in_place:
            return functools.partial(function, x["q"], x["k"], **options, **how)
        # Rotations keep the norm, so repeated calls on the same buffers neither grow nor vanish.
        q, k = x["q"].copy(), x["k"].copy()
        return functools.partial(function, q, k, **options, **how, out=(q, k))

    def against(x: Inputs, precision: Precision) -> Any:
        definition = reference_backward if backward else reference_rope
        return definition(x["q"], x["k"], **options, precision=precision)

    return Case(
        op="rope",
        name=name,
        shape=f"B1 S{seqlen} H{NHEADS}/{NHEADS_KV} D{HEAD_DIM}",
        dtype=dtype,
        flops=3.0 * seqlen * (NHEADS + NHEADS_KV) * HEAD_DIM,
        bytes=2.0 * seqlen * (NHEADS + NHEADS_KV) * HEAD_DIM * DTYPES[dtype].itemsize,
        make=maker(data, seqlen, DTYPES[dtype]),
        make_small=maker(data, min(seqlen, SMALL), DTYPES[dtype]),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=functools.partial(naive, sign, interleaved),
        torch=torch_in_place if in_place else functools.partial(torch_rope, sign, interleaved),
        reference=against,
        # a timed buffer is no longer the input: the first rows of one fresh call are
        sample=sample_last if not in_place else None,
        backward=backward,
        note="naive and torch get their cos and sin tables for nothing",
    )


def data(rng: np.random.Generator, seqlen: int, dtype: np.dtype[Any]) -> Inputs:
    return {
        "q": normal(rng, (1, seqlen, NHEADS, HEAD_DIM), dtype),
        "k": normal(rng, (1, seqlen, NHEADS_KV, HEAD_DIM), dtype),
    }


def sample_last(x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """One head of each, every position (the last positions have the largest angles)."""
    return {name: x[name][:, :, :1] for name in "qk"}, tuple(r[:, :, :1] for r in result)


def tables(seqlen: int, sign: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (seqlen, 1, head_dim / 2), float32."""
    frequencies = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.arange(seqlen)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), (sign * np.sin(angles)).astype(np.float32)


def naive(sign: float, interleaved: bool, x: Inputs) -> Call:
    # `like`: on the device, where the inputs are
    cos, sin = (np.asarray(t, like=x["q"]) for t in tables(x["q"].shape[1], sign))
    halves = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(None, HEAD_DIM // 2), slice(HEAD_DIM // 2, None))
    )

    def rotate(a: np.ndarray) -> np.ndarray:
        wide = a.astype(np.float32, copy=False)
        first, second = wide[..., halves[0]], wide[..., halves[1]]
        out = np.empty_like(wide)
        out[..., halves[0]] = first * cos - second * sin
        out[..., halves[1]] = first * sin + second * cos
        return out.astype(a.dtype, copy=False)

    return lambda: (rotate(x["q"]), rotate(x["k"]))


def torch_rope(sign: float, interleaved: bool, x: Inputs) -> Call:
    """The formula of transformers (rotate_half) and, interleaved, complex numbers as Llama's own code."""
    import torch

    q, k = torch_view(x["q"]), torch_view(x["k"])
    cos, sin = (torch.from_numpy(t).to(q.device) for t in tables(q.shape[1], sign))
    if interleaved:
        turn = torch.complex(cos, sin)

        def rotate(a: Any) -> Any:
            pairs = torch.view_as_complex(a.float().reshape(*a.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(3).to(a.dtype)
    else:
        cos, sin = (torch.cat((t, t), dim=-1).to(q.dtype) for t in (cos, sin))

        def rotate(a: Any) -> Any:
            first, second = a.chunk(2, dim=-1)
            return a * cos + torch.cat((-second, first), dim=-1) * sin

    return lambda: (rotate(q), rotate(k))


def torch_in_place(x: Inputs) -> Call:
    """Two products and a scratch array for each, nothing allocated."""
    import torch

    pairs = [(a, torch.empty_like(a)) for a in (torch_view(x[name].copy()) for name in "qk")]
    cos, sin = (torch.from_numpy(t).to(pairs[0][0].device) for t in tables(x["q"].shape[1], 1.0))
    cos, sin = (torch.cat((t, t), dim=-1).to(pairs[0][0].dtype) for t in (cos, sin))
    half = HEAD_DIM // 2

    def call() -> None:
        for a, turned in pairs:
            torch.neg(a[..., half:], out=turned[..., :half])
            turned[..., half:].copy_(a[..., :half])
            a.mul_(cos).add_(turned.mul_(sin))

    return call


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("rope")
