"""Attention within sequences of different lengths, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.errors import OptionError, ShapeError
from gpu_ops.ops import attention_launch
from gpu_ops.ops.attention import write_grads
from gpu_ops.ops.attention_problem import Problem, cu_seqlens, expect, longest_of, options

__all__ = ["attention_varlen", "attention_varlen_backward"]


@op(cuda=True)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
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
    causal, window_size, softmax_scale, softcap, sinks, alibi_slopes, return_lse, out
        As in :func:`attention`; causal is bottom-right aligned within each sequence.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    out : array (total_q, nheads, head_dim_v)
    lse : array (nheads, total_q), float32 (float64 for float64), only with ``return_lse``

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
    name = "attention_varlen"
    arrays = Arrays(name)
    problem = _problem(
        name, arrays, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return_lse = checks.flag(name, "return_lse", return_lse)
    total, heads = problem.q.shape[1], problem.nheads
    shape = (total, heads, problem.v.shape[3])
    out_ = arrays.write("out", out, shape, problem.q.dtype)
    given = None if out_ is None else out_[None]
    choice = choose(name, device, backend, arrays, cannot=lambda: attention_launch.cannot(problem, given))

    def by_reference() -> Any:
        from gpu_ops.reference import attention as reference

        return reference.attention_varlen(
            problem.q[0], problem.k[0], problem.v[0], *problem.offsets,
            **problem.options.given(dense=False), return_lse=True,
        )  # fmt: skip

    return attention_launch.plan(
        arrays, problem, choice, by_reference,
        shape=shape, lse_shape=(heads, total), as_bshd=_packed, out=out, view=out_,
        return_lse=return_lse, again=lambda call: _again(call, _lengths(name, problem)),
    )  # fmt: skip


def _again(call: Callable[..., Any], lengths_of: Callable[..., Any]) -> Callable[..., Any]:
    def again(
        q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, *, out: Array | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        return call(*lengths_of(cu_seqlens_q, cu_seqlens_k, **options), q, k, v, out, options)

    return again


@op
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
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_extra: bool = False,
    grads: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`attention_varlen`; see :func:`attention_backward`.

    Parameters
    ----------
    dout, out : arrays (total_q, nheads, head_dim_v)
    lse : array (nheads, total_q)
        As returned by ``attention_varlen(..., return_lse=True)``.
    q, k, v, cu_seqlens_q, cu_seqlens_k, and every option
        As given to :func:`attention_varlen`.
    deterministic, return_extra, grads
        As in :func:`attention_backward`.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

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
    name = "attention_varlen_backward"
    arrays = Arrays(name)
    dout_ = arrays.read("dout", dout)
    problem = _problem(
        name, arrays, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    out_, lse_ = arrays.read("out", out), arrays.read("lse", lse)
    total, heads = problem.q.shape[1], problem.nheads
    for label, x in (("dout", dout_), ("out", out_)):
        checks.exactly(name, label, x, (total, heads, problem.v.shape[3]), problem.q.dtype)
    checks.exactly(name, "lse", lse_, (heads, total), problem.lse_dtype)
    checks.flag(name, "deterministic", deterministic)
    return_extra = checks.flag(name, "return_extra", return_extra)
    inputs = [x[0] for x in (problem.q, problem.k, problem.v)]
    grads_ = write_grads(arrays, grads, inputs)
    choice = choose(name, device, backend)

    def run() -> Any:
        views = grads_ or [arrays.new(x.shape, x.dtype) for x in inputs]
        if choice.backend == "reference":
            from gpu_ops.reference import attention_backward as reference

            q_, k_, v_ = inputs
            *computed, extra = reference.attention_varlen_backward(
                dout_, q_, k_, v_, out_, lse_, *problem.offsets,
                **problem.options.given(dense=False), return_extra=True,
            )  # fmt: skip
            for view, gradient in zip(views, computed, strict=True):
                view[...] = gradient
        else:
            packed = [g[None] for g in views]
            extra = attention_launch.backward(
                problem, dout_[None], out_[None], lse_[None], packed, return_extra
            )
        results = tuple(arrays.give(g) for g in views) if grads is None else tuple(grads)
        return (*results, {key: arrays.give(g) for key, g in extra.items()}) if return_extra else results

    def again() -> Callable[..., Any]:
        shapes = [x.shape for x in inputs]
        call = attention_launch.backward_again(name, problem, shapes, _packed, return_extra)
        return _backward_again(call, _lengths(name, problem))

    return Plan(
        name, choice, problem.__str__, lambda: attention_launch.backward_config(choice, problem), run,
        again=again if choice.compiled else None,
    )  # fmt: skip


def _backward_again(call: Callable[..., Any], lengths_of: Callable[..., Any]) -> Callable[..., Any]:
    def again(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, cu_seqlens_q: Array,
        cu_seqlens_k: Array, *, grads: tuple[Array, ...] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        found = lengths_of(cu_seqlens_q, cu_seqlens_k, **options)
        return call(*found, (dout, q, k, v, out), lse[None], grads, options)

    return again


def _packed(x: Array) -> Array:
    return x[None]


def _lengths(op: str, problem: Problem) -> Callable[..., tuple[tuple[int, int], Array]]:
    """The lengths of the longest sequences and the table of all: of each call, after the checks of values."""
    from gpu_ops.kernels.numba_cpu.lengths import packed

    totals = problem.q.shape[1], problem.k.shape[1]
    found_of = packed(*totals)

    def lengths(
        starts_q: Array, starts_k: Array, *,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **_: Any,
    ) -> tuple[tuple[int, int], Array]:  # fmt: skip
        found = found_of(starts_q, starts_k)
        longest_q, longest_k, sound, _ = found[-1].tolist()
        if not sound:  # it has to say where
            longest_of(op, "cu_seqlens_q", starts_q, totals[0])
            longest_of(op, "cu_seqlens_k", starts_k, totals[1])
        _bounded(op, "max_seqlen_q", max_seqlen_q, longest_q)
        _bounded(op, "max_seqlen_k", max_seqlen_k, longest_k)
        return (longest_q, longest_k), found[:-1]

    return lengths


def _problem(
    op: str,
    arrays: Arrays,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    **given: Any,
) -> Problem:
    q_, k_, v_ = (arrays.read(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    axes = checks.Axes(op)
    axes.bind("q", q_, "total_q nheads head_dim")
    axes.bind("k", k_, "total_k nheads_kv head_dim")
    axes.bind("v", v_, "total_k nheads_kv head_dim_v")
    expect(op, axes)
    dtype = checks.float_dtype(op, q=q_, k=k_, v=v_)
    sides = [
        cu_seqlens(op, arrays, "cu_seqlens_q", cu_seqlens_q, axes["total_q"]),
        cu_seqlens(op, arrays, "cu_seqlens_k", cu_seqlens_k, axes["total_k"]),
    ]
    if sides[0].size != sides[1].size:
        raise ShapeError(
            f"{op}: cu_seqlens_q and cu_seqlens_k describe {sides[0].size - 1} and {sides[1].size - 1} "
            "sequences; both need batch + 1 entries"
        )
    longest = (
        _longest(op, arrays, "max_seqlen_q", max_seqlen_q, sides[0], axes["total_q"]),
        _longest(op, arrays, "max_seqlen_k", max_seqlen_k, sides[1], axes["total_k"]),
    )
    batch = sides[0].size - 1
    axes.set("batch", batch, "cu_seqlens_q")
    return Problem(
        q=q_[None],
        k=k_[None],
        v=v_[None],
        options=options(op, arrays, q_, axes, **given),
        dtype=dtype,
        batch=batch,
        seqlen_q=longest[0],
        seqlen_k=longest[1],
        offsets=tuple(sides),
    )


def _longest(op: str, arrays: Arrays, name: str, bound: int | None, offsets: Array, total: int) -> int:
    """The longest sequence; where the lengths lie on a GPU, the caller's bound of it, or the total."""
    if bound is not None:
        bound = checks.integer(op, name, bound, low=0)
    if arrays.on_cuda:
        return total if bound is None else min(bound, total)
    longest = int(np.diff(offsets).max(initial=0))
    _bounded(op, name, bound, longest)
    return longest


def _bounded(op: str, name: str, bound: int | None, longest: int) -> None:
    if bound is not None and bound < longest:
        raise OptionError(
            f"{op}: {name}={bound}, but the longest sequence has {longest} tokens; omit it or raise it"
        )
