"""The CUDA C++ kernels of attention backward, by their macros: ``backward_*.cu``."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_ops.kernels.attention.backward_config import (
    BackwardTile,
    bias_shared_bytes,
    select_bias_tile,
    select_tile,
    shared_bytes,
)
from gpu_ops.kernels.attention.scores import PLAIN
from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant

__all__ = ["ROW_THREADS", "bias_kernel", "main_kernel", "rows_kernel", "statistics_kernel", "variants"]

ROW_THREADS = 256  # of backward_statistics.cu and _rows.cu


def main_kernel(
    dtype: str, tile: BackwardTile, dims: tuple[int, int], mask: str, *, keys: bool, **macros: str | int
) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "HEAD_DIM": dims[0],
        "HEAD_DIM_V": dims[1],
        "ROWS": "kKeys" if keys else "kQueries",
        "BLOCK_M": tile.columns if keys else tile.rows,
        "BLOCK_N": tile.rows if keys else tile.columns,
        "WARPS_R": tile.warps_r,
        "WARPS_D": tile.warps_d,
        "STRIP": tile.strip,
        "STAGES": tile.stages,
        "MASK": mask,
        **PLAIN.macros(dtype),
        **dict.fromkeys(("VARLEN", "ADD_DQ", "PARTS", "WIDE_LSE"), 0),
        "GRADS": "kPlain",
        **macros,
    }
    return CudaKernel("attention/backward_sm80", "attention_backward", tuple(defines.items()))


def bias_kernel(
    dtype: str, tile: BackwardTile, dims: tuple[int, int], mask: str, **macros: str | int
) -> CudaKernel:
    kernel = main_kernel(dtype, tile, dims, mask, keys=False, **macros)
    return CudaKernel("attention/backward_bias", "attention_backward_bias", kernel.defines)


def statistics_kernel(dtype: str, mask: str, **macros: str | int) -> CudaKernel:
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "OUT": dtype,
        "MASK": mask,
        **PLAIN.macros(dtype),
        **dict.fromkeys(("VARLEN", "WIDE_LSE", "DELTA", "WIDE_DOUT"), 0),
        **macros,
    }
    return CudaKernel(
        "attention/backward_statistics", "attention_backward_statistics", tuple(defines.items())
    )


def rows_kernel(what: str, **macros: str | int) -> CudaKernel:
    defines = {"VARLEN": 0, "WIDE_LSE": 0, "ROWS": "kQ", "COLUMNS": 32, "GRADS": "kPlain", **macros}
    return CudaKernel("attention/backward_rows", f"attention_backward_{what}", tuple(defines.items()))


def variants(arch: str) -> Iterator[Variant]:
    """Most commonly used kernels; all combinations of options would be thousands."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has neither bfloat16 nor cp.async
    smem_limit = smem_per_block_optin(arch)
    cases: tuple[tuple[str, int, str, dict[str, str | int]], ...] = (
        ("bf16", 64, "kCausal", {"ADD_DQ": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "VARLEN": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "VARLEN": 1, "PARTS": 1}),
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "DROPOUT": 1}),
        ("bf16", 128, "kCausal", {}),  # dq of the deterministic pass
        ("bf16", 128, "kCausal", {"ADD_DQ": 1, "BIAS": "kSame"}),
        ("f16", 128, "kNone", {"ADD_DQ": 1}),
        ("bf16", 256, "kNone", {"ADD_DQ": 1}),
        ("f32", 64, "kCausal", {"ADD_DQ": 1}),
        ("f32", 128, "kNone", {"ADD_DQ": 1}),
    )
    for dtype, head_dim, mask, macros in cases:
        itemsize, dims, keys = 4 if dtype == "f32" else 2, (head_dim, head_dim), "ADD_DQ" in macros
        tile = select_tile(itemsize, *dims, smem_limit, options=int("VARLEN" in macros or "BIAS" in macros))
        kernel = main_kernel(dtype, tile, dims, mask, keys=keys, **macros)
        yield Variant(kernel, tile.threads, shared_bytes(tile, itemsize, *dims, keys=keys))
    tile = select_bias_tile(2, 128, 128, smem_limit)
    kernel = bias_kernel("bf16", tile, (128, 128), "kCausal", BIAS="kSame")
    yield Variant(kernel, tile.threads, bias_shared_bytes(tile, 2, 128, 128))
    rows = (rows_kernel(what, DTYPE="bf16", COLUMNS=128) for what in ("rows", "sinks"))
    of_statistics = (statistics_kernel("bf16", "kCausal", BIAS=bias) for bias in ("kNone", "kSame"))
    yield from (Variant(kernel, ROW_THREADS) for kernel in (*of_statistics, *rows))
