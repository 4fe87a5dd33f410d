"""Attention's contenders: the plain formula in NumPy and in CuPy, and torch's SDPA with each backend."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from perf.build import to_float32, torch_view
from perf.case import Call, Inputs, Prepare

# ---- the plain formula in NumPy: one head at a time, which is faster and smaller than all heads at once ----


def causal_bias(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Bias: 0 where visible, -inf elsewhere. Prepared in advance: neither its time nor its memory counts."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    hidden = np.triu(np.ones((seqlen_q, seqlen_k), dtype=bool), seqlen_k - seqlen_q + 1)
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def probabilities(q: np.ndarray, k: np.ndarray, bias: np.ndarray | None, softcap: float = 0.0) -> np.ndarray:
    """softmax(q k^T / sqrt(head_dim)) of one head, float32."""
    scores = (q * np.float32(1 / math.sqrt(q.shape[-1]))) @ k.T
    if softcap:
        scores /= np.float32(softcap)
        np.tanh(scores, out=scores)
        scores *= np.float32(softcap)
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def naive_forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None, softcap: float = 0.0
) -> np.ndarray:
    """Plain formula, one head at a time. ``bias``: (seqlen_q, seqlen_k), or (nheads, seqlen_q, seqlen_k)."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = to_float32(q, k, v)
    out = np.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            p = probabilities(q[b, :, h], k[b, :, h // group], _of_head(bias, h), softcap)
            out[b, :, h] = p @ v[b, :, h // group]
    return out.astype(dtype, copy=False)


def _of_head(bias: np.ndarray | None, h: int) -> np.ndarray | None:
    return bias if bias is None or bias.ndim == 2 else bias[h]


def naive_backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    dout, q, k, v = to_float32(dout, q, k, v)
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            q1, k1, v1, dout1 = q[b, :, h], k[b, :, h // group], v[b, :, h // group], dout[b, :, h]
            p = probabilities(q1, k1, _of_head(bias, h))
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
        q, k, v = to_float32(x["q"], x["k"], x["v"])
        batch, _, nheads, head_dim = q.shape
        nheads_kv = k.shape[2]
        q = q.reshape(batch, nheads_kv, nheads // nheads_kv, head_dim) * np.float32(1 / math.sqrt(head_dim))
        scores = q @ k.transpose(0, 2, 3, 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = (scores @ v.transpose(0, 2, 1, 3)) / scores.sum(axis=-1, keepdims=True)
        return out.reshape(batch, 1, nheads, head_dim).astype(x["q"].dtype, copy=False)

    return call


# ---- the same in CuPy: one matmul per head in the arrays' dtype, because CuPy computes 16-bit batches in float32 ---


def device_forward(causal: bool, x: Inputs) -> Call:
    """One head at a time, with all scores of that head in memory."""
    q, k, v = (x[name] for name in "qkv")
    batch, seqlen_q, nheads, head_dim = q.shape
    shape = (batch, seqlen_q, k.shape[2], nheads // k.shape[2], head_dim)
    parts = _contiguous(q.reshape(shape).transpose(0, 2, 3, 1, 4))
    heads = functools.partial(_heads, parts, _by_heads(k), _by_heads(v), _device_bias(q, k, causal))
    return lambda: heads().transpose(0, 3, 1, 2, 4).reshape(q.shape)


def device_backward(causal: bool, x: Inputs) -> Call:
    """dq, dk, dv, one head at a time, with the probabilities of that head and their gradients in memory."""
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    batch, seqlen_q, nheads, head_dim = q.shape
    shape = (batch, seqlen_q, k.shape[2], nheads // k.shape[2], head_dim)
    q_, dout_ = (_contiguous(y.reshape(shape).transpose(0, 2, 3, 1, 4)) for y in (q, dout))
    k_, v_, bias, dtype = _by_heads(k), _by_heads(v), _device_bias(q, k, causal), q.dtype
    scale = np.float32(1 / math.sqrt(head_dim))

    def call() -> tuple[Any, ...]:
        dq = np.empty_like(q_)
        dk, dv = np.zeros_like(k_, dtype=np.float32), np.zeros_like(v_, dtype=np.float32)
        for b, h, part in np.ndindex(*q_.shape[:3]):
            q1, k1, dout1 = q_[b, h, part], k_[b, h], dout_[b, h, part]
            p = _device_probabilities(q1, k1, bias)
            ds = (dout1 @ v_[b, h].T).astype(np.float32)
            ds -= (p * ds).sum(axis=-1, keepdims=True)
            ds *= p
            ds *= scale
            ds, p = ds.astype(dtype, copy=False), p.astype(dtype, copy=False)
            dq[b, h, part] = ds @ k1
            dk[b, h] += ds.T @ q1
            dv[b, h] += p.T @ dout1
        dk, dv = (y.astype(dtype, copy=False).transpose(0, 2, 1, 3) for y in (dk, dv))
        return dq.transpose(0, 3, 1, 2, 4).reshape(q.shape), dk, dv

    return call


def device_decode(x: Inputs) -> Call:
    """The query heads of a group are the rows of one matmul."""
    q, k, v = (x[name] for name in "qkv")
    batch, _, nheads, head_dim = q.shape
    parts = _contiguous(q.reshape(batch, k.shape[2], 1, nheads // k.shape[2], head_dim))
    heads = functools.partial(_heads, parts, _by_heads(k), _by_heads(v), None)
    return lambda: heads().reshape(q.shape)


def _heads(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Attention of q (batch, nheads_kv, parts, rows, head_dim) to k, v (batch, nheads_kv, seqlen_k, head_dim)."""
    out = np.empty_like(q)
    for b, h, part in np.ndindex(*q.shape[:3]):
        p = _device_probabilities(q[b, h, part], k[b, h], bias)
        out[b, h, part] = p.astype(q.dtype, copy=False) @ v[b, h]
    return out


def _device_probabilities(q: Any, k: Any, bias: Any) -> Any:
    """Probabilities of one head: a product in the arrays' dtype, softmax in float32."""
    scores = (q @ k.T).astype(np.float32)
    scores *= np.float32(1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _by_heads(x: Any) -> Any:
    """Heads before rows, copied in advance: a matmul on strided rows would copy them in every call."""
    return _contiguous(x.transpose(0, 2, 1, 3))


def _contiguous(x: Any) -> Any:
    return _module(x).ascontiguousarray(x)


def _device_bias(q: Any, k: Any, causal: bool) -> Any:
    """:func:`causal_bias` on the device of the arrays."""
    if not causal:
        return None
    xp, shape = _module(q), (q.shape[1], k.shape[1])
    return xp.triu(xp.full(shape, -np.inf, np.float32), shape[1] - shape[0] + 1)


def _module(x: Any) -> Any:
    """numpy or cupy."""
    return sys.modules[type(x).__module__.partition(".")[0]]


# ---- torch -------------------------------------------------------------------------------------------------


Attend = Callable[..., Any]
"""``attend(q, k, v)`` of torch tensors (batch, nheads, seqlen, head_dim)."""


def torch_sdpa(causal: bool, x: Inputs) -> Attend:
    import torch

    grouped = x["q"].shape[2] != x["k"].shape[2]
    return functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped
    )


def torch_forward(attention: Callable[[Inputs], Attend], x: Inputs) -> Call:
    q, k, v = (torch_view(x[name]).transpose(1, 2) for name in "qkv")
    return _without_gradient(functools.partial(attention(x), q, k, v))


def torch_backward(attention: Callable[[Inputs], Attend], x: Inputs) -> Call:
    import torch

    q, k, v = (torch_view(x[name]).transpose(1, 2).requires_grad_() for name in "qkv")
    dout = torch_view(x["dout"]).transpose(1, 2)
    out = attention(x)(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def torch_decode(x: Inputs) -> Call:
    import torch

    q, k, v = (torch_view(x[name]) for name in "qkv")
    batch, _, nheads, head_dim = q.shape
    q = q.reshape(batch, k.shape[2], nheads // k.shape[2], head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return _without_gradient(functools.partial(attend, q, k.transpose(1, 2), v.transpose(1, 2)))


def _without_gradient(call: Call) -> Call:
    import torch

    return torch.no_grad()(call)


SDPA_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def sdpa_peers(prepare: Prepare) -> dict[str, Prepare]:
    """``prepare`` with each backend of torch's SDPA forced; a backend that cannot run the problem raises."""
    return {
        f"torch {name}": functools.partial(_with_backend, member, prepare)
        for name, member in SDPA_BACKENDS.items()
    }


def _with_backend(member: str, prepare: Prepare, x: Inputs) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, member)
    with sdpa_kernel(backend):  # the forward pass decides which backward runs
        call = prepare(x)

    def limited() -> Any:
        with sdpa_kernel(backend):
            return call()

    return limited
