"""Launches the Numba attention kernels: raw device arrays in, results in ``out`` and ``lse``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpu_ops.kernels.numba_cuda.attention import forward_kernel
from gpu_ops.kernels.numba_cuda.attention_combine import combine_kernel
from gpu_ops.kernels.numba_cuda.attention_config import LOG2E, THREADS, count_splits, select_config

__all__ = ["UNLIMITED", "forward"]

UNLIMITED = 1 << 29  # an unlimited window; sums of three lengths still fit in 31 bits

Array = Any  # of the device: numpy.ndarray or cupy.ndarray


def forward(
    device: Any,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    sequences: Array,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    left: int = UNLIMITED,
    right: int = UNLIMITED,
    softcap: float = 0.0,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    visible: Array | None = None,
    block_q: int = 1,
    block_k: int = 1,
    block_table: Array | None = None,
    num_splits: int = 1,
) -> None:
    """Shapes as in :func:`.attention.forward_kernel`; slopes, bias and ``visible`` (bool) are already broadcast.

    ``right``: 0 for causal. ``num_splits``: parts of the keys, or 0 to fill the device. Splitting needs one batch
    entry per sequence.
    """
    batch, nheads_kv = len(sequences), k.shape[2]
    group = q.shape[2] // nheads_kv
    rows = group * max_seqlen_q
    if batch * rows == 0:
        return
    left, right = min(left, UNLIMITED), min(right, UNLIMITED)
    features = {
        "masked": left < UNLIMITED or right < UNLIMITED,
        "softcap": softcap > 0,
        "alibi": alibi_slopes is not None,
        "block_mask": visible is not None,
        "paged": block_table is not None,
    }
    config = select_config(
        q.dtype.name, q.shape[3], v.shape[3], rows, bias="" if bias is None else bias.dtype.name, **features
    )
    blocks = -(-rows // config.block_m) * batch * nheads_kv * -(-v.shape[3] // config.slab)
    parts = min(num_splits or count_splits(config, blocks, max_seqlen_k, device.sms), THREADS)
    config = replace(config, split=parts > 1, sinks=sinks is not None and parts == 1)

    target, target_lse = out, lse
    if config.split:
        wide = np.float64 if config.itemsize == 8 else np.float32
        target = device.empty((parts * batch, *out.shape[1:]), wide, "parts of out")
        target_lse = device.empty((2 * parts * batch, *lse.shape[1:]), wide, "maxima and sums of parts")
    scale = softmax_scale if config.in_powers_of_e else softmax_scale * LOG2E
    scalars = (scale, softcap, left, right, block_q, block_k, parts)
    optional = (
        block_table,
        alibi_slopes,
        sinks if config.sinks else None,
        bias,
        None if visible is None else visible.view(np.uint8),
    )
    arrays = (q, k, v, target, target_lse, sequences)
    absent = (0 if array is None else array for array in optional)
    device.launch(forward_kernel(config), (blocks * parts,), (THREADS,), (*arrays, *absent, *scalars))
    if config.split:
        grid = (batch * max_seqlen_q * q.shape[2],)
        args = (target, target_lse, out, lse, 0 if sinks is None else sinks)
        device.launch(combine_kernel(q.dtype.name, sinks is not None), grid, (THREADS,), args)
