"""Run one variant of the CUDA C++ attention kernel on the emulator; the caller makes every choice of the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_ops import emulator
from gpu_ops.kernels.attention.problem import ATTENTION_SHAPE, UNLIMITED, shared_bytes
from gpu_ops.kernels.compiler.jit import CudaKernel, compile_kernel

NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
NULL = 0


@dataclass(frozen=True)
class Tiles:
    """Tile shape of a block."""

    block_m: int = 64
    block_n: int = 64
    warps_m: int = 4
    warps_n: int = 1
    value_parts: int = 1
    one_k: bool = False


@dataclass
class Run:
    """Results of a launch and its profiles."""

    out: np.ndarray
    lse: np.ndarray
    profiles: list[emulator.Profile]


def variant(tiles: Tiles, dtype: Any, head_dim: int, head_dim_v: int, **macros: Any) -> CudaKernel:
    """Kernel for these sizes; macros that are not passed are off."""
    part = -(-head_dim_v // tiles.value_parts)
    defines = {
        **dict.fromkeys(("DTYPE", "PAGE_DTYPE", "OUT"), NAMES[np.dtype(dtype).name]),
        "HEAD_DIM": -(-head_dim // 32) * 32,
        "HEAD_DIM_V": -(-part // 32) * 32,
        "VALUE_PARTS": tiles.value_parts,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WARPS_M": tiles.warps_m,
        "WARPS_N": tiles.warps_n,
        "ONE_K": int(tiles.one_k),
        "MASK": "kNone",
        "BIAS": "kNone",
        **dict.fromkeys(("SOFTCAP", "ALIBI", "SINKS", "BLOCK_MASK", "VARLEN", "SEQUSED_K", "PAGED"), 0),
        **dict.fromkeys(("PACK_GQA", "SPLIT", "WIDE_LSE", "DROPOUT"), 0),
    }
    assert set(macros) <= set(defines)
    return CudaKernel("attention/forward_sm80", "attention_forward", tuple((defines | macros).items()))


def elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(s // itemsize for s in strides)


def bits(x: np.ndarray, name: str, written: bool = True) -> emulator.Buffer:
    raw = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    return emulator.Buffer(raw, name, written)


def run_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    block_mask: Any = None,
    layout: str = "bshd",
    cu_seqlens: tuple[np.ndarray, np.ndarray] | None = None,
    seqused_k: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    max_seqlen_q: int = 0,
    pack_gqa: bool = False,
    num_splits: int = 1,
    tiles: Tiles | None = None,
    arch: str = "sm_80",
) -> Run:
    """Attention of "bshd" or "bhsd" arrays, or of (total, nheads, head_dim) arrays with ``cu_seqlens``."""
    tiles = tiles or Tiles()
    if cu_seqlens is not None:
        q, k, v = q[None], k[None], v[None]
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    batch = q.shape[0] if cu_seqlens is None else len(cu_seqlens[0]) - 1
    rows, nheads, head_dim = q.shape[1:]
    seqlen_q = rows if cu_seqlens is None else max_seqlen_q
    seqlen_k, nheads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    split = num_splits > 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    log2e = float(np.log2(np.e))

    left, right = (UNLIMITED if side < 0 else min(side, UNLIMITED) for side in window_size)
    right = min(right, 0) if causal else right
    mask = "kLocal" if left < UNLIMITED else "kCausal" if right < UNLIMITED else "kNone"
    kernel = variant(
        tiles,
        q.dtype,
        head_dim,
        head_dim_v,
        MASK=mask,
        SOFTCAP=int(softcap > 0),
        ALIBI=int(alibi_slopes is not None),
        SINKS=int(sinks is not None),
        BIAS="kNone" if bias is None else "kFloat" if bias.dtype == np.float32 else "kSame",
        BLOCK_MASK=int(block_mask is not None),
        VARLEN=int(cu_seqlens is not None),
        SEQUSED_K=int(seqused_k is not None),
        PAGED=int(block_table is not None),
        PACK_GQA=int(pack_gqa),
        SPLIT=int(split),
    )

    out = np.full((q.shape[0], rows, nheads, head_dim_v), np.nan, q.dtype)
    if layout == "bhsd":
        out = np.ascontiguousarray(out.swapaxes(1, 2)).swapaxes(1, 2)
    lse = np.full((batch if cu_seqlens is None else 1, nheads, rows), np.nan, np.float32)
    parts = np.full((num_splits, batch, nheads, rows, head_dim_v), np.nan, np.float32)
    part_lse = np.full((2, num_splits, *lse.shape), np.nan, np.float32)

    shape = np.zeros((), ATTENTION_SHAPE)
    stored = parts[0].swapaxes(1, 2) if split else out
    for name, x in {"q": q, "k": k, "v": v, "out": stored}.items():
        assert x.strides[3] == x.itemsize or x.size == 0
        of_batch, of_row, of_head = elements(x.strides[:3], x.itemsize)
        shape[name] = (0 if cu_seqlens is not None else of_batch, of_row, of_head)
    shape["lse_batch"] = 0 if cu_seqlens is not None else nheads * rows
    shape["lse_head"] = rows
    shape["out_split"], shape["lse_split"] = parts[0].size, lse.size
    shape["seqlen_q"], shape["seqlen_k"] = seqlen_q, seqlen_k
    shape["nheads"], shape["group"] = nheads, nheads // nheads_kv
    shape["head_dim"], shape["head_dim_v"] = head_dim, head_dim_v
    shape["window_left"], shape["window_right"], shape["num_splits"] = left, right, num_splits
    scores = shape["scores"]
    scores["scale_log2"] = max(abs(scale) * log2e, 1e-30)
    if softcap:
        scores["softcap_in"], scores["softcap_log2"] = abs(scale) / softcap, softcap * log2e
    scores["negate"] = scale < 0
    visible: Any = NULL
    if bias is not None:
        full = np.broadcast_to(bias, (batch, nheads, rows, seqlen_k))
        shape["bias"] = elements(full.strides, bias.itemsize)
    if block_mask is not None:
        visible = np.ascontiguousarray(block_mask.visible).view(np.uint8)
        blocks = block_mask.num_blocks(rows, seqlen_k)
        shape["block_mask"] = np.broadcast_to(visible, (batch, nheads, *blocks)).strides
        shape["block_q"], shape["block_k"] = block_mask.block_q, block_mask.block_k
    if block_table is not None:
        shape["page_size"], shape["block_table_batch"] = k.shape[1], block_table.shape[1]
    if alibi_slopes is not None:
        shape["alibi_batch"] = nheads if alibi_slopes.ndim == 2 else 0

    q_rows = seqlen_q * (nheads // nheads_kv if pack_gqa else 1)
    grid = (
        -(-q_rows // tiles.block_m) * num_splits,
        (nheads_kv if pack_gqa else nheads) * tiles.value_parts,
        batch,
    )
    defines = dict(kernel.defines)
    shared = shared_bytes(
        q.itemsize,
        tiles.block_m,
        tiles.block_n,
        tiles.warps_m,
        tiles.warps_n,
        int(defines["HEAD_DIM"]),
        int(defines["HEAD_DIM_V"]),
        one_k=tiles.one_k,
        split=split,
    )
    arguments = [
        *(NULL if x is None else np.ascontiguousarray(x) for x in (*(cu_seqlens or (None, None)), seqused_k)),
        *(NULL if x is None else x for x in (block_table, None, None, sinks, alibi_slopes)),
        NULL if bias is None else bits(np.ascontiguousarray(bias), "bias"),
        visible,
        NULL,  # the seed of dropout
    ]
    compiled = compile_kernel(kernel, arch)
    with emulator.record() as profiles:
        emulator.launch(
            compiled.ptx,
            compiled.entry,
            grid,
            32 * tiles.warps_m * tiles.warps_n,
            [
                *(bits(x, name) for name, x in {"q": q, "k": k, "v": v}.items()),
                bits(parts if split else out, "out", written=False),
                bits(part_lse if split else lse, "lse", written=False),
                *arguments,
                shape.tobytes(),
            ],
            shared=shared,
            arch=arch,
        )
        if split:
            combine(parts, part_lse, sinks, out, lse, shape, arch)
    result = out[0] if cu_seqlens is not None else out.swapaxes(1, 2) if layout == "bhsd" else out
    return Run(result, lse[0] if cu_seqlens is not None else lse, profiles)


def combine(
    parts: np.ndarray,
    part_lse: np.ndarray,
    sinks: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
    shape: np.ndarray,
    arch: str,
) -> None:
    shape = shape.copy()
    shape["out"] = elements(out.strides[:3], out.itemsize)
    defines = (("DTYPE", NAMES[out.dtype.name]), ("SINKS", int(sinks is not None)), ("WIDE_LSE", 0))
    compiled = compile_kernel(CudaKernel("attention/combine", "attention_combine", defines), arch)
    emulator.launch(
        compiled.ptx,
        compiled.entry,
        -(-lse.size // 4),
        128,
        [
            bits(parts, "partial"),
            bits(part_lse, "row_max"),
            NULL if sinks is None else sinks,
            bits(out, "out", written=False),
            bits(lse, "lse", written=False),
            lse.size,
            shape.tobytes(),
        ],
        arch=arch,
    )
