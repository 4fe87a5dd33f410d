"""From a checked attention problem to the kernels' arguments, on the CPU and on GPUs; the plan of a forward call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_ops.arrays import Array, Arrays
from gpu_ops.attention_problem import Problem
from gpu_ops.devices import Device
from gpu_ops.dispatch import Choice, Plan

__all__ = ["backward", "cannot", "describe", "plan", "prepare"]


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
) -> Plan:
    """The plan of a forward call: ``out`` the caller's, ``view`` of it; ``as_bshd`` gives the kernels' view."""

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
        if choice.device == "cpu":
            return describe(choice, problem, num_splits)
        return arrays.launches(choice, compute)

    def again() -> Callable[..., Any]:
        return _again(arrays.op, problem, shape, lse_shape, as_bshd, return_lse)

    alone = problem.plain and choice.compiled
    return Plan(arrays.op, choice, problem.__str__, config, run, again=again if alone else None)


def _again(
    op: str,
    problem: Problem,
    shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
    as_bshd: Callable[[Array], Array],
    return_lse: bool,
) -> Callable[..., Any]:
    """The call with other arrays of the same shapes, strides and dtypes."""
    new, like = Arrays(op).new, problem.like
    run, sequences = prepare(like), like.sequences

    def again(q: Array, k: Array, v: Array, *, out: Array | None = None, **_: Any) -> Any:
        out = new(shape, like.q.dtype, "out") if out is None else out
        lse = new(lse_shape, like.lse_dtype, "lse")
        run(as_bshd(q), as_bshd(k), as_bshd(v), as_bshd(out), lse, sequences)
        return (out, lse) if return_lse else out

    return again


def prepare(problem: Problem, num_splits: int = 0) -> Callable[..., None]:
    """The CPU's call for arrays like these."""
    from gpu_ops.kernels.numba_cpu import attention as cpu

    p = problem
    return cpu.prepare(p.q, p.k, p.v, p.batch, config=_config(p, num_splits), **_arguments(p))


def describe(choice: Choice, problem: Problem, num_splits: int = 0) -> str:
    """The config line of a plan on the CPU."""
    return "NumPy, float64" if choice.backend == "reference" else str(_config(problem, num_splits))


def cannot(problem: Problem, out: Array | None) -> dict[str, str]:
    """Why a backend cannot run this problem. ``out`` (batch, seqlen_q, nheads, head_dim_v) as the caller gave it."""
    from gpu_ops.kernels.attention import raw_cannot

    p = problem
    why = raw_cannot(p.q, p.k, p.v, out, p.batch, max(p.seqlen_q, p.seqlen_k))
    return {"raw": why} if why else {}


def _config(problem: Problem, num_splits: int = 0) -> Any:
    """The CPU kernel's tile configuration for this problem."""
    from gpu_ops.kernels.numba_cpu.attention_config import select_config

    p = problem
    plain = p.options.bias is None and p.options.block_mask is None
    sizes = p.batch, p.nheads, p.nheads_kv, p.seqlen_q, p.seqlen_k
    return select_config(*sizes, num_splits, decode=plain, dtype=p.q.dtype)


def _forward(
    problem: Problem, out: Array, lse: Array | None, num_splits: int, choice: Choice, on: Device | None
) -> None:
    """Fill ``out`` (batch, seqlen_q, nheads, head_dim_v) and ``lse`` (batch, nheads, seqlen_q)."""
    p, o = problem, problem.options
    if on is None:
        from gpu_ops.kernels.numba_cpu import attention as cpu

        assert lse is not None
        cpu.forward(p.q, p.k, p.v, out, lse, p.sequences, config=_config(p, num_splits), **_arguments(p))
        return
    from gpu_ops.kernels import attention as gpu

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
        **arguments, sinks=o.sinks, offsets=p.offsets, seqused_k=p.seqused_k, num_splits=num_splits,
    )  # fmt: skip


def _four_axes(x: Array) -> Array:
    return x[(None,) * (4 - x.ndim)]


def backward(
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
) -> Array:
    """Fill the gradients; returns delta = sum over head_dim_v of dout * out, (batch, nheads, seqlen_q)."""
    from gpu_ops.kernels.numba_cpu import attention_backward as kernels

    p = problem
    return kernels.backward(
        dout, p.q, p.k, p.v, out, lse, dq, dk, dv, p.sequences, dbias=dbias, **_arguments(p)
    )


def _common(p: Problem, unlimited: int) -> dict[str, Any]:
    """What the host functions of the CPU and of GPUs call alike."""
    o = p.options
    left, right = (unlimited if side < 0 else side for side in o.window_size)
    return {
        "max_seqlen_q": p.seqlen_q,
        "max_seqlen_k": p.seqlen_k,
        "left": left,
        "right": min(right, 0) if o.causal else right,
        "softmax_scale": o.softmax_scale,
        "softcap": o.softcap,
        "block_table": p.block_table,
    }


def _arguments(p: Problem) -> dict[str, Any]:
    """For the CPU."""
    from gpu_ops.kernels.numba_cpu.attention_tile import UNLIMITED

    o = p.options
    arguments = {**_common(p, UNLIMITED), "packed": p.packed}
    if o.sinks is not None:
        arguments["sinks"] = o.sinks.astype(np.float64)
    if o.alibi_slopes is not None:
        slopes = o.alibi_slopes.astype(np.float64)
        arguments["alibi_slopes"] = np.broadcast_to(slopes, (p.batch, p.nheads))
    if o.bias is not None:
        # Kernels need unit stride on the last axis: only that axis is written out, the others stay broadcast.
        bias = np.atleast_1d(o.bias)
        if bias.shape[-1] != p.seqlen_k or bias.strides[-1] != bias.itemsize:
            bias = np.ascontiguousarray(np.broadcast_to(bias, (*bias.shape[:-1], p.seqlen_k)))
        arguments["bias"] = np.broadcast_to(bias, (p.batch, p.nheads, p.seqlen_q, p.seqlen_k))
    if o.block_mask is not None:
        mask = o.block_mask
        blocks = mask.num_blocks(p.seqlen_q, p.seqlen_k)
        arguments["visible"] = np.broadcast_to(np.asarray(mask.visible), (p.batch, p.nheads, *blocks))
        arguments["block_q"], arguments["block_k"] = mask.block_q, mask.block_k
    return arguments
