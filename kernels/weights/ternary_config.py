"""Ternary matmul on GPUs: choice of kernel, tile, number of blocks. Pure Python; needs no GPU.

few tokens    ternary_gemv: every block quantises the tokens again, one launch
more          ternary_quantize_tokens, then ternary_gemm on tensor cores
gradient      ternary_backward

Results too small to reach all SMs have their sums divided: exactly, if they are integers, and in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_ops.kernels.compiler.cubin import RESERVED

__all__ = [
    "GEMV_SHARED",
    "UNIT",
    "BackwardTile",
    "GemmConfig",
    "GemvConfig",
    "backward_config",
    "backward_tiles",
    "gemm_config",
    "gemm_configs",
    "gemv_config",
    "gemv_configs",
]

UNIT = 64  # codes in 16 bytes: rows are padded to it, and groups are multiples of it
_STEP = 2048  # codes that a warp of the GEMV reads of a row at a time

# Tokens up to | rows that a warp of the GEMV may take at a time, best first. More rows share the activations that
# they use; tokens times rows times four sums are the registers, 75 (three blocks of an SM) to 120 (two).
_GEMV = ((1, (4, 2, 1)), (2, (4, 2, 1)), (4, (2, 1)))
_GEMV_WARPS = 8
GEMV_SHARED = 64 * 1024  # bytes of q; K up to 65536 of one token, 16384 of four


@dataclass(frozen=True)
class GemvConfig:
    """Tokens and rows at a time, the grid of blocks of 256 threads, and the number of warps that share a row."""

    tokens: int
    rows: int
    grid: int
    shared_bytes: int
    shares: int = 1

    @property
    def threads(self) -> int:
        return 32 * _GEMV_WARPS


def gemv_config(tokens: int, n: int, k: int, groups: int, *, sms: int) -> GemvConfig | None:
    """Configuration of the GEMV for a problem; None if there are too many tokens, or too long ones.

    If one row per warp leaves half of the SMs without a block, up to all warps of a block share a row.
    """
    steps = -(-k // _STEP)
    for limit, choices in _GEMV:
        if tokens > limit:
            continue
        shared = limit * _STEP * steps + (4 * limit * _STEP * steps // UNIT if groups > 1 else 0)
        if shared > GEMV_SHARED:
            return None
        resident = sms * (3 if limit == 1 else 2)
        for rows in choices:
            blocks = -(-n // (_GEMV_WARPS * rows))
            if 2 * blocks >= 3 * sms or rows == 1:  # half of the SMs have two blocks at least
                shares = _power_of_two(min(_GEMV_WARPS, steps, sms // blocks))
                if shares > 1:
                    return GemvConfig(limit, 1, -(-n * shares // _GEMV_WARPS), shared, shares)
                waves = -(-blocks // resident)
                return GemvConfig(limit, rows, -(-blocks // waves), shared)
    return None


def _power_of_two(most: int) -> int:
    return 1 << most.bit_length() - 1 if most > 0 else 1


def gemv_configs() -> Iterator[tuple[int, int, bool]]:
    """(tokens, rows, whether warps share a row) of every GEMV."""
    for tokens, choices in _GEMV:
        for rows in choices:
            yield tokens, rows, False
        yield tokens, 1, True


@dataclass(frozen=True)
class GemmConfig:
    """A block computes block_n rows of weights by block_m tokens, ``units`` of 64 along K in each of its stages."""

    block_n: int
    block_m: int
    units: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_m * self.warps_k

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory with activations of ``itemsize`` bytes: stages with gaps, or the result that uses them."""
        weights = self.units * self.block_n * 16 + 128
        activations = self.units * (self.block_m * UNIT * itemsize + 64)
        return max(self.stages * (weights + activations), self.block_m * (self.block_n + 4) * 4)

    def blocks(self, tokens: int, n: int) -> int:
        return -(-tokens // self.block_m) * -(-n // self.block_n)


@dataclass(frozen=True)
class _Row:
    """Tile for up to ``tokens`` tokens; ``large``: only without groups, and if it reaches every SM."""

    tile: GemmConfig
    tokens: int | None = None
    large: bool = False


# By bytes of an activation; the first that a problem may take. block_n, block_m, units, warps (n, m, k), stages.
#
# Few tokens: the weights are the traffic. 32 rows make 128 blocks of N = 4096; four warps share them and alternate
# along K. At least 3 x 12 KB are in flight per block, of which three or four fit on an SM of sm_80 and sm_90.
# Many tokens: 64 x 32 per warp; each word is unpacked in four warps, 7 instructions for 32 of its products.
# Otherwise 32 x 32 per warp, 64 registers of sums with groups.
_GEMM = {
    1: (
        _Row(GemmConfig(32, 16, 8, 1, 1, 4, 4), 16),
        _Row(GemmConfig(32, 32, 4, 1, 1, 4, 4), 32),
        _Row(GemmConfig(128, 128, 2, 2, 4, 1, 3), large=True),
        _Row(GemmConfig(64, 64, 2, 2, 2, 1, 4)),
    ),
    2: (
        _Row(GemmConfig(32, 16, 4, 1, 1, 4, 4), 16),
        _Row(GemmConfig(32, 32, 4, 1, 1, 4, 3), 32),
        _Row(GemmConfig(128, 128, 1, 2, 4, 1, 3), large=True),
        _Row(GemmConfig(64, 64, 1, 2, 2, 1, 4)),
    ),
    4: (
        _Row(GemmConfig(32, 16, 4, 1, 1, 4, 3), 16),
        _Row(GemmConfig(32, 32, 4, 1, 1, 4, 2), 32),
        _Row(GemmConfig(64, 64, 1, 2, 2, 1, 4)),
    ),
}


def gemm_config(
    tokens: int, n: int, k: int, itemsize: int, *, grouped: bool, sms: int, smem_per_block_optin: int
) -> tuple[GemmConfig, int]:
    """Tile for a problem and number of parts of K; ``itemsize``: bytes of an activation."""
    for row in _GEMM[itemsize]:
        if row.tokens is not None and tokens > row.tokens:
            continue
        if row.large and (grouped or row.tile.blocks(tokens, n) < sms):
            continue
        tile = _staged(row.tile, itemsize, smem_per_block_optin)
        block_bytes = k * (tile.block_n // 4 + tile.block_m * itemsize)
        steps = -(-k // (tile.units * UNIT))
        return tile, _splits(tile.blocks(tokens, n), steps // tile.stages, block_bytes, sms)
    raise AssertionError("the last row takes every problem")


def gemm_configs(itemsize: int, *, grouped: bool, smem_per_block_optin: int) -> Iterator[GemmConfig]:
    """Every tile that :func:`gemm_config` may choose."""
    for row in _GEMM[itemsize]:
        if not (row.large and grouped):
            yield _staged(row.tile, itemsize, smem_per_block_optin)


def _staged(tile: GemmConfig, itemsize: int, smem_per_block_optin: int) -> GemmConfig:
    """Tile with fewer stages if an SM then holds two blocks: its 100 KB on sm_86, sm_89 and sm_120."""
    for stages in range(tile.stages, 1, -1):
        fewer = replace(tile, stages=stages)
        if 2 * (fewer.shared_bytes(itemsize) + RESERVED) <= smem_per_block_optin + RESERVED:
            return fewer
    return tile


_MOST_SPLITS = 16
_SECOND_LAUNCH = 1 << 18  # bytes that an SM gets from L2 in 2 us, 64 a clock


def _splits(blocks: int, most: int, block_bytes: int, sms: int) -> int:
    """Parts of the sums, at most ``most``: more than one if SMs are idle and blocks read more than a launch costs."""
    splits = min(sms // blocks, most, _MOST_SPLITS)
    return splits if splits > 1 and block_bytes * (splits - 1) // splits > _SECOND_LAUNCH else 1


@dataclass(frozen=True)
class BackwardTile:
    """A block computes block_m tokens by 64 columns for each of its ``warps_k``; ``stages`` of rows of weights."""

    block_m: int
    warps_m: int
    warps_k: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_k

    @property
    def block_k(self) -> int:
        return UNIT * self.warps_k

    def block_n(self, itemsize: int) -> int:
        """Rows of weights at a time: 64 bytes of each token's gradient."""
        return 64 // itemsize

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the stages: gradients, codes and scales with their gaps."""
        block_n = self.block_n(itemsize)
        weights = self.warps_k * block_n * 16 + 128
        scales = block_n * 4 + (128 // self.warps_k - block_n * 4) % 128
        return self.stages * (self.block_m * 64 + weights + self.warps_k * scales)

    def blocks(self, tokens: int, k: int) -> int:
        return -(-tokens // self.block_m) * -(-k // self.block_k)


# Best first. A warp decodes 64 columns for all of its tokens, so more tokens cost less each. 16 bits: 64, 32 and 32
# tokens per warp; float32, held in two parts: 32.
_BACKWARD = {
    2: (BackwardTile(128, 2, 2, 4), BackwardTile(64, 2, 2, 4), BackwardTile(32, 1, 4, 4)),
    4: (BackwardTile(64, 2, 2, 4), BackwardTile(32, 1, 4, 4)),
}


def backward_config(tokens: int, n: int, k: int, itemsize: int, *, sms: int) -> tuple[BackwardTile, int]:
    """Tile of the gradient, the largest that is full and reaches half of the SMs, and number of parts of N."""
    tiles = [t for t in _BACKWARD[itemsize] if t.block_m < 2 * tokens] or [_BACKWARD[itemsize][-1]]
    tile = next((t for t in tiles if 2 * t.blocks(tokens, k) > sms), tiles[-1])
    block_bytes = n * (tile.block_m * itemsize + tile.block_k // 4)
    steps = -(-n // tile.block_n(itemsize))
    return tile, _splits(tile.blocks(tokens, k), steps // tile.stages, block_bytes, sms)


def backward_tiles(itemsize: int) -> tuple[BackwardTile, ...]:
    """Every tile that :func:`backward_config` may choose."""
    return _BACKWARD[itemsize]
