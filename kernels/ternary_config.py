"""Ternary matmul on GPUs: which kernel, which tile, how many blocks. Pure Python; needs no GPU.

few tokens    ternary_gemv: every block quantises the tokens for itself, one launch
more          ternary_quantize_tokens, then ternary_gemm on tensor cores
gradient      ternary_backward
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

UNIT = 64  # codes that a row is padded to, in 16 bytes
_STEP = 2048  # codes that a warp of the GEMV reads of a row at a time

# Tokens up to | rows that a warp of the GEMV may take at a time, best first. More rows share the activations that
# they meet; tokens times rows times four sums are the registers, 75 (three blocks of an SM) to 120 (two).
_GEMV = ((1, (4, 2, 1)), (2, (4, 2, 1)), (4, (2, 1)))
_GEMV_WARPS = 8
GEMV_SHARED = 64 * 1024  # bytes of q; K up to 65536 of one token, 16384 of four


@dataclass(frozen=True)
class GemvConfig:
    """Tokens and rows at a time, and the grid of blocks of 256 threads."""

    tokens: int
    rows: int
    grid: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * _GEMV_WARPS


def gemv_config(tokens: int, n: int, k: int, groups: int, *, sms: int) -> GemvConfig | None:
    """The GEMV for a problem; None where there are too many tokens, or too long ones."""
    padded = -(-k // _STEP) * _STEP
    for limit, choices in _GEMV:
        if tokens > limit:
            continue
        shared = limit * (padded + (4 * padded // UNIT if groups > 1 else 0))
        if shared > GEMV_SHARED:
            return None
        resident = sms * (3 if limit == 1 else 2)
        for rows in choices:
            blocks = -(-n // (_GEMV_WARPS * rows))
            if 2 * blocks >= 3 * sms or rows == 1:  # half of the SMs have two blocks at least
                waves = -(-blocks // resident)
                return GemvConfig(limit, rows, -(-blocks // waves), shared)
    return None


def gemv_configs() -> Iterator[tuple[int, int]]:
    """(tokens, rows) of every GEMV."""
    for tokens, choices in _GEMV:
        for rows in choices:
            yield tokens, rows


@dataclass(frozen=True)
class GemmConfig:
    """A block makes block_n rows of weights by block_m tokens, ``units`` of 64 along K in each of its stages."""

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
        """Of activations of ``itemsize`` bytes: the stages, gaps included, or the result that leaves through them."""
        weights = self.units * self.block_n * 16 + 128
        activations = self.units * (self.block_m * UNIT * itemsize + 64)
        return max(self.stages * (weights + activations), self.block_m * (self.block_n + 4) * 4)

    def blocks(self, tokens: int, n: int) -> int:
        return -(-tokens // self.block_m) * -(-n // self.block_n)


# block_n, block_m, units, warps (n, m, k), stages. Bytes of activations decide how many units a stage has.
#
# Few tokens: the weights are the traffic. 32 rows make 128 blocks of N = 4096; four warps share them and take turns
# along K. At least 3 x 12 KB are on the way per block, of which four fit on an SM.
_FEW: dict[int, dict[int, GemmConfig]] = {
    1: {16: GemmConfig(32, 16, 8, 1, 1, 4, 4), 32: GemmConfig(32, 32, 4, 1, 1, 4, 4)},
    2: {16: GemmConfig(32, 16, 4, 1, 1, 4, 4), 32: GemmConfig(32, 32, 4, 1, 1, 4, 3)},
    4: {16: GemmConfig(32, 16, 4, 1, 1, 4, 3), 32: GemmConfig(32, 32, 4, 1, 1, 4, 2)},
}
# 32 x 32 of a warp, 64 registers of sums with groups.
_MIDDLE = {itemsize: GemmConfig(64, 64, max(2 // itemsize, 1), 2, 2, 1, 4) for itemsize in (1, 2, 4)}
# 64 x 32 of a warp: each word is unpacked in four warps, 7 instructions for 32 of its products.
_LARGE = {itemsize: GemmConfig(128, 128, 2 // itemsize, 2, 4, 1, 3) for itemsize in (1, 2)}


def gemm_config(tokens: int, n: int, itemsize: int, *, grouped: bool, sms: int) -> GemmConfig:
    """The tile for a problem; ``itemsize``: bytes of an activation."""
    for limit, few in _FEW[itemsize].items():
        if tokens <= limit:
            return few
    large = None if grouped else _LARGE.get(itemsize)
    return large if large is not None and large.blocks(tokens, n) >= sms else _MIDDLE[itemsize]


def gemm_configs(itemsize: int, *, grouped: bool) -> Iterator[GemmConfig]:
    """Every tile that :func:`gemm_config` may choose."""
    yield from _FEW[itemsize].values()
    yield _MIDDLE[itemsize]
    if not grouped and itemsize in _LARGE:
        yield _LARGE[itemsize]


@dataclass(frozen=True)
class BackwardTile:
    """A block makes block_m tokens by 64 columns for each of its ``warps_k``; ``stages`` of rows of weights."""

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
        """Of the stages: gradients, codes with their gaps, scales."""
        block_n = self.block_n(itemsize)
        weights = self.warps_k * block_n * 16 + 128
        return self.stages * (self.block_m * 64 + weights + self.warps_k * block_n * 4)

    def blocks(self, tokens: int, k: int) -> int:
        return -(-tokens // self.block_m) * -(-k // self.block_k)


# Best first; a warp decodes 64 columns for all of its tokens, so that more of them cost less. 16 bits: 64, 32 and 32
# tokens of a warp; float32, held in two parts: 32.
_BACKWARD = {
    2: (BackwardTile(128, 2, 2, 4), BackwardTile(64, 2, 2, 4), BackwardTile(32, 1, 4, 4)),
    4: (BackwardTile(64, 2, 2, 4), BackwardTile(32, 1, 4, 4)),
}
_LEAST_STEPS = 8  # of a part of N: less, and the pipeline is never full
_MOST_SPLITS = 16


def backward_config(tokens: int, n: int, k: int, itemsize: int, *, sms: int) -> tuple[BackwardTile, int]:
    """The tile of the gradient and the parts of N: the largest tile that is full and reaches half of the SMs.

    Where none does, each block adds up a part of N.
    """
    tiles = [t for t in _BACKWARD[itemsize] if t.block_m < 2 * tokens] or [_BACKWARD[itemsize][-1]]
    tile = next((t for t in tiles if 2 * t.blocks(tokens, k) > sms), tiles[-1])
    steps = -(-n // tile.block_n(itemsize))
    splits = min(sms // tile.blocks(tokens, k), steps // _LEAST_STEPS, _MOST_SPLITS)
    return tile, max(splits, 1)


def backward_tiles(itemsize: int) -> tuple[BackwardTile, ...]:
    """Every tile that :func:`backward_config` may choose."""
    return _BACKWARD[itemsize]
