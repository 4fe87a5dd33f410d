"""By-value arguments of the attention kernels, forward and backward; shared memory of the forward kernel."""

from __future__ import annotations

import numpy as np

from gpu_ops.kernels.attention.scores import CUDA_SCORES

__all__ = [
    "ATTENTION_SHAPE",
    "BACKWARD_ROWS",
    "BACKWARD_SHAPE",
    "q_in_registers",
    "shared_bytes",
]

_ROW_STRIDES = np.dtype([("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)

# AttentionShape of shape.cuh.
ATTENTION_SHAPE = np.dtype(
    [
        *[(name, _ROW_STRIDES) for name in ("q", "k", "v", "out", "k_scale", "v_scale")],
        *[(name, "i8") for name in ("lse_batch", "lse_head", "out_split", "lse_split")],
        *[(name, "i8", (4,)) for name in ("bias", "block_mask")],
        *[(name, "i8") for name in ("block_table_batch", "alibi_batch")],
        ("seed", "u8"),
        *[(name, "i4") for name in ("seqlen_q", "seqlen_k", "nheads", "group", "head_dim", "head_dim_v")],
        *[(name, "i4") for name in ("window_left", "window_right", "block_q", "block_k", "page_size")],
        ("num_splits", "i4"),
        ("scores", CUDA_SCORES),
    ],
    align=True,
)

BACKWARD_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

# BackwardShape of backward_shape.cuh.
BACKWARD_SHAPE = np.dtype(
    [
        *[(name, _ROW_STRIDES) for name in (*BACKWARD_ROWS, "wide_dout")],
        *[(name, "i8", (3,)) for name in ("lse", "delta")],
        *[(name, "i8", (4,)) for name in ("bias", "dbias", "block_mask")],
        *[(name, "i8") for name in ("alibi_batch", "padded_batch", "padded_head")],
        *[(name, "i8") for name in ("padded_batch_k", "padded_head_k", "padded_part")],
        ("seed", "u8"),
        *[(name, "i4") for name in ("parts", "part_heads", "batch")],
        ("bias_shape", "i4", (4,)),
        *[(name, "i4") for name in ("seqlen_q", "seqlen_k", "nheads", "group", "head_dim", "head_dim_v")],
        *[(name, "i4") for name in ("window_left", "window_right", "block_q", "block_k")],
        ("scale", "f4"),
        ("scores", CUDA_SCORES),
    ],
    align=True,
)


def q_in_registers(
    itemsize: int, block_m: int, block_n: int, warps_m: int, warps_n: int, head_dim: int, head_dim_v: int
) -> bool:
    """Whether a warp keeps its rows of Q in registers, by the kernel's own rule."""
    slabs, steps = block_m // warps_m // 16, head_dim * itemsize // 32
    return itemsize == 2 and 4 * slabs * (block_n // warps_n // 8 + head_dim_v // 8 + steps) <= 160


def shared_bytes(
    itemsize: int,
    block_m: int,
    block_n: int,
    warps_m: int,
    warps_n: int,
    head_dim: int,
    head_dim_v: int,
    *,
    one_k: bool = False,
    split: bool = False,
    quantized: bool = False,
) -> int:
    """Dynamic shared memory of a block; head_dim and head_dim_v are the kernel's HEAD_DIM and HEAD_DIM_V.

    ``one_k``: K has one buffer. ``split``: sums are written in float, as they are where out is float32.
    ``quantized``: K and V are followed by their codes, a byte each, and the scales of the keys.
    """
    q, k, v = (
        itemsize * rows * columns
        for rows, columns in ((block_m, head_dim), (block_n, head_dim), (block_n, head_dim_v))
    )
    in_registers = q_in_registers(itemsize, block_m, block_n, warps_m, warps_n, head_dim, head_dim_v)
    tiles = k + v + (q if one_k else max(k, q) if in_registers else k + q)
    if quantized:
        codes = (k + v) // itemsize + max(4 * block_n, 128)
        tiles = codes + (max(k + v, q) if in_registers else k + v + q)
    partial = split or warps_n > 1  # sums are written in float, those of warps with their row statistics
    out = block_m * head_dim_v * (4 * warps_n if partial else itemsize)
    return max(tiles, out + (8 * warps_n * block_m if partial else 0))
