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
ODD_HEAD_DIM = 80  # halves of 40: whole vectors of no CPU
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
                found += [
                    case("heads first", seqlen, dtype, head_dim) for head_dim in (HEAD_DIM, ODD_HEAD_DIM)
                ]
            found.append(case("backward", seqlen, dtype))
    return found


def case(name: str, seqlen: int, dtype: str, head_dim: int = HEAD_DIM) -> Case:
    interleaved, backward = name == "interleaved", name == "backward"
    in_place, heads_first = name == "half-split, in place", name == "heads first"
    options: dict[str, Any] = {"theta": THETA, "interleaved": interleaved}
    options["layout"] = "bhsd" if heads_first else "bshd"
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
        shape=f"B1 S{seqlen} H{NHEADS}/{NHEADS_KV} D{head_dim}",
        dtype=dtype,
        flops=3.0 * seqlen * (NHEADS + NHEADS_KV) * head_dim,
        bytes=2.0 * seqlen * (NHEADS + NHEADS_KV) * head_dim * DTYPES[dtype].itemsize,
        make=maker(data, seqlen, DTYPES[dtype], head_dim, heads_first),
        make_small=maker(data, min(seqlen, SMALL), DTYPES[dtype], head_dim, heads_first),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=functools.partial(naive, sign, interleaved, heads_first),
        torch=torch_in_place if in_place else functools.partial(torch_rope, sign, interleaved, heads_first),
        reference=against,
        # a timed buffer is no longer the input: the first rows of one fresh call are
        sample=None if in_place else functools.partial(sample_last, heads_first),
        backward=backward,
        note="naive and torch get their cos and sin tables for nothing",
    )


def data(
    rng: np.random.Generator, seqlen: int, dtype: np.dtype[Any], head_dim: int, heads_first: bool
) -> Inputs:
    def array(nheads: int) -> np.ndarray:
        return normal(rng, (1, *((nheads, seqlen) if heads_first else (seqlen, nheads)), head_dim), dtype)

    return {"q": array(NHEADS), "k": array(NHEADS_KV)}


def sample_last(heads_first: bool, x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """One head of each, every position (the last positions have the largest angles)."""
    one = np.s_[:, :1] if heads_first else np.s_[:, :, :1]
    return {name: x[name][one] for name in "qk"}, tuple(r[one] for r in result)


def tables(x: Inputs, sign: float, heads_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32, as (seqlen, 1, head_dim / 2) or, heads first, (seqlen, head_dim / 2)."""
    head_dim, seqlen = x["q"].shape[3], x["q"].shape[2 if heads_first else 1]
    frequencies = THETA ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(seqlen)[:, None] * frequencies
    angles = angles if heads_first else angles[:, None]
    return np.cos(angles).astype(np.float32), (sign * np.sin(angles)).astype(np.float32)


def naive(sign: float, interleaved: bool, heads_first: bool, x: Inputs) -> Call:
    # `like`: on the device, where the inputs are
    cos, sin = (np.asarray(t, like=x["q"]) for t in tables(x, sign, heads_first))
    half = x["q"].shape[3] // 2
    pairs, split = (np.s_[0::2], np.s_[1::2]), (np.s_[:half], np.s_[half:])
    halves = pairs if interleaved else split

    def rotate(a: np.ndarray) -> np.ndarray:
        wide = a.astype(np.float32, copy=False)
        first, second = wide[..., halves[0]], wide[..., halves[1]]
        out = np.empty_like(wide)
        out[..., halves[0]] = first * cos - second * sin
        out[..., halves[1]] = first * sin + second * cos
        return out.astype(a.dtype, copy=False)

    return lambda: (rotate(x["q"]), rotate(x["k"]))


def torch_rope(sign: float, interleaved: bool, heads_first: bool, x: Inputs) -> Call:
    """The formula of transformers (rotate_half) and, interleaved, complex numbers as Llama's own code."""
    import torch

    q, k = torch_view(x["q"]), torch_view(x["k"])
    cos, sin = (torch.from_numpy(t).to(q.device) for t in tables(x, sign, heads_first))
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
    cos, sin = (torch.from_numpy(t).to(pairs[0][0].device) for t in tables(x, 1.0, False))
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
