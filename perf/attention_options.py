"""Attention's options, and ``--grid options``: forward and backward of one shape with each option.

torch's SDPA gets options that it lacks as an ``attn_mask``, prepared in advance. It has no softcap, so for softcap
torch runs the eager formula that transformers falls back on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.attention.backward import attention_backward
from gpu_ops.reference.attention.forward import attention
from perf import attention_peers as peers
from perf.attention_grids import Shape
from perf.build import made_by, normal, torch_view
from perf.case import DTYPES, Call, Case, Inputs, RunOptions

OURS = (gpu_ops.attention, gpu_ops.attention_backward)
REFERENCE = (attention, attention_backward)
NHEADS, HEAD_DIM = 8, 64
SOFTCAP = 30.0
_SLOPES = (2.0 ** (-8.0 / NHEADS * np.arange(1, NHEADS + 1))).astype(np.float32)
WINDOWS, DOCUMENTS = 8, 16  # per sequence; seqlen is a multiple of both

Scores = Callable[[Inputs], np.ndarray | None]
"""The term added to the scores, if any: float32, (seqlen, seqlen) or one per head; -inf hides a key."""


@dataclass(frozen=True)
class Option:
    name: str
    arguments: Callable[[Inputs], dict[str, Any]]
    """Options of ``gpu_ops.attention``."""
    added: Scores = lambda x: None
    softcap: float = 0.0


PLAIN = Option("", lambda x: {})
CAUSAL = Option("causal", lambda x: {"causal": True}, lambda x: peers.causal_bias(x["q"], x["k"]))


def _seqlen(x: Inputs) -> int:
    return int(x["q"].shape[1])


def _distances(x: Inputs) -> np.ndarray:
    """(seqlen, seqlen): query position minus key position."""
    positions = np.arange(_seqlen(x))
    return positions[:, None] - positions


def _hide(hidden: np.ndarray) -> np.ndarray:
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _documents(x: Inputs) -> np.ndarray:
    return np.arange(_seqlen(x)) * DOCUMENTS // _seqlen(x)


def _document_mask(x: Inputs) -> np.ndarray:
    ids = _documents(x)
    return _hide((ids[:, None] != ids) | (_distances(x) < 0))


def _document_blocks(x: Inputs) -> dict[str, Any]:
    size = _seqlen(x) // DOCUMENTS
    mask = gpu_ops.BlockMask.document(_documents(x), block_q=size, block_k=size)
    return {"block_mask": mask, "causal": True}


def _window(x: Inputs) -> int:
    return _seqlen(x) // WINDOWS


def _window_mask(x: Inputs) -> np.ndarray:
    distances = _distances(x)
    return _hide((distances < 0) | (distances >= _window(x)))


def _alibi(x: Inputs) -> np.ndarray:
    return -_SLOPES[:, None, None] * np.abs(_distances(x)).astype(np.float32)


# without peers: they would drop other weights
DROPOUT = Option("dropout", lambda x: {"dropout_p": 0.1, "seed": 0})

OPTIONS = (
    Option("bias", lambda x: {"bias": x["bias"]}, lambda x: x["bias"].astype(np.float32)),
    Option("alibi", lambda x: {"alibi_slopes": _SLOPES}, _alibi),
    Option("softcap", lambda x: {"softcap": SOFTCAP}, softcap=SOFTCAP),
    Option("window", lambda x: {"window_size": (_window(x) - 1, 0)}, _window_mask),
    Option("documents", _document_blocks, _document_mask),
    DROPOUT,
)


def cases(config: RunOptions) -> list[Case]:
    result = []
    small = Shape(1, 160, 160, NHEADS, NHEADS, HEAD_DIM)
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for seqlen in config.seqlens or (2048,):
            shape = Shape(1, seqlen, seqlen, NHEADS, NHEADS, HEAD_DIM)
            for option in OPTIONS:
                result.append(with_torch(case(option, shape, small, dtype), option, config.device))
                backward = case(option, shape, small, dtype, backward=True)
                result.append(with_torch(backward, option, config.device))
    return result


def case(option: Option, shape: Shape, small: Shape, dtype: str, *, backward: bool = False) -> Case:
    """Case with ours, naive and the reference; the caller adds torch."""

    def bind(functions: Any, x: Inputs, **how: Any) -> Call:
        arrays, options = (x["q"], x["k"], x["v"]), option.arguments(x) | how
        if not backward:
            return functools.partial(functions[0], *arrays, **options)
        out_lse = functions[0](*arrays, **options, return_lse=True)
        return functools.partial(functions[1], x["dout"], *arrays, *out_lse, **options)

    def naive(x: Inputs) -> Call:
        arrays, added = (x["q"], x["k"], x["v"]), option.added(x)
        if backward:
            return functools.partial(peers.naive_backward, x["dout"], *arrays, added)
        return functools.partial(peers.naive_forward, *arrays, added, option.softcap)

    itemsize, ours = DTYPES[dtype].itemsize, functools.partial(bind, OURS)
    more = ("bias",) * (option.name == "bias") + ("dout",) * backward
    flops = shape.flops(causal=option is CAUSAL, backward=backward)
    bias_bytes = shape.nheads * shape.seqlen_q * shape.seqlen_k * itemsize if "bias" in more else 0
    return Case(
        op="attention",
        name=" ".join(filter(None, ("backward" if backward else "forward", option.name))),
        shape=str(shape),
        dtype=dtype,
        flops=flops * share_seen(option, shape),
        bytes=shape.nbytes(itemsize, backward=backward) + bias_bytes,
        **made_by(data, (shape,), (small,), DTYPES[dtype], more),
        ours=ours,
        numba=functools.partial(ours, backend="numba"),
        naive=naive,
        reference=lambda x, precision: bind(REFERENCE, x, precision=precision)(),
        backward=backward,
    )


def with_torch(one: Case, option: Option, device: str) -> Case:
    if option is DROPOUT:
        return replace(one, naive=None)
    torch = peers.torch_backward if one.backward else peers.torch_forward
    return replace(
        one,
        # naive_backward has no tanh gradient; the other grids measure CuPy's formula
        naive=None if device == "cuda" or (one.backward and option.softcap) else one.naive,
        torch=functools.partial(torch, functools.partial(torch_attention, option)),
        note="torch: options as an attn_mask in q's dtype, prepared ahead; softcap eager",
    )


def data(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any], more: tuple[str, ...] = ()) -> Inputs:
    """q, k, v and ``more``: dout, bias, seqused_k."""
    query = (shape.batch, shape.seqlen_q, shape.nheads, shape.head_dim)
    keys = (shape.batch, shape.seqlen_k, shape.nheads_kv, shape.head_dim)
    inputs = {"q": normal(rng, query, dtype), "k": normal(rng, keys, dtype), "v": normal(rng, keys, dtype)}
    if "dout" in more:
        inputs["dout"] = normal(rng, query, dtype)
    if "bias" in more:
        inputs["bias"] = normal(rng, (shape.nheads, shape.seqlen_q, shape.seqlen_k), dtype)
    if "seqused_k" in more:
        inputs["seqused_k"] = np.full(shape.batch, shape.seqlen_k, dtype=np.int32)
    return inputs


def share_seen(option: Option, shape: Shape) -> float:
    """Share of (query, key) pairs that a window or documents leave visible."""
    if option.name not in ("window", "documents"):
        return 1.0
    x = {"q": np.broadcast_to(np.float32(0), (1, shape.seqlen_q, 1, 1))}
    return float(np.isfinite(option.added(x)).mean())


def torch_attention(option: Option, x: Inputs) -> peers.Attend:
    import torch

    q = torch_view(x["q"])
    if option.softcap:

        def eager(q: Any, k: Any, v: Any) -> Any:
            scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1]))
            return torch.softmax(torch.tanh(scores / option.softcap) * option.softcap, -1) @ v

        return eager
    mask = torch.from_numpy(option.added(x)).to(q.device, q.dtype)
    mask = mask[None] if mask.ndim == 3 else mask  # SDPA is slow with a 3-D mask
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
