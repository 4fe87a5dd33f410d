"""From a checked attention problem to the kernels' arguments, on the CPU and on GPUs; the plan of a forward call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.core.arrays import Array, Arrays
from gpu_ops.core.device import Device
from gpu_ops.core.dispatch import Choice, Plan
from gpu_ops.formats.block_mask import BlockMask
from gpu_ops.ops.attention_problem import Problem

__all__ = ["backward", "backward_again", "backward_config", "cannot", "forward_again", "plan"]


def plan(
    arrays: Arrays,
    problem: Problem,
    choice: Choice,
    by_reference: Callable[[], Any],
    *,
    shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
    as_bshd: Callable[[Array], Array],
    out: Any,
    view: Array | None,
    return_lse: bool,
    num_splits: int = 0,
    again: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Plan:
    """The plan of a forward call: ``out`` the caller's, ``view`` of it; ``as_bshd`` gives the kernels' view.

    ``again`` makes the op's later calls of one of :func:`forward_again`.
    """

    def compute(on: Device | None) -> list[Array]:
        result = arrays.new(shape, problem.q.dtype, "out") if view is None else view
        if choice.backend == "reference":
            result[...], lse = by_reference()
            return [result, lse]
        # On a GPU lse has no use of its own.
        statistics = [arrays.new(lse_shape, problem.lse_dtype, "lse")] if return_lse or on is None else []
        given = next((x if x.ndim == 3 else x[None] for x in statistics), None)
        _forward(problem, as_bshd(result), given, num_splits, choice, on)
        return [result, *statistics]

    def run() -> Any:
        with arrays.on(choice) as on:
            result, *statistics = compute(on)
            returned = arrays.give(result) if out is None else out
            return (returned, arrays.give(statistics[0])) if return_lse else returned

    def config() -> str:
        if choice.device != "cpu":
            return arrays.launches(choice, compute)
        return "NumPy, float64" if choice.backend == "reference" else str(_config(problem, num_splits))

    def later() -> Callable[..., Any]:
        return again(forward_again(arrays.op, problem, shape, lse_shape, as_bshd, return_lse, num_splits))

    return Plan(arrays.op, choice, problem.__str__, config, run, again=later if choice.compiled else None)


def forward_again(
    op: str,
    problem: Problem,
    shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
    as_bshd: Callable[[Array], Array],
    return_lse: bool,
    num_splits: int,
) -> Callable[..., Any]:
    """``call(lengths, sequences, q, k, v, out, options)``: with other arrays of the same shapes, strides and dtypes.

    ``lengths``: those of the longest sequence of queries and of keys. ``options``: the caller's.
    """
    new, dtype, lse_dtype = Arrays(op).new, problem.q.dtype, problem.lse_dtype
    ready = _prepared(lambda p: _prepare(p, num_splits), problem)
    inner = lse_shape if len(lse_shape) == 3 else (1, *lse_shape)

    def call(
        lengths: tuple[int, int], sequences: Array, q: Array, k: Array, v: Array, out: Array | None,
        options: dict[str, Any],
    ) -> Any:  # fmt: skip
        run, given = ready(lengths, options)
        out = new(shape, dtype, "out") if out is None else out
        lse = new(inner, lse_dtype, "lse")
        run(as_bshd(q), as_bshd(k), as_bshd(v), as_bshd(out), lse, sequences, given)
        return (out, lse.reshape(lse_shape)) if return_lse else out

    return call


def backward_again(
    op: str,
    problem: Problem,
    shapes: list[tuple[int, ...]],
    as_bshd: Callable[[Array], Array],
    return_extra: bool,
) -> Callable[..., Any]:
    """``call(lengths, sequences, arrays, lse, grads, options)`` as in :func:`forward_again`.

    ``arrays``: dout, q, k, v, out. ``shapes``: of dq, dk, dv.
    """
    new, dtype = Arrays(op).new, problem.q.dtype
    ready = _prepared(_prepare_backward, problem)

    def call(
        lengths: tuple[int, int], sequences: Array, arrays: tuple[Array, ...], lse: Array,
        grads: tuple[Array, ...] | None, options: dict[str, Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        run, given = ready(lengths, options)
        results = tuple([new(shape, dtype) for shape in shapes]) if grads is None else grads
        views = *map(as_bshd, arrays), lse, *map(as_bshd, results)
        if return_extra:
            return *results, _with_extra(run, views, sequences, given, options.get("bias"))
        run(*views, sequences, given)
        return results

    return call


def _prepared(
    prepare: Callable[[Problem], Callable[..., Any]], problem: Problem
) -> Callable[[tuple[int, int], dict[str, Any]], tuple[Callable[..., Any], dict[str, Array]]]:
    """What ``prepare`` makes for problems that differ in the lengths of their sequences, and the arrays it takes.

    That for the last lengths is kept, which the layers of a model have in common.
    """
    like = problem.like
    present = {**vars(like.options), "block_table": like.block_table}
    arrays = "sinks", "alibi_slopes", "bias", "block_mask", "block_table"
    names = [name for name in arrays if present[name] is not None]
    kept: tuple[tuple[int, int], Callable[..., Any]] | None = None

    def ready(
        lengths: tuple[int, int], options: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Array]]:
        nonlocal kept
        last = kept  # other threads may replace it
        if last is None or last[0] != lengths:
            at = replace(like, seqlen_q=lengths[0], seqlen_k=lengths[1])
            kept = last = lengths, prepare(at)
        return last[1], _given(like, **{name: options[name] for name in names}) if names else {}

    return ready


def _prepare(problem: Problem, num_splits: int = 0) -> Callable[..., None]:
    """The CPU's call for arrays like these."""
    from gpu_ops.kernels.numba_cpu import attention as cpu

    p = problem
    return cpu.prepare(
        p.q, p.k, p.v, p.batch, config=_config(p, num_splits), **_numbers(p), given=_given_to(p)
    )


def _prepare_backward(problem: Problem) -> Callable[..., Array]:
    from gpu_ops.kernels.numba_cpu import attention_backward as cpu

    p = problem
    return cpu.prepare(p.q, p.k, p.v, p.batch, **_numbers(p), given=_given_to(p))


def backward_config(choice: Choice, problem: Problem) -> str:
    """The config line of a backward plan, which is always the CPU's."""
    if choice.backend == "reference":
        return "NumPy, float64"
    from gpu_ops.kernels.numba_cpu import attention_backward as cpu

    p = problem
    return str(cpu.config_of(p.q, p.k, p.v, p.batch, p.seqlen_q, p.seqlen_k))


def cannot(problem: Problem, out: Array | None) -> dict[str, str]:
    """Why a backend cannot run this problem. ``out`` (batch, seqlen_q, nheads, head_dim_v) as the caller gave it."""
    from gpu_ops.kernels.lower.attention import raw_cannot

    p = problem
    why = raw_cannot(p.q, p.k, p.v, out, p.batch, max(p.seqlen_q, p.seqlen_k))
    return {"raw": why} if why else {}


def _config(problem: Problem, num_splits: int = 0) -> Any:
    """The CPU kernel's tile configuration for this problem."""
    from gpu_ops.kernels.numba_cpu.attention_config import select_config

    p = problem
    plain = p.options.bias is None and p.options.block_mask is None
    sizes = p.batch, p.nheads, p.nheads_kv, p.seqlen_q, p.seqlen_k
    dims = p.q.shape[-1] + p.v.shape[-1]
    return select_config(*sizes, num_splits, decode=plain, dtype=p.q.dtype, dims=dims)


def _forward(
    problem: Problem, out: Array, lse: Array | None, num_splits: int, choice: Choice, on: Device | None
) -> None:
    """Fill ``out`` (batch, seqlen_q, nheads, head_dim_v) and ``lse`` (batch, nheads, seqlen_q)."""
    p, o = problem, problem.options
    if on is None:
        assert lse is not None
        _prepare(p, num_splits)(p.q, p.k, p.v, out, lse, p.sequences, _given_to(p))
        return
    from gpu_ops.kernels.lower import attention as gpu

    arguments = _common(p, gpu.UNLIMITED)
    if o.alibi_slopes is not None:
        arguments["alibi_slopes"] = o.alibi_slopes[None] if o.alibi_slopes.ndim == 1 else o.alibi_slopes
    if o.bias is not None:
        arguments["bias"] = _four_axes(o.bias)
    if o.block_mask is not None:
        mask = o.block_mask
        arguments |= {"visible": _four_axes(mask.visible), "block_q": mask.block_q, "block_k": mask.block_k}
    gpu.forward(
        on, choice.backend, p.q, p.k, p.v, out, lse,
        **arguments, sinks=o.sinks, block_table=p.block_table, offsets=p.offsets, seqused_k=p.seqused_k,
        num_splits=num_splits,
    )  # fmt: skip


def _four_axes(x: Array) -> Array:
    return x[(None,) * (4 - x.ndim)]


def backward(
    problem: Problem, dout: Array, out: Array, lse: Array, grads: list[Array], return_extra: bool
) -> dict[str, Array]:
    """Fill ``grads`` (dq, dk, dv as "bshd" views) on the CPU; the gradients of bias and sinks when asked."""
    p = problem
    run, given = _prepare_backward(p), _given_to(p)
    arrays = (dout, p.q, p.k, p.v, out, lse, *grads)
    if return_extra:
        return _with_extra(run, arrays, p.sequences, given, p.options.bias)
    run(*arrays, p.sequences, given)
    return {}


def _with_extra(
    run: Callable[..., Array],
    arrays: tuple[Array, ...],
    sequences: Array,
    given: dict[str, Array],
    bias: Array | None,
) -> dict[str, Array]:
    """What ``run`` fills, and the gradients of bias and sinks: those that there are."""
    from gpu_ops.kernels.numba_cpu.attention_backward_bias import sinks_gradient

    lse = arrays[5]
    dbias = None if bias is None else np.zeros(bias.shape, lse.dtype)
    delta = run(*arrays, sequences, given, dbias)
    extra = {}
    if bias is not None and dbias is not None:
        extra["bias"] = dbias.astype(bias.dtype, copy=False)
    if "sinks" in given:
        extra["sinks"] = sinks_gradient(given["sinks"], lse, delta)
    return extra


def _common(p: Problem, unlimited: int) -> dict[str, Any]:
    """What the host functions of the CPU and of GPUs call alike."""
    o = p.options
    left, right = (unlimited if side < 0 else min(side, unlimited) for side in o.window_size)
    return {
        "max_seqlen_q": p.seqlen_q,
        "max_seqlen_k": p.seqlen_k,
        "left": left,
        "right": min(right, 0) if o.causal else right,
        "softmax_scale": o.softmax_scale,
        "softcap": o.softcap,
    }


def _numbers(p: Problem) -> dict[str, Any]:
    """What the CPU's kernels are passed beside arrays."""
    from gpu_ops.kernels.numba_cpu.attention_tile import UNLIMITED

    mask = p.options.block_mask
    blocks = {"block_q": mask.block_q if mask else 0, "block_k": mask.block_k if mask else 0}
    return {**_common(p, UNLIMITED), **blocks, "packed": p.packed}


def _given_to(p: Problem) -> dict[str, Array]:
    o = p.options
    return _given(p, o.sinks, o.alibi_slopes, o.bias, o.block_mask, p.block_table)


def _given(
    p: Problem,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    block_mask: BlockMask | None = None,
    block_table: Array | None = None,
) -> dict[str, Array]:
    """The arrays of options that a call has, as the CPU's kernels take them."""
    given = {}
    if block_table is not None:
        given["block_table"] = block_table
    if sinks is not None:
        given["sinks"] = sinks.astype(np.float64)
    if alibi_slopes is not None:
        given["alibi_slopes"] = _broadcast(alibi_slopes.astype(np.float64), (p.batch, p.nheads))
    if bias is not None:
        # Kernels need unit stride on the last axis: only that axis is written out, the others stay broadcast.
        bias = bias if bias.ndim else bias[None]
        if bias.shape[-1] != p.seqlen_k or bias.strides[-1] != bias.itemsize:
            bias = np.ascontiguousarray(np.broadcast_to(bias, (*bias.shape[:-1], p.seqlen_k)))
        given["bias"] = _broadcast(bias, (p.batch, p.nheads, p.seqlen_q, p.seqlen_k))
    if block_mask is not None:
        blocks = block_mask.num_blocks(p.seqlen_q, p.seqlen_k)
        given["visible"] = _broadcast(np.asarray(block_mask.visible), (p.batch, p.nheads, *blocks))
    return given


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """NumPy's function takes 2 us also where it only adds axes."""
    x = x[(None,) * (len(shape) - x.ndim)]
    return x if x.shape == shape else np.broadcast_to(x, shape)
