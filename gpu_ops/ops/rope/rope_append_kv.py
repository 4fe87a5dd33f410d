"""Rotation of projected queries and keys and append to a key/value cache, in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import store
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.formats.rope_scaling import RopeScaling
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.rope.frequencies import RotaryArguments, Rotation
from gpu_ops.ops.rope.rope_append_kv_checks import (
    AppendCheck,
    CacheArguments,
    NormArguments,
    PlaceArguments,
    read_tokens,
)

__all__ = ["rope_append_kv"]


@op(cuda=True, kernels="rope.rope_append_kv", written=("k_cache", "v_cache", "k_scale", "v_scale"))
def rope_append_kv(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqused_k: Any = None,
    block_table: Any = None,
    slot_mapping: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    positions: Any = None,
    theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: RopeScaling | None = None,
    seqlen: int | None = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
) -> Bound:
    """QK-norm, rotary embedding and the cache write in one pass.

    Per token, :func:`rmsnorm` over each head (only with weights) and :func:`rope`, with one rounding at the end::

        out           = rope(rmsnorm(q, q_weight))
        k_cache[slot] = rope(rmsnorm(k, k_weight))
        v_cache[slot] = v

    Call :func:`attention_decode` on the caches next, with ``seqused_k + seqlen``.

    Parameters
    ----------
    q : array (batch, seqlen, nheads, head_dim)
        Queries of the new tokens. float16, bfloat16, float32 or float64, the same for all arrays. q, k and v may be
        views of one packed projection: ``qkv.reshape(batch, seqlen, -1, head_dim)[:, :, :nheads]``. With
        ``slot_mapping`` (total, nheads, head_dim): tokens of any sequences.
    k, v : arrays (batch, seqlen, nheads_kv, head_dim), or (total, nheads_kv, head_dim)
    k_cache, v_cache : arrays (batch, max_seqlen, nheads_kv, head_dim)
        Changed in place, only in the rows of the new tokens. With ``block_table`` or ``slot_mapping``: pages,
        (num_pages, page_size, nheads_kv, head_dim). They may not share memory with each other or any other array.
    seqused_k : int32 array (batch,)
        Number of keys of each sequence already in its cache: token i becomes key ``seqused_k[b] + i``.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries that no new token needs are
        ignored and may be -1. No two new tokens may share a row of a page.
    slot_mapping : int64 array (total,), instead of seqused_k
        Slot of each token: page * page_size + row. Negative: not stored (padding). No two tokens may share a slot.
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), optional
        Scales of quantized pages, changed in place with them. Pages are int8 or float8_e4m3fn, or uint8 with the bits
        of float8_e4m3fn for libraries without it. The scale of a head of a token is ``max|x| / largest``, with
        largest 127 or 448, and the page gets ``x / scale`` rounded to nearest even. (A scale per page would grow as
        tokens arrive, and the page would be rewritten.) Tokens are then float16, bfloat16 or float32.
    q_weight, k_weight : arrays (head_dim,), optional
        Weights of the norms of q's and k's heads; both or neither. With neither, heads are not normalised.
    eps, weight_offset
        Options of the norms, see :func:`rmsnorm`.
    positions : integers, optional
        Same as in :func:`rope`. Default: ``seqused_k[b] + i``; required with ``slot_mapping``.
    theta, rotary_dim, interleaved, scaling, seqlen
        Same as in :func:`rope`.
    out : array like q, optional
        Receives the rotated q. ``out=q`` works in place.
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory for calls that a CUDA graph captures; this op needs none.

    Returns
    -------
    Array like ``q``.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written. ``seqused_k``, ``block_table`` and ``slot_mapping`` in host memory are
        checked. On a GPU they are not, since that would wait for it: a token whose place is outside the cache is not
        stored, and of two tokens with the same place, either one is.

    Notes
    -----
    Reads and writes each element once. Separate norm, rotation and copies move q and k two or three times. Arithmetic
    is float32 (float64 for float64).

    The error of an element of a quantized page is at most ``scale / 2`` for int8, and the larger of ``|x| / 16`` and
    ``scale / 1024`` for float8_e4m3fn. A head of zeros, or whose scale would be below 1.2e-38, has scale 0. A head
    with a NaN or an infinity has scale NaN.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k = np.ones((1, 2, 4, 8), np.float32), np.ones((1, 2, 1, 8), np.float32)
    >>> k_cache, v_cache = np.zeros((2, 1, 16, 1, 8), np.float32)
    >>> used = np.array([5], np.int32)
    >>> gpu_ops.rope_append_kv(q, k, k, k_cache, v_cache, seqused_k=used).shape
    (1, 2, 4, 8)
    >>> v_cache[0, :, 0, 0]
    array([0., 0., 0., 0., 0., 1., 1., 0., 0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """
    call = Call("rope_append_kv", device, backend, workspace)
    place = PlaceArguments(seqused_k, block_table, slot_mapping, positions)
    norm = NormArguments(q_weight, k_weight, eps, weight_offset)
    rotary = RotaryArguments(theta, rotary_dim, interleaved, scaling, seqlen)
    cache = CacheArguments(k_cache, v_cache, k_scale, v_scale)
    return _bind(call, {"q": q, "k": k, "v": v}, cache, place, norm, rotary, out)


def _bind(
    call: Call,
    tokens: Mapping[str, Any],
    caches: CacheArguments,
    place: PlaceArguments,
    norm: NormArguments,
    rotary: RotaryArguments,
    out: Any,
) -> Bound:
    x = read_tokens(call, tokens, packed=place.packed)
    weights = norm.read(call)
    dtype = checks.float_dtype(call.op, **x, **weights)
    positions = place.read(call)
    cache = caches.update(call, x["q"].dtype, paged=place.paged)
    norm.check(call, dtype)
    frequencies = rotary.check(call, dtype)
    call.write("rotated q", x["q"].shape, x["q"].dtype, out, in_place="q")
    seqlen = 0 if place.packed else call.axes["seqlen"]

    rotation = frequencies.rotation

    def problem() -> str:
        into = f"{'pages' if place.paged else 'cache'} {cache.shape}"
        into += f" of {cache.dtype}" if cache.dtype != x["q"].dtype else ""
        qk_norm = "QK-norm, " if weights else ""
        return f"q {x['q'].shape}, k and v {x['k'].shape} {dtype} into {into}, {qk_norm}{rotation}"

    return call.bind(
        problem=problem,
        unsupported=_unsupported(dtype, x["q"].shape, rotation),
        check_values=AppendCheck(call.op, cache.shape[0], cache.shape[1], seqlen, frequencies).for_call(
            call, positions
        ),
    )


@uninterrupted  # it imports
def _unsupported(dtype: str, shape: tuple[int, ...], r: Rotation) -> dict[str, str]:
    from gpu_ops.kernels.rope.rope_append_kv import raw_cannot

    tokens, head_dim = math.prod(shape[:-2]), shape[-1]
    why = raw_cannot(dtype, head_dim, r.rotary_dim, tokens, interleaved=r.interleaved)
    return {"raw": why} if why else {}


@lowers("rope_append_kv", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.rope.rope_append_kv import rope_append_kv as reference

    packed = spec.get("slot_mapping") is not None
    tokens = ("q", "k", "v", "k_cache", "v_cache")
    scales = ("k_scale", "v_scale") if spec.get("k_scale") is not None else ()
    optional = ("seqused_k", "block_table", "slot_mapping", "q_weight", "k_weight", *scales)
    options = ("eps", "weight_offset", "theta", "rotary_dim", "interleaved", "scaling")
    fixed: dict[str, Any] = {name: spec[name] for name in options}

    def run(views: Mapping[str, Any]) -> None:
        arrays: list[Any] = [views[name] for name in tokens]
        keywords = fixed | {name: views.get(name) for name in optional}
        positions = views["rows"][0] if packed else views["rows"]
        updated = reference(*arrays, positions=positions, seqlen=views["seqlen"], **keywords)
        store(views, ("rotated q", "k_cache", "v_cache", *scales), updated)

    builder.call(run, "NumPy, float64")
