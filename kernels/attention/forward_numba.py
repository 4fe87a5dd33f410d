"""Attention by the Numba kernels for GPUs, the readable twins of the CUDA C++ kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpu_ops.kernels.attention.problem import UNLIMITED, Attention, sequence_table
from gpu_ops.kernels.compiler.jit import Variant
from gpu_ops.kernels.program import Builder, Dynamic, Spec, Tensor

__all__ = ["attend", "launch_numba", "numba_variants", "score_arrays", "sequences_of"]


def launch_numba(spec: Spec, builder: Builder) -> None:
    a = Attention.of(spec)
    if a.batch * a.seqlen_q:
        attend(a, builder, sequences_of(a, builder))


def attend(a: Attention, builder: Builder, sequences: Tensor) -> None:
    """``sequences``: int64 (batch, 4), per sequence q start, q length, k start, k length."""
    from gpu_ops.kernels.attention.numba_cuda.config import LOG2E, THREADS, count_splits, select_config
    from gpu_ops.kernels.attention.numba_cuda.forward import forward_kernel
    from gpu_ops.kernels.attention.numba_cuda.merge import combine_kernel

    left, right = a.window()
    scale, *numbers = a.numbers.values()
    rows = a.nheads // a.nheads_kv * a.seqlen_q
    config = select_config(
        a.q.dtype.name,
        a.head_dim,
        a.head_dim_v,
        rows,
        a.features(sinks=False),
        masked=left < UNLIMITED or right < UNLIMITED,
        paged=a.block_table is not None,
        codes=a.codes,
    )
    blocks = -(-rows // config.block_m) * a.batch * a.nheads_kv * -(-a.head_dim_v // config.slab)
    parts = min(a.num_splits or count_splits(config, blocks, a.seqlen_k, builder.sms), THREADS)
    lse = builder.empty(a.lse_shape, a.lse_dtype, "lse") if a.lse is None else a.lse
    config = replace(
        config,
        split=parts > 1,
        scores=a.features(sinks=parts == 1),
        wide_out=parts == 1 and a.q.itemsize < a.out.itemsize,
        wide_lse=parts == 1 and config.itemsize < lse.itemsize,
    )
    target, target_lse = a.out, lse
    if config.split:
        dtype = np.float64 if config.itemsize == 8 else np.float32
        entries, *rows_of_out = a.out.shape  # packed sequences: one
        target = builder.empty((parts * entries, *rows_of_out), dtype, "parts of out")
        target_lse = builder.empty((2 * parts * entries, *lse.shape[1:]), dtype, "maxima and sums of parts")
    scales = [0 if x is None else x for x in (a.k_scale, a.v_scale)]
    arrays = (a.q, a.k, a.v, target, target_lse, sequences, *scales, *score_arrays(a, config.scores.sinks))
    scale = scale if config.in_powers_of_e else scale * LOG2E
    arguments = (*arrays, scale, *numbers, left, right, a.block_q, a.block_k, parts)
    builder.launch(forward_kernel(config), (blocks * parts,), (THREADS,), arguments)
    if config.split:
        kernel = combine_kernel(a.out.dtype.name, a.sinks is not None, lse.dtype.name)
        grid = (math.prod(a.lse_shape),)
        sinks = 0 if a.sinks is None else a.sinks
        builder.launch(kernel, grid, (THREADS,), (target, target_lse, a.out, lse, sinks))


def sequences_of(a: Attention, builder: Builder) -> Tensor:
    """The table of sequences: a constant, or written by a kernel from lengths that only the device knows."""
    if a.known_lengths:
        return builder.constant(sequence_table(a), "sequences")
    from gpu_ops.kernels.attention.numba_cuda.sequences import THREADS, packed_kernel, used_kernel

    table = builder.empty((a.batch, 4), np.int64, "sequences")
    grid = (-(-a.batch // THREADS),)
    if a.packed:
        kernel = packed_kernel(paged=a.block_table is not None, used=a.seqused_k is not None)
        lengths = (*(*a.cu_seqlens, 0)[:2], 0 if a.seqused_k is None else a.seqused_k)
        builder.launch(kernel, grid, (THREADS,), (*lengths, table))
    else:
        builder.launch(used_kernel(), grid, (THREADS,), (a.seqused_k, a.seqlen_q, table))
    return table


def score_arrays(a: Attention, with_sinks: bool) -> list[Tensor | Dynamic | int]:
    """Block table, slopes, sinks, bias, visible blocks (broadcast by strides of 0) and seed; 0 where absent."""
    slopes, bias, visible = a.alibi_slopes, a.bias, a.visible
    if slopes is not None:
        slopes = slopes.broadcast_to((a.batch, a.nheads))
    if bias is not None:
        bias = bias.broadcast_to((a.batch, a.nheads, a.seqlen_q, a.seqlen_k))
    if visible is not None:
        blocks = -(-a.seqlen_q // a.block_q), -(-a.seqlen_k // a.block_k)
        visible = visible.broadcast_to((a.batch, a.nheads, *blocks)).view(np.uint8)
    arrays = (a.block_table, slopes, a.sinks if with_sinks else None, bias, visible, a.dropout_seed)
    return [0 if x is None else x for x in arrays]


def numba_variants() -> Iterator[Variant]:
    """Most commonly used kernels."""
    from gpu_ops.kernels.attention.numba_cuda.config import THREADS, select_config
    from gpu_ops.kernels.attention.numba_cuda.forward import forward_kernel
    from gpu_ops.kernels.attention.numba_cuda.merge import combine_kernel

    for config in (
        select_config("bfloat16", 128, 128, rows=4096, masked=True),  # 254 registers, the most of all
        select_config("float16", 128, 128, rows=4, paged=True, split=True),
        select_config("bfloat16", 128, 128, rows=4096, masked=True, paged=True, codes="uint8"),
    ):
        yield Variant(forward_kernel(config), THREADS)
    yield Variant(combine_kernel("float16", False, "float32"), THREADS)
