"""Launch of the attention gradients on the CPU and by the Numba kernels for GPUs.

:mod:`.backward_raw` launches the CUDA C++ kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gpu_ops.kernels.attention import backward_raw
from gpu_ops.kernels.attention.forward import optional_arrays, optional_tensors, prepared
from gpu_ops.kernels.attention.forward_numba import score_arrays, sequences_of
from gpu_ops.kernels.attention.problem import UNLIMITED, Attention, as_bshd, sequence_table
from gpu_ops.kernels.compiler.jit import Variant
from gpu_ops.kernels.program import Builder, Spec, Tensor, lowers

__all__ = ["launch_cpu", "launch_numba", "numba_variants", "variants"]

# Gradients of attention by the Numba kernels for GPUs: statistics of the rows, dq, dk and dv, then those of options.
#
# One block computes each sum in a fixed order, so ``deterministic=True`` costs nothing.


def launch_numba(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.numba_cuda.backward import keys_kernel, queries_kernel
    from gpu_ops.kernels.attention.numba_cuda.backward_config import NumbaBackwardProblem, select_config
    from gpu_ops.kernels.attention.numba_cuda.backward_rows import (
        SINK_THREADS,
        rounding_kernel,
        rows_kernel,
        sinks_kernel,
    )
    from gpu_ops.kernels.attention.numba_cuda.config import LOG2E, THREADS

    a, layout = Attention.of(spec), spec["layout"]
    dout, dq, dk, dv = (as_bshd(spec.tensor(name), layout) for name in ("dout", "dq", "dk", "dv"))
    if dout.dtype != a.q.dtype:
        wide_dout, dout = dout, builder.empty(dout.shape, a.q.dtype, "dout, rounded")
        grid = (-(-dout.size // THREADS),)
        builder.launch(rounding_kernel(a.q.dtype.name), grid, (THREADS,), (wide_dout, dout))
    left, right = a.window()
    masked = left < UNLIMITED or right < UNLIMITED
    problem = NumbaBackwardProblem(a.q.dtype.name, a.features(sinks=False), masked)
    dtype = np.float64 if problem.itemsize == 8 else np.float32
    statistics = builder.empty((3, *a.lse_shape), dtype, "statistics of rows")
    sequences = sequences_of(a, builder)
    _, slopes, _, bias, visible, seed = score_arrays(a, with_sinks=False)
    scale, *numbers = a.numbers.values()
    scale *= LOG2E if problem.scores.plain else 1.0
    options = (slopes, bias, visible, seed, scale, *numbers, left, right, a.block_q, a.block_k)
    common = (statistics, sequences, *options)

    grid = (-(-a.seqlen_q // THREADS) * a.batch * a.nheads,)
    lse, delta = spec.tensor("lse"), spec.get("delta")
    dtypes = lse.dtype.name, a.out.dtype.name
    rows = rows_kernel(problem, a.sinks is not None, *dtypes, delta_given=delta is not None)
    delta_argument = 0 if delta is None else delta if delta.ndim == 3 else delta[None]
    per_row = delta_argument, 0 if a.sinks is None else a.sinks
    builder.launch(rows, grid, (THREADS,), (dout, a.q, a.k, a.out, a.lse, *per_row, *common))

    def tiles(owned: str, length: int, dim: int) -> tuple[Any, tuple[int]]:
        config = select_config(problem, owned, dim)
        blocks = -(-length // config.block_m) * a.batch * a.nheads_kv * -(-dim // config.slab)
        return config, (blocks,)

    grads = dq.dtype.name, spec["accumulate"]
    config, grid = tiles("queries", a.seqlen_q * a.nheads // a.nheads_kv, a.head_dim)
    builder.launch(queries_kernel(config, *grads), grid, (THREADS,), (dout, a.q, a.k, a.v, dq, *common))
    config, grid = tiles("keys", a.seqlen_k, max(a.head_dim, a.head_dim_v))
    builder.launch(keys_kernel(config, *grads), grid, (THREADS,), (dout, a.q, a.k, a.v, dk, dv, *common))

    dbias, dsinks = spec.get("dbias"), spec.get("dsinks")
    if dbias is not None:
        _bias(a, builder, problem, dout, dbias, common)
    if dsinks is not None:
        builder.launch(
            sinks_kernel(problem.dtype), (a.nheads,), (SINK_THREADS,), (a.sinks, statistics, dsinks)
        )


def _bias(
    a: Attention, builder: Builder, problem: Any, dout: Tensor, dbias: Tensor, common: tuple[Any, ...]
) -> None:
    from gpu_ops.kernels.attention.numba_cuda.backward_bias import bias_kernel, bias_sum_kernel
    from gpu_ops.kernels.attention.numba_cuda.backward_config import count_parts, select_config
    from gpu_ops.kernels.attention.numba_cuda.config import THREADS

    config = select_config(problem, "both")
    target = dbias[(None,) * (4 - dbias.ndim)]
    batch, nheads, queries, keys = target.shape
    sum_queries, sum_keys = queries != a.seqlen_q, keys != a.seqlen_k
    tiles_q, tiles_k = -(-a.seqlen_q // config.block_m), -(-a.seqlen_k // config.block_n)
    owned = (batch, nheads, 1 if sum_queries else tiles_q, 1 if sum_keys else tiles_k)
    blocks = math.prod(owned)
    units = a.batch * a.nheads * tiles_q * tiles_k // max(blocks, 1)
    parts = count_parts(blocks, units, builder.sms)
    sums = builder.empty((parts * batch, *target.shape[1:]), common[0].dtype, "parts of dbias")
    arguments = (dout, a.q, a.k, a.v, sums, batch, nheads, *common)
    builder.launch(bias_kernel(config, sum_queries, sum_keys), (blocks * parts,), (THREADS,), arguments)
    grid = (-(-dbias.size // THREADS),)
    builder.launch(bias_sum_kernel(problem.dtype, dbias.dtype.name), grid, (THREADS,), (sums, target))


def numba_variants() -> Iterator[Variant]:
    """Most commonly used kernels."""
    from gpu_ops.kernels.attention.numba_cuda.backward import keys_kernel, queries_kernel
    from gpu_ops.kernels.attention.numba_cuda.backward_config import NumbaBackwardProblem, select_config
    from gpu_ops.kernels.attention.numba_cuda.backward_rows import rows_kernel
    from gpu_ops.kernels.attention.numba_cuda.config import THREADS

    dtype = "bfloat16"
    problem = NumbaBackwardProblem(dtype, masked=True)
    yield Variant(rows_kernel(problem, False, "float32", dtype), THREADS)
    yield Variant(queries_kernel(select_config(problem, "queries", 128), dtype), THREADS)
    for head_dim in (64, 128):
        yield Variant(keys_kernel(select_config(problem, "keys", head_dim), dtype), THREADS)


for _op in ("attention_backward", "attention_varlen_backward"):
    lowers(_op, "numba")(launch_numba)
    lowers(_op, "raw")(backward_raw.launch_raw)


@lowers("attention_backward", "cpu")
@lowers("attention_varlen_backward", "cpu")
def launch_cpu(spec: Spec, builder: Builder) -> None:
    from gpu_ops.kernels.attention.cpu import backward as kernels
    from gpu_ops.kernels.attention.cpu.backward_bias import sinks_gradient
    from gpu_ops.kernels.attention.cpu.backward_rows import deltas, round_rows

    a = Attention.of(spec)
    lse_dtype = spec.tensor("lse").dtype
    computing = np.dtype(np.float64 if a.q.dtype == np.float64 else np.float32)
    differentiate = prepared(kernels.prepare, a, lse_dtype=lse_dtype, add=spec["accumulate"])
    inputs: tuple[Any, Any, Any] = (a.q, a.k, a.v)  # only shapes and dtypes are read
    if a.known_lengths:
        builder.constant(sequence_table(a), "sequences")
    layout, dout_ = spec["layout"], as_bshd(spec.tensor("dout"), spec["layout"])
    rounds = dout_.dtype != a.q.dtype
    if rounds:
        builder.empty(dout_.shape, a.q.dtype, "rounded dout")
    has_options = bool(optional_tensors(a))

    def run(views: Mapping[str, Any]) -> None:
        dout, q, k, v = views["dout"], views["q"], views["k"], views["v"]
        lse, delta, dq, dk, dv = views["lse"], views.get("delta"), views["dq"], views["dk"], views["dv"]
        if layout != "bshd":
            dout, q, k, v = as_bshd(dout, layout), as_bshd(q, layout), as_bshd(k, layout), as_bshd(v, layout)
            dq, dk, dv = as_bshd(dq, layout), as_bshd(dk, layout), as_bshd(dv, layout)
            lse = lse if lse.ndim == 3 else lse[None]
        if rounds:
            dout = round_rows(dout, views["rounded dout"])
        delta = deltas(dout, as_bshd(views["out"], layout)) if delta is None else delta.reshape(lse.shape)
        lse, delta = np.asarray(lse, np.float64), np.asarray(delta, np.float64)
        dbias, options = views.get("dbias"), optional_arrays(a, views) if has_options else {}
        sums = None if dbias is None else np.zeros(dbias.shape, computing)
        differentiate.run(dout, q, k, v, lse, delta, dq, dk, dv, views["sequences"], options, sums)
        if dbias is not None:
            dbias[...] = sums
        if "dsinks" in views:
            views["dsinks"][...] = sinks_gradient(options["sinks"], lse, delta, computing)

    shape = *inputs, a.batch, a.seqlen_q, a.seqlen_k
    dbias, delta, rows = spec.get("dbias"), spec.get("delta"), spec.tensor("lse").size
    scratch_bytes = 0 if dbias is None else dbias.size * computing.itemsize
    for x in (spec.tensor("lse"), delta):  # in float64 for the kernels
        scratch_bytes += 8 * rows if x is None or x.dtype != np.float64 else 0
    builder.call(run, str(kernels.config_of(*shape)), lambda: scratch_bytes + differentiate.scratch())


def variants(arch: str) -> Iterator[Variant]:
    """Most commonly used kernels."""
    yield from numba_variants()
