"""Launch of ``packed_gemm.cu``: products of more tokens than ``packed_gemv.cu`` takes, without an unpacked matrix.

It has the configuration, and so the bits, of the kernel that multiplies an unpacked matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu_ops.kernels.compiler.cubin import smem_per_block_optin
from gpu_ops.kernels.compiler.jit import CudaKernel, Variant
from gpu_ops.kernels.compiler.kernel import Define
from gpu_ops.kernels.gemm import cublas
from gpu_ops.kernels.gemm.args import Gemm, Operand
from gpu_ops.kernels.gemm.config import DeviceLimits, MatmulConfig, MatmulProblem, select_config
from gpu_ops.kernels.gemm.gemm import launch_tiles, tiles_config, tiles_defines
from gpu_ops.kernels.program import Builder, Layout, Tensor

__all__ = ["block_variants", "launch", "takes"]

# Tiles of tokens. Each decodes all weights: 5 to 9 instructions of a lane, where an SM issues 128 per clock. Writing
# and reading a weight of 2 bytes takes as long as 38 on A100 and H100, longer on other cards. With two tiles half of
# that is left for what the products do not hide.
_TILES = 2


def takes(builder: Builder, g: Gemm) -> bool:
    """Whether ``packed_gemm.cu`` computes a product; otherwise the matrix is unpacked. ``g.b`` is empty."""
    tiles = -(-len(g.out[0]) // tiles_config(builder, g).tile.block_m)
    return tiles <= _TILES and not cublas.takes(builder, g)


def launch(builder: Builder, g: Gemm, weights: tuple[Any, ...], block: tuple[Define, ...]) -> None:
    """Launch the kernel. ``weights``: panels and values of codes; ``block``: macros of ``packed.cuh``."""
    launch_tiles(builder, g, (g.a[0].array, *weights), (0, 0), partial(_kernel, block))


def _kernel(block: tuple[Define, ...], g: Gemm, config: MatmulConfig, out: str) -> CudaKernel:
    return CudaKernel("weights/packed_gemm", "packed_gemm", tiles_defines(g, config, out, dict(block)))


def block_variants(arch: str, block: tuple[Define, ...], dtype: str) -> Iterator[Variant]:
    """Kernels for a matrix of an 8 B model, of which each takes other tiles."""
    if int(arch[3:].rstrip("af")) < 80:
        return  # sm_75 has no cp.async
    limits, rows, cols = DeviceLimits(100, smem_per_block_optin(arch)), 14336, 4096
    for tokens in (32, 128):
        x, y = (Tensor.of("", Layout.contiguous((tokens, n), dtype)) for n in (cols, rows))
        config = select_config(MatmulProblem(x.itemsize, tokens, rows, cols), limits)
        kernel = _kernel(block, Gemm((Operand(x),), (), (y,)), config, dtype)
        yield Variant(kernel, config.threads, config.shared_bytes)
