"""Attention of a few new queries over a key/value cache, contiguous or paged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.call import Bound, Call, CheckValues
from gpu_ops.core.op import op
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention.lengths import longest_used, pages_exist, read_pages, read_used
from gpu_ops.ops.attention.options import (
    ScoreOptions,
    describe,
    forward_flops,
    raw_unsupported,
    read_inputs,
    read_options,
    reference_options,
    results_dtypes,
    store_results,
    takes,
    write_forward,
)

__all__ = ["attention_decode"]


@op(cuda=True, kernels="attention.forward")
@takes(ScoreOptions)
def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqused_k: Any,
    block_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: int = 0,
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[ScoreOptions],
) -> Bound:
    """:func:`attention` over the used part of a cache; the last query has the position of the last used key.

    Parameters
    ----------
    q : array (batch, seqlen_q, nheads, head_dim)
    k_cache, v_cache : arrays (batch, max_seqlen, nheads_kv, head_dim or head_dim_v)
        With ``block_table``: pages, (num_pages, page_size, nheads_kv, ...). Keys past the used part are
        never read.
    seqused_k : int32 array (batch,)
        Number of keys of each sequence that are in use.
    block_table : int32 array (batch, max_pages), optional
        Key j of sequence b is in page ``block_table[b, j // page_size]``. Entries past the last used key are
        ignored and may be -1.
    k_scale, v_scale : float32 arrays (num_pages, page_size, nheads_kv), optional
        Scales of quantized pages: int8, float8_e4m3fn, or uint8 with the bits of e4m3 for libraries without it.
        Key j of head h is ``k_cache[page, row, h] * k_scale[page, row, h]``, as :func:`rope_append_kv` writes it.
        The kernels read the quantized pages directly. q is then float16, bfloat16 or float32.
        With backend "raw" and 16-bit q, values are rounded to q's dtype, and are infinite beyond its range.
    num_splits : int
        Number of parts that the keys are split into, so that every SM or thread has work; 0: chosen automatically.
    **options, return_lse, out_dtype, lse_dtype, out
        Same as in :func:`attention`, with seqlen_k = seqused_k[b].
    device, backend : str, optional
        Device and backend that run the call; by default chosen from the arrays: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    out : array (batch, seqlen_q, nheads, head_dim_v)
    lse : array (batch, nheads, seqlen_q), float32 (float64 for float64) or ``lse_dtype``, only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Raised before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 1, 8, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 512, 2, 64), dtype=np.float32)
    >>> gpu_ops.attention_decode(q, k, v, seqused_k=np.array([300, 17], np.int32)).shape
    (2, 1, 8, 64)
    """
    call = Call("attention_decode", device, backend, workspace)
    rows = "batch max_seqlen" if block_table is None else "num_pages page_size"
    dtype = read_inputs(
        call,
        (k_scale, v_scale),
        paged=block_table is not None,
        q=(q, "batch seqlen_q nheads head_dim"),
        k_cache=(k_cache, f"{rows} nheads_kv head_dim"),
        v_cache=(v_cache, f"{rows} nheads_kv head_dim_v"),
    )
    seqlen_q = call.axes["seqlen_q"]
    seqlen_k, check_values = _read_lengths(call, seqused_k, block_table)
    words = read_options(call, dtype, **options)
    call.option(
        layout="bshd",
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        num_splits=checks.integer(call.op, "num_splits", num_splits, low=0, high=1024),
    )
    return_lse = checks.flag(call.op, "return_lse", return_lse)
    batch, heads = call.axes["batch"], call.axes["nheads"]
    shape, lse_shape = (batch, seqlen_q, heads, call.axes["head_dim_v"]), (batch, heads, seqlen_q)
    write_forward(call, dtype, (shape, lse_shape), out, return_lse, out_dtype, lse_dtype)
    return call.bind(
        problem=lambda: describe(call, dtype, (seqlen_q, seqlen_k), words),
        unsupported=raw_unsupported,
        check_values=check_values,
        flops=forward_flops(call, batch * seqlen_q * seqlen_k),
    )


def _read_lengths(call: Call, seqused_k: Any, block_table: Any) -> tuple[int, CheckValues | None]:
    """Read the lengths; return the number of keys of the longest sequence, and the hook that checks every call.

    Lengths on a GPU are not checked, since that would wait for it: the cache's capacity is assumed.
    """
    axes = call.axes
    read_used(call, seqused_k)
    if block_table is None:
        num_pages, page_size, capacity = axes["batch"], axes["max_seqlen"], axes["max_seqlen"]
    else:
        num_pages, page_size, capacity = read_pages(call, block_table)
    if call.on_cuda:
        return capacity, None
    check_values = _check_values(call.op, axes["seqlen_q"], num_pages, page_size, capacity)
    longest: int = check_values(dict(call.views), "reference")[0]["max_seqlen_k"]
    return longest, check_values


def _check_values(op: str, seqlen_q: int, num_pages: int, page_size: int, capacity: int) -> CheckValues:
    def check_values(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        used, table = views["seqused_k"], views.get("block_table")
        if backend == "cpu":
            rows = _sequences(seqlen_q, num_pages, page_size)(used, table)
            _, longest, sound, _ = rows[-1].tolist()
            if sound:
                return {"max_seqlen_k": longest}, {"sequences": rows[:-1]}
        longest = longest_used(op, used, capacity)
        if table is not None:
            pages_exist(op, table, used, num_pages, page_size)
        return {"max_seqlen_k": longest}, {}

    return check_values


@functools.lru_cache(256)
@uninterrupted
def _sequences(seqlen_q: int, num_pages: int, page_size: int) -> Callable[[Array, Array | None], Array]:
    from gpu_ops.kernels.common.cpu.lengths import cached

    return cached(seqlen_q=seqlen_q, new=0, page_size=page_size, num_pages=num_pages)


@lowers("attention_decode", "reference")
def _reference(spec: Spec, builder: Builder) -> None:
    from gpu_ops.reference.attention.forward import attention_decode

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("q", "k_cache", "v_cache")]
        results = attention_decode(
            *arrays,
            seqused_k=views["seqused_k"],
            block_table=views.get("block_table"),
            return_lse=True,
            **{**reference_options(spec, views), **results_dtypes(views)},
        )
        store_results(views, results)

    builder.call(run, "NumPy, float64")
