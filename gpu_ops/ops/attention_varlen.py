"""Attention within sequences of different lengths, laid end to end without padding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array
from gpu_ops.core.bound import Look
from gpu_ops.core.call import Bound, Call
from gpu_ops.core.op import op
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.kernels.compiler.uninterrupted import uninterrupted
from gpu_ops.kernels.program import Builder, Spec, lowers
from gpu_ops.ops.attention_gradients import read_results, store_gradients, write_gradients
from gpu_ops.ops.attention_options import (
    INT32,
    ScoreOptions,
    backward_flops,
    backward_raw_unsupported,
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

__all__ = ["attention_varlen", "attention_varlen_backward"]


@op(cuda=True, kernels="attention")
@takes(ScoreOptions)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    lse_dtype: Any = None,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[ScoreOptions],
) -> Bound:
    """:func:`attention` of each sequence of a packed batch.

    Parameters
    ----------
    q : array (total_q, nheads, head_dim)
        Sequence b is ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``.
    k, v : arrays (total_k, nheads_kv, head_dim or head_dim_v)
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,)
        Start at 0, never fall, end at the total. Empty sequences are fine.
    max_seqlen_q, max_seqlen_k : int, optional
        The longest sequence, or a bound; a smaller value than the true one is an error. Give it with
        arrays on a GPU: their lengths are taken on trust, since looking would wait for the GPU, and
        without a bound blocks are launched for sequences as long as the total.
    **options, return_lse, out_dtype, lse_dtype, out
        As in :func:`attention`; causal is bottom-right aligned within each sequence.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    out : array (total_q, nheads, head_dim_v)
    lse : array (nheads, total_q), float32 (float64 for float64) or ``lse_dtype``, only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8), dtype=np.float32)
    >>> lengths = np.array([0, 3, 10], np.int32)  # two sequences, of 3 and 7 tokens
    >>> gpu_ops.attention_varlen(q, k, v, lengths, lengths, causal=True).shape
    (10, 2, 8)
    """
    call = Call("attention_varlen", device, backend, workspace)
    dtype = _read_inputs(call, q, k, v)
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    seqlens, look = _read_lengths(call, starts, {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
    words = read_options(call, dtype, **options)
    return_lse, shapes = checks.flag(call.op, "return_lse", return_lse), _result_shapes(call)
    write_forward(call, dtype, shapes, out, return_lse, out_dtype, lse_dtype)
    return call.bind(
        problem=lambda: describe(call, dtype, seqlens, words),
        unsupported=raw_unsupported,
        look=look,
        flops=forward_flops(
            call, call.axes["total_q"] * seqlens[1] * (0.5 if options.get("causal") else 1.0)
        ),
    )


@op(cuda=True, kernels="attention_backward")
@takes(ScoreOptions)
def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    delta: Any = None,
    deterministic: bool = False,
    return_extra: bool = False,
    grads: Any = None,
    accumulate: bool = False,
    device: str | None = None,
    backend: str | None = None,
    workspace: Any = None,
    **options: Unpack[ScoreOptions],
) -> Bound:
    """Gradients of :func:`attention_varlen`; see :func:`attention_backward`.

    Parameters
    ----------
    dout, out : arrays (total_q, nheads, head_dim_v)
    lse : array (nheads, total_q)
        As returned by ``attention_varlen(..., return_lse=True)``.
    q, k, v, cu_seqlens_q, cu_seqlens_k, and every option
        As given to :func:`attention_varlen`.
    delta, deterministic, return_extra, grads, accumulate
        As in :func:`attention_backward`.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.
    workspace : uint8 array, optional
        Scratch memory on the device, for calls that a CUDA graph captures: see :func:`workspace_size`.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v
    extra : dict with the gradient of ``sinks`` when given, only with ``return_extra``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 2, 8))
    >>> cu = np.array([0, 3, 10], np.int32)
    >>> out, lse = gpu_ops.attention_varlen(q, k, v, cu, cu, return_lse=True)
    >>> dq, dk, dv = gpu_ops.attention_varlen_backward(np.ones_like(out), q, k, v, out, lse, cu, cu)
    >>> dv.shape
    (10, 2, 8)
    """
    call = Call("attention_varlen_backward", device, backend, workspace)
    call.read("dout", dout)
    dtype = _read_inputs(call, q, k, v)
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    seqlens, look = _read_lengths(call, starts, {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
    words = read_options(call, dtype, **options)
    read_results(call, dtype, out, lse, delta, *_result_shapes(call))
    call.option(deterministic=checks.flag(call.op, "deterministic", deterministic))
    finish = write_gradients(call, dtype, grads, accumulate=accumulate, return_extra=return_extra)
    return call.bind(
        problem=lambda: describe(call, dtype, seqlens, words),
        unsupported=backward_raw_unsupported,
        look=look,
        finish=finish,
        flops=backward_flops(
            call, call.axes["total_q"] * seqlens[1] * (0.5 if options.get("causal") else 1.0)
        ),
    )


def _read_inputs(call: Call, q: Any, k: Any, v: Any) -> str:
    call.option(layout="thd")
    return read_inputs(
        call,
        q=(q, "total_q nheads head_dim"),
        k=(k, "total_k nheads_kv head_dim"),
        v=(v, "total_k nheads_kv head_dim_v"),
    )


def _result_shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of out and of lse."""
    total, heads = call.axes["total_q"], call.axes["nheads"]
    return (total, heads, call.axes["head_dim_v"]), (heads, total)


def _read_lengths(
    call: Call, starts: dict[str, Any], given: dict[str, int | None]
) -> tuple[tuple[int, int], Look | None]:
    """The lengths of the longest sequences, and what looks at them in every call.

    Those on a GPU are taken on trust, since looking would wait for it: the caller's bounds, or the totals.
    """
    op, totals = call.op, (call.axes["total_q"], call.axes["total_k"])
    longest = [_read_starts(call, *item, total) for item, total in zip(starts.items(), totals, strict=True)]
    batches = [call.views[name].size - 1 for name in starts]
    if batches[0] != batches[1]:
        raise ShapeError(
            f"{op}: cu_seqlens_q and cu_seqlens_k describe {batches[0]} and {batches[1]} "
            "sequences; both need batch + 1 entries"
        )
    bounds = [None if n is None else checks.integer(op, name, n, low=0) for name, n in given.items()]
    if call.on_cuda:
        longest = [total if n is None else min(n, total) for n, total in zip(bounds, totals, strict=True)]
    else:
        _check_bounds(op, bounds, longest)
    call.axes.set("batch", batches[0], "cu_seqlens_q")
    call.option(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    return (longest[0], longest[1]), None if call.on_cuda else _look(op, totals, bounds)


def _look(op: str, totals: tuple[int, int], bounds: list[int | None]) -> Look:
    def look(views: dict[str, Any], backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        starts_q, starts_k = views["cu_seqlens_q"], views["cu_seqlens_k"]
        sound, found = False, {}
        if backend == "cpu":
            table = _table(*totals)(starts_q, starts_k)
            *longest, sound, _ = table[-1].tolist()
            found["sequences"] = table[:-1]
        if not sound:  # says where, on the CPU
            longest = [
                _longest(op, "cu_seqlens_q", starts_q, totals[0]),
                _longest(op, "cu_seqlens_k", starts_k, totals[1]),
            ]
        _check_bounds(op, bounds, longest)
        return {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}, found

    return look


@functools.lru_cache(256)
@uninterrupted
def _table(total_q: int, total_k: int) -> Callable[[Array, Array], Array]:
    from gpu_ops.kernels.numba_cpu.lengths import packed

    return packed(total_q, total_k)


def _check_bounds(op: str, bounds: list[int | None], longest: list[int]) -> None:
    for name, bound, n in zip(("max_seqlen_q", "max_seqlen_k"), bounds, longest, strict=True):
        if bound is not None and bound < n:
            raise OptionError(
                f"{op}: {name}={bound}, but the longest sequence has {n} tokens; omit it or raise it"
            )


def _read_starts(call: Call, name: str, x: Any, total: int) -> int:
    """Starts of sequences that lie end to end: int32, from 0, never falling, to ``total`` exactly.

    The length of the longest; ``total`` where they lie on a GPU.
    """
    starts = call.read(name, x)
    if starts.dtype != INT32:
        raise DTypeError(
            f"{call.op}: {name} is {starts.dtype}, expected int32; cast it: {name}.astype('int32')"
        )
    if starts.ndim != 1 or starts.size == 0:
        raise ShapeError(f"{call.op}: {name} has shape {starts.shape}, expected (batch + 1,)")
    return total if call.on_cuda else _longest(call.op, name, starts, total)


def _longest(op: str, name: str, offsets: Array, total: int) -> int:
    """The length of the longest sequence; all offsets are checked."""
    starts = offsets.tolist()  # as there are mostly few, Python is faster than NumPy
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
        raise OptionError(
            f"{op}: {name} must start at 0, never fall, and end at the total {total}; "
            f"got {np.array2string(offsets, threshold=8)}"
        )
    return max(lengths, default=0)


@lowers("attention_varlen", "reference")
def _reference(spec: Spec, on: Builder) -> None:
    from gpu_ops.reference.attention import attention_varlen

    def run(views: Mapping[str, Any]) -> None:
        arrays = [views[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
        given = {**reference_options(spec, views), **results_dtypes(views)}
        store_results(views, attention_varlen(*arrays, return_lse=True, **given))

    on.call(run, "NumPy, float64")


@lowers("attention_varlen_backward", "reference")
def _reference_backward(spec: Spec, on: Builder) -> None:
    from gpu_ops.reference.attention_backward import attention_varlen_backward

    def run(views: Mapping[str, Any]) -> None:
        arrays = [*(views[name] for name in ("dout", "q", "k", "v")), views.get("out")]
        arrays += [views[name] for name in ("lse", "cu_seqlens_q", "cu_seqlens_k")]
        more = {"delta": views.get("delta"), **reference_options(spec, views)}
        *gradients, extra = attention_varlen_backward(*arrays, return_extra=True, precision="float64", **more)
        store_gradients(spec, views, gradients, extra)

    on.call(run, "NumPy, float64")
