"""Attention's options, ``--grid options``: forward and backward of one shape with each option.

torch's SDPA gets options that it lacks as an ``attn_mask``, prepared ahead. It has no softcap at all: there torch
runs the eager formula that transformers falls back on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import gpu_ops
from gpu_ops.reference.attention import attention as reference_attention
from gpu_ops.reference.attention_backward import attention_backward as reference_backward
from gpu_ops.reference.precision import Precision
from perf import attention_peers as peers
from perf.attention_grids import Shape
from perf.case import DTYPES, Call, Case, Config, Inputs, backends, made_by, normal, torch_view

NHEADS, HEAD_DIM = 8, 64
SOFTCAP = 30.0
_SLOPES = (2.0 ** (-8.0 / NHEADS * np.arange(1, NHEADS + 1))).astype(np.float32)
WINDOWS, DOCUMENTS = 8, 16  # per sequence; seqlen is a multiple of both

Scores = Callable[[Inputs], np.ndarray]
"""The term added to the scores: float32, (seqlen, seqlen) or one per head; -inf hides a key."""


@dataclass(frozen=True)
class Option:
    name: str
    arguments: Callable[[Inputs], dict[str, Any]]
    """Options of ``gpu_ops.attention``."""
    added: Scores | None
    softcap: float = 0.0


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


OPTIONS = (
    Option("bias", lambda x: {"bias": x["bias"]}, lambda x: x["bias"].astype(np.float32)),
    Option("alibi", lambda x: {"alibi_slopes": _SLOPES}, _alibi),
    Option("softcap", lambda x: {"softcap": SOFTCAP}, None, SOFTCAP),
    Option("window", lambda x: {"window_size": (_window(x) - 1, 0)}, _window_mask),
    Option("documents", _document_blocks, _document_mask),
)


def cases(config: Config) -> list[Case]:
    found = []
    for dtype in config.dtypes or ("float32", "bfloat16"):
        for seqlen in config.seqlens or (2048,):
            shape = Shape(1, seqlen, seqlen, NHEADS, NHEADS, HEAD_DIM)
            for option in OPTIONS:
                found.append(case(option, shape, dtype, config.device, backward=False))
                if config.device == "cpu":
                    found.append(case(option, shape, dtype, config.device, backward=True))
    return found


def case(option: Option, shape: Shape, dtype: str, device: str, *, backward: bool) -> Case:
    def ours(x: Inputs, **how: str) -> Call:
        attend = functools.partial(gpu_ops.attention, x["q"], x["k"], x["v"], **option.arguments(x))
        if not backward:
            return functools.partial(attend, **how)
        out, lse = attend(return_lse=True)
        arrays = (x["dout"], x["q"], x["k"], x["v"], out, lse)
        return functools.partial(gpu_ops.attention_backward, *arrays, **option.arguments(x))

    def naive(x: Inputs) -> Call:
        arrays, added = (x["q"], x["k"], x["v"]), option.added(x) if option.added else None
        if backward:
            return functools.partial(peers.naive_backward, x["dout"], *arrays, added)
        return functools.partial(peers.naive_forward, *arrays, added, option.softcap)

    def reference(x: Inputs, precision: Precision) -> Any:
        arrays, rest = (x["q"], x["k"], x["v"]), option.arguments(x) | {"precision": precision}
        if not backward:
            return reference_attention(*arrays, **rest)
        results = reference_attention(*arrays, **rest, return_lse=True)
        return reference_backward(x["dout"], *arrays, *results, **rest)

    def data(rng: np.random.Generator, of: Shape) -> Inputs:
        array = (1, of.seqlen_q, NHEADS, HEAD_DIM)
        found = {name: normal(rng, array, DTYPES[dtype]) for name in ("q", "k", "v", "dout")}
        if option.name == "bias":
            found["bias"] = normal(rng, (NHEADS, of.seqlen_q, of.seqlen_k), DTYPES[dtype])
        return found

    small = Shape(1, 160, 160, NHEADS, NHEADS, HEAD_DIM)
    itemsize, torch = DTYPES[dtype].itemsize, peers.torch_backward if backward else peers.torch_forward
    return Case(
        op="attention",
        name=f"{'backward' if backward else 'forward'} {option.name}",
        shape=str(shape),
        dtype=dtype,
        flops=shape.flops(causal=False, backward=backward) * share_seen(option, shape),
        bytes=shape.nbytes(itemsize, backward=backward) + bias_bytes(option, shape, itemsize),
        **made_by(data, (shape,), (small,)),
        **backends(ours),
        # naive_backward has no tanh gradient; the other grids measure CuPy's formula
        naive=None if device == "cuda" or (backward and option.softcap) else naive,
        torch=functools.partial(torch, functools.partial(torch_attention, option)),
        reference=reference,
        backward=backward,
        note="torch: options as an attn_mask in q's dtype, prepared ahead; softcap eager",
    )


def bias_bytes(option: Option, shape: Shape, itemsize: int) -> float:
    return shape.nheads * shape.seqlen_q * shape.seqlen_k * itemsize if option.name == "bias" else 0.0


def share_seen(option: Option, shape: Shape) -> float:
    """The share of (query, key) pairs that the option leaves visible."""
    if option.name not in ("window", "documents") or option.added is None:
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
    assert option.added is not None
    mask = torch.from_numpy(option.added(x)).to(q.device, q.dtype)
    mask = mask[None] if mask.ndim == 3 else mask  # SDPA is slow with a 3-D mask
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
