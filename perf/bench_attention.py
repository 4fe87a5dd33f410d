"""Attention: forward, backward and decode, against the plain formula and torch's SDPA.

``python perf/bench_attention.py --device cpu --dtype bfloat16 --seqlen 512 2048 8192``
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: the repository root takes perf/'s place on the path
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.attention import attention as reference_attention
from gpu_ops.reference.attention import attention_decode as reference_decode
from gpu_ops.reference.attention_backward import attention_backward as reference_backward
from gpu_ops.reference.precision import Precision
from perf.case import DTYPES, Call, Case, Config, Inputs, attention_flops, maker, normal, torch_view

SAMPLED = 64
"""Query rows at the end of the sequence whose result is recomputed in float64."""


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"H{self.nheads}" if self.nheads == self.nheads_kv else f"H{self.nheads}/{self.nheads_kv}"
        square = self.seqlen_q == self.seqlen_k
        length = f"S{self.seqlen_q}" if square else f"Sq{self.seqlen_q} Sk{self.seqlen_k}"
        return f"B{self.batch} {length} {heads} D{self.head_dim}"

    @property
    def small(self) -> Shape:
        """One group of heads, at most 160 positions (more than one tile, not a multiple of one)."""
        group = self.nheads // self.nheads_kv
        return Shape(1, min(self.seqlen_q, 160), min(self.seqlen_k, 160), group, 1, self.head_dim)

    def flops(self, *, causal: bool, backward: bool = False) -> float:
        sizes = (self.batch, self.nheads, self.seqlen_q, self.seqlen_k, self.head_dim)
        return attention_flops(*sizes, causal=causal, backward=backward)

    def nbytes(self, itemsize: int, *, backward: bool = False) -> float:
        """q, k, v in and out out; backward also reads dout, out and lse and writes dq, dk, dv."""
        q = self.batch * self.seqlen_q * self.nheads * self.head_dim * itemsize
        kv = 2 * self.batch * self.seqlen_k * self.nheads_kv * self.head_dim * itemsize
        return 4 * q + 2 * kv + 4 * self.batch * self.nheads * self.seqlen_q if backward else 2 * q + kv


def cases(config: Config) -> list[Case]:
    dtypes = config.dtypes or ("float32", "bfloat16")
    found: list[Case] = []
    if config.quick:
        lengths, caches = config.seqlens or (2048,), [(1, 4096)]
        heads = [(32, 8, 128)]  # Llama-3-8B
    else:
        lengths, caches = config.seqlens or (512, 2048, 8192), [(1, 4096), (1, 16384), (8, 4096)]
        heads = [(8, 8, 64), (32, 8, 128)]
    if config.seqlens:
        caches = [(1, length) for length in config.seqlens]
    for dtype in dtypes:
        for head in heads:
            for seqlen in lengths:
                # a quarter of the heads for long sequences: NumPy would take minutes for all
                group = (8, 2, 128) if head[0] == 32 and seqlen > 4096 else head
                length = 1024 if config.quick and not config.seqlens else seqlen
                for causal in (True,) if config.quick else (False, True):
                    found.append(forward(Shape(1, seqlen, seqlen, *group), dtype, causal))
                    found.append(backward(Shape(1, length, length, *group), dtype, causal))
        found += [decode(Shape(batch, 1, length, 32, 8, 128), dtype) for batch, length in caches]
    return found


def forward(shape: Shape, dtype: str, causal: bool) -> Case:
    return Case(
        op="attention",
        name="forward causal" if causal else "forward",
        shape=str(shape),
        dtype=dtype,
        flops=shape.flops(causal=causal),
        bytes=shape.nbytes(DTYPES[dtype].itemsize),
        make=maker(qkv, shape, DTYPES[dtype]),
        make_small=maker(qkv, shape.small, DTYPES[dtype]),
        ours=lambda x: functools.partial(gpu_ops.attention, x["q"], x["k"], x["v"], causal=causal),
        naive=lambda x: functools.partial(
            naive_forward, x["q"], x["k"], x["v"], causal_bias(x["q"], x["k"], causal)
        ),
        torch=functools.partial(torch_forward, causal),
        reference=lambda x, precision: reference_attention(
            x["q"], x["k"], x["v"], causal=causal, precision=precision
        ),
        sample=sample_last_rows,
    )


def backward(shape: Shape, dtype: str, causal: bool) -> Case:
    def ours(x: Inputs) -> Call:
        out, lse = gpu_ops.attention(x["q"], x["k"], x["v"], causal=causal, return_lse=True)
        return functools.partial(
            gpu_ops.attention_backward, x["dout"], x["q"], x["k"], x["v"], out, lse, causal=causal
        )

    def reference(x: Inputs, precision: Precision) -> Any:
        out, lse = reference_attention(
            x["q"], x["k"], x["v"], causal=causal, return_lse=True, precision=precision
        )
        return reference_backward(
            x["dout"], x["q"], x["k"], x["v"], out, lse, causal=causal, precision=precision
        )

    def naive(x: Inputs) -> Call:
        bias = causal_bias(x["q"], x["k"], causal)
        return functools.partial(naive_backward, x["dout"], x["q"], x["k"], x["v"], bias)

    return Case(
        op="attention",
        name="backward causal" if causal else "backward",
        shape=str(shape),
        dtype=dtype,
        flops=shape.flops(causal=causal, backward=True),
        bytes=shape.nbytes(DTYPES[dtype].itemsize, backward=True),
        make=maker(qkv, shape, DTYPES[dtype], dout=True),
        make_small=maker(qkv, shape.small, DTYPES[dtype], dout=True),
        ours=ours,
        naive=naive,
        torch=functools.partial(torch_backward, causal),
        reference=reference,
        backward=True,
        note="naive computes the scores again, as ours does",
    )


def decode(shape: Shape, dtype: str) -> Case:
    small = Shape(1, 1, 160, shape.nheads // shape.nheads_kv, 1, shape.head_dim)
    return Case(
        op="attention",
        name="decode",
        shape=str(shape),
        dtype=dtype,
        flops=shape.flops(causal=False),
        bytes=shape.nbytes(DTYPES[dtype].itemsize),
        make=maker(qkv, shape, DTYPES[dtype], cache=True),
        make_small=maker(qkv, small, DTYPES[dtype], cache=True),
        ours=lambda x: functools.partial(
            gpu_ops.attention_decode, x["q"], x["k"], x["v"], seqused_k=x["seqused_k"]
        ),
        naive=naive_decode,
        torch=torch_decode,
        reference=lambda x, precision: reference_decode(
            x["q"], x["k"], x["v"], seqused_k=x["seqused_k"], precision=precision
        ),
        bandwidth="read",
        sample=lambda inputs, out: (inputs, out),
        note="torch: the query heads of a group folded into the sequence axis, faster than enable_gqa",
    )


def qkv(
    rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any], *, dout: bool = False, cache: bool = False
) -> Inputs:
    query = (shape.batch, shape.seqlen_q, shape.nheads, shape.head_dim)
    keys = (shape.batch, shape.seqlen_k, shape.nheads_kv, shape.head_dim)
    found = {"q": normal(rng, query, dtype), "k": normal(rng, keys, dtype), "v": normal(rng, keys, dtype)}
    if dout:
        found["dout"] = normal(rng, query, dtype)
    if cache:
        found["seqused_k"] = np.full(shape.batch, shape.seqlen_k, dtype=np.int32)
    return found


def sample_last_rows(x: Inputs, out: Any) -> tuple[Inputs, Any]:
    """The last queries see every key, causal or not, and bottom-right alignment keeps it that way
    when the earlier queries are cut off. One group of heads."""
    group = x["q"].shape[2] // x["k"].shape[2]
    rows = slice(-SAMPLED, None)
    part = {"q": x["q"][-1:, rows, -group:], "k": x["k"][-1:, :, -1:], "v": x["v"][-1:, :, -1:]}
    return part, out[-1:, rows, -group:]


# --- the plain formula in NumPy: one head at a time, which is faster and smaller than all heads at once ---


def causal_bias(q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray | None:
    """0 where visible, -inf where not. Made once and kept, so neither its time nor its memory counts."""
    if not causal:
        return None
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    hidden = np.triu(np.ones((seqlen_q, seqlen_k), dtype=bool), seqlen_k - seqlen_q + 1)
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def probabilities(q: np.ndarray, k: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """softmax(q k^T / sqrt(head_dim)) of one head, float32."""
    scores = (q * np.float32(1 / math.sqrt(q.shape[-1]))) @ k.T
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def naive_forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float32, copy=False) for x in (q, k, v))
    out = np.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            out[b, :, h] = probabilities(q[b, :, h], k[b, :, h // group], bias) @ v[b, :, h // group]
    return out.astype(dtype, copy=False)


def naive_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    dout, q, k, v = (x.astype(np.float32, copy=False) for x in (dout, q, k, v))
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            q1, k1, v1, dout1 = q[b, :, h], k[b, :, h // group], v[b, :, h // group], dout[b, :, h]
            p = probabilities(q1, k1, bias)
            dv[b, :, h // group] += p.T @ dout1
            ds = dout1 @ v1.T
            ds -= np.einsum("ij,ij->i", p, ds)[:, None]
            ds *= p
            ds *= scale
            dq[b, :, h] = ds @ k1
            dk[b, :, h // group] += ds.T @ q1
    return tuple(x.astype(dtype, copy=False) for x in (dq, dk, dv))


def naive_decode(x: Inputs) -> Call:
    def call() -> np.ndarray:
        q, k, v = x["q"], x["k"], x["v"]
        batch, _, nheads, head_dim = q.shape
        dtype, nheads_kv = q.dtype, k.shape[2]
        q, k, v = (a.astype(np.float32, copy=False) for a in (q, k, v))
        q = q.reshape(batch, nheads_kv, nheads // nheads_kv, head_dim) * np.float32(1 / math.sqrt(head_dim))
        scores = q @ k.transpose(0, 2, 3, 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = (scores @ v.transpose(0, 2, 1, 3)) / scores.sum(axis=-1, keepdims=True)
        return out.reshape(batch, 1, nheads, head_dim).astype(dtype, copy=False)

    return call


# --- torch ---


def torch_forward(causal: bool, x: Inputs) -> Call:
    import torch

    q, k, v = (torch_view(x[name]).transpose(1, 2) for name in "qkv")
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip

    def call() -> Any:
        with torch.no_grad():
            return attend()

    return call


def torch_backward(causal: bool, x: Inputs) -> Call:
    import torch

    q, k, v = (torch_view(x[name]).transpose(1, 2).requires_grad_() for name in "qkv")
    dout = torch_view(x["dout"]).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def torch_decode(x: Inputs) -> Call:
    import torch

    q, k, v = (torch_view(x[name]) for name in "qkv")
    batch, _, nheads, head_dim = q.shape
    q = q.reshape(batch, k.shape[2], nheads // k.shape[2], head_dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return call


if __name__ == "__main__":
    from perf.cli import run_as_script

    run_as_script("attention")
