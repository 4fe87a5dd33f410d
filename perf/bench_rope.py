"""RoPE on q and k together: half-split and interleaved pairs, forward; backward is the same kernel.

``python perf/bench_rope.py --device cpu --dtype bfloat16 --seqlen 512 4096``; ``--device cuda`` measures the CUDA C++
kernel and the Numba one, ``--device emulator`` counts the bytes that they move.
"""

from __future__ import annotations

if not __package__:  # run as a file: import perf from the repository root
    import sys

    sys.path[0] += "/.."

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.rope import rope as reference
from perf.build import backends, calls, made_by, normal, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

NHEADS, NHEADS_KV, HEAD_DIM = 32, 8, 128  # Llama-3-8B
ODD_HEAD_DIM = 80  # halves of 40 do not fill whole vectors on any CPU
THETA = 500000.0
SMALL = 45


@dataclass(frozen=True)
class Variant:
    name: str
    interleaved: bool = False
    heads_first: bool = False
    backward: bool = False


HALF_SPLIT, BACKWARD = Variant("half-split"), Variant("backward", backward=True)
INTERLEAVED, HEADS_FIRST = Variant("interleaved", interleaved=True), Variant("heads first", heads_first=True)


TOUR = (("half-split", "bfloat16"),)  # names and dtypes


def cases(config: RunOptions) -> list[Case]:
    result = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for seqlen in config.seqlens or ((2048,) if config.quick else (512, 4096)):
            result.append(case(HALF_SPLIT, seqlen, dtype))
            if not config.quick:
                result += [in_place(result[-1]), case(INTERLEAVED, seqlen, dtype)]
                result += [
                    case(HEADS_FIRST, seqlen, dtype, head_dim) for head_dim in (HEAD_DIM, ODD_HEAD_DIM)
                ]
            result.append(case(BACKWARD, seqlen, dtype))
    return result


def case(kind: Variant, seqlen: int, dtype: str, head_dim: int = HEAD_DIM) -> Case:
    layout = "bhsd" if kind.heads_first else "bshd"
    name = "rope_backward" if kind.backward else "rope"
    functions = getattr(gpu_ops, name), getattr(reference, name)
    options: dict[str, Any] = {"theta": THETA, "interleaved": kind.interleaved, "layout": layout}
    elements = seqlen * (NHEADS + NHEADS_KV) * head_dim
    return Case(
        op="rope",
        name=kind.name,
        shape=f"B1 S{seqlen} H{NHEADS}/{NHEADS_KV} D{head_dim}",
        dtype=dtype,
        flops=3.0 * elements,
        bytes=2.0 * elements * DTYPES[dtype].itemsize,
        **made_by(data, (seqlen,), (min(seqlen, SMALL),), DTYPES[dtype], head_dim, kind.heads_first),
        **calls(*functions, ("q", "k"), **options),
        naive=functools.partial(naive, kind),
        torch=functools.partial(torch_rope, kind),
        sample=functools.partial(sample_last, kind),
        backward=kind.backward,
        note="naive and torch get their cos and sin tables ready-made",
    )


def in_place(forward: Case) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        # rotations keep the norm, so repeated calls on the same buffers neither grow nor vanish
        q, k = x["q"].copy(), x["k"].copy()
        return functools.partial(forward.ours({"q": q, "k": k}, **how), out=(q, k))

    return replace(
        forward,
        name=f"{forward.name}, in place",
        **backends(ours),
        torch=torch_in_place,
        sample=None,  # a timed buffer no longer holds the input: the error is that of a fresh, smaller call
    )


def data(
    rng: np.random.Generator, seqlen: int, dtype: np.dtype[Any], head_dim: int, heads_first: bool
) -> Inputs:
    def array(nheads: int) -> np.ndarray:
        return normal(rng, (1, *((nheads, seqlen) if heads_first else (seqlen, nheads)), head_dim), dtype)

    return {"q": array(NHEADS), "k": array(NHEADS_KV)}


def sample_last(kind: Variant, x: Inputs, result: Any) -> tuple[Inputs, Any]:
    """One head of q and of k, every position (the last positions have the largest angles)."""
    head = np.s_[:, :1] if kind.heads_first else np.s_[:, :, :1]
    return {name: x[name][head] for name in "qk"}, tuple(r[head] for r in result)


def tables(kind: Variant, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32, as (seqlen, 1, head_dim / 2) or, heads first, (seqlen, head_dim / 2)."""
    head_dim, seqlen = x["q"].shape[3], x["q"].shape[2 if kind.heads_first else 1]
    frequencies = THETA ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(seqlen)[:, None] * frequencies
    angles = angles if kind.heads_first else angles[:, None]
    sign = -1.0 if kind.backward else 1.0
    return np.cos(angles).astype(np.float32), (sign * np.sin(angles)).astype(np.float32)


def naive(kind: Variant, x: Inputs) -> Call:
    # `like` puts the tables on the device of the inputs
    cos, sin = (np.asarray(t, like=x["q"]) for t in tables(kind, x))
    half = x["q"].shape[3] // 2
    pairs, split = (np.s_[0::2], np.s_[1::2]), (np.s_[:half], np.s_[half:])
    halves = pairs if kind.interleaved else split

    def rotate(a: np.ndarray) -> np.ndarray:
        a32 = a.astype(np.float32, copy=False)
        first, second = a32[..., halves[0]], a32[..., halves[1]]
        out = np.empty_like(a32)
        out[..., halves[0]] = first * cos - second * sin
        out[..., halves[1]] = first * sin + second * cos
        return out.astype(a.dtype, copy=False)

    return lambda: (rotate(x["q"]), rotate(x["k"]))


def torch_tables(kind: Variant, x: Inputs, like: Any) -> tuple[Any, Any]:
    import torch

    cos, sin = (torch.from_numpy(t).to(like.device) for t in tables(kind, x))
    return cos, sin


def torch_rope(kind: Variant, x: Inputs) -> Call:
    """Formula of transformers (rotate_half); interleaved: complex numbers as in Llama's own code."""
    import torch

    q, k = torch_view(x["q"]), torch_view(x["k"])
    cos, sin = torch_tables(kind, x, q)
    if kind.interleaved:
        rotation = torch.complex(cos, sin)

        def rotate(a: Any) -> Any:
            pairs = torch.view_as_complex(a.float().reshape(*a.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * rotation).flatten(3).to(a.dtype)
    else:
        cos, sin = (torch.cat((t, t), dim=-1).to(q.dtype) for t in (cos, sin))

        def rotate(a: Any) -> Any:
            first, second = a.chunk(2, dim=-1)
            return a * cos + torch.cat((-second, first), dim=-1) * sin

    return lambda: (rotate(q), rotate(k))


def torch_in_place(x: Inputs) -> Call:
    """Two products and a scratch array for each of q and k, without allocations."""
    import torch

    pairs = [(a, torch.empty_like(a)) for a in (torch_view(x[name].copy()) for name in "qk")]
    like = pairs[0][0]
    cos, sin = (torch.cat((t, t), dim=-1).to(like.dtype) for t in torch_tables(HALF_SPLIT, x, like))
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
