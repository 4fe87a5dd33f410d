"""Scaled dot-product attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_ops.core import checks
from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.dispatch import Plan, choose, op
from gpu_ops.ops import attention_launch
from gpu_ops.ops.attention_problem import Problem, expect, options, sequences, swap

__all__ = ["attention", "attention_backward"]

LAYOUTS = ("bshd", "bhsd")


@op(cuda=True)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Attention ``out = softmax(s) v`` with ``s = softmax_scale * q k^T``, in O(N) memory.

    The order is: scale, softcap, + ALiBi + bias, masks (-inf), softmax.

    Parameters
    ----------
    q : array (batch, seqlen_q, nheads, head_dim)
        float16, bfloat16, float32 or float64; k and v have the same dtype.
    k : array (batch, seqlen_k, nheads_kv, head_dim)
        nheads must be a multiple of nheads_kv: query head h reads key head h // (nheads // nheads_kv).
    v : array (batch, seqlen_k, nheads_kv, head_dim_v)
    causal : bool
        Query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned: the last query sees all).
    window_size : (left, right)
        Query i sees keys from i + seqlen_k - seqlen_q - left to ... + right; -1: no limit.
    softmax_scale : float, default head_dim ** -0.5
    softcap : float
        If > 0: s = softcap * tanh(s / softcap).
    sinks : float32 array (nheads,), optional
        One extra logit per head in the denominator; it takes weight and adds nothing. lse counts it in.
    alibi_slopes : float32 array (nheads,) or (batch, nheads), optional
        Adds -slope * |i + seqlen_k - seqlen_q - j|.
    bias : array broadcastable to (batch, nheads, seqlen_q, seqlen_k), optional
        q's dtype or float32; added to the scores, -inf masks.
    block_mask : BlockMask, optional
        Blocks that are False are skipped; intersects with the other masks.
    layout : {"bshd", "bhsd"}
        "bhsd": axes 1 and 2 of q, k, v and out are swapped. Costs no copy.
    return_lse : bool
        Also return the log of the softmax denominator, natural log.
    out : array like the result, optional
        Receives the result; may not share memory with an input.
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    out : array (batch, seqlen_q, nheads, head_dim_v), q's dtype
    lse : array (batch, nheads, seqlen_q), float32 (float64 for float64), only with ``return_lse``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    A query that sees no key gives 0 and lse -inf. A NaN that a query sees reaches its result; one
    behind a mask does not. Sums are float32 or wider. Costs 4 * seqlen_q * seqlen_k * head_dim flops
    per head; key blocks that no query of a tile sees are skipped. Source: Vaswani et al. 2017; online
    softmax: Milakov and Gimelshein 2018; tiling: Dao et al., FlashAttention, 2022.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 128, 4, 64), dtype=np.float32) for _ in range(3))
    >>> gpu_ops.attention(q, k, v, causal=True).shape
    (1, 128, 4, 64)
    """
    name = "attention"
    arrays = Arrays(name)
    layout = checks.one_of(name, "layout", layout, LAYOUTS)
    problem = _problem(
        name, arrays, q, k, v, layout,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, bias=bias, block_mask=block_mask,
    )  # fmt: skip
    return_lse = checks.flag(name, "return_lse", return_lse)
    shape = _out_shape(problem, layout)
    out_ = arrays.write("out", out, shape, problem.q.dtype)
    given = None if out_ is None else swap(out_, layout)
    choice = choose(name, device, backend, arrays, cannot=lambda: attention_launch.cannot(problem, given))

    def by_reference() -> Any:
        from gpu_ops.reference import attention as reference

        return reference.attention(
            swap(problem.q, layout), swap(problem.k, layout), swap(problem.v, layout),
            **problem.options.given(dense=True), layout=layout, return_lse=True,
        )  # fmt: skip

    return attention_launch.plan(
        arrays, problem, choice, by_reference,
        shape=shape, lse_shape=(problem.batch, problem.nheads, problem.seqlen_q),
        as_bshd=lambda x: swap(x, layout), out=out, view=out_, return_lse=return_lse,
        again=lambda call: _again(call, (problem.batch, problem.seqlen_q, problem.seqlen_k)),
    )  # fmt: skip


def _again(call: Callable[..., Any], sizes: tuple[int, int, int]) -> Callable[..., Any]:
    lengths, table = sizes[1:], sequences(*sizes)

    def again(q: Array, k: Array, v: Array, *, out: Array | None = None, **options: Any) -> Any:
        return call(lengths, table, q, k, v, out, options)

    return again


@op
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    layout: str = "bshd",
    deterministic: bool = False,
    return_extra: bool = False,
    grads: Any = None,
    device: str | None = None,
    backend: str | None = None,
) -> Plan:
    """Gradients of :func:`attention` with respect to q, k and v.

    With P the probabilities, recomputed from lse, and delta = sum(dout * out) over head_dim_v:
    ``dv = P^T dout``, ``dS = P * (dout v^T - delta)``, ``dq = scale * dS k``, ``dk = scale * dS^T q``.

    Parameters
    ----------
    dout : array like out
        Gradient of the result.
    q, k, v, and every option
        As given to :func:`attention`.
    out, lse : arrays
        As returned by ``attention(..., return_lse=True)``.
    deterministic : bool
        The CPU's sums always have a fixed order on a given machine; this asks for it explicitly.
    return_extra : bool
        Also return a dict with the gradients of ``bias`` (its shape and dtype) and ``sinks``
        (float32, float64 for float64), those that were given.
    grads : (dq, dk, dv), optional
        Arrays that receive the gradients (``out`` is the forward result here).
    device, backend : str, optional
        Where, and by which kernels; by default where the arrays are: see :func:`explain`.

    Returns
    -------
    dq, dk, dv : arrays like q, k, v
    extra : dict, only with ``return_extra``

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        Before anything is written.

    Notes
    -----
    O(N) memory. Queries that see no key have zero gradients. Source: Dao et al., FlashAttention, 2022,
    appendix B.4.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8))
    >>> out, lse = gpu_ops.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = gpu_ops.attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> round(float(dv[..., 0, 0].sum()), 6)  # each of the 16 queries hands out a weight of 1
    16.0
    """
    name = "attention_backward"
    arrays = Arrays(name)
    layout = checks.one_of(name, "layout", layout, LAYOUTS)
    dout_ = arrays.read("dout", dout)
    problem = _problem(
        name, arrays, q, k, v, layout,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, bias=bias, block_mask=block_mask,
    )  # fmt: skip
    out_, lse_ = arrays.read("out", out), arrays.read("lse", lse)
    for label, x in (("dout", dout_), ("out", out_)):
        checks.exactly(name, label, x, _out_shape(problem, layout), problem.q.dtype)
    statistics = (problem.batch, problem.nheads, problem.seqlen_q)
    checks.exactly(name, "lse", lse_, statistics, problem.lse_dtype)
    checks.flag(name, "deterministic", deterministic)
    return_extra = checks.flag(name, "return_extra", return_extra)
    inputs = [swap(x, layout) for x in (problem.q, problem.k, problem.v)]
    grads_ = write_grads(arrays, grads, inputs)
    choice = choose(name, device, backend)

    def run() -> Any:
        views = grads_ or [arrays.new(x.shape, x.dtype) for x in inputs]
        if choice.backend == "reference":
            from gpu_ops.reference import attention_backward as reference

            q_, k_, v_ = inputs
            *computed, extra = reference.attention_backward(
                dout_, q_, k_, v_, out_, lse_,
                **problem.options.given(dense=True), layout=layout, return_extra=True,
            )  # fmt: skip
            for view, gradient in zip(views, computed, strict=True):
                view[...] = gradient
        else:
            swapped = [swap(g, layout) for g in views]
            extra = attention_launch.backward(
                problem, swap(dout_, layout), swap(out_, layout), lse_, swapped, return_extra
            )
        results = tuple(arrays.give(g) for g in views) if grads is None else tuple(grads)
        return (*results, {key: arrays.give(g) for key, g in extra.items()}) if return_extra else results

    def again() -> Callable[..., Any]:
        sizes = problem.batch, problem.seqlen_q, problem.seqlen_k
        call = attention_launch.backward_again(
            name, problem, [x.shape for x in inputs], lambda x: swap(x, layout), return_extra
        )
        return _backward_again(call, sizes)

    return Plan(
        name, choice, problem.__str__, lambda: attention_launch.backward_config(choice, problem), run,
        again=again if choice.compiled else None,
    )  # fmt: skip


def _backward_again(call: Callable[..., Any], sizes: tuple[int, int, int]) -> Callable[..., Any]:
    lengths, table = sizes[1:], sequences(*sizes)

    def again(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *,
        grads: tuple[Array, ...] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        return call(lengths, table, (dout, q, k, v, out), lse, grads, options)

    return again


def write_grads(arrays: Arrays, grads: Any, inputs: list[Array]) -> list[Array]:
    """Checked views of the caller's ``grads``, or an empty list."""
    like = {n: (x.shape, x.dtype) for n, x in zip(("dq", "dk", "dv"), inputs, strict=True)}
    return arrays.write_each("grads", grads, like)


def _problem(op: str, arrays: Arrays, q: Any, k: Any, v: Any, layout: str, **given: Any) -> Problem:
    q_, k_, v_ = (arrays.read(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    axes = checks.Axes(op)
    queries, keys = "seqlen_q nheads", "seqlen_k nheads_kv"
    if layout == "bhsd":
        queries, keys = "nheads seqlen_q", "nheads_kv seqlen_k"
    axes.bind("q", q_, f"batch {queries} head_dim")
    axes.bind("k", k_, f"batch {keys} head_dim")
    axes.bind("v", v_, f"batch {keys} head_dim_v")
    expect(op, axes)
    dtype = checks.float_dtype(op, q=q_, k=k_, v=v_)
    return Problem(
        q=swap(q_, layout),
        k=swap(k_, layout),
        v=swap(v_, layout),
        options=options(op, arrays, q_, axes, **given),
        dtype=dtype,
        batch=axes["batch"],
        seqlen_q=axes["seqlen_q"],
        seqlen_k=axes["seqlen_k"],
    )


def _out_shape(p: Problem, layout: str) -> tuple[int, ...]:
    middle = (p.seqlen_q, p.nheads) if layout == "bshd" else (p.nheads, p.seqlen_q)
    return (p.batch, *middle, p.v.shape[3])
