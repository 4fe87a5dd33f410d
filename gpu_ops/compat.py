"""Functions with the names, arguments and semantics of other libraries, over the ops."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from gpu_ops.core.arrays import host_view, library_of, on_cuda
from gpu_ops.core.declared import publish
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.ops.attention.dense import attention

__all__ = ["scaled_dot_product_attention"]

_NAME = "scaled_dot_product_attention"
_NAMESPACES = {name: name for name in ("numpy", "cupy", "torch")} | dict.fromkeys(
    ("jax", "jaxlib"), "jax.numpy"
)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Any:
    """Attention with the arguments and semantics of ``torch.nn.functional.scaled_dot_product_attention``.

    ``softmax(scale * query key^T + mask) value``, with the heads before the sequence, by :func:`gpu_ops.attention`.

    Parameters
    ----------
    query : array (..., nheads, seqlen_q, head_dim)
        At least 2 axes. float16, bfloat16, float32 or float64; NumPy, CuPy, torch or JAX.
    key : array (..., nheads_kv, seqlen_k, head_dim)
        The axes before the heads broadcast. A number of heads other than query's has to be 1, without
        ``enable_gqa``.
    value : array (..., nheads_kv, seqlen_k, head_dim_v)
    attn_mask : array broadcastable to (..., nheads, seqlen_q, seqlen_k), optional
        bool: True takes part. query's dtype or float32: added to the scores.
    dropout_p : float
        As in torch, applied wherever it is above 0; it must be below 1 and needs ``seed``.
    is_causal : bool
        Query i sees keys up to i (top-left aligned; ``attention(causal=True)`` aligns the last query with the last
        key). Not together with ``attn_mask``.
    scale : float, default head_dim ** -0.5
    enable_gqa : bool
        nheads may be a multiple of nheads_kv.
    seed : int or array of one uint64 or int64
        With dropout_p: which weights are 0, as in :func:`gpu_ops.attention`. torch takes them from a generator of
        the process; here a call has no hidden state. Not an argument of torch.
    device, backend : str, optional
        As in :func:`gpu_ops.attention`.

    Returns
    -------
    out : array (..., nheads, seqlen_q, head_dim_v), query's dtype and library

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is computed.

    Notes
    -----
    A query that sees no key gives 0; torch gives 0 or NaN there, depending on its version and backend. There is no
    autograd: detach tensors that require gradients, and call :func:`gpu_ops.attention_backward` with
    ``layout="bhsd"``. A bool mask becomes a float32 one of its shape in memory. Axes before the heads, if there are
    several, are merged into one, which copies where strides require it.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 16, 8), np.float32)
    >>> gpu_ops.compat.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (1, 4, 16, 8)
    """
    arrays = {"query": query, "key": key, "value": value}
    shapes = {name: _shape(name, x) for name, x in arrays.items()}
    heads_q, heads_k, heads_v = (s[-3] if len(s) > 2 else 1 for s in shapes.values())
    try:
        batch = np.broadcast_shapes(*(s[:-3] for s in shapes.values()))
        (heads_kv,) = np.broadcast_shapes((heads_k,), (heads_v,))
        (heads,) = (heads_q,) if enable_gqa else np.broadcast_shapes((heads_q,), (heads_kv,))
    except ValueError:
        sizes = ", ".join(f"{name} {s}" for name, s in shapes.items())
        hint = (
            "" if enable_gqa else "; enable_gqa=True lets several heads of query share one of key and value"
        )
        raise ShapeError(f"{_NAME}: the axes before the last two do not broadcast: {sizes}{hint}") from None
    bias = None
    if attn_mask is not None:
        if is_causal:
            raise OptionError(f"{_NAME}: is_causal=True excludes attn_mask; make the causal mask part of it")
        bias = _bias(attn_mask, query, (*batch, heads, shapes["query"][-2], shapes["key"][-2]))
    out = attention(
        *(_merged(x, batch, n) for x, n in zip(arrays.values(), (heads, heads_kv, heads_kv), strict=True)),
        bias=bias,
        causal=is_causal,
        q_start=0 if is_causal else None,  # aligned to the top left
        dropout_p=dropout_p,
        seed=seed,
        softmax_scale=scale,
        layout="bhsd",
        device=device,
        backend=backend,
    )
    leading = (*batch, heads) if any(len(s) > 2 for s in shapes.values()) else ()
    return out.reshape(*leading, *out.shape[-2:])


def _shape(name: str, x: Any) -> tuple[int, ...]:
    """Shape of an array of a library whose functions can reshape it."""
    if not on_cuda(x):
        host_view(_NAME, name, x)  # refuses what is no array, or more than its bits
    if library_of(x, _NAMESPACES) is None:
        raise DTypeError(f"{_NAME}: {name} is {type(x).__name__}; pass an array of NumPy, CuPy, torch or JAX")
    shape = tuple(x.shape)
    if len(shape) < 2 and name != "attn_mask":
        raise ShapeError(f"{_NAME}: {name} has shape {shape}, expected (..., heads, seqlen, head_dim)")
    return shape


def _merged(x: Any, batch: tuple[int, ...], heads: int) -> Any:
    """The array with 4 axes, broadcast to these axes before the last two; a view where the strides allow."""
    view = _library(x).broadcast_to(x, (*batch, heads, *x.shape[-2:]))
    return view.reshape(math.prod(batch), heads, *x.shape[-2:])


def _bias(mask: Any, query: Any, scores: tuple[int, ...]) -> Any:
    """The mask as numbers that are added to the scores, with at most 4 axes. ``scores``: their shape."""
    shape, dtype = _shape("attn_mask", mask), _dtype(mask)
    added = sorted({_dtype(query), "float32"})
    if dtype not in ("bool", *added):
        raise DTypeError(
            f"{_NAME}: attn_mask is {dtype}; pass bool (True: takes part) or {' or '.join(added)}"
        )
    try:
        fits = np.broadcast_shapes(shape, scores) == scores
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"{_NAME}: attn_mask has shape {shape}, not broadcastable to {scores}")
    if dtype == "bool":
        library = _library(mask)
        mask = library.asarray(library.where(mask, 0.0, -math.inf), dtype=library.float32)
    return mask if len(shape) <= 3 else _merged(mask, scores[:-3], shape[-3])


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _library(x: Any) -> Any:
    """The library's namespace, which has NumPy's functions."""
    return sys.modules[str(library_of(x, _NAMESPACES))]


publish(globals())
